"""Audio files to mono audio at 16 kHz, whole or a block at a time.

Knows what libsndfile reads, what PyAV reads where it is installed (``media_file``), headerless audio whose format is
given, and what the first bytes of other files say. Does not know speech or the wire; a file gives the samples that a
stream of it would have given.
"""

import io
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import soundfile
from numpy.typing import NDArray

from . import media_file
from .pcm import AudioFormat, Pcm, decode, mended
from .resample import Resampler

ACCEPTED = (
    "WAV, FLAC, Ogg (Opus, Vorbis), MP3, AIFF, AU and CAF; where senseway[media] is installed MP4, M4A, WebM, AAC, AMR "
    "and WMA; and headerless audio if its format is given"
)
MIN_RATE_HZ = 1_000
MAX_RATE_HZ = 768_000
BLOCK_S = 0.1  # read at once; as much is lost in front of a damaged place

Source = str | os.PathLike[str] | BinaryIO

_NOT_READ = (  # offset, bytes and what they say of files that are likely to be tried
    (0, b"PK\x03\x04", "a ZIP archive"),
    (0, b"\x1f\x8b", "a gzip file"),
    (0, b"%PDF", "a PDF document"),
)
_READ = {
    b"RIFF": "WAV",
    b"RIFX": "WAV",
    b"fLaC": "FLAC",
    b"OggS": "Ogg",
    b"FORM": "AIFF",
    b".snd": "AU",
    b"caff": "CAF",
}
_HEAD_BYTES = 4096
_SIZE_UNKNOWN = b"\xff\xff\xff\xff"  # in a WAV header: read to the end of the file


class AudioFileError(Exception):
    """A file that can't be read as audio; the message says what was seen and what is accepted."""


class DamagedAudioError(AudioFileError):
    """A file that can be read up to a place; the message says where and why."""


@dataclass(frozen=True, slots=True)
class AudioInfo:
    """What a file said about itself, and what had to be mended."""

    container: str  # libsndfile's name, as "WAV"; "RAW" for headerless audio
    coding: str  # libsndfile's name, as "PCM_16"; the encoding of headerless audio
    sample_rate_hz: int
    n_channels: int
    n_non_finite: int  # NaN and infinite samples, taken as 0
    damage: str | None  # why only a part could be read


@dataclass(frozen=True, slots=True)
class _Opened:
    """A file that is known to be audio; ``blocks`` reads on from its start."""

    container: str
    coding: str
    sample_rate_hz: int
    n_channels: int
    blocks: Iterator[Pcm]


def read_audio(
    source: Source, *, raw: AudioFormat | None = None, channel: int | None = None
) -> tuple[NDArray[np.float32], AudioInfo]:
    """A whole file as mono samples [n] at 16 kHz, and its facts.

    ``source`` is a path or an open binary file; ``raw`` is the format of one without a header; ``channel`` picks one,
    ``None`` mixes all down. A damaged file gives the part that can be read, and ``damage`` is set. A file with nothing
    behind its header gives no samples.

    Raises:
        AudioFileError: if nothing can be read, or the channel isn't there.
        ValueError: if ``raw`` has no such channel.
        OSError: if the path can't be opened.
    """
    samples: list[NDArray[np.float32]] = []
    n_non_finite, damage = 0, None
    with _opened(source, BLOCK_S, raw, channel) as audio:
        resampler = Resampler(audio.sample_rate_hz)
        try:
            for block in audio.blocks:
                samples.append(resampler.push(block.samples))
                n_non_finite += block.n_non_finite
        except DamagedAudioError as error:
            if not resampler.n_in:
                raise
            damage = str(error)
        samples.append(resampler.flush())
        info = AudioInfo(audio.container, audio.coding, audio.sample_rate_hz, audio.n_channels, n_non_finite, damage)
    return np.concatenate(samples), info


