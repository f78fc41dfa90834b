"""What picks and commands do to slots, and which rows the next step has.

Scalar and pure: the kernel runs the same on every SM and comes to the same slots, rows and records. Knows requests,
their drafts and the rules of markers. Does not know where picks come from (``pick.py`` does), nor how records and
commands cross to the host.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from . import commands as commands_of
from . import isa, numbers
from .draft import resumed
from .ops import Sizes
from .pick import HeadPartial, Mask, Row, float32, pick_of
from .request import Request, decode_request

# ---------------------------------------------------------------------- slots and rows


@dataclass(frozen=True, slots=True)
class Written:
    """What the masks look at: the tokens behind the head, as far as they matter."""

    n_written: int = 0
    last_mark: int = -1  # index of the last marker
    prev_is_mark: bool = False
    prev2_is_mark: bool = False  # the one before

    def after(self, token: int, mark_begin: int) -> "Written":
        """The same with one more token."""
        is_mark = token >= mark_begin
        last_mark = token - mark_begin if is_mark else self.last_mark
        return Written(self.n_written + 1, last_mark, is_mark, self.prev_is_mark)


@dataclass(frozen=True, slots=True)
class Slot:
    """One request under way."""

    request: Request
    ticket: int
    written: Written  # what was fed of the prefix, and every pick
    segment_first: int  # index of the open segment's first token, counted behind the prefix
    n_fed: int = 0  # positions whose keys and values are in the cache
    pending: int = 0  # the pick that is fed next, once the forced tokens are
    cursor: int = 0  # next token of the draft
    n_out: int = 0  # picks, without the end token
    n_verified: int = 0  # tokens of the draft that were picked
    watched: float = 0.0  # probability of the watched token

    @staticmethod
    def of(request: Request, ticket: int) -> "Slot":
        """A slot as it is opened. Where tokens are drawn no draft is tried: what is drawn is not what was guessed."""
        if request.inverse_temperature > 0:
            request = replace(request, draft=())
        return Slot(request, ticket, Written(), segment_first=-len(request.prefix))

    @property
    def n_forced(self) -> int:
        """Tokens that are fed whatever the model picks."""
        return len(self.request.head) + len(self.request.prefix)

    def n_wanted(self) -> int:
        """Rows that this slot could use in one step.

        A draft token is worth a row if the pick behind it is one that may still be written.
        """
        n_own = max(self.n_forced - self.n_fed, 1)
        n_draft = min(len(self.request.draft) - self.cursor, self.request.max_tokens - 1 - self.n_out)
        return n_own + max(n_draft, 0)

    def tokens(self) -> Iterator[int]:
        """What its rows are fed, in order."""
        if self.n_fed < self.n_forced:
            yield from (*self.request.head, *self.request.prefix)[self.n_fed :]
        else:
            yield self.pending
        yield from self.request.draft[self.cursor :]


Slots = tuple[Slot | None, ...]  # None: not active


def rows_of_step(slots: Slots, max_rows: int, sizes: Sizes) -> tuple[Row, ...]:
    """One row for each active slot, and what is left of ``max_rows`` to the slots in order, as far as they want it."""
    n_left = max_rows - sum(slot is not None for slot in slots)
    rows: list[Row] = []
    for index, slot in enumerate(slots):
        if slot is None:
            continue
        n_more = min(slot.n_wanted() - 1, n_left)
        n_left -= n_more
        rows += _rows_of_slot(index, slot, 1 + n_more, sizes)
    return tuple(rows)


def _rows_of_slot(index: int, slot: Slot, n_rows: int, sizes: Sizes) -> Iterator[Row]:
    request, written, n_head = slot.request, slot.written, len(slot.request.head)
    is_pending_written = slot.n_fed >= slot.n_forced  # by the pick that made it
    for offset, token in zip(range(n_rows), slot.tokens(), strict=False):
        position = slot.n_fed + offset
        if position >= n_head and not (offset == 0 and is_pending_written):
            written = written.after(token, sizes.mark_begin)
        yield Row(index, position, token, mask_of(written, request, sizes), request)


def mask_of(written: Written, request: Request, sizes: Sizes) -> Mask:
    """The rules of markers: in pairs around text, never back, an early one first. Without them there are no markers."""
    is_first, begin, end = written.n_written == 0, sizes.mark_begin, sizes.n_tokens
    if not request.markers:
        return Mask(is_first, text=True, end=True, mark_begin=end, mark_end=end)
    if is_first:
        return Mask(
            True, text=False, end=False, mark_begin=begin, mark_end=min(begin + request.max_first_mark + 1, end)
        )
    if not written.prev_is_mark:
        return Mask(False, text=True, end=True, mark_begin=begin + written.last_mark + 1, mark_end=end)
    if written.n_written < 2 or written.prev2_is_mark:  # a segment was opened
        return Mask(False, text=True, end=True, mark_begin=end, mark_end=end)
    return Mask(False, text=False, end=True, mark_begin=begin + written.last_mark, mark_end=end)


# ---------------------------------------------------------------------- what picks and commands do to slots


@dataclass(frozen=True, slots=True)
class Emitted:
    """A record for the host, before it has a number; fields as in ``isa.Record``. ``value`` is a float where its is."""

    kind: isa.RecordKind
    slot: int
    ticket: int
    token: int
    value: float | int
    extra: int = 0


def record_words(emitted: Emitted, *, step: int, sequence: int) -> NDArray[np.uint32]:
    """[RECORD_WORDS] of the record that is number ``sequence``."""
    value = emitted.value if isinstance(emitted.value, int) else numbers.float_word(emitted.value)
    words = np.zeros(isa.RECORD_WORDS, np.uint32)
    words[isa.Record.KIND] = emitted.kind | emitted.slot << 8
    words[isa.Record.TICKET] = emitted.ticket
    words[isa.Record.TOKEN] = emitted.token & 0xFFFFFFFF  # a segment may begin before the first pick
    words[isa.Record.VALUE] = value
    words[isa.Record.EXTRA] = emitted.extra
    words[isa.Record.STEP] = step
    words[isa.Record.FIRST_SEQUENCE] = words[isa.Record.SEQUENCE] = sequence
    return words


def accept(
    slots: Slots, rows: Sequence[Row], merged: Sequence[HeadPartial], sizes: Sizes
) -> tuple[Slots, tuple[Emitted, ...]]:
    """Slots after a step whose ``rows`` had the partials ``merged``, and what the host is told, in order.

    Raises:
        SelectError: if a row that must pick has nothing to pick.
    """
    after = list(slots)
    emitted: list[Emitted] = []
    for index, slot in enumerate(slots):
        own = [(row, partial) for row, partial in zip(rows, merged, strict=True) if row.slot == index]
        if slot is not None:
            after[index], told = _accept_rows(index, slot, own, sizes)
            emitted += told
    return tuple(after), tuple(emitted)


def _accept_rows(
    index: int, slot: Slot, rows: Sequence[tuple[Row, HeadPartial]], sizes: Sizes
) -> tuple[Slot | None, list[Emitted]]:
    told: list[Emitted] = []
    request = slot.request
    for row, partial in rows:
        slot = replace(slot, n_fed=row.position + 1)
        if len(request.head) <= row.position < slot.n_forced:
            slot, _ = _wrote(slot, row.token, sizes)
        if row.is_watched:
            slot = replace(slot, watched=float32(math.exp(partial.watched - partial.all_lse)))
        if row.position + 1 < slot.n_forced:
            continue
        pick = pick_of(partial, request)
        told.append(Emitted(isa.RecordKind.TOKEN, index, slot.ticket, pick.token, pick.logprob, slot.n_out))
        if pick.token == sizes.end_token:
            return None, [*told, _done(index, slot, isa.EndReason.END_TOKEN)]
        slot, segment = _wrote(slot, pick.token, sizes)
        slot = replace(slot, n_out=slot.n_out + 1, pending=pick.token)
        if segment is not None:
            told.append(Emitted(isa.RecordKind.SEGMENT, index, slot.ticket, *segment))
        if slot.n_out == request.max_tokens:
            return None, [*told, _done(index, slot, isa.EndReason.LIMIT)]
        slot, holds = _follow_draft(slot, pick.token)
        if not holds:
            break
    return slot, told


def _wrote(slot: Slot, token: int, sizes: Sizes) -> tuple[Slot, tuple[int, int] | None]:
    """The slot with one more token written; with markers, the segment that it closed: index of its first token, number.

    Indices count behind the prefix, whose own tokens have negative ones.
    """
    before = slot.written
    slot = replace(slot, written=before.after(token, sizes.mark_begin))
    if not (slot.request.markers and token >= sizes.mark_begin):
        return slot, None
    index = before.n_written - len(slot.request.prefix)
    if before.n_written and not before.prev_is_mark:
        return slot, (slot.segment_first, index + 1 - slot.segment_first)
    return replace(slot, segment_first=index), None


def _follow_draft(slot: Slot, token: int) -> tuple[Slot, bool]:
    """Where the draft goes on behind a pick, and whether it held."""
    draft, cursor = slot.request.draft, slot.cursor
    if cursor >= len(draft):
        return slot, False
    if draft[cursor] == token:
        return replace(slot, cursor=cursor + 1, n_verified=slot.n_verified + 1), True
    return replace(slot, cursor=resumed(draft, cursor, token)), False


def _done(index: int, slot: Slot, reason: isa.EndReason) -> Emitted:
    return Emitted(isa.RecordKind.DONE, index, slot.ticket, reason, slot.watched, slot.n_verified)


def carry_out(
    slots: Slots,
    commands: Sequence[Sequence[int]],  # words of ``isa.Command`` each, as of the count in the control word
    requests: Mapping[int, NDArray[np.uint32]],  # [REQUEST_WORDS] by slot
) -> tuple[Slots, tuple[Emitted, ...], isa.LeaveReason | None]:
    """See ``commands.carry_out``."""
    return commands_of.carry_out(
        slots,
        commands,
        lambda index: Slot.of(*decode_request(requests[index])),
        lambda index, slot: _done(index, slot, isa.EndReason.CANCELLED),
    )


def left(reason: isa.LeaveReason) -> Emitted:
    """The last record of a residency."""
    return Emitted(isa.RecordKind.LEFT, 0, 0, reason, 0)
