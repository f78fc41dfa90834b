"""What is delivered, held back and given again, slot by slot."""

import pytest

from megakernel.errors import FaultError, RequestError
from megakernel.isa import REQUEST_TOKENS, EndReason, LeaveReason
from megakernel.mailbox import DoneRecord, LeftRecord, SegmentRecord, SlotRecord, TokenRecord
from megakernel.request import Request
from megakernel.slots import OpenSlots

REQUEST = Request(head=(1, 2), prefix=(3,), draft=(10, 11, 12, 13), max_tokens=20, n_positions=5)


def token(index: int, value: int, *, ticket: int = 1) -> TokenRecord:
    return TokenRecord(0, ticket, value, -0.5, index, 0)


def test_records_of_other_tickets_and_free_slots_are_dropped() -> None:
    slots = OpenSlots(2)
    assert slots.deliver([token(0, 10)]) == []
    assert slots.open(0, REQUEST) == 1
    assert slots.deliver([token(0, 10, ticket=9), LeftRecord(LeaveReason.IDLE, 4)]) == []
    done = DoneRecord(0, 1, EndReason.LIMIT, 0.0, 0, 0)
    assert slots.deliver([token(0, 10), done, token(1, 11), done]) == [token(0, 10), done]
    assert len(slots) == 0
    assert slots.open(0, REQUEST) == 2


def test_a_request_that_begins_again_drafts_what_it_has_delivered() -> None:
    slots = OpenSlots(1)
    slots.open(0, REQUEST)
    slots.deliver([token(0, 10), token(1, 99)])
    ((slot, state),) = slots.replays()
    assert (slot, state.ticket) == (0, 1)
    assert state.request.draft == (10, 99, 12, 13)
    assert (state.request.head, state.request.prefix, state.request.max_tokens) == ((1, 2), (3,), 20)


def test_a_draft_never_outgrows_a_request() -> None:
    slots = OpenSlots(1)
    slots.open(0, Request(head=(1,) * 300, max_tokens=250, n_positions=5))
    slots.deliver([token(index, index) for index in range(240)])
    ((_, state),) = slots.replays()
    assert state.request.draft == tuple(range(REQUEST_TOKENS - 300))


def test_what_comes_a_second_time_is_held_back() -> None:
    slots = OpenSlots(1)
    slots.open(0, REQUEST)
    first, second = SegmentRecord(0, 1, 0, 2, 0), SegmentRecord(0, 1, 2, 2, 0)
    slots.deliver([token(0, 10), token(1, 11), first, token(2, 12)])
    slots.replays()
    again: list[SlotRecord] = [token(0, 10), token(1, 11), first, token(2, 12), token(3, 13), second]
    assert slots.deliver(again) == [token(3, 13), second]


def test_a_token_that_changes_with_a_fault_is_an_error() -> None:
    slots = OpenSlots(1)
    slots.open(0, REQUEST)
    slots.deliver([token(0, 10), token(1, 11)])
    slots.replays()
    with pytest.raises(FaultError, match="slot 0: token 1 was 11 before a fault, and is 12 after it"):
        slots.deliver([token(0, 10), token(1, 12)])


def test_a_slot_is_cancelled_once() -> None:
    slots = OpenSlots(1)
    assert slots.cancel(0) is None
    ticket = slots.open(0, REQUEST)
    assert slots.cancel(0) == ticket
    assert slots.cancel(0) is None
    assert slots.replays()[0][1].is_cancelled


def test_a_slot_that_is_open_or_not_there_can_not_be_opened() -> None:
    slots = OpenSlots(1)
    slots.open(0, REQUEST)
    for slot, says in ((0, "is open"), (1, "there are 1"), (-1, "there are 1")):
        with pytest.raises(RequestError, match=says):
            slots.open(slot, REQUEST)
    assert slots.next_ticket == 2
