"""Where a long span is cut."""

from hypothesis import given
from hypothesis import strategies as st

from streaming.transcript import Word
from streaming.trim import Cut, choose_cut
from vad.audio import SpeechSpan

SPAN = SpeechSpan(0, 100_000)


def word(text: str, start_sample: int, end_sample: int) -> Word:
    return Word(text, start_sample, end_sample, None)


def test_end_of_a_sentence_in_the_latter_half_wins_over_a_longer_pause() -> None:
    words = (
        word(" so.", 0, 55_000),
        word(" And", 56_000, 60_000),
        word(" then", 70_000, 80_000),
        word(" we", 81_000, 90_000),
    )
    assert choose_cut(words, SPAN, 3) == Cut(1, 55_500)


def test_without_a_sentence_the_longest_pause_wins() -> None:
    words = (
        word(" and", 0, 55_000),
        word(" then", 60_000, 70_000),
        word(" we", 70_100, 80_000),
        word(" go", 80_100, 90_000),
    )
    assert choose_cut(words, SPAN, 3) == Cut(1, 57_500)


def test_an_earlier_place_is_taken_only_if_there_is_none_late() -> None:
    words = (word(" one.", 0, 10_000), word(" two", 30_000, 40_000), word(" three", 41_000, 99_000))
    assert choose_cut(words, SPAN, 2) == Cut(2, 40_500)


def test_a_word_is_never_cut_from_its_continuation() -> None:
    words = (word(" New", 40_000, 60_000), word("ton", 60_000, 70_000), word(" x", 71_000, 90_000))
    assert choose_cut(words, SPAN, 1) is None
    assert choose_cut(words, SPAN, 2) == Cut(2, 70_500)


def test_times_outside_the_span_offer_no_place() -> None:
    span = SpeechSpan(100_000, 340_000)
    for start, end in ((100_000, 100_000), (0, 50_000), (400_000, 500_000)):
        assert choose_cut((Word(" a", start, end, None), Word(" b", start, end, None)), span, 1) is None


def test_words_without_times_offer_no_place() -> None:
    assert choose_cut((Word(" a", None, None, None), Word(" b", None, None, None)), SPAN, 2) is None
    assert choose_cut((), SPAN, 0) is None


@given(st.lists(st.tuples(st.integers(0, 5_000), st.integers(1, 9_000)), min_size=1, max_size=10), st.integers(1, 10))
def test_a_cut_lies_between_the_words_it_parts(shape: list[tuple[int, int]], n_settled: int) -> None:
    words, at = [], 0
    for gap, length in shape:
        words.append(word(" w", at + gap, at + gap + length))
        at += gap + length
    span = SpeechSpan(0, at + 1_000)
    cut = choose_cut(words, span, min(n_settled, len(words)))
    assert cut is not None and 1 <= cut.n_words <= min(n_settled, len(words))
    assert words[cut.n_words - 1].end_sample <= cut.sample <= span.end_sample  # type: ignore[operator]
    if cut.n_words < len(words):
        assert cut.sample <= words[cut.n_words].start_sample  # type: ignore[operator]
