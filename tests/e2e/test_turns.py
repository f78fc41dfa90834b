"""Real speech with the real detector and the real model of turns: a pause inside a sentence, and one behind it."""

import numpy as np
import pytest
import soundfile
import soxr

from gateway.config import SessionConfig
from gateway.messages import Audio, EngineItem, SpeechEnded, parse
from gateway.session import ServedModel, Session
from gateway.simulation import Simulation
from models.scripted import ScriptedEngine, recite
from models.smart_turn import SmartTurn
from models.store import recording, turn_model
from tests.fetched import or_skip
from vad.audio import SAMPLE_RATE_HZ
from vad.gate import GateSettings
from vad.silero import SileroDetector

pytestmark = [pytest.mark.weights, pytest.mark.e2e]

FIRST_S, BREAK_S, LAST_S = 20.8, 22.85, 24.1  # of a clause, broken where nobody pauses


def test_a_pause_inside_a_sentence_is_waited_through_and_its_end_is_not() -> None:
    with or_skip():
        samples, rate_hz = soundfile.read(recording("two_cities"), dtype="float32")
        judge = SmartTurn(turn_model())
    first, second = (
        soxr.resample(samples[int(begin * rate_hz) : int(end * rate_hz)], rate_hz, SAMPLE_RATE_HZ)
        for begin, end in ((FIRST_S, BREAK_S), (BREAK_S, LAST_S))
    )
    pause = np.zeros(SAMPLE_RATE_HZ, np.float32)
    said = np.concatenate([pause, first, pause, second, *[pause] * 5])
    engine, detector = ScriptedEngine(recite("whatever it was")), SileroDetector()
    served = {engine.card.name: ServedModel(engine.card, EngineItem("script", "a test"))}
    session = Session(
        "session",
        served,
        detector.initial_state(),
        config=SessionConfig(),
        gate=GateSettings(),
        now_s=0.0,
        turn_model=judge.name,
    )
    audio = {"encoding": "f32le", "sample_rate_hz": SAMPLE_RATE_HZ}
    hello = {"type": "hello", "audio": audio, "hangover_ms": 4_000, "turn_hangover_ms": 500, "turn_threshold": 0.6}
    frames = [(at / SAMPLE_RATE_HZ, Audio(said[at - 320 : at].tobytes())) for at in range(320, len(said) + 1, 320)]
    seen = Simulation(session, engine, detector, turn_detector=judge).run([(0.0, parse(hello)), *frames])
    ends = [(item.at_s, item.message) for item in seen if isinstance(item.message, SpeechEnded)]
    assert len(ends) == 1
    [(at_s, ended)] = ends
    assert ended.speech_end_s > (len(pause) + len(first) + len(pause)) / SAMPLE_RATE_HZ + 0.5
    assert at_s - ended.speech_end_s == pytest.approx(0.5, abs=0.1)
