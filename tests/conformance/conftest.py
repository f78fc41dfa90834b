"""A real server with a real model and detector, and real speech for other people's clients."""

import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr

from gateway.commands.serve import turn_detector_of
from gateway.config import TurnModel
from models.store import recording
from tests.fetched import engine_of, or_skip
from tests.serving import served
from vad.levels import TwoLevelDetector
from vad.silero import SileroDetector

SPEECH_TEXT = (
    "It was the spring of hope, it was the winter of despair. We had everything before us, we had nothing before us."
)
START_S, END_S = 17.4, 24.6  # of it in the recording two_cities
KEY = "sk-conformance"


@pytest.fixture(scope="session")
def speech_text() -> str:
    return SPEECH_TEXT


@pytest.fixture(scope="session")
def speech_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven seconds of speech between silences, 24 kHz, 16 bits, mono."""
    return written(tmp_path_factory.mktemp("speech") / "speech.wav", 24_000)


@pytest.fixture(scope="session")
def speech_file_16k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same at 16 kHz."""
    return written(tmp_path_factory.mktemp("speech") / "speech_16k.wav", 16_000)


@pytest.fixture(scope="session")
def stereo_file(speech_file_16k: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same on the left, and once more on the right when the left is silent."""
    samples, rate_hz = soundfile.read(speech_file_16k, dtype="int16")
    silence = np.zeros_like(samples)
    both = np.stack([np.concatenate([samples, silence]), np.concatenate([silence, samples])], axis=1)
    path = tmp_path_factory.mktemp("speech") / "stereo.wav"
    soundfile.write(path, both, rate_hz, subtype="PCM_16")
    return path


def written(path: Path, rate_hz: int) -> Path:
    with or_skip():
        samples, recorded_hz = soundfile.read(recording("two_cities"), dtype="float32")
    speech = soxr.resample(samples[int(START_S * recorded_hz) : int(END_S * recorded_hz)], recorded_hz, rate_hz)
    padded = np.concatenate([np.zeros(rate_hz // 2, np.float32), speech, np.zeros(2 * rate_hz, np.float32)])
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, rate_hz, 0, "NONE", ""))
        file.writeframes((np.clip(padded, -1, 1) * 32_767).astype("<i2").tobytes())
    return path


@pytest.fixture(scope="session")
def server_address() -> Iterator[str]:
    """A server that asks for ``KEY``."""
    engine = engine_of("whisper-tiny.en")
    turn_detector = turn_detector_of(TurnModel.AUTO)
    detector = TwoLevelDetector(SileroDetector())
    with served(engine, detector, keys=[KEY], turn_detector=turn_detector) as address:
        yield address
