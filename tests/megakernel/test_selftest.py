"""The reference of the test at load, and what it says of a wrong kernel. The device here is ``evaluate``."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megakernel.compile import compile_program
from megakernel.cubin import bitmap_words
from megakernel.errors import SelfTestError
from megakernel.evaluate import Memory, network_of, run_requests
from megakernel.graph import Graph
from megakernel.isa import RecordKind
from megakernel.mailbox import TokenRecord
from megakernel.program import Program
from megakernel.request import Request
from megakernel.selftest import compare
from megakernel.target import Target

Constants = dict[str, NDArray[np.float32]]
REQUEST = Request(head=(3, 1, 4, 1, 5), max_tokens=6, n_positions=3)


@pytest.fixture(scope="module")
def graph(tiny_graph: Callable[..., Graph]) -> Graph:
    return tiny_graph(n_layers=2)


@pytest.fixture(scope="module")
def program(graph: Graph) -> Program:
    return compile_program(graph, Target("five", "sm_90a", 5, 232_448))


@pytest.fixture(scope="module")
def constants(graph: Graph, random_constants: Callable[[Graph, int], Constants]) -> Constants:
    """With layers that weigh more than the token's own embedding, so that it shows what they do."""
    constants = random_constants(graph, 3)
    return {
        name: array * 4 if name.endswith(("mix.weight", "narrow.weight")) else array
        for name, array in constants.items()
    }


@pytest.fixture(scope="module")
def bitmaps(program: Program) -> NDArray[np.uint32]:
    bits = np.zeros((1, 2, bitmap_words(program.sizes.n_tokens)), np.uint32)
    bits[0, 0, 0], bits[0, 1, 1] = 0x0F0F0F0F, 0xFFFF
    return bits


@pytest.fixture(scope="module")
def memory(program: Program, constants: Constants) -> Memory:
    network = network_of(program.ops, program.sizes, constants)
    memory = Memory.empty(program.sizes, network.n_score_heads)
    cross = np.random.default_rng(4).standard_normal(memory.cross_cache.shape, np.float32)
    memory.cross_cache[:] = torch.from_numpy(cross).bfloat16().float().numpy()
    return memory


@pytest.fixture(scope="module")
def tokens(program: Program, constants: Constants, bitmaps: NDArray[np.uint32], memory: Memory) -> list[TokenRecord]:
    told = run_requests(network_of(program.ops, program.sizes, constants), memory, [REQUEST], bitmaps)
    return [
        TokenRecord(0, 1, each.token, float(each.value), each.extra, 0)
        for each in told
        if each.kind is RecordKind.TOKEN
    ]


def judge(
    program: Program, constants: Constants, bitmaps: NDArray[np.uint32], memory: Memory, tokens: list[TokenRecord]
) -> None:
    tensors = {name: torch.from_numpy(array) for name, array in constants.items()}
    cross = torch.from_numpy(memory.cross_cache[0, :, :, :, : REQUEST.n_positions])
    compare(program, tensors, bitmaps, REQUEST, tokens, cross)


def test_what_evaluate_writes_is_right(
    program: Program, constants: Constants, bitmaps: NDArray[np.uint32], memory: Memory, tokens: list[TokenRecord]
) -> None:
    assert len(tokens) == 6
    judge(program, constants, bitmaps, memory, tokens)


@pytest.mark.parametrize("wrong", [0, 1, 5])
def test_another_token_or_worth_is_not(
    wrong: int,
    program: Program,
    constants: Constants,
    bitmaps: NDArray[np.uint32],
    memory: Memory,
    tokens: list[TokenRecord],
) -> None:
    one = tokens[wrong]
    for changed in (
        replace(one, token=(one.token + 1) % 79),
        replace(one, log_probability=one.log_probability - 0.6),
        replace(one, log_probability=float("nan")),
    ):
        said = [*tokens[:wrong], changed, *tokens[wrong + 1 :]]
        with pytest.raises(SelfTestError, match=f"token {wrong} after 5 is {changed.token}"):
            judge(program, constants, bitmaps, memory, said)


@pytest.mark.parametrize("name", ["0.qkv.weight", "1.cross_mix.weight", "norm.beta", "1.narrow.weight", "positions"])
def test_a_kernel_that_reads_a_weight_wrongly_is_found_out(
    name: str,
    program: Program,
    constants: Constants,
    bitmaps: NDArray[np.uint32],
    memory: Memory,
    tokens: list[TokenRecord],
) -> None:
    broken = constants | {name: np.ascontiguousarray(np.flip(constants[name]))}
    with pytest.raises(SelfTestError, match="by torch it has|on average"):
        judge(program, broken, bitmaps, memory, tokens)


def test_no_token_is_wrong(program: Program, constants: Constants, bitmaps: NDArray[np.uint32], memory: Memory) -> None:
    with pytest.raises(SelfTestError, match="no token after 5"):
        judge(program, constants, bitmaps, memory, [])
