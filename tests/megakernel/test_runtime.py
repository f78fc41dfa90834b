"""Requests in, records out, on a device that is none: it reads and writes the real mailbox, and makes tokens by rule.

What it does with slots is ``select.py``'s, as on the GPU; only the logits are made up.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megakernel import isa
from megakernel.compile import compile_program
from megakernel.errors import FaultError, RequestError
from megakernel.graph import Graph
from megakernel.isa import Control, EndReason, FaultKind, LeaveReason
from megakernel.launcher import Event, Mode, Start
from megakernel.mailbox import MAILBOX_BYTES, OFFSETS, DoneRecord, Mailbox, SegmentRecord, SlotRecord, TokenRecord
from megakernel.pick import HeadPartial, Row
from megakernel.program import Program
from megakernel.request import Request
from megakernel.runtime import BEAT_TIMEOUT_S, LEAVE_TIMEOUT_S, Runtime, fault_of, task_name
from megakernel.select import Emitted, Slots, accept, carry_out, left, record_words, rows_of_step
from megakernel.target import Target

Tokens = list[tuple[int, int]]  # index, token


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@dataclass(slots=True)
class Recorded:
    """A stream's event, as far as it has come."""

    is_over: bool = False
    cuda_event: int = 0

    def query(self) -> bool:
        return self.is_over


