"""Subtitle files: clocks, breaks, escapes."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.subtitles import MAX_CUE_CHARACTERS, Cue, TimedWord, as_srt, as_vtt, cues_of

CUES = [Cue(0.0, 1.5, "Ever tried."), Cue(3_599.9996, 3_661.042, "a < b & c")]


def test_subrip_numbers_its_cues_and_has_a_comma_in_the_clock() -> None:
    assert as_srt(CUES) == (
        "1\n00:00:00,000 --> 00:00:01,500\nEver tried.\n\n2\n01:00:00,000 --> 01:01:01,042\na < b & c\n"
    )


def test_webvtt_has_a_head_a_point_in_the_clock_and_escapes() -> None:
    assert as_vtt(CUES) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.500\nEver tried.\n\n01:00:00.000 --> 01:01:01.042\na &lt; b &amp; c\n"
    )


def test_a_segment_without_word_times_stays_one_cue() -> None:
    words = [TimedWord(" word", None, None)] * 40
    assert cues_of(words, 1.0, 9.0) == [Cue(1.0, 9.0, " ".join(["word"] * 40))]


def test_a_segment_without_words_gives_no_cue() -> None:
    assert cues_of([], 1.0, 2.0) == []


@given(st.lists(st.text("abc", min_size=1, max_size=20), min_size=1, max_size=60))
def test_a_long_segment_is_broken_at_words_without_losing_any(texts: list[str]) -> None:
    cues = cues_of([TimedWord(f" {text}", float(i), i + 0.5) for i, text in enumerate(texts)], 0.0, 99.0)
    assert " ".join(cue.text for cue in cues) == " ".join(texts)
    assert all(len(cue.text) <= MAX_CUE_CHARACTERS for cue in cues)
    assert all(earlier.end_s <= later.start_s for earlier, later in zip(cues, cues[1:], strict=False))
