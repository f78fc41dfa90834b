"""Which frames are looked at, and what their tokens and durations do to a slot."""

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megakernel.errors import RequestError
from megakernel.isa import Command, CommandKind, EndReason, FaultKind, LeaveReason, RecordKind
from megakernel.ops import Sizes, Transducer
from megakernel.pick import SelectError
from megakernel.request import FramePart, TransducerRequest, encode_transducer_request
from megakernel.select import Emitted
from megakernel.transduce import (
    Best,
    Feed,
    FramePick,
    FrameRow,
    Slot,
    Slots,
    Told,
    accept,
    carry_out,
    rows_of_step,
)

BLANK = 9
TRANSDUCER = Transducer(n_frames=64, n_seats=4, blank=BLANK, durations=(0, 1, 2, 4), max_symbols=3)
SIZES = Sizes.for_transducer(width=128, n_layers=1, n_tokens=10, max_slots=4, transducer=TRANSDUCER)


def opened(n_frames: int, first_frame: int = 0, *, begins: bool = True) -> Slot:
    return Slot.of(TransducerRequest((FramePart(n_frames, first_frame, begins),)), 7, TRANSDUCER)


def run(slot: Slot, picks: list[FramePick]) -> tuple[Slot | None, list[Told | Emitted]]:
    """One step of slot 0 alone whose rows have ``picks``."""
    rows = rows_of_step((slot,), len(picks)) if picks else ()
    (after,), told = accept((slot,), rows, picks[: len(rows)], SIZES)
    return after, list(told)


def test_rows_are_shared_out_among_the_slots_that_have_frames() -> None:
    slots: Slots = (opened(5), None, opened(30, 28), opened(2, 2))
    assert rows_of_step(slots, 16) == (*(FrameRow(0, frame) for frame in range(5)), FrameRow(2, 28), FrameRow(2, 29))
    assert len(rows_of_step((opened(64), opened(64), opened(64)), 16)) == 15


def test_blanks_carry_a_slot_on_by_their_durations_and_by_one_frame_at_least() -> None:
    slot, told = run(opened(20), [FramePick(BLANK, 0.0, 0), FramePick(BLANK, 0.0, 2), *[FramePick(3, 1.0, 1)] * 6])
    assert slot is not None
    assert told == [Told(0, 7, row=3, token=3, logit=1.0, frame=3, duration=1)]
    assert (slot.frame, slot.feed, slot.token, slot.is_new) == (4, Feed.TOKEN, 3, False)


def test_a_window_of_blanks_looks_at_the_frames_behind_it_without_a_step_of_the_predictor() -> None:
    slot, told = run(opened(20), [FramePick(BLANK, 0.0, 3)] * 8)
    assert slot is not None and not told
    assert (slot.frame, slot.has_step) == (8, False)
    slot, _ = run(slot, [FramePick(BLANK, 0.0, 3)] * 2)
    assert slot is not None and slot.frame == 12


def test_a_frame_has_as_many_tokens_as_may_be() -> None:
    slot: Slot | None = opened(20)
    frames = []
    for _ in range(4):
        assert slot is not None
        slot, (told,) = run(slot, [FramePick(3, 1.0, 0)])
        assert isinstance(told, Told)
        frames.append(told.frame)
    assert frames == [0, 0, 0, 1]


def test_the_last_token_is_fed_before_a_slot_is_done() -> None:
    slot, told = run(opened(3), [FramePick(BLANK, 0.0, 2), FramePick(0, 0.0, 0), FramePick(4, 1.0, 3)])
    assert slot is not None and len(told) == 1
    assert slot.feed is Feed.TOKEN and not slot.has_rows
    done, told = run(slot, [])
    assert done is None
    assert told == [Emitted(RecordKind.DONE, 0, 7, EndReason.FRAMES, 0.0, 3)]


def test_a_part_follows_the_last_one_in_its_seat() -> None:
    parts = (FramePart(2, begins=True), FramePart(0, seat=2), FramePart(5, 1, begins=True, seat=3))
    slot: Slot | None = Slot.of(TransducerRequest(parts), 7, TRANSDUCER)
    assert slot is not None
    slot, told = run(slot, [FramePick(BLANK, 0.0, 3)] * 2)
    assert slot == Slot(TransducerRequest(parts), 7, 0, Feed.STATE, BLANK, index=1)
    assert told == [Emitted(RecordKind.PART, 0, 7, 0, 0, 2)]
    slot, told = run(slot, [])
    assert slot is not None
    assert (slot.index, slot.frame, slot.feed, slot.is_new) == (2, 1, Feed.TOKEN, True)
    done, told = run(slot, [FramePick(BLANK, 0.0, 3)] * 8)
    assert done is None
    assert told == [Emitted(RecordKind.DONE, 0, 7, EndReason.FRAMES, 0.0, 0)]


