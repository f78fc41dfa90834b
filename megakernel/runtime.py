"""Slots on a device: requests in, records out, whatever happens to the kernel in between.

Launches when there is work, lets the kernel leave when there is none, finds out when it stalls, and after a fault gives
the open requests to it again, so that a reader sees every token once. After two faults in a row it goes on one phase a
launch. Knows the mailbox and the slots; the launches themselves are ``launcher.py``'s.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .errors import FaultError, RequestError
from .isa import CommandKind, Control, FaultKind, Op, Phase
from .launcher import Event, Mode, Start
from .mailbox import DoneRecord, Mailbox, Record, SlotRecord
from .program import Program
from .request import AnyRequest, encode
from .slots import OpenSlots

log = logging.getLogger(__name__)

MAX_STEPS = 1024  # of one launch, so that others on the GPU get their turn; about 0.1 s
MAX_GRAPH_STEPS = 1 << 20  # until steps are counted from 0 again, one phase a launch
IDLE_NS = 200_000  # without an open slot after which the kernel leaves
RESIDENT_STEPS = 1 << 23  # of one launch of a kernel that stays; about a quarter of an hour
RESIDENT_IDLE_NS = 1 << 62  # it is told when to leave
SPIN_NS = 50_000_000  # that one SM waits for another
BEAT_TIMEOUT_S = 0.1  # without a step, while a slot is open, that is taken for a fault
START_TIMEOUT_S = 30.0  # until the first step: others may have the GPU
LEAVE_TIMEOUT_S = 2.0  # after an order to leave
N_FAULTS_TO_GRAPH = 2  # in a row
_POLL_S = 50e-6

_LARGEST_EPOCH = 0xFFFFFFFF
_COMMAND_COUNT_MASK = 0xFFFFFF  # the kernel hands its count round in 24 bits


class Launches(Protocol):
    """What ``Launcher`` offers; tests put a device in its place that is none."""

    @property
    def mailbox(self) -> Mailbox:
        """Whose other end the kernel has."""

    def start(self, start: Start) -> None:
        """Launch, behind everything that came before."""

    def has_left(self) -> bool:
        """Whether what was started last has ended."""

    def wait_for(self, event: Event) -> None:
        """The next launch begins after ``event``."""

    def clear(self, *, state: bool) -> None:
        """Zeros into the exchange area, and with ``state`` into all that the device remembers of slots."""

    def close(self) -> None:
        """Free everything. Nothing may be running."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Why the kernel gave up, and where."""

    kind: FaultKind
    sm: int
    task: str
    epoch: int

    def __str__(self) -> str:
        return f"{self.kind.name} on SM {self.sm} in {self.task}, epoch {self.epoch}"


def fault_of(control: NDArray[np.uint32], program: Program) -> Fault | None:  # [CONTROL_WORDS]
    """The fault that a launch left behind, ``None`` if it left none."""
    kind = int(control[Control.FAULT_KIND])
    if not kind:
        return None
    sm, epoch = int(control[Control.FAULT_SM]), int(control[Control.FAULT_EPOCH])
    return Fault(FaultKind(kind), sm, task_name(program, int(control[Control.FAULT_PHASE])), epoch)


def task_name(program: Program, phase: int) -> str:
    """For instance ``phase 7, ATTEND_CROSS of layers.0.cross``."""
    if phase >= len(program.phases):
        return f"phase {phase}, which the program does not have"
    return f"phase {phase}, {Op(int(program.phases[phase, Phase.OP])).name} of {program.phase_names[phase]}"


@dataclass(frozen=True, slots=True)
class _Command:
    """A command that has not been given yet. ``after``: what must have run before."""

    kind: CommandKind
    slot: int
    ticket: int
    words: NDArray[np.uint32] | None = None  # of the request that an OPEN is about
    after: Event | None = None


