"""Rows, masks and slots on random logits: neither drafts, neighbours nor the number of rows change what is written."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megakernel.isa import CommandKind, EndReason, FaultKind, LeaveReason, RecordKind
from megakernel.mailbox import DoneRecord, LeftRecord, SegmentRecord, TokenRecord, decode_record
from megakernel.pick import Mask, SelectError, allowed_tokens, merge, partial_of
from megakernel.request import Request, encode_request
from megakernel.select import (
    Emitted,
    Slot,
    Slots,
    Written,
    accept,
    carry_out,
    left,
    mask_of,
    record_words,
    rows_of_step,
)
from tests.megakernel.small import BITMAPS, FEW_TOKENS, MARKED, PLAIN

END, MARK = FEW_TOKENS.end_token, FEW_TOKENS.mark_begin
WHOLE = ((0, FEW_TOKENS.n_tokens),)

Logits = Callable[[tuple[int, ...]], NDArray[np.float32]]  # [n_tokens] behind these tokens


def drawn(seed: int) -> Logits:
    """Logits that are a function of the tokens fed so far, the end now and then among the likely ones."""

    def logits(fed: tuple[int, ...]) -> NDArray[np.float32]:
        rng = np.random.default_rng([seed, *fed])
        spread: NDArray[np.float32] = rng.normal(scale=2, size=FEW_TOKENS.n_tokens).astype(np.float32)
        return spread

    return logits


def counting(fed: tuple[int, ...]) -> NDArray[np.float32]:
    """Logits that write another token at every position, and no end."""
    logits = np.zeros(45, np.float32)
    logits[4 + len(fed) % 26] = 9
    return logits


class Machine:
    """Slots that go on step by step, and the tokens that stand at their positions."""

    def __init__(self, slots: Slots, logits: Logits, max_rows: int = 16, ranges: Sequence[tuple[int, int]] = WHOLE):
        self.slots, self.logits, self.max_rows, self.ranges = slots, logits, max_rows, ranges
        self.fed: list[list[int]] = [[] for _ in slots]
        self.told: list[Emitted] = []
        self.n_steps = 0

    def step(self) -> None:
        rows = rows_of_step(self.slots, self.max_rows, FEW_TOKENS)
        merged = []
        for row in rows:
            fed = self.fed[row.slot]
            fed[row.position :] = [row.token]
            logits, allowed = self.logits(tuple(fed)), allowed_tokens(row, BITMAPS, FEW_TOKENS)
            parts = [partial_of(logits[first : first + n], first, row, allowed, FEW_TOKENS) for first, n in self.ranges]
            merged.append(merge(parts))
        self.slots, told = accept(self.slots, rows, merged, FEW_TOKENS)
        self.told += told
        self.n_steps += 1

    def run(self) -> list[Emitted]:
        while any(self.slots):
            self.step()
        return self.told


def written_by(request: Request, logits: Logits, **options: object) -> list[Emitted]:
    """What the host is told of one request alone; how much of the draft held is left out."""
    machine = Machine((Slot.of(request, 7),), logits, **options)  # type: ignore[arg-type]
    return without_drafts(machine.run())


def without_drafts(told: Sequence[Emitted]) -> list[Emitted]:
    return [replace(record, extra=0) if record.kind is RecordKind.DONE else record for record in told]


def tokens_of(told: Sequence[Emitted]) -> list[int]:
    return [record.token for record in told if record.kind is RecordKind.TOKEN]


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """Any request without a draft, that fits."""
    markers = draw(st.booleans())
    marks = [MARK, 8, MARK + 2, MARK + 2, 9]
    return Request(
        head=tuple(draw(st.lists(st.integers(0, END), min_size=1, max_size=20))),
        prefix=tuple(marks[: draw(st.integers(0, 5))]),
        max_tokens=draw(st.integers(1, 20)),
        n_positions=10,
        markers=markers,
        max_first_mark=draw(st.integers(0, 13)),
        watch_row=0,
        watch_token=draw(st.integers(0, 44)),
        inverse_temperature=draw(st.sampled_from([0.0, 1.0, 2.5])),
        seed=draw(st.integers(0, 9)),
    )


def draft_near(tokens: Sequence[int], seed: int) -> tuple[int, ...]:
    """``tokens`` with some replaced, dropped or put in between."""
    rng = random.Random(seed)
    draft: list[int] = []
    for token in tokens:
        change = rng.choice(["keep"] * 6 + ["replace", "drop", "insert"])
        draft += {"keep": [token], "replace": [rng.randrange(45)], "drop": [], "insert": [rng.randrange(45), token]}[
            change
        ]
    return tuple(draft)


# ---------------------------------------------------------------------- the outcome


@settings(max_examples=60, deadline=None)
@given(requests(), st.integers(0, 999), st.integers(1, 16), st.integers(1, 45))
def test_neither_draft_nor_rows_nor_sms_change_what_is_written(
    request_: Request, seed: int, max_rows: int, n_of_sm: int
) -> None:
    expected = written_by(request_, drawn(seed), max_rows=1)
    draft = draft_near(tokens_of(expected), seed)
    ranges = [(first, min(n_of_sm, 45 - first)) for first in range(0, 45, n_of_sm)]
    found = written_by(replace(request_, draft=draft), drawn(seed), max_rows=max_rows, ranges=ranges)
    assert [replace(record, value=0) for record in found] == [replace(record, value=0) for record in expected]
    assert [record.value for record in found] == pytest.approx([record.value for record in expected], abs=1e-5)


@settings(max_examples=30, deadline=None)
@given(st.lists(requests(), min_size=2, max_size=4), st.integers(0, 999))
def test_neighbours_change_nothing(several: list[Request], seed: int) -> None:
    slots = tuple(Slot.of(request, 7) for request in several)
    told = without_drafts(Machine(slots, drawn(seed)).run())
    for index, request in enumerate(several):
        own = [replace(record, slot=0) for record in told if record.slot == index]
        assert own == written_by(request, drawn(seed))


def steps_with(draft: Sequence[int], request: Request) -> int:
    machine = Machine((Slot.of(replace(request, draft=tuple(draft)), 7),), counting)
    machine.run()
    return machine.n_steps


def test_the_right_draft_takes_few_steps() -> None:
    request = replace(PLAIN, max_tokens=40)
    tokens = tokens_of(written_by(request, counting))
    assert steps_with([], request) == 40
    assert steps_with(tokens, request) == math.ceil((2 + 39) / 16)


def test_how_much_of_a_draft_held_is_told() -> None:
    tokens = tokens_of(written_by(PLAIN, counting))
    told = Machine((Slot.of(replace(PLAIN, draft=tuple(tokens[:5])), 7),), counting).run()
    assert told[-1].extra == 5


def test_a_word_too_many_or_another_one_costs_one_more_step() -> None:
    tokens = tokens_of(written_by(PLAIN, counting))
    before, behind = tokens[:3], tokens[3:]
    for draft in ([*before, 44, *behind], [*before, 44, 44, *behind], [*before, 44, *behind[1:]]):
        assert steps_with(draft, PLAIN) == 2


def test_a_word_too_few_costs_two_more_steps() -> None:
    tokens = tokens_of(written_by(PLAIN, counting))
    assert steps_with([*tokens[:3], *tokens[4:]], PLAIN) == 3


@settings(max_examples=60, deadline=None)
@given(requests(), st.integers(0, 999))
def test_markers_come_in_pairs_around_segments_that_are_told_at_once(request_: Request, seed: int) -> None:
    request_ = replace(request_, markers=True)
    told = written_by(request_, drawn(seed))
    everything = [*request_.prefix, *tokens_of(told)]
    segments = [record for record in told if record.kind is RecordKind.SEGMENT]
    for record in segments:
        begin = record.token + len(request_.prefix)
        own = everything[begin : begin + int(record.value)]
        assert [token >= MARK for token in own] == [True, *[False] * (len(own) - 2), True]
        assert own[0] <= own[-1]
        assert told[told.index(record) - 1].token == own[-1]
    marks = [token for token in everything if token >= MARK]
    assert marks == sorted(marks)
    n_closed = sum(a < MARK <= b for a, b in zip(everything, everything[1:], strict=False))
    n_before = sum(a < MARK <= b for a, b in zip(request_.prefix, request_.prefix[1:], strict=False))
    assert len(segments) == n_closed - n_before


def test_the_watched_probability_is_that_before_any_mask() -> None:
    request = replace(PLAIN, watch_row=1, watch_token=3, max_tokens=3)
    logits = drawn(0)((1, 2)).astype(np.float64)
    expected = math.exp(logits[3]) / np.exp(logits).sum()
    assert written_by(request, drawn(0))[-1].value == pytest.approx(expected, rel=1e-5)


def test_the_end_is_told_and_not_counted() -> None:
    def to_end(fed: tuple[int, ...]) -> NDArray[np.float32]:
        logits = np.zeros(45, np.float32)
        logits[8 if len(fed) < 4 else END] = 20
        return logits

    told = written_by(PLAIN, to_end)
    assert tokens_of(told) == [8, 8, END]
    assert [record.extra for record in told[:3]] == [0, 1, 2]
    assert (told[-1].kind, told[-1].token) == (RecordKind.DONE, EndReason.END_TOKEN)


def test_a_limit_ends_a_slot() -> None:
    told = written_by(replace(PLAIN, max_tokens=4), drawn(4))
    assert len(tokens_of(told)) == 4
    assert told[-1].token == EndReason.LIMIT


# ---------------------------------------------------------------------- rows


@st.composite
def open_slots(draw: st.DrawFn) -> Slots:
    return tuple(draw(st.lists(st.none() | st.builds(_slot_on_the_way, requests(), st.integers(0, 99)), max_size=4)))


def _slot_on_the_way(request: Request, seed: int) -> Slot:
    """A slot with a draft, some steps after it was opened."""
    tokens = tokens_of(written_by(request, drawn(seed)))
    machine = Machine((Slot.of(replace(request, draft=draft_near(tokens, seed)), 7),), drawn(seed), max_rows=3)
    before = machine.slots[0]
    for _ in range(seed % 9):
        if machine.slots[0] is not None:
            before = machine.slots[0]
            machine.step()
    assert before is not None
    return before


@settings(max_examples=60, deadline=None)
@given(open_slots(), st.integers(4, 16))
def test_rows_are_shared_out_in_the_order_of_slots(slots: Slots, max_rows: int) -> None:
    rows = rows_of_step(slots, max_rows, FEW_TOKENS)
    assert len(rows) <= max_rows
    assert [row.slot for row in rows] == sorted(row.slot for row in rows)
    n_left = max_rows - sum(slot is not None for slot in slots)
    for index, slot in enumerate(slots):
        own = [row for row in rows if row.slot == index]
        if slot is None:
            assert own == []
            continue
        assert [row.position for row in own] == list(range(slot.n_fed, slot.n_fed + len(own)))
        assert [row.token for row in own] == list(slot.tokens())[: len(own)]
        assert len(own) == 1 + min(slot.n_wanted() - 1, n_left)
        n_left -= len(own) - 1
        assert own[-1].position < slot.n_forced + slot.request.max_tokens - 1


def test_a_draft_is_tried_only_as_far_as_it_may_be_written() -> None:
    request = replace(PLAIN, max_tokens=3, draft=(8, 9, 10, 11))
    rows = rows_of_step((Slot.of(request, 1),), 16, FEW_TOKENS)
    assert [row.token for row in rows] == [1, 2, 8, 9]


# ---------------------------------------------------------------------- masks


def mask_behind(tokens: Sequence[int], request: Request = MARKED) -> Mask:
    written = Written()
    for token in tokens:
        written = written.after(token, MARK)
    return mask_of(written, request, FEW_TOKENS)


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([], Mask(True, text=False, end=False, mark_begin=31, mark_end=37)),
        ([MARK + 1], Mask(False, text=True, end=True, mark_begin=45, mark_end=45)),
        ([MARK + 1, 8], Mask(False, text=True, end=True, mark_begin=33, mark_end=45)),
        ([MARK + 1, 8, MARK + 4], Mask(False, text=False, end=True, mark_begin=35, mark_end=45)),
        ([MARK + 1, 8, MARK + 4, MARK + 4], Mask(False, text=True, end=True, mark_begin=45, mark_end=45)),
        ([8, 9], Mask(False, text=True, end=True, mark_begin=31, mark_end=45)),
    ],
)
def test_classes_of_tokens_follow_what_is_written(tokens: list[int], expected: Mask) -> None:
    assert mask_behind(tokens) == expected


def test_without_markers_text_and_end_are_allowed() -> None:
    assert mask_behind([], PLAIN) == Mask(True, text=True, end=True, mark_begin=45, mark_end=45)
    assert mask_behind([8], PLAIN) == Mask(False, text=True, end=True, mark_begin=45, mark_end=45)


# ---------------------------------------------------------------------- commands and records


def words_of(request: Request, ticket: int = 7) -> NDArray[np.uint32]:
    return encode_request(request, ticket=ticket, sizes=FEW_TOKENS, n_rules=1)


def test_a_slot_is_opened_with_its_request() -> None:
    request = replace(MARKED, prefix=(31, 8), draft=(9, 10), n_plain=4, tail_bias=0.5, watch_row=1, seed=3)
    slots, told, leave = carry_out((None, None), [(CommandKind.OPEN, 1, 7, 0)], {1: words_of(request)})
    assert slots == (None, Slot.of(request, 7))
    assert (told, leave) == ((), None)


def test_a_cancelled_slot_says_how_far_it_came() -> None:
    machine = Machine((Slot.of(PLAIN, 7),), drawn(4))
    machine.step()
    slots, told, _ = carry_out(machine.slots, [(CommandKind.CANCEL, 0, 7, 0)], {})
    assert slots == (None,)
    assert told == (Emitted(RecordKind.DONE, 0, 7, EndReason.CANCELLED, 0.0, 0),)


@pytest.mark.parametrize("slots", [(None,), (Slot.of(PLAIN, 8),)])
def test_a_late_cancellation_does_nothing(slots: Slots) -> None:
    assert carry_out(slots, [(CommandKind.CANCEL, 0, 7, 0)], {}) == (slots, (), None)


def test_yield_keeps_the_slots_and_stop_drops_them() -> None:
    slots = (Slot.of(PLAIN, 7), None)
    assert carry_out(slots, [(CommandKind.YIELD, 0, 0, 0)], {}) == (slots, (), LeaveReason.YIELD)
    assert carry_out(slots, [(CommandKind.STOP, 0, 0, 0)], {}) == ((None, None), (), LeaveReason.STOP)


@pytest.mark.parametrize(
    "command", [(CommandKind.OPEN, 0, 1, 0), (CommandKind.OPEN, 9, 1, 0), (CommandKind.CANCEL, 9, 1, 0), (0, 0, 0, 0)]
)
def test_a_command_that_can_not_be_carried_out_is_a_fault(command: tuple[int, int, int, int]) -> None:
    with pytest.raises(SelectError) as caught:
        carry_out((Slot.of(PLAIN, 7),), [command], {0: words_of(PLAIN), 9: words_of(PLAIN)})
    assert caught.value.kind is FaultKind.BAD_COMMAND


TOLD = [
    (Emitted(RecordKind.TOKEN, 3, 9, 44, -0.5, 6), TokenRecord(3, 9, 44, -0.5, 6, step=5)),
    (Emitted(RecordKind.SEGMENT, 1, 9, -3, 4), SegmentRecord(1, 9, -3, 4, step=5)),
    (Emitted(RecordKind.DONE, 0, 9, 2, 0.25, 7), DoneRecord(0, 9, EndReason.LIMIT, 0.25, 7, step=5)),
    (left(LeaveReason.YIELD), LeftRecord(LeaveReason.YIELD, step=5)),
]


@pytest.mark.parametrize(("told", "expected"), TOLD)
def test_the_host_reads_what_the_device_tells(told: Emitted, expected: object) -> None:
    words = record_words(told, step=5, sequence=77)
    assert decode_record(words) == expected
    assert words[3] == words[7] == 77
