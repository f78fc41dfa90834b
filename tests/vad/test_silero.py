"""The detector against the definition: one window at a time through the main ONNX file that silero-vad ships."""

import json
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import soundfile

from vad.framer import WINDOW_SAMPLES, padded
from vad.silero import CONTEXT_SAMPLES, SileroDetector

REPOSITORY = Path(__file__).parents[2]
RECORDINGS = REPOSITORY.parent / "shared" / "audio"
TOLERANCE = 1e-6  # batches of other sizes add up in another order


@pytest.fixture(scope="module")
def detector() -> SileroDetector:
    return SileroDetector()


def voice_like(n_windows: int, seed: int) -> np.ndarray:
    """Buzzing vowels with pauses between them, and noise: [n_windows, WINDOW_SAMPLES]; the probabilities move a lot."""
    random = np.random.default_rng(seed)
    t_s = np.arange(n_windows * WINDOW_SAMPLES) / 16_000
    pitch_hz = 120 + 40 * np.sin(2 * np.pi * 0.7 * t_s + seed)
    phase = 2 * np.pi * np.cumsum(pitch_hz) / 16_000
    formants = np.exp(-(((np.arange(1, 30) * 120 - 600) / 300) ** 2)) + 0.5 * np.exp(
        -(((np.arange(1, 30) * 120 - 1700) / 400) ** 2)
    )
    buzz = sum(gain * np.sin(harmonic * phase) for harmonic, gain in enumerate(formants, start=1))
    syllables = np.clip(np.sin(2 * np.pi * 3 * t_s), 0, 1) * (np.sin(2 * np.pi * 0.4 * t_s + seed) > 0)
    samples = 0.1 * buzz * syllables + 0.003 * random.normal(size=len(t_s))
    return samples.astype(np.float32).reshape(n_windows, WINDOW_SAMPLES)


def score_alone(detector: SileroDetector, windows: np.ndarray) -> np.ndarray:
    [(probabilities, _)] = detector.score([(detector.initial_state(), windows)])
    return probabilities


def reference_probabilities(windows: np.ndarray) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    path = str(distribution("silero-vad").locate_file("silero_vad/data/silero_vad.onnx"))
    graph = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    state, context, probabilities = np.zeros((2, 1, 128), dtype=np.float32), np.zeros(64, dtype=np.float32), []
    for window in windows:
        inputs = {"input": np.concatenate((context, window))[None], "state": state, "sr": np.array(16_000)}
        output, state = graph.run(None, inputs)
        context = window[-64:]
        probabilities.append(output[0, 0])
    return np.array(probabilities)


def test_probabilities_equal_the_main_model_file_window_by_window(detector: SileroDetector) -> None:
    windows = voice_like(200, seed=1)
    expected = reference_probabilities(windows)
    assert expected.min() < 0.1 and expected.max() > 0.6, "the signal must cross the thresholds"
    assert np.abs(score_alone(detector, windows) - expected).max() < TOLERANCE


@pytest.mark.skipif(not RECORDINGS.is_dir(), reason="needs the recordings in ../shared/audio")
def test_probabilities_equal_the_main_model_file_on_recordings(detector: SileroDetector) -> None:
    rows = [json.loads(line) for line in (RECORDINGS / "manifest.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] in ("noisy", "fleurs-en", "far-field") and row["sample_rate"] == 16_000]
    for row in rows[::6]:
        samples, _ = soundfile.read(RECORDINGS / row["file"], dtype="float32", frames=10 * 16_000)
        windows = samples[: len(samples) // WINDOW_SAMPLES * WINDOW_SAMPLES].reshape(-1, WINDOW_SAMPLES)
        assert np.abs(score_alone(detector, windows) - reference_probabilities(windows)).max() < TOLERANCE, row["id"]


@pytest.mark.parametrize("chunk_windows", [1, 2, 3, 5, 64])
def test_any_chunking_gives_the_same_probabilities(detector: SileroDetector, chunk_windows: int) -> None:
    windows = voice_like(150, seed=2)
    state, heard = detector.initial_state(), []
    for first in range(0, len(windows), chunk_windows):
        [(probabilities, state)] = detector.score([(state, windows[first : first + chunk_windows])])
        heard.append(probabilities)
    assert np.abs(np.concatenate(heard) - score_alone(detector, windows)).max() < TOLERANCE


def test_a_batch_of_sessions_with_different_numbers_of_windows_equals_each_alone(detector: SileroDetector) -> None:
    sessions = [voice_like(n, seed) for seed, n in enumerate((1, 3, 0, 2, 40, 1, 3, 7))]
    begun = [
        (detector.score([(detector.initial_state(), voice_like(9, seed))])[0][1], windows)
        for seed, windows in enumerate(sessions)
    ]
    together = detector.score(begun)
    for (probabilities, state), session in zip(together, begun, strict=True):
        [(expected, expected_state)] = detector.score([session])
        assert probabilities.shape == (len(session[1]),) and probabilities.dtype == np.float32
        assert np.abs(probabilities - expected).max(initial=0.0) < TOLERANCE
        assert np.abs(state.memory - expected_state.memory).max() < 1e-5


def test_scoring_leaves_the_state_it_was_given_as_it_was(detector: SileroDetector) -> None:
    state = detector.initial_state()
    windows = voice_like(2, seed=3)
    first = detector.score([(state, windows)])[0][0]
    assert np.array_equal(first, detector.score([(state, windows)])[0][0])


def test_a_session_without_new_windows_keeps_its_state(detector: SileroDetector) -> None:
    [(_, state)] = detector.score([(detector.initial_state(), voice_like(3, seed=4))])
    [(probabilities, same)] = detector.score([(state, np.zeros((0, WINDOW_SAMPLES), dtype=np.float32))])
    assert len(probabilities) == 0
    assert np.array_equal(same.memory, state.memory)


def test_an_empty_batch_gives_an_empty_answer(detector: SileroDetector) -> None:
    assert detector.score([]) == []


def test_the_state_carries_the_end_of_the_last_window_as_context(detector: SileroDetector) -> None:
    windows = voice_like(5, seed=5)
    [(_, state)] = detector.score([(detector.initial_state(), windows)])
    assert np.array_equal(state.memory[-CONTEXT_SAMPLES:], windows[-1, -CONTEXT_SAMPLES:])


@pytest.mark.parametrize("shape", [(1, 256), (1, 576), (512,), (2, 1, 512)])
def test_windows_of_another_size_are_refused(detector: SileroDetector, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"float32 windows \[n, 512\]"):
        detector.score([(detector.initial_state(), np.zeros(shape, dtype=np.float32))])


@pytest.mark.parametrize("level", [0.0, 1.0, -1.0, 1e-4])
def test_a_constant_is_never_speech(detector: SileroDetector, level: float) -> None:
    windows = np.full((100, WINDOW_SAMPLES), level, dtype=np.float32)
    assert score_alone(detector, windows).max() < 0.35


def test_a_short_last_window_is_scored_with_zeros_behind_it(detector: SileroDetector) -> None:
    remainder = voice_like(1, seed=6)[0, :100]
    [(probabilities, _)] = detector.score([(detector.initial_state(), padded(remainder)[None])])
    assert 0.0 <= probabilities[0] <= 1.0


def test_loading_the_detector_imports_neither_torch_nor_the_package_that_ships_the_weights() -> None:
    program = (
        "import sys; from vad.silero import SileroDetector; SileroDetector();"
        "assert not {'torch', 'silero_vad'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=REPOSITORY)
