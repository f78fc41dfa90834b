"""What becomes of the logits: rows of a step, masks, the pick of each row, and what it does to a slot.

Scalar and pure: the kernel runs the same on every SM and comes to the same slots, rows and records. Knows tokens,
classes of tokens (text with the end token; markers, which come in pairs around text) and requests. Does not know where
logits come from, nor how records and commands cross to the host.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from . import isa, numbers
from .ops import Sizes
from .request import Request, decode_request

_MERGE_GROUP = 32  # SMs whose log-sum-exps one warp merges
_LOWEST = -math.inf


class SelectError(Exception):
    """The step can't go on; ``kind`` is what the fault record says."""

    def __init__(self, kind: isa.FaultKind, what: str) -> None:
        super().__init__(what)
        self.kind = kind


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


@dataclass(frozen=True, slots=True)
class Mask:
    """Which classes of tokens may be picked; the bitmap is on top."""

    is_first: bool  # nothing is written yet
    text: bool
    end: bool
    mark_begin: int  # markers from this token
    mark_end: int  # to this one, half-open


@dataclass(frozen=True, slots=True)
class Row:
    """One (slot, position) of a step."""

    slot: int
    position: int
    token: int
    mask: Mask  # of the token that this row picks
    request: Request

    @property
    def is_watched(self) -> bool:
        """Whether the watched token's probability is taken here."""
        return self.position == self.request.watch_row


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


def allowed_tokens(row: Row, bitmaps: NDArray[np.uint32], sizes: Sizes) -> NDArray[np.bool_]:
    """[n_tokens]: what the row may pick. ``bitmaps`` [n_rules, 2, ceil(n_tokens / 32)] are those of ``isa``."""
    words = np.ascontiguousarray(bitmaps[row.request.rules, int(row.mask.is_first)], "<u4")
    allowed: NDArray[np.bool_] = np.unpackbits(words.view(np.uint8), bitorder="little")[: sizes.n_tokens] == 0
    ends = allowed[sizes.end_token] and row.mask.end
    if not row.mask.text:
        allowed[: sizes.mark_begin] = False
    allowed[sizes.end_token] = ends
    allowed[sizes.mark_begin : row.mask.mark_begin] = False
    allowed[row.mask.mark_end :] = False
    return allowed


# ---------------------------------------------------------------------- from logits to one pick


@dataclass(frozen=True, slots=True)
class HeadPartial:
    """What one SM, or all, found among its tokens for one row; the words of ``isa.Partial``, as numbers."""

    text_score: float = _LOWEST
    text_token: int = 0
    text_logit: float = _LOWEST
    text_max: float = _LOWEST
    text_lse: float = _LOWEST
    mark_score: float = _LOWEST
    mark_token: int = 0
    mark_logit: float = _LOWEST
    mark_lse: float = _LOWEST
    all_lse: float = _LOWEST
    watched: float = _LOWEST

    def words(self) -> NDArray[np.uint32]:
        """[PARTIAL_WORDS]"""
        words = np.zeros(isa.PARTIAL_WORDS, np.uint32)
        for field in fields(self):
            value = getattr(self, field.name)
            words[isa.Partial[field.name.upper()]] = value if isinstance(value, int) else numbers.float_word(value)
        return words

    @staticmethod
    def of_words(words: Sequence[int] | NDArray[np.uint32]) -> "HeadPartial":
        """The partial whose words [PARTIAL_WORDS] these are."""
        floats = {word: numbers.word_float(int(words[word])) for word in isa.Partial}
        return HeadPartial(
            text_score=floats[isa.Partial.TEXT_SCORE],
            text_token=int(words[isa.Partial.TEXT_TOKEN]),
            text_logit=floats[isa.Partial.TEXT_LOGIT],
            text_max=floats[isa.Partial.TEXT_MAX],
            text_lse=floats[isa.Partial.TEXT_LSE],
            mark_score=floats[isa.Partial.MARK_SCORE],
            mark_token=int(words[isa.Partial.MARK_TOKEN]),
            mark_logit=floats[isa.Partial.MARK_LOGIT],
            mark_lse=floats[isa.Partial.MARK_LSE],
            all_lse=floats[isa.Partial.ALL_LSE],
            watched=floats[isa.Partial.WATCHED],
        )


