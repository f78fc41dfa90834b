"""Bytes of raw audio to floats: the encodings that a client may send, and what it must declare about them.

Knows sample formats, channel layouts and G.711. Does not know packets (a caller hands over whole sample frames), sample
rates beyond their range, or files.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

MIN_RATE_HZ = 8_000
MAX_RATE_HZ = 48_000
MAX_CHANNELS = 8


@dataclass(frozen=True, slots=True)
class _Encoding:
    n_bytes: int  # of one sample
    decode: Callable[[bytes], NDArray[np.float32]]  # whole samples to floats [n_samples]


def _from_integers(data: bytes, dtype: str, full_scale: float) -> NDArray[np.float32]:
    return np.frombuffer(data, dtype=dtype).astype(np.float32) / np.float32(full_scale)


def _from_s24le(data: bytes) -> NDArray[np.float32]:
    padded = np.zeros((len(data) // 3, 4), dtype=np.uint8)  # 24 bits as the upper ones of 32
    padded[:, 1:] = np.frombuffer(data, dtype=np.uint8).reshape(-1, 3)
    return _from_integers(padded.tobytes(), "<i4", 2.0**31)


def _mulaw_table() -> NDArray[np.float32]:
    """The 256 values of μ-law: all bits inverted; sign, 3 bits of segment, 4 of step (ITU-T G.711, table 2)."""
    code = ~np.arange(256, dtype=np.uint8)
    segment, step = (code >> 4 & 7).astype(np.int32), (code & 15).astype(np.int32)
    magnitude = ((2 * step + 33) << segment) - 33  # 13 bits and sign: at most 8031
    return (np.where(code & 0x80, -magnitude, magnitude) / 8192.0).astype(np.float32)


def _alaw_table() -> NDArray[np.float32]:
    """The 256 values of A-law: even bits inverted; sign, 3 bits of segment, 4 of step (ITU-T G.711, table 1)."""
    code = np.arange(256, dtype=np.uint8) ^ np.uint8(0x55)
    segment, step = (code >> 4 & 7).astype(np.int32), (code & 15).astype(np.int32)
    magnitude = np.where(segment == 0, 2 * step + 1, (2 * step + 33) << np.maximum(segment - 1, 0))  # at most 4032
    return (np.where(code & 0x80, magnitude, -magnitude) / 4096.0).astype(np.float32)


_MULAW = _mulaw_table()
_ALAW = _alaw_table()

_ENCODINGS = {
    "s16le": _Encoding(2, lambda data: _from_integers(data, "<i2", 2.0**15)),
    "s24le": _Encoding(3, _from_s24le),
    "s32le": _Encoding(4, lambda data: _from_integers(data, "<i4", 2.0**31)),
    "f32le": _Encoding(4, lambda data: np.frombuffer(data, dtype="<f4").astype(np.float32)),
    "mulaw": _Encoding(1, lambda data: _MULAW[np.frombuffer(data, dtype=np.uint8)]),
    "alaw": _Encoding(1, lambda data: _ALAW[np.frombuffer(data, dtype=np.uint8)]),
    "s16be": _Encoding(2, lambda data: _from_integers(data, ">i2", 2.0**15)),
}
ENCODINGS = tuple(_ENCODINGS)


@dataclass(frozen=True, slots=True)
class AudioFormat:
    """What raw audio bytes are. Channels are interleaved; ``channel`` picks one, ``None`` mixes all down."""

    encoding: str  # one of ENCODINGS
    sample_rate_hz: int  # MIN_RATE_HZ..MAX_RATE_HZ
    n_channels: int = 1  # 1..MAX_CHANNELS
    channel: int | None = None  # 0..n_channels - 1

    def __post_init__(self) -> None:
        """Raises ``ValueError`` that says what came and what is accepted."""
        if self.encoding not in _ENCODINGS:
            raise ValueError(f"encoding {self.encoding!r} is not known; accepted are {', '.join(ENCODINGS)}")
        _check_integer("sample_rate_hz", self.sample_rate_hz, MIN_RATE_HZ, MAX_RATE_HZ, " Hz")
        _check_integer("channels", self.n_channels, 1, MAX_CHANNELS, "")
        if self.channel is not None:
            _check_integer("channel", self.channel, 0, self.n_channels - 1, f" for {self.n_channels} channels, or null")

    @property
    def frame_bytes(self) -> int:
        """Bytes of one sample of every channel."""
        return _ENCODINGS[self.encoding].n_bytes * self.n_channels


def _check_integer(name: str, value: int, low: int, high: int, unit: str) -> None:
    if type(value) is not int or not low <= value <= high:  # bool is an int to isinstance
        raise ValueError(f"{name} is {value!r}; it must be an integer in {low}..{high}{unit}")


@dataclass(frozen=True, slots=True, eq=False)
class Pcm:
    """Decoded mono audio at its own rate, and what had to be mended in it. Counts are per channel sample."""

    samples: NDArray[np.float32]  # [n_frames], finite, -1..1
    n_non_finite: int  # NaN and infinities, taken as 0
    n_clipped: int  # beyond -1..1


def decode(data: bytes, audio_format: AudioFormat) -> Pcm:
    """Decode whole sample frames.

    Floats beyond -1..1 are clipped, since everything downstream relies on that range and a stream can't be scaled by a
    peak that is still to come; integers scaled as floats show up in ``n_clipped``.

    Raises:
        ValueError: if ``data`` ends inside a sample frame.
    """
    if len(data) % audio_format.frame_bytes:
        raise ValueError(f"{len(data)} bytes are no whole number of {audio_format.frame_bytes}-byte sample frames")
    samples = _ENCODINGS[audio_format.encoding].decode(data).reshape(-1, audio_format.n_channels)
    if audio_format.encoding == "f32le":
        return mended(samples, audio_format.channel)
    return Pcm(_mono(samples, audio_format.channel), 0, 0)


def mended(samples: NDArray[np.float32], channel: int | None) -> Pcm:
    """Any floats [n_frames, n_channels] made finite, clipped to -1..1 and mono."""
    if channel is not None:
        samples = samples[:, channel, None]
    finite = np.isfinite(samples)
    samples = np.where(finite, samples, np.float32(0))
    n_clipped = int(np.count_nonzero(np.abs(samples) > 1))
    mono = _mono(np.clip(samples, -1, 1), None)
    return Pcm(mono, finite.size - int(np.count_nonzero(finite)), n_clipped)


def _mono(samples: NDArray[np.float32], channel: int | None) -> NDArray[np.float32]:
    if channel is None and samples.shape[1] > 1:
        samples = samples.mean(axis=1, dtype=np.float32, keepdims=True)
    return np.ascontiguousarray(samples[:, channel or 0])
