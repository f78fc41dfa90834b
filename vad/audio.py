"""Audio on one time axis: integer samples at 16 kHz since the session began.

Knows the sample rate, frames and spans. Does not know where audio came from or what is said in it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

SAMPLE_RATE_HZ = 16_000


def exact_div(numerator: int, denominator: int) -> int:
    """``numerator / denominator``, refusing a remainder, so that a derived constant is never rounded in silence."""
    quotient, remainder = divmod(numerator, denominator)
    if remainder:
        raise ValueError(f"{numerator} is not a multiple of {denominator}")
    return quotient


SAMPLES_PER_MS = exact_div(SAMPLE_RATE_HZ, 1000)


def seconds(n_samples: int) -> float:
    """Duration in seconds of ``n_samples`` at 16 kHz."""
    return n_samples / SAMPLE_RATE_HZ


def samples_from_ms(ms: int) -> int:
    """Number of 16 kHz samples in ``ms`` milliseconds."""
    return ms * SAMPLES_PER_MS


@dataclass(frozen=True, slots=True, eq=False)
class AudioFrame:
    """Consecutive mono samples in -1..1; ``start_sample`` is the position of the first."""

    start_sample: int
    samples: NDArray[np.float32]  # [n_samples]

    @property
    def end_sample(self) -> int:
        """Position just behind the last sample."""
        return self.start_sample + len(self.samples)


@dataclass(frozen=True, slots=True)
class SpeechSpan:
    """A half-open stretch of the audio axis."""

    start_sample: int
    end_sample: int

    @property
    def n_samples(self) -> int:
        """Length in samples."""
        return self.end_sample - self.start_sample
