"""Opus packets out of WebM and Ogg, as the bytes come: what browsers record and encoders send live. Pure.

Knows as much of both containers as that takes: elements and blocks (RFC 8794, RFC 9559), pages and lacing (RFC 3533,
RFC 7845). Does not know codecs, clocks or sockets. ``push`` raises ``ContainerError`` for what can't be read.
"""

import struct
from dataclasses import dataclass

MAX_ELEMENT_BYTES = 1 << 20  # of what is looked into; more is no live audio
MAX_PACKET_BYTES = 1 << 16  # far above the longest that Opus has
MAX_TRACKS = 16
_MAX_NAME_BYTES, _MAX_HEAD_BYTES = 32, 1 << 10  # of a codec: as much as is kept
OPUS_CODEC = "libopus"  # FFmpeg's name
OPUS_RATE_HZ = 48_000  # of its clock, whatever was recorded


_NS_PER_S = 1_000_000_000


class ContainerError(Exception):
    """The bytes are not such a container, or hold something else than Opus; the message says what was seen."""


@dataclass(frozen=True, slots=True)
class Packet:
    """A codec's packet, and where the container says that its sound begins: samples from wherever it counts."""

    data: bytes
    at_sample: int
    n_samples: int  # how long its sound is


def opus_samples(packet: bytes) -> int:
    """How long a packet's sound is at 48 kHz, by its first byte or two (RFC 6716, section 3.1)."""
    if not packet:
        return 0
    config, code = packet[0] >> 3, packet[0] & 3
    if config < 12:  # SILK
        frame_samples = (480, 960, 1_920, 2_880)[config & 3]
    elif config < 16:  # both
        frame_samples = (480, 960)[config & 1]
    else:  # CELT
        frame_samples = (120, 240, 480, 960)[config & 3]
    n_frames = (1, 2, 2, packet[1] & 0x3F if len(packet) > 1 else 0)[code]
    return frame_samples * n_frames


