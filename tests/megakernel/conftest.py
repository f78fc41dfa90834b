"""Decoders small enough to run word by word, for several tests."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from megakernel.compile import compile_program
from megakernel.evaluate import Memory, network_of, run_requests
from megakernel.graph import Builder, Graph, Sizes
from megakernel.interpreter import DeviceMemory, Interpreter, device_memory
from megakernel.isa import GRANULE_ROWS, CommandKind, Task
from megakernel.mailbox import MAILBOX_BYTES, LeftRecord, Mailbox, Record, decode_record
from megakernel.numbers import round_bf16
from megakernel.program import Program
from megakernel.request import Request, encode_request
from megakernel.select import record_words
from megakernel.target import Target

Constants = dict[str, NDArray[np.float32]]


def tiny_graph(
    *,
    n_layers: int = 1,
    width: int = 128,
    wide: int = 256,
    n_positions: int = 80,
    n_cross_positions: int = 300,
    n_tokens: int = 100,
    mark_begin: int = 80,
    dumped_heads: tuple[int, ...] = (1,),
) -> Graph:
    """A decoder of transformer layers; more than one block of positions in both kinds of attention by default."""
    sizes = Sizes(
        width=width,
        head_size=64,
        n_layers=n_layers,
        n_positions=n_positions,
        n_cross_positions=n_cross_positions,
        n_tokens=n_tokens,
        end_token=mark_begin - 1,
        mark_begin=mark_begin,
    )
    n_heads = width // sizes.head_size
    step = Builder("tiny", sizes)
    x = step.embed("embedding", tokens="tokens", positions="positions")
    for i in range(n_layers):
        y = step.layer_norm(f"{i}.norm", x, gamma=f"{i}.norm.gamma", beta=f"{i}.norm.beta")
        y = step.linear(f"{i}.qkv", y, 3 * width, weight=f"{i}.qkv.weight", bias=f"{i}.qkv.bias")
        y = step.self_attention(f"{i}.attention", y, layer=i, n_heads=n_heads)
        y = step.linear(f"{i}.mix", y, width, weight=f"{i}.mix.weight", bias=f"{i}.mix.bias")
        x = step.add(f"{i}.after_attention", y, x)
        y = step.layer_norm(f"{i}.cross_norm", x, gamma=f"{i}.cross_norm.gamma", beta=f"{i}.cross_norm.beta")
        y = step.linear(f"{i}.q", y, width, weight=f"{i}.q.weight", bias=f"{i}.q.bias")
        y = step.cross_attention(f"{i}.cross", y, layer=i, n_heads=n_heads, dumped_heads=dumped_heads)
        y = step.linear(f"{i}.cross_mix", y, width, weight=f"{i}.cross_mix.weight", bias=f"{i}.cross_mix.bias")
        x = step.add(f"{i}.after_cross", y, x)
        y = step.layer_norm(f"{i}.wide_norm", x, gamma=f"{i}.wide_norm.gamma", beta=f"{i}.wide_norm.beta")
        y = step.linear(f"{i}.wide", y, wide, weight=f"{i}.wide.weight", bias=f"{i}.wide.bias")
        y = step.gelu(f"{i}.gelu", y)
        y = step.linear(f"{i}.narrow", y, width, weight=f"{i}.narrow.weight", bias=None)
        x = step.add(f"{i}.out", y, x)
    y = step.layer_norm("norm", x, gamma="norm.gamma", beta="norm.beta")
    step.select("select", step.head("head", y, weight="tokens"))
    return step.build()


def random_constants(graph: Graph, seed: int) -> Constants:
    """Weights of a size that keeps activations and logits near 1."""
    rng = np.random.default_rng(seed)
    return {name: _random(name, shape, rng) for name, shape in graph.constants.items()}


def _random(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.float32]:
    values = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("gamma"):
        return 1 + values * np.float32(0.1)
    if name.endswith(".weight"):
        return values * np.float32(shape[-1] ** -0.5)
    return values * np.float32(0.3)


@pytest.fixture(scope="session", name="tiny_graph")
def tiny_graph_fixture() -> Callable[..., Graph]:
    return tiny_graph


def large_graph() -> Graph:
    """As large as Whisper large-v3-turbo's decoder."""
    return tiny_graph(
        n_layers=4,
        width=1280,
        wide=5120,
        n_positions=448,
        n_cross_positions=1500,
        n_tokens=51_866,
        mark_begin=50_365,
        dumped_heads=(),
    )


@pytest.fixture(scope="session", name="large_graph")
def large_graph_fixture() -> Callable[[], Graph]:
    return large_graph


@pytest.fixture(scope="session", name="random_constants")
def random_constants_fixture() -> Callable[[Graph, int], Constants]:
    return random_constants


# ---------------------------------------------------------------------- compiled, to evaluate and to interpret


@cache
def folded_graph(n_layers: int) -> tuple[Graph, Constants]:
    graph = tiny_graph(n_layers=n_layers)
    return graph, random_constants(graph, n_layers)


@cache
def compiled(n_layers: int, n_sms: int, max_rows: int) -> Program:
    graph, _ = folded_graph(n_layers)
    shared_bytes = 101_376 if max_rows == 8 else 166_912
    return compile_program(graph, Target(f"{n_sms} SMs", "sm_80", n_sms, shared_bytes, max_rows))


