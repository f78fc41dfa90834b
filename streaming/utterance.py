"""One utterance as a state machine: audio positions and hypotheses in, decode requests and segments out.

Knows when to decode, which words are settled, where to cut and when it is over. Does not hold audio (spans only), does
not know the model, the client or the time of day. Use it in this order: ``heard`` and the gate's verdicts as they come;
``next_request`` whenever the engine is free; ``decoded`` or ``failed`` once for each request; until ``is_over``.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto

from streaming.agreement import after, agree, ends_before, sure, whole_words, without_leading_marks
from streaming.context import Context
from streaming.endpoint import reads_complete
from streaming.guards import gives_up, is_looping, is_too_fast, without_loop
from streaming.pacing import Pacing, partial_is_due
from streaming.segment import SegmentWriter
from streaming.transcript import EndReason, Hypothesis, Quality, Segment, Word
from streaming.trim import Cut, choose_cut
from vad.audio import SpeechSpan, samples_from_ms

# How close to the edge of the audio a word may end and still be trusted: LocalAgreement wants two hypotheses besides,
# AlignAtt does with one and so keeps a wider margin. Figures: benchmarks/results/streaming_policies.md.
AGREEMENT_MARGIN_SAMPLES = samples_from_ms(1_600)
ATTENTION_MARGIN_SAMPLES = samples_from_ms(2_500)
# What follows a word that the model doubts may still correct it, though two hypotheses agree on it: at the start of an
# utterance both know little. Such a word, and what stands behind it, is heard longer before it counts as settled.
SURE_CONFIDENCE = 0.7
DOUBT_MARGIN_SAMPLES = samples_from_ms(5_000)
CUT_MARGIN_SAMPLES = samples_from_ms(600)

Settle = Callable[[Sequence[Word], Sequence[Word], int], int]


def settle_by_agreement(previous: Sequence[Word], current: Sequence[Word], end_sample: int) -> int:
    """LocalAgreement-2: settled is what two hypotheses in a row say, but for words near the edge of the audio.

    The edge is wider for words that the model doubts.
    """
    n = agree(previous, current)
    if n and current[n - 1].end_sample is None:
        return whole_words(current, n - 1)
    n_sure = max(sure(current, SURE_CONFIDENCE), ends_before(current, end_sample - DOUBT_MARGIN_SAMPLES))
    return whole_words(current, min(n, n_sure, ends_before(current, end_sample - AGREEMENT_MARGIN_SAMPLES)))


def settle_by_attention(previous: Sequence[Word], current: Sequence[Word], end_sample: int) -> int:
    """AlignAtt: settled is what the model attended to well before the edge of the audio. Needs word times."""
    return whole_words(current, ends_before(current, end_sample - ATTENTION_MARGIN_SAMPLES))


class CommitPolicy(StrEnum):
    """How words become settled."""

    AGREEMENT = "agreement"
    ATTENTION = "attention"

    @property
    def settle(self) -> Settle:
        """The rule itself."""
        return settle_by_agreement if self is CommitPolicy.AGREEMENT else settle_by_attention


class Purpose(Enum):
    """Why a decode is asked for."""

    PARTIAL = auto()
    PAUSE = auto()  # the speaker paused: if this was the end, the final is ready before the hangover has passed
    CUT = auto()  # the span reached its maximum
    FINAL = auto()
    CATCH_UP = auto()  # speech is over, but what is left of it is more than one decode can take: a part of it


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """One decode that the utterance wants."""

    purpose: Purpose
    span: SpeechSpan
    left_context_samples: int  # of the span: heard again from before the segment
    prompt: str = ""
    prefix: tuple[Word, ...] = ()  # what is settled in the span, the left context's words first
    is_retry: bool = False
    right_context_samples: int = 0  # of the span: what is said there will be heard again
    is_first: bool = False  # nothing is carried over from the decodes before

    @property
    def is_final(self) -> bool:
        """Whether words of this decode can become final as they are."""
        return self.purpose not in (Purpose.PARTIAL, Purpose.CATCH_UP)


@dataclass(frozen=True, slots=True)
class End:
    """The end of an utterance, once it is known."""

    speech_end_sample: int  # where the last speech was; what follows up to the end of the span is silence
    reason: EndReason


class Utterance:
    """Speech between two endpoints, in one or more segments."""

    # Of the segment being written; ``_reset`` sets all of these.
    _decoded_sample: int  # how far the last decode heard
    _quality: Quality | None
    _complete: DecodeRequest | None  # a decode with a final's care that still covers all that was said
    _retry: bool  # the last decode lost the audio: again, without prefix and prompt

    def __init__(
        self,
        *,
        start_sample: int,
        segment_ids: Iterator[int],
        pacing: Pacing,
        policy: CommitPolicy = CommitPolicy.AGREEMENT,
    ) -> None:
        self._segment = SegmentWriter(segment_ids, start_sample)
        self._pacing = pacing
        self._settle = policy.settle
        self.context = Context()  # what was said before the segment; once over, before the next utterance
        self._heard_sample = start_sample
        self._end: End | None = None
        self._is_paused = False
        self._pause_is_due = False  # for its decode
        self._pending: DecodeRequest | None = None
        self.is_over = False
        self._reset()

    # ------------------------------------------------------------------ what was heard

    @property
    def keep_from_sample(self) -> int:
        """Audio before this is no longer needed."""
        return self.context.lead_start_sample if self.context.lead else self._segment.start_sample

    @property
    def is_pause_decoded(self) -> bool:
        """Whether the speaker pauses, and all that was said before has been decoded since."""
        return self._is_paused and self._complete is not None

    @property
    def reads_complete(self) -> bool:
        """Whether the speaker pauses behind words that, decoded since then, read as a finished sentence."""
        return self.is_pause_decoded and reads_complete(self._segment.words)

    def heard(self, until_sample: int) -> None:
        """Audio up to ``until_sample`` belongs to this utterance."""
        if self._end is None:
            self._heard_sample = max(self._heard_sample, until_sample)

    def paused(self) -> None:
        """The speaker has been silent for a moment: worth a decode that may serve as the final."""
        self._is_paused = self._pause_is_due = True

    def resumed(self) -> None:
        """It was only a pause."""
        self._is_paused = self._pause_is_due = False
        self._complete = None

    def ended(self, *, end_sample: int, speech_end_sample: int, reason: EndReason) -> list[Segment]:
        """The utterance ends at ``end_sample``; speech was last heard at ``speech_end_sample``.

        Answers with the final at once if the decode made at the pause already holds everything.
        """
        self._heard_sample = max(self._segment.start_sample, end_sample)
        self._end = End(min(speech_end_sample, end_sample), reason)
        return self._finish_if_complete()

    # ------------------------------------------------------------------ decoding

    def next_request(self) -> DecodeRequest | None:
        """The decode that is due now, if any. One is under way at most; answer it before asking again."""
        purpose = self.due()
        if purpose is None:
            return None
        end_sample = self._heard_sample
        if purpose is Purpose.CUT:
            end_sample = self._segment.start_sample + self._pacing.max_span_samples
        retry = self._retry
        self._retry = False
        self._pause_is_due = self._pause_is_due and purpose is not Purpose.PAUSE
        context = Context() if retry else self.context
        start_sample = context.lead_start_sample if context.lead else self._segment.start_sample
        self._pending = DecodeRequest(
            purpose=purpose,
            span=SpeechSpan(start_sample, end_sample),
            left_context_samples=self._segment.start_sample - start_sample,
            prompt=context.prompt,
            prefix=() if retry else (*context.lead, *self._segment.committed),
            is_retry=retry,
        )
        return self._pending

    def due(self) -> Purpose | None:
        """What kind of decode ``next_request`` would ask for now."""
        if self._pending is not None or self.is_over:
            return None
        span_samples = self._heard_sample - self._segment.start_sample
        if span_samples > self._pacing.max_span_samples:
            return Purpose.CUT
        if self._end is not None:
            return Purpose.FINAL
        if self._is_paused:
            return Purpose.PAUSE if self._retry or self._pause_is_due else None
        due = self._retry or partial_is_due(
            span_samples, self._decoded_sample - self._segment.start_sample, self._pacing
        )
        return Purpose.PARTIAL if due else None

    def decoded(self, hypothesis: Hypothesis) -> list[Segment]:
        """Take the engine's answer to the request under way. Returns the segments that changed, oldest first."""
        request = self._take_pending()
        words = hypothesis.words
        if request.is_retry:  # decoded without its prefix: what is settled already is left out by time
            words = after(words, self._segment.committed_end_sample) if self._segment.committed else words
        if self._is_lost(request, hypothesis):
            if request.prefix or request.prompt:
                self._retry = True
                return []
            words = without_loop(words)
            if is_too_fast(words, request.span):
                words = ()
        if request.left_context_samples and not self._segment.committed:
            words = without_leading_marks(words)  # a full stop that the lead lacks is none of this segment's
        self._decoded_sample = request.span.end_sample
        self._segment.language = hypothesis.language or self._segment.language
        self._quality = hypothesis.quality
        if request.purpose is Purpose.CUT:
            return self._cut(request, words)
        return self._show(request, words)

    def failed(self) -> list[Segment]:
        """The engine failed on the request under way. What only a final would have heard is lost; tell the client."""
        request = self._take_pending()
        self._decoded_sample = request.span.end_sample
        if request.purpose is Purpose.CUT:
            return self._cut(request, self._segment.tentative)
        return self._finish() if request.purpose is Purpose.FINAL else []

    def _take_pending(self) -> DecodeRequest:
        assert self._pending is not None, "a result without a request"
        request, self._pending = self._pending, None
        return request

    def _is_lost(self, request: DecodeRequest, hypothesis: Hypothesis) -> bool:
        ratio = hypothesis.quality.compression_ratio if hypothesis.quality else None
        if request.is_final and request.left_context_samples and not self._segment.committed:
            # With its beginning given, speech that repeats it may pass for written already.
            if gives_up(hypothesis.words, hypothesis.quality):
                return True
        return is_looping((*request.prefix, *hypothesis.words), request.span, ratio)

    # ------------------------------------------------------------------ segments

    def _reset(self) -> None:
        self._decoded_sample = self._segment.start_sample
        self._quality = None
        self._complete = None
        self._retry = False

    def _show(self, request: DecodeRequest, words: tuple[Word, ...]) -> list[Segment]:
        before = (self._segment.committed, self._segment.tentative)
        n = self._settle(self._segment.tentative, words, request.span.end_sample)
        self._segment.committed += words[:n]
        self._segment.tentative = words[n:]
        if request.is_final:
            self._complete = request
        finals = self._finish_if_complete()
        if finals or self.is_over:
            return finals
        if (self._segment.committed, self._segment.tentative) == before:
            return []
        return [self._segment.partial(self._heard_sample)]

    def _finish_if_complete(self) -> list[Segment]:
        """The final, if the end is known and a careful decode covers all speech up to it."""
        if self._end is None or self._pending is not None:
            return []
        # Behind a cut there may be nothing left to decode but the silence of the hangover.
        covered_sample = self._complete.span.end_sample if self._complete else self._segment.start_sample
        return self._finish() if covered_sample >= self._end.speech_end_sample else []

    def _finish(self) -> list[Segment]:
        assert self._end is not None
        self._segment.commit_all()
        self.is_over = True
        spoken = SpeechSpan(self._segment.start_sample, max(self._segment.start_sample, self._end.speech_end_sample))
        self.context = self.context.followed_by(self._segment.committed, self._quality, spoken)
        return self._segment.final(self._end.reason, self._heard_sample)

    def _cut(self, request: DecodeRequest, words: tuple[Word, ...]) -> list[Segment]:
        """Close the segment at the best settled word and go on behind it."""
        everything = self._segment.committed + words
        n_settled = max(
            len(self._segment.committed), ends_before(everything, request.span.end_sample - CUT_MARGIN_SAMPLES)
        )
        # Nothing to cut at (no words, or none with times): the span is closed whole.
        span = SpeechSpan(self._segment.start_sample, request.span.end_sample)
        cut = choose_cut(everything, span, n_settled) or Cut(len(everything), span.end_sample)
        already_committed = self._segment.committed[cut.n_words :]
        self._segment.committed, self._segment.tentative = everything[: cut.n_words], ()
        self.context = self.context.followed_by(
            self._segment.committed, self._quality, SpeechSpan(span.start_sample, cut.sample)
        )
        finals = self._segment.final(EndReason.MAX_SPAN, cut.sample)
        self._segment.begin(cut.sample, committed=already_committed)
        self._reset()
        return [*finals, *self._finish_if_complete()]
