"""Tokens, text and words: nothing is lost, nothing is made up, and the ids are those of the published models."""

import json
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st

from models.errors import ModelFilesError
from models.store import find_model, read_config
from models.tokenizer import SPACELESS_LANGUAGES, WhisperTokenizer, WordGroup, group_words

CORPUS = (
    "the speaker said hello, and then said it again: it's 3.5 percent.",
    "日本語のテスト、今日は良い天気ですね。",
    "今天天气很好,我们去公园吧!",
    "안녕하세요 오늘 날씨가 좋네요",
    "नमस्ते दुनिया, कैसे हो",
    "สวัสดีครับ น้ำใจงาม กำลังดี",
    "sunny 😀 day 👨‍👩‍👧 family 👍🏽",
)
SPECIALS = (
    *("endoftext", "startoftranscript", "en", "zh", "ja", "th", "yue", "translate", "transcribe"),
    *("startoflm", "startofprev", "nospeech", "notimestamps", "0.00", "0.02"),
)


def tokenizer_json(specials: tuple[str, ...] = SPECIALS) -> dict[str, Any]:
    """A small byte-level vocabulary whose merges cross character borders, as the published one's do."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(CORPUS, trainer)
    content: dict[str, Any] = json.loads(bpe.to_str())
    first = len(content["model"]["vocab"])
    content["added_tokens"] = [
        {"id": first + i, "content": f"<|{name}|>", "special": True, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for i, name in enumerate(specials)
    ]
    return content


@cache
def small() -> WhisperTokenizer:
    return WhisperTokenizer(tokenizer_json())


@pytest.fixture(
    params=["small", *(pytest.param(name, marks=pytest.mark.weights) for name in ("whisper-tiny.en", "whisper-base"))]
)
def tokenizer(request: pytest.FixtureRequest) -> WhisperTokenizer:
    return small() if request.param == "small" else published(request.param)


@cache
def published(name: str) -> WhisperTokenizer:
    return WhisperTokenizer.load(find_model(name).tokenizer)


texts = st.one_of(
    st.text(max_size=30),
    st.lists(st.sampled_from(CORPUS), max_size=2).map(" ".join),
    st.text(alphabet=st.sampled_from("日本今天안녕नमस्ते สวัสดี้ำ😀👨‍👩👍🏽 ,.!"), max_size=20),
)
languages = st.sampled_from(["en", "ko", "hi", None, *sorted(SPACELESS_LANGUAGES)])


@given(text=texts)
@example(text="<|endoftext|><|startoftranscript|><|0.00|>")
def test_any_text_is_encoded_to_text_tokens_and_back(text: str) -> None:
    ids = small().encode(text)
    assert all(0 <= i < small().eot for i in ids)
    assert small().decode(ids) == text


@given(text=texts, cut=st.integers(min_value=0, max_value=80), language=languages)
def test_words_of_any_cut_join_back_without_a_made_up_character(text: str, cut: int, language: str | None) -> None:
    ids = small().encode(text)[:cut]
    words = small().split_words(ids, language)
    assert "".join(word for word, _ in words) == small().decode(ids)
    assert [i for _, word_ids in words for i in word_ids] == ids
    assert text.startswith(small().decode(ids))
    assert all(word for word, _ in words[1:])


@given(ids=st.lists(st.integers(min_value=0, max_value=399), max_size=20), language=languages)
def test_tokens_in_any_order_keep_that_law(ids: list[int], language: str | None) -> None:
    ids = [i for i in ids if i < small().eot]
    words = small().split_words(ids, language)
    assert "".join(word for word, _ in words) == small().decode(ids)
    assert [i for _, word_ids in words for i in word_ids] == ids


@given(text=texts, language=st.sampled_from(sorted(SPACELESS_LANGUAGES)))
def test_words_settled_by_a_longer_stream_do_not_change(text: str, language: str) -> None:
    ids = small().encode(text)
    for cut in range(len(ids)):
        shorter, longer = small().split_words(ids[:cut], language), small().split_words(ids[: cut + 1], language)
        assert shorter[:-1] == longer[: max(0, len(shorter) - 1)]


def test_character_between_tokens_stays_together_and_a_written_replacement_stays() -> None:
    tokenizer = WhisperTokenizer(bytes_only())
    ids = tokenizer.encode("é\ufffd日")
    assert [len(word_ids) for _, word_ids in tokenizer.split_words(ids, "ja")] == [2, 3, 3]
    assert tokenizer.decode(ids) == "é\ufffd日"
    assert tokenizer.decode(ids[:-1]) == "é\ufffd"
    assert tokenizer.split_words(ids[:-1], "ja") == [("é", ids[:2]), ("\ufffd", ids[2:7])]
    assert tokenizer.split_words(ids[:1], "ja") == [("", ids[:1])]


def bytes_only() -> dict[str, Any]:
    content = tokenizer_json()
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    content["model"] |= {"vocab": {character: i for i, character in enumerate(alphabet)}, "merges": []}
    return content


def test_combining_signs_and_joined_emoji_are_not_cut_off() -> None:
    tokenizer = WhisperTokenizer(bytes_only())
    words = [word for word, _ in tokenizer.split_words(tokenizer.encode("น้ำ👨‍👩"), "th")]
    assert words == ["น้", "ำ", "👨‍👩"]


def test_special_tokens_are_no_text(tokenizer: WhisperTokenizer) -> None:
    ids = tokenizer.encode(" hello")
    marked = [tokenizer.sot, tokenizer.timestamp_begin, *ids, tokenizer.timestamp_begin + 7, tokenizer.eot]
    assert tokenizer.decode(marked) == " hello"
    with pytest.raises(ValueError, match=f"{tokenizer.eot} is no text token"):
        tokenizer.split_words([*ids, tokenizer.eot], "en")


def test_languages_are_read_from_the_file_in_its_order() -> None:
    assert small().languages == ("en", "zh", "ja", "th", "yue")
    assert small().language_ids["en"] == small().sot + 1
    assert small().is_multilingual
    assert small().timestamp_begin == small().notimestamps + 1


@pytest.mark.parametrize("name", ["endoftext", "startofprev", "nospeech"])
def test_file_without_a_special_token_is_refused(name: str) -> None:
    specials = tuple(special for special in SPECIALS if special != name)
    with pytest.raises(ModelFilesError, match=rf"x\.json has no token <\|{name}\|>"):
        WhisperTokenizer(tokenizer_json(specials), source="x.json")


def test_token_for_no_speech_has_an_older_name() -> None:
    older = tuple("nocaptions" if special == "nospeech" else special for special in SPECIALS)
    assert WhisperTokenizer(tokenizer_json(older)).nospeech == small().nospeech


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"added_tokens": [], "model": {"type": "BPE", "vocab": 3}}'])
def test_file_that_is_no_tokenizer_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text(content)
    with pytest.raises(ModelFilesError, match=r"tokenizer\.json"):
        WhisperTokenizer.load(path)


def groups(words: list[str], language: str = "en") -> Iterator[str]:
    return ("".join(words[group.start : group.stop]) for group in group_words(words, language))


@pytest.mark.parametrize(
    ("language", "words", "grouped"),
    [
        ("en", [' "', "Hello", ",", ' "', " he", '!"'], [' "Hello,', ' " he!"']),
        ("en", [" -", " Yes", ".", " -", " No", "."], [" - Yes.", " - No."]),
        ("en", [" U", ".S", ".", " is", " 3", ".5"], [" U.S.", " is", " 3.5"]),
        ("en", [" well", "-known"], [" well-known"]),
        ("ja", ["日", "本", "、", "東京", "。"], ["日", "本、", "東京。"]),
        ("zh", ["好", " ", "!"], ["好", " ", "!"]),
        ("en", [], []),
        ("en", ["."], ["."]),
    ],
)
def test_marks_join_the_word_they_belong_to(language: str, words: list[str], grouped: list[str]) -> None:
    assert list(groups(words, language)) == grouped


def test_time_of_a_group_is_that_of_its_spoken_part() -> None:
    assert group_words([' "', "3", ".5", '!"'], "en") == [WordGroup(0, 4, 1, 3)]
    assert group_words(["..."], "en") == [WordGroup(0, 1, 0, 1)]


@given(words=st.lists(st.text(alphabet=" a.,-'日、(", max_size=3), max_size=8), language=languages)
def test_groups_cover_the_words_in_order(words: list[str], language: str | None) -> None:
    found = group_words(words, language)
    assert [i for group in found for i in range(group.start, group.stop)] == list(range(len(words)))
    assert all(group.start <= group.spoken_start < group.spoken_stop <= group.stop for group in found)


# --- against what is published ---------------------------------------------------------------------------------------

PUBLISHED = {"whisper-tiny.en": (50256, 50361, 50363, ("en",)), "whisper-base": (50257, 50362, 50364, ("en", "zh"))}


@pytest.mark.weights
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_ids(name: str) -> None:
    eot, nospeech, timestamp_begin, first_languages = PUBLISHED[name]
    tokenizer = published(name)
    assert (tokenizer.eot, tokenizer.sot, tokenizer.nospeech) == (eot, eot + 1, nospeech)
    assert tokenizer.timestamp_begin == timestamp_begin
    assert tokenizer.languages[:2] == first_languages
    assert len(tokenizer.languages) == (99 if tokenizer.is_multilingual else 1)
    assert tokenizer.encode(" ") == [220]


@pytest.mark.weights
@pytest.mark.parametrize("name", PUBLISHED)
def test_suppressed_symbols_are_those_of_the_published_list(name: str) -> None:
    tokenizer = published(name)
    control = {tokenizer.sot, tokenizer.translate, tokenizer.transcribe, tokenizer.startoflm, tokenizer.startofprev}
    suppressed = read_config(find_model(name))["suppress_ids"]
    assert sorted({*tokenizer.non_speech_ids, *control, tokenizer.nospeech}) == sorted(suppressed)


@pytest.mark.weights
@settings(max_examples=30, deadline=None)
@given(text=texts, language=languages)
def test_published_vocabulary_keeps_the_laws_too(text: str, language: str | None) -> None:
    tokenizer = published("whisper-base")
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    for cut in range(len(ids) + 1):
        words = tokenizer.split_words(ids[:cut], language)
        assert "".join(word for word, _ in words) == tokenizer.decode(ids[:cut])
        assert [i for _, word_ids in words for i in word_ids] == ids[:cut]


@pytest.mark.weights
@pytest.mark.parametrize("language", ["en", "ja"])
@pytest.mark.parametrize("text", CORPUS[:4])
def test_words_are_those_of_transformers(text: str, language: str) -> None:
    whisper = pytest.importorskip("transformers.models.whisper.tokenization_whisper")
    reference = whisper.WhisperTokenizer.from_pretrained(find_model("whisper-base").folder)
    tokenizer = published("whisper-base")
    ids = tokenizer.encode(f" {text}")
    split = whisper._split_tokens_on_unicode if language == "ja" else whisper._split_tokens_on_spaces
    words, word_ids, _ = split(reference, ids)
    assert tokenizer.split_words(ids, language) == list(zip(words, word_ids, strict=True))
