"""Which words are settled."""

from hypothesis import given
from hypothesis import strategies as st

from streaming.agreement import (
    after,
    agree,
    continues,
    ends_before,
    normalised,
    sure,
    whole_words,
    without_leading_marks,
)
from streaming.transcript import Word

TEXTS = st.lists(st.sampled_from([" the", " The", " best", " best,", " of", " times", "."]), max_size=8)


def said(*texts: str, at_sample: int = 0, each_samples: int = 4_000) -> tuple[Word, ...]:
    """Words of equal length, one after another."""
    return tuple(
        Word(text, at_sample + i * each_samples, at_sample + (i + 1) * each_samples, None)
        for i, text in enumerate(texts)
    )


def test_case_punctuation_and_white_space_do_not_matter() -> None:
    assert normalised(" Times,") == normalised("times") == "times"
    assert agree(said(" The", " best,"), said(" the", " best")) == 2


def test_agreement_ends_at_the_first_difference() -> None:
    assert agree(said(" the", " best", " of"), said(" the", " rest", " of")) == 1


@given(TEXTS, TEXTS)
def test_agreement_is_symmetric_and_never_longer_than_either(first: list[str], second: list[str]) -> None:
    a, b = said(*first), said(*second)
    assert agree(a, b) == agree(b, a) <= min(len(a), len(b))
    assert agree(a, a) == len(a)


def test_a_word_attended_to_at_the_edge_is_not_settled() -> None:
    words = said(" the", " best", " of")
    assert ends_before(words, 8_000) == 2
    assert ends_before(words, 7_999) == 1


def test_words_without_times_are_never_settled_by_attention() -> None:
    assert ends_before((Word(" the", None, None, None),), 1 << 40) == 0


def test_what_stands_behind_a_doubtful_word_is_not_sure_either() -> None:
    words = tuple(Word(" the", 0, 0, confidence) for confidence in (0.9, 0.6, 0.59, 0.9))
    assert sure(words, 0.6) == 2


def test_words_without_confidence_are_sure() -> None:
    assert sure(said(" the", " best"), 0.99) == 2


def test_leading_marks_are_those_without_a_letter_or_digit() -> None:
    words = said(".", " ...", " best", ".")
    assert [word.text for word in without_leading_marks(words)] == [" best", "."]
    assert without_leading_marks(words[:2]) == ()
    assert without_leading_marks(said(" $5")) == said(" $5")


def test_a_piece_that_continues_a_word_settles_together_with_it() -> None:
    words = said(" New", "ton", " said")
    assert whole_words(words, 1) == 0
    assert whole_words(words, 2) == 2
    assert whole_words(words, 3) == 3


def test_scripts_without_spaces_have_a_border_before_every_word() -> None:
    assert not continues(said("世")[0])
    assert not continues(said("ก")[0])
    assert not continues(said("ば")[0])
    assert continues(said("ton")[0])
    assert continues(said("és")[0])
    assert continues(said(",")[0])


def test_overlap_is_left_out_by_time_and_a_true_repeat_survives() -> None:
    words = said(" no", " no", " no", " never")
    assert after(words, 8_000) == words[2:]
    assert after(words, 0) == words
    assert after(words, 16_000) == ()
    assert after(words, 9_000) == words[2:]  # most of the third word lies behind


@given(st.integers(0, 40_000))
def test_what_is_left_out_and_what_is_kept_join_to_the_whole(sample: int) -> None:
    words = said(" a", " b", " c", " d", " e")
    kept = after(words, sample)
    assert words[len(words) - len(kept) :] == kept
