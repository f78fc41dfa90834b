"""A scripted world for sessions: sound that carries its own words, a detector and an engine that read it."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from gateway.config import SessionConfig
from gateway.doors.door import Door, House, Knock
from gateway.effects import Said
from gateway.messages import Audio, AudioSpec, ClientMessage, EngineItem, Hello
from gateway.session import ServedModel, Session
from gateway.simulation import DoorSimulation, Simulation
from streaming.capability import Capability
from streaming.engine import Chunk, DecodeOptions, ModelCard, StreamWarning
from streaming.transcript import Hypothesis, Quality, Word
from tests.loudness import LoudnessDetector
from vad.audio import SAMPLE_RATE_HZ
from vad.gate import GateSettings

WORD_SAMPLES = 6_400  # 0.4 s a word
WORD_GAP_SAMPLES = 800


@dataclass
class TurnJudge:
    """Gives the pauses that it is asked about, in order, these probabilities, and the last of them ever after."""

    probabilities: list[float]
    heard: list[NDArray[np.float32]] = field(default_factory=list)
    name: str = "judge"

    def probability(self, samples: NDArray[np.float32]) -> float:
        self.heard.append(samples)
        return self.probabilities[min(len(self.heard), len(self.probabilities)) - 1]


@dataclass
class Stream:
    """What an engine keeps for a caller."""

    options: DecodeOptions
    warnings: tuple[StreamWarning, ...] = ()


@dataclass
class ReadingEngine:
    """Hears exactly the words of a script whose sound lies in the chunk: those cut at its end come out wrong."""

    script: tuple[Word, ...]
    card: ModelCard = field(default_factory=lambda: ModelCard("reader", ("en", "de"), 480_000, frozenset(Capability)))
    backend: str = "script"
    why: str = "a test"
    n_open: int = 0
    fail_on: frozenset[int] = frozenset()  # numbers of the decodes that fail
    n_decodes: int = 0
    chunks: list[Chunk] = field(default_factory=list)
    garble: Callable[[Chunk, tuple[Word, ...]], tuple[Word, ...]] | None = None

    def open(self, options: DecodeOptions) -> Stream:
        self.n_open += 1
        return Stream(options, ())

    def close(self, stream: Stream) -> None:
        self.n_open -= 1

    def decode(self, batch: Sequence[tuple[Stream, Chunk]]) -> list[Hypothesis]:
        return [self._hear(chunk) for _, chunk in batch]

    def _hear(self, chunk: Chunk) -> Hypothesis:
        self.n_decodes += 1
        self.chunks.append(chunk)
        if self.n_decodes in self.fail_on:
            raise RuntimeError("the device is gone")
        heard = []
        for word in self.script:
            assert word.start_sample is not None and word.end_sample is not None
            if chunk.span.start_sample <= word.start_sample and word.end_sample <= chunk.span.end_sample:
                heard.append(word)
            elif chunk.span.start_sample <= word.start_sample < chunk.span.end_sample - 1_600:
                heard.append(Word(word.text + "~", word.start_sample, chunk.span.end_sample, 0.1))
        words = tuple(heard[len(chunk.prefix) :])
        if self.garble:
            words = self.garble(chunk, words)
        return Hypothesis(words, "en", Quality(-0.2, 0.01, 1.2, 0.0))


@dataclass(frozen=True)
class Scene:
    """Sound at 16 kHz and the words in it."""

    samples: NDArray[np.float32]
    words: tuple[Word, ...]

    def pcm(self) -> bytes:
        return (self.samples * 32_767).astype("<i2").tobytes()


def make_scene(layout: Sequence[int | float]) -> Scene:
    """``layout``: a number of words (int), or seconds of silence (float), one after another."""
    pieces: list[NDArray[np.float32]] = []
    words: list[Word] = []
    at = 0
    for item in layout:
        if isinstance(item, float):
            pieces.append(np.zeros(int(item * SAMPLE_RATE_HZ), np.float32))
            at += len(pieces[-1])
            continue
        for _ in range(item):
            tone = np.zeros(WORD_SAMPLES, np.float32)
            tone[: WORD_SAMPLES - WORD_GAP_SAMPLES] = 0.3
            pieces.append(tone)
            words.append(Word(f" w{len(words)}", at, at + WORD_SAMPLES - WORD_GAP_SAMPLES, 0.9))
            at += WORD_SAMPLES
    return Scene(np.concatenate(pieces) if pieces else np.zeros(0, np.float32), tuple(words))


HELLO = Hello(audio=AudioSpec("s16le", SAMPLE_RATE_HZ))


def packets(pcm: bytes, n_bytes: int = 3_200, start_s: float = 0.0) -> Iterator[tuple[float, ClientMessage]]:
    """``pcm`` in real time: each packet comes when its last sample was spoken."""
    for at in range(0, len(pcm), n_bytes):
        packet = pcm[at : at + n_bytes]
        yield start_s + (at + len(packet)) / (2 * SAMPLE_RATE_HZ), Audio(packet)


@pytest.fixture(scope="session")
def world() -> type["World"]:
    return World


class World:
    """Everything a session test needs, by one name."""

    make_scene = staticmethod(make_scene)
    packets = staticmethod(packets)
    hello = HELLO
    Engine = ReadingEngine
    Detector = LoudnessDetector
    TurnJudge = TurnJudge

    @staticmethod
    def session(engine: ReadingEngine, judge: TurnJudge | None = None, **config: float) -> Session:
        models = {engine.card.name: ServedModel(engine.card, EngineItem(engine.backend, engine.why))}
        settings = SessionConfig(**config)  # type: ignore[arg-type]
        detector_state = LoudnessDetector().initial_state()
        gate = GateSettings(hangover_ms=400)
        turn_model = None if judge is None else judge.name
        return Session("session", models, detector_state, config=settings, gate=gate, now_s=0.0, turn_model=turn_model)

    @staticmethod
    def simulation(
        engine: ReadingEngine, delay_s: float = 0.0, judge: TurnJudge | None = None, **config: float
    ) -> Simulation:
        session = World.session(engine, judge, **config)
        return Simulation(session, engine, LoudnessDetector(), cost_s=lambda job: delay_s, turn_detector=judge)

    @staticmethod
    def house(*engines: ReadingEngine, has_turn_model: bool = False, **aliases: str) -> House:
        """What a door knows of a server with these engines."""
        cards = {engine.card.name: engine.card for engine in engines or (ReadingEngine(()),)}
        return House(cards, GateSettings(hangover_ms=400), SessionConfig(), aliases, has_turn_model)

    @staticmethod
    def knock(**said: object) -> Knock:
        """A handshake."""
        return Knock(path="/", connection_id="0123456789abcdef0123456789abcdef", **said)  # type: ignore[arg-type]

    @staticmethod
    def behind(
        door: Door, engine: ReadingEngine, delay_s: float = 0.0, judge: TurnJudge | None = None
    ) -> DoorSimulation:
        """``door`` with the sessions that it opens, each decode taking ``delay_s``."""
        models = {engine.card.name: ServedModel(engine.card, EngineItem(engine.backend, engine.why))}

        def open_session(now_s: float, hear: Callable[[Said, float], None]) -> Simulation:
            state = LoudnessDetector().initial_state()
            gate = GateSettings(hangover_ms=400)
            turn_model = None if judge is None else judge.name
            session = Session(
                "session", models, state, config=SessionConfig(), gate=gate, now_s=now_s, turn_model=turn_model
            )
            return Simulation(
                session,
                engine,
                LoudnessDetector(),
                cost_s=lambda job: delay_s,
                hear=hear,
                turn_detector=judge,
            )

        return DoorSimulation(door, open_session)
