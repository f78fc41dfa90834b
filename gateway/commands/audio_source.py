"""Where `senseway stream` gets its audio: a file, standard input or a microphone, as packets in one declared format.

Knows files through ``audio_file`` and microphones through sounddevice. Does not pace and does not send.
"""

import asyncio
import io
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from gateway.client_session import AudioFormat
from gateway.commands.extras import how_to_install
from gateway.commands.failure import CommandError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PACKET_S = 0.02  # as telephony and browsers send
SAMPLE_RATE_HZ = 16_000  # what every model hears
DECODED = AudioFormat("s16le", SAMPLE_RATE_HZ)


@dataclass(frozen=True, slots=True)
class AudioSource:
    """Audio in packets of about ``PACKET_S``. A live source paces itself."""

    format: AudioFormat
    packets: AsyncIterator[bytes]
    is_live: bool


def open_source(name: str, *, raw: AudioFormat | None) -> AudioSource:
    """``mic``, ``-`` for standard input (headerless if ``raw`` is given), or the path of a file.

    Files are decoded, mixed down and resampled here, as the server would do.

    Raises:
        CommandError: if there is no such file or no microphone.
    """
    if name == "mic":
        return AudioSource(DECODED, _microphone(), is_live=True)
    if name == "-" and raw is not None:
        return AudioSource(raw, _piped(sys.stdin.buffer, raw), is_live=False)
    if raw is not None:
        raise CommandError("--encoding is for standard input; a file says what it is")
    if name == "-":
        return AudioSource(DECODED, _decoded(io.BytesIO(sys.stdin.buffer.read()), "standard input"), is_live=False)
    if not Path(name).is_file():
        raise CommandError(f"there is no file {name}; give an audio file, - for standard input, or mic")
    return AudioSource(DECODED, _decoded(Path(name), name), is_live=False)


async def _decoded(file: Path | BinaryIO, name: str) -> AsyncIterator[bytes]:
    for block in _blocks(file, name):
        yield as_s16le(block)


def _blocks(file: Path | BinaryIO, name: str) -> Iterator["NDArray[np.float32]"]:
    from gateway.audio_file import AudioFileError, stream_audio  # numpy, soxr, soundfile

    try:
        yield from stream_audio(file, block_s=PACKET_S)
    except AudioFileError as error:
        raise CommandError(f"{name}: {error}") from error


def as_s16le(samples: "NDArray[np.float32]") -> bytes:
    """Samples [n] in -1..1 as 16-bit integers, little-endian; what lies beyond is clipped."""
    import numpy as np

    return np.clip(np.round(samples * 32768.0), -32768, 32767).astype("<i2").tobytes()


async def _piped(pipe: BinaryIO, raw: AudioFormat) -> AsyncIterator[bytes]:
    size = max(1, round(PACKET_S * raw.sample_rate_hz)) * raw.frame_bytes
    while data := await asyncio.to_thread(_read_some, pipe, size):
        yield data


def _read_some(pipe: BinaryIO, size: int) -> bytes:
    """What the pipe has, up to ``size``, so that a live pipe is not held back until a packet is full."""
    return pipe.read1(size) if isinstance(pipe, io.BufferedReader) else pipe.read(size)


async def _microphone() -> AsyncIterator[bytes]:
    """The default microphone until Ctrl-C."""
    try:
        import sounddevice  # an optional extra
    except (ImportError, OSError) as error:  # OSError: the package is there, the system's PortAudio is not
        raise CommandError(
            f"no microphone support ({error}): {how_to_install('mic')}, and PortAudio from the system's packages"
            " (libportaudio2 on Debian and Ubuntu)"
        ) from error
    loop = asyncio.get_running_loop()
    packets: asyncio.Queue[bytes | None] = asyncio.Queue()

    def heard(data: object, n_samples: int, when: object, status: object) -> None:
        loop.call_soon_threadsafe(packets.put_nowait, bytes(data))  # type: ignore[call-overload]  # cffi's buffer

    loop.add_signal_handler(signal.SIGINT, packets.put_nowait, None)
    try:
        with sounddevice.RawInputStream(
            samplerate=SAMPLE_RATE_HZ,
            channels=1,
            dtype="int16",
            blocksize=round(PACKET_S * SAMPLE_RATE_HZ),
            callback=heard,
        ):
            print("listening; Ctrl-C ends", file=sys.stderr)
            while (packet := await packets.get()) is not None:
                yield packet
    except sounddevice.PortAudioError as error:
        raise CommandError(f"the microphone can't be opened: {error}") from error
    finally:
        loop.remove_signal_handler(signal.SIGINT)
