"""Whisper's tokenizer: text ⇄ token ids, ids → words, and the ids that mean something other than text.

Knows the byte-pair vocabulary of a ``tokenizer.json`` and how Whisper marks languages, tasks and times. Does not know
the network, logits, or when a word was said. No protocol yet: there is one kind of tokenizer.
"""

import codecs
import json
import re
import string
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import tokenizers

from .errors import ModelFilesError

# Written without spaces between words, so that each character counts as a word (openai-whisper, ``tokenizer.py``).
SPACELESS_LANGUAGES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})

# Marks that are joined to the word behind or before them (openai-whisper, ``timing.py``).
PREPENDED_MARKS = frozenset("\"'“¿([{-")
APPENDED_MARKS = frozenset("\"'.。,，!！?？:：”)]}、")

_ENGLISH_EOT = 50256  # the English-only models have the GPT-2 vocabulary, one token shorter than the multilingual one
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_JOINER = "\u200d"  # zero width joiner: makes one emoji of two
_FIRST_TIMESTAMP = "<|0.00|>"

TokenWord = tuple[str, list[int]]  # a word's text with the white space before it, and its token ids


@dataclass(frozen=True, slots=True)
class WordGroup:
    """Words ``start`` to ``stop`` that read as one; of these ``spoken_start`` to ``spoken_stop`` are more than marks.

    Half-open indices. The time of the group is that of its spoken part, since the model places marks badly.
    """

    start: int
    stop: int
    spoken_start: int
    spoken_stop: int


