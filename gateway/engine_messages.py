"""What a worker's process and the engines' say to each other: one question at a time, and its answer. Pure.

Knows fields and their bytes (MessagePack over a pipe that nobody else can reach). Does not know processes, or when what
is asked.
"""

from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from streaming.engine import Chunk, DecodeOptions, ModelCard, StreamWarning
from streaming.transcript import Hypothesis, Word
from vad.audio import SpeechSpan


@dataclass(frozen=True, slots=True)
class EngineAbout:
    """What a worker is told of an engine at its start."""

    card: ModelCard
    backend: str
    why: str


class OpenStream(msgspec.Struct, tag="open"):
    """Begin a stream, under a number of the worker's choice."""

    stream_id: int
    model: str
    options: DecodeOptions


class CloseStream(msgspec.Struct, tag="close"):
    """Free a stream."""

    stream_id: int


class AskedChunk(msgspec.Struct, array_like=True):
    """A ``Chunk``, of whose samples those are left out that the stream's earlier chunks brought."""

    stream_id: int
    span: tuple[int, int]
    samples_from: int  # position of the first sample that is given, behind the span if there is none
    samples: bytes  # float32
    is_final: bool
    prompt: str
    prefix: tuple[Word, ...]
    left_context_samples: int
    right_context_samples: int
    is_first: bool

    @classmethod
    def of(cls, chunk: Chunk, stream_id: int, samples_from: int) -> "AskedChunk":
        """``chunk`` with its samples from ``samples_from`` on."""
        return cls(
            stream_id,
            (chunk.span.start_sample, chunk.span.end_sample),
            samples_from,
            chunk.samples[samples_from - chunk.span.start_sample :].tobytes(),
            chunk.is_final,
            chunk.prompt,
            chunk.prefix,
            chunk.left_context_samples,
            chunk.right_context_samples,
            chunk.is_first,
        )

    @property
    def new_samples(self) -> NDArray[np.float32]:  # [n]
        """Those that are given."""
        return np.frombuffer(self.samples, np.float32)

    def chunk(self, samples: NDArray[np.float32]) -> Chunk:
        """The chunk, whose samples are ``samples`` [span]."""
        return Chunk(
            span=SpeechSpan(*self.span),
            samples=samples,
            is_final=self.is_final,
            prompt=self.prompt,
            prefix=self.prefix,
            left_context_samples=self.left_context_samples,
            right_context_samples=self.right_context_samples,
            is_first=self.is_first,
        )


class Decode(msgspec.Struct, tag="decode"):
    """Decode chunks of streams of ``model``, the most urgent first."""

    model: str
    chunks: tuple[AskedChunk, ...]


class Opened(msgspec.Struct, tag="opened"):
    """A stream is open."""

    warnings: tuple[StreamWarning, ...]


class Closed(msgspec.Struct, tag="closed"):
    """A stream is closed."""


class Decoded(msgspec.Struct, tag="decoded"):
    """One hypothesis for each chunk, and what computes now."""

    hypotheses: tuple[Hypothesis, ...]
    backend: str
    why: str


class Failed(msgspec.Struct, tag="failed"):
    """What was asked could not be done."""

    is_unsupported: bool  # an option that the model can't honour
    reason: str


Question = OpenStream | CloseStream | Decode
Answer = Opened | Closed | Decoded | Failed

_encoder = msgspec.msgpack.Encoder()
_questions = msgspec.msgpack.Decoder(Question)
_answers = msgspec.msgpack.Decoder(Answer)


def encoded(message: Question | Answer) -> bytes:
    """The bytes of a message."""
    return _encoder.encode(message)


def question_of(data: bytes) -> Question:
    """The question that ``data`` holds."""
    return _questions.decode(data)


def answer_of(data: bytes) -> Answer:
    """The answer that ``data`` holds."""
    return _answers.decode(data)
