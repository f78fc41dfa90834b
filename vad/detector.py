"""What the gate needs from a speech detector: windows in, probabilities out, with the memory passed by the caller.

A detector holds weights only, so one serves every session and may score many of them at once. Does not know sessions,
and decides nothing: thresholds are the gate's.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from .framer import WINDOW_SAMPLES


@dataclass(frozen=True, slots=True, eq=False)
class DetectorState:
    """What a detector remembers of one session between windows. A value: scoring returns a new one.

    ``memory`` is read-only; its layout is the business of the detector that made it.
    """

    memory: NDArray[np.float32]  # [n_memory]

    def __post_init__(self) -> None:
        """Lock the array, so that a state can be kept and scored from again."""
        self.memory.setflags(write=False)


class SpeechDetector(Protocol):
    """Gives each window of ``WINDOW_SAMPLES`` the probability that somebody speaks in it."""

    def initial_state(self) -> DetectorState:
        """The state before the first window of a session."""

    def score(
        self, batch: Sequence[tuple[DetectorState, NDArray[np.float32]]]
    ) -> list[tuple[NDArray[np.float32], DetectorState]]:
        """Score several sessions, each with its own number of consecutive windows.

        A pair is a session's state and its windows [n, WINDOW_SAMPLES]; the answer has, in the same order, the
        probabilities [n] and the state behind the last window. Sessions don't influence each other: an answer differs
        from that of the session scored alone by rounding at most.

        Raises:
            ValueError: for windows of another type or shape.
        """


def check_windows(windows: NDArray[np.float32]) -> None:
    """Refuse what is not a float32 array [n, WINDOW_SAMPLES].

    Raises:
        ValueError: naming the type and shape that came.
    """
    if windows.dtype != np.float32 or windows.ndim != 2 or windows.shape[1] != WINDOW_SAMPLES:
        raise ValueError(
            f"a detector takes float32 windows [n, {WINDOW_SAMPLES}] of 16 kHz audio; "
            f"got {windows.dtype} of shape {list(windows.shape)}"
        )