def stream_audio(
    source: Source, *, block_s: float = BLOCK_S, raw: AudioFormat | None = None, channel: int | None = None
) -> Iterator[NDArray[np.float32]]:
    """The samples of ``read_audio`` in blocks of about ``block_s`` seconds, each read when it is asked for.

    Raises:
        AudioFileError: at the first block, as ``read_audio``.
        DamagedAudioError: behind the last good block.
        OSError: if the path can't be opened.
    """
    with _opened(source, block_s, raw, channel) as audio:
        resampler = Resampler(audio.sample_rate_hz)
        try:
            for block in audio.blocks:
                yield resampler.push(block.samples)
        except DamagedAudioError:
            yield resampler.flush()
            raise
        yield resampler.flush()


def has_header(data: bytes) -> bool:
    """Whether the first bytes are those of a file that is read here; two alone may be samples as well."""
    signatures = [(offset, signature) for offset, signature, *_ in media_file.FORMATS if len(signature) > 2]
    return data[:4] in _READ or any(data[offset:].startswith(signature) for offset, signature in signatures)


def n_channels_of(source: Source) -> int:
    """How many channels a file has. Raises as ``read_audio``."""
    with _opened(source, BLOCK_S, None, None) as audio:
        return audio.n_channels


@contextmanager
def _opened(source: Source, block_s: float, raw: AudioFormat | None, channel: int | None) -> Iterator[_Opened]:
    with _binary(source) as file:
        if raw is not None:
            raw = raw if channel is None else replace(raw, channel=channel)
            yield _Opened("RAW", raw.encoding, raw.sample_rate_hz, raw.n_channels, _raw_blocks(file, raw, block_s))
            return
        head = file.read(_HEAD_BYTES) or b""
        file.seek(0)
        if (known := _media_format(head)) is not None:
            with _media(file, known, channel, block_s) as audio:
                yield audio
            return
        with _sound_file(file, head) as sound:
            _check(sound.samplerate, sound.channels, channel)
            blocks = _sound_blocks(sound, channel, block_s)
            yield _Opened(sound.format, sound.subtype, sound.samplerate, sound.channels, blocks)


def _media_format(head: bytes) -> tuple[str, str] | None:
    """What PyAV would read these first bytes as, in words and by FFmpeg's name."""
    for offset, signature, seen, format_name in media_file.FORMATS:
        if head[offset:].startswith(signature):
            return seen, format_name
    return None


@contextmanager
def _media(
    file: io.RawIOBase | io.BytesIO, known: tuple[str, str], channel: int | None, block_s: float
) -> Iterator[_Opened]:
    seen, format_name = known
    try:
        with media_file.opened(file, format_name, block_s) as media:
            _check(media.sample_rate_hz, media.n_channels, channel)
            yield _Opened(
                media.container, media.coding, media.sample_rate_hz, media.n_channels, _media_blocks(media, channel)
            )
    except media_file.MediaPackageMissingError as error:
        raise AudioFileError(f"this is {seen}, which is not read here; accepted are {ACCEPTED}") from error
    except media_file.MediaError as error:
        raise AudioFileError(f"this is {seen} that can't be read ({error}); accepted are {ACCEPTED}") from error


def _media_blocks(media: media_file.Media, channel: int | None) -> Iterator[Pcm]:
    n_read = 0
    try:
        for block in media.blocks:
            n_read += len(block)
            yield mended(block, channel)
    except media_file.MediaError as error:
        raise _damaged(n_read / media.sample_rate_hz, str(error)) from error


def _binary(source: Source) -> io.RawIOBase | io.BytesIO:
    if isinstance(source, str | os.PathLike):
        return Path(source).open("rb", buffering=0)
    return io.BytesIO(source.read())


