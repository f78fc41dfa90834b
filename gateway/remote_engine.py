"""An engine of another process as a ``SpeechEngine``: what a worker asks where the model's own process decodes.

Knows which samples of a stream the other side has already, so that each crosses once. Does not know what answers: an
``EngineHost``, or whoever speaks ``engine_messages``. Not thread-safe: a link belongs to one thread.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from gateway.engine_messages import (
    Answer,
    AskedChunk,
    CloseStream,
    Decode,
    Decoded,
    EngineAbout,
    Failed,
    Opened,
    OpenStream,
    Question,
    answer_of,
    encoded,
)
from streaming.engine import (
    Chunk,
    DecodeOptions,
    EngineStream,
    ModelCard,
    StreamWarning,
    UnsupportedOptionError,
)
from streaming.transcript import Hypothesis


class RemoteEngineError(Exception):
    """The engine's process could not do what was asked, or is gone; the message says what it says."""


@dataclass(slots=True, eq=False)
class RemoteStream:
    """One caller's stream. Samples ``sent_from..sent_until`` are on the other side."""

    options: DecodeOptions
    warnings: tuple[StreamWarning, ...]
    stream_id: int
    sent_from: int = 0
    sent_until: int = 0


class Link:
    """Questions and answers over one pipe."""

    def __init__(self, pipe: "Connection[bytes, bytes]") -> None:
        self._pipe = pipe
        self._stream_ids = itertools.count(1)

    def next_stream_id(self) -> int:
        """A number that no other stream of this link has."""
        return next(self._stream_ids)

    def ask(self, question: Question) -> Answer:
        """The answer, once it is there.

        Raises:
            UnsupportedOptionError: for an option that the model can't honour.
            RemoteEngineError: if the engine failed, or its process is gone.
        """
        try:
            self._pipe.send_bytes(encoded(question))
            answer = answer_of(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise RemoteEngineError("the engines' process is gone") from error
        if isinstance(answer, Failed):
            raise (UnsupportedOptionError if answer.is_unsupported else RemoteEngineError)(answer.reason)
        return answer


class RemoteEngine:
    """See the module's docstring. Fulfils ``streaming.engine.SpeechEngine``."""

    def __init__(self, about: EngineAbout, link: Link) -> None:
        """Engines may share a link."""
        self._about = about
        self._link = link

    @property
    def card(self) -> ModelCard:
        """What the model offers."""
        return self._about.card

    @property
    def backend(self) -> str:
        """What computed the last answer."""
        return self._about.backend

    @property
    def why(self) -> str:
        """Why that backend."""
        return self._about.why

    def open(self, options: DecodeOptions) -> RemoteStream:
        """Begin a stream. Raises as ``Link.ask``."""
        self.card.check(options)
        stream_id = self._link.next_stream_id()
        answer = self._link.ask(OpenStream(stream_id, self.card.name, options))
        assert isinstance(answer, Opened), "an answer to another question"
        return RemoteStream(options, answer.warnings, stream_id)

    def decode(self, batch: Sequence[tuple[EngineStream, Chunk]]) -> list[Hypothesis]:
        """One hypothesis for each pair, in order. Raises as ``Link.ask``."""
        asked = tuple(_asked(_own(stream), chunk) for stream, chunk in batch)
        answer = self._link.ask(Decode(self.card.name, asked))
        assert isinstance(answer, Decoded), "an answer to another question"
        self._about = EngineAbout(self.card, answer.backend, answer.why)
        return list(answer.hypotheses)

    def close(self, stream: EngineStream) -> None:
        """End a stream. Raises as ``Link.ask``."""
        self._link.ask(CloseStream(_own(stream).stream_id))


def remote_engines(about: Iterable[EngineAbout], pipe: "Connection[bytes, bytes]") -> Mapping[str, RemoteEngine]:
    """Name → engine, in the order given."""
    link = Link(pipe)
    return {each.card.name: RemoteEngine(each, link) for each in about}


def _own(stream: EngineStream) -> RemoteStream:
    if not isinstance(stream, RemoteStream):
        raise TypeError(f"a stream of another engine: {type(stream).__name__}")
    return stream


def _asked(stream: RemoteStream, chunk: Chunk) -> AskedChunk:
    """What has to cross: the samples behind those sent, or all of them where the other side has forgotten the first."""
    span = chunk.span
    if not stream.sent_from <= span.start_sample <= stream.sent_until:
        stream.sent_until = span.start_sample
    asked = AskedChunk.of(chunk, stream.stream_id, stream.sent_until)
    stream.sent_from, stream.sent_until = span.start_sample, max(stream.sent_until, span.end_sample)
    return asked
