"""Transducers small enough to run word by word, and plain numpy loops to compare them with."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
from numpy.typing import NDArray

from megakernel.compile import compile_program
from megakernel.evaluate_transducer import TransducerMemory, TransducerNetwork, run_transducer
from megakernel.graph import Builder, Graph
from megakernel.interpret_transducer import TransducerDevice, TransducerInterpreter, transducer_device
from megakernel.isa import EXTRA_DURATIONS, GRANULE_ROWS, CommandKind, RecordKind, Task
from megakernel.mailbox import MAILBOX_BYTES, LeftRecord, Mailbox, Record, decode_record
from megakernel.numbers import round_bf16, to_bits
from megakernel.ops import Sizes, Transducer
from megakernel.program import Program
from megakernel.request import FramePart, TransducerRequest, encode_transducer_request
from megakernel.select import Emitted, record_words
from megakernel.target import Target

Floats = NDArray[np.float32]
Constants = dict[str, Floats]

N_FRAMES = 24  # of a seat
N_SEATS = 10


def tiny_transducer(
    *, width: int = 128, n_layers: int = 2, n_tokens: int = 45, durations: tuple[int, ...] = (0, 1, 2, 4)
) -> Graph:
    """A step over frames; the blank is the last token."""
    sizes = Sizes.for_transducer(
        width=width,
        n_layers=n_layers,
        n_tokens=n_tokens,
        max_slots=8,
        transducer=Transducer(N_FRAMES, N_SEATS, n_tokens - 1, durations, max_symbols=3),
    )
    step = Builder("transducer", sizes)
    x = step.lookup("token", tokens="tokens")
    for layer in range(n_layers):
        weights = tuple(f"{layer}.{name}" for name in ("input", "hidden", "input_bias", "hidden_bias"))
        x = step.lstm_step(f"lstm.{layer}", x, width, layer=layer, weights=(weights[0], weights[1], *weights[2:4]))
    x = step.linear("predicted", x, width, weight="projection", bias="projection_bias")
    step.transduce("next", step.joint("joint", x, weight="head", bias="head_bias"))
    return step.build()


def random_constants(graph: Graph, seed: int) -> Constants:
    """Weights that keep gates where they matter, and make a good part of frames blank."""
    rng = np.random.default_rng(seed)
    constants = {
        name: rng.standard_normal(shape, np.float32) * np.float32(shape[-1] ** -0.5 if len(shape) > 1 else 0.3)
        for name, shape in graph.constants.items()
    }
    transducer = graph.sizes.transducer
    assert transducer is not None
    constants["tokens"] *= np.float32(graph.sizes.width**0.5)
    constants["tokens"][transducer.blank] = 0
    constants["head"] *= np.float32(3)
    constants["head_bias"][transducer.blank] += np.float32(2)
    return {name: round_bf16(value) if value.ndim > 1 else value for name, value in constants.items()}


def random_frames(graph: Graph, seed: int) -> Floats:
    """[seat, N_FRAMES, width] bfloat16."""
    shape = (N_SEATS, N_FRAMES, graph.sizes.width)
    return round_bf16(np.random.default_rng(seed).standard_normal(shape, np.float32))


@dataclass(frozen=True, slots=True)
class Said:
    """A token, as both loops tell it."""

    token: int
    frame: int
    duration: int
    logprob: float


@dataclass(frozen=True, slots=True, eq=False)
class Plain:
    """One stream, frame by frame, in float64: what a transducer's author would write."""

    graph: Graph
    constants: Constants

    def begin(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Outputs and cells [layer, width] behind no text."""
        shape = (self.graph.sizes.n_layers, self.graph.sizes.width)
        return np.zeros(shape), np.zeros(shape)

    def step(self, token: int, hidden: NDArray[np.float64], cell: NDArray[np.float64]) -> NDArray[np.float64]:
        """The prediction once ``token`` belongs to the text; ``hidden`` and ``cell`` are changed."""
        constants = self.constants
        x = constants["tokens"][token].astype(np.float64)
        for layer in range(len(hidden)):
            gates = constants[f"{layer}.input"] @ x + constants[f"{layer}.hidden"] @ hidden[layer]
            gates = gates + constants[f"{layer}.input_bias"] + constants[f"{layer}.hidden_bias"]
            enter, forget, new, leave = gates.reshape(4, -1)
            cell[layer] = _sigmoid(forget) * cell[layer] + _sigmoid(enter) * np.tanh(new)
            x = hidden[layer] = _sigmoid(leave) * np.tanh(cell[layer])
        predicted: NDArray[np.float64] = constants["projection"] @ x + constants["projection_bias"]
        return predicted

    def logits(self, frame: Floats, predicted: NDArray[np.float64]) -> NDArray[np.float64]:
        """[tokens + durations]"""
        logits: NDArray[np.float64] = (
            self.constants["head"] @ np.maximum(frame + predicted, 0) + self.constants["head_bias"]
        )
        return logits

    def decode(self, frames: Floats, *, lead: float) -> list[Said]:
        """What [T, width] frames say from the begin on, up to where the best token or duration leads by less."""
        sizes, transducer = self.graph.sizes, self.graph.sizes.transducer
        assert transducer is not None
        hidden, cell = self.begin()
        predicted = self.step(transducer.blank, hidden, cell)
        said: list[Said] = []
        frame, n_symbols = 0, 0
        while frame < len(frames):
            logits = self.logits(frames[frame], predicted)
            tokens, durations = logits[: sizes.n_tokens], logits[sizes.n_tokens :]
            if any(np.diff(np.sort(scores)[-2:]) < lead for scores in (tokens, durations)):
                break
            token, duration = int(tokens.argmax()), transducer.durations[int(durations.argmax())]
            ahead = max(duration, 1)
            if token != transducer.blank:
                said.append(Said(token, frame, duration, float(tokens[token] - np.logaddexp.reduce(tokens))))
                predicted = self.step(token, hidden, cell)
                n_symbols += 1
                ahead = ahead if n_symbols == transducer.max_symbols else duration
            n_symbols = 0 if ahead else n_symbols
            frame += ahead
        return said


def _sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    y: NDArray[np.float64] = 1 / (1 + np.exp(-x))
    return y


def asked(*parts: FramePart) -> list[TransducerRequest]:
    """A request of one part each, in the seat of its number."""
    return [TransducerRequest((replace(part, seat=seat),)) for seat, part in enumerate(parts)]


@cache
def compiled(n_sms: int, max_rows: int, shared_bytes: int = 166_912, n_layers: int = 2) -> Program:
    """The tiny transducer's program."""
    return compile_program(
        tiny_transducer(n_layers=n_layers), Target(f"{n_sms} SMs", "sm_80", n_sms, shared_bytes, max_rows)
    )


def token_ranges(program: Program) -> list[tuple[int, int]]:
    """First token and number of tokens of each SM."""
    joint, n_tokens = program.tasks[:, -2].astype(int), program.sizes.n_tokens
    begins = joint[:, Task.FIRST_GRANULE] * GRANULE_ROWS
    ends = begins + joint[:, Task.N_GRANULES] * GRANULE_ROWS
    return [(int(b), max(min(int(e), n_tokens) - int(b), 0)) for b, e in zip(begins, ends, strict=True)]


def evaluated(
    program: Program, constants: Constants, frames: Floats, requests: Sequence[TransducerRequest], state_in: Floats
) -> tuple[list[Record], TransducerMemory]:
    """Records, all as of step 0, and memory, when slot i is asked ``requests[i]`` at once."""
    memory = TransducerMemory.empty(program.sizes)
    memory.frames[:] = frames
    memory.state_in[:] = state_in
    network = TransducerNetwork.of(program.ops, program.sizes, constants)
    told = run_transducer(network, memory, requests, max_rows=program.target.max_rows, ranges=token_ranges(program))
    return [decode_record(record_words(emitted, step=0, sequence=1)) for emitted in told], memory


def interpreted(
    program: Program,
    constants: Constants,
    frames: Floats,
    requests: Sequence[TransducerRequest],
    state_in: Floats,
    *,
    seed: int,
    max_steps: int = 300,
    packed: Program | None = None,
) -> tuple[list[Record], TransducerDevice]:
    """The same by the packed program, in launches of at most ``max_steps``. ``packed``: whose tape lies in memory."""
    device = transducer_device(packed or program, constants)
    device.frames[:] = to_bits(frames)
    device.state_in[:] = state_in
    memory = np.zeros(MAILBOX_BYTES, np.uint8)
    interpreter, mailbox = TransducerInterpreter(program, device, memory), Mailbox(memory)
    for slot, request in enumerate(requests):
        mailbox.put_request(slot, encode_transducer_request(request, ticket=slot, sizes=program.sizes))
        mailbox.give(CommandKind.OPEN, slot=slot, ticket=slot)
    records: list[Record] = []
    n_done = n_launches = 0
    while n_done < len(requests):
        interpreter.launch(seed + n_launches, max_steps=max_steps)
        n_launches += 1
        assert n_launches < 300, "comes to an end"
        new = [replace(record, step=0) for record in mailbox.take_records() if not isinstance(record, LeftRecord)]
        n_done += sum(record.__class__.__name__ == "DoneRecord" for record in new)
        records += new
    return records, device


def said_of(told: Sequence[Emitted]) -> list[Said]:
    """The tokens among what the host is told."""
    return [
        Said(one.token, one.extra // EXTRA_DURATIONS, one.extra % EXTRA_DURATIONS, float(one.value))
        for one in told
        if one.kind is RecordKind.EMISSION
    ]
