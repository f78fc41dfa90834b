"""Packets out of WebM and Ogg: any cut of the bytes gives the same; whatever the bytes, packets or a ContainerError."""

import io
from functools import cache

import av
import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.containers import ContainerError, OggOpus, Packet, WebmOpus, opus_samples
from tests.encoding import encoded

KINDS = {"webm": WebmOpus, "ogg": OggOpus}


@cache
def sound(kind: str, codec: str = "libopus") -> bytes:
    t_s = np.arange(96_000) / 48_000
    return encoded((0.3 * np.sin(2 * np.pi * 300 * t_s)).astype(np.float32)[:, None], kind, codec, 48_000)


def pushed(kind: str, data: bytes, n_bytes: int) -> list[Packet]:
    container = KINDS[kind]()
    return [packet for at in range(0, len(data), n_bytes) for packet in container.push(data[at : at + n_bytes])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_bytes", [1, 100, 1 << 20])
def test_packets_are_those_of_ffmpegs_reader_however_the_bytes_are_cut(kind: str, n_bytes: int) -> None:
    with av.open(io.BytesIO(sound(kind))) as file:
        packets = [packet for packet in file.demux(audio=0) if packet.size]
        expected = [(bytes(packet), round(packet.pts * packet.time_base * 48_000)) for packet in packets]
    found = pushed(kind, sound(kind), n_bytes)
    assert [packet.data for packet in found] == [data for data, _ in expected]
    begin = found[0].at_sample - expected[0][1]  # FFmpeg counts from behind the silence before the sound
    # Ogg's last page says where the sound ends, which is before its last packet does.
    for packet, (_, at_sample) in list(zip(found, expected, strict=True))[:-20]:
        assert packet.at_sample - begin == pytest.approx(at_sample, abs=48)


@pytest.mark.parametrize("kind", KINDS)
def test_the_silence_before_the_sound_is_known(kind: str) -> None:
    container = KINDS[kind]()
    container.push(sound(kind))
    assert container.pre_skip_samples == 312  # of libopus at 48 kHz


def test_another_codec_is_named() -> None:
    with pytest.raises(ContainerError, match="no Opus, but A_PCM"):
        WebmOpus().push(sound("matroska", "pcm_s16le"))
    vorbis = io.BytesIO()
    soundfile.write(vorbis, np.zeros(16_000, np.float32), 16_000, format="OGG", subtype="VORBIS")
    with pytest.raises(ContainerError, match="no Opus: it begins with .*vorbis"):
        OggOpus().push(vorbis.getvalue())


def test_a_second_ogg_stream_behind_the_first_goes_on() -> None:
    n_packets = len(pushed("ogg", sound("ogg"), 1_000))
    assert len(pushed("ogg", sound("ogg") * 2, 1_000)) == 2 * n_packets


def ogg_page(flags: int, lacing: list[int], body: bytes) -> bytes:
    return b"OggS\0" + bytes([flags]) + bytes(20) + bytes([len(lacing), *lacing]) + body


def test_an_ogg_packet_that_never_ends_is_refused() -> None:
    container = OggOpus()
    container.push(ogg_page(2, [19], b"OpusHead" + bytes(11)))
    container.push(ogg_page(0, [255] * 200, bytes(255 * 200)))
    with pytest.raises(ContainerError, match="more than 65536 bytes"):
        container.push(ogg_page(1, [255] * 200, bytes(255 * 200)))


def track(number: int, codec: bytes) -> bytes:
    return b"\xae\x80\xd7\x81" + bytes([number]) + b"\x86" + bytes([0x80 | len(codec)]) + codec


def test_tracks_without_end_are_refused() -> None:
    with pytest.raises(ContainerError, match="more than 16 tracks"):
        WebmOpus().push(b"\x1aE\xdf\xa3\x80" + b"".join(track(number, b"A_AAC") for number in range(1, 18)))


def test_a_codecs_name_is_told_short_and_in_ascii() -> None:
    with pytest.raises(ContainerError) as caught:
        WebmOpus().push(b"\x1aE\xdf\xa3\x80" + track(1, b"\xff" * 100) + b"\xa3\x84\x81\0\0\0")
    assert str(caught.value).isascii() and len(str(caught.value)) < 200


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(
    cut=st.integers(0, 3_000),
    noise=st.lists(st.tuples(st.integers(0, 3_000), st.integers(0, 255)), max_size=20),
    n_bytes=st.sampled_from([50, 5_000]),
)
def test_whatever_the_bytes_packets_come_or_a_container_error(kind, cut, noise, n_bytes) -> None:
    data = bytearray(sound(kind)[cut:])
    for at, value in noise:
        data[at % len(data)] = value
    try:
        pushed(kind, bytes(data), n_bytes)
    except ContainerError:
        pass


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=300))
def test_random_bytes_are_refused_or_waited_for(kind: str, data: bytes) -> None:
    try:
        assert pushed(kind, data, 7) == []
    except ContainerError:
        pass


@pytest.mark.parametrize(("frame_ms", "code"), [(20, 0), (60, 0), (2.5, 0), (20, 1), (20, 3)])
def test_a_packet_says_how_long_it_is(frame_ms: float, code: int) -> None:
    config = {20: 1, 60: 3, 2.5: 28}[frame_ms]
    packet = bytes([config << 3 | code, 5])
    assert opus_samples(packet) == round(frame_ms * 48) * {0: 1, 1: 2, 3: 5}[code]
    assert opus_samples(b"") == opus_samples(bytes([3])) == 0


def test_time_codes_are_those_of_their_cluster_in_ticks_of_the_files_own() -> None:
    head = b"\x1aE\xdf\xa3\x80" + b"\x15I\xa9f\x80" + b"*\xd7\xb1\x83" + (500_000).to_bytes(3, "big")
    cluster = b"\x1fC\xb6u\x80\xe7\x82" + (4_000).to_bytes(2, "big")
    block = b"\xa3\x86\x81" + (-20).to_bytes(2, "big", signed=True) + b"\0" + b"\x08\x00"
    [packet] = WebmOpus().push(head + track(1, b"A_OPUS") + cluster + block)
    assert packet.at_sample == (4_000 - 20) * 24 and packet.data == b"\x08\x00"
