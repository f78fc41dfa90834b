"""Chunks for a transducer: whole frames, each decoded once, and no word lost or doubled whatever happens on the way."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.scripted_transducer import CONTEXT, FRAME_SAMPLES, MAX_WINDOW_SAMPLES, ScriptedToken, ScriptedTransducer
from streaming.engine import Chunk, DecodeOptions, ModelCard, TransducerContext
from streaming.pacing import Pacing
from streaming.transcript import EndReason, Hypothesis, Segment, Word, text_of
from streaming.transducer import (
    MAX_FAILURES,
    Chunking,
    TransducerUtterance,
    chunking_of,
    cut_out,
    cut_out_rest,
    whole_frames,
)
from streaming.utterance import DecodeRequest, Purpose
from vad.audio import SAMPLE_RATE_HZ, SpeechSpan, samples_from_ms

MAX_SPAN_SAMPLES = 5 * SAMPLE_RATE_HZ
PACING = Pacing(max_span_samples=MAX_SPAN_SAMPLES)
CHUNKING = chunking_of(CONTEXT, MAX_WINDOW_SAMPLES)


# ---------------------------------------------------------------- the arithmetic of frames


def test_a_chunk_is_whole_frames_inside_what_the_model_takes() -> None:
    assert chunking_of(CONTEXT, MAX_WINDOW_SAMPLES).chunk_samples == CONTEXT.chunk_samples
    chosen = chunking_of(CONTEXT, MAX_WINDOW_SAMPLES, chunk_samples=samples_from_ms(560))
    assert chosen.chunk_samples == 7 * FRAME_SAMPLES and chosen.latency_samples == 17 * FRAME_SAMPLES
    with pytest.raises(ValueError, match="500 ms is not whole frames of 80 ms; take 480 or 560"):
        chunking_of(CONTEXT, MAX_WINDOW_SAMPLES, chunk_samples=samples_from_ms(500))
    with pytest.raises(ValueError, match="80 ms is no chunk of this model; 160 to 2000 are"):
        chunking_of(CONTEXT, MAX_WINDOW_SAMPLES, chunk_samples=FRAME_SAMPLES)


def test_a_shorter_left_context_can_be_chosen_in_whole_frames_that_leave_room_for_the_rest() -> None:
    assert chunking_of(CONTEXT, MAX_WINDOW_SAMPLES).left_samples == CONTEXT.left_samples
    assert chunking_of(CONTEXT, MAX_WINDOW_SAMPLES, left_samples=0).left_samples == 0
    with pytest.raises(ValueError, match="500 ms is not whole frames of 80 ms; take 480 or 560"):
        chunking_of(CONTEXT, MAX_WINDOW_SAMPLES, left_samples=samples_from_ms(500))
    with pytest.raises(ValueError, match="38000 ms is no left context of this model; 0 to 37200 are"):
        chunking_of(CONTEXT, MAX_WINDOW_SAMPLES, left_samples=samples_from_ms(38_000))


def test_who_wants_fewer_partials_gets_longer_chunks_of_whole_frames() -> None:
    chunking = chunking_of(CONTEXT, MAX_WINDOW_SAMPLES, interval_samples=samples_from_ms(900))
    assert chunking.chunk_samples == 12 * FRAME_SAMPLES
    assert chunking_of(CONTEXT, MAX_WINDOW_SAMPLES, interval_samples=1).chunk_samples == CONTEXT.chunk_samples


def test_contexts_that_are_no_whole_frames_or_do_not_fit_the_window_are_refused() -> None:
    with pytest.raises(ValueError, match="right_samples is 100"):
        TransducerContext(FRAME_SAMPLES, 0, 4 * FRAME_SAMPLES, 100, 2 * FRAME_SAMPLES, 25 * FRAME_SAMPLES)
    with pytest.raises(ValueError, match="chunk_samples is 1280; it must lie in 2560..32000"):
        TransducerContext(FRAME_SAMPLES, 0, FRAME_SAMPLES, 0, 2 * FRAME_SAMPLES, 25 * FRAME_SAMPLES)
    with pytest.raises(ValueError, match="contexts and chunk need"):
        ModelCard("short", ("en",), SAMPLE_RATE_HZ, frozenset(), 1, CONTEXT)
    endless = replace(CONTEXT, first_samples=MAX_WINDOW_SAMPLES + FRAME_SAMPLES)
    with pytest.raises(ValueError, match="contexts and chunk need"):
        ModelCard("endless", ("en",), MAX_WINDOW_SAMPLES, frozenset(), 1, endless)


@given(st.integers(0, 10**6), st.integers(0, 300), st.integers(0, 500_000), st.integers(2, 25), st.integers(0, 30))
def test_what_is_new_is_the_region_and_its_right_context(
    origin_sample: int, n_decoded: int, new_samples: int, n_chunk: int, n_right: int
) -> None:
    chunking = Chunking(FRAME_SAMPLES, 30 * FRAME_SAMPLES, n_chunk * FRAME_SAMPLES, n_right * FRAME_SAMPLES, 480_000)
    decoded_sample = origin_sample + n_decoded * FRAME_SAMPLES
    cutting = cut_out(origin_sample, decoded_sample, decoded_sample + new_samples, chunking)
    region_start = cutting.span.start_sample + cutting.left_samples
    assert region_start == decoded_sample, "goes on where the last one ended"
    assert cutting.span.n_samples <= 480_000
    assert cutting.left_samples == min(n_decoded, 30) * FRAME_SAMPLES
    region_samples = cutting.span.end_sample - cutting.right_samples - region_start
    assert region_samples >= 0 and region_samples % FRAME_SAMPLES == 0
    if region_samples:
        assert chunking.right_samples <= cutting.right_samples < chunking.right_samples + FRAME_SAMPLES
    if cutting.span.end_sample < decoded_sample + new_samples:
        assert region_samples, "what does not fit comes next, so something must be decoded now"
    rest = cut_out_rest(origin_sample, decoded_sample, decoded_sample + new_samples, chunking)
    assert (rest is None) == (cutting.left_samples + new_samples > 480_000)


def test_there_is_no_left_context_at_the_start_of_an_utterance() -> None:
    cutting = cut_out(777, 777, 777 + 20 * FRAME_SAMPLES, CHUNKING)
    assert cutting.left_samples == 0 and cutting.span == SpeechSpan(777, 777 + 20 * FRAME_SAMPLES)
    assert whole_frames(-5, FRAME_SAMPLES) == 0


# ---------------------------------------------------------------- one utterance and its engine, by hand


@dataclass
class Talk:
    """An utterance with a scripted engine; keeps what was asked for and what was shown."""

    engine: ScriptedTransducer
    utterance: TransducerUtterance
    shown: list[Segment] = field(default_factory=list)
    requests: list[DecodeRequest] = field(default_factory=list)
    regions: list[SpeechSpan] = field(default_factory=list)  # decoded for good, in order

    def __post_init__(self) -> None:
        self.stream = self.engine.open(DecodeOptions())

    def serve(self, *, fails: bool = False) -> bool:
        """Let the engine take what is due. False: nothing was."""
        answer = self.take()
        if answer is None:
            return False
        self.answer(answer, fails=fails)
        return True

    def take(self) -> DecodeRequest | None:
        request = self.utterance.next_request()
        if request is not None:
            self.requests.append(request)
            assert request.span.start_sample >= self.utterance.keep_from_sample
        return request

    def answer(self, request: DecodeRequest, *, fails: bool = False) -> None:
        if fails:
            self.show(self.utterance.failed())
            return
        self.show(self.utterance.decoded(self.hear(request)))

    def hear(self, request: DecodeRequest) -> Hypothesis:
        chunk = Chunk(
            request.span,
            np.zeros(request.span.n_samples, np.float32),
            is_final=request.is_final,
            left_context_samples=request.left_context_samples,
            right_context_samples=request.right_context_samples,
            is_first=request.is_first,
        )
        [hypothesis] = self.engine.decode([(self.stream, chunk)])
        start_sample = request.span.start_sample + request.left_context_samples
        self.regions.append(SpeechSpan(start_sample, request.span.end_sample - request.right_context_samples))
        return hypothesis

    def show(self, segments: list[Segment]) -> None:
        self.shown += segments

    @property
    def finals(self) -> list[Segment]:
        return [segment for segment in self.shown if segment.end_reason is not None]

    @property
    def words(self) -> list[Word]:
        return [word for final in self.finals for word in final.words]

    @property
    def text(self) -> str:
        return "".join(word.text for word in self.words)


def talk(
    tokens: Sequence[ScriptedToken], chunking: Chunking = CHUNKING, *, start_sample: int = 0, edge: int = 0
) -> Talk:
    utterance = TransducerUtterance(
        start_sample=start_sample, segment_ids=itertools.count(1), chunking=chunking, pacing=PACING
    )
    return Talk(ScriptedTransducer(tokens, edge_samples=edge), utterance)


def steady(text: str, *, every_samples: int = 4_000, start_sample: int = 2_000) -> list[ScriptedToken]:
    return [ScriptedToken(f" {word}", start_sample + i * every_samples, 3) for i, word in enumerate(text.split())]


def one_shot(tokens: Sequence[ScriptedToken], span: SpeechSpan) -> tuple[Word, ...]:
    engine = ScriptedTransducer(tokens)
    chunk = Chunk(span, np.zeros(span.n_samples, np.float32), is_final=True, is_first=True)
    [hypothesis] = engine.decode([(engine.open(DecodeOptions()), chunk)])
    return hypothesis.words


def hear_all(spoken: Talk, until_sample: int, *, each_samples: int = 512, start_sample: int = 0) -> None:
    for sample in range(start_sample, until_sample, each_samples):
        spoken.utterance.heard(sample)
        spoken.serve()
    spoken.utterance.heard(until_sample)
    spoken.serve()


def test_a_partial_comes_with_every_chunk_and_its_first_words_are_tentative() -> None:
    spoken = talk(steady("it was the best of times it was the worst of times"))
    hear_all(spoken, 48_000)
    asked = [request.span.end_sample for request in spoken.requests]
    assert asked[0] <= PACING.first_partial_samples + 512
    assert all(later - earlier == CHUNKING.chunk_samples for earlier, later in itertools.pairwise(asked))
    first = spoken.shown[0]
    assert text_of(first.words) == "it was the" and first.n_committed == 0
    assert text_of(spoken.shown[-1].words[: spoken.shown[-1].n_committed]) == "it was the best of times it"


def test_words_are_settled_a_chunk_and_the_right_context_behind_the_audio_at_most() -> None:
    tokens = steady("it was the best of times it was the worst of times")
    spoken = talk(tokens)
    for sample in range(0, 60_000, 512):
        spoken.utterance.heard(sample)
        spoken.serve()
        n_over = sum(token.sample < sample - CHUNKING.latency_samples - FRAME_SAMPLES - 512 for token in tokens)
        n_committed = spoken.shown[-1].n_committed if spoken.shown else 0
        assert n_committed >= n_over - 1, "all but the last, which may go on"


def test_before_the_first_seconds_were_heard_partials_come_but_nothing_is_settled() -> None:
    early = chunking_of(replace(CONTEXT, first_samples=30 * FRAME_SAMPLES), MAX_WINDOW_SAMPLES)
    spoken = talk(steady("it was the best of times it was the worst of times"), early)
    hear_all(spoken, early.first_samples - 512)
    assert len(spoken.requests) > 4 and text_of(spoken.shown[-1].words) == "it was the best of times it was the"
    assert all(segment.n_committed == 0 for segment in spoken.shown)
    assert all(request.left_context_samples == 0 for request in spoken.requests), "heard anew from the start"
    hear_all(spoken, 48_000, start_sample=early.first_samples - 512)
    first, *_ = [request for request in spoken.requests if request.span.end_sample >= early.first_samples]
    assert first.right_context_samples == early.right_samples, "all but the right context, in one go"
    late = talk(steady("it was the best of times it was the worst of times"))
    hear_all(late, 48_000)
    assert spoken.shown[-1] == late.shown[-1]


def test_an_utterance_shorter_than_the_first_seconds_is_decoded_for_good_in_one_piece() -> None:
    early = chunking_of(replace(CONTEXT, first_samples=38 * FRAME_SAMPLES), MAX_WINDOW_SAMPLES)
    spoken = talk(steady("it was the best of times"), early)
    hear_all(spoken, 34_000)
    spoken.utterance.paused()
    spoken.serve()
    request = spoken.requests[-1]
    assert request.is_final and request.span == SpeechSpan(0, 34_000) and request.left_context_samples == 0
    spoken.show(spoken.utterance.ended(end_sample=34_000, speech_end_sample=30_000, reason=EndReason.SILENCE))
    assert spoken.text == " it was the best of times"
    assert all(region.n_samples == 0 for region in spoken.regions), "the rest of its decodes were looks ahead"


def test_silence_before_the_first_partial_is_not_decoded() -> None:
    spoken = talk(steady("it"))
    spoken.utterance.heard(PACING.first_partial_samples - 1)
    assert spoken.utterance.next_request() is None


def test_one_decode_is_under_way_at_most_and_a_late_engine_gets_a_longer_chunk() -> None:
    spoken = talk(steady("it was the best of times"))
    spoken.utterance.heard(20_000)
    request = spoken.take()
    assert request is not None and spoken.take() is None
    spoken.utterance.heard(60_000)
    spoken.answer(request)
    later = spoken.take()
    assert later is not None and later.span.end_sample == whole_frames(60_000, FRAME_SAMPLES)


def test_the_decode_made_at_a_pause_serves_as_the_final() -> None:
    spoken = talk(steady("it was the best"))
    hear_all(spoken, 19_000)
    spoken.utterance.paused()
    assert spoken.utterance.due() is Purpose.PAUSE
    spoken.serve()
    request = spoken.requests[-1]
    assert request.is_final and request.right_context_samples > 0, "decoded from a copy of the state"
    assert spoken.utterance.next_request() is None and spoken.utterance.reads_complete is False
    spoken.show(spoken.utterance.ended(end_sample=18_700, speech_end_sample=16_500, reason=EndReason.SILENCE))
    assert spoken.text == " it was the best" and spoken.finals[0].end_reason is EndReason.SILENCE
    assert spoken.utterance.is_over


def test_a_pause_that_ends_changes_nothing() -> None:
    spoken = talk([*steady("it was the best"), ScriptedToken(".", 14_100)])
    hear_all(spoken, 19_000)
    spoken.utterance.paused()
    spoken.serve()
    assert spoken.utterance.reads_complete
    spoken.utterance.resumed()
    assert not spoken.utterance.reads_complete
    hear_all(spoken, 40_000, start_sample=19_000)
    assert spoken.requests[-1].purpose is Purpose.PARTIAL
    spoken.utterance.paused()
    assert not spoken.utterance.reads_complete, "not before what was said since is decoded"


def test_the_end_that_comes_during_a_decode_waits_for_it() -> None:
    spoken = talk(steady("it was the best"))
    spoken.utterance.heard(19_000)
    request = spoken.take()
    assert request is not None
    assert spoken.utterance.ended(end_sample=18_000, speech_end_sample=17_000, reason=EndReason.FLUSH) == []
    spoken.answer(request)
    assert spoken.utterance.due() is Purpose.FINAL
    spoken.serve()
    assert spoken.text == " it was the best" and spoken.requests[-1].right_context_samples == 0


def test_a_failed_decode_makes_the_next_chunk_longer() -> None:
    spoken = talk(steady("it was the best of times it was the worst of times"))
    hear_all(spoken, 30_000)
    decoded_sample = spoken.regions[-1].end_sample
    spoken.utterance.heard(36_000)
    assert spoken.serve(fails=True)
    assert spoken.utterance.due() is None, "not again before there is more audio"
    hear_all(spoken, 50_000, start_sample=36_000)
    regions = [region for region in spoken.regions if region.n_samples]
    assert any(region.start_sample == decoded_sample for region in regions)
    assert regions[-1].end_sample > decoded_sample + 2 * CHUNKING.chunk_samples


def test_a_partial_that_fails_does_not_take_the_pause_behind_it_its_decode() -> None:
    spoken = talk(steady("it was the best"))
    spoken.utterance.heard(20_000)
    request = spoken.take()
    assert request is not None and request.purpose is Purpose.PARTIAL
    spoken.utterance.heard(30_000)
    spoken.utterance.paused()
    spoken.answer(request, fails=True)
    assert spoken.utterance.due() is Purpose.PAUSE
    assert spoken.serve(fails=True)
    assert spoken.utterance.due() is None, "an engine that keeps failing is not asked again in the same pause"


def test_a_final_that_fails_is_asked_for_again_and_then_given_up() -> None:
    for n_failures, text in ((MAX_FAILURES - 1, " it was the best"), (MAX_FAILURES, "")):
        spoken = talk(steady("it was the best"))
        spoken.utterance.heard(10_000)
        spoken.utterance.ended(end_sample=18_000, speech_end_sample=17_000, reason=EndReason.END)
        for _ in range(n_failures):
            assert spoken.serve(fails=True)
        spoken.serve()
        assert spoken.text == text and spoken.utterance.is_over


def test_a_long_utterance_is_cut_at_settled_words_and_nothing_is_decoded_again() -> None:
    tokens = steady(" ".join(f"w{n}" for n in range(60)))
    spoken = talk(tokens)
    hear_all(spoken, 250_000)
    spoken.utterance.ended(end_sample=250_000, speech_end_sample=245_000, reason=EndReason.SILENCE)
    spoken.serve()
    assert spoken.text.split() == [f"w{n}" for n in range(60)]
    assert [final.end_reason for final in spoken.finals[:-1]] == [EndReason.MAX_SPAN] * (len(spoken.finals) - 1)
    assert all(final.span.n_samples <= MAX_SPAN_SAMPLES for final in spoken.finals[:-1])
    assert_decoded_once(spoken, 0, 250_000)


def test_more_audio_than_one_decode_can_take_comes_in_several() -> None:
    tokens = steady(" ".join(f"w{n}" for n in range(400)))
    spoken = talk(tokens)
    spoken.utterance.heard(3 * MAX_WINDOW_SAMPLES)
    spoken.utterance.ended(end_sample=1_700_000, speech_end_sample=1_650_000, reason=EndReason.STALL)
    assert spoken.utterance.due() is Purpose.CATCH_UP
    while spoken.serve():
        assert spoken.requests[-1].span.n_samples <= MAX_WINDOW_SAMPLES
    assert spoken.text.split() == [f"w{n}" for n in range(400)]
    assert_decoded_once(spoken, 0, 1_700_000)


def test_a_pause_far_behind_is_caught_up_with_and_an_engine_that_fails_there_is_not_asked_at_once() -> None:
    spoken = talk(steady("it was"))
    spoken.utterance.heard(3 * MAX_WINDOW_SAMPLES)
    spoken.utterance.paused()
    assert spoken.utterance.due() is Purpose.PARTIAL
    spoken.serve(fails=True)
    assert spoken.utterance.due() is None


def test_an_engine_that_keeps_failing_is_not_asked_in_vain_for_ever_and_words_behind_its_failures_are_heard() -> None:
    tokens = steady(" ".join(f"w{n}" for n in range(500)))
    spoken = talk(tokens)
    hear_all(spoken, MAX_SPAN_SAMPLES)
    for heard_sample in range(MAX_SPAN_SAMPLES, 2 * MAX_WINDOW_SAMPLES, CHUNKING.chunk_samples):
        spoken.utterance.heard(heard_sample)
        assert heard_sample - spoken.utterance.keep_from_sample < 2 * MAX_WINDOW_SAMPLES, "memory is bounded"
        for _ in range(MAX_FAILURES):
            spoken.serve(fails=True)
        if any(final.span.end_sample > MAX_SPAN_SAMPLES for final in spoken.finals):
            break
        assert spoken.utterance.due() is None, "not again before there is more audio"
    [lost] = [final for final in spoken.finals if final.end_reason is EndReason.MAX_SPAN]
    assert text_of(lost.words).split()[:3] == ["w0", "w1", "w2"], "what was shown is kept"
    end_sample = lost.span.end_sample + 50_000
    hear_all(spoken, end_sample, start_sample=lost.span.end_sample)
    spoken.utterance.ended(end_sample=end_sample, speech_end_sample=end_sample, reason=EndReason.SILENCE)
    spoken.serve()
    behind = [token.text.strip() for token in tokens if lost.span.end_sample <= token.sample < end_sample]
    assert spoken.utterance.is_over and text_of(spoken.finals[-1].words).split() == behind


def test_an_end_far_behind_that_fails_costs_the_audio_of_one_request() -> None:
    tokens = steady(" ".join(f"w{n}" for n in range(400)))
    spoken = talk(tokens)
    spoken.utterance.heard(3 * MAX_WINDOW_SAMPLES)
    spoken.utterance.ended(end_sample=1_000_000, speech_end_sample=990_000, reason=EndReason.STALL)
    for _ in range(MAX_FAILURES):
        assert spoken.utterance.due() is Purpose.CATCH_UP
        spoken.serve(fails=True)
    while spoken.serve():
        pass
    behind = [token.text.strip() for token in tokens if MAX_WINDOW_SAMPLES <= token.sample < 1_000_000]
    assert spoken.utterance.is_over and spoken.text.split() == behind


# ---------------------------------------------------------------- the second pass

SECOND = chunking_of(CONTEXT, MAX_WINDOW_SAMPLES, second_pass=True)


def test_with_a_second_pass_nothing_is_settled_before_the_final_which_is_decoded_in_one_piece() -> None:
    spoken = talk(steady("it was the best of times it was"), SECOND)
    hear_all(spoken, 40_000)
    assert spoken.shown and all(segment.n_committed == 0 for segment in spoken.shown)
    assert text_of(spoken.shown[-1].words) == "it was the best of times it was"
    spoken.utterance.ended(end_sample=40_000, speech_end_sample=33_000, reason=EndReason.FLUSH)
    spoken.serve()
    request = spoken.requests[-1]
    assert request.is_first and request.span == SpeechSpan(0, 40_000) and request.right_context_samples == 0
    assert spoken.text == " it was the best of times it was"


def test_a_second_pass_at_a_pause_serves_as_the_final_or_speech_is_streamed_anew() -> None:
    for goes_on in (False, True):
        spoken = talk(steady("it was the best of times it was"), SECOND)
        hear_all(spoken, 24_000)
        spoken.utterance.paused()
        spoken.serve()
        if goes_on:
            n_requests = len(spoken.requests)
            spoken.utterance.resumed()
            hear_all(spoken, 40_000, start_sample=24_000)
            anew = spoken.requests[n_requests]
            assert anew.is_first and anew.span.start_sample == 0 and not spoken.requests[-1].is_first
        end_sample = 40_000 if goes_on else 23_000
        spoken.show(spoken.utterance.ended(end_sample=end_sample, speech_end_sample=end_sample, reason=EndReason.FLUSH))
        assert spoken.serve() == goes_on
        assert spoken.text == (" it was the best of times it was" if goes_on else " it was the best of times")


def test_a_second_pass_of_long_speech_is_cut_at_the_maximum_span() -> None:
    spoken = talk(steady(" ".join(f"w{n}" for n in range(60))), SECOND)
    for sample in range(0, 250_000, 512):
        spoken.utterance.heard(sample)
        spoken.serve()
        assert sample - spoken.utterance.keep_from_sample <= MAX_SPAN_SAMPLES + 512, "memory is bounded"
    spoken.utterance.ended(end_sample=250_000, speech_end_sample=245_000, reason=EndReason.SILENCE)
    while spoken.serve():
        pass
    assert spoken.text.split() == [f"w{n}" for n in range(60)]


def test_a_second_pass_that_fails_at_the_maximum_span_is_made_do_without() -> None:
    spoken = talk(steady(" ".join(f"w{n}" for n in range(30))), SECOND)
    hear_all(spoken, MAX_SPAN_SAMPLES)
    spoken.utterance.heard(MAX_SPAN_SAMPLES + 512)
    for _ in range(MAX_FAILURES):
        assert spoken.utterance.due() is Purpose.CUT
        spoken.serve(fails=True)
    assert spoken.finals and spoken.text.split()[:5] == ["w0", "w1", "w2", "w3", "w4"]


# ---------------------------------------------------------------- whatever happens on the way


@st.composite
def scripts(draw: st.DrawFn) -> list[ScriptedToken]:
    """Tokens with any durations, several in a frame too; words of one to three pieces, marks among them."""
    tokens: list[ScriptedToken] = []
    at = draw(st.integers(0, 8_000))
    for n in range(draw(st.integers(0, 25))):
        for piece in range(draw(st.integers(1, 3))):
            text = f" w{n}" if piece == 0 else draw(st.sampled_from(["a", "b", ".", ","]))
            tokens.append(ScriptedToken(text, at, draw(st.integers(0, 4))))
            at += draw(st.sampled_from([1, 300, 1_280, 1_281, 2_600, 6_000]))
    return tokens


@st.composite
def steps(draw: st.DrawFn) -> list[tuple[str, int]]:
    """What happens on the way: audio in packets of any size, pauses, decodes that answer late or fail."""
    packet = draw(st.sampled_from([512, 1_600, 5_000, 16_000, 48_000]))
    one = st.one_of(
        st.tuples(st.just("hear"), st.integers(1, packet)),
        st.tuples(st.sampled_from(["serve", "serve", "take", "answer", "fail", "pause", "resume"]), st.just(0)),
    )
    return draw(st.lists(one, max_size=120))


CHUNKS = st.builds(
    lambda n_chunk, n_first: chunking_of(
        replace(CONTEXT, first_samples=n_first * FRAME_SAMPLES),
        MAX_WINDOW_SAMPLES,
        chunk_samples=n_chunk * FRAME_SAMPLES,
    ),
    st.integers(2, 25),
    st.sampled_from((0, 0, 20, 38)),
)


def live(spoken: Talk, happenings: list[tuple[str, int]], start_sample: int, end_sample: int) -> None:
    """Everything in order, then the end; decodes that fail there do so once."""
    heard_sample, is_paused = start_sample, False
    waiting: DecodeRequest | None = None
    for what, n in happenings:
        if what == "hear":
            heard_sample = min(heard_sample + n, end_sample)
            if is_paused:
                spoken.utterance.resumed()
                is_paused = False
            spoken.utterance.heard(heard_sample)
        elif what == "pause" and not is_paused:
            spoken.utterance.paused()
            is_paused = True
        elif what == "resume" and is_paused:
            spoken.utterance.resumed()
            is_paused = False
        elif what in ("serve", "take") and waiting is None:
            waiting = spoken.take()
        if what in ("serve", "answer", "fail") and waiting is not None:
            spoken.answer(waiting, fails=what == "fail")
            waiting = None
    fails_last = happenings[-1:] == [("fail", 0)]
    spoken.show(spoken.utterance.ended(end_sample=end_sample, speech_end_sample=end_sample, reason=EndReason.SILENCE))
    if waiting is not None:
        spoken.answer(waiting)
    if fails_last:
        spoken.serve(fails=True)
    while spoken.serve():
        pass
    assert spoken.utterance.is_over


def end_of(tokens: Sequence[ScriptedToken], start_sample: int) -> int:
    return max([start_sample + 8_000, *(token.sample + 5 * FRAME_SAMPLES for token in tokens)])


@settings(max_examples=300, deadline=None)
@given(scripts(), CHUNKS, steps(), st.integers(0, 3 * FRAME_SAMPLES))
def test_no_word_is_lost_doubled_or_shifted_by_a_seam(
    tokens: list[ScriptedToken], chunking: Chunking, happenings: list[tuple[str, int]], start_sample: int
) -> None:
    tokens = [ScriptedToken(token.text, token.sample + start_sample, token.duration) for token in tokens]
    end_sample = end_of(tokens, start_sample)
    # A token needs as much audio behind it as there is right context.
    spoken = talk(tokens, chunking, start_sample=start_sample, edge=chunking.right_samples)
    live(spoken, happenings, start_sample, end_sample)
    offline = one_shot(tokens, SpeechSpan(start_sample, end_sample))
    assert spoken.text == "".join(word.text for word in offline)
    assert [word.start_sample for word in spoken.words] == [word.start_sample for word in offline]
    assert [word.end_sample for word in spoken.words] == [word.end_sample for word in offline]
    assert_settled_stays(spoken)
    assert_decoded_once(spoken, start_sample, end_sample)


@settings(max_examples=100, deadline=None)
@given(scripts(), CHUNKS, steps())
def test_a_second_pass_says_the_same_as_one_shot(
    tokens: list[ScriptedToken], chunking: Chunking, happenings: list[tuple[str, int]]
) -> None:
    end_sample = min(end_of(tokens, 0), MAX_SPAN_SAMPLES)
    tokens = [token for token in tokens if token.sample < end_sample - 5 * FRAME_SAMPLES]
    whole = chunking_of(CONTEXT, MAX_WINDOW_SAMPLES, chunk_samples=chunking.chunk_samples, second_pass=True)
    spoken = talk(tokens, whole, edge=whole.right_samples)
    live(spoken, happenings, 0, end_sample)
    assert spoken.text == "".join(word.text for word in one_shot(tokens, SpeechSpan(0, end_sample)))
    assert all(segment.n_committed == 0 for segment in spoken.shown if segment.end_reason is None)


def test_an_end_before_what_was_decoded_already_leaves_nothing_to_decode() -> None:
    chunking = Chunking(FRAME_SAMPLES, 30 * FRAME_SAMPLES, 4 * FRAME_SAMPLES, 0, MAX_WINDOW_SAMPLES)
    spoken = talk(steady("it was the best"), chunking)
    hear_all(spoken, 20_480)
    assert spoken.regions[-1].end_sample == 20_480
    spoken.utterance.ended(end_sample=20_000, speech_end_sample=19_000, reason=EndReason.FLUSH)
    while spoken.serve():
        pass
    assert spoken.text == " it was the best" and spoken.regions[-1].n_samples == 0


@pytest.mark.parametrize("chunk_ms", [160, 320, 2_000])
def test_a_monologue_keeps_no_more_than_the_contexts_and_a_chunk(chunk_ms: int) -> None:
    chunking = chunking_of(CONTEXT, MAX_WINDOW_SAMPLES, chunk_samples=samples_from_ms(chunk_ms))
    spoken = talk(steady(" ".join(f"w{n}" for n in range(200))), chunking)
    for sample in range(0, 800_000, 512):
        spoken.utterance.heard(sample)
        spoken.serve()
        kept_samples = sample - spoken.utterance.keep_from_sample
        assert kept_samples <= chunking.left_samples + chunking.latency_samples + FRAME_SAMPLES


@settings(max_examples=50, deadline=None)
@given(scripts(), CHUNKS, steps())
def test_memory_is_what_the_contexts_hold_and_what_waits(
    tokens: list[ScriptedToken], chunking: Chunking, happenings: list[tuple[str, int]]
) -> None:
    spoken = talk(tokens, chunking)
    heard_sample = 0
    for what, n in happenings:
        if what == "hear":
            heard_sample += n
            spoken.utterance.heard(heard_sample)
        while spoken.serve():
            pass
        kept_samples = heard_sample - spoken.utterance.keep_from_sample
        latest_samples = max(chunking.latency_samples, chunking.first_samples)
        assert kept_samples <= chunking.left_samples + latest_samples + 2 * FRAME_SAMPLES


def assert_settled_stays(spoken: Talk) -> None:
    """What was settled begins everything shown later of its segment, or of the next one behind a cut."""
    settled: list[str] = []
    for segment, over in _with_what_is_over(spoken.shown):
        now = over + [word.text for word in segment.words[: segment.n_committed]]
        assert now[: len(settled)] == settled, "a settled word changed"
        settled = now


def _with_what_is_over(shown: Sequence[Segment]) -> Iterator[tuple[Segment, list[str]]]:
    over: list[str] = []
    for segment in shown:
        if segment.end_reason is EndReason.MAX_SPAN:
            yield segment, over
            over = [*over, *(word.text for word in segment.words)]
        else:
            yield segment, over


def assert_decoded_once(spoken: Talk, start_sample: int, end_sample: int) -> None:
    """Chunk regions follow one another without gap or overlap; a final that was none was a pause's whole rest."""
    at = start_sample
    for region in spoken.regions:
        assert region.start_sample == at
        at = region.end_sample
    last = spoken.requests[-1]
    assert at == end_sample or (last.purpose is Purpose.PAUSE and last.span.end_sample >= end_sample)
