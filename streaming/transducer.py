"""An utterance for a model that carries its state along: audio goes to it in chunks of whole frames, each of them once.

Knows positions, and which part of a request is new, which only informs. Words come settled from the engine, so nothing
is compared and nothing heard twice; a failed decode makes the next chunk longer. Does not know frames' contents, the
predictor's state or tokens: those are the engine's.

    left context | chunk region | right context      every part whole frames, counted from the utterance's start
      heard again    decoded now    tentative; it becomes the chunk region of requests to come
"""

from collections.abc import Iterator
from dataclasses import dataclass

from streaming.agreement import ends_before
from streaming.context import Context
from streaming.endpoint import reads_complete
from streaming.engine import TransducerContext
from streaming.pacing import Pacing
from streaming.segment import SegmentWriter
from streaming.transcript import EndReason, Hypothesis, Segment, Word
from streaming.trim import Cut, choose_cut
from streaming.utterance import CUT_MARGIN_SAMPLES, DecodeRequest, End, Purpose
from vad.audio import SAMPLES_PER_MS, SpeechSpan

MAX_FAILURES = 2  # in a row, of decodes that no later chunk would make up for; then their audio is given up


# ---------------------------------------------------------------------- the arithmetic of frames


@dataclass(frozen=True, slots=True)
class Chunking:
    """How one utterance is cut: lengths in samples, whole frames all of them but ``max_window_samples``."""

    frame_samples: int
    left_samples: int
    chunk_samples: int
    right_samples: int
    max_window_samples: int  # the longest request: left context, chunk region and right context
    first_samples: int = 0  # before so much was heard all is right context
    second_pass: bool = False  # what is final was decoded once more, in one piece

    @property
    def latency_samples(self) -> int:
        """How far behind the newest audio words are settled, once ``first_samples`` were heard."""
        return self.chunk_samples + self.right_samples


def chunking_of(
    context: TransducerContext,
    max_window_samples: int,
    *,
    chunk_samples: int | None = None,
    left_samples: int | None = None,
    interval_samples: int = 0,
    second_pass: bool = False,
) -> Chunking:
    """The model's recommendation with what a caller chose instead; chunks last ``interval_samples`` at least.

    Raises:
        ValueError: for a chunk or left context that is not whole frames or outside what the model takes; says in ms
            what is accepted.
    """
    chunk_samples = context.chunk_samples if chunk_samples is None else chunk_samples
    left_samples = context.left_samples if left_samples is None else left_samples
    frame_samples, longest = context.frame_samples, context.max_chunk_samples
    _check("chunk", chunk_samples, context.min_chunk_samples, longest, frame_samples)
    _check("left context", left_samples, 0, max_window_samples - longest - context.right_samples, frame_samples)
    return Chunking(
        frame_samples=frame_samples,
        left_samples=left_samples,
        chunk_samples=max(chunk_samples, whole_frames(interval_samples + frame_samples - 1, frame_samples)),
        right_samples=context.right_samples,
        max_window_samples=max_window_samples,
        first_samples=context.first_samples,
        second_pass=second_pass,
    )


def _check(name: str, n_samples: int, low: int, high: int, frame_samples: int) -> None:
    if not low <= n_samples <= high:
        raise ValueError(f"{_ms(n_samples)} ms is no {name} of this model; {_ms(low)} to {_ms(high)} are")
    below = whole_frames(n_samples, frame_samples)
    if below != n_samples:
        near = f"{_ms(below)} or {_ms(below + frame_samples)}"
        raise ValueError(f"{_ms(n_samples)} ms is not whole frames of {_ms(frame_samples)} ms; take {near}")


def _ms(n_samples: int) -> str:
    return f"{n_samples / SAMPLES_PER_MS:g}"


def whole_frames(n_samples: int, frame_samples: int) -> int:
    """``n_samples``, at least 0, without the broken frame at its end."""
    return max(0, n_samples) // frame_samples * frame_samples


@dataclass(frozen=True, slots=True)
class Cutting:
    """One request's audio: what is between the contexts is the chunk region."""

    span: SpeechSpan
    left_samples: int
    right_samples: int


