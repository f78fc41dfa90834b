"""A detector that hears the audio twice, as it comes and louder: what either takes for speech is speech.

A network is surest of voices at the levels it was trained on: quiet and hoarse ones it knows only once they are louder,
whispers only as they are. Knows gains and how to keep two memories. Does not know the detector that it asks.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from .detector import DetectorState, SpeechDetector

# Of 3394 words one level misses 13, two miss 8; 12 dB quieter it is 37 and 8, with no more heard in what is no speech.
# At 24 dB music is taken for speech. Figures: benchmarks/results/vad_gate.md.
LOUDER_DB = 12.0


class TwoLevelDetector:
    """A ``SpeechDetector`` that gives the higher of another's two answers, at twice its cost."""

    def __init__(self, detector: SpeechDetector, louder_db: float = LOUDER_DB) -> None:
        """``detector`` must take samples beyond -1..1 at their worth: the louder windows aren't clipped."""
        self._detector = detector
        self._gain = np.float32(10 ** (louder_db / 20))

    def initial_state(self) -> DetectorState:
        """The other detector's, for each level."""
        memory = self._detector.initial_state().memory
        return DetectorState(np.concatenate((memory, memory)))

    def score(
        self, batch: Sequence[tuple[DetectorState, NDArray[np.float32]]]
    ) -> list[tuple[NDArray[np.float32], DetectorState]]:
        """Probabilities for each session's windows; see ``SpeechDetector.score``."""
        halves = [np.split(state.memory, 2) for state, _ in batch]
        plain = [(DetectorState(half), windows) for (half, _), (_, windows) in zip(halves, batch, strict=True)]
        louder = [
            (DetectorState(half), windows * self._gain) for (_, half), (_, windows) in zip(halves, batch, strict=True)
        ]
        answers = self._detector.score([*plain, *louder])
        return [
            (np.maximum(plain_p, louder_p), DetectorState(np.concatenate((plain_state.memory, louder_state.memory))))
            for (plain_p, plain_state), (louder_p, louder_state) in zip(
                answers[: len(batch)], answers[len(batch) :], strict=True
            )
        ]
