"""From any sample rate to 16 kHz, a packet at a time, on an exact clock.

Knows one stream: output sample j is the input at time j / 16000 s, for as long as the stream lasts, flushes included.
Does not know encodings or channels.

The filter is our own because of its delay: soxr's streams, which work in large blocks, hold back 115 ms of 8 kHz audio
and 36 to 84 ms at other rates (soxr 1.1.0, quality "HQ"), this one 6 ms and less. Each output sample is a windowed sinc
around its own time (polyphase interpolation; J. O. Smith, Digital Audio Resampling), so packets can't change it.
"""

import math
from functools import lru_cache

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from vad.audio import SAMPLE_RATE_HZ

N_CROSSINGS = 48  # zeros of the sinc on each side, at the lower of the two rates
ROLLOFF = 0.95  # cutoff as a share of the lower Nyquist frequency; with 48 zeros the stopband then begins close to it
KAISER_BETA = 7.86  # 80 dB of stopband by J. F. Kaiser's formula, 0.1102 * (80 - 8.7)
MAX_PHASES = 4096  # a rate with more takes the nearest: jitter 79 dB below a tone at a quarter of the rate
MAX_STRIDED_PHASES = 4  # 8, 12, 24, 32, 48, 64, 96 kHz: two to five times quicker than a window for each sample
SCRATCH_SAMPLES = 40_000  # of one block; more than fits a cache is several times slower


class Resampler:
    """One stream of mono audio on its way from ``rate_hz`` to 16 kHz."""

    def __init__(self, rate_hz: int) -> None:
        """``rate_hz`` is 1 or more; at 16 kHz samples pass as they are."""
        divisor = math.gcd(rate_hz, SAMPLE_RATE_HZ)
        self._up, self._down = SAMPLE_RATE_HZ // divisor, rate_hz // divisor
        self._filter = _filter_phases(self._up, self._down)
        self._half = self._filter.shape[1] // 2  # input samples that an output sample needs from each side
        self._n_in = 0
        self._n_out = 0
        self._buffer: NDArray[np.float32] = np.zeros(self._half - 1, dtype=np.float32)  # begins with silence
        self._buffer_start = 1 - self._half  # input position of the buffer's first sample

    @property
    def n_in(self) -> int:
        """Input samples taken so far."""
        return self._n_in

    def output_position(self, input_position: int) -> int:
        """The first output sample at or behind an input position."""
        return -(-input_position * self._up // self._down)

    def input_position(self, output_position: int) -> int:
        """The last input sample at or before an output position."""
        return output_position * self._down // self._up

    def push(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        """Take ``samples`` [n] and return the output [m] that they complete."""
        self._n_in += len(samples)
        if self._up == self._down:
            return samples
        self._buffer = np.concatenate((self._buffer, samples))
        return self._advance_to(self.output_position(self._n_in - self._half))

    def flush(self) -> NDArray[np.float32]:
        """The output up to the end of the input so far, as if silence followed. The stream may go on behind it.

        Only the last few samples given now differ from those that more input would have made; those to come know the
        true past, and none is left out or given twice.
        """
        if self._up == self._down:
            return np.zeros(0, dtype=np.float32)
        self._buffer = np.concatenate((self._buffer, np.zeros(self._half, dtype=np.float32)))
        output = self._advance_to(self.output_position(self._n_in))
        self._buffer = self._buffer[: self._n_in - self._buffer_start]
        return output

    def _advance_to(self, end: int) -> NDArray[np.float32]:
        """Output samples up to ``end``; forgets the input that none of those to come needs."""
        step = max(1, SCRATCH_SAMPLES // self._filter.shape[1])
        blocks = [self._interpolate(first, min(first + step, end)) for first in range(self._n_out, end, step)]
        self._n_out = max(self._n_out, end)
        n_used = self.input_position(self._n_out) - self._half + 1 - self._buffer_start
        self._buffer = self._buffer[n_used:]
        self._buffer_start += n_used
        return np.concatenate(blocks) if blocks else np.zeros(0, dtype=np.float32)

    def _interpolate(self, first: int, end: int) -> NDArray[np.float32]:
        if self._up <= MAX_STRIDED_PHASES:
            return self._interpolate_by_phase(first, end)
        n_phases, n_taps = self._filter.shape[0] - 1, self._filter.shape[1]
        centres, remainders = np.divmod(np.arange(first, end) * self._down, self._up)
        phases = (remainders * n_phases + self._up // 2) // self._up
        windows = sliding_window_view(self._buffer, n_taps)[centres - self._half + 1 - self._buffer_start]
        output: NDArray[np.float32] = np.vecdot(windows, self._filter[phases])
        return output

    def _interpolate_by_phase(self, first: int, end: int) -> NDArray[np.float32]:
        """The same without copying a window for each sample: those of one phase lie ``down`` input samples apart."""
        output = np.empty(end - first, dtype=np.float32)
        windows = sliding_window_view(self._buffer, self._filter.shape[1])
        for offset in range(min(self._up, len(output))):
            centre, phase = divmod((first + offset) * self._down, self._up)
            of_phase = output[offset :: self._up]
            rows = windows[centre - self._half + 1 - self._buffer_start :: self._down]
            of_phase[:] = np.vecdot(rows[: len(of_phase)], self._filter[phase])
        return output


@lru_cache(maxsize=16)
def _filter_phases(up: int, down: int) -> NDArray[np.float32]:
    """Coefficients [n_phases + 1, n_taps] for output that lies 0, 1/n_phases, ... 1 behind an input sample."""
    lower_rate = min(1.0, up / down)  # as a share of the input rate
    half = math.ceil(N_CROSSINGS / lower_rate)
    n_phases = min(up, MAX_PHASES)
    behind = np.arange(n_phases + 1)[:, None] / n_phases
    distance = np.arange(1 - half, half + 1) - behind  # of each input sample from the output, [n_phases + 1, n_taps]
    window = np.i0(KAISER_BETA * np.sqrt(np.maximum(0.0, 1.0 - (distance / half) ** 2)))
    coefficients = np.sinc(ROLLOFF * lower_rate * distance) * window
    coefficients /= coefficients.sum(axis=1, keepdims=True)  # a constant stays what it is, in every phase
    phases: NDArray[np.float32] = coefficients.astype(np.float32)
    phases.setflags(write=False)
    return phases
