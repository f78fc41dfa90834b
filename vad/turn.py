"""What the session needs from a model of turns: the sound of what was said up to a pause → how likely that was all.

A detector holds weights only, so one serves every session. Does not know words, nor what a session does with the
answer: how sure is sure enough, and how long to wait then, are settings.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .audio import samples_from_ms

MAX_TURN_SAMPLES = samples_from_ms(8_000)  # as much of the end of a turn as a detector is given


class TurnDetector(Protocol):
    """Tells a pause behind what is complete from one inside it."""

    @property
    def name(self) -> str:
        """What computes, for the server's log and ``/health``."""

    def probability(self, samples: NDArray[np.float32]) -> float:
        """That the speaker is done, 0..1, given the last of the turn up to the pause, and the silence begun in it.

        ``samples`` [n] are mono at 16 kHz, of a turn from its beginning or, where that is longer ago, of its last
        ``MAX_TURN_SAMPLES``.
        """
