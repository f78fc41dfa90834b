"""The memory that host and device share: commands and requests one way, records the other.

Knows where each block lies and in what order its words are written and read. Works on any memory of ``MAILBOX_BYTES``;
on a GPU it is pinned and mapped (``runtime.py`` allocates it). Does not know what the records mean to a slot
(``slots.py``).

Both sides see whole words: every access is an aligned one of 4 bytes, which neither a processor nor the bus splits.
The order of words matters in two places. The host writes request and command, then the door: x86 keeps the order of
stores, other processors are held to it by a fence. The device writes a record in two halves of 16 bytes that each end
with its number; the host reads both numbers, passes a fence, then reads the rest.
"""

import struct
import threading
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import isa
from .isa import CommandKind, EndReason, LeaveReason, Parameter, RecordKind

_LINE_BYTES = 128  # blocks begin on lines of their own, so that neither side's writes disturb the other's reads
_WORD_BYTES = 4
_WORD_MASK = 0xFFFFFFFF

_BLOCK_WORDS = {  # name → words; the order is the layout's
    "door": 1,
    "beat": 1,
    "abort": 1,
    "commands": isa.COMMAND_SLOTS * isa.COMMAND_WORDS,
    "requests": isa.MAX_SLOTS * isa.REQUEST_WORDS,
    "records": isa.RECORD_SLOTS * isa.RECORD_WORDS,
    "control_before": isa.CONTROL_WORDS,  # copied to the device in front of a launch
    "control_after": isa.CONTROL_WORDS,  # copied from the device behind it
}