def cut_out(origin_sample: int, decoded_sample: int, heard_sample: int, chunking: Chunking) -> Cutting:
    """All that is new: what has its right context is the chunk region, which may be empty; the rest is right context.

    Before ``first_samples`` were heard all is right context. ``origin_sample`` is where frames are counted from; a
    broken frame at the end is kept. More audio than one request can hold is cut off behind, so that several make up for
    it.
    """
    left_samples = min(chunking.left_samples, decoded_sample - origin_sample)
    room_samples = whole_frames(chunking.max_window_samples - left_samples, chunking.frame_samples)
    new_samples = min(heard_sample - decoded_sample, room_samples)
    is_early = heard_sample - origin_sample < chunking.first_samples
    region_samples = 0 if is_early else whole_frames(new_samples - chunking.right_samples, chunking.frame_samples)
    return Cutting(
        SpeechSpan(decoded_sample - left_samples, decoded_sample + new_samples),
        left_samples,
        new_samples - region_samples,
    )


def cut_out_rest(origin_sample: int, decoded_sample: int, end_sample: int, chunking: Chunking) -> Cutting | None:
    """All that is left of speech that is over, as one chunk region; ``None`` if one request can't hold it."""
    left_samples = min(chunking.left_samples, decoded_sample - origin_sample)
    span = SpeechSpan(decoded_sample - left_samples, end_sample)
    return Cutting(span, left_samples, 0) if span.n_samples <= chunking.max_window_samples else None


# ---------------------------------------------------------------------- the state machine


