"""A host that does anything at any time: no token is lost or doubled, and every request ends exactly once.

The device is the interpreted loop, so commands arrive between any two words that SMs exchange. What a request must get
is what its evaluation alone gives, to the last bit of every log-probability.
"""

import random
from dataclasses import replace

import pytest

from megakernel.interpreter import Residency
from megakernel.isa import CommandKind, Control, EndReason, FaultKind, LeaveReason
from megakernel.launcher import Mode
from megakernel.mailbox import DoneRecord, SegmentRecord, TokenRecord
from megakernel.request import encode_request
from megakernel.runtime import Runtime
from megakernel.slots import OpenSlots

N_REQUESTS = 10
N_HOSTS = 8


@pytest.fixture(scope="module")
def decoders(make_decoder):
    """All slots of one hear the same, so that a request's outcome does not hang on its slot."""
    made = [make_decoder(random.Random(seed), n_layers=1, n_sms=2 + seed, max_rows=8) for seed in range(3)]
    return [replace(decoder, cross_cache=decoder.cross_cache[:1].repeat(8, axis=0)) for decoder in made]


def requests_of(decoder, rng):
    requests = [decoder.request(rng, max_tokens=5) for _ in range(N_REQUESTS)]
    return [
        replace(request, head=request.head[:3], n_positions=min(request.n_positions, 20), n_plain=None)
        for request in requests
    ]


class Outcome:
    """What has come of one request."""

    def __init__(self, decoder, request):
        self.expected = [bare(record) for record in decoder.evaluate([request])[0]]
        self.found = []
        self.ends = []
        self.is_cancelled = False

    def take(self, record):
        assert not self.ends, f"{record} behind the end"
        if isinstance(record, DoneRecord):
            self.ends.append(record.reason)
        self.found.append(bare(record))

    def verify(self):
        assert len(self.ends) == 1
        if self.ends == [EndReason.CANCELLED]:
            assert self.is_cancelled
            *self.found, _ = self.found
            assert self.found == self.expected[: len(self.found)]
        else:
            assert self.found == self.expected


def bare(record):
    """Without slot, ticket and step; nor how much of the draft held, which a replay changes."""
    match record:
        case TokenRecord():
            return record.index, record.token, record.log_probability
        case SegmentRecord():
            return "segment", record.first, record.n_tokens
        case DoneRecord():
            return record.reason, record.watched


class Host:
    """Gives commands at random until every request has ended."""

    def __init__(self, decoder, seed):
        self.rng = random.Random(seed)
        self.decoder = decoder
        self.device, self.mailbox = decoder.device()
        self.slots = OpenSlots(decoder.program.sizes.max_slots)
        self.waiting = requests_of(decoder, self.rng)
        self.outcomes = {}  # ticket → Outcome
        self.of_slot = {}  # slot → ticket
        self.n_stop = 0  # number of the STOP that is under way
        self.is_running = False
        self.reasons = set()

    def play(self):
        while self.waiting or self.of_slot:
            self.act()
            if not self.is_running:
                self.device.start(self.rng.randrange(1 << 30), max_steps=self.rng.choice([1, 3, 1 << 20]))
                self.is_running = True
            residency = self.device.advance(self.rng.choice([1, 10, 100, 400]))
            self.read()
            if residency:
                self.is_running = False
                self.settle(residency)
        while self.is_running and not self.device.advance(1 << 20):
            pass
        self.read()
        assert len(self.outcomes) == N_REQUESTS
        for outcome in self.outcomes.values():
            outcome.verify()

    def act(self):
        if self.n_stop:
            return
        free = sorted(set(range(8)) - set(self.of_slot))
        draw = self.rng.random()
        if draw < 0.3 and self.waiting and free:
            slot, request = self.rng.choice(free), self.waiting.pop()
            ticket = self.slots.open(slot, request)
            self.of_slot[slot], self.outcomes[ticket] = ticket, Outcome(self.decoder, request)
            self.open(slot, request, ticket)
        elif draw < 0.35 and self.of_slot:
            self.cancel(self.rng.choice(list(self.of_slot)))
        elif draw < 0.38:
            self.mailbox.give(CommandKind.YIELD)
        elif draw < 0.4:
            self.n_stop = self.mailbox.give(CommandKind.STOP)
        elif draw < 0.42 and self.is_running:
            self.mailbox.set_abort(abort=True)

    def open(self, slot, request, ticket):
        sizes = self.decoder.program.sizes
        self.mailbox.put_request(slot, encode_request(request, ticket=ticket, sizes=sizes, n_rules=2))
        self.mailbox.give(CommandKind.OPEN, slot=slot, ticket=ticket)

    def cancel(self, slot):
        ticket = self.slots.cancel(slot)
        if ticket:
            self.outcomes[ticket].is_cancelled = True
            self.mailbox.give(CommandKind.CANCEL, slot=slot, ticket=ticket)

    def read(self):
        for record in self.slots.deliver(self.mailbox.take_records()):
            self.outcomes[record.ticket].take(record)
            if isinstance(record, DoneRecord):
                assert self.of_slot.pop(record.slot) == record.ticket

    def settle(self, residency: Residency):
        self.reasons.add(residency.reason)
        self.mailbox.set_abort(abort=False)
        n_commands = int(self.mailbox.control_after[Control.N_COMMANDS])
        if residency.reason == LeaveReason.FAULT:
            assert residency.fault == FaultKind.ABORTED
            self.device.clear()
            self.n_stop, n_commands = 0, self.mailbox.n_commands
            self.replay()
        elif self.n_stop and n_commands >= self.n_stop:
            self.n_stop = 0
            self.replay()
        self.mailbox.n_carried_out = n_commands

    def replay(self):
        for slot, state in self.slots.replays():
            self.open(slot, state.request, state.ticket)
            if state.is_cancelled:
                self.mailbox.give(CommandKind.CANCEL, slot=slot, ticket=state.ticket)


