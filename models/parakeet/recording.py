"""Recordings of any length for a model that hears so much at a time: which chunks they are cut into, and their parts.

Knows positions and words. Does not know the network, or who asks.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streaming.engine import Chunk
from streaming.transcript import Word
from vad.audio import SpeechSpan

from .config import FRAME_SAMPLES

# NeMo's script for long files hears 10 s on the left, decodes 10 s and hears 5 s on the right; longer chunks cost less.
LEFT_SAMPLES = 125 * FRAME_SAMPLES
CHUNK_SAMPLES = 250 * FRAME_SAMPLES
RIGHT_SAMPLES = 63 * FRAME_SAMPLES

MAX_PART_SAMPLES = 188 * FRAME_SAMPLES  # 15 s; a part of a text without full stops is cut at a word
_SENTENCE_ENDS = (".", "?", "!", "…")


@dataclass(frozen=True, slots=True)
class TranscribedPart:
    """A sentence of a recording; times are samples since its start. The model does not say in which language."""

    span: SpeechSpan
    words: tuple[Word, ...]
    language: str | None


def recording_chunks(samples: NDArray[np.float32]) -> Iterator[Chunk]:
    """``samples`` [n_samples] in chunks with contexts, in order, the last one final."""
    n_samples, begin = len(samples), 0
    while begin < n_samples:
        # What the last chunk would have for a right context is decoded with it.
        is_final = n_samples - begin <= CHUNK_SAMPLES + RIGHT_SAMPLES
        end = n_samples if is_final else begin + CHUNK_SAMPLES
        left, right = min(begin, LEFT_SAMPLES), 0 if is_final else RIGHT_SAMPLES
        span = SpeechSpan(begin - left, end + right)
        yield Chunk(
            span,
            samples[span.start_sample : span.end_sample],
            is_final=is_final,
            left_context_samples=left,
            right_context_samples=right,
            is_first=begin == 0,
        )
        begin = end


def parts_of(words: Iterable[Word], language: str | None) -> Iterator[TranscribedPart]:
    """Words in sentences, each yielded as soon as it ends."""
    sentence: list[Word] = []
    for word in words:
        if sentence and _length_samples([*sentence, word]) > MAX_PART_SAMPLES:
            yield _part(sentence, language)
            sentence = []
        sentence.append(word)
        if word.text.endswith(_SENTENCE_ENDS):
            yield _part(sentence, language)
            sentence = []
    if sentence:
        yield _part(sentence, language)


def _part(words: list[Word], language: str | None) -> TranscribedPart:
    return TranscribedPart(_span(words), tuple(words), language)


def _length_samples(words: list[Word]) -> int:
    return _span(words).n_samples


def _span(words: list[Word]) -> SpeechSpan:
    start, end = words[0].start_sample, words[-1].end_sample
    assert start is not None and end is not None, "a transducer's words have times"
    return SpeechSpan(start, end)