class WhisperTokenizer:
    """The tokenizer of one checkpoint. Immutable; safe to share between threads."""

    def __init__(self, content: dict[str, Any], source: str = "tokenizer.json") -> None:
        """``content`` is a parsed ``tokenizer.json``; ``source`` names it in errors."""
        try:
            added = {str(token["content"]): int(token["id"]) for token in content["added_tokens"]}
            vocabulary: dict[str, int] = content["model"]["vocab"]
            # Without its added tokens, so that no text, whoever wrote it, can be encoded to a special token.
            self._bpe = tokenizers.Tokenizer.from_str(json.dumps(content | {"added_tokens": []}))
        except Exception as error:  # the library raises plain Exception for what it can't parse
            raise ModelFilesError(f"{source} is no byte-pair tokenizer: {error!r}") from error
        self._source = source
        self.eot = _id_of(added, source, "endoftext")
        self.sot = _id_of(added, source, "startoftranscript")
        self.translate = _id_of(added, source, "translate")
        self.transcribe = _id_of(added, source, "transcribe")
        self.startoflm = _id_of(added, source, "startoflm")
        self.startofprev = _id_of(added, source, "startofprev")
        self.nospeech = _id_of(added, source, "nospeech", "nocaptions")  # renamed between releases
        self.notimestamps = _id_of(added, source, "notimestamps")
        # English-only files end before the timestamps, which follow all the same.
        self.timestamp_begin = added.get(_FIRST_TIMESTAMP, self.notimestamps + 1)
        self.is_multilingual = self.eot != _ENGLISH_EOT
        self.language_ids = self._find_languages(added)
        self._bytes = _token_bytes(vocabulary, n_tokens=self.eot, source=source)

    @classmethod
    def load(cls, path: Path) -> "WhisperTokenizer":
        """Read a ``tokenizer.json``.

        Raises:
            ModelFilesError: if it can't be read or is not a Whisper's.
        """
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ModelFilesError(f"{path}: not readable: {error}") from error
        return cls(content, source=str(path))

    def _find_languages(self, added: dict[str, int]) -> dict[str, int]:
        """Language code → token id, in the order of the ids. English-only models have such tokens, never trained."""
        if not self.is_multilingual:
            return {}
        matches = ((_LANGUAGE.fullmatch(token), token_id) for token, token_id in added.items())
        languages = {match[1]: i for match, i in matches if match and self.sot < i < self.translate}
        return dict(sorted(languages.items(), key=lambda item: item[1]))

    @property
    def languages(self) -> tuple[str, ...]:
        """ISO 639-1 codes (and Whisper's few of three letters) that the model can write."""
        return tuple(self.language_ids) or ("en",)

    def encode(self, text: str) -> list[int]:
        """Text tokens of ``text``. What looks like a special token is encoded as the characters it is made of."""
        ids: list[int] = self._bpe.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the text tokens among ``ids``; special tokens and timestamps are passed over.

        Bytes that are no UTF-8 are left out, at the end (a character not yet complete) and elsewhere, so a
        replacement character in the text is one that the model wrote.
        """
        return b"".join(self._bytes[i] for i in ids if i < self.eot).decode("utf-8", errors="ignore")

    def split_words(self, ids: Sequence[int], language: str | None) -> list[TokenWord]:
        """Cut text tokens into words; the texts joined are ``decode(ids)``, the ids joined are ``ids``.

        A word begins with white space or with a punctuation mark; in ``SPACELESS_LANGUAGES`` every character that
        tokens do not share is one. Tokens that end inside a character stay with the word before them.

        Raises:
            ValueError: for an id that is no text token.
        """
        characters = self._split_characters(ids)
        return characters if language in SPACELESS_LANGUAGES else _join_at_spaces(characters)

    def _split_characters(self, ids: Sequence[int]) -> list[TokenWord]:
        """The smallest runs of tokens that end between two characters as a reader sees them."""
        decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
        runs: list[TokenWord] = []
        text, run = "", list[int]()
        for token_id in ids:
            if not 0 <= token_id < self.eot:
                raise ValueError(f"{token_id} is no text token; those are 0 to {self.eot - 1}")
            text += decoder.decode(self._bytes[token_id])
            run.append(token_id)
            is_between_characters = not decoder.getstate()[0]
            if is_between_characters and text:
                _append(runs, text, run)
                text, run = "", []
        if run:
            _extend_last(runs, text, run)
        return runs

    @cached_property
    def non_speech_ids(self) -> tuple[int, ...]:
        """Tokens of symbols that stand for no speech: brackets, notes, speaker dashes (ascending).

        openai-whisper's ``non_speech_tokens``: a symbol counts where one token spells it, with or without a space
        before it; of the musical signs the first token counts even where it takes several. Hyphen and apostrophe
        count only behind a space, since they also occur inside words.
        """
        found = {self.encode(" -")[0], self.encode(" '")[0]}
        for symbol in _SYMBOLS:
            for ids in (self.encode(symbol), self.encode(f" {symbol}")):
                if len(ids) == 1 or symbol in _MUSICAL_SIGNS:
                    found.add(ids[0])
        return tuple(sorted(found))


_MUSICAL_SIGNS = "♩♪♫♬♭♮♯"
_SYMBOLS = (
    *'"#()*+/:;<=>@[\\]^_`{|}~「」『』',
    *"<< >> <<< >>> -- --- -( -[ (' (\" (( )) ((( ))) [[ ]] {{ }} ♪♪ ♪♪♪".split(),
    *_MUSICAL_SIGNS,
)


def group_words(texts: Sequence[str], language: str | None) -> list[WordGroup]:
    """Which of the words of ``split_words`` read as one; the groups cover ``texts`` in order.

    An opening mark behind a space joins the word after it, a closing mark the word before it. Where words are written
    with spaces, whatever follows without one joins too: openai-whisper leaves ``U`` ``.S.`` and ``3`` ``.5`` apart.
    """
    is_spaced = language not in SPACELESS_LANGUAGES
    cuts = [i for i in range(1, len(texts)) if not _joins(texts[i - 1], texts[i], is_spaced=is_spaced)]
    bounds = [0, *cuts, len(texts)] if texts else [0]
    return [_group(texts, start, stop) for start, stop in pairwise(bounds)]


def _joins(previous: str, text: str, *, is_spaced: bool) -> bool:
    if previous.startswith(" ") and _is_made_of(previous.strip(), PREPENDED_MARKS):
        return True
    if is_spaced:
        return not text.startswith(" ")
    return _is_made_of(text, APPENDED_MARKS) and not previous.endswith(" ")


def _is_made_of(text: str, marks: frozenset[str]) -> bool:
    return bool(text) and marks.issuperset(text)


def _group(texts: Sequence[str], start: int, stop: int) -> WordGroup:
    spoken = [i for i in range(start, stop) if any(character.isalnum() for character in texts[i])]
    return WordGroup(start, stop, *((spoken[0], spoken[-1] + 1) if spoken else (start, stop)))


def _join_at_spaces(characters: list[TokenWord]) -> list[TokenWord]:
    words: list[TokenWord] = []
    for text, ids in characters:
        if text.startswith(" ") or text.strip() in string.punctuation or not words:
            words.append((text, ids))
        else:
            _extend_last(words, text, ids)
    return words


def _append(runs: list[TokenWord], text: str, ids: list[int]) -> None:
    """Add a run, or lengthen the last one if ``text`` goes on with the character that it ends with."""
    if runs and (unicodedata.category(text[0]).startswith("M") or _JOINER in (text[0], runs[-1][0][-1])):
        _extend_last(runs, text, ids)
    else:
        runs.append((text, ids))


def _extend_last(runs: list[TokenWord], text: str, ids: list[int]) -> None:
    last_text, last_ids = runs.pop() if runs else ("", [])
    runs.append((last_text + text, last_ids + ids))


def _id_of(added: dict[str, int], source: str, *names: str) -> int:
    for name in names:
        if (token_id := added.get(f"<|{name}|>")) is not None:
            return token_id
    raise ModelFilesError(f"{source} has no token <|{names[0]}|>: not a Whisper's tokenizer")


def _token_bytes(vocabulary: dict[str, int], *, n_tokens: int, source: str) -> list[bytes]:
    """The bytes of each text token. A vocabulary spells bytes as printable characters (GPT-2, ``encoder.py``)."""
    byte_of = {character: byte for byte, character in enumerate(_byte_characters())}
    table = [b""] * n_tokens
    for token, token_id in vocabulary.items():
        if token_id < n_tokens:
            try:
                table[token_id] = bytes(byte_of[character] for character in token)
            except KeyError as error:
                raise ModelFilesError(f"{source}: token {token!r} is not spelt in bytes") from error
    return table


def _byte_characters() -> list[str]:
    """For each byte the character that stands for it: itself where it is printable, else the next from U+0100 on."""
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    substitutes = iter(range(0x100, 0x200))
    return [chr(byte if byte in printable else next(substitutes)) for byte in range(256)]
