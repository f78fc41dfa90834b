"""The audio a session still needs: one rolling buffer on the session's sample axis.

Knows samples and positions. Does not know why audio is needed or when it may go; ``drop_before`` says so.
"""

import numpy as np
from numpy.typing import NDArray

from vad.audio import AudioFrame, SpeechSpan

_FIRST_CAPACITY_SAMPLES = 1 << 16


class RollingAudio:
    """Consecutive samples, appended at the end and forgotten from the start. Memory is bounded by what is kept."""

    def __init__(self, start_sample: int = 0) -> None:
        """The first sample to come is at ``start_sample``."""
        self._buffer = np.empty(_FIRST_CAPACITY_SAMPLES, np.float32)
        self._offset = 0  # index in the buffer of the first sample kept
        self._length = 0
        self.start_sample = start_sample

    @property
    def end_sample(self) -> int:
        """Position just behind the newest sample."""
        return self.start_sample + self._length

    def append(self, frame: AudioFrame) -> None:
        """Add the samples that follow the newest one."""
        if frame.start_sample != self.end_sample:
            raise ValueError(f"frame begins at sample {frame.start_sample}, the window ends at {self.end_sample}")
        n = len(frame.samples)
        self._make_room(n)
        stop = self._offset + self._length
        self._buffer[stop : stop + n] = frame.samples
        self._length += n

    def drop_before(self, sample: int) -> None:
        """Forget what lies before ``sample``."""
        n = min(max(0, sample - self.start_sample), self._length)
        self.start_sample += n
        self._offset += n
        self._length -= n

    def samples(self, span: SpeechSpan) -> NDArray[np.float32]:
        """The samples of ``span``, which must lie inside the window: as they lie in the buffer, not to be written to.

        They stay what they are, whatever is appended and forgotten later.
        """
        if not self.start_sample <= span.start_sample <= span.end_sample <= self.end_sample:
            raise ValueError(f"{span} is not inside {self.start_sample}..{self.end_sample}")
        start = self._offset + span.start_sample - self.start_sample
        return self._buffer[start : start + span.n_samples]

    def _make_room(self, n: int) -> None:
        if self._offset + self._length + n <= len(self._buffer):
            return
        needed = self._length + n
        # Twice the need, so that moving what is kept costs a constant per sample appended; shrinks again by itself.
        roomy = np.empty(max(_FIRST_CAPACITY_SAMPLES, 2 * needed), np.float32)
        roomy[: self._length] = self._buffer[self._offset : self._offset + self._length]
        self._buffer, self._offset = roomy, 0