def test_a_part_that_continues_has_the_text_and_the_frames_to_pass_over_of_the_one_before() -> None:
    parts = (FramePart(2, begins=True), FramePart(5, seat=2, continues=True))
    slot: Slot | None = Slot.of(TransducerRequest(parts), 7, TRANSDUCER)
    assert slot is not None
    slot, told = run(slot, [FramePick(4, 1.0, 3)] * 2)
    assert slot is not None and slot.feed is Feed.TOKEN
    slot, told = run(slot, [])
    assert slot is not None
    assert told == [Emitted(RecordKind.PART, 0, 7, 0, 0, 2)]
    assert (slot.index, slot.frame, slot.feed, slot.state_seat, slot.has_step) == (1, 2, Feed.NOTHING, 0, False)
    slot, told = run(slot, [FramePick(5, 1.0, 1)])
    assert slot is not None and slot.state_seat == 0
    slot, _ = run(slot, [FramePick(BLANK, 0.0, 1)])
    assert slot is not None and slot.state_seat == 2


@pytest.mark.parametrize(
    "parts",
    [
        (FramePart(2, continues=True),),
        (FramePart(2), FramePart(2, begins=True, continues=True)),
        (FramePart(2), FramePart(2, 1, continues=True)),
    ],
)
def test_a_part_continues_only_behind_another(parts: tuple[FramePart, ...]) -> None:
    with pytest.raises(RequestError, match="only behind another part"):
        encode_transducer_request(TransducerRequest(parts), ticket=1, sizes=SIZES)


def test_what_was_at_hand_is_brought_back_before_the_token_that_waits() -> None:
    slot, _ = run(opened(9), [FramePick(4, 1.0, 1)])
    assert slot is not None
    again = slot.relaunched()
    assert again.resumes and not again.has_rows and again.has_step
    after, told = run(again, [])
    assert after == slot and not told


def test_a_slot_that_no_step_has_seen_goes_on_as_it_was_opened() -> None:
    for slot in (opened(5), opened(5, begins=False)):
        assert slot.relaunched() == slot


def test_a_slot_between_two_windows_looks_on_while_it_is_brought_back() -> None:
    slot, _ = run(opened(9), [FramePick(BLANK, 0.0, 1)])
    assert slot is not None
    assert slot.relaunched() == replace(slot, resumes=True)
    assert slot.relaunched().has_rows


@pytest.mark.parametrize("logit", [math.nan, math.inf, -math.inf])
def test_a_frame_without_a_finite_best_token_is_a_fault(logit: float) -> None:
    with pytest.raises(SelectError) as error:
        run(opened(9), [FramePick(4, logit, 1)])
    assert error.value.kind is FaultKind.NOT_FINITE


def test_of_equal_tokens_the_lowest_is_the_best() -> None:
    assert Best.among([Best(), Best(1.0, 4), Best(1.0, 5), Best(0.5, 6)]) == Best(1.0, 4)


@settings(max_examples=50, deadline=None)
@given(
    picks=st.lists(st.builds(FramePick, st.sampled_from([BLANK, 1, 2]), st.just(0.0), st.integers(0, 3)), min_size=64),
    shares=st.tuples(st.integers(1, 16), st.integers(1, 16)),
)
def test_the_number_of_frames_looked_at_together_changes_nothing(
    picks: list[FramePick], shares: tuple[int, int]
) -> None:
    """Frames' picks depend on the frame and the number of tokens before, as they do on the text."""

    def said(n_rows: int) -> list[tuple[int, int, int]]:
        slot: Slot | None = opened(40)
        tokens: list[tuple[int, int, int]] = []
        for _ in range(1000):
            assert slot is not None
            own = [picks[(frame * 7 + len(tokens)) % len(picks)] for frame in range(slot.frame, slot.frame + n_rows)]
            slot, told = run(slot, own if slot.has_rows else [])
            tokens += [(one.token, one.frame, one.duration) for one in told if isinstance(one, Told)]
            if slot is None:
                return tokens
        raise AssertionError("comes to an end")

    assert said(shares[0]) == said(shares[1])


def command(kind: CommandKind, slot: int, ticket: int = 0) -> list[int]:
    words = {Command.KIND: kind, Command.SLOT: slot, Command.TICKET: ticket, Command.UNUSED: 0}
    return [words[word] for word in Command]


def test_commands_open_cancel_and_leave() -> None:
    words = {1: encode_transducer_request(TransducerRequest((FramePart(5, 2),)), ticket=9, sizes=SIZES)}
    slots, told, leave = carry_out((None,) * 4, [command(CommandKind.OPEN, 1)], words, SIZES)
    assert (
        slots[1] == Slot(TransducerRequest((FramePart(5, 2),)), 9, 2, Feed.STATE, BLANK) and not told and leave is None
    )
    late, told, _ = carry_out(slots, [command(CommandKind.CANCEL, 1, ticket=8)], words, SIZES)
    assert late == slots and not told
    slots, told, leave = carry_out(
        slots, [command(CommandKind.CANCEL, 1, ticket=9), command(CommandKind.YIELD, 0)], words, SIZES
    )
    assert slots[1] is None and leave is LeaveReason.YIELD
    assert [(one.kind, one.token) for one in told] == [(RecordKind.DONE, EndReason.CANCELLED)]


def test_a_slot_can_not_be_opened_twice() -> None:
    words = {0: encode_transducer_request(TransducerRequest((FramePart(5),)), ticket=9, sizes=SIZES)}
    with pytest.raises(SelectError):
        carry_out((opened(3), None), [command(CommandKind.OPEN, 0)], words, SIZES)