def partial_of(
    logits: NDArray[np.float32],  # [n] of tokens first_token, first_token + 1, ...
    first_token: int,
    row: Row,
    allowed: NDArray[np.bool_],  # [n_tokens] from ``allowed_tokens``
    sizes: Sizes,
) -> HeadPartial:
    """The row's partial over a range of tokens. Sums run in the order of the tokens."""
    tokens = np.arange(first_token, first_token + len(logits))
    may = allowed[tokens]
    is_mark = tokens >= sizes.mark_begin
    scores = _scores(logits, tokens, row)
    text, mark = may & ~is_mark, may & is_mark
    text_best, mark_best = _best(scores, text), _best(scores, mark)
    watch_index = row.request.watch_token - first_token
    has_watched = row.is_watched and 0 <= watch_index < len(logits)
    return HeadPartial(
        text_score=_LOWEST if text_best is None else float(scores[text_best]),
        text_token=0 if text_best is None else int(tokens[text_best]),
        text_logit=_LOWEST if text_best is None else float(logits[text_best]),
        text_max=_highest(logits[text]),
        text_lse=_log_sum_exp(logits[text]),
        mark_score=_LOWEST if mark_best is None else float(scores[mark_best]),
        mark_token=0 if mark_best is None else int(tokens[mark_best]),
        mark_logit=_LOWEST if mark_best is None else float(logits[mark_best]),
        mark_lse=_log_sum_exp(logits[mark]),
        all_lse=_log_sum_exp(logits) if row.is_watched else _LOWEST,
        watched=float(logits[watch_index]) if has_watched else _LOWEST,
    )


def _scores(logits: NDArray[np.float32], tokens: NDArray[np.int64], row: Row) -> NDArray[np.float32]:
    """What is compared: the logits, or at a temperature a draw from their softmax by its highest score."""
    if row.request.inverse_temperature == 0:
        return logits
    noise = gumbel(row.request.seed, row.position, tokens.astype(np.uint32))
    return logits * np.float32(row.request.inverse_temperature) + noise


def gumbel(seed: int, position: int, tokens: NDArray[np.uint32]) -> NDArray[np.float32]:
    """[n] noise of the standard Gumbel distribution, a function of its arguments alone.

    A logit plus this noise is highest for a token with the probability that the softmax gives it (Gumbel-max). 23 bits
    of the hash become u in (0, 1): half a step away from both ends, exact in float32.
    """
    key = _mix(np.array([seed], np.uint32)) + np.uint32(position)
    hashed = _mix(tokens + _mix(key))
    uniform = ((hashed >> np.uint32(9)).astype(np.float64) + 0.5) * 2.0**-23
    return (-np.log(-np.log(uniform))).astype(np.float32)


def _mix(x: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """A 32-bit permutation whose every output bit hangs on every input bit (C. Wellons' ``lowbias32``)."""
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x7FEB352D)
    x = (x ^ x >> np.uint32(15)) * np.uint32(0x846CA68B)
    return x ^ x >> np.uint32(16)


def _best(scores: NDArray[np.float32], may: NDArray[np.bool_]) -> int | None:
    """Index of the highest score, the first of equal ones; what is no number never wins."""
    candidates = np.where(may & ~np.isnan(scores), scores, np.float32(_LOWEST))
    if not (candidates > _LOWEST).any():
        return None
    return int(candidates.argmax())


def _highest(logits: NDArray[np.float32]) -> float:
    return float(np.fmax.reduce(logits, initial=np.float32(_LOWEST)))


def _log_sum_exp(logits: NDArray[np.float32]) -> float:
    highest = _highest(logits)
    if not math.isfinite(highest):
        return highest
    total = np.add.accumulate(numbers.exp(logits - np.float32(highest)))[-1]
    return _float32(highest + math.log(total))


def merge(partials: Sequence[HeadPartial]) -> HeadPartial:
    """Those of all SMs, in their order, become one. Of equal scores the lower token is best."""
    text = max(partials, key=lambda partial: (partial.text_score, -partial.text_token))
    mark = max(partials, key=lambda partial: (partial.mark_score, -partial.mark_token))
    return HeadPartial(
        text_score=text.text_score,
        text_token=text.text_token,
        text_logit=text.text_logit,
        text_max=max(partial.text_max for partial in partials),
        text_lse=_merge_lse([partial.text_lse for partial in partials]),
        mark_score=mark.mark_score,
        mark_token=mark.mark_token,
        mark_logit=mark.mark_logit,
        mark_lse=_merge_lse([partial.mark_lse for partial in partials]),
        all_lse=_merge_lse([partial.all_lse for partial in partials]),
        watched=max(partial.watched for partial in partials),
    )


