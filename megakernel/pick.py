"""One row's pick: what its mask allows, what an SM finds among its tokens, and how all SMs' findings become one token.

Pure: a function of logits, the row and its request. Knows classes of tokens (text with the end token; markers, which
come in pairs around text). Does not know slots, nor what a pick does to one (``select.py``).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from . import isa, numbers
from .ops import Sizes
from .request import Request

_MERGE_GROUP = 32  # SMs whose log-sum-exps one warp merges
_LOWEST = -math.inf


class SelectError(Exception):
    """The step can't go on; ``kind`` is what the fault record says."""

    def __init__(self, kind: isa.FaultKind, what: str) -> None:
        super().__init__(what)
        self.kind = kind


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


# ---------------------------------------------------------------------- what an SM finds, and all together


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
    return float32(highest + math.log(total))


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
    return high if math.isinf(high) else float32(high + math.log1p(math.exp(low - high)))


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
        pick, score = Pick(merged.mark_token, float32(merged.mark_logit - merged.mark_lse)), merged.mark_score
    else:
        lse = log_add_exp(merged.text_lse, merged.mark_lse)
        if merged.mark_score > merged.text_score:
            pick, score = Pick(merged.mark_token, float32(merged.mark_logit - lse)), merged.mark_score
        else:
            pick, score = Pick(merged.text_token, float32(merged.text_logit - lse)), merged.text_score
    if not (math.isfinite(score) and math.isfinite(pick.logprob)):
        raise SelectError(isa.FaultKind.NOT_FINITE, f"best score {score}, log-probability {pick.logprob}")
    return pick


def float32(value: float) -> float:
    """The nearest float32."""
    return float(np.float32(value))