class Runtime:
    """One program's slots. One thread at a time; nothing blocks but ``wait`` and ``close``.

    Call ``open`` for any number of slots, then ``burst``, then ``records`` again and again until every slot is done.
    A slot is free again once its ``DoneRecord`` has been returned.
    """

    def __init__(
        self,
        program: Program,
        launches: Launches,
        *,
        n_rules: int,
        mode: Mode = Mode.LOOP,
        is_resident: bool = False,
        idle_ns: int = IDLE_NS,
        spin_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``launches`` may have served another runtime, if its kernel has left: whatever is left of that is dropped.

        A resident kernel stays when it is idle, so that a request finds it there. Its program should be made for fewer
        SMs than the GPU has: nobody else gets the others.

        ``idle_ns``: without an open slot after which a kernel that is not resident leaves. With 0 it leaves at once,
        which is quicker than being asked to. ``spin_s``: how long ``wait`` looks for records without sleeping and
        without a call of the driver, behind each of which another thread may have the interpreter.
        """
        self._idle_ns = RESIDENT_IDLE_NS if is_resident else idle_ns
        self._spin_s = spin_s
        self.mode = mode
        self._is_resident = is_resident
        self.faults: list[Fault] = []
        self.n_steps = 0  # of all launches that have left
        self._program = program
        self._launches = launches
        self._mailbox = launches.mailbox
        self._n_rules = n_rules
        self._clock = clock
        self._slots = OpenSlots(program.sizes.max_slots)
        self._queue: deque[_Command] = deque()
        self._opened_by: dict[int, int] = {}  # slot → number of the command
        self._n_since_cleared = 0  # steps since the exchange area was cleared, before this launch
        self._goes_on = False  # one phase a launch: the next launch continues the last one
        self._n_counted = 0  # steps of the launches that the next one continues
        self._n_faults_in_row = 0
        self._stalls: deque[tuple[int, int]] = deque()
        self._is_running = False
        self._asked_to_leave = False
        self._yield_number = 0  # of the last YIELD among the commands
        self._aborted_at_s: float | None = None
        self._started_at_s = 0.0
        self._beat = 0
        self._beat_at_s: float | None = None  # None until the first step of a launch
        self._forget()
        self._mailbox.take_records()

    @property
    def n_open(self) -> int:
        """Slots that are not done."""
        return len(self._slots)

    @property
    def is_running(self) -> bool:
        """Whether a launch is under way, so far as the last call saw."""
        return self._is_running

    # --- requests ---

    def open(self, slot: int, request: AnyRequest, *, after: Event | None = None) -> int:
        """Begin ``request`` in a free slot. Returns its ticket, which its records carry.

        ``after`` is recorded behind whatever writes the slot's cross cache. A kernel that is not resident has the GPU
        to itself, and that would wait for it: so the kernel is asked to leave, and goes on behind ``after``. A resident
        one is told of the request by the first call of ``records`` that finds ``after`` over.

        Raises:
            RequestError: if the slot is not free or the request is out of range.
        """
        ticket = self._slots.next_ticket
        words = encode(request, ticket=ticket, sizes=self._program.sizes, n_rules=self._n_rules)
        self._slots.open(slot, request)
        self._queue.append(_Command(CommandKind.OPEN, slot, ticket, words, after))
        self._give_commands()
        return ticket

    def cancel(self, slot: int) -> None:
        """Have the slot done soon; its ``DoneRecord`` says CANCELLED unless it was quicker. A free slot stays free."""
        ticket = self._slots.cancel(slot)
        if ticket is not None:
            self._queue.append(_Command(CommandKind.CANCEL, slot, ticket))
            self._give_commands()

    # --- the kernel ---

    def burst(self) -> None:
        """Launch if there is work and nothing runs."""
        self._give_commands()
        if not self._is_running and (self._slots or self._mailbox.n_commands > self._mailbox.n_carried_out):
            self._start()

    def records(self) -> list[SlotRecord]:
        """What came since the last call. Launches again while slots are open, recovers from faults.

        Raises:
            FaultError: if the kernel gives up one phase a launch too, can't be stopped, or says something else after a
                fault than before. Every open slot is lost.
            DriverError: if the device failed. Every open slot is lost.
        """
        has_left = self._is_running and self._launches.has_left()
        taken = self._mailbox.take_records()  # after the look at whether it has left: then nothing is missing
        self._note_carried_out(taken)
        delivered = self._slots.deliver(taken)
        if has_left:
            self._settle()
        elif self._is_running:
            self._watch()
        self.burst()
        return delivered

    def wait(self, timeout_s: float) -> list[SlotRecord]:
        """``records`` as soon as there are any, or when no slot is open, or after ``timeout_s``."""
        deadline_s = self._clock() + timeout_s
        spin_until_s = self._clock() + self._spin_s
        while self._is_running and not self._mailbox.has_record and self._clock() < spin_until_s:
            pass
        while not (records := self.records()) and self._slots and self._clock() < deadline_s:
            time.sleep(_POLL_S)
        return records

    def finish(self, timeout_s: float) -> list[SlotRecord]:
        """``records`` until no slot is open and a kernel that leaves by itself (``idle_ns`` 0) has left.

        Or what came by ``timeout_s``. Quicker than ``wait``, which looks at every record as soon as it comes.
        """
        deadline_s, spin_until_s = (self._clock() + seconds for seconds in (timeout_s, self._spin_s))
        delivered: list[SlotRecord] = []
        is_leaving = False  # its last record is seen once, a moment before the launch is over
        while (now_s := self._clock()) < deadline_s:
            is_leaving = is_leaving or self._mailbox.has_last_record
            if now_s < spin_until_s and self._is_running and not is_leaving:
                continue
            delivered += self.records()
            if not self._is_running and not self._slots:
                break
            if now_s >= spin_until_s:
                time.sleep(_POLL_S)
        return delivered

    def leave(self) -> None:
        """Have the kernel leave now rather than after its idle time, and return when it has: the GPU is others' then.

        Raises:
            RequestError: if a slot is open.
            FaultError, DriverError: as ``records``.
        """
        if self._slots:
            raise RequestError(f"{len(self._slots)} slots are open: the kernel stays for them")
        if self._is_running and self._idle_ns > 0:
            self._ask_to_leave()
        while self._is_running:
            self.records()

    def close(self) -> None:
        """Drop every slot, have the kernel leave, free what it used."""
        self._queue.clear()
        if self._is_running and self._mailbox.has_room:
            self._mailbox.give(CommandKind.STOP)
        self._leave_within(LEAVE_TIMEOUT_S)
        if self._is_running:
            self._mailbox.set_abort(abort=True)
            self._leave_within(LEAVE_TIMEOUT_S)
        if self._is_running:
            raise FaultError("the kernel does not leave, so its memory can't be freed")
        self._launches.close()

    def inject_stall(self, *, sm: int, step: int) -> None:
        """For tests: ``sm`` stops at ``step`` of the next launch, as if it hung. Another call: in the one behind."""
        self._stalls.append((sm, step))

    # --- commands ---

    def _give_commands(self) -> None:
        """Hand over what waits, in order, as far as the ring has room and what must come first has run."""
        while self._queue and self._mailbox.has_room:
            command = self._queue[0]
            if command.after is not None and not self._may_give(command.after):
                return
            self._queue.popleft()
            self._give(command)

    def _may_give(self, after: Event) -> bool:
        if after.query():
            return True
        if not self._is_running:
            self._launches.wait_for(after)  # the launch that sees the command comes behind it
            return True
        if not self._is_resident:
            self._ask_to_leave()
        return False

    def _ask_to_leave(self) -> None:
        if self.mode is Mode.LOOP and not self._asked_to_leave and self._mailbox.has_room:
            self._asked_to_leave = True
            self._yield_number = self._mailbox.give(CommandKind.YIELD)

    def _give(self, command: _Command) -> None:
        if command.words is not None:
            self._mailbox.put_request(command.slot, command.words)
        number = self._mailbox.give(command.kind, slot=command.slot, ticket=command.ticket)
        if command.kind is CommandKind.OPEN:
            self._opened_by[command.slot] = number
            if self._beat_at_s is not None:
                self._beat_at_s = self._clock()  # it may have been idle until now

    def _note_carried_out(self, records: list[Record]) -> None:
        """A slot that is done was opened, so every command up to that OPEN was read."""
        done = [self._opened_by.get(record.slot, 0) for record in records if isinstance(record, DoneRecord)]
        self._mailbox.n_carried_out = max([self._mailbox.n_carried_out, *done])

    # --- launches ---

    def _start(self) -> None:
        epochs = self._program.epochs_per_step
        max_steps = self._max_steps()
        if not self._goes_on and (self._n_since_cleared + max_steps + 1) * epochs > _LARGEST_EPOCH:
            self._launches.clear(state=False)
            self._n_since_cleared = 0
        start = Start(
            mode=self.mode,
            goes_on=self._goes_on,
            epoch=self._n_since_cleared * epochs,
            n_commands=self._mailbox.n_carried_out,
            n_records=self._mailbox.n_records,
            max_steps=max_steps,
            idle_ns=self._idle_ns,
            spin_ns=SPIN_NS,
        )
        self._fill_control(start)
        self._mailbox.clear_beat()
        self._is_running, self._asked_to_leave = True, False
        self._started_at_s, self._beat, self._beat_at_s = self._clock(), 0, None
        self._launches.start(start)

    def _max_steps(self) -> int:
        if self.mode is not Mode.LOOP:
            return MAX_GRAPH_STEPS
        return RESIDENT_STEPS if self._is_resident else MAX_STEPS

    def _fill_control(self, start: Start) -> None:
        control = self._mailbox.control_before
        control[:] = 0
        control[Control.N_COMMANDS] = start.n_commands & 0xFFFFFFFF
        control[Control.N_RECORDS] = start.n_records & 0xFFFFFFFF
        if self._stalls:
            sm, step = self._stalls.popleft()
            control[Control.STALL_SM], control[Control.STALL_STEP] = sm + 1, step

    def _watch(self) -> None:
        """Order the kernel to leave if it makes no step."""
        now_s, beat = self._clock(), self._mailbox.beat
        if self._aborted_at_s is not None:
            if now_s - self._aborted_at_s > LEAVE_TIMEOUT_S:
                raise FaultError(f"{self._program.name}: the kernel neither makes a step nor leaves")
        elif beat != self._beat:
            self._beat, self._beat_at_s = beat, now_s
        elif self._n_given() and self._is_late(now_s):
            log.warning("%s: no step for %.0f ms, so the kernel must leave", self._program.name, BEAT_TIMEOUT_S * 1e3)
            self._aborted_at_s = now_s
            self._mailbox.set_abort(abort=True)

    def _n_given(self) -> int:
        """Open slots that the device knows of."""
        return len(self._slots) - sum(command.kind is CommandKind.OPEN for command in self._queue)

    def _is_late(self, now_s: float) -> bool:
        if self._beat_at_s is None:
            return now_s - self._started_at_s > START_TIMEOUT_S
        return now_s - self._beat_at_s > BEAT_TIMEOUT_S

    def _settle(self) -> None:
        """The kernel has left, and every record it wrote has been taken."""
        control = self._mailbox.control_after
        self._is_running, self._aborted_at_s = False, None
        self._mailbox.set_abort(abort=False)
        n_steps = int(control[Control.N_STEPS])
        self.n_steps += n_steps - self._n_counted
        self._n_counted = 0
        fault = fault_of(control, self._program)
        if fault is not None:
            self._recover(fault)
            return
        self._n_faults_in_row = 0
        self._goes_on = self.mode is not Mode.LOOP and control[Control.LEFT] == 0
        if self._goes_on:
            self._n_counted = n_steps
        else:
            self._n_since_cleared += n_steps
        behind = (self._mailbox.n_commands - int(control[Control.N_COMMANDS])) & _COMMAND_COUNT_MASK
        if behind == 1 and self._yield_number == self._mailbox.n_commands:
            behind = 0  # it left before it was asked to
        self._mailbox.n_carried_out = self._mailbox.n_commands - behind

    # --- faults ---

    def _recover(self, fault: Fault) -> None:
        """Begin every open request again on a device that has forgotten them."""
        self.faults.append(fault)
        self._n_faults_in_row += 1
        if self.mode is not Mode.LOOP:
            raise FaultError(f"{self._program.name}: {fault}, one phase a launch")
        log.warning("%s: %s; %d slots begin again", self._program.name, fault, len(self._slots))
        if self._n_faults_in_row >= N_FAULTS_TO_GRAPH and self._program.sizes.transducer is not None:
            raise FaultError(f"{self._program.name}: {fault}, {N_FAULTS_TO_GRAPH} times in a row")
        if self._n_faults_in_row >= N_FAULTS_TO_GRAPH:
            self.mode = Mode.GRAPH
            log.warning("%s: %d faults in a row: on with one phase a launch", self._program.name, N_FAULTS_TO_GRAPH)
        self._forget()
        self._replay()

    def _forget(self) -> None:
        """Whatever the device was told, it was not."""
        self._launches.clear(state=True)
        self._n_since_cleared = 0
        self._mailbox.n_carried_out = self._mailbox.n_commands

    def _replay(self) -> None:
        for command in self._queue:
            if command.after is not None:
                self._launches.wait_for(command.after)
        self._queue.clear()
        for slot, state in self._slots.replays():
            words = encode(state.request, ticket=state.ticket, sizes=self._program.sizes, n_rules=self._n_rules)
            self._queue.append(_Command(CommandKind.OPEN, slot, state.ticket, words))
            if state.is_cancelled:
                self._queue.append(_Command(CommandKind.CANCEL, slot, state.ticket))

    def _leave_within(self, timeout_s: float) -> None:
        deadline_s = self._clock() + timeout_s
        while self._is_running and self._clock() < deadline_s:
            if self._launches.has_left():
                self._is_running = False
            else:
                time.sleep(_POLL_S)
