"""Live audio that is no raw samples → mono samples at 16 kHz: Opus, AAC and G.722, bare or in a container; WAV as well.

Knows codecs (PyAV's, an optional package) and how containers are told apart by their first bytes. Does not know
protocols. What one call leaves over is kept for the next, so that any cut of a stream gives the same samples.
"""

import math
import struct
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gateway.containers import OPUS_RATE_HZ, ContainerError, OggOpus, Packet, WebmOpus
from gateway.fragments import FragmentedMp4
from gateway.ingest import Ingest
from gateway.pcm import AudioFormat
from gateway.resample import Resampler
from vad.audio import SAMPLE_RATE_HZ

ACCEPTED = "WAV, and Opus in WebM or Ogg, or AAC in fragmented MP4, where senseway[media] is installed"
MAX_WAV_HEADER_BYTES = 1 << 16
MAX_PUSH_S = 20  # of a codec in one call: two bytes may stand for 0.12 s, and whoever decodes has others to serve
GAP_TOLERANCE_S = 0.1  # by which a packet may be later than the end of the one before it
MAX_GAP_S = 60  # a longer one is a pause of the recorder or a clock that jumped, not silence
_DRIFT_SHARE = 0.01  # of a deviation that is no gap yet: two clocks may differ
_SNIFF_BYTES, _MAGIC_BYTES = 8, 4
_G722_RATE_HZ = 16_000

Samples = NDArray[np.float32]  # [n], mono at 16 kHz


class LiveAudioError(Exception):
    """Bytes that can't be decoded; the message says what was seen and what is accepted."""


class LiveDecoder(Protocol):
    """One stream."""

    def push(self, data: bytes) -> Samples:
        """The samples that ``data`` completes. Raises ``LiveAudioError``."""

    def flush(self) -> Samples:
        """Those that wait for more, as if silence followed. The stream may go on."""


def has_codecs() -> bool:
    """Whether Opus and G.722 can be decoded here."""
    return find_spec("av") is not None


class PacketDecoder:
    """Each push is one packet of a codec, as RTP has them. One that can't be read counts as lost."""

    def __init__(self, codec: str, rate_hz: int, config: bytes = b"") -> None:
        """``codec`` by FFmpeg's name, its samples at ``rate_hz``; ``config`` is what a container tells the decoder."""
        import av

        self._errors = (av.FFmpegError, ValueError)
        self._packet = av.Packet
        self._codec = av.CodecContext.create(codec, "r")
        self._codec.sample_rate, self._codec.layout = rate_hz, "mono"  # type: ignore[attr-defined]  # an audio codec's
        if config:
            self._codec.extradata = config
        self._to_floats = av.AudioResampler(format="flt", layout="mono", rate=rate_hz)
        self._resampler = Resampler(rate_hz)

    def push(self, data: bytes) -> Samples:
        """See ``LiveDecoder``."""
        return self._resampler.push(self.decoded(data))

    def flush(self) -> Samples:
        """See ``LiveDecoder``."""
        return self._resampler.flush()

    def decoded(self, data: bytes) -> NDArray[np.float32]:
        """Samples [n] at the codec's own rate."""
        try:
            frames = self._codec.decode(self._packet(data)) if data else []  # type: ignore[attr-defined]
            parts = [part.to_ndarray()[0] for frame in frames for part in self._to_floats.resample(frame)]
        except self._errors:
            return np.zeros(0, np.float32)
        return np.concatenate([np.zeros(0, np.float32), *parts])


def opus_packets() -> LiveDecoder:
    """Bare packets of Opus, one for each push."""
    return PacketDecoder("libopus", OPUS_RATE_HZ)


def g722() -> LiveDecoder:
    """Bytes of G.722 at 64 kbit/s."""
    return PacketDecoder("g722", _G722_RATE_HZ)


class Container(Protocol):
    """What packets are found in; what it says of their codec is known with the first of them."""

    @property
    def codec(self) -> str:
        """FFmpeg's name."""

    @property
    def rate_hz(self) -> int:
        """Of the packets' clock."""

    @property
    def config(self) -> bytes:
        """What the decoder is told."""

    @property
    def pre_skip_samples(self) -> int:
        """Sound that the encoder put before the recording."""

    def push(self, data: bytes) -> list[Packet]:
        """The packets that ``data`` completes. Raises ``ContainerError``."""