def _offsets() -> tuple[dict[str, int], int]:
    offsets, end = {}, 0
    for name, words in _BLOCK_WORDS.items():
        offsets[name] = end
        end += -(-words * _WORD_BYTES // _LINE_BYTES) * _LINE_BYTES
    return offsets, end


OFFSETS, MAILBOX_BYTES = _offsets()  # block → byte

ADDRESSES = {  # parameter → the block whose address it is
    Parameter.HOST_DOOR: "door",
    Parameter.HOST_BEAT: "beat",
    Parameter.HOST_ABORT: "abort",
    Parameter.HOST_COMMANDS: "commands",
    Parameter.HOST_REQUESTS: "requests",
    Parameter.HOST_RECORDS: "records",
}


@dataclass(frozen=True, slots=True)
class TokenRecord:
    """A slot's next token. ``index`` counts the tokens written behind the prefix, from 0; the end token has one too."""

    slot: int
    ticket: int
    token: int
    log_probability: float
    index: int
    step: int


@dataclass(frozen=True, slots=True)
class SegmentRecord:
    """A marker closed a segment: tokens ``first`` to ``first + n_tokens``, both markers among them.

    Tokens behind the prefix count from 0, those of the prefix are negative.
    """

    slot: int
    ticket: int
    first: int
    n_tokens: int
    step: int


@dataclass(frozen=True, slots=True)
class DoneRecord:
    """The slot is free. ``watched`` is the watched token's probability, 0 if none was; ``n_verified`` of the draft.

    A transducer verifies nothing: its ``n_verified`` are the frames past the last that the last duration reaches to.
    """

    slot: int
    ticket: int
    reason: EndReason
    watched: float
    n_verified: int
    step: int


@dataclass(frozen=True, slots=True)
class EmissionRecord:
    """A transducer's next token: the frame that it was found at, and for how many frames it holds."""

    slot: int
    ticket: int
    token: int
    log_probability: float
    frame: int
    duration: int
    step: int


@dataclass(frozen=True, slots=True)
class PartRecord:
    """A part of a transducer's request is done, and the next one begins. ``n_past``: frames past its last one."""

    slot: int
    ticket: int
    n_past: int
    step: int


@dataclass(frozen=True, slots=True)
class LeftRecord:
    """The kernel has left; nothing follows until the next launch."""

    reason: LeaveReason
    step: int


SlotRecord = TokenRecord | SegmentRecord | EmissionRecord | PartRecord | DoneRecord
Record = SlotRecord | LeftRecord


_RUN_RECORDS = 256  # looked at together
SLOT_FACTOR = 256  # a record's first word: its kind plus this times its slot
_WORD, _FLOAT, _INDEX = (struct.Struct(code) for code in "Ifi")


def decode_record(words: NDArray[np.uint32]) -> Record:  # [RECORD_WORDS]
    """What the device said."""
    return _decode(words.tolist())


def _decode(body: list[int]) -> Record:
    slot, kind = divmod(body[isa.Record.KIND], SLOT_FACTOR)
    ticket, token, value, step = (
        body[isa.Record.TICKET],
        body[isa.Record.TOKEN],
        body[isa.Record.VALUE],
        body[isa.Record.STEP],
    )
    match kind:
        case RecordKind.TOKEN:
            return TokenRecord(slot, ticket, token, _as_float(value), body[isa.Record.EXTRA], step)
        case RecordKind.SEGMENT:
            return SegmentRecord(slot, ticket, _INDEX.unpack(_WORD.pack(token))[0], value, step)
        case RecordKind.EMISSION:
            frame, duration = divmod(body[isa.Record.EXTRA], isa.EXTRA_DURATIONS)
            return EmissionRecord(slot, ticket, token, _as_float(value), frame, duration, step)
        case RecordKind.PART:
            return PartRecord(slot, ticket, body[isa.Record.EXTRA], step)
        case RecordKind.DONE:
            return DoneRecord(slot, ticket, EndReason(token), _as_float(value), body[isa.Record.EXTRA], step)
        case _:
            assert kind == RecordKind.LEFT, f"a record of kind {kind}"
            return LeftRecord(LeaveReason(token), step)


def _as_float(word: int) -> float:
    value: float = _FLOAT.unpack(_WORD.pack(word))[0]
    return value


class Mailbox:
    """The host's end. One thread at a time."""

    def __init__(self, memory: NDArray[np.uint8]) -> None:  # [MAILBOX_BYTES], zeros
        words = memory.view(np.uint32)
        blocks = {name: words[OFFSETS[name] // _WORD_BYTES :][:n_words] for name, n_words in _BLOCK_WORDS.items()}
        self._door, self._beat, self._abort = blocks["door"], blocks["beat"], blocks["abort"]
        self._commands = blocks["commands"].reshape(isa.COMMAND_SLOTS, isa.COMMAND_WORDS)
        self._requests = blocks["requests"].reshape(isa.MAX_SLOTS, isa.REQUEST_WORDS)
        self._records = blocks["records"].reshape(isa.RECORD_SLOTS, isa.RECORD_WORDS)
        self.control_before = blocks["control_before"]
        self.control_after = blocks["control_after"]
        self._fences = (threading.Lock(), threading.Lock())
        self.n_commands = 0  # given so far
        self.n_carried_out = 0  # of these, at least
        self.n_records = 0  # taken so far
        self._n_seen = 0  # looked at for the last one

    # --- to the device ---

    @property
    def has_room(self) -> bool:
        """Whether a command may be given without one that was not read yet being lost."""
        return self.n_commands - self.n_carried_out < isa.COMMAND_SLOTS

    def give(self, kind: CommandKind, *, slot: int = 0, ticket: int = 0) -> int:
        """Ring the door with a command. Returns its number, from 1."""
        assert self.has_room, "the ring of commands is full"
        self._commands[self.n_commands % isa.COMMAND_SLOTS] = (kind, slot, ticket, 0)
        self.n_commands += 1
        self._fence()
        self._door[0] = self.n_commands & _WORD_MASK
        return self.n_commands

    def put_request(self, slot: int, words: NDArray[np.uint32]) -> None:  # [REQUEST_WORDS]
        """Write the request that the next OPEN of ``slot`` is about. The slot must be free."""
        self._requests[slot] = words

    def set_abort(self, *, abort: bool) -> None:
        """Make the kernel leave at once, or let it stay."""
        self._abort[0] = abort

    # --- from the device ---

    @property
    def beat(self) -> int:
        """Steps of this launch so far."""
        return int(self._beat[0])

    def clear_beat(self) -> None:
        """To be called before a launch."""
        self._beat[0] = 0

    @property
    def has_record(self) -> bool:
        """Whether the next record has begun to come."""
        place = self.n_records % isa.RECORD_SLOTS
        return int(self._records[place, isa.Record.FIRST_SEQUENCE]) == (self.n_records + 1) & _WORD_MASK

    @property
    def has_last_record(self) -> bool:
        """Whether a record has begun to come that says that the kernel leaves. Cheap: asked again and again."""
        while True:
            words = self._records[self._n_seen % isa.RECORD_SLOTS]
            if int(words[isa.Record.FIRST_SEQUENCE]) != (self._n_seen + 1) & _WORD_MASK:
                return False
            if int(words[isa.Record.KIND]) % SLOT_FACTOR == RecordKind.LEFT:
                return True
            self._n_seen += 1

    def take_records(self) -> list[Record]:
        """Whole records that were not taken yet, in order."""
        taken: list[Record] = []
        while self.has_record and (run := self._next_run()):
            taken += run
        return taken

    def _next_run(self) -> list[Record]:
        """Whole records that lie one after the other, out of numpy in few steps: many slots speak every 20 µs."""
        place = self.n_records % isa.RECORD_SLOTS
        words = self._records[place : place + _RUN_RECORDS]
        expected = (self.n_records + 1 + np.arange(len(words))) & _WORD_MASK
        is_whole = (words[:, isa.Record.FIRST_SEQUENCE] == expected) & (words[:, isa.Record.SEQUENCE] == expected)
        n_whole = len(words) if is_whole.all() else int(is_whole.argmin())
        self._fence()
        self.n_records += n_whole
        self._n_seen = max(self._n_seen, self.n_records)
        return [_decode(body) for body in words[:n_whole].tolist()]

    def _fence(self) -> None:
        """What was accessed before is ordered before what is accessed after, on every processor.

        Python offers no fence. Taking and giving back a lock orders one way each; two locks in a row order both ways.
        """
        for lock in self._fences:
            with lock:
                pass
