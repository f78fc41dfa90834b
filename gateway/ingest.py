"""A client's bytes to mono audio at 16 kHz: packets of any size in, samples on one exact clock out.

Knows the declared format, and keeps what a packet leaves over: bytes of a cut sample, input that the resampler still
needs. Does not know sockets, messages or speech.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .pcm import ENCODINGS, AudioFormat, decode
from .resample import Resampler
from .suspicion import suspect, suspect_pace

__all__ = ["ENCODINGS", "AudioFormat", "Ingest", "IngestResult", "suspect", "suspect_pace"]


@dataclass(frozen=True, slots=True, eq=False)
class IngestResult:
    """What one call brought. Counts are of this call, but for ``input_samples_taken``."""

    samples: NDArray[np.float32]  # [n], mono, 16 kHz, finite, -1..1 but for a little overshoot of the resampler
    input_samples_taken: int  # whole sample frames since the stream began, at the client's rate
    n_non_finite: int = 0  # NaN and infinite input samples, taken as silence
    n_clipped: int = 0  # input samples beyond -1..1
    n_dropped_bytes: int = 0  # of a cut sample frame at a flush: kept for the next packet, lost if there is none


class Ingest:
    """One client's audio stream. Any cut of the bytes into packets gives the same samples, bit for bit."""

    def __init__(self, audio_format: AudioFormat) -> None:
        """The format is fixed for the life of the stream."""
        self.format = audio_format
        self._cut_frame = b""  # fewer bytes than a sample frame
        self._resampler = Resampler(audio_format.sample_rate_hz)

    @property
    def input_samples_taken(self) -> int:
        """Whole sample frames since the stream began, at the client's rate."""
        return self._resampler.n_in

    def push(self, data: bytes) -> IngestResult:
        """Take a packet of any length, zero included."""
        data = self._cut_frame + data
        n_whole_bytes = len(data) - len(data) % self.format.frame_bytes
        self._cut_frame = data[n_whole_bytes:]
        pcm = decode(data[:n_whole_bytes], self.format)
        samples = self._resampler.push(pcm.samples)
        return IngestResult(samples, self.input_samples_taken, pcm.n_non_finite, pcm.n_clipped)

    def flush(self) -> IngestResult:
        """The samples up to the end of the audio so far, as if silence followed. The stream may go on behind it.

        The clock isn't disturbed: whatever was flushed, sample j is the input at j / 16000 s.
        """
        samples = self._resampler.flush()
        return IngestResult(samples, self.input_samples_taken, n_dropped_bytes=len(self._cut_frame))

    def drop_cut_frame(self) -> None:
        """Forget the bytes of a cut sample frame: the next packet begins with a whole one."""
        self._cut_frame = b""
