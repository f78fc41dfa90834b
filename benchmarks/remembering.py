"""An engine, a detector and a model of turns that compute nothing twice, so that many ways to one text cost as one.

Know the interfaces of all three, and that a stream's ``repr`` shows all of its state, as Whisper's does. Do not know
what is compared. Memory grows with every new question until ``forget``.
"""

import copy
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from streaming.capability import Capability
from streaming.engine import Chunk, DecodeOptions, EngineStream, ModelCard, SpeechEngine, StreamWarning
from streaming.transcript import Hypothesis, Quality, Word
from vad.audio import SAMPLE_RATE_HZ, samples_from_ms
from vad.detector import DetectorState, SpeechDetector
from vad.turn import TurnDetector

SPELT_SAMPLES = samples_from_ms(400)


@dataclass(slots=True, eq=False)
class _Stream:
    """A stream of the engine behind; another one, in the state that it would be in, once an answer was remembered."""

    behind: EngineStream

    @property
    def options(self) -> DecodeOptions:
        return self.behind.options

    @property
    def warnings(self) -> tuple[StreamWarning, ...]:
        return self.behind.warnings


class RememberingEngine:
    """A ``SpeechEngine`` that decodes a chunk, in a given state of its stream, once."""

    def __init__(self, engine: SpeechEngine) -> None:
        self.n_decoded = 0
        self.n_remembered = 0
        self._engine = engine
        self._answers: dict[bytes, tuple[Hypothesis, EngineStream]] = {}  # with the state behind it

    def forget(self) -> None:
        """Free the memory."""
        self._answers.clear()

    @property
    def card(self) -> ModelCard:
        """What the engine behind offers."""
        return self._engine.card

    @property
    def backend(self) -> str:
        """What the engine behind computes on."""
        return self._engine.backend

    @property
    def why(self) -> str:
        """Why on that."""
        return self._engine.why

    def open(self, options: DecodeOptions) -> EngineStream:
        """Begin a stream. Raises ``UnsupportedOptionError``."""
        return _Stream(self._engine.open(options))

    def close(self, stream: EngineStream) -> None:
        """End a stream."""
        assert isinstance(stream, _Stream)
        self._engine.close(stream.behind)

    def decode(self, batch: Sequence[tuple[EngineStream, Chunk]]) -> list[Hypothesis]:
        """One hypothesis for each pair, computed or remembered."""
        return [self._decode_one(stream, chunk) for stream, chunk in batch]

    def _decode_one(self, stream: EngineStream, chunk: Chunk) -> Hypothesis:
        assert isinstance(stream, _Stream)
        question = _digest(repr((stream.behind, chunk)), chunk.samples)
        if question in self._answers:
            self.n_remembered += 1
            hypothesis, behind = self._answers[question]
            stream.behind = copy.deepcopy(behind)
            return hypothesis
        self.n_decoded += 1
        [hypothesis] = self._engine.decode([(stream.behind, chunk)])
        self._answers[question] = hypothesis, copy.deepcopy(stream.behind)
        return hypothesis


class SpellingEngine:
    """Spells what it hears: a word for each stretch of audio, made from its very samples and from nothing else.

    Costs next to nothing, and whatever differs in what it is asked, samples, spans, prefixes or prompts, shows in its
    text. Some of its words end a sentence.
    """

    card = ModelCard("spelling", ("en",), 30 * SAMPLE_RATE_HZ, frozenset(Capability) - {Capability.LANGUAGE_ID})
    backend = why = "hashes"

    def open(self, options: DecodeOptions) -> EngineStream:
        """Begin a stream."""
        return _Speller(options)

    def close(self, stream: EngineStream) -> None:
        """Nothing to free."""

    def decode(self, batch: Sequence[tuple[EngineStream, Chunk]]) -> list[Hypothesis]:
        """The words of each chunk behind its prefix; those that its end cuts are left out."""
        return [self._spell(stream.options, chunk) for stream, chunk in batch]

    def _spell(self, options: DecodeOptions, chunk: Chunk) -> Hypothesis:
        said = [word.end_sample for word in chunk.prefix if word.end_sample is not None]
        begin = max([chunk.span.start_sample, *said])
        words = []
        for start in range(-(-begin // SPELT_SAMPLES) * SPELT_SAMPLES, chunk.span.end_sample, SPELT_SAMPLES):
            heard = chunk.samples[start - chunk.span.start_sample :][:SPELT_SAMPLES]
            if len(heard) == SPELT_SAMPLES:
                spelt = _digest(f"{options}{chunk.prompt}{start}", heard)
                mark = "." if spelt[0] % 6 == 0 else ""
                words.append(Word(f" {spelt.hex()[:6]}{mark}", start, start + SPELT_SAMPLES, 0.9))
        return Hypothesis(tuple(words), None, Quality(-0.2, 0.01, 1.2, 0.0))


@dataclass(frozen=True, slots=True)
class _Speller:
    options: DecodeOptions
    warnings: tuple[StreamWarning, ...] = ()


class TossingJudge:
    """A ``TurnDetector`` that goes by the samples' hash: any probability, always the same for the same pause."""

    name = "tossing"

    def probability(self, samples: NDArray[np.float32]) -> float:
        """See ``TurnDetector``."""
        return _digest("", samples)[0] / 255


class RememberingDetector:
    """A ``SpeechDetector`` that scores a run of windows, from a given state, once."""

    def __init__(self, detector: SpeechDetector) -> None:
        self._detector = detector
        self._answers: dict[bytes, tuple[NDArray[np.float32], DetectorState]] = {}

    def forget(self) -> None:
        """Free the memory."""
        self._answers.clear()

    def initial_state(self) -> DetectorState:
        """The state before the first window."""
        return self._detector.initial_state()

    def score(
        self, batch: Sequence[tuple[DetectorState, NDArray[np.float32]]]
    ) -> list[tuple[NDArray[np.float32], DetectorState]]:
        """Probabilities and state of each pair, computed or remembered."""
        return [self._score_one(state, windows) for state, windows in batch]

    def _score_one(
        self, state: DetectorState, windows: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], DetectorState]:
        question = _digest("", state.memory, windows)
        if question not in self._answers:
            [self._answers[question]] = self._detector.score([(state, windows)])
        return self._answers[question]


class RememberingJudge:
    """A ``TurnDetector`` that judges a pause once, and keeps what that costs."""

    def __init__(self, detector: TurnDetector) -> None:
        self.name = detector.name
        self.costs_ms: list[float] = []  # of one core, for each pause that was not remembered
        self._detector = detector
        self._answers: dict[bytes, float] = {}

    def forget(self) -> None:
        """Free the memory."""
        self._answers.clear()

    def probability(self, samples: NDArray[np.float32]) -> float:
        """See ``TurnDetector``."""
        question = _digest("", samples)
        if question not in self._answers:
            began_s = time.process_time()
            self._answers[question] = self._detector.probability(samples)
            self.costs_ms.append((time.process_time() - began_s) * 1_000)
        return self._answers[question]


def _digest(text: str, *arrays: NDArray[np.float32]) -> bytes:
    digest = hashlib.sha256(text.encode())
    for array in arrays:
        digest.update(np.ascontiguousarray(array))
    return digest.digest()
