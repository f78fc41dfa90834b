"""Counting right words: by hand, and against jiwer."""

import jiwer
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.commands.word_errors import WordErrors, compare, words_of

WORDS = st.lists(st.sampled_from(["a", "b", "c", "d"]), max_size=12)


@pytest.mark.parametrize(
    ("heard", "expected"),
    [
        ("it was the best", WordErrors(4, 0, 0, 0)),
        ("it was a best", WordErrors(4, 1, 0, 0)),
        ("it was best", WordErrors(4, 0, 1, 0)),
        ("it was the very best", WordErrors(4, 0, 0, 1)),
        ("", WordErrors(4, 0, 4, 0)),
    ],
)
def test_each_kind_of_error_is_counted(heard: str, expected: WordErrors) -> None:
    assert compare("it was the best".split(), heard.split()) == expected


def test_case_and_punctuation_do_not_count() -> None:
    assert words_of("The other way—in short, it's “Heaven”.") == [
        "the",
        "other",
        "way",
        "in",
        "short",
        "it's",
        "heaven",
    ]


def test_a_recital_of_nothing_has_no_rate_to_divide_by() -> None:
    assert compare([], ["a"]).rate == 1.0


@given(WORDS.filter(bool), WORDS)
def test_the_number_of_errors_is_that_of_jiwer(reference: list[str], heard: list[str]) -> None:
    errors = compare(reference, heard)
    assert errors.rate == pytest.approx(jiwer.wer(" ".join(reference), " ".join(heard)))
    assert errors.n_right + errors.n_wrong + errors.n_extra == len(heard)
