"""AAC or Opus packets out of fragmented MP4, as the bytes come: what Safari records, and others when asked to. Pure.

Knows as much of ISO/IEC 14496-12 as that takes: one sound track, its description, and fragments of it. Does not know
codecs, clocks or sockets. ``push`` raises ``ContainerError`` for what can't be read.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

from gateway.containers import MAX_PACKET_BYTES, OPUS_RATE_HZ, ContainerError, Packet, opus_samples

MAX_BOX_BYTES = 1 << 22  # of what is looked into whole: some seconds of a recording with pictures
MAX_RUN_SAMPLES = 10_000  # of a fragment
AAC_FRAME_SAMPLES = 1_024
_AAC_RATES_HZ = (96_000, 88_200, 64_000, 48_000, 44_100, 32_000, 24_000, 22_050, 16_000, 12_000, 11_025, 8_000, 7_350)
_WHOLE = frozenset({b"moov", b"moof", b"mdat"})


@dataclass(frozen=True, slots=True)
class _Box:
    """A box's kind, what it holds, and where in the stream that begins."""

    kind: bytes
    body: bytes
    at: int


@dataclass(slots=True)
class _Track:
    """A track as its ``trak`` describes it."""

    track_id: int = 0
    is_sound: bool = False
    ticks_per_s: int = 0
    skipped_ticks: int = 0  # at the beginning, by the edit list
    codec: str = ""
    rate_hz: int = 0
    config: bytes = b""  # what the decoder is told


@dataclass(frozen=True, slots=True)
class _Sample:
    """Where a packet lies in the stream, and when it begins."""

    at: int
    n_bytes: int
    begin_ticks: int


@dataclass(slots=True)
class _Defaults:
    """What a track's samples have where a fragment does not say."""

    duration_ticks: int = 0
    n_bytes: int = 0


