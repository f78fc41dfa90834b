"""Pieces from both kinds of tokenizers, and tokens to words with times."""

from math import log
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.errors import ModelFilesError
from models.parakeet.config import FRAME_SAMPLES
from models.parakeet.tokens import Pieces, TimedToken, read_sentencepiece, read_tokenizer_json, split_words, words_of
from tests.models.parakeet.files import PIECES, sentencepiece_model, write_tokenizer
from tests.models.parakeet.small import SMALL

SPELT = Pieces.of(dict(enumerate(PIECES)), n_tokens=21, blank_id=20, source="x")
OF = {piece.replace("▁", " "): index for index, piece in enumerate(PIECES)}


def tokens(*parts: tuple[str, int, int]) -> list[TimedToken]:
    """Of (text, frame, duration)."""
    return [
        TimedToken(OF[text], frame * FRAME_SAMPLES, (frame + duration) * FRAME_SAMPLES, log(0.5))
        for text, frame, duration in parts
    ]


def words(*parts: tuple[str, int, int]) -> list[tuple[str, float | None, float | None]]:
    """(text, start, end) with times in frames."""
    found = words_of(split_words(tokens(*parts), SPELT), SPELT)
    assert all(word.start_sample is not None and word.end_sample is not None for word in found)
    return [(word.text, word.start_sample / FRAME_SAMPLES, word.end_sample / FRAME_SAMPLES) for word in found]


def test_pieces_that_begin_with_a_space_begin_words_and_the_others_go_on() -> None:
    assert words((" s", 0, 2), ("in", 2, 1), ("t", 4, 2), (" a", 7, 1)) == [(" sint", 0, 6), (" a", 7, 8)]


def test_the_first_token_begins_a_word_whatever_it_is() -> None:
    assert words(("t", 3, 1), (" a", 5, 1)) == [("t", 3, 4), (" a", 5, 6)]


def test_marks_join_the_word_before_and_do_not_lengthen_it() -> None:
    assert words((" the", 1, 2), (",", 9, 2), (" a", 12, 1), (".", 14, 4)) == [(" the,", 1, 3), (" a.", 12, 13)]


def test_opening_marks_begin_a_word_whose_time_is_that_of_its_letters() -> None:
    assert words((" s", 0, 1), (" ¿", 2, 1), ("a", 4, 2), ("?", 9, 1)) == [(" s", 0, 1), (" ¿a?", 4, 6)]
    assert words((" '", 2, 1), ("t", 3, 1), ("-", 4, 1), ("in", 5, 1)) == [(" 't-in", 3, 6)]


def test_a_lone_space_begins_a_word_and_alone_it_is_none() -> None:
    assert words((" a", 0, 1), (" ", 2, 1), ("0", 3, 2)) == [(" a", 0, 1), (" 0", 2, 5)]
    assert words((" a", 0, 1), (" ", 2, 1)) == [(" a", 0, 1)]


def test_a_word_whose_last_token_lasts_no_time_is_given_a_frame_that_the_next_word_may_shorten() -> None:
    assert words((" a", 4, 0)) == [(" a", 4, 5)]
    assert words((" a", 4, 0), (" s", 4, 2)) == [(" a", 4, 4), (" s", 4, 6)]
    assert words((" s", 4, 1), ("in", 6, 0)) == [(" sin", 4, 6)]


def test_tokens_that_are_no_text_are_left_out() -> None:
    spelt = split_words([TimedToken(i, 0, 0, 0.0) for i in (0, 1, 2, 3, 5, 20)], SPELT)
    assert [[token.token_id for token in word] for word in spelt] == [[5]]
    assert split_words([], SPELT) == []


def test_confidence_is_the_mean_probability_of_all_tokens() -> None:
    group = [TimedToken(OF[" a"], 0, 1, log(0.2)), TimedToken(OF["t"], 1, 2, log(0.6))]
    assert words_of([group], SPELT)[0].confidence == pytest.approx(0.4)


@given(ids=st.lists(st.integers(0, 20), max_size=30), cut=st.integers(0, 30))
def test_the_words_of_a_beginning_are_a_beginning_of_the_words_but_for_the_last(ids: list[int], cut: int) -> None:
    every = [TimedToken(token_id, i, i + 1, -1.0) for i, token_id in enumerate(ids)]
    some = split_words(every[:cut], SPELT)
    assert split_words(every, SPELT)[: max(0, len(some) - 1)] == some[:-1]


def test_punctuation_is_offered_where_it_can_be_written() -> None:
    assert SPELT.has_punctuation
    assert not Pieces((" a", "b", None, "'")).has_punctuation


def test_both_kinds_of_tokenizers_give_the_same_pieces(tmp_path: Path) -> None:
    write_tokenizer(tmp_path / "tokenizer.json")
    for spelt in (
        read_tokenizer_json(tmp_path / "tokenizer.json"),
        read_sentencepiece(sentencepiece_model(), source="x"),
    ):
        assert Pieces.of(spelt, n_tokens=SMALL.vocabulary_size, blank_id=SMALL.blank_id, source="x") == SPELT


@pytest.mark.parametrize("content", [b"", b"\x0a\xff", b"no model at all"])
def test_what_is_no_sentencepiece_model_is_refused(content: bytes) -> None:
    with pytest.raises(ModelFilesError, match="tokenizer.model"):
        read_sentencepiece(content, source="tokenizer.model")


def test_what_is_no_tokenizer_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelFilesError, match="no readable tokenizer"):
        read_tokenizer_json(tmp_path / "tokenizer.json")


def test_too_few_pieces_and_pieces_of_bytes_are_refused() -> None:
    with pytest.raises(ModelFilesError, match="no piece for 2 of the network's 5 tokens, first 2"):
        Pieces.of({0: "a", 1: "b"}, n_tokens=5, blank_id=4, source="x")
    with pytest.raises(ModelFilesError, match=r"spells text in bytes \(<0xE2>\)"):
        Pieces.of({0: "a", 1: "<0xE2>"}, n_tokens=3, blank_id=2, source="x")
