"""What a transducer's step does to its slots: how far blanks carry each one, which token stops it, what comes next.

Scalar and pure: the kernel runs the same on every SM (``tdt_select.cuh``) and comes to the same slots and rows. A step
looks at several consecutive frames of a slot, all behind the same text: whatever lies behind the first token that is no
blank is looked at again once the predictor has seen it. Knows slots, rows and commands. Does not know where logits come
from, nor how records and commands cross to the host.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from . import commands as commands_of
from . import isa, numbers
from .ops import Sizes, Transducer
from .pick import SelectError, float32
from .request import FramePart, TransducerRequest, decode_transducer_request
from .select import Emitted

NO_TOKEN = 0xFFFFFFFF  # of an SM without tokens

# ---------------------------------------------------------------------- what JOINT makes of a row


@dataclass(frozen=True, slots=True)
class Best:
    """The best token of some, by logit; of equals the lowest."""

    logit: float = -math.inf
    token: int = NO_TOKEN

    @staticmethod
    def of(logits: NDArray[np.float32], first_token: int) -> "Best":
        """Of tokens first_token, first_token + 1, ...; one that is no number is the best."""
        if not len(logits):
            return Best()
        index = int(np.argmax(logits))
        return Best(float(logits[index]), first_token + index)

    @staticmethod
    def among(all_sms: Sequence["Best"]) -> "Best":
        """The best of every SM's, in the SMs' order."""
        return all_sms[int(np.argmax([one.logit for one in all_sms]))]


def log_sum_exp(values: NDArray[np.float32]) -> float:
    """The log of the sum of exponentials, added up in order; minus infinity of none."""
    top = float(values.max()) if len(values) else -math.inf
    if math.isinf(top):
        return top
    if math.isnan(top):
        return math.nan
    total = np.float32(0)
    for term in numbers.exp(values - np.float32(top)):
        total += term
    return float32(top + math.log(float(total)))


@dataclass(frozen=True, slots=True)
class FramePick:
    """A row's best token and its duration, as an index among the durations."""

    token: int
    logit: float
    duration: int


# ---------------------------------------------------------------------- slots and rows


class Feed(Enum):
    """What the predictor does for a slot in the next step."""

    NOTHING = 0  # its row holds
    TOKEN = 1  # a step with ``Slot.token``
    STATE = 2  # its outputs and cells are those that the request brought


@dataclass(frozen=True, slots=True)
class Slot:
    """One request under way."""

    request: TransducerRequest
    ticket: int
    frame: int  # to look at next
    feed: Feed
    token: int = 0
    is_new: bool = False  # the predictor has seen nothing: what it remembers counts as zeros
    resumes: bool = False  # a launch has ended: first of all outputs and cells are those of STATE_OUT
    n_symbols: int = 0  # at this frame
    index: int = 0  # of the part under way
    state_seat: int = 0  # where outputs and cells were written last

    @staticmethod
    def of(request: TransducerRequest, ticket: int, transducer: Transducer, index: int = 0) -> "Slot":
        """A slot at the begin of a part: the predictor begins with a blank."""
        part = request.parts[index]
        feed = Feed.TOKEN if part.begins else Feed.STATE
        return Slot(request, ticket, part.first_frame, feed, transducer.blank, is_new=part.begins, index=index)

    def next_part(self, transducer: Transducer) -> "Slot":
        """The slot at the begin of the part behind the one under way, whose frames are passed."""
        index = self.index + 1
        if not self.request.parts[index].continues:
            return Slot.of(self.request, self.ticket, transducer, index)
        return replace(self, index=index, frame=self.frame - self.part.n_frames)

    @property
    def part(self) -> FramePart:
        """The one under way."""
        return self.request.parts[self.index]

    @property
    def has_step(self) -> bool:
        """Whether the predictor has something to do for it."""
        return self.resumes or self.feed is not Feed.NOTHING

    @property
    def has_rows(self) -> bool:
        """Whether frames are looked at in the next step."""
        return self.frame < self.part.n_frames and not (self.resumes and self.feed is Feed.TOKEN)

    def relaunched(self) -> "Slot":
        """As it goes on in another launch: what SMs had at hand is lost."""
        is_untouched = self.feed is Feed.STATE or self.is_new
        return self if is_untouched else replace(self, resumes=True)


Slots = tuple[Slot | None, ...]  # None: not active


@dataclass(frozen=True, slots=True)
class FrameRow:
    """One frame of a slot."""

    slot: int
    frame: int