class FragmentedMp4:
    """The packets of the first sound track."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._at = 0  # in the stream, of the buffer's first byte
        self._n_to_skip = 0
        self._track: _Track | None = None
        self._defaults = _Defaults()
        self._announced: list[_Sample] = []  # of the fragment in work
        self._next_ticks = 0  # where a fragment begins that does not say

    @property
    def codec(self) -> str:
        """FFmpeg's name; known with the first packet, as are the others."""
        return "" if self._track is None else self._track.codec

    @property
    def rate_hz(self) -> int:
        """Of the packets' clock."""
        return 0 if self._track is None else self._track.rate_hz

    @property
    def config(self) -> bytes:
        """What the decoder is told."""
        return b"" if self._track is None else self._track.config

    @property
    def pre_skip_samples(self) -> int:
        """Sound that the encoder put before the recording."""
        track = self._track
        return 0 if track is None else track.skipped_ticks * track.rate_hz // track.ticks_per_s

    def push(self, data: bytes) -> list[Packet]:
        """The packets that ``data`` completes."""
        self._buffer += data
        packets: list[Packet] = []
        while (box := self._next_box()) is not None:
            match box.kind:
                case b"moov":
                    self._describe(box)
                case b"moof":
                    self._announce(box)
                case b"mdat":
                    packets += self._packets_in(box)
                case _:
                    pass
        return packets

    def _next_box(self) -> _Box | None:
        self._drop(min(self._n_to_skip, len(self._buffer)))
        if self._n_to_skip or len(self._buffer) < 8:
            return None
        n_bytes, kind = struct.unpack_from(">I4s", self._buffer)
        if n_bytes < 8:
            raise ContainerError(f"a box {kind!r} of the MP4 stream has no length of its own, which is not read live")
        if kind not in _WHOLE:
            self._n_to_skip = n_bytes
            return _Box(kind, b"", self._at)
        if n_bytes > MAX_BOX_BYTES:
            raise ContainerError(f"a box {kind!r} of the MP4 stream has {n_bytes} bytes")
        if len(self._buffer) < n_bytes:
            return None
        box = _Box(kind, bytes(self._buffer[8:n_bytes]), self._at + 8)
        self._drop(n_bytes)
        return box

    def _drop(self, n_bytes: int) -> None:
        del self._buffer[:n_bytes]
        self._at += n_bytes
        self._n_to_skip = max(0, self._n_to_skip - n_bytes)

    # ------------------------------------------------------------------ the description

    def _describe(self, moov: _Box) -> None:
        tracks = [_track_of(box) for box in _boxes(moov) if box.kind == b"trak"]
        found = next((track for track in tracks if track.is_sound and track.codec), None)
        if found is None:
            raise ContainerError("the MP4 stream has no sound in AAC or Opus")
        if not 0 < found.ticks_per_s <= 1_000_000_000 or not found.rate_hz:
            raise ContainerError("the MP4 stream's sound has no clock")
        extends = [box for mvex in _boxes(moov) if mvex.kind == b"mvex" for box in _boxes(mvex) if box.kind == b"trex"]
        if not extends:
            raise ContainerError("the MP4 is a file, not a stream of fragments, and can't be read live")
        self._track = found
        for trex in extends:
            track_id, _, duration_ticks, n_bytes = _unpack(">4xIIII", trex)
            if track_id == found.track_id:
                self._defaults = _Defaults(duration_ticks, n_bytes)

    # ------------------------------------------------------------------ fragments

    def _announce(self, moof: _Box) -> None:
        if self._track is None:
            raise ContainerError("a fragment of the MP4 stream comes before its description")
        self._announced = []
        for traf in _boxes(moof):
            if traf.kind == b"traf":
                self._announce_track(list(_boxes(traf)), moof.at - 8)

    def _announce_track(self, boxes: list[_Box], base: int) -> None:
        assert self._track is not None
        defaults = _Defaults(self._defaults.duration_ticks, self._defaults.n_bytes)
        for box in boxes:
            match box.kind:
                case b"tfhd":
                    flags, track_id = _unpack(">II", box)
                    if track_id != self._track.track_id:
                        return
                    words = _Reader(box, 8)
                    if flags & 0x01:
                        base = words.take(8)
                    words.take(4 if flags & 0x02 else 0)
                    defaults.duration_ticks = words.take(4) if flags & 0x08 else defaults.duration_ticks
                    defaults.n_bytes = words.take(4) if flags & 0x10 else defaults.n_bytes
                case b"tfdt":
                    words = _Reader(box, 4)
                    self._next_ticks = words.take(8 if box.body[:1] == b"\1" else 4)
                case b"trun":
                    self._announce_run(box, base, defaults)
                case _:
                    pass

    def _announce_run(self, trun: _Box, base: int, defaults: _Defaults) -> None:
        flags, n_samples = _unpack(">II", trun)
        if n_samples > MAX_RUN_SAMPLES:
            raise ContainerError(f"a fragment of the MP4 stream has {n_samples} packets")
        words = _Reader(trun, 8)
        at = base + (words.take(4) if flags & 0x01 else 0)
        words.take(4 if flags & 0x04 else 0)
        for _ in range(n_samples):
            duration_ticks = words.take(4) if flags & 0x100 else defaults.duration_ticks
            n_bytes = words.take(4) if flags & 0x200 else defaults.n_bytes
            words.take((4 if flags & 0x400 else 0) + (4 if flags & 0x800 else 0))
            self._announced.append(_Sample(at, n_bytes, self._next_ticks))
            at += n_bytes
            self._next_ticks += duration_ticks

    def _packets_in(self, mdat: _Box) -> Iterator[Packet]:
        if self._track is None:
            raise ContainerError("the MP4 stream has sound before its description: a file, which can't be read live")
        for sample in self._announced:
            begin = sample.at - mdat.at
            if not 0 <= begin <= begin + sample.n_bytes <= len(mdat.body) or sample.n_bytes > MAX_PACKET_BYTES:
                continue  # of another box, or none
            data = mdat.body[begin : begin + sample.n_bytes]
            n_samples = AAC_FRAME_SAMPLES if self._track.codec == "aac" else opus_samples(data)
            at_sample = sample.begin_ticks * self._track.rate_hz // self._track.ticks_per_s
            yield Packet(data, at_sample, n_samples)


