"""The process that owns the models, as its workers see it: answers what they ask, batching over all of them.

Knows streams, whose samples it keeps as long as a chunk may need them, and which questions are carried out together.
Does not know sessions, or who its workers are. One thread runs it: the one that owns the device.
"""

import itertools
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

from gateway.engine_messages import (
    Answer,
    AskedChunk,
    Closed,
    CloseStream,
    Decode,
    Decoded,
    EngineAbout,
    Failed,
    Opened,
    OpenStream,
    encoded,
    question_of,
)
from streaming.engine import Chunk, EngineStream, SpeechEngine, UnsupportedOptionError
from streaming.window import RollingAudio
from vad.audio import AudioFrame, SpeechSpan

log = logging.getLogger("senseway")


@dataclass(slots=True, eq=False)
class _Hosted:
    """A worker's stream, and the samples of it that may be needed again."""

    engine: SpeechEngine
    stream: EngineStream
    audio: RollingAudio = field(default_factory=RollingAudio)

    def take(self, asked: AskedChunk) -> tuple[EngineStream, Chunk]:
        """The chunk that is asked for, whole."""
        if asked.samples_from != self.audio.end_sample:
            self.audio = RollingAudio(asked.samples_from)
        self.audio.append(AudioFrame(asked.samples_from, asked.new_samples))
        span = SpeechSpan(*asked.span)
        self.audio.drop_before(span.start_sample)
        return self.stream, asked.chunk(self.audio.samples(span))


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """Chunks that wait for their batch."""

    model: str
    chunks: list[tuple[EngineStream, Chunk]]
    number: int  # in the order of asking

    @property
    def urgency(self) -> tuple[bool, int]:
        """Finals go first, for somebody waits for them; then who has asked longest ago."""
        return not any(chunk.is_final for _, chunk in self.chunks), self.number


@dataclass(slots=True, eq=False)
class _Worker:
    """One worker's side. It asks one question at a time."""

    pipe: "Connection[bytes, bytes]"
    streams: dict[int, _Hosted] = field(default_factory=dict)
    asked: _Asked | None = None

    def answer(self, answer: Answer) -> None:
        """One that is gone needs no answer; that it is, the next look at its pipe tells."""
        self.asked = None
        try:
            self.pipe.send_bytes(encoded(answer))
        except OSError:
            log.debug("a worker was gone before its answer")


class EngineHost:
    """See the module's docstring."""

    def __init__(self, engines: Mapping[str, SpeechEngine]) -> None:
        """``engines``: name → engine, the default first."""
        self._engines = engines
        self._workers: list[_Worker] = []  # replaced, never changed: other threads add to it
        self._adding = threading.Lock()
        self._numbers = itertools.count()
        self._news, self._tell = Pipe(duplex=False)
        self._is_stopping = False

    @property
    def about(self) -> list[EngineAbout]:
        """What a worker is told at its start."""
        return [EngineAbout(engine.card, engine.backend, engine.why) for engine in self._engines.values()]

    def connect(self) -> "Connection[bytes, bytes]":
        """A new worker's end of its pipe. From any thread."""
        ours, theirs = Pipe()
        with self._adding:
            self._workers = [*self._workers, _Worker(ours)]
        self._tell.send_bytes(b"\0")
        return theirs

    def stop(self) -> None:
        """Have ``run`` end soon. From any thread."""
        self._is_stopping = True
        self._tell.send_bytes(b"\0")

    def run(self) -> None:
        """Answer until ``stop``; whatever ends it, workers find their pipes closed."""
        try:
            while not self._is_stopping:
                self._listen()
                if asking := self._next_batch():
                    self._decode(asking)
        finally:
            for worker in self._workers:
                self._drop(worker)

    def _listen(self) -> None:
        """Take every question that is there; wait for one if there is nothing else to do."""
        workers = {worker.pipe: worker for worker in self._workers}
        is_idle = all(worker.asked is None for worker in workers.values())
        for pipe in wait([*workers, self._news], timeout=None if is_idle else 0):
            if pipe is self._news:
                self._news.recv_bytes()
            elif isinstance(pipe, Connection):
                self._take(workers[pipe])

    def _take(self, worker: _Worker) -> None:
        try:
            question = question_of(worker.pipe.recv_bytes())
        except (EOFError, OSError):
            self._drop(worker)
            return
        try:
            match question:
                case Decode(model=model, chunks=chunks):
                    taken = [worker.streams[asked.stream_id].take(asked) for asked in chunks]
                    worker.asked = _Asked(model, taken, next(self._numbers))
                case OpenStream(stream_id=stream_id, model=model, options=options):
                    stream = self._engines[model].open(options)
                    worker.streams[stream_id] = _Hosted(self._engines[model], stream)
                    worker.answer(Opened(stream.warnings))
                case CloseStream(stream_id=stream_id):
                    hosted = worker.streams.pop(stream_id)
                    hosted.engine.close(hosted.stream)
                    worker.answer(Closed())
        except Exception as error:  # noqa: BLE001  # an engine may raise anything: its worker is told
            worker.answer(_failed(error))

    def _next_batch(self) -> list[_Worker]:
        """Whose questions are decoded together: of one model, as many chunks as it takes with profit. None is cut."""
        asking = [(worker.asked.urgency, worker, worker.asked) for worker in self._workers if worker.asked is not None]
        batch: list[_Worker] = []
        n_chunks, model = 0, ""
        for _, worker, asked in sorted(asking, key=lambda each: each[0]):
            if batch and (asked.model != model or n_chunks + len(asked.chunks) > self._engines[model].card.max_batch):
                continue
            batch.append(worker)
            n_chunks, model = n_chunks + len(asked.chunks), asked.model
        return batch

    def _decode(self, workers: Sequence[_Worker]) -> None:
        """Answer ``workers``; after a failure each alone, so that one's bad chunk costs no other theirs."""
        asked = [worker.asked for worker in workers if worker.asked is not None]
        engine = self._engines[asked[0].model]
        try:
            hypotheses = engine.decode([pair for each in asked for pair in each.chunks])
            if len(hypotheses) != sum(len(each.chunks) for each in asked):
                raise ValueError(f"{len(hypotheses)} answers of {engine.card.name} to more or fewer chunks")
        except Exception as error:
            if len(workers) > 1:
                for alone in workers:
                    self._decode([alone])
                return
            log.exception("a batch of %d decodes failed", len(asked[0].chunks))
            workers[0].answer(_failed(error))
            return
        answers = iter(hypotheses)
        for worker, each in zip(workers, asked, strict=True):
            own = tuple(itertools.islice(answers, len(each.chunks)))
            worker.answer(Decoded(own, engine.backend, engine.why))

    def _drop(self, worker: _Worker) -> None:
        """A worker is gone, and its streams with it."""
        with self._adding:
            self._workers = [other for other in self._workers if other is not worker]
        worker.pipe.close()
        for hosted in worker.streams.values():
            try:
                hosted.engine.close(hosted.stream)
            except Exception:
                log.exception("an engine stream could not be closed")


def _failed(error: Exception) -> Failed:
    if isinstance(error, UnsupportedOptionError):
        return Failed(True, str(error))
    return Failed(False, f"{type(error).__name__}: {error}")
