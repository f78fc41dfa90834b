"""A speech engine that recites: what a chunk says is looked up in a script by the chunk's place on the time axis.

For tests, demos and load, where it needs no weights and always says the same. Knows word times only; never looks at the
samples. Behaves as a real engine does at the edge of a chunk, and fails when told to.
"""

import random
from bisect import bisect_right
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from streaming.capability import Capability
from streaming.engine import Chunk, DecodeOptions, EngineStream, ModelCard, StreamWarning
from streaming.transcript import Hypothesis, Word
from vad.audio import SAMPLE_RATE_HZ, samples_from_ms

MAX_WINDOW_SAMPLES = 30 * SAMPLE_RATE_HZ

WORD_SAMPLES = samples_from_ms(280)
GAP_SAMPLES = samples_from_ms(80)  # with WORD_SAMPLES 167 words a minute, a brisk reader
_MARKS = frozenset(".,;:!?")


class ScriptedFailureError(Exception):
    """The failure that was asked for."""


@dataclass(frozen=True, slots=True, eq=False)
class ScriptedStream:
    """One caller's state: nothing but the options."""

    options: DecodeOptions
    warnings: tuple[StreamWarning, ...] = ()


def recite(
    text: str,
    *,
    start_sample: int = 0,
    word_samples: int = WORD_SAMPLES,
    gap_samples: int = GAP_SAMPLES,
    confidence: float | None = None,
) -> tuple[Word, ...]:
    """A script: the words of ``text`` at a steady pace, the first of them from ``start_sample`` on."""
    starts = (start_sample + i * (word_samples + gap_samples) for i in range(len(text.split())))
    return tuple(
        Word(f" {word}", start, start + word_samples, confidence)
        for word, start in zip(text.split(), starts, strict=True)
    )


class Reciting:
    """What engines that recite share: a card, the streams that are open, and failures when they are asked for."""

    def __init__(self, card: ModelCard, failing_decodes: AbstractSet[int]) -> None:
        self._card = card
        self._failing_decodes = failing_decodes
        self._open: set[EngineStream] = set()
        self.n_decodes = 0  # calls of ``decode`` so far

    @property
    def card(self) -> ModelCard:
        """What the script lets the engine offer."""
        return self._card

    @property
    def backend(self) -> str:
        """What computes."""
        return "script"

    @property
    def why(self) -> str:
        """Why nothing faster."""
        return "it recites: there is nothing to compute"

    @property
    def n_open_streams(self) -> int:
        """Streams opened and not yet closed."""
        return len(self._open)

    def close(self, stream: EngineStream) -> None:
        """End a stream. Raises ``ValueError`` if it is not open."""
        self._require_open(stream)
        self._open.remove(stream)

    def _require_open(self, stream: EngineStream) -> None:
        if stream not in self._open:
            raise ValueError("the stream is not open: closed already, or another engine's")

    def _count_decode(self) -> None:
        self.n_decodes += 1
        if self.n_decodes in self._failing_decodes:
            raise ScriptedFailureError(f"decode {self.n_decodes} fails, as asked")


