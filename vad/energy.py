"""A detector that only hears how much louder a window is than the quiet before it.

Knows levels and a noise floor that follows them; needs numpy and no weights, so it serves tests and tiny machines.
Does not know speech from other sounds: music and slamming doors are speech to it, and a voice below its floor is not.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .audio import SAMPLE_RATE_HZ
from .detector import DetectorState, check_windows
from .framer import WINDOW_SAMPLES

WINDOWS_PER_S = SAMPLE_RATE_HZ / WINDOW_SAMPLES
SILENCE_DBFS = -60.0  # below this nothing is speech, however quiet the rest
EVEN_CHANCE_DB = 9.0  # above the floor: probability one half
DB_PER_LOGIT = 2.0
FLOOR_FALL = 0.25  # share of the way down taken in one window: the floor is found within a pause of 200 ms
FLOOR_RISE_DB_PER_S = 1.5  # slow, so that a voice isn't taken for noise: a steady hum 40 dB up lasts 20 s as speech


class EnergyDetector:
    """A ``SpeechDetector`` from the level of each window without its mean, so that a constant offset is silence."""

    def initial_state(self) -> DetectorState:
        """A noise floor at the level of silence."""
        return DetectorState(np.array([SILENCE_DBFS], dtype=np.float32))

    def score(
        self, batch: Sequence[tuple[DetectorState, NDArray[np.float32]]]
    ) -> list[tuple[NDArray[np.float32], DetectorState]]:
        """Probabilities for each session's windows; see ``SpeechDetector.score``."""
        return [_score_session(float(state.memory[0]), windows) for state, windows in batch]


def _score_session(floor_dbfs: float, windows: NDArray[np.float32]) -> tuple[NDArray[np.float32], DetectorState]:
    check_windows(windows)
    levels_dbfs = _levels_dbfs(windows)
    floors_dbfs = np.empty_like(levels_dbfs)
    for index, level_dbfs in enumerate(levels_dbfs.tolist()):
        floors_dbfs[index] = floor_dbfs
        floor_dbfs = _next_floor_dbfs(floor_dbfs, level_dbfs)
    logits = (levels_dbfs - floors_dbfs - EVEN_CHANCE_DB) / DB_PER_LOGIT
    probabilities = 1.0 / (1.0 + np.exp(-np.clip(logits, -30.0, 30.0)))
    return probabilities.astype(np.float32), DetectorState(np.array([floor_dbfs], dtype=np.float32))


def _levels_dbfs(windows: NDArray[np.float32]) -> NDArray[np.float64]:
    """Level [n] of each window in dB below a full-scale square wave, never under ``SILENCE_DBFS``."""
    variances = windows.astype(np.float64).var(axis=1)
    levels_dbfs: NDArray[np.float64] = 10.0 * np.log10(np.maximum(variances, 1e-12))
    return np.maximum(SILENCE_DBFS, levels_dbfs)


def _next_floor_dbfs(floor_dbfs: float, level_dbfs: float) -> float:
    if level_dbfs < floor_dbfs:
        return floor_dbfs + FLOOR_FALL * (level_dbfs - floor_dbfs)
    return min(level_dbfs, floor_dbfs + FLOOR_RISE_DB_PER_S / WINDOWS_PER_S)