@pytest.mark.parametrize("n_sms", [2, 3, 4])
def test_whatever_the_host_does_each_request_gets_its_tokens_once(decoders, n_sms):
    reasons = set()
    for seed in range(N_HOSTS):
        host = Host(decoders[n_sms - 2], seed)
        host.play()
        reasons |= host.reasons
    assert reasons == set(LeaveReason)


# ---------------------------------------------------------------------- the runtime itself as the host


class InterpretedLaunches:
    """The interpreted loop where the runtime expects a GPU."""

    def __init__(self, decoder, seed):
        self.device, self.mailbox = decoder.device()
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.is_running = False

    def clock(self):
        return self.now_s

    def start(self, start):
        assert not self.is_running
        assert start.mode is Mode.LOOP
        device = self.device
        assert (start.epoch, start.n_commands, start.n_records) == (device.epoch, device.n_commands, device.n_records)
        device.start(self.rng.randrange(1 << 30), max_steps=self.rng.choice([2, 5, start.max_steps]))
        self.is_running = True

    def has_left(self):
        self.now_s += 1e-4
        if self.is_running and self.device.advance(self.rng.choice([1, 10, 100, 400])):
            self.is_running = False
        return not self.is_running

    def wait_for(self, event):
        raise AssertionError(f"nobody recorded {event}")

    def clear(self, *, state):
        assert not self.is_running
        self.device.clear(state=state)

    def close(self):
        assert not self.is_running


@pytest.mark.parametrize("n_sms", [2, 3, 4])
def test_the_runtime_brings_every_request_to_its_end_over_a_stall(decoders, n_sms):
    decoder = decoders[n_sms - 2]
    for seed in range(N_HOSTS // 2):
        rng = random.Random(seed)
        launches = InterpretedLaunches(decoder, seed)
        runtime = Runtime(decoder.program, launches, n_rules=2, clock=launches.clock)
        runtime.inject_stall(sm=rng.randrange(n_sms), step=rng.randrange(2))
        waiting, outcomes, of_slot = requests_of(decoder, rng), {}, {}
        while waiting or of_slot:
            free = sorted(set(range(8)) - set(of_slot))
            if waiting and free and rng.random() < 0.3:
                slot, request = rng.choice(free), waiting.pop()
                of_slot[slot] = runtime.open(slot, request)
                outcomes[of_slot[slot]] = Outcome(decoder, request)
            if of_slot and rng.random() < 0.05:
                slot = rng.choice(list(of_slot))
                runtime.cancel(slot)
                outcomes[of_slot[slot]].is_cancelled = True
            for record in runtime.records():
                outcomes[record.ticket].take(record)
                if isinstance(record, DoneRecord):
                    assert of_slot.pop(record.slot) == record.ticket
        assert [fault.kind for fault in runtime.faults] == [FaultKind.TIMEOUT]
        assert len(outcomes) == N_REQUESTS
        for outcome in outcomes.values():
            outcome.verify()
        runtime.leave()
        runtime.close()