def _raw_blocks(file: io.RawIOBase | io.BytesIO, audio_format: AudioFormat, block_s: float) -> Iterator[Pcm]:
    """Headerless audio; bytes of a cut sample at the end are left out."""
    block_bytes = max(1, round(block_s * audio_format.sample_rate_hz)) * audio_format.frame_bytes
    while data := file.read(block_bytes):
        yield decode(data[: len(data) // audio_format.frame_bytes * audio_format.frame_bytes], audio_format)


def _sound_blocks(sound: soundfile.SoundFile, channel: int | None, block_s: float) -> Iterator[Pcm]:
    block_samples = max(1, round(block_s * sound.samplerate))
    full_scale = _full_scale(sound)
    for block in _blocks(sound, block_samples):
        yield mended(block / full_scale, channel)


def _blocks(sound: soundfile.SoundFile, block_samples: int) -> Iterator[NDArray[np.float32]]:  # [n, n_channels]
    n_read = 0
    while True:
        try:
            block = sound.read(block_samples, dtype="float32", always_2d=True)
        except soundfile.LibsndfileError as error:
            raise _damaged(n_read / sound.samplerate, _reason(error)) from error
        if not len(block):
            return
        n_read += len(block)
        yield block


def _damaged(at_s: float, reason: str) -> DamagedAudioError:
    return DamagedAudioError(f"the file is damaged about {at_s:.1f} s from its start: {reason}")


def _full_scale(sound: soundfile.SoundFile) -> np.float32:
    """What -1..1 became in a file of floats: 1, or more where somebody wrote integers or an amplified signal.

    The 99th percentile of the loudest block, so that a few stray values don't make a whole file silent.
    """
    if sound.subtype not in ("FLOAT", "DOUBLE") or not sound.seekable():
        return np.float32(1)
    loudest = 1.0
    for block in _blocks(sound, round(BLOCK_S * sound.samplerate)):
        finite = np.where(np.isfinite(block), np.abs(block), 0)
        loudest = max(loudest, float(np.percentile(finite, 99)))
    sound.seek(0)
    return np.float32(loudest)


def _check(rate_hz: int, n_channels: int, channel: int | None) -> None:
    if not MIN_RATE_HZ <= rate_hz <= MAX_RATE_HZ:
        raise AudioFileError(f"the sample rate is {rate_hz} Hz; accepted are {MIN_RATE_HZ}..{MAX_RATE_HZ} Hz")
    if channel is not None and not 0 <= channel < n_channels:
        raise AudioFileError(f"there is no channel {channel}; the file has 0..{n_channels - 1}")


def _sound_file(file: io.RawIOBase | io.BytesIO, head: bytes) -> soundfile.SoundFile:
    file = _with_data_size(file, head)
    try:
        # By descriptor where there is one: of a named file, soundfile would believe the suffix ".raw".
        return soundfile.SoundFile(file if isinstance(file, io.BytesIO) else file.fileno(), closefd=False)
    except soundfile.LibsndfileError as error:
        raise AudioFileError(f"{_what_was_seen(head, error)}; accepted are {ACCEPTED}") from error


def _with_data_size(file: io.RawIOBase | io.BytesIO, head: bytes) -> io.RawIOBase | io.BytesIO:
    """The file, or a copy that says "to the end" where a WAV writer never filled in the size of its data."""
    position = _data_size_position(head)
    if position is None or head[position : position + 4] != bytes(4) or head[position + 4 : position + 8] == b"LIST":
        return file
    content = file.read() or b""
    return io.BytesIO(content[:position] + _SIZE_UNKNOWN + content[position + 4 :])


def _data_size_position(head: bytes) -> int | None:
    """Where a WAV header holds the size of the data chunk."""
    if head[:4] != b"RIFF" or head[8:12] != b"WAVE":
        return None
    position = 12
    while position + 8 <= len(head):
        name, size = struct.unpack_from("<4sI", head, position)
        if name == b"data":
            return position + 4
        position += 8 + size + size % 2
    return None


def _what_was_seen(head: bytes, error: soundfile.LibsndfileError) -> str:
    if not head:
        return "the file is empty (0 bytes)"
    if head[:4] in _READ:
        return f"this is a {_READ[head[:4]]} file that can't be read ({_reason(error)})"
    for offset, signature, seen in _NOT_READ:
        if head[offset:].startswith(signature):
            return f"this is {seen}, which is not read"
    if _is_text(head):
        return "this is text"
    return f"the file has no known header (it begins with {head[:8].hex(' ')})"


def _reason(error: soundfile.LibsndfileError) -> str:
    return str(error.error_string).strip().removeprefix("Error : ").rstrip(".")


def _is_text(head: bytes) -> bool:
    text = head.decode("utf-8", errors="replace")
    return sum(not (char.isprintable() or char.isspace()) or char == "\ufffd" for char in text) < 0.02 * len(text)
