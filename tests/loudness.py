"""A detector for sound whose loudness says where speech is: unlike the energy detector, it never gets used to any."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from vad.detector import DetectorState


class LoudnessDetector:
    """Certain that whatever is loud is speech."""

    def initial_state(self) -> DetectorState:
        return DetectorState(np.zeros(1, np.float32))

    def score(
        self, batch: Sequence[tuple[DetectorState, NDArray[np.float32]]]
    ) -> list[tuple[NDArray[np.float32], DetectorState]]:
        return [((np.abs(windows).mean(axis=1) > 0.01).astype(np.float32), state) for state, windows in batch]