@dataclass(frozen=True, slots=True, eq=False)
class Decoder:
    """A program with everything that it and the evaluation of its graph need, drawn from a seed."""

    program: Program
    constants: Constants
    bitmaps: NDArray[np.uint32]  # [n_rules, 2, words]
    cross_cache: NDArray[np.float32]  # [slot, layer, keys or values, head, n_cross_positions, head size] bfloat16

    def request(self, rng: random.Random, *, max_tokens: int = 3) -> Request:
        """Any request that the program has room for; seldom a long one."""
        sizes = self.program.sizes
        n_positions = rng.choice([1, 20, 20, 60, 256, sizes.n_cross_positions])
        n_head = rng.choice([5, 62, 66]) if rng.random() < 0.1 else rng.randint(1, 3)  # some beyond a block's border

        def tokens(n: int) -> tuple[int, ...]:
            return tuple(rng.randrange(sizes.n_tokens) for _ in range(n))

        return Request(
            head=tokens(n_head),
            max_tokens=rng.randint(1, max_tokens),
            n_positions=n_positions,
            prefix=tokens(rng.choice([0, 0, 1, 3])),
            draft=tokens(rng.choice([0, 0, 2, 6])),
            rules=rng.randrange(len(self.bitmaps)),
            markers=rng.random() < 0.5,
            max_first_mark=rng.randrange(sizes.n_tokens - sizes.mark_begin),
            watch_row=rng.choice([None, 0]),
            watch_token=rng.randrange(sizes.n_tokens),
            n_plain=rng.choice([None, n_positions // 2]),
            tail_bias=rng.uniform(-2, 2),
            inverse_temperature=rng.choice([0.0, 0.0, 1.5]),
            seed=rng.randrange(1 << 32),
        )

    def evaluate(self, requests: Sequence[Request]) -> tuple[list[Record], Memory]:
        """Records, all as of step 0, and caches, when slot i is asked ``requests[i]`` at once."""
        program, sizes = self.program, self.program.sizes
        empty = Memory.empty(sizes, program.n_score_heads)
        memory = Memory(empty.self_cache, self.cross_cache, empty.scores)
        network = network_of(program.ops, sizes, self.constants)
        told = run_requests(
            network, memory, requests, self.bitmaps, max_rows=program.target.max_rows, ranges=self.ranges
        )
        return [decode_record(record_words(emitted, step=0, sequence=1)) for emitted in told], memory

    @property
    def ranges(self) -> list[tuple[int, int]]:
        """First token and number of tokens of each SM."""
        n_tokens = self.program.sizes.n_tokens
        head = self.program.tasks[:, -2].astype(int)
        begins = head[:, Task.FIRST_GRANULE] * GRANULE_ROWS
        ends = begins + head[:, Task.N_GRANULES] * GRANULE_ROWS
        return [(int(begin), min(int(end), n_tokens) - int(begin)) for begin, end in zip(begins, ends, strict=True)]

    def device(self, program: Program | None = None, packed: Program | None = None) -> tuple[Interpreter, Mailbox]:
        """Another program may be run, on a memory that is packed for this one or for a third."""
        memory = device_memory(packed or self.program, self.constants, self.bitmaps, self.cross_cache)
        mailbox = np.zeros(MAILBOX_BYTES, np.uint8)
        return Interpreter(program or self.program, memory, mailbox), Mailbox(mailbox)

    def open(self, mailbox: Mailbox, slot: int, request: Request, ticket: int) -> None:
        """Give the command to the device."""
        words = encode_request(request, ticket=ticket, sizes=self.program.sizes, n_rules=len(self.bitmaps))
        mailbox.put_request(slot, words)
        mailbox.give(CommandKind.OPEN, slot=slot, ticket=ticket)

    def interpret(
        self,
        requests: Sequence[Request],
        seed: int,
        program: Program | None = None,
        packed: Program | None = None,
    ) -> tuple[list[Record], DeviceMemory]:
        """The same as ``evaluate``, by the packed program."""
        interpreter, mailbox = self.device(program, packed)
        for slot, request in enumerate(requests):
            self.open(mailbox, slot, request, slot)
        interpreter.launch(seed, max_steps=200)
        *records, last = mailbox.take_records()
        assert isinstance(last, LeftRecord)
        return [replace(record, step=0) for record in records], interpreter.memory


@pytest.fixture(scope="session")
def make_decoder() -> Callable[..., Decoder]:
    """``make_decoder(rng, n_layers=…, n_sms=…, max_rows=…)``; what is not given is drawn."""

    def make(rng: random.Random, **given: int) -> Decoder:
        n_layers, n_sms = given.get("n_layers", rng.choice([1, 1, 1, 2])), given.get("n_sms", rng.randint(2, 5))
        program = compiled(n_layers, n_sms, given.get("max_rows", rng.choice([8, 16])))
        sizes, draws = program.sizes, np.random.default_rng(rng.randrange(1 << 32))
        cross = (sizes.max_slots, n_layers, 2, sizes.width // 64, sizes.n_cross_positions, 64)
        bits = draws.random((2, 2, sizes.n_tokens)) < 0.2
        bits[..., sizes.end_token :] = False  # there is always something to pick
        bitmaps = np.packbits(np.pad(bits, [(0, 0), (0, 0), (0, -sizes.n_tokens % 32)]), axis=-1, bitorder="little")
        return Decoder(
            program=program,
            constants=folded_graph(n_layers)[1],
            bitmaps=np.ascontiguousarray(bitmaps).view(np.uint32),
            cross_cache=round_bf16(draws.standard_normal(cross, np.float32)),
        )

    return make