class TransducerUtterance:
    """Speech between two endpoints, in one or more segments. To be used as ``Utterance`` is."""

    def __init__(
        self, *, start_sample: int, segment_ids: Iterator[int], chunking: Chunking, pacing: Pacing | None = None
    ) -> None:
        """Of ``pacing`` the maximum span and the least speech before a first partial count; chunks have their own."""
        self._chunking = chunking
        pacing = pacing or Pacing()
        self._first_partial_samples = pacing.first_partial_samples
        self._max_span_samples = min(pacing.max_span_samples, chunking.max_window_samples)
        self._segment = SegmentWriter(segment_ids, start_sample)
        self.context = Context()  # stays empty: a transducer is told nothing of what was said before
        self._heard_sample = start_sample
        self._end: End | None = None
        self._is_paused = False
        self._pause_is_due = False  # for its decode
        self._was_asked_in_pause = False  # the last request
        self._pending: DecodeRequest | None = None
        self._n_failures = 0
        self.is_over = False
        self._begin_stream(start_sample)

    def _begin_stream(self, origin_sample: int) -> None:
        """Carry nothing over: frames are counted, and the engine's state begins anew, from ``origin_sample`` on."""
        self._origin_sample = origin_sample
        self._is_first = True
        self._decoded_sample = origin_sample  # up to here audio was decoded for good
        self._asked_sample = origin_sample  # how far the last request heard
        self._streamed: tuple[Word, ...] = ()  # with a second pass: what the engine has settled, all of it tentative
        self._covered_sample = origin_sample  # a decode with a final's care holds all that was said up to here
        self._is_complete = False  # such a decode has been made, and nothing was said since

    # ------------------------------------------------------------------ what was heard

    @property
    def keep_from_sample(self) -> int:
        """Audio before this is no longer needed."""
        if self._chunking.second_pass:
            return self._segment.start_sample
        return max(self._origin_sample, self._decoded_sample - self._chunking.left_samples)

    @property
    def is_pause_decoded(self) -> bool:
        """Whether the speaker pauses, and all that was said before has been decoded since."""
        return self._is_paused and self._is_complete

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
        self._is_paused = self._pause_is_due = self._is_complete = False

    def ended(self, *, end_sample: int, speech_end_sample: int, reason: EndReason) -> list[Segment]:
        """The utterance ends at ``end_sample``; speech was last heard at ``speech_end_sample``.

        Answers with the final at once if the decode made at the pause already holds everything.
        """
        self._heard_sample = max(self._decoded_sample, end_sample)
        self._end = End(min(speech_end_sample, end_sample), reason)
        return self._finish_if_complete()

    # ------------------------------------------------------------------ decoding

    def due(self) -> Purpose | None:
        """What kind of decode ``next_request`` would ask for now."""
        if self._pending is not None or self.is_over:
            return None
        if self._chunking.second_pass and self._heard_sample - self._segment.start_sample > self._max_span_samples:
            return Purpose.CUT
        if self._end is not None:
            return Purpose.FINAL if self._rest() else Purpose.CATCH_UP
        if self._is_paused and self._pause_is_due:
            return Purpose.PAUSE if self._rest() else Purpose.PARTIAL
        return Purpose.PARTIAL if self._partial_is_due() else None

    def _partial_is_due(self) -> bool:
        if self._heard_sample - self._origin_sample < self._first_partial_samples and self._is_first:
            return False
        return self._heard_sample - self._asked_sample >= self._chunking.chunk_samples and not self._is_paused

    def _rest(self) -> Cutting | None:
        return cut_out_rest(self._origin_sample, self._decoded_sample, self._heard_sample, self._chunking)

    def next_request(self) -> DecodeRequest | None:
        """The decode that is due now, if any. One is under way at most; answer it before asking again."""
        purpose = self.due()
        if purpose is None:
            return None
        cutting = self._cutting(purpose)
        is_whole = self._is_whole(purpose)
        self._asked_sample = cutting.span.end_sample
        self._was_asked_in_pause = self._is_paused
        self._pause_is_due = self._pause_is_due and purpose is not Purpose.PAUSE
        self._pending = DecodeRequest(
            purpose=purpose,
            span=cutting.span,
            left_context_samples=cutting.left_samples,
            right_context_samples=cutting.right_samples,
            is_first=self._is_first or is_whole,
        )
        return self._pending

    def _is_whole(self, purpose: Purpose) -> bool:
        """Whether this is a second pass: the segment from its start, in one piece."""
        return self._chunking.second_pass and purpose in (Purpose.PAUSE, Purpose.CUT, Purpose.FINAL)

    def _cutting(self, purpose: Purpose) -> Cutting:
        if self._is_whole(purpose):
            start_sample = self._segment.start_sample
            limit_sample = start_sample + self._max_span_samples
            return Cutting(SpeechSpan(start_sample, min(self._heard_sample, limit_sample)), 0, 0)
        if purpose is Purpose.FINAL:
            rest = self._rest()
            assert rest is not None, "a final that one request can't hold"
            return rest
        heard_sample = self._heard_sample
        if purpose is not Purpose.PAUSE:
            frame_samples = self._chunking.frame_samples
            heard_sample = self._decoded_sample + whole_frames(heard_sample - self._decoded_sample, frame_samples)
        return cut_out(self._origin_sample, self._decoded_sample, heard_sample, self._chunking)

    def decoded(self, hypothesis: Hypothesis) -> list[Segment]:
        """Take the engine's answer to the request under way. Returns the segments that changed, oldest first."""
        assert hypothesis.n_settled is not None, "a transducer says which words it has settled"
        request = self._take_pending()
        self._n_failures = 0
        before = (self._segment.committed, self._segment.tentative)
        self._segment.language = hypothesis.language or self._segment.language
        if self._is_whole(request.purpose):
            if request.purpose is Purpose.CUT:
                return self._cut_whole(request, hypothesis.words)
            self._begin_stream(self._segment.start_sample)  # should speech go on, it is streamed anew
            self._asked_sample = request.span.end_sample
            self._segment.tentative = hypothesis.words
        else:
            self._take(request, hypothesis.words, hypothesis.n_settled)
        if request.is_final:
            self._is_complete, self._covered_sample = True, request.span.end_sample
        finals = [*self._cut_if_long(), *self._finish_if_complete()]
        if self.is_over:
            return finals
        if (self._segment.committed, self._segment.tentative) == before:
            return finals
        return [*finals, self._segment.partial(self._heard_sample)]

    def _take(self, request: DecodeRequest, words: tuple[Word, ...], n_settled: int) -> None:
        self._is_first = False
        self._decoded_sample = request.span.end_sample - request.right_context_samples
        if self._chunking.second_pass:
            self._streamed += words[:n_settled]
            self._segment.tentative = self._streamed + words[n_settled:]
        else:
            self._segment.committed += words[:n_settled]
            self._segment.tentative = words[n_settled:]

    def failed(self) -> list[Segment]:
        """The engine failed on the request under way: its audio comes again as part of the next.

        Where that can't be, at a final or when no request can be longer, it is asked once more; if that fails too, what
        only it would have heard is lost.
        """
        request = self._take_pending()
        if self._was_asked_in_pause:  # one that began since still wants its decode
            self._pause_is_due = False
        is_partial = request.purpose is Purpose.PARTIAL and not self._is_full(request)
        if is_partial or request.purpose is Purpose.PAUSE:
            return self._finish_if_complete()
        self._n_failures += 1
        if self._n_failures < MAX_FAILURES:
            return []
        self._n_failures = 0
        if request.purpose is Purpose.CUT:
            return self._cut_whole(request, self._segment.tentative)
        return self._finish() if request.purpose is Purpose.FINAL else self._give_up(request)

    def _is_full(self, request: DecodeRequest) -> bool:
        """Whether no more audio fits, so that the next request would be the same."""
        return request.span.n_samples + self._chunking.frame_samples > self._chunking.max_window_samples

    def _take_pending(self) -> DecodeRequest:
        assert self._pending is not None, "a result without a request"
        request, self._pending = self._pending, None
        return request

    # ------------------------------------------------------------------ segments

    def _finish_if_complete(self) -> list[Segment]:
        """The final, if the end is known and a careful decode covers all speech up to it."""
        if self._end is None or self._pending is not None:
            return []
        # Behind a cut there may be nothing left to decode but the silence of the hangover.
        return self._finish() if self._covered_sample >= self._end.speech_end_sample else []

    def _finish(self) -> list[Segment]:
        assert self._end is not None, "an utterance finishes once its end is known"
        self._segment.commit_all()
        self.is_over = True
        return self._segment.final(self._end.reason, self._heard_sample)

    def _cut_if_long(self) -> list[Segment]:
        """Close the segment at settled words while more was decoded than it may hold. Nothing is decoded again."""
        finals: list[Segment] = []
        while (
            not self._chunking.second_pass
            and self._decoded_sample - self._segment.start_sample > self._max_span_samples
        ):
            finals += self._cut()
        return finals

    def _cut(self) -> list[Segment]:
        segment = self._segment
        span = SpeechSpan(segment.start_sample, segment.start_sample + self._max_span_samples)
        n_settled = ends_before(segment.committed, span.end_sample)
        # Nothing to cut at: the span is closed whole.
        cut = choose_cut(segment.words, span, n_settled) or Cut(n_settled, span.end_sample)
        committed, tentative, language = segment.committed[cut.n_words :], segment.tentative, segment.language
        segment.committed, segment.tentative = segment.committed[: cut.n_words], ()
        finals = segment.final(EndReason.MAX_SPAN, cut.sample)
        segment.begin(cut.sample, committed=committed, tentative=tentative)
        segment.language = language
        return finals

    def _give_up(self, request: DecodeRequest) -> list[Segment]:
        """Close the segment with the words there are, and begin anew behind what could not be decoded."""
        self._segment.commit_all()
        finals = self._segment.final(EndReason.MAX_SPAN, request.span.end_sample)
        self._segment.begin(request.span.end_sample)
        self._begin_stream(request.span.end_sample)
        return [*finals, *self._finish_if_complete()]

    def _cut_whole(self, request: DecodeRequest, words: tuple[Word, ...]) -> list[Segment]:
        """Close a segment of which nothing is settled at the best of its ``words`` and begin anew behind it."""
        n_settled = ends_before(words, request.span.end_sample - CUT_MARGIN_SAMPLES)
        cut = choose_cut(words, request.span, n_settled) or Cut(len(words), request.span.end_sample)
        self._segment.committed, self._segment.tentative = words[: cut.n_words], ()
        finals = self._segment.final(EndReason.MAX_SPAN, cut.sample)
        self._segment.begin(cut.sample)
        self._begin_stream(cut.sample)
        return [*finals, *self._finish_if_complete()]
