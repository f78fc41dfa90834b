"""From any sample rate to 16 kHz, a packet at a time, on an exact clock.

Knows one stream: output sample j is the input at time j / 16000 s, for as long as the stream lasts, flushes included.
Does not know encodings or channels.

soxr does the filtering, but not as a stream: its streams hold back 37 to 115 ms (soxr 1.1.0, quality "HQ"). A block of
5 to 10 ms is made at a time from all the input that the filter reaches, so packets can't change what comes out. For the
usual rates the filter is asked of soxr once (up to 80 ms, at 44.1 kHz and its parts), and a block is a product with it:
a quarter to a twentieth of the time that soxr takes, which designs its filter anew in each call.
"""

import math
from functools import cache, lru_cache

import numpy as np
import soxr
from numpy.typing import NDArray

from vad.audio import SAMPLE_RATE_HZ

REACH_SAMPLES = 80  # of soxr's filter to each side, at the lower rate; the rest of it, left out, is 100 dB down
BLOCK_SAMPLES = 160  # of output, made by one call of soxr; two calls for half as much each take twice the time
SHORT_BLOCK_SAMPLES = 80  # for rates below 16 kHz, where the filter reaches up to 10 ms: both together are 15 ms


MAX_FILTER_DOWN = 512  # input samples between two that outputs fall on; 44.1 kHz has 441, the oddest rates 48,000


@cache
def _impulse_response(up: int, down: int, reach: int) -> NDArray[np.float32]:
    """soxr's answer to one input sample, at every distance that its filter reaches [(2 * reach + 1) * up].

    Entry ``reach * up + d`` is for an input that lies ``d / (up * rate)`` seconds behind the output. Those of one input
    sample are ``down`` apart: the rest are the answers to its neighbours.
    """
    n_around = -(-(reach + 1) // down) * down  # a multiple: its first sample is one that an output falls on
    response = np.zeros((2 * reach + 1) * up, np.float32)
    inputs = np.zeros((2 * n_around + down, down), np.float32)  # a channel for each of the neighbours
    inputs[n_around + np.arange(down), np.arange(down)] = 1
    rate_hz = SAMPLE_RATE_HZ * down // up
    outputs = soxr.resample(inputs, rate_hz, SAMPLE_RATE_HZ, quality="HQ")  # [n, down]
    for neighbour in range(down):
        distances = (n_around + neighbour) * up - np.arange(len(outputs)) * down
        is_near = np.abs(distances) <= reach * up
        indexes = distances[is_near] + reach * up
        is_kept = indexes < len(response)
        response[indexes[is_kept]] = outputs[is_near, neighbour][is_kept]
    return response


@lru_cache(maxsize=32)
def _block_filter(up: int, down: int, reach: int, first: int, shape: tuple[int, int]) -> NDArray[np.float32]:
    """What makes a block of outputs, the first ``first`` behind the window's beginning, of a window [n_out, n_in]."""
    response = _impulse_response(up, down, 2 * reach)  # before the block the window holds more than is asked of it
    distances = np.arange(shape[1]) * up - (first + np.arange(shape[0]))[:, None] * down
    indexes = distances + 2 * reach * up
    is_reached = (indexes >= 0) & (indexes < len(response))
    return np.where(is_reached, response[np.clip(indexes, 0, len(response) - 1)], np.float32(0))


class Resampler:
    """One stream of mono audio on its way from ``rate_hz`` to 16 kHz."""

    def __init__(self, rate_hz: int) -> None:
        """``rate_hz`` is 1 or more, though far below 1 kHz a block is slow; at 16 kHz samples pass as they are."""
        divisor = math.gcd(rate_hz, SAMPLE_RATE_HZ)
        self._rate_hz = rate_hz
        self._up, self._down = SAMPLE_RATE_HZ // divisor, rate_hz // divisor
        self._reach = math.ceil(REACH_SAMPLES * max(1.0, rate_hz / SAMPLE_RATE_HZ))  # input samples
        self._block_samples = SHORT_BLOCK_SAMPLES if rate_hz < SAMPLE_RATE_HZ else BLOCK_SAMPLES
        self._n_in = 0
        self._n_out = 0
        self._buffer_start = self._window(0).start  # input position of the buffer's first sample
        self._buffer: NDArray[np.float32] = np.zeros(-self._buffer_start, dtype=np.float32)  # begins with silence

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
        n_whole_blocks = (self._n_in - self._reach) * self._up // (self._down * self._block_samples)
        return self._advance_to(n_whole_blocks * self._block_samples)

    def flush(self) -> NDArray[np.float32]:
        """The output up to the end of the input so far, as if silence followed. The stream may go on behind it.

        Only the last few samples given now differ from those that more input would have made; those to come know the
        true past, and none is left out or given twice.
        """
        if self._up == self._down:
            return np.zeros(0, dtype=np.float32)
        end = self.output_position(self._n_in)
        n_silent = self._window(end // self._block_samples).stop - self._n_in
        self._buffer = np.concatenate((self._buffer, np.zeros(n_silent, dtype=np.float32)))
        output = self._advance_to(end)
        self._buffer = self._buffer[: self._n_in - self._buffer_start]
        return output

    def _advance_to(self, end: int) -> NDArray[np.float32]:
        """Output samples up to ``end``; forgets the input that none of those to come needs."""
        parts = [np.zeros(0, dtype=np.float32)]
        while self._n_out < end:
            block_index, n_given = divmod(self._n_out, self._block_samples)
            part = self._block(block_index)[n_given : n_given + end - self._n_out]
            parts.append(part)
            self._n_out += len(part)
        n_used = self._window(self._n_out // self._block_samples).start - self._buffer_start
        self._buffer = self._buffer[n_used:]
        self._buffer_start += n_used
        return np.concatenate(parts)

    def _block(self, block_index: int) -> NDArray[np.float32]:
        """Output samples of a block, [block_samples]."""
        window = self._window(block_index)
        samples = self._buffer[window.start - self._buffer_start : window.stop - self._buffer_start]
        first = block_index * self._block_samples - self.output_position(window.start)
        if self._down <= MAX_FILTER_DOWN:
            shape = (self._block_samples, len(samples))
            made: NDArray[np.float32] = _block_filter(self._up, self._down, self._reach, first, shape) @ samples
            return made
        output: NDArray[np.float32] = soxr.resample(samples, self._rate_hz, SAMPLE_RATE_HZ, quality="HQ")
        return output[first : first + self._block_samples]

    def _window(self, block_index: int) -> range:
        """Input positions that a block is made from.

        The first is one that an output sample falls on exactly, since soxr's clock begins with its input. Usual rates
        have one every 40 ms or oftener, the oddest one a second: a block takes up to 18 times as long there.
        """
        first = block_index * self._block_samples
        start = (self.input_position(first) - self._reach) // self._down * self._down
        return range(start, self.input_position(first + self._block_samples) + self._reach)
