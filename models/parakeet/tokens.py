"""A Parakeet's pieces of text, and how tokens with times become words.

Knows SentencePiece's mark of a word's begin, where pieces are written down (``tokenizer.json``, or a SentencePiece
model), and which of them are no text. Does not know the network, nor which words are settled.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from streaming.transcript import Word

from ..errors import ModelFilesError
from .config import FRAME_SAMPLES

_WORD_BEGIN = "\u2581"  # SentencePiece's, for a space
_TAG = re.compile(r"<.+>")  # languages, speakers, emotions, <unk>, <pad>: never text
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")

# Marks that take the time of the token before them, and of these, marks that end a word even behind a space; NeMo's set
# (https://github.com/NVIDIA-NeMo/NeMo, ``rnnt_decoding.py``), where all do.
MARKS = frozenset("?'¡¿-:,%/.!;…")
CLOSING_MARKS = frozenset("?:,%.!;…")


@dataclass(frozen=True, slots=True)
class Pieces:
    """What each token is written as: a leading space begins a word, ``None`` is no text. The blank is the latter."""

    texts: tuple[str | None, ...]  # by token id
    # What follows from each, known beforehand: it is asked for every token that is heard.
    begin_words: tuple[bool, ...] = field(init=False, repr=False, compare=False)
    are_marks: tuple[bool, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Look at every text."""
        object.__setattr__(self, "begin_words", tuple(_begins_word(text or "") for text in self.texts))
        object.__setattr__(self, "are_marks", tuple(_is_made_of(text or "", MARKS) for text in self.texts))

    @staticmethod
    def of(pieces: Mapping[int, str], *, n_tokens: int, blank_id: int, source: str) -> "Pieces":
        """From pieces as SentencePiece spells them, by id; of ``n_tokens`` only the blank may have none.

        Raises:
            ModelFilesError: if there are fewer, or pieces that stand for single bytes. ``source`` names them.
        """
        missing = [token_id for token_id in range(n_tokens) if token_id not in pieces and token_id != blank_id]
        if missing:
            raise ModelFilesError(
                f"{source} has no piece for {len(missing)} of the network's {n_tokens} tokens, first {missing[0]}"
            )
        if found := next((piece for piece in pieces.values() if _BYTE.fullmatch(piece)), None):
            raise ModelFilesError(f"{source} spells text in bytes ({found}), which no Parakeet does")
        return Pieces(tuple(None if i == blank_id else _text(pieces[i]) for i in range(n_tokens)))

    @property
    def has_punctuation(self) -> bool:
        """Whether a full stop and a comma can be written."""
        return {".", ","} <= {text.strip() for text in self.texts if text}


def _text(piece: str) -> str | None:
    return None if _TAG.fullmatch(piece) else piece.replace(_WORD_BEGIN, " ")


def read_tokenizer_json(path: Path) -> dict[int, str]:
    """The pieces of a ``tokenizer.json``, added tokens among them.

    Raises:
        ModelFilesError: if it can't be read.
    """
    try:
        vocabulary = tokenizers.Tokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    except Exception as error:  # the library raises plain Exception for what it can't parse
        raise ModelFilesError(f"{path} is no readable tokenizer: {error}") from error
    return {token_id: piece for piece, token_id in vocabulary.items()}


# --- SentencePiece ---------------------------------------------------------------------------------------------------


def _sentencepiece_message() -> Any:
    """The class of a model's message, as far as it is read: field 1 repeats pieces, whose field 1 is the text.

    (``sentencepiece_model.proto``.) The protobuf library is here for onnxruntime, while SentencePiece itself would be
    one more compiled package, for a list of strings.
    """
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="sentencepiece.proto", package="sentencepiece", syntax="proto2")
    model = file.message_type.add(name="ModelProto")
    piece = model.nested_type.add(name="SentencePiece")
    piece.field.add(name="piece", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    model.field.add(
        name="pieces",
        number=1,
        type=field.TYPE_MESSAGE,
        type_name=".sentencepiece.ModelProto.SentencePiece",
        label=field.LABEL_REPEATED,
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("sentencepiece.ModelProto"))


SentencePieceModel = _sentencepiece_message()


def read_sentencepiece(model: bytes, *, source: str) -> dict[int, str]:
    """The pieces of a SentencePiece model.

    Raises:
        ModelFilesError: if these are no such bytes.
    """
    try:
        pieces = [entry.piece for entry in SentencePieceModel.FromString(model).pieces]
    except DecodeError as error:
        raise ModelFilesError(f"{source} is no SentencePiece model: {error}") from error
    if not pieces:
        raise ModelFilesError(f"{source} is a SentencePiece model without pieces")
    return dict(enumerate(pieces))


# --- words -----------------------------------------------------------------------------------------------------------


class TimedToken(NamedTuple):  # which takes a third of a frozen dataclass's time to make
    """A token on the session's axis; it ends where its duration does."""

    token_id: int
    start_sample: int
    end_sample: int
    logprob: float


def split_words(tokens: Sequence[TimedToken], pieces: Pieces) -> list[list[TimedToken]]:
    """The tokens of each word, in order; those that are no text are left out."""
    words: list[list[TimedToken]] = []
    for token in tokens:
        if pieces.texts[token.token_id] is None:
            continue
        if not words or pieces.begin_words[token.token_id]:
            words.append([])
        words[-1].append(token)
    return words


def words_of(groups: Sequence[Sequence[TimedToken]], pieces: Pieces, *, ends_at: int | None = None) -> tuple[Word, ...]:
    """Each group as one word. Its time is that of its letters, for marks are placed anywhere behind them.

    The last token of a word may have no duration; it is given a frame, unless the next word begins before. No time lies
    behind ``ends_at``.
    """
    words = []
    for index, group in enumerate(groups):
        text = "".join([pieces.texts[token.token_id] or "" for token in group])
        if not text.strip():
            continue
        letters = [token for token in group if not pieces.are_marks[token.token_id]] or group
        start, end = letters[0].start_sample, letters[-1].end_sample
        if end == start:
            end = min([start + FRAME_SAMPLES, *(following[0].start_sample for following in groups[index + 1 :][:1])])
        if ends_at is not None:
            start, end = min(start, ends_at), min(end, ends_at)
        words.append(Word(text, start, end, sum([exp(token.logprob) for token in group]) / len(group)))
    return tuple(words)


def n_words_of(groups: Sequence[Sequence[TimedToken]], pieces: Pieces) -> int:
    """How many words ``words_of`` makes of them."""
    return sum(any((pieces.texts[token.token_id] or "").strip() for token in group) for group in groups)


def _begins_word(text: str) -> bool:
    return text.startswith(" ") and not _is_made_of(text, CLOSING_MARKS)


def _is_made_of(text: str, marks: frozenset[str]) -> bool:
    stripped = text.strip()
    return bool(stripped) and marks.issuperset(stripped)
