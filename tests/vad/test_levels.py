"""The detector at two levels, by one that goes by level alone, and by the real one on real voices."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from vad.audio import SAMPLE_RATE_HZ
from vad.detector import DetectorState
from vad.framer import WINDOW_SAMPLES
from vad.gate import Gate, GateSettings, SpeechEnded, SpeechStarted
from vad.levels import LOUDER_DB, TwoLevelDetector
from vad.silero import SileroDetector

RECORDINGS = Path(__file__).parents[3] / "shared" / "audio"
needs_recordings = pytest.mark.skipif(not RECORDINGS.is_dir(), reason="needs the recordings in ../shared/audio")
GAIN = 10 ** (LOUDER_DB / 20)


class HearsLevels:
    """Sure between two levels only, and remembers the last sample that it was given."""

    def __init__(self, low: float, high: float) -> None:
        self.low, self.high = low, high

    def initial_state(self) -> DetectorState:
        return DetectorState(np.zeros(1, np.float32))

    def score(
        self, batch: Sequence[tuple[DetectorState, NDArray[np.float32]]]
    ) -> list[tuple[NDArray[np.float32], DetectorState]]:
        return [self._score(state, windows) for state, windows in batch]

    def _score(self, state: DetectorState, windows: NDArray[np.float32]) -> tuple[NDArray[np.float32], DetectorState]:
        peaks = np.abs(windows).max(axis=1, initial=0.0)
        probabilities = ((self.low <= peaks) & (peaks <= self.high)).astype(np.float32)
        memory = windows[-1, -1:].copy() if len(windows) else state.memory.copy()
        return probabilities, DetectorState(memory)


def at_level(*levels: float) -> NDArray[np.float32]:
    return np.stack([np.full(WINDOW_SAMPLES, level, np.float32) for level in levels])


def score(detector: TwoLevelDetector, windows: NDArray[np.float32]) -> NDArray[np.float32]:
    [(probabilities, _)] = detector.score([(detector.initial_state(), windows)])
    return probabilities


def test_what_either_level_takes_for_speech_is_speech() -> None:
    detector = TwoLevelDetector(HearsLevels(0.1, 0.3))
    heard = score(detector, at_level(0.2, 0.2 / GAIN, 0.09 / GAIN, 0.31))
    assert heard.tolist() == [1.0, 1.0, 0.0, 0.0]


def test_the_louder_audio_is_not_clipped() -> None:
    assert score(TwoLevelDetector(HearsLevels(GAIN * 0.99, GAIN * 1.01)), at_level(1.0)).tolist() == [1.0]


def test_each_level_has_a_memory_of_its_own() -> None:
    detector = TwoLevelDetector(HearsLevels(0.1, 0.3))
    [(_, state)] = detector.score([(detector.initial_state(), at_level(0.2))])
    assert state.memory.tolist() == pytest.approx([0.2, 0.2 * GAIN])


@given(cuts=st.lists(st.integers(0, 4), max_size=8))
def test_any_cut_of_a_stream_gives_the_same_probabilities(cuts: list[int]) -> None:
    detector = TwoLevelDetector(HearsLevels(0.1, 0.3))
    windows = np.random.default_rng(0).uniform(-0.3, 0.3, (sum(cuts), WINDOW_SAMPLES)).astype(np.float32)
    state, pieces, at = detector.initial_state(), [np.empty(0, np.float32)], 0
    for n in cuts:
        [(piece, state)] = detector.score([(state, windows[at : at + n])])
        pieces.append(piece)
        at += n
    assert np.array_equal(np.concatenate(pieces), score(detector, windows))


def test_sessions_of_a_batch_do_not_mix() -> None:
    detector = TwoLevelDetector(HearsLevels(0.1, 0.3))
    sessions = [at_level(0.2), at_level(0.31, 0.2 / GAIN), at_level(0.5)[:0], at_level(0.01, 0.2, 0.4)]
    answers = detector.score([(detector.initial_state(), windows) for windows in sessions])
    assert [probabilities.tolist() for probabilities, _ in answers] == [
        score(detector, windows).tolist() for windows in sessions
    ]
    assert detector.score([]) == []


@pytest.mark.parametrize("shape", [(1, 256), (512,)])
def test_windows_of_another_size_are_refused(shape: tuple[int, ...]) -> None:
    detector = TwoLevelDetector(SileroDetector())
    with pytest.raises(ValueError, match=r"float32 windows \[n, 512\]"):
        detector.score([(detector.initial_state(), np.zeros(shape, np.float32))])


# ---------------------------------------------------------------- real voices


def recordings(kind: str) -> list[tuple[str, NDArray[np.float32]]]:
    rows = [json.loads(line) for line in (RECORDINGS / "manifest.jsonl").read_text().splitlines()]
    return [(row["id"], read(RECORDINGS / row["file"])) for row in rows if row["kind"] == kind]


def read(path: Path) -> NDArray[np.float32]:
    """The channels [n_samples, n_channels] of a recording at 16 kHz."""
    samples, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
    return np.asarray(samples if rate_hz == SAMPLE_RATE_HZ else soxr.resample(samples, rate_hz, SAMPLE_RATE_HZ))


def spoken(detector: TwoLevelDetector | SileroDetector, samples: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Which samples [n_samples] of whole windows lie in spans of speech."""
    windows = samples[: len(samples) // WINDOW_SAMPLES * WINDOW_SAMPLES].reshape(-1, WINDOW_SAMPLES)
    [(probabilities, _)] = detector.score([(detector.initial_state(), windows.astype(np.float32))])
    gate, inside, start = Gate(GateSettings()), np.zeros(windows.size, np.bool_), 0
    events = [e for index, p in enumerate(probabilities) for e in gate.push(index * WINDOW_SAMPLES, float(p))]
    for event in [*events, *gate.force_end(windows.size)]:
        if isinstance(event, SpeechStarted):
            start = event.start_sample
        elif isinstance(event, SpeechEnded):
            inside[start : event.end_sample] = True
    return inside


@pytest.fixture(scope="module")
def silero() -> SileroDetector:
    return SileroDetector()


@needs_recordings
def test_voices_mixed_to_one_channel_are_heard_as_on_their_own(silero: SileroDetector) -> None:
    [(_, channels)] = recordings("multichannel")
    alone = np.logical_or(*(spoken(silero, channels[:, channel]) for channel in range(2)))
    assert np.mean(spoken(silero, channels.mean(axis=1))[alone]) < 0.95, "one level would do"
    assert np.mean(spoken(TwoLevelDetector(silero), channels.mean(axis=1))[alone]) > 0.98


@needs_recordings
@pytest.mark.parametrize("quieter_db", [0.0, 12.0])
def test_what_is_no_speech_stays_that(silero: SileroDetector, quieter_db: float) -> None:
    """One of them holds a voice: a song."""
    heard_s = {
        name: float(np.sum(spoken(TwoLevelDetector(silero), samples[:, 0] / 10 ** (quieter_db / 20)))) / SAMPLE_RATE_HZ
        for name, samples in recordings("nonspeech")
    }
    assert {name for name, seconds in heard_s.items() if seconds > 2.0} <= {"ns-vibe-ace"}