def _merge_lse(parts: Sequence[float]) -> float:
    """A warp's butterfly over each 32 SMs, of which one half is as good as both; then the groups in order."""
    merged = _LOWEST
    for begin in range(0, len(parts), _MERGE_GROUP):
        lanes = list(parts[begin : begin + _MERGE_GROUP])
        lanes += [_LOWEST] * (_MERGE_GROUP - len(lanes))
        while len(lanes) > 1:
            half = len(lanes) // 2
            lanes = [log_add_exp(a, b) for a, b in zip(lanes[:half], lanes[half:], strict=True)]
        merged = log_add_exp(merged, lanes[0])
    return merged


def log_add_exp(a: float, b: float) -> float:
    """log(exp(a) + exp(b)) in float32; not a number if one of them is none."""
    high, low = max(a, b), min(a, b)
    if math.isnan(a) or math.isnan(b):
        return math.nan
    return high if math.isinf(high) else _float32(high + math.log1p(math.exp(low - high)))


@dataclass(frozen=True, slots=True)
class Pick:
    """A row's token and its log-probability among those allowed, at temperature 1."""

    token: int
    logprob: float


def pick_of(merged: HeadPartial, request: Request) -> Pick:
    """The marker if markers together outweigh the best text, else the better score; text, if they are equal.

    Raises:
        SelectError: if nothing is allowed, or logits are no numbers.
    """
    if request.markers and merged.mark_lse > merged.text_max:
        pick, score = Pick(merged.mark_token, _float32(merged.mark_logit - merged.mark_lse)), merged.mark_score
    else:
        lse = log_add_exp(merged.text_lse, merged.mark_lse)
        if merged.mark_score > merged.text_score:
            pick, score = Pick(merged.mark_token, _float32(merged.mark_logit - lse)), merged.mark_score
        else:
            pick, score = Pick(merged.text_token, _float32(merged.text_logit - lse)), merged.text_score
    if not (math.isfinite(score) and math.isfinite(pick.logprob)):
        raise SelectError(isa.FaultKind.NOT_FINITE, f"best score {score}, log-probability {pick.logprob}")
    return pick


def _float32(value: float) -> float:
    return float(np.float32(value))


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
            slot = replace(slot, watched=_float32(math.exp(partial.watched - partial.all_lse)))
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
    """Where the draft goes on behind a pick, and whether it held.

    If the pick comes soon in the draft, words were dropped and the rest follows it; else one token stands for one
    other.
    """
    draft, cursor = slot.request.draft, slot.cursor
    if cursor >= len(draft):
        return slot, False
    if draft[cursor] == token:
        return replace(slot, cursor=cursor + 1, n_verified=slot.n_verified + 1), True
    near = draft[cursor + 1 : cursor + 1 + isa.DRAFT_SKIP]
    skipped = near.index(token) + 1 if token in near else 0
    return replace(slot, cursor=cursor + 1 + skipped), False


def _done(index: int, slot: Slot, reason: isa.EndReason) -> Emitted:
    return Emitted(isa.RecordKind.DONE, index, slot.ticket, reason, slot.watched, slot.n_verified)


def carry_out(
    slots: Slots,
    commands: Sequence[Sequence[int]],  # words of ``isa.Command`` each, as of the count in the control word
    requests: Mapping[int, NDArray[np.uint32]],  # [REQUEST_WORDS] by slot
) -> tuple[Slots, tuple[Emitted, ...], isa.LeaveReason | None]:
    """Slots after the host's commands, what the host is told, and whether the kernel leaves.

    A cancellation whose ticket is not the slot's comes too late and does nothing. All commands are carried out, and the
    last one that says to leave decides.

    Raises:
        SelectError: for a command that there is not, or a slot that there is not or that is open.
    """
    after = list(slots)
    emitted: list[Emitted] = []
    leave = None
    for command in commands:
        kind, index, ticket = (int(command[word]) for word in (isa.Command.KIND, isa.Command.SLOT, isa.Command.TICKET))
        if kind == isa.CommandKind.OPEN and index < len(after) and after[index] is None:
            after[index] = Slot.of(*decode_request(requests[index]))
        elif kind == isa.CommandKind.CANCEL and index < len(after):
            slot = after[index]
            if slot is not None and slot.ticket == ticket:
                emitted.append(_done(index, slot, isa.EndReason.CANCELLED))
                after[index] = None
        elif kind == isa.CommandKind.YIELD:
            leave = isa.LeaveReason.YIELD
        elif kind == isa.CommandKind.STOP:
            leave = isa.LeaveReason.STOP
            after = [None] * len(after)
        else:
            raise SelectError(isa.FaultKind.BAD_COMMAND, f"command {kind} for slot {index}")
    return tuple(after), tuple(emitted), leave


def left(reason: isa.LeaveReason) -> Emitted:
    """The last record of a residency."""
    return Emitted(isa.RecordKind.LEFT, 0, 0, reason, 0)
