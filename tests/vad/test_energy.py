import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vad.energy import EnergyDetector
from vad.framer import WINDOW_SAMPLES

N_PER_S = 31  # windows a second, about


def noise(n_windows: int, dbfs: float, seed: int = 0) -> np.ndarray:
    samples = np.random.default_rng(seed).normal(scale=10 ** (dbfs / 20), size=(n_windows, WINDOW_SAMPLES))
    return samples.astype(np.float32)


def score(windows: np.ndarray) -> np.ndarray:
    detector = EnergyDetector()
    [(probabilities, _)] = detector.score([(detector.initial_state(), windows)])
    return probabilities


def test_a_burst_above_the_noise_is_speech_and_the_noise_around_it_is_not() -> None:
    quiet = noise(2 * N_PER_S, -50.0)
    probabilities = score(np.concatenate((noise(10 * N_PER_S, -50.0), quiet, noise(N_PER_S, -20.0), quiet)))
    before, burst, after = np.split(probabilities[10 * N_PER_S :], [2 * N_PER_S, 3 * N_PER_S])
    assert before.max() < 0.35 and after.max() < 0.35
    assert burst.min() > 0.9


@pytest.mark.parametrize("level", [0.0, 1.0, -1.0, 0.3])
def test_a_constant_is_never_speech(level: float) -> None:
    assert score(np.full((60, WINDOW_SAMPLES), level, dtype=np.float32)).max() < 0.1


def test_steady_noise_stops_being_speech_once_the_floor_has_risen() -> None:
    assert score(noise(40 * N_PER_S, -30.0))[-N_PER_S:].max() < 0.35


@settings(max_examples=25)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6))
def test_any_chunking_gives_the_same_probabilities(sizes: list[int]) -> None:
    detector = EnergyDetector()
    windows = noise(sum(sizes), -40.0) * np.linspace(0, 10, sum(sizes), dtype=np.float32)[:, None]
    state, heard = detector.initial_state(), []
    for chunk in np.split(windows, np.cumsum(sizes)[:-1]):
        [(probabilities, state)] = detector.score([(state, chunk)])
        heard.append(probabilities)
    assert np.allclose(np.concatenate(heard), score(windows), atol=1e-4)


def test_sessions_of_one_batch_do_not_influence_each_other() -> None:
    detector = EnergyDetector()
    sessions = [noise(n, level, seed=n) for n, level in ((5, -20.0), (0, -20.0), (17, -50.0))]
    together = detector.score([(detector.initial_state(), windows) for windows in sessions])
    for (probabilities, _), windows in zip(together, sessions, strict=True):
        assert np.array_equal(probabilities, score(windows))
