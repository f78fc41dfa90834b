"""Engines in another process: a worker's answers are those of the engine itself, and each sample crosses once."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.engine_host import EngineHost, _Hosted
from gateway.engine_messages import AskedChunk, Decode, Decoded, Failed, answer_of, encoded, question_of
from gateway.messages import Bye, Error
from gateway.remote_engine import RemoteEngine, RemoteEngineError, RemoteStream, _asked, remote_engines
from models.scripted import Reciting, ScriptedEngine, recite
from models.scripted_transducer import ScriptedToken, ScriptedTransducer
from streaming.engine import Chunk, DecodeOptions, EngineStream, UnsupportedOptionError
from streaming.transcript import Hypothesis, Quality, Word
from tests.serving import DEADLINE_S
from vad.audio import SAMPLE_RATE_HZ, SpeechSpan

AUDIO = np.arange(100_000, dtype=np.float32)


def chunk_of(start: int, end: int, *, is_final: bool = False) -> Chunk:
    return Chunk(SpeechSpan(start, end), AUDIO[start:end], is_final)


class Remembering(ScriptedEngine):
    """Keeps what it was asked."""

    def __init__(self, **arguments: object) -> None:
        super().__init__(recite("it was the best of times"), **arguments)  # type: ignore[arg-type]
        self.batches: list[list[Chunk]] = []

    def decode(self, batch: Sequence[tuple[EngineStream, Chunk]]) -> list[Hypothesis]:
        self.batches.append([chunk for _, chunk in batch])
        if any(chunk.prompt == "poison" for _, chunk in batch):
            raise RuntimeError("the device is gone")
        return super().decode(batch)


@contextmanager
def hosted(*engines: Reciting) -> Iterator[EngineHost]:
    host = EngineHost({engine.card.name: engine for engine in engines})  # type: ignore[misc]
    thread = threading.Thread(target=host.run)
    thread.start()
    try:
        yield host
    finally:
        host.stop()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def worker_of(host: EngineHost, name: str = "scripted") -> tuple[RemoteEngine, Connection]:
    pipe = host.connect()
    return remote_engines(host.about, pipe)[name], pipe


def test_a_remote_engine_answers_as_the_engine_does() -> None:
    direct = Remembering(flicker=0.5)
    with hosted(Remembering(flicker=0.5)) as host:
        remote, _ = worker_of(host)
        assert (remote.card, remote.backend, remote.why) == (direct.card, direct.backend, direct.why)
        here, there = direct.open(DecodeOptions()), remote.open(DecodeOptions())
        for end in range(1_000, 40_000, 1_000):
            chunk = chunk_of(0, end)
            assert remote.decode([(there, chunk)]) == direct.decode([(here, chunk)])
        remote.close(there)


def test_a_conversation_is_the_same_with_an_engine_elsewhere(world) -> None:
    scene = world.make_scene([0.5, 20, 0.3, 4, 1.5, 3, 1.0])
    tokens = [ScriptedToken(word.text, word.start_sample + 200, 2) for word in scene.words]
    inputs = [(0.0, world.hello), *world.packets(scene.pcm()), (len(scene.samples) / SAMPLE_RATE_HZ, Bye())]
    here = ScriptedTransducer(tokens, failing_decodes=frozenset({3, 9}))
    there = ScriptedTransducer(tokens, failing_decodes=frozenset({3, 9}))
    with hosted(there) as host:
        remote, _ = worker_of(host, there.card.name)
        seen, expected = (
            [item for item in world.simulation(engine).run(inputs) if not isinstance(item.message, Error)]
            for engine in (remote, here)  # errors name the exception, which is another
        )
    assert seen == expected
    assert there.n_decodes == here.n_decodes > 9
    assert there.n_open_streams == 0


spans = st.lists(st.tuples(st.integers(0, 3_000), st.integers(0, 3_000)), min_size=1, max_size=20)


@given(spans)
def test_whatever_spans_are_asked_for_the_other_side_has_their_samples(asked: list[tuple[int, int]]) -> None:
    engine = Remembering()
    host = EngineHost({"scripted": engine})
    worker = host.connect()
    [own] = host._workers
    own.streams[1] = _hosted(engine)
    stream = RemoteStream(DecodeOptions(), (), 1)
    for start, length in asked:
        chunk = chunk_of(start, start + length)
        _, arrived = own.streams[1].take(_over_the_wire(_asked(stream, chunk)))
        assert np.array_equal(arrived.samples, chunk.samples) and arrived.span == chunk.span
    worker.close()


def _hosted(engine: ScriptedEngine) -> _Hosted:
    return _Hosted(engine, engine.open(DecodeOptions()))


def _over_the_wire(asked: AskedChunk) -> AskedChunk:
    question = question_of(encoded(Decode("scripted", (asked,))))
    assert isinstance(question, Decode)
    return question.chunks[0]


def test_each_sample_crosses_once_while_an_utterance_goes_on() -> None:
    stream = RemoteStream(DecodeOptions(), (), 1)
    spans = [(0, 1_000), (0, 3_000), (500, 3_500), (3_000, 4_000), (3_000, 3_900)]
    sent = [len(_asked(stream, chunk_of(*span)).new_samples) for span in spans]
    assert sent == [1_000, 2_000, 500, 500, 0]
    assert len(_asked(stream, chunk_of(0, 4_000)).new_samples) == 4_000  # forgotten there, for a second pass say


def test_everything_a_chunk_says_arrives() -> None:
    chunk = Chunk(
        SpeechSpan(10, 20),
        AUDIO[10:20],
        is_final=True,
        prompt="before",
        prefix=(Word(" a", 11, None, 0.5),),
        left_context_samples=3,
        right_context_samples=4,
        is_first=True,
    )
    arrived = _over_the_wire(AskedChunk.of(chunk, 1, 10)).chunk(AUDIO[10:20])
    fields = [name for name in Chunk.__slots__ if name != "samples"]
    assert [getattr(arrived, name) for name in fields] == [getattr(chunk, name) for name in fields]


def test_everything_a_hypothesis_says_arrives() -> None:
    class Saying(ScriptedEngine):
        def decode(self, batch: Sequence[tuple[EngineStream, Chunk]]) -> list[Hypothesis]:
            return [said for _ in batch]

    said = Hypothesis((Word(" a", 0, 5, 0.25), Word(" b", None, None, None)), "en", Quality(-0.5, 0.1, None, 0.0), 1)
    with hosted(Saying(())) as host:
        remote, _ = worker_of(host)
        stream = remote.open(DecodeOptions())
        assert remote.decode([(stream, chunk_of(0, 1_000))] * 3) == [said] * 3


def lengths(batches: list[list[Chunk]]) -> list[list[int]]:
    return [[chunk.span.n_samples for chunk in batch] for batch in batches]


def ask(host: EngineHost, engine: ScriptedEngine, *chunks: Chunk) -> Connection:
    """A worker that asks for ``chunks`` of one stream."""
    pipe = host.connect()
    host._workers[-1].streams[1] = _hosted(engine)
    pipe.send_bytes(encoded(Decode(engine.card.name, tuple(AskedChunk.of(chunk, 1, 0) for chunk in chunks))))
    return pipe


def answer_all(host: EngineHost) -> None:
    host._listen()
    while batch := host._next_batch():
        host._decode(batch)


def test_a_question_that_fails_costs_no_other_worker_its_answer() -> None:
    engine = Remembering()
    host = EngineHost({"scripted": engine})
    poison = Chunk(SpeechSpan(0, 10), AUDIO[:10], False, prompt="poison")
    pipes = [ask(host, engine, chunk) for chunk in (chunk_of(0, 30), poison, chunk_of(0, 20, is_final=True))]
    answer_all(host)
    assert lengths(engine.batches) == [[20, 30, 10], [20], [30], [10]]  # finals first, then in the order of asking
    good, bad, best = [answer_of(pipe.recv_bytes()) for pipe in pipes]
    assert isinstance(good, Decoded) and isinstance(best, Decoded)
    assert bad == Failed(False, "RuntimeError: the device is gone")


def test_a_batch_has_as_many_chunks_as_the_model_takes_with_profit_and_no_question_is_cut() -> None:
    engine = Remembering(max_batch=8)
    host = EngineHost({"scripted": engine})
    pipes = [ask(host, engine, *[chunk_of(0, 10)] * n_chunks) for n_chunks in (3, 4, 2, 12, 1)]
    answer_all(host)
    assert [len(batch) for batch in engine.batches] == [8, 2, 12]
    assert all(pipe.poll() for pipe in pipes)


def test_a_batch_is_of_one_model() -> None:
    one, other = Remembering(name="one"), Remembering(name="other")
    host = EngineHost({"one": one, "other": other})
    pipes = [ask(host, engine, *[chunk_of(0, 10)] * n_chunks) for engine, n_chunks in ((one, 1), (other, 2), (one, 3))]
    answer_all(host)
    assert [len(batch) for batch in one.batches] == [4] and [len(batch) for batch in other.batches] == [2]
    assert all(pipe.poll() for pipe in pipes)


def test_what_the_engine_does_not_offer_is_refused_as_the_engine_refuses_it() -> None:
    class Picky(ScriptedEngine):
        def open(self, options: DecodeOptions) -> EngineStream:
            raise UnsupportedOptionError("not on a Sunday")

    with hosted(Picky(())) as host:
        remote, _ = worker_of(host)
        with pytest.raises(UnsupportedOptionError, match="does not offer vocabulary"):
            remote.open(DecodeOptions(vocabulary=("a",)))
        with pytest.raises(UnsupportedOptionError, match="not on a Sunday"):
            remote.open(DecodeOptions())


def test_a_worker_that_goes_leaves_no_stream_open() -> None:
    engine = Remembering()
    with hosted(engine) as host:
        (leaving, pipe), (staying, _) = worker_of(host), worker_of(host)
        leaving.open(DecodeOptions())
        stream = staying.open(DecodeOptions())
        assert engine.n_open_streams == 2
        pipe.close()
        staying.decode([(stream, chunk_of(0, 10))])
        assert engine.n_open_streams == 1
    assert engine.n_open_streams == 0


def test_workers_of_a_host_that_ended_are_told_so() -> None:
    with hosted(Remembering()) as host:
        remote, _ = worker_of(host)
        stream = remote.open(DecodeOptions())
    with pytest.raises(RemoteEngineError, match="process is gone"):
        remote.decode([(stream, chunk_of(0, 10))])


def test_an_engine_that_goes_on_elsewhere_says_so_with_its_next_answer() -> None:
    class Moving(ScriptedEngine):
        place = "gpu"

        @property
        def backend(self) -> str:
            return self.place

    engine = Moving(())
    with hosted(engine) as host:
        remote, _ = worker_of(host)
        stream = remote.open(DecodeOptions())
        assert remote.backend == "gpu"
        engine.place = "cpu"
        remote.decode([(stream, chunk_of(0, 10))])
        assert remote.backend == "cpu"