class _Reader:
    """Unsigned numbers of a box, one after another."""

    def __init__(self, box: _Box, at: int) -> None:
        self._body = box.body
        self._at = at

    def take(self, n_bytes: int) -> int:
        part = self._body[self._at : self._at + n_bytes]
        if len(part) < n_bytes:
            raise ContainerError("a box of the MP4 stream is cut")
        self._at += n_bytes
        return int.from_bytes(part, "big")


def _unpack(layout: str, box: _Box) -> tuple[int, ...]:
    if len(box.body) < struct.calcsize(layout):
        raise ContainerError(f"a box {box.kind!r} of the MP4 stream is cut")
    words: tuple[int, ...] = struct.unpack_from(layout, box.body)
    return words


def _boxes(outer: _Box, begin: int = 0) -> Iterator[_Box]:
    """What lies in a box, from ``begin`` on."""
    at = begin
    while at + 8 <= len(outer.body):
        n_bytes, kind = struct.unpack_from(">I4s", outer.body, at)
        if not 8 <= n_bytes <= len(outer.body) - at:
            raise ContainerError(f"a box {kind!r} of the MP4 stream is longer than what it lies in")
        yield _Box(kind, outer.body[at + 8 : at + n_bytes], outer.at + at + 8)
        at += n_bytes


def _track_of(trak: _Box) -> _Track:
    track = _Track()
    for box in _inner(trak):
        is_long = box.body[:1] == b"\1"
        match box.kind:
            case b"tkhd":
                track.track_id = _Reader(box, 20 if is_long else 12).take(4)
            case b"mdhd":
                track.ticks_per_s = _Reader(box, 20 if is_long else 12).take(4)
            case b"hdlr":
                track.is_sound = box.body[8:12] == b"soun"
            case b"elst" if _unpack(">4xI", box)[0] == 1:
                ticks = _Reader(box, 16 if is_long else 12).take(8 if is_long else 4)
                track.skipped_ticks = 0 if ticks >> 31 else ticks  # less than 0: empty
            case b"mp4a" | b"Opus":
                _describe_sound(track, box)
            case _:
                pass
    return track


_OUTER = {b"edts": 0, b"mdia": 0, b"minf": 0, b"stbl": 0, b"stsd": 8}  # where what lies in them begins


def _inner(outer: _Box, begin: int = 0) -> Iterator[_Box]:
    for box in _boxes(outer, begin):
        if box.kind in _OUTER:
            yield from _inner(box, _OUTER[box.kind])
        else:
            yield box


def _describe_sound(track: _Track, entry: _Box) -> None:
    for box in _boxes(entry, 28):
        if entry.kind == b"Opus" and box.kind == b"dOps":
            track.codec, track.rate_hz = "libopus", OPUS_RATE_HZ
        if entry.kind == b"mp4a" and box.kind == b"esds":
            track.config = _decoder_config(box.body)
            rate_hz = _aac_rate_hz(track.config)
            if rate_hz is not None:
                track.codec, track.rate_hz = "aac", rate_hz


def _decoder_config(esds: bytes) -> bytes:
    """The body of the descriptor with tag 5, which lies inside those with tags 3 and 4 (ISO/IEC 14496-1)."""
    at = 4
    while at + 2 <= len(esds):
        tag, at = esds[at], at + 1
        n_bytes = 0
        while at < len(esds):
            byte, at = esds[at], at + 1
            n_bytes = n_bytes << 7 | byte & 0x7F
            if not byte & 0x80:
                break
        if tag == 0x05:
            return esds[at : at + min(n_bytes, 64)]
        at += {0x03: 3, 0x04: 13}.get(tag, n_bytes)
    return b""


def _aac_rate_hz(config: bytes) -> int | None:
    """Of an AudioSpecificConfig: five bits of kind, four of a rate's index; 15 says that the rate follows."""
    bits = int.from_bytes(config[:8].ljust(8, b"\0"), "big")
    index = bits >> 55 & 15
    if len(config) < 2 or index in (13, 14):
        return None
    rate_hz = bits >> 31 & 0xFFFFFF if index == 15 else _AAC_RATES_HZ[index]
    return rate_hz if 7_000 <= rate_hz <= 96_000 else None
