"""A host that opens, cancels and interrupts at any time: of an interpreted transducer nothing is lost or said twice."""

import random

import numpy as np

from megakernel.interpret_transducer import TransducerInterpreter, transducer_device
from megakernel.isa import CommandKind, EndReason
from megakernel.mailbox import MAILBOX_BYTES, DoneRecord, EmissionRecord, LeftRecord, Mailbox, PartRecord, Record
from megakernel.numbers import to_bits
from megakernel.request import FramePart, TransducerRequest, encode_transducer_request
from tests.megakernel.transducers import (
    N_FRAMES,
    N_SEATS,
    Constants,
    Floats,
    compiled,
    evaluated,
    random_constants,
    random_frames,
    tiny_transducer,
)

N_REQUESTS = 12
STATE_IN = np.zeros((N_SEATS, 2, 2, 128), np.float32)


class Host:
    """Keeps some slots of a device busy, each with seats that are no other slot's."""

    def __init__(self, rng: random.Random, frames: Floats, constants: Constants) -> None:
        self.rng = rng
        self.program = compiled(rng.randint(2, 5), 8)
        device = transducer_device(self.program, constants)
        device.frames[:] = to_bits(frames)
        device.state_in[:] = STATE_IN
        memory = np.zeros(MAILBOX_BYTES, np.uint8)
        self.interpreter, self.mailbox = TransducerInterpreter(self.program, device, memory), Mailbox(memory)
        self.open: dict[int, int] = {}  # slot → ticket
        self.asked: list[TransducerRequest] = []  # by ticket
        self.said: list[list[Record]] = []  # by ticket
        self.is_running = False

    def run(self) -> None:
        """Until ``N_REQUESTS`` have been asked for and are done."""
        while self.open or len(self.asked) < N_REQUESTS:
            self.act()
            if not self.is_running:
                self.interpreter.start(self.rng.randrange(1 << 30), max_steps=self.rng.choice([2, 5, 1000]))
                self.is_running = True
            self.is_running = self.interpreter.advance(self.rng.choice([1, 20, 300])) is None
            self.listen()
            self.mailbox.n_carried_out = self.interpreter.n_commands

    def act(self) -> None:
        """Perhaps a command."""
        choice = self.rng.random()
        free = [slot for slot in range(4) if slot not in self.open]
        if choice < 0.3 and free and len(self.asked) < N_REQUESTS:
            slot, ticket = self.rng.choice(free), len(self.asked)
            request = TransducerRequest(
                (
                    self.part(2 * slot),
                    *(self.part(2 * slot + 1, may_continue=True) for _ in range(self.rng.choice([0, 1]))),
                )
            )
            words = encode_transducer_request(request, ticket=ticket, sizes=self.program.sizes)
            self.mailbox.put_request(slot, words)
            self.mailbox.give(CommandKind.OPEN, slot=slot, ticket=ticket)
            self.open[slot] = ticket
            self.asked.append(request)
            self.said.append([])
        elif choice < 0.34 and self.open:
            slot = self.rng.choice(list(self.open))
            self.mailbox.give(CommandKind.CANCEL, slot=slot, ticket=self.open[slot])
        elif choice < 0.4 and self.is_running:
            self.mailbox.give(CommandKind.YIELD)

    def part(self, seat: int, *, may_continue: bool = False) -> FramePart:
        n_frames = self.rng.randint(0, N_FRAMES)
        if may_continue and self.rng.random() < 0.5:
            return FramePart(n_frames, seat=seat, continues=True)
        return FramePart(n_frames, self.rng.randint(0, min(n_frames, 2)), begins=self.rng.random() < 0.7, seat=seat)

    def listen(self) -> None:
        for record in self.mailbox.take_records():
            if isinstance(record, LeftRecord):
                continue
            assert self.open.get(record.slot) == record.ticket, "nothing comes behind a slot's end"
            self.said[record.ticket].append(record)
            if isinstance(record, DoneRecord):
                del self.open[record.slot]


def what(record: Record) -> tuple[object, ...]:
    """Of a record what does not depend on slot, ticket and step."""
    match record:
        case EmissionRecord():
            return record.token, record.frame, record.duration, record.log_probability
        case PartRecord():
            return ("part", record.n_past)
        case _:
            assert isinstance(record, DoneRecord)
            return ("done", record.n_verified)


def test_every_token_comes_once_whatever_the_host_does() -> None:
    graph = tiny_transducer()
    n_whole = n_cancelled = 0
    for seed in range(3):
        constants, frames = random_constants(graph, seed), random_frames(graph, seed)
        host = Host(random.Random(seed), frames, constants)
        host.run()
        for request, said in zip(host.asked, host.said, strict=True):
            expected, _ = evaluated(host.program, constants, frames, [request], STATE_IN)
            *records, done = said
            assert isinstance(done, DoneRecord)
            assert [what(record) for record in records] == [what(record) for record in expected[: len(records)]]
            if done.reason is EndReason.FRAMES:
                assert what(done) == what(expected[-1]) and len(said) == len(expected)
                n_whole += 1
            else:
                assert done.reason is EndReason.CANCELLED
                n_cancelled += 1
    assert n_whole > 20 and n_cancelled > 0