class Contained:
    """A codec in a container."""

    def __init__(self, container: Container) -> None:
        self._container = container
        self._decoder: PacketDecoder | None = None
        self._rate_hz = OPUS_RATE_HZ
        self._resampler = Resampler(OPUS_RATE_HZ)
        self._n_skipped = 0
        self._due_sample: float | None = None  # where the next packet begins if nothing is left out

    def push(self, data: bytes) -> Samples:
        """See ``LiveDecoder``."""
        try:
            packets = self._container.push(data)
        except ContainerError as error:
            raise LiveAudioError(str(error)) from error
        if packets and self._decoder is None:
            self._rate_hz = self._container.rate_hz
            self._decoder = PacketDecoder(self._container.codec, self._rate_hz, self._container.config)
            self._resampler = Resampler(self._rate_hz)
        if sum(packet.n_samples for packet in packets) > MAX_PUSH_S * self._rate_hz:
            raise LiveAudioError(f"a frame of more than {MAX_PUSH_S} s of sound; send it in shorter ones")
        parts = [np.zeros(0, np.float32)]
        n_silent = 0
        for packet in packets:
            n_silent += (gap_samples := self._gap_before(packet))
            if n_silent > MAX_GAP_S * self._rate_hz:
                raise LiveAudioError(f"a frame with more than {MAX_GAP_S} s left out; send it in shorter ones")
            if gap_samples:
                parts.append(self._silence(gap_samples))
            assert self._decoder is not None
            samples = self._decoder.decoded(packet.data)
            if not len(samples):  # a damaged one is as long as it says
                samples = np.zeros(packet.n_samples, np.float32)
            parts.append(self._resampler.push(self._without_pre_skip(samples)))
        return np.concatenate(parts)

    def _gap_before(self, packet: Packet) -> int:
        """Samples that the recorder left out before a packet, where it found silence say; 0 for none."""
        late_samples = 0.0 if self._due_sample is None else packet.at_sample - self._due_sample
        is_gap = GAP_TOLERANCE_S * self._rate_hz < late_samples <= MAX_GAP_S * self._rate_hz
        is_jump = self._due_sample is None or is_gap or abs(late_samples) > GAP_TOLERANCE_S * self._rate_hz
        begin = packet.at_sample if is_jump else packet.at_sample - (1 - _DRIFT_SHARE) * late_samples
        self._due_sample = begin + packet.n_samples
        return int(late_samples) if is_gap else 0

    def _silence(self, n_samples: int) -> Samples:
        """As many samples of silence, for next to nothing: a new resampler goes on behind them."""
        n_before = self._resampler.n_in
        n_over = (n_before + n_samples) % (self._rate_hz // math.gcd(self._rate_hz, SAMPLE_RATE_HZ))
        n_after = n_before + n_samples - n_over  # an output falls on it
        rest = self._resampler.flush()
        n_out = self._resampler.output_position(n_after) - self._resampler.output_position(n_before)
        self._resampler = Resampler(self._rate_hz)
        return np.concatenate([rest, np.zeros(n_out, np.float32), self._resampler.push(np.zeros(n_over, np.float32))])

    def flush(self) -> Samples:
        """See ``LiveDecoder``."""
        return self._resampler.flush()

    def _without_pre_skip(self, samples: NDArray[np.float32]) -> NDArray[np.float32]:
        n = min(len(samples), self._container.pre_skip_samples - self._n_skipped)
        self._n_skipped += n
        return samples[n:]


class LiveWav:
    """A WAV file whose header comes first, whatever size it says that there will be."""

    def __init__(self) -> None:
        self._head = b""
        self._ingest: Ingest | None = None

    def push(self, data: bytes) -> Samples:
        """See ``LiveDecoder``."""
        if self._ingest is not None:
            return self._ingest.push(data).samples
        self._head += data
        found = _wav_data(self._head)
        if found is None:
            return np.zeros(0, np.float32)
        audio_format, at = found
        self._ingest = Ingest(audio_format)
        return self._ingest.push(self._head[at:]).samples

    def flush(self) -> Samples:
        """See ``LiveDecoder``."""
        return np.zeros(0, np.float32) if self._ingest is None else self._ingest.flush().samples


_WAV_ENCODINGS = {
    (1, 16): "s16le",
    (1, 24): "s24le",
    (1, 32): "s32le",
    (3, 32): "f32le",
    (6, 8): "alaw",
    (7, 8): "mulaw",
}
_EXTENSIBLE = 0xFFFE


def _wav_data(head: bytes) -> tuple[AudioFormat, int] | None:
    """The format and where the samples begin, ``None`` while the header is not whole."""
    at, audio_format = 12, None
    while len(head) >= at + 8:
        name, size = struct.unpack_from("<4sI", head, at)
        if name == b"data":
            if audio_format is None:
                raise LiveAudioError("the WAV stream has no format before its samples")
            return audio_format, at + 8
        if name == b"fmt " and len(head) >= at + 8 + size:
            audio_format = _wav_format(head[at + 8 : at + 8 + size])
        at += 8 + size + size % 2
    if len(head) > MAX_WAV_HEADER_BYTES or at > MAX_WAV_HEADER_BYTES:
        raise LiveAudioError("the WAV stream has no samples in its first 64 KiB")
    return None


def _wav_format(chunk: bytes) -> AudioFormat:
    if len(chunk) < 16:
        raise LiveAudioError("the WAV stream's format is cut")
    tag, n_channels, rate_hz, _, _, n_bits = struct.unpack_from("<HHIIHH", chunk)
    if tag == _EXTENSIBLE and len(chunk) >= 26:
        (tag,) = struct.unpack_from("<H", chunk, 24)
    encoding = _WAV_ENCODINGS.get((tag, n_bits))
    if encoding is None:
        raise LiveAudioError(f"the WAV stream has {n_bits} bits of coding {tag}, which is not read live")
    try:
        return AudioFormat(encoding, rate_hz, n_channels)
    except ValueError as error:
        raise LiveAudioError(f"the WAV stream: {error}") from error


class Sniffed:
    """Whatever its first bytes say that it is."""

    def __init__(self, known: Mapping[bytes, Callable[[], LiveDecoder]] | None = None) -> None:
        """``known``: first bytes and what decodes them; all that is read here unless given."""
        self._known = KNOWN if known is None else known
        self._head = b""
        self._decoder: LiveDecoder | None = None

    def push(self, data: bytes) -> Samples:
        """See ``LiveDecoder``."""
        if self._decoder is not None:
            return self._decoder.push(data)
        self._head += data
        make = self._known.get(self._head[:_MAGIC_BYTES]) or self._known.get(self._head[_MAGIC_BYTES:_SNIFF_BYTES])
        if make is None and len(self._head) < _SNIFF_BYTES:
            return np.zeros(0, np.float32)
        if make is None:
            seen = self._head[:8].hex(" ")
            raise LiveAudioError(f"the stream begins with {seen}, no container that is read live: {ACCEPTED}")
        self._decoder = make()
        return self._decoder.push(self._head)

    def flush(self) -> Samples:
        """See ``LiveDecoder``."""
        return np.zeros(0, np.float32) if self._decoder is None else self._decoder.flush()


def _contained(container: type[WebmOpus] | type[OggOpus] | type[FragmentedMp4]) -> LiveDecoder:
    if not has_codecs():
        raise LiveAudioError(f"compressed sound is not decoded here; accepted are {ACCEPTED}")
    return Contained(container())


def webm() -> LiveDecoder:
    """Opus in WebM. Raises ``LiveAudioError`` where it can't be decoded."""
    return _contained(WebmOpus)


def ogg() -> LiveDecoder:
    """Opus in Ogg. Raises ``LiveAudioError`` where it can't be decoded."""
    return _contained(OggOpus)


def mp4() -> LiveDecoder:
    """AAC or Opus in fragmented MP4. Raises ``LiveAudioError`` where it can't be decoded."""
    return _contained(FragmentedMp4)


KNOWN: Mapping[bytes, Callable[[], LiveDecoder]] = {
    b"RIFF": LiveWav,
    b"OggS": ogg,
    b"\x1aE\xdf\xa3": webm,
    b"ftyp": mp4,
}