class WebmOpus:
    """The packets of the first Opus track. Clusters and segments may be of unknown size, as recorders write them."""

    codec, rate_hz, config = OPUS_CODEC, OPUS_RATE_HZ, b""
    pre_skip_samples = 0  # of silence that the encoder put before the sound, at 48 kHz; known with the first packet

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._n_to_skip = 0
        self._codecs: dict[int, tuple[str, bytes]] = {}  # by track: name, and what its decoder is told
        self._entry = _Entry()
        self._track: int | None = None
        self._tick_ns = 1_000_000  # of the time codes
        self._cluster_ticks = 0

    def push(self, data: bytes) -> list[Packet]:
        """The packets that ``data`` completes."""
        self._buffer += data
        packets: list[Packet] = []
        while (element := self._next_element()) is not None:
            kind, body = element
            if (packet := self._take(kind, body)) is not None:
                packets.append(packet)
        return packets

    def _next_element(self) -> tuple[int, bytes] | None:
        """The next element: one of those looked into whole, of one that holds others its beginning only."""
        skipped = min(self._n_to_skip, len(self._buffer))
        del self._buffer[:skipped]
        self._n_to_skip -= skipped
        kind = _number(self._buffer, 0, keeps_marker=True)
        size = None if kind is None else _number(self._buffer, kind[1], keeps_marker=False)
        if kind is None or size is None:
            return None
        begin = size[1]
        if kind[0] in _MASTERS:
            del self._buffer[:begin]
            return kind[0], b""
        if kind[0] not in _LEAVES:
            del self._buffer[:begin]
            self._n_to_skip = size[0]
            return kind[0], b""
        if size[0] > MAX_ELEMENT_BYTES:
            raise ContainerError(f"an element of the WebM stream has {size[0]} bytes")
        if len(self._buffer) < begin + size[0]:
            return None
        body = bytes(self._buffer[begin : begin + size[0]])
        del self._buffer[: begin + size[0]]
        return kind[0], body

    def _take(self, kind: int, body: bytes) -> Packet | None:
        match kind:
            case 0xAE:  # TrackEntry
                self._entry = _Entry()
            case 0xD7:  # TrackNumber
                self._entry.number = int.from_bytes(body, "big")
            case 0x86:  # CodecID
                self._entry.codec = body[:_MAX_NAME_BYTES].decode("ascii", "backslashreplace")
            case 0x63A2:  # CodecPrivate
                self._entry.head = body[:_MAX_HEAD_BYTES]
            case 0xA3 | 0xA1:  # SimpleBlock, Block
                return self._block(body)
            case 0x2AD7B1:  # TimestampScale
                self._tick_ns = min(int.from_bytes(body[:8], "big"), _NS_PER_S)
                return None
            case 0xE7:  # Timestamp, of a cluster
                self._cluster_ticks = int.from_bytes(body[:8], "big")
                return None
            case _:
                return None
        if self._entry.number is not None:
            self._codecs[self._entry.number] = self._entry.codec, self._entry.head
            if len(self._codecs) > MAX_TRACKS:
                raise ContainerError(f"the WebM stream has more than {MAX_TRACKS} tracks")
        return None

    def _block(self, body: bytes) -> Packet | None:
        if self._track is None:
            self._track = self._opus_track()
        track = _number(bytearray(body[:8]), 0, keeps_marker=False)
        if track is None or len(body) < track[1] + 3:
            raise ContainerError("a block of the WebM stream is cut")
        if track[0] != self._track:
            return None
        if body[track[1] + 2] & 0x06:
            raise ContainerError("the WebM stream laces its blocks, which is not read live")
        ticks = self._cluster_ticks + int(struct.unpack_from(">h", body, track[1])[0])
        data = body[track[1] + 3 :]
        return Packet(data, ticks * self._tick_ns * OPUS_RATE_HZ // _NS_PER_S, opus_samples(data))

    def _opus_track(self) -> int:
        for number, (codec, head) in self._codecs.items():
            if codec == "A_OPUS":
                self.pre_skip_samples = _pre_skip(head)
                return number
        named = ", ".join(codec for codec, _ in self._codecs.values()) or "nothing"
        raise ContainerError(f"the WebM stream has no Opus, but {named}")


class _Entry:
    """A track in the making."""

    number: int | None = None
    codec: str = ""
    head: bytes = b""


_MASTERS = frozenset(
    {0x18538067, 0x1549A966, 0x1F43B675, 0x1654AE6B, 0xAE, 0xA0}
)  # Segment, Info, Cluster, Tracks, TrackEntry, BlockGroup
_LEAVES = frozenset({0xD7, 0x86, 0x63A2, 0xA3, 0xA1, 0x2AD7B1, 0xE7})


def _number(buffer: bytearray, at: int, *, keeps_marker: bool) -> tuple[int, int] | None:
    """A number of variable length and the place behind it, ``None`` if it is not whole yet."""
    if at >= len(buffer):
        return None
    n_bytes = 9 - buffer[at].bit_length()
    if n_bytes > 8:
        raise ContainerError("this is no WebM stream")
    if len(buffer) < at + n_bytes:
        return None
    value = int.from_bytes(buffer[at : at + n_bytes], "big")
    return value if keeps_marker else value & ((1 << 7 * n_bytes) - 1), at + n_bytes


class OggOpus:
    """The packets of an Opus stream in Ogg pages; another may follow when it ends."""

    codec, rate_hz, config = OPUS_CODEC, OPUS_RATE_HZ, b""
    pre_skip_samples = 0  # as of ``WebmOpus``

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._packet = b""  # that goes on in the next page
        self._n_headers = 0  # of the stream, taken

    def push(self, data: bytes) -> list[Packet]:
        """The packets that ``data`` completes."""
        self._buffer += data
        packets: list[Packet] = []
        while (page := self._next_page()) is not None:
            packets += self._timed(page, [packet for packet in self._packets_of(page) if self._is_audio(packet)])
        return packets

    @staticmethod
    def _timed(page: "_Page", packets: list[bytes]) -> list[Packet]:
        """A page says where the last packet that it completes ends."""
        at_sample = page.end_sample - sum(map(opus_samples, packets))
        timed: list[Packet] = []
        for packet in packets:
            timed.append(Packet(packet, at_sample, opus_samples(packet)))
            at_sample += timed[-1].n_samples
        return timed

    def _next_page(self) -> "_Page | None":
        if not bytes(self._buffer[:4]).startswith(b"OggS"[: len(self._buffer)]):
            raise ContainerError("this is no Ogg stream")
        if len(self._buffer) < 27 or len(self._buffer) < 27 + self._buffer[26]:
            return None
        body_at = 27 + self._buffer[26]
        lacing = bytes(self._buffer[27:body_at])
        end = body_at + sum(lacing)
        if len(self._buffer) < end:
            return None
        (end_sample,) = struct.unpack_from("<q", self._buffer, 6)
        page = _Page(self._buffer[5], int(end_sample), lacing, bytes(self._buffer[body_at:end]))
        del self._buffer[:end]
        return page

    def _packets_of(self, page: "_Page") -> list[bytes]:
        if page.flags & 0x02:  # a stream begins
            self._n_headers = 0
        if not page.flags & 0x01:  # nothing goes on from the page before
            self._packet = b""
        packets: list[bytes] = []
        at = 0
        for size in page.lacing:
            self._packet += page.body[at : at + size]
            at += size
            if len(self._packet) > MAX_PACKET_BYTES:
                raise ContainerError(f"a packet of the Ogg stream has more than {MAX_PACKET_BYTES} bytes")
            if size < 255:
                packets.append(self._packet)
                self._packet = b""
        return packets

    def _is_audio(self, packet: bytes) -> bool:
        """Whether a packet is audio; the first two of a stream are not."""
        if self._n_headers == 0:
            if not packet.startswith(b"OpusHead"):
                raise ContainerError(f"the Ogg stream has no Opus: it begins with {packet[:8]!r}")
            self.pre_skip_samples = _pre_skip(packet)
        self._n_headers += 1
        return self._n_headers > 2


@dataclass(frozen=True, slots=True)
class _Page:
    """A page of Ogg."""

    flags: int
    end_sample: int  # of the sound of the packets that it completes, at 48 kHz; -1 where it completes none
    lacing: bytes
    body: bytes


def _pre_skip(head: bytes) -> int:
    """Of the header that Opus has in every container."""
    return int(struct.unpack_from("<H", head, 10)[0]) if head.startswith(b"OpusHead") and len(head) >= 12 else 0