class ScriptedEngine(Reciting):
    """Recites ``script``, whose words have times on the session's axis, in order and without overlap.

    ``flicker`` is the probability, 0 to 1, that a word cut off by the end of a chunk is misheard there instead of left
    out; it depends on ``seed``, the word and the cut alone, so that the same chunk is always heard the same. Words cut
    off by a final chunk are left out. ``failing_decodes`` are the calls of ``decode``, counted from 1, that raise.
    """

    def __init__(
        self,
        script: Sequence[Word],
        *,
        name: str = "scripted",
        language: str = "en",
        flicker: float = 0.0,
        seed: int = 0,
        failing_decodes: AbstractSet[int] = frozenset(),
        max_batch: int = 64,
    ) -> None:
        """Raises ``ValueError`` for a script without times or out of order."""
        self._script = tuple(script)
        self._times = _times(self._script)
        self._ends = [end for _, end in self._times]
        self._language = language
        self._flicker = flicker
        self._seed = seed
        card = ModelCard(name, (language,), MAX_WINDOW_SAMPLES, _capabilities(self._script), max_batch)
        super().__init__(card, failing_decodes)

    def open(self, options: DecodeOptions) -> EngineStream:
        """Begin a stream. Raises ``UnsupportedOptionError``."""
        self._card.check(options)
        stream = ScriptedStream(options)
        self._open.add(stream)
        return stream

    def decode(self, batch: Sequence[tuple[EngineStream, Chunk]]) -> list[Hypothesis]:
        """The words of the script inside each chunk, behind its prefix.

        Raises:
            ScriptedFailureError: on the calls in ``failing_decodes``.
            ValueError: for a stream that is not open, or a chunk that is too long or whose samples are not its span's.
        """
        self._count_decode()
        return [self._decode_one(stream, chunk) for stream, chunk in batch]

    def _decode_one(self, stream: EngineStream, chunk: Chunk) -> Hypothesis:
        self._require_open(stream)
        if len(chunk.samples) != chunk.span.n_samples:
            raise ValueError(f"{len(chunk.samples)} samples for a span of {chunk.span.n_samples}")
        if chunk.span.n_samples > MAX_WINDOW_SAMPLES:
            raise ValueError(f"a chunk of {chunk.span.n_samples} samples; at most {MAX_WINDOW_SAMPLES} are taken")
        first = self._first_index(chunk)
        stop = bisect_right(self._ends, chunk.span.end_sample)
        words = self._script[first:stop] + self._at_the_edge(max(first, stop), chunk)
        return Hypothesis(words, self._language, quality=None)

    def _first_index(self, chunk: Chunk) -> int:
        """The first word that ends inside the span and is not part of the prefix."""
        first = bisect_right(self._ends, chunk.span.start_sample)
        if not chunk.prefix:
            return first
        prefix_end = chunk.prefix[-1].end_sample
        if prefix_end is None:
            return first + len(chunk.prefix)
        # By start: a word committed while it was cut off ends earlier than in the script, but begins at the same place.
        return next((i for i in range(first, len(self._times)) if self._times[i][0] >= prefix_end), len(self._times))

    def _at_the_edge(self, index: int, chunk: Chunk) -> tuple[Word, ...]:
        """The word cut off by the end of the chunk, misheard, or nothing."""
        cut = chunk.span.end_sample
        if chunk.is_final or index >= len(self._script) or self._times[index][0] >= cut:
            return ()
        if random.Random(f"{self._seed}/{index}/{cut}").random() >= self._flicker:
            return ()
        word, (start, end) = self._script[index], self._times[index]
        return (Word(_misheard(word.text, (cut - start) / (end - start)), start, cut, word.confidence),)


def _misheard(text: str, heard: float) -> str:
    """The beginning of a word of which the part ``heard`` (0 to 1) was said; never the word itself."""
    n_kept = max(1, int(len(text.strip()) * heard))
    beginning = text.strip()[:n_kept]
    return f" {beginning}-" if beginning != text.strip() else f" {beginning}h"


def _times(script: Sequence[Word]) -> list[tuple[int, int]]:
    times: list[tuple[int, int]] = []
    for word in script:
        if word.start_sample is None or word.end_sample is None:
            raise ValueError(f"a script needs the times of every word; {word.text!r} has none")
        if word.start_sample >= word.end_sample or (times and word.start_sample < times[-1][1]):
            raise ValueError(f"{word.text!r} at {word.start_sample} to {word.end_sample} is out of order")
        times.append((word.start_sample, word.end_sample))
    return times


def _capabilities(script: Sequence[Word]) -> frozenset[Capability]:
    found = {Capability.WORD_TIMES}
    if all(word.confidence is not None for word in script):
        found.add(Capability.CONFIDENCE)
    if any(mark in word.text for word in script for mark in _MARKS):
        found.add(Capability.PUNCTUATION)
    return frozenset(found)