class ScriptedDevice:
    """Makes some steps whenever it is asked whether it has left."""

    def __init__(self, program: Program, *, steps_per_look: int = 3) -> None:
        self.memory = np.zeros(MAILBOX_BYTES, np.uint8)
        self.mailbox = Mailbox(self.memory)
        self.starts: list[Start] = []
        self.waits: list[Event] = []
        self.n_clears = 0
        self.is_closed = False
        self.hangs = False  # it makes no step, and leaves when the host's abort word says so
        self.is_dead = False  # not even then
        self._program = program
        self._steps_per_look = steps_per_look
        self._slots: Slots = (None,) * program.sizes.max_slots
        self._leave: LeaveReason | None = LeaveReason.STOP
        self._n_steps = self._n_commands = self._n_records = 0

    # --- what the runtime calls ---

    def start(self, start: Start) -> None:
        assert self._leave is not None, "two launches at once"
        self.starts.append(start)
        self._leave = None
        if start.goes_on:
            return
        self._n_steps, self._n_commands, self._n_records = 0, start.n_commands, start.n_records
        self._block("control_after", isa.CONTROL_WORDS)[:] = self._block("control_before", isa.CONTROL_WORDS)

    def has_left(self) -> bool:
        for _ in range(self._steps_per_look):
            if self._leave is None:
                self._step()
        if self._leave is None and self.starts[-1].mode is not Mode.LOOP:
            self._settle(None)  # so many steps were launched, and no more
            self._leave = LeaveReason.STEPS
        return self._leave is not None

    def wait_for(self, event: Event) -> None:
        assert isinstance(event, Recorded)
        event.is_over = True
        self.waits.append(event)

    def clear(self, *, state: bool) -> None:
        assert self._leave is not None, "cleared under a running kernel"
        self.n_clears += 1
        if state:
            self._slots = (None,) * len(self._slots)

    def close(self) -> None:
        assert self._leave is not None, "freed under a running kernel"
        self.is_closed = True

    # --- the kernel ---

    def _step(self) -> None:
        if self.is_dead:
            return
        if self._block("abort", 1)[0]:
            self._fail(FaultKind.ABORTED)
            return
        if self.hangs:
            return
        control = self._block("control_after", isa.CONTROL_WORDS)
        if control[Control.STALL_SM] and control[Control.STALL_STEP] == self._n_steps:
            self._fail(FaultKind.TIMEOUT)
            return
        rows = rows_of_step(self._slots, isa.MAX_ROWS, self._program.sizes)
        self._slots, emitted = accept(self._slots, rows, [self._partial(row) for row in rows], self._program.sizes)
        self._slots, told, leave = carry_out(self._slots, self._commands(), self._requests())
        self._n_steps += 1
        self._emit(*emitted, *told)
        self._block("beat", 1)[0] = self._n_steps
        is_idle = not any(self._slots) and not rows and self.starts[-1].mode is Mode.LOOP
        if leave is None and is_idle and self.starts[-1].idle_ns < 1e9:
            leave = LeaveReason.IDLE
        if leave is None and self._n_steps >= self.starts[-1].max_steps:
            leave = LeaveReason.STEPS
        if leave is not None:
            self._emit(left(leave))
            self._settle(leave)

    def _partial(self, row: Row) -> HeadPartial:
        """A token that hangs on everything a token hangs on; the end token where the rule comes to it."""
        sizes = self._program.sizes
        token = (row.token * 7 + row.position * 3 + row.request.head[0]) % sizes.end_token
        if row.request.markers and not row.mask.text:
            return HeadPartial(mark_score=1.0, mark_token=row.mask.mark_begin, mark_logit=1.0, mark_lse=1.0)
        if row.request.markers and row.position % 5 == 0 and row.mask.mark_begin < row.mask.mark_end:
            return HeadPartial(0.0, token, 0.0, 0.0, 0.0, 1.0, row.mask.mark_begin, 1.0, 1.0)
        return HeadPartial(1.0, token, 1.0, 1.0, 1.0)

    def _commands(self) -> list[list[int]]:
        ring = self._block("commands", isa.COMMAND_SLOTS * isa.COMMAND_WORDS).reshape(isa.COMMAND_SLOTS, -1)
        door = int(self._block("door", 1)[0])
        new = [ring[number % isa.COMMAND_SLOTS].tolist() for number in range(self._n_commands, door)]
        self._n_commands = door
        return new

    def _requests(self) -> dict[int, NDArray[np.uint32]]:
        words = self._block("requests", isa.MAX_SLOTS * isa.REQUEST_WORDS).reshape(isa.MAX_SLOTS, -1)
        return dict(enumerate(words.copy()))

    def _emit(self, *told: Emitted) -> None:
        ring = self._block("records", isa.RECORD_SLOTS * isa.RECORD_WORDS).reshape(isa.RECORD_SLOTS, -1)
        for emitted in told:
            words = record_words(emitted, step=self._n_steps, sequence=self._n_records + 1)
            ring[self._n_records % isa.RECORD_SLOTS] = words
            self._n_records += 1

    def _fail(self, kind: FaultKind) -> None:
        control = self._block("control_after", isa.CONTROL_WORDS)
        control[Control.FAULT_KIND], control[Control.FAULT_SM], control[Control.FAULT_PHASE] = kind, 3, 2
        control[Control.FAULT_EPOCH] = 77
        self._slots = (None,) * len(self._slots)  # whatever it knew is worth nothing
        self.hangs = False
        self._settle(LeaveReason.FAULT)

    def _settle(self, leave: LeaveReason | None) -> None:
        control = self._block("control_after", isa.CONTROL_WORDS)
        control[Control.N_STEPS] = self._n_steps
        control[Control.N_COMMANDS] = self._n_commands & 0xFFFFFF
        control[Control.N_RECORDS] = self._n_records
        control[Control.LEFT] = leave or 0
        self._leave = leave

    def _block(self, name: str, n_words: int) -> NDArray[np.uint32]:
        return self.memory.view(np.uint32)[OFFSETS[name] // 4 :][:n_words]


class LateDevice(ScriptedDevice):
    """A launch is over only some looks after its last record has come."""

    n_late_looks = 3

    def has_left(self) -> bool:
        if super().has_left():
            self.n_late_looks -= 1
        return self.n_late_looks < 0

    def pass_time(self) -> None:
        if self.starts and self._leave is None:
            self._step()


class PassingClock(Clock):
    """A microsecond passes with each look, and the device makes a step."""

    def __init__(self, device: LateDevice) -> None:
        super().__init__()
        self._device = device

    def __call__(self) -> float:
        self.now_s += 1e-6
        self._device.pass_time()
        return self.now_s


@pytest.fixture(scope="module")
def program(tiny_graph: Callable[..., Graph]) -> Program:
    return compile_program(tiny_graph(), Target("five", "sm_90a", 5, 232_448))


def request(**changes: object) -> Request:
    plain = Request(head=(3, 14, 15), max_tokens=20, n_positions=290)
    return replace(plain, **changes)  # type: ignore[arg-type]  # the tests name fields that there are


def build(program: Program, clock: Clock | None = None, **options: int) -> tuple[Runtime, ScriptedDevice]:
    device = ScriptedDevice(program, **options)
    return Runtime(program, device, n_rules=1, clock=clock or Clock()), device


def finish(runtime: Runtime, *, n_looks: int = 400) -> list[SlotRecord]:
    """Every record until no slot is open."""
    records: list[SlotRecord] = []
    for _ in range(n_looks):
        records += runtime.records()
        if not runtime.n_open:
            return records
    raise AssertionError("it never comes to an end")


def tokens_of(records: Sequence[SlotRecord], ticket: int) -> Tokens:
    return [(each.index, each.token) for each in records if isinstance(each, TokenRecord) and each.ticket == ticket]


def alone(program: Program, one: Request) -> Tokens:
    runtime, _ = build(program)
    return tokens_of(finish_one(runtime, one), 1)


def finish_one(runtime: Runtime, one: Request) -> list[SlotRecord]:
    runtime.open(0, one)
    return finish(runtime)


# --- without disturbance ---


def test_a_call_ends_with_its_launch_though_the_last_record_comes_before_that(program: Program) -> None:
    device = LateDevice(program)
    clock = PassingClock(device)
    runtime = Runtime(program, device, n_rules=1, clock=clock, idle_ns=0, spin_s=0.01)
    runtime.open(0, request())
    runtime.burst()
    assert tokens_of(runtime.finish(5.0), 1) == alone(program, request())
    assert clock.now_s < 0.01, "not at the end of its patience"


def test_nothing_is_launched_before_there_is_work(program: Program) -> None:
    runtime, device = build(program)
    assert runtime.records() == []
    runtime.open(0, request())
    assert device.starts == []
    runtime.burst()
    runtime.burst()
    assert len(device.starts) == 1


def test_a_request_gives_its_tokens_in_order_and_then_is_done(program: Program) -> None:
    runtime, _ = build(program)
    records = finish_one(runtime, request())
    assert [index for index, _ in tokens_of(records, 1)] == list(range(20))
    assert records[-1] == DoneRecord(0, 1, EndReason.LIMIT, 0.0, 0, records[-1].step)


def test_the_kernel_leaves_when_idle_and_is_launched_where_it_left(program: Program) -> None:
    runtime, device = build(program)
    first = finish_one(runtime, request())
    while runtime.is_running:
        assert runtime.records() == []
    second = finish_one(runtime, request())
    assert tokens_of(first, 1) == tokens_of(second, 2)
    assert [start.n_commands for start in device.starts] == [0, 1]
    assert device.starts[1].n_records > len(first)  # that it left is a record too
    n_steps = 1 + 20 + 1  # opened, decoded, idle
    assert device.starts[1].epoch == device.starts[0].epoch + program.epochs_per_step * n_steps
    assert runtime.n_steps == n_steps  # of the launch that has left


def test_a_request_longer_than_one_launch_goes_on_in_the_next(
    program: Program, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = alone(program, request())
    monkeypatch.setattr("megakernel.runtime.MAX_STEPS", 4)
    runtime, device = build(program)
    assert tokens_of(finish_one(runtime, request()), 1) == expected
    assert len(device.starts) >= 5
    assert runtime.n_steps >= 20
    assert runtime.faults == []


def test_epochs_begin_again_before_they_run_out(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megakernel.runtime._LARGEST_EPOCH", 3000 * program.epochs_per_step)
    runtime, device = build(program)
    for _ in range(150):
        finish_one(runtime, request())
    assert device.n_clears >= 2  # the first was at the beginning
    assert max(start.epoch for start in device.starts) < 3000 * program.epochs_per_step


def test_a_slot_that_is_open_or_not_there_is_refused_and_changes_nothing(program: Program) -> None:
    runtime, _ = build(program)
    runtime.open(2, request())
    with pytest.raises(RequestError, match="slot 2 is open"):
        runtime.open(2, request())
    with pytest.raises(RequestError, match="slot 8: there are 8"):
        runtime.open(8, request())
    with pytest.raises(RequestError, match="max_tokens: 0, accepted are 1 to"):
        runtime.open(3, request(max_tokens=0))
    assert runtime.n_open == 1
    assert len(tokens_of(finish(runtime), 1)) == 20


def test_a_cancelled_slot_is_done_at_once_and_can_be_used_again(program: Program) -> None:
    runtime, _ = build(program)
    runtime.open(0, request(max_tokens=70))
    runtime.burst()
    runtime.records()
    runtime.cancel(0)
    runtime.cancel(0)
    records = finish(runtime)
    assert isinstance(records[-1], DoneRecord)
    assert records[-1].reason is EndReason.CANCELLED
    runtime.cancel(0)  # a free slot stays free
    assert tokens_of(finish_one(runtime, request()), 2) == alone(program, request())


def test_an_open_behind_an_event_lets_the_kernel_leave_and_comes_behind_it(program: Program) -> None:
    runtime, device = build(program)
    runtime.open(0, request(max_tokens=60))
    runtime.burst()
    records = runtime.records()
    event = Recorded()
    runtime.open(1, request(), after=event)
    assert device.waits == []
    records += finish(runtime)
    assert device.waits == [event]
    assert len(device.starts) == 2
    assert (len(tokens_of(records, 1)), len(tokens_of(records, 2))) == (60, 20)


def test_commands_behind_a_waiting_one_keep_their_order(program: Program) -> None:
    runtime, _ = build(program)
    runtime.open(0, request(max_tokens=60))
    runtime.burst()
    runtime.open(1, request(), after=Recorded())
    runtime.cancel(1)
    done = {record.slot: record.reason for record in finish(runtime) if isinstance(record, DoneRecord)}
    assert done == {0: EndReason.LIMIT, 1: EndReason.CANCELLED}


def test_leave_returns_when_the_kernel_has_left(program: Program) -> None:
    runtime, device = build(program, steps_per_look=1)
    finish_one(runtime, request())
    assert runtime.is_running
    runtime.leave()
    assert not runtime.is_running
    assert len(device.starts) == 1
    runtime.open(0, request())
    with pytest.raises(RequestError, match="1 slots are open"):
        runtime.leave()


def test_a_yield_that_came_too_late_is_not_carried_out_by_the_next_launch(program: Program) -> None:
    runtime, device = build(program, steps_per_look=50)
    runtime.open(0, request())
    runtime.burst()
    assert device.has_left()
    runtime.open(1, request(max_tokens=4), after=Recorded())  # as far as the runtime knows, the kernel runs
    finish(runtime)
    assert [start.n_commands for start in device.starts] == [0, 2]


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_whatever_joins_leaves_and_fails_no_token_is_lost_or_doubled(program: Program, data: st.DataObject) -> None:
    runtime, device = build(program, steps_per_look=data.draw(st.integers(1, 6)))
    asked: dict[int, Request] = {}
    records: list[SlotRecord] = []
    n_stalls = 0
    for _ in range(data.draw(st.integers(1, 25))):
        slot = data.draw(st.integers(0, 7))
        match data.draw(st.sampled_from(["open", "hand over", "cancel", "stall", "look"])):
            case "open" | "hand over" as how:
                head, n = data.draw(st.integers(0, 9)), data.draw(st.integers(1, 30))
                one = request(head=(head,), max_tokens=n, markers=data.draw(st.booleans()), max_first_mark=3)
                with suppress(RequestError):  # the slot is open
                    asked[runtime.open(slot, one, after=Recorded() if how == "hand over" else None)] = one
            case "cancel":
                runtime.cancel(slot)
            case "stall" if n_stalls < 2:  # more in a row are an error
                n_stalls += 1
                runtime.inject_stall(sm=1, step=data.draw(st.integers(0, 12)))
            case _:
                records += runtime.records()
    records += finish(runtime)
    done = [each for each in records if isinstance(each, DoneRecord)]
    assert sorted(each.ticket for each in done) == sorted(asked)
    for each in done:
        got, expected = tokens_of(records, each.ticket), alone(program, asked[each.ticket])
        assert got == (expected if each.reason is not EndReason.CANCELLED else expected[: len(got)])
    segments = [(each.ticket, each.first) for each in records if isinstance(each, SegmentRecord)]
    assert len(set(segments)) == len(segments)


def test_a_resident_kernel_stays_until_it_is_told_to_leave(program: Program) -> None:
    device = ScriptedDevice(program)
    runtime = Runtime(program, device, n_rules=1, is_resident=True, clock=Clock())
    for _ in range(3):
        assert len(finish_one(runtime, request())) == 21
        runtime.records()
    assert runtime.is_running
    runtime.leave()
    assert not runtime.is_running
    assert len(device.starts) == 1


def test_a_resident_kernel_goes_on_while_a_request_waits_for_its_event(program: Program) -> None:
    device = ScriptedDevice(program)
    runtime = Runtime(program, device, n_rules=1, is_resident=True, clock=Clock())
    runtime.open(0, request(max_tokens=60))
    runtime.burst()
    event = Recorded()
    runtime.open(1, request(), after=event)
    for _ in range(3):
        assert {record.slot for record in runtime.records()} <= {0}
    event.is_over = True
    assert {record.slot for record in finish(runtime)} == {0, 1}
    assert len(device.starts) == 1
    assert device.waits == []


def test_a_resident_kernel_with_nothing_to_do_yet_is_not_late(program: Program) -> None:
    clock, device = Clock(), ScriptedDevice(program)
    runtime = Runtime(program, device, n_rules=1, is_resident=True, clock=clock)
    finish_one(runtime, request())
    event = Recorded()
    runtime.open(1, request(), after=event)
    device.hangs = True
    for _ in range(3):
        runtime.records()
        clock.now_s += 10 * BEAT_TIMEOUT_S
    device.hangs = False
    event.is_over = True
    assert len(tokens_of(finish(runtime), 2)) == 20
    assert runtime.faults == []


def test_another_runtime_on_the_same_device_begins_anew(program: Program) -> None:
    first, device = build(program, steps_per_look=50)
    finish_one(first, request())
    device.has_left()
    second = Runtime(program, device, n_rules=1, clock=Clock())
    records = finish_one(second, request())
    assert tokens_of(records, 1) == alone(program, request())
    assert [start.epoch for start in device.starts] == [0, 0]
    assert device.n_clears == 2


# --- faults ---


def test_a_fault_is_named_by_kind_sm_task_and_epoch(program: Program) -> None:
    control = np.zeros(isa.CONTROL_WORDS, np.uint32)
    assert fault_of(control, program) is None
    control[Control.FAULT_KIND], control[Control.FAULT_SM] = FaultKind.TIMEOUT, 17
    control[Control.FAULT_PHASE], control[Control.FAULT_EPOCH] = 1, 4711
    expected = "TIMEOUT on SM 17 in phase 1, ATTEND_SELF of 0.attention.blocks, epoch 4711"
    assert str(fault_of(control, program)) == expected
    assert task_name(program, 99) == "phase 99, which the program does not have"


def test_after_a_fault_the_request_begins_again_and_its_reader_does_not_notice(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    one = request(markers=True, max_first_mark=3)
    expected = finish_one(build(program)[0], one)
    runtime, device = build(program)
    runtime.inject_stall(sm=1, step=9)
    records = finish_one(runtime, one)
    assert [replace(each, step=0) for each in records[:-1]] == [replace(each, step=0) for each in expected[:-1]]
    assert len(runtime.faults) == 1
    assert runtime.mode is Mode.LOOP
    assert device.starts[1].epoch == 0
    assert "TIMEOUT on SM 3" in caplog.text
    assert "1 slots begin again" in caplog.text


def test_two_faults_in_a_row_go_on_one_phase_a_launch(program: Program, caplog: pytest.LogCaptureFixture) -> None:
    expected = alone(program, request())
    runtime, device = build(program)
    for step in (9, 2):
        runtime.inject_stall(sm=1, step=step)
    assert tokens_of(finish_one(runtime, request()), 1) == expected
    assert runtime.mode is Mode.GRAPH
    assert "2 faults in a row: on with one phase a launch" in caplog.text
    modes = [start.mode for start in device.starts]
    assert modes[:2] == [Mode.LOOP] * 2
    assert set(modes[2:]) == {Mode.GRAPH}
    assert [start.goes_on for start in device.starts[2:]] == [False] + [True] * (len(modes) - 3)
    while runtime.is_running:
        assert runtime.records() == []
    assert runtime.n_steps == 9 + 2 + int(device.mailbox.control_after[Control.N_STEPS])


def test_a_launch_without_a_fault_between_two_faults_keeps_the_loop(program: Program) -> None:
    runtime, _ = build(program)
    for _ in range(2):
        runtime.inject_stall(sm=1, step=4)
        finish_one(runtime, request())
        while runtime.is_running:
            runtime.records()
    assert len(runtime.faults) == 2
    assert runtime.mode is Mode.LOOP


def test_a_third_fault_is_raised(program: Program) -> None:
    runtime, _ = build(program)
    for _ in range(3):
        runtime.inject_stall(sm=1, step=4)
    with pytest.raises(FaultError, match="TIMEOUT on SM 3 in phase 2"):
        finish_one(runtime, request())


def test_a_cancelled_slot_is_done_after_a_fault_too(program: Program) -> None:
    runtime, device = build(program)
    runtime.open(0, request(max_tokens=60))
    runtime.burst()
    runtime.records()
    device.hangs = True
    runtime.cancel(0)
    device._fail(FaultKind.TIMEOUT)
    records = finish(runtime)
    assert [each.reason for each in records if isinstance(each, DoneRecord)] == [EndReason.CANCELLED]


def test_a_kernel_without_a_beat_is_told_to_leave_and_launched_again(
    program: Program, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    runtime, device = build(program, clock)
    runtime.open(0, request())
    runtime.burst()
    records = runtime.records()
    device.hangs = True
    runtime.records()
    clock.now_s += BEAT_TIMEOUT_S / 2
    runtime.records()
    assert device.hangs, "it was given up too early"
    clock.now_s += BEAT_TIMEOUT_S
    runtime.records()
    records += finish(runtime)
    assert tokens_of(records, 1) == alone(program, request())
    assert [fault.kind for fault in runtime.faults] == [FaultKind.ABORTED]
    assert "no step for 100 ms" in caplog.text


def test_a_kernel_that_was_idle_is_not_late(program: Program) -> None:
    clock = Clock()
    runtime, device = build(program, clock, steps_per_look=1)
    finish_one(runtime, request())
    assert runtime.is_running
    device.hangs = True
    runtime.records()
    clock.now_s += 10 * BEAT_TIMEOUT_S
    runtime.records()
    runtime.open(0, request())
    runtime.records()
    clock.now_s += BEAT_TIMEOUT_S / 2
    runtime.records()
    device.hangs = False
    finish(runtime)
    assert runtime.faults == []


def test_a_kernel_that_does_not_leave_is_an_error(program: Program) -> None:
    clock = Clock()
    runtime, device = build(program, clock)
    runtime.open(0, request())
    runtime.burst()
    runtime.records()
    device.is_dead = True
    runtime.records()
    clock.now_s += 2 * BEAT_TIMEOUT_S
    runtime.records()
    clock.now_s += LEAVE_TIMEOUT_S / 2
    runtime.records()
    clock.now_s += LEAVE_TIMEOUT_S
    with pytest.raises(FaultError, match="neither makes a step nor leaves"):
        runtime.records()


def test_close_drops_what_is_open_and_frees_the_device(program: Program) -> None:
    runtime, device = build(program)
    runtime.open(0, request(max_tokens=60))
    runtime.burst()
    runtime.close()
    assert device.is_closed
