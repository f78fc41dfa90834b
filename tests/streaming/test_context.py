"""What a decode is told of what was said before."""

from hypothesis import given
from hypothesis import strategies as st

from streaming.context import (
    MAX_LEAD_GAP_SAMPLES,
    MAX_LEAD_SAMPLES,
    MAX_PROMPT_CHARACTERS,
    MAX_PROMPT_GAP_SAMPLES,
    Context,
    is_confident,
)
from streaming.transcript import Quality, Word, text_of
from vad.audio import SpeechSpan

GOOD = Quality(-0.2, 0.0, 1.5, 0.0)
WORD_SAMPLES = 4_000


def words(text: str, start_sample: int = 0) -> tuple[Word, ...]:
    starts = range(start_sample, start_sample + WORD_SAMPLES * len(text.split()), WORD_SAMPLES)
    return tuple(Word(f" {t}", at, at + 3_600, None) for t, at in zip(text.split(), starts, strict=True))


def test_only_confident_text_is_carried_over() -> None:
    assert is_confident(GOOD)
    assert not is_confident(Quality(-0.9, 0.0, 1.5, 0.0))
    assert not is_confident(Quality(-0.2, 0.0, 1.5, 0.4))
    assert not is_confident(None) and not is_confident(Quality(None, None, None, None))
    assert (
        Context("before").followed_by(words("mumble"), Quality(-2.0, 0.0, 1.0, 0.0), SpeechSpan(0, 4_000)) == Context()
    )


def test_a_segment_without_words_changes_nothing() -> None:
    context = Context("before", words("a"), 0, 3_600)
    assert context.followed_by((), GOOD, SpeechSpan(9, 90_000)) == context


def test_the_last_seconds_are_heard_again_and_the_rest_is_text() -> None:
    said = words(" ".join(f"w{i}" for i in range(40)))
    context = Context().followed_by(said, GOOD, SpeechSpan(0, said[-1].end_sample or 0))
    assert context.prompt + " " + text_of(context.lead) == text_of(said)
    assert (context.end_sample - context.lead_start_sample) <= MAX_LEAD_SAMPLES + WORD_SAMPLES
    first = context.lead[0]
    assert first.start_sample is not None and context.lead_start_sample == first.start_sample - 200


def test_leads_grow_over_short_segments() -> None:
    first = Context().followed_by(words("it was"), GOOD, SpeechSpan(100, 8_000))
    second = first.followed_by(words("the best", 16_000), GOOD, SpeechSpan(15_000, 24_000))
    assert text_of(second.lead) == "it was the best" and second.lead_start_sample == first.lead_start_sample == 100


def test_after_a_pause_the_lead_becomes_text_and_after_a_long_one_nothing_is_left() -> None:
    context = Context("before", words("it was"), 0, 8_000)
    assert context.for_speech_at(8_000 + MAX_LEAD_GAP_SAMPLES) == context
    assert context.leads_to(8_000 + MAX_LEAD_GAP_SAMPLES) and not context.leads_to(8_001 + MAX_LEAD_GAP_SAMPLES)
    later = context.for_speech_at(8_001 + MAX_LEAD_GAP_SAMPLES)
    assert later.prompt == "before it was" and not later.lead
    assert context.for_speech_at(8_001 + MAX_PROMPT_GAP_SAMPLES) == Context()


def test_words_without_times_are_carried_as_text_only() -> None:
    untimed = (Word(" it", None, None, None), Word(" was", None, None, None))
    context = Context().followed_by(untimed, GOOD, SpeechSpan(100, 8_000))
    assert context.prompt == "it was" and not context.lead


def test_a_phrase_said_again_and_again_is_heard_again_once_and_is_no_prompt() -> None:
    said = words(" ".join(["it was the spring"] * 8))
    context = Context().followed_by(said, GOOD, SpeechSpan(0, said[-1].end_sample or 0))
    assert context.prompt == "" and context.lead == said[-4:]
    assert context.lead_start_sample == (said[-4].start_sample or 0) - 200
    later = context.for_speech_at(context.end_sample + MAX_LEAD_GAP_SAMPLES + 1)
    assert later.prompt == "it was the spring" and not later.lead


def test_a_word_said_twice_stays_in_the_prompt() -> None:
    said = words("that was very very")
    context = Context().followed_by(said, GOOD, SpeechSpan(0, said[-1].end_sample or 0))
    assert context.for_speech_at(context.end_sample + MAX_LEAD_GAP_SAMPLES + 1).prompt == "that was very very"


def test_a_lead_never_begins_inside_a_word() -> None:
    said = (*words("a b"), Word("ton", 8_000, 70_000, None), *words("c d e f", 72_000))
    context = Context().followed_by(said, GOOD, SpeechSpan(0, 88_000))
    assert not context.lead or context.lead[0].text.startswith(" ")


@given(st.lists(st.text("ab ", min_size=1, max_size=300), max_size=5))
def test_a_prompt_keeps_to_its_budget_and_ends_as_the_text_does(texts: list[str]) -> None:
    context = Context()
    for text in texts:
        untimed = tuple(Word(f" {word}", None, None, None) for word in text.split())
        context = context.followed_by(untimed, GOOD, SpeechSpan(0, 0))
        assert len(context.prompt) <= MAX_PROMPT_CHARACTERS
        if untimed and len(text_of(untimed)) < MAX_PROMPT_CHARACTERS:
            assert context.prompt.endswith(text_of(untimed)) or context.prompt == ""  # a phrase said twice


def test_a_script_without_spaces_is_cut_between_characters() -> None:
    context = Context().followed_by((Word("字" * 300, None, None, None),), GOOD, SpeechSpan(0, 0))
    assert context.prompt == "字" * MAX_PROMPT_CHARACTERS


@given(st.lists(st.integers(0, 30_000), min_size=1, max_size=12), st.integers(0, 5_000))
def test_a_lead_lies_within_what_was_heard(lengths: list[int], start_sample: int) -> None:
    """Audio before a segment that had no lead is gone: nothing may ask for it."""
    said, at = [], start_sample
    for length in lengths:
        said.append(Word(" w", at, at + length, None))
        at += length
    context = Context().followed_by(said, GOOD, SpeechSpan(start_sample, at))
    assert not context.lead or start_sample <= context.lead_start_sample <= (context.lead[0].start_sample or 0)
