"""Packets of any size in, windows of one size out, on an exact sample clock.

Knows how many samples have come and which of them still wait for their window to fill. Does not know where the samples
came from or what will be done with a window.
"""

import numpy as np
from numpy.typing import NDArray

from .audio import AudioFrame

WINDOW_SAMPLES = 512  # 32 ms at 16 kHz: one step of the detectors


class Framer:
    """Cuts a stream of samples into windows of ``WINDOW_SAMPLES``."""

    def __init__(self, *, start_sample: int = 0) -> None:
        """The first sample to come is at ``start_sample``."""
        self._next_window_sample = start_sample
        self._waiting: NDArray[np.float32] = np.zeros(0, dtype=np.float32)  # [n_waiting], fewer than a window

    @property
    def end_sample(self) -> int:
        """Position just behind the last sample that was pushed."""
        return self._next_window_sample + len(self._waiting)

    def push(self, samples: NDArray[np.float32]) -> list[AudioFrame]:
        """Take ``samples`` [n] and return the windows that are now full, in order. The frames own their memory.

        Raises:
            ValueError: for anything but a float32 array of one dimension.
        """
        if samples.dtype != np.float32 or samples.ndim != 1:
            raise ValueError(
                f"a framer takes mono float32 samples [n]; got {samples.dtype} of shape {list(samples.shape)}"
            )
        buffer = np.concatenate((self._waiting, samples))
        n_windows = len(buffer) // WINDOW_SAMPLES
        first_sample = self._next_window_sample
        windows = [
            AudioFrame(first_sample + offset, buffer[offset : offset + WINDOW_SAMPLES])
            for offset in range(0, n_windows * WINDOW_SAMPLES, WINDOW_SAMPLES)
        ]
        self._waiting = buffer[n_windows * WINDOW_SAMPLES :]
        self._next_window_sample += n_windows * WINDOW_SAMPLES
        return windows

    def flush(self) -> AudioFrame | None:
        """Hand out what waits as a frame shorter than a window, or ``None`` if nothing does.

        The next window begins where that frame ends, so positions stay exact; ``padded`` makes it fit a detector.
        """
        if not len(self._waiting):
            return None
        remainder = AudioFrame(self._next_window_sample, self._waiting)
        self._next_window_sample = remainder.end_sample
        self._waiting = np.zeros(0, dtype=np.float32)
        return remainder


def padded(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """``samples`` [n ≤ WINDOW_SAMPLES] with zeros behind them, as one window [WINDOW_SAMPLES]."""
    if len(samples) == WINDOW_SAMPLES:
        return samples
    return np.pad(samples, (0, WINDOW_SAMPLES - len(samples)))
