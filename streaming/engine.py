"""What streaming needs from a speech model: the interface that ``models`` fulfils.

An engine holds shared weights; a stream is one caller's state. Options that a model can't honour are refused when the
stream is opened, never ignored.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from streaming.capability import Capability
from streaming.transcript import Hypothesis, Word
from vad.audio import SpeechSpan


class Task(StrEnum):
    """What to write: the words as spoken, or their English translation."""

    TRANSCRIBE = "transcribe"
    TRANSLATE = "translate"


def _needs(capability: Capability) -> dict[str, Capability]:
    return {"capability": capability}


@dataclass(frozen=True, slots=True)
class DecodeOptions:
    """A caller's choices for one stream. A field that is not left at its default needs the capability of its tag."""

    language: str | None = field(default=None, metadata=_needs(Capability.LANGUAGE_CHOICE))  # ISO 639-1; None: detect
    task: Task = field(default=Task.TRANSCRIBE, metadata=_needs(Capability.TRANSLATION))
    vocabulary: tuple[str, ...] = field(default=(), metadata=_needs(Capability.VOCABULARY))
    context: str = field(default="", metadata=_needs(Capability.CONTEXT))  # text that came before the first word


@dataclass(frozen=True, slots=True)
class StreamWarning:
    """An option that is only half honoured. ``code`` is a warning of PROTOCOL.md, ``message`` says what is lost."""

    code: str
    message: str


class UnsupportedOptionError(Exception):
    """An option that this model can't honour; the message names the option, the model and what is accepted."""


@dataclass(frozen=True, slots=True)
class TransducerContext:
    """How a transducer wants its audio: the part decoded now, with audio on both sides that only informs it.

    All of them whole encoder frames; frames are counted from the start of an utterance. The delay of settled words is
    ``chunk_samples`` and ``right_samples`` together, once ``first_samples`` of the utterance were heard.
    """

    frame_samples: int  # audio of one encoder frame
    left_samples: int  # heard before the chunk, at most; at the start of an utterance there is less
    chunk_samples: int  # decoded at a time, unless the caller chooses otherwise
    right_samples: int  # heard behind the chunk
    min_chunk_samples: int  # what a caller may choose
    max_chunk_samples: int
    first_samples: int = 0  # of an utterance nothing is decoded for good before so much of it was heard, or its end

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for a length that is not whole frames, or a recommended chunk nobody may choose."""
        for item in fields(self):
            if getattr(self, item.name) % self.frame_samples:
                raise ValueError(f"{item.name} is {getattr(self, item.name)}, no multiple of {self.frame_samples}")
        if not 0 < self.min_chunk_samples <= self.chunk_samples <= self.max_chunk_samples:
            chosen = f"{self.min_chunk_samples}..{self.max_chunk_samples}"
            raise ValueError(f"chunk_samples is {self.chunk_samples}; it must lie in {chosen}")

    @property
    def longest_samples(self) -> int:
        """The longest chunk that a caller may choose, with both contexts, or what is heard before the first."""
        return max(self.left_samples + self.max_chunk_samples + self.right_samples, self.first_samples)


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What a model is and what it offers."""

    name: str
    languages: tuple[str, ...]  # ISO 639-1 codes
    max_window_samples: int  # the longest chunk one decode can take
    capabilities: frozenset[Capability]
    max_batch: int = 1  # the most chunks that one decode call takes with profit
    transducer: TransducerContext | None = None  # of a model that carries its state from chunk to chunk; None: of none

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for a transducer whose contexts and chunk do not fit its window."""
        if self.transducer is not None and self.transducer.longest_samples > self.max_window_samples:
            needed = self.transducer.longest_samples
            raise ValueError(f"max_window_samples is {self.max_window_samples}; contexts and chunk need {needed}")

    def _is_settled(self, language: str | None) -> bool:
        """Whether the language can be named: it can be chosen, or is the only one, so that nothing is asked for."""
        is_only = self.languages == (language,)
        return is_only or (Capability.LANGUAGE_CHOICE in self.capabilities and language in self.languages)

    def check(self, options: DecodeOptions) -> None:
        """Refuse what the model can't honour.

        Raises:
            UnsupportedOptionError: for an option without its capability, or a language the model does not know.
        """
        for option in fields(options):
            if getattr(options, option.name) == option.default:
                continue
            if option.name == "language" and self._is_settled(options.language):
                continue
            if option.metadata["capability"] not in self.capabilities:
                raise UnsupportedOptionError(
                    f"{self.name} does not offer {option.metadata['capability']} ({option.name})"
                )
            if option.name == "language":
                known = ", ".join(self.languages)
                raise UnsupportedOptionError(
                    f"{self.name} does not know language {options.language!r}; it knows {known}"
                )


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """The audio of one decode, with what is already settled about it.

    ``prefix`` are the committed words inside the span; the engine continues behind them. ``prompt`` is confident text
    from before the span. ``is_final``: no more audio may join this chunk, so take the care a final deserves.

    For transducers, ``left_context_samples`` and ``right_context_samples`` lie inside ``samples`` and inform the rest.
    What lies between them, the chunk region, begins where that of the last chunk ended; it is decoded with the carried
    state, and may be empty. The right context is decoded from a copy of the state: its words are tentative. Left
    context and chunk region are whole frames; only what ends the audio of an ``is_final`` chunk may be a broken one,
    and behind it the engine adds what the model needs to hear so as not to lose the last word. ``is_first``: nothing
    is carried over, the state begins anew. An engine that raises leaves the state of every stream as it was; the same
    audio then comes again, as part of a longer chunk region.
    """

    span: SpeechSpan
    samples: NDArray[np.float32]  # [span.n_samples], not to be written to
    is_final: bool
    prompt: str = ""
    prefix: tuple[Word, ...] = ()
    left_context_samples: int = 0
    right_context_samples: int = 0
    is_first: bool = False


class EngineStream(Protocol):
    """One caller's state inside an engine. Opaque to everyone else."""

    @property
    def options(self) -> DecodeOptions:
        """The options the stream was opened with."""

    @property
    def warnings(self) -> tuple[StreamWarning, ...]:
        """What is only half honoured: vocabulary that did not fit, say."""


class SpeechEngine(Protocol):
    """A speech model that decodes chunks. Every method is called from the one thread that owns the device."""

    @property
    def card(self) -> ModelCard:
        """What the model offers."""

    @property
    def backend(self) -> str:
        """What computes: ``torch-cpu`` say."""

    @property
    def why(self) -> str:
        """Why that backend and no faster one, in words for ``doctor`` and ``/health``."""

    def open(self, options: DecodeOptions) -> EngineStream:
        """Begin a stream. Raises ``UnsupportedOptionError``."""

    def decode(self, batch: Sequence[tuple[EngineStream, Chunk]]) -> list[Hypothesis]:
        """One hypothesis for each pair, in order. Word times are samples on the session's axis."""

    def close(self, stream: EngineStream) -> None:
        """Free what the stream holds. Called once for each stream."""
