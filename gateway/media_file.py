"""Containers that libsndfile does not read, MP4, WebM, AAC, AMR and Windows Media, by PyAV: an optional package.

Knows FFmpeg's names of formats and how frames become blocks of floats. A file is only ever opened as the format that
its first bytes say: FFmpeg, left to guess, would also read playlists, and fetch what they name.
"""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FORMATS: tuple[tuple[int, bytes, str, str], ...] = (  # offset, bytes, what they say, FFmpeg's name
    (4, b"ftyp", "an MP4 or M4A file", "mov"),
    (0, b"\x1aE\xdf\xa3", "a WebM or Matroska file", "matroska"),
    (0, b"\xff\xf1", "an AAC stream", "aac"),
    (0, b"\xff\xf9", "an AAC stream", "aac"),
    (0, b"#!AMR", "an AMR file", "amr"),
    (0, b"0&\xb2u", "a Windows Media file", "asf"),
)


class MediaError(Exception):
    """A file that PyAV can't read, from its beginning or from somewhere on."""


class MediaPackageMissingError(Exception):
    """PyAV is not installed."""


@dataclass(frozen=True, slots=True)
class Media:
    """An opened file. ``blocks`` [n, n_channels] raise ``MediaError`` where the file is damaged."""

    container: str
    coding: str
    sample_rate_hz: int
    n_channels: int
    blocks: Iterator[NDArray[np.float32]]


@contextmanager
def opened(file: io.RawIOBase | io.BytesIO, format_name: str, block_s: float) -> Iterator[Media]:
    """The first audio stream of ``file``, in blocks of ``block_s`` seconds or a frame more.

    Raises:
        MediaPackageMissingError: without PyAV.
        MediaError: for a file that is damaged at its beginning, or has no audio.
    """
    try:
        import av
    except ImportError as error:
        raise MediaPackageMissingError("senseway[media] is not installed") from error
    try:
        container = av.open(file, "r", format=format_name, metadata_errors="replace")
    except (av.FFmpegError, ValueError) as error:
        raise MediaError(_reason(error)) from error
    with container:
        if not container.streams.audio:
            raise MediaError("it has no audio")
        stream = container.streams.audio[0]
        if stream.codec_context is None:  # whatever PyAV's types say
            raise MediaError("its audio has an unknown coding")
        coding = stream.codec_context.name
        n_channels, rate_hz = stream.codec_context.channels, stream.codec_context.sample_rate
        # Interleaved: PyAV 18.1 reads out of bounds where it makes one array of eight planes.
        to_floats = av.AudioResampler(format="flt", layout=stream.codec_context.layout, rate=rate_hz)

        def frames() -> Iterator[NDArray[np.float32]]:
            try:
                for frame in container.decode(stream):
                    for part in to_floats.resample(frame):
                        samples: NDArray[np.float32] = part.to_ndarray().astype(
                            np.float32, copy=False
                        )  # [1, n · n_channels]
                        yield samples.reshape(-1, n_channels)
            except (av.FFmpegError, ValueError) as error:
                raise MediaError(_reason(error)) from error

        yield Media(container.format.name, coding, rate_hz, n_channels, _gathered(frames(), round(block_s * rate_hz)))


def _gathered(frames: Iterator[NDArray[np.float32]], block_samples: int) -> Iterator[NDArray[np.float32]]:
    """Frames [n, n_channels] put together; what came before damage is given first."""
    waiting: list[NDArray[np.float32]] = []
    n_waiting = 0
    try:
        for frame in frames:
            waiting.append(frame)
            n_waiting += len(frame)
            if n_waiting >= block_samples:
                yield np.concatenate(waiting)
                waiting, n_waiting = [], 0
    except MediaError:
        if waiting:
            yield np.concatenate(waiting)
        raise
    if waiting:
        yield np.concatenate(waiting)


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error).rstrip(".")
