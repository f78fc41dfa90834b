"""Sound as other people's programs encode it, by PyAV."""

import io
from collections.abc import Mapping
from fractions import Fraction

import av
import numpy as np
from numpy.typing import NDArray

LAYOUTS = {1: "mono", 2: "stereo", 8: "7.1"}


FRAGMENTED = {"movflags": "empty_moov+default_base_moof", "frag_duration": "200000"}  # of MP4, as recorders write it


def encoded(
    samples: NDArray[np.float32], container: str, codec: str, rate_hz: int, options: Mapping[str, str] | None = None
) -> bytes:
    """A file of ``samples`` [n, n_channels]; ``options`` are FFmpeg's of the container."""
    file = io.BytesIO()
    layout = LAYOUTS[samples.shape[1]]
    with av.open(file, "w", format=container, options=dict(options or {})) as output:
        stream = output.add_stream(codec, rate=rate_hz, layout=layout)
        for frame in _frames(samples, stream.format, rate_hz):
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()


def packets(samples: NDArray[np.float32], codec: str, rate_hz: int) -> list[bytes]:
    """The bare packets of mono ``samples`` [n], 20 ms each."""
    context = av.CodecContext.create(codec, "w")
    context.sample_rate, context.layout, context.format = rate_hz, "mono", "s16"
    context.time_base = Fraction(1, rate_hz)
    found: list[bytes] = []
    for at in range(0, len(samples), rate_hz // 50):
        piece = np.pad(samples[at : at + rate_hz // 50], (0, max(0, rate_hz // 50 - len(samples[at:]))))
        for frame in _frames(piece[:, None], context.format, rate_hz):
            frame.pts = at
            found += [bytes(packet) for packet in context.encode(frame)]
    return found


def voiced(samples: NDArray[np.float32], rate_hz: int) -> NDArray[np.float32]:
    """``samples`` [n] at 16 kHz as a tone as loud at ``rate_hz``, for codecs leave out what does not swing."""
    t_s = np.arange(len(samples) * rate_hz // 16_000) / rate_hz
    level = samples[np.minimum((t_s * 16_000).astype(int), len(samples) - 1)]
    tone: NDArray[np.float32] = (level * np.sin(2 * np.pi * 400 * t_s)).astype(np.float32)
    return tone


def _frames(samples: NDArray[np.float32], audio_format: object, rate_hz: int) -> list[av.AudioFrame]:
    layout = LAYOUTS[samples.shape[1]]
    frame = av.AudioFrame.from_ndarray(np.ascontiguousarray(samples).reshape(1, -1), format="flt", layout=layout)
    frame.sample_rate = rate_hz
    return av.AudioResampler(format=audio_format, layout=layout, rate=rate_hz).resample(frame)
