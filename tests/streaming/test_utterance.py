"""One utterance: when it asks for a decode, what it settles, where it cuts, when it is over."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streaming.context import Context
from streaming.pacing import Pacing
from streaming.transcript import EndReason, Hypothesis, Quality, Segment, Word
from streaming.utterance import (
    AGREEMENT_MARGIN_SAMPLES,
    ATTENTION_MARGIN_SAMPLES,
    DOUBT_MARGIN_SAMPLES,
    SURE_CONFIDENCE,
    CommitPolicy,
    Purpose,
    Utterance,
    settle_by_agreement,
    settle_by_attention,
)
from vad.audio import SpeechSpan

PACING = Pacing(first_partial_samples=8_000, partial_interval_samples=8_000, max_span_samples=160_000)
GOOD = Quality(-0.1, 0.0, 1.2, 0.0)
DOUBTFUL = Quality(-1.5, 0.0, 1.2, 0.0)


def utterance(*, policy: CommitPolicy = CommitPolicy.AGREEMENT, start_sample: int = 0) -> Utterance:
    return Utterance(start_sample=start_sample, segment_ids=itertools.count(1), pacing=PACING, policy=policy)


def words(text: str, *, each_samples: int = 4_000, start_sample: int = 0) -> tuple[Word, ...]:
    return tuple(
        Word(f" {word}", start_sample + i * each_samples, start_sample + (i + 1) * each_samples - 400, 0.9)
        for i, word in enumerate(text.split())
    )


def hypothesis(heard: tuple[Word, ...], quality: Quality = GOOD) -> Hypothesis:
    return Hypothesis(heard, "en", quality)


def texts(segment: Segment) -> tuple[str, str]:
    """Committed and tentative text."""
    committed, tentative = segment.words[: segment.n_committed], segment.words[segment.n_committed :]
    return "".join(w.text for w in committed).strip(), "".join(w.text for w in tentative).strip()


def test_nothing_is_decoded_before_a_minimum_of_speech() -> None:
    spoken = utterance()
    spoken.heard(7_999)
    assert spoken.next_request() is None
    spoken.heard(8_000)
    request = spoken.next_request()
    assert request is not None and request.purpose is Purpose.PARTIAL and request.span == SpeechSpan(0, 8_000)


def test_one_decode_is_under_way_at_most() -> None:
    spoken = utterance()
    spoken.heard(100_000)
    assert spoken.next_request() is not None
    spoken.heard(150_000)
    assert spoken.next_request() is None and spoken.due() is None


def test_a_late_engine_gets_the_newest_audio() -> None:
    spoken = utterance()
    spoken.heard(8_000)
    spoken.heard(90_000)
    request = spoken.next_request()
    assert request is not None and request.span.end_sample == 90_000


def test_words_are_settled_when_two_hypotheses_agree_and_given_as_prefix() -> None:
    spoken = utterance()
    spoken.heard(12_000)
    spoken.next_request()
    [shown] = spoken.decoded(hypothesis(words("it was")))
    assert texts(shown) == ("", "it was")
    spoken.heard(8_000 + AGREEMENT_MARGIN_SAMPLES)
    spoken.next_request()
    [shown] = spoken.decoded(hypothesis(words("it was the best")))
    assert texts(shown) == ("it was", "the best") and shown.revision == 2
    spoken.heard(24_000 + AGREEMENT_MARGIN_SAMPLES)
    request = spoken.next_request()
    assert request is not None and [word.text for word in request.prefix] == [" it", " was"]


def test_a_hypothesis_that_changes_nothing_is_not_shown_again() -> None:
    spoken = utterance(policy=CommitPolicy.ATTENTION)
    spoken.heard(8_000)
    spoken.next_request()
    assert len(spoken.decoded(hypothesis(words("it")))) == 1
    spoken.heard(16_000)
    spoken.next_request()
    assert spoken.decoded(hypothesis(words("it"))) == []


def test_a_doubtful_word_and_those_behind_it_settle_only_once_much_more_was_heard() -> None:
    heard = words("it was the best of times")  # each 0.25 s
    heard = (heard[0], replace(heard[1], confidence=SURE_CONFIDENCE - 0.01), *heard[2:])
    assert settle_by_agreement(heard, heard, 64_000) == 1
    assert settle_by_agreement(heard, heard, 7_599 + DOUBT_MARGIN_SAMPLES) == 1
    assert settle_by_agreement(heard, heard, 7_600 + DOUBT_MARGIN_SAMPLES) == 2
    assert settle_by_agreement(heard, heard, 24_000 + DOUBT_MARGIN_SAMPLES) == 6


def test_attention_settles_with_one_hypothesis_what_lies_well_before_the_edge() -> None:
    heard = words("it was the best of times")  # each 0.25 s
    assert settle_by_attention((), heard, 7_600 + ATTENTION_MARGIN_SAMPLES) == 2
    assert settle_by_attention((), heard, 64_000) == 6
    assert settle_by_agreement((), heard, 64_000) == 0


def test_agreement_without_times_keeps_the_last_word_open() -> None:
    untimed = tuple(Word(f" {text}", None, None, None) for text in ("it", "was", "the"))
    assert settle_by_agreement(untimed, untimed, 64_000) == 2
    assert settle_by_attention(untimed, untimed, 64_000) == 0


def test_decode_made_at_the_pause_serves_as_the_final() -> None:
    spoken = utterance()
    spoken.heard(20_000)
    spoken.paused()
    request = spoken.next_request()
    assert request is not None and request.purpose is Purpose.PAUSE and request.is_final
    spoken.decoded(hypothesis(words("it was the best")))
    [final] = spoken.ended(end_sample=19_000, speech_end_sample=16_500, reason=EndReason.SILENCE)
    assert texts(final) == ("it was the best", "") and final.end_reason is EndReason.SILENCE
    assert spoken.is_over and spoken.next_request() is None


def test_a_pause_that_ends_makes_its_decode_a_partial_again() -> None:
    spoken = utterance()
    spoken.heard(20_000)
    spoken.paused()
    spoken.next_request()
    spoken.decoded(hypothesis(words("it was")))
    spoken.resumed()
    spoken.heard(60_000)
    assert spoken.ended(end_sample=60_000, speech_end_sample=58_000, reason=EndReason.FLUSH) == []
    request = spoken.next_request()
    assert request is not None and request.purpose is Purpose.FINAL and request.span.end_sample == 60_000


def test_the_end_that_comes_during_a_decode_waits_for_it() -> None:
    spoken = utterance()
    spoken.heard(20_000)
    spoken.paused()
    spoken.next_request()
    assert spoken.ended(end_sample=20_000, speech_end_sample=16_500, reason=EndReason.SILENCE) == []
    [final] = spoken.decoded(hypothesis(words("it was")))
    assert final.end_reason is EndReason.SILENCE and spoken.is_over


def test_an_utterance_without_words_ends_without_a_segment() -> None:
    spoken = utterance()
    spoken.heard(20_000)
    spoken.ended(end_sample=20_000, speech_end_sample=16_000, reason=EndReason.SILENCE)
    spoken.next_request()
    assert spoken.decoded(hypothesis(())) == [] and spoken.is_over


def test_a_span_at_its_maximum_is_cut_behind_a_sentence_and_the_rest_goes_on() -> None:
    spoken = utterance()
    spoken.heard(200_000)
    request = spoken.next_request()
    assert request is not None and request.purpose is Purpose.CUT and request.span == SpeechSpan(0, 160_000)
    said = words(" ".join([*"abcdefghijklmnopqrstuvwxyzabcdefghi", "end.", "and", "on"]))  # the end at 9 s
    [final] = spoken.decoded(hypothesis(said))
    assert final.end_reason is EndReason.MAX_SPAN and final.words[-1].text == " end."
    assert final.span.end_sample == 36 * 4_000 - 200 > spoken.keep_from_sample
    request = spoken.next_request()
    assert request is not None and request.span.end_sample == 200_000
    lead_start = request.span.start_sample
    assert request.left_context_samples == final.span.end_sample - lead_start > 0
    assert request.prefix[-1].text == " end." and request.prompt.startswith("a b")


def test_a_full_stop_that_belongs_to_the_words_heard_again_does_not_begin_a_segment() -> None:
    spoken = utterance(start_sample=16_000)
    spoken.context = Context("", words("it was"), 8_000, 16_000)
    spoken.heard(24_000)
    request = spoken.next_request()
    assert request is not None and request.left_context_samples == 8_000
    [shown] = spoken.decoded(hypothesis((Word(".", 16_000, 16_000, 0.9), *words("the best.", start_sample=16_000))))
    assert texts(shown) == ("", "the best.")


def test_a_span_with_nothing_in_it_is_closed_whole() -> None:
    spoken = utterance()
    spoken.heard(200_000)
    spoken.next_request()
    assert spoken.decoded(hypothesis(())) == []
    assert spoken.keep_from_sample == 160_000 and not spoken.is_over


def test_speech_that_ended_with_the_cut_needs_no_further_decode() -> None:
    spoken = utterance()
    spoken.heard(170_000)
    spoken.ended(end_sample=161_000, speech_end_sample=150_000, reason=EndReason.SILENCE)
    spoken.next_request()
    said = words("w " * 36 + "x.")  # the last ends at 152_000 - 400, well within
    segments = spoken.decoded(hypothesis(said))
    assert [segment.end_reason for segment in segments] == [EndReason.MAX_SPAN] and spoken.is_over


@pytest.mark.parametrize("quality", [GOOD, DOUBTFUL])
def test_only_confident_text_becomes_the_next_prompt(quality: Quality) -> None:
    spoken = utterance()
    spoken.heard(200_000)
    spoken.next_request()
    spoken.decoded(hypothesis(words("w " * 36), quality))
    assert bool(spoken.context.lead) == (quality is GOOD)


def test_a_loop_is_decoded_again_without_prefix_and_prompt() -> None:
    spoken = utterance()
    spoken.context = Context("before", words("so"), 0, 3_600)
    for end_sample in (12_000, 24_000):
        spoken.heard(end_sample)
        spoken.next_request()
        spoken.decoded(hypothesis(words("it was the")))
    spoken.heard(40_000)
    request = spoken.next_request()
    assert request is not None and request.prefix and request.prompt
    assert spoken.decoded(hypothesis(words("la " * 200))) == []
    request = spoken.next_request()
    assert request is not None and request.is_retry and not request.prefix and not request.prompt
    assert request.left_context_samples == 0
    [shown] = spoken.decoded(hypothesis(words("it was the best of times")))
    assert "".join(word.text for word in shown.words) == " it was the best of times"  # the settled words once


def test_a_loop_without_prefix_is_cut_at_once() -> None:
    spoken = utterance()
    spoken.heard(24_000)
    spoken.next_request()
    [shown] = spoken.decoded(hypothesis(words("so it was la la la " + "la " * 200)))
    assert "".join(word.text for word in shown.words) == " so it was la"
    assert spoken.next_request() is None


def test_a_failed_final_ends_the_utterance_with_what_was_heard() -> None:
    spoken = utterance()
    spoken.heard(12_000)
    spoken.next_request()
    spoken.decoded(hypothesis(words("it was")))
    spoken.ended(end_sample=24_000, speech_end_sample=22_000, reason=EndReason.END)
    spoken.next_request()
    [final] = spoken.failed()
    assert texts(final) == ("it was", "") and spoken.is_over


def test_a_failed_partial_costs_nothing_but_itself() -> None:
    spoken = utterance()
    spoken.heard(12_000)
    spoken.next_request()
    assert spoken.failed() == []
    assert spoken.next_request() is None
    spoken.heard(24_000)
    assert spoken.next_request() is not None


def test_a_partial_that_fails_when_the_speech_has_ended_does_not_cost_the_final() -> None:
    spoken = utterance()
    spoken.heard(12_000)
    spoken.next_request()
    spoken.ended(end_sample=24_000, speech_end_sample=22_000, reason=EndReason.SILENCE)
    assert spoken.failed() == []
    request = spoken.next_request()
    assert request is not None and request.purpose is Purpose.FINAL and request.span == SpeechSpan(0, 24_000)
    [final] = spoken.decoded(hypothesis(words("it was the")))
    assert texts(final) == ("it was the", "") and spoken.is_over


def test_times_never_run_backwards_where_words_were_decoded_again() -> None:
    spoken = utterance()
    for end_sample in (12_000, 24_000):
        spoken.heard(end_sample)
        spoken.next_request()
        spoken.decoded(hypothesis(words("it was")))
    spoken.heard(40_000)
    spoken.next_request()
    earlier = (Word(" the", 3_000, 3_500, 0.5), Word(" best", 9_000, 12_000, 0.5))
    [shown] = spoken.decoded(hypothesis(earlier))
    starts = [word.start_sample for word in shown.words]
    assert starts == sorted(starts)  # type: ignore[type-var]
    assert all(word.start_sample <= word.end_sample for word in shown.words)  # type: ignore[operator]
    assert all(a.end_sample <= b.start_sample for a, b in itertools.pairwise(shown.words))  # type: ignore[operator]


@given(st.lists(st.tuples(st.integers(1, 30_000), st.integers(0, 6), st.booleans()), min_size=1, max_size=12))
def test_whatever_the_engine_says_settled_words_stay_and_it_ends(steps: list[tuple[int, int, bool]]) -> None:
    spoken = utterance()
    at = 0
    settled: dict[int, list[str]] = {}
    segments: list[Segment] = []
    for n_samples, n_words, pauses in steps:
        at += n_samples
        spoken.heard(at)
        if pauses:
            spoken.paused()
        if (request := spoken.next_request()) is not None:
            start = request.span.start_sample + 4_000 * len(request.prefix)
            segments += spoken.decoded(hypothesis(words(" ".join("abcdef"[:n_words]), start_sample=start)))
        spoken.resumed()
    segments += spoken.ended(end_sample=at, speech_end_sample=at, reason=EndReason.END)
    while not spoken.is_over:
        assert spoken.next_request() is not None
        segments += spoken.decoded(hypothesis(()))
    for segment in segments:
        now = [word.text for word in segment.words[: segment.n_committed]]
        before = settled.get(segment.segment_id, [])
        assert now[: len(before)] == before
        settled[segment.segment_id] = now


@pytest.mark.parametrize(("mean_logprob", "is_asked_again"), [(-0.6, True), (-0.1, False)])
def test_a_doubtful_empty_final_behind_a_lead_is_decoded_again_without_it(mean_logprob, is_asked_again) -> None:
    """Of a phrase said again, whose first time is given, a model may think that it was written already."""
    spoken = utterance(start_sample=16_000)
    spoken.context = Context("before", words("so it was"), 0, 12_000)
    spoken.heard(60_000)
    spoken.ended(end_sample=60_000, speech_end_sample=58_000, reason=EndReason.SILENCE)
    request = spoken.next_request()
    assert request is not None and request.left_context_samples == 16_000
    assert spoken.decoded(hypothesis((), Quality(mean_logprob, 0.0, 0.0, 0.0))) == []
    again = spoken.next_request()
    assert (again is not None) is is_asked_again
    if again is not None:
        assert again.is_retry and not again.prefix and not again.prompt and again.left_context_samples == 0
        [final] = spoken.decoded(hypothesis(words("so it was", start_sample=20_000)))
        assert texts(final) == ("so it was", "")
    assert spoken.is_over
