"""Words that host and device exchange, read and written from the other side."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megakernel import isa
from megakernel.isa import CommandKind, EndReason, LeaveReason, RecordKind
from megakernel.mailbox import (
    ADDRESSES,
    MAILBOX_BYTES,
    OFFSETS,
    DoneRecord,
    LeftRecord,
    Mailbox,
    SegmentRecord,
    SlotRecord,
    TokenRecord,
)
from megakernel.select import Emitted, record_words


class Device:
    """The other end of the memory, in the device's words."""

    def __init__(self) -> None:
        self.memory = np.zeros(MAILBOX_BYTES, np.uint8)
        self.n_records = 0

    def block(self, name: str, n_words: int) -> NDArray[np.uint32]:
        return self.memory.view(np.uint32)[OFFSETS[name] // 4 :][:n_words]

    def emit(self, emitted: Emitted, *, halves: int = 2) -> None:
        """Write a record, or only its first half."""
        self.n_records += 1
        at = (self.n_records - 1) % isa.RECORD_SLOTS * isa.RECORD_WORDS
        words = record_words(emitted, step=7, sequence=self.n_records)
        n_words = halves * isa.RECORD_WORDS // 2
        self.block("records", isa.RECORD_SLOTS * isa.RECORD_WORDS)[at : at + n_words] = words[:n_words]


def test_blocks_lie_apart_and_inside() -> None:
    begins = sorted(OFFSETS.values())
    assert begins[0] == 0
    assert all(begin % 128 == 0 for begin in begins)
    assert len(set(begins)) == len(OFFSETS)
    assert set(ADDRESSES.values()) <= set(OFFSETS)
    records = OFFSETS["records"] + isa.RECORD_SLOTS * isa.RECORD_WORDS * 4
    assert records <= min(begin for begin in begins if begin > OFFSETS["records"])
    assert begins[-1] + isa.CONTROL_WORDS * 4 <= MAILBOX_BYTES


def test_every_address_of_the_host_is_a_parameter() -> None:
    assert set(ADDRESSES) == {parameter for parameter in isa.Parameter if parameter.name.startswith("HOST_")}


@pytest.mark.parametrize(
    ("emitted", "record"),
    [
        (Emitted(RecordKind.TOKEN, 3, 9, 50257, -0.25, 4), TokenRecord(3, 9, 50257, -0.25, 4, 7)),
        (Emitted(RecordKind.SEGMENT, 7, 9, -2, 11), SegmentRecord(7, 9, -2, 11, 7)),
        (
            Emitted(RecordKind.DONE, 0, 2**32 - 1, EndReason.LIMIT, 0.5, 12),
            DoneRecord(0, 2**32 - 1, EndReason.LIMIT, 0.5, 12, 7),
        ),
    ],
)
def test_a_record_is_read_as_it_was_written(emitted: Emitted, record: SlotRecord) -> None:
    device = Device()
    mailbox = Mailbox(device.memory)
    device.emit(emitted)
    assert mailbox.take_records() == [record]
    assert mailbox.take_records() == []


def test_that_the_kernel_left_is_a_record_too() -> None:
    device = Device()
    device.emit(Emitted(RecordKind.LEFT, 0, 0, LeaveReason.IDLE, 0))
    assert Mailbox(device.memory).take_records() == [LeftRecord(LeaveReason.IDLE, 7)]


def test_the_last_record_is_seen_before_the_others_are_taken() -> None:
    device = Device()
    mailbox = Mailbox(device.memory)
    for _ in range(3):
        assert not mailbox.has_last_record
        for index in range(3):
            device.emit(Emitted(RecordKind.TOKEN, 5, 1, 5, 0.0, index))
        assert not mailbox.has_last_record
        device.emit(Emitted(RecordKind.LEFT, 0, 0, LeaveReason.IDLE, 0))
        assert mailbox.has_last_record
        assert len(mailbox.take_records()) == 4


@given(st.lists(st.integers(0, 300), max_size=40))
def test_any_pace_of_reading_gives_every_record_once(paces: list[int]) -> None:
    device = Device()
    mailbox = Mailbox(device.memory)
    device.n_records = mailbox.n_records = isa.RECORD_SLOTS - 50  # the ring's end is near
    first = device.n_records
    taken = []
    for n_records in paces:
        for _ in range(n_records):
            device.emit(Emitted(RecordKind.TOKEN, 0, 1, device.n_records, 0.0, 0))
        taken += mailbox.take_records()
    assert [record.token for record in taken if isinstance(record, TokenRecord)] == list(range(first, device.n_records))


def test_half_a_record_is_not_read() -> None:
    device = Device()
    mailbox = Mailbox(device.memory)
    device.emit(Emitted(RecordKind.TOKEN, 0, 1, 5, 0.0), halves=1)
    assert mailbox.take_records() == []
    device.n_records = 0
    device.emit(Emitted(RecordKind.TOKEN, 0, 1, 5, 0.0))
    assert len(mailbox.take_records()) == 1


def test_a_record_of_the_last_round_is_not_taken_for_a_new_one() -> None:
    device = Device()
    mailbox = Mailbox(device.memory)
    device.emit(Emitted(RecordKind.TOKEN, 0, 1, 5, 0.0))
    mailbox.n_records = isa.RECORD_SLOTS
    assert mailbox.take_records() == []


def test_a_command_is_in_the_ring_before_the_door_says_so() -> None:
    device = Device()
    mailbox = Mailbox(device.memory)
    assert mailbox.give(CommandKind.OPEN, slot=2, ticket=77) == 1
    assert mailbox.give(CommandKind.CANCEL, slot=2, ticket=77) == 2
    assert device.block("door", 1)[0] == 2
    commands = device.block("commands", 2 * isa.COMMAND_WORDS).reshape(2, -1)
    assert commands.tolist() == [[CommandKind.OPEN, 2, 77, 0], [CommandKind.CANCEL, 2, 77, 0]]


def test_commands_that_were_not_read_are_never_overwritten() -> None:
    mailbox = Mailbox(Device().memory)
    for _ in range(isa.COMMAND_SLOTS):
        assert mailbox.has_room
        mailbox.give(CommandKind.YIELD)
    assert not mailbox.has_room
    mailbox.n_carried_out = 1
    assert mailbox.has_room


def test_requests_abort_and_beat_lie_where_the_device_looks() -> None:
    device = Device()
    mailbox = Mailbox(device.memory)
    mailbox.put_request(5, np.arange(isa.REQUEST_WORDS, dtype=np.uint32))
    mailbox.set_abort(abort=True)
    device.block("beat", 1)[0] = 9
    requests = device.block("requests", isa.MAX_SLOTS * isa.REQUEST_WORDS).reshape(isa.MAX_SLOTS, -1)
    assert requests[5].tolist() == list(range(isa.REQUEST_WORDS))
    assert not requests[4].any()
    assert device.block("abort", 1)[0] == 1
    assert mailbox.beat == 9
    mailbox.clear_beat()
    mailbox.set_abort(abort=False)
    assert device.block("abort", 1)[0] == 0
    assert mailbox.beat == 0