def rows_of_step(slots: Slots, max_rows: int) -> tuple[FrameRow, ...]:
    """As many frames for each slot that has any: ``max_rows`` shared out, what does not divide is left."""
    own = [(index, slot) for index, slot in enumerate(slots) if slot is not None and slot.has_rows]
    return tuple(
        FrameRow(index, frame)
        for index, slot in own
        for frame in range(slot.frame, min(slot.frame + max_rows // len(own), slot.part.n_frames))
    )


# ---------------------------------------------------------------------- what picks do


@dataclass(frozen=True, slots=True)
class Told:
    """A token for the host, whose log-probability is still to be found: ``row`` of the step says where."""

    slot: int
    ticket: int
    row: int
    token: int
    logit: float
    frame: int
    duration: int  # frames

    def emitted(self, lse: float) -> Emitted:
        """The record, once the log-sum-exp of the row's tokens is known."""
        extra = self.frame * isa.EXTRA_DURATIONS + self.duration
        return Emitted(isa.RecordKind.EMISSION, self.slot, self.ticket, self.token, float32(self.logit - lse), extra)


def accept(
    slots: Slots, rows: Sequence[FrameRow], picks: Sequence[FramePick], sizes: Sizes
) -> tuple[Slots, tuple[Told | Emitted, ...]]:
    """Slots after a step whose ``rows`` had these picks, and what the host is told, in order.

    Raises:
        SelectError: if a row that is looked at has no finite best token.
    """
    after = list(slots)
    told: list[Told | Emitted] = []
    for index, slot in enumerate(slots):
        if slot is not None:
            own = [number for number, row in enumerate(rows) if row.slot == index]
            after[index], said = _accept_rows(index, slot, own, picks, sizes)
            told += said
    return tuple(after), tuple(told)


def _accept_rows(
    index: int, slot: Slot, rows: Sequence[int], picks: Sequence[FramePick], sizes: Sizes
) -> tuple[Slot | None, list[Told | Emitted]]:
    transducer = sizes.transducer
    assert transducer is not None, "a transducer's sizes"
    if slot.has_step:
        slot = replace(slot, state_seat=slot.part.seat)
    if slot.resumes and slot.feed is Feed.TOKEN:
        return replace(slot, resumes=False), []
    begin = slot.frame
    slot = replace(slot, feed=Feed.NOTHING, is_new=False, resumes=False)
    told: list[Told | Emitted] = []
    while slot.frame - begin < len(rows) and slot.feed is Feed.NOTHING:
        row = rows[slot.frame - begin]
        pick = picks[row]
        if not math.isfinite(pick.logit):
            raise SelectError(isa.FaultKind.NOT_FINITE, f"slot {index}, frame {slot.frame}: {pick}")
        duration = transducer.durations[pick.duration]
        if pick.token == transducer.blank:
            slot = replace(slot, frame=slot.frame + max(duration, 1), n_symbols=0)
            continue
        told.append(Told(index, slot.ticket, row, pick.token, pick.logit, slot.frame, duration))
        n_symbols = slot.n_symbols + 1
        n_ahead = max(duration, 1) if n_symbols == transducer.max_symbols else duration
        n_symbols = 0 if n_ahead else n_symbols
        slot = replace(slot, frame=slot.frame + n_ahead, n_symbols=n_symbols, feed=Feed.TOKEN, token=pick.token)
    if slot.feed is not Feed.NOTHING or slot.frame < slot.part.n_frames:
        return slot, told
    if slot.index + 1 == len(slot.request.parts):
        return None, [*told, _done(index, slot, isa.EndReason.FRAMES)]
    told.append(Emitted(isa.RecordKind.PART, index, slot.ticket, 0, 0, slot.frame - slot.part.n_frames))
    return slot.next_part(transducer), told


def _done(index: int, slot: Slot, reason: isa.EndReason) -> Emitted:
    n_past = max(slot.frame - slot.part.n_frames, 0)
    return Emitted(isa.RecordKind.DONE, index, slot.ticket, reason, 0.0, n_past)


def carry_out(
    slots: Slots,
    commands: Sequence[Sequence[int]],  # words of ``isa.Command`` each, as of the count in the control word
    requests: Mapping[int, NDArray[np.uint32]],  # [REQUEST_WORDS] by slot
    sizes: Sizes,
) -> tuple[Slots, tuple[Emitted, ...], isa.LeaveReason | None]:
    """See ``commands.carry_out``."""
    transducer = sizes.transducer
    assert transducer is not None, "a transducer's sizes"
    return commands_of.carry_out(
        slots,
        commands,
        lambda index: Slot.of(*decode_transducer_request(requests[index]), transducer),
        lambda index, slot: _done(index, slot, isa.EndReason.CANCELLED),
    )
