"""Codecs and containers as they come: the sound, whatever the cuts; errors that say what is accepted."""

import io
import struct
from fractions import Fraction

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.live_audio import LiveAudioError, LiveWav, Sniffed, g722, opus_packets
from tests.encoding import FRAGMENTED, encoded, packets


def tone(rate_hz: int) -> np.ndarray:
    return (0.4 * np.sin(2 * np.pi * 440 * np.arange(2 * rate_hz) / rate_hz)).astype(np.float32)


def heard(decoder, data: bytes, n_bytes: int) -> np.ndarray:
    parts = [decoder.push(data[at : at + n_bytes]) for at in range(0, len(data), n_bytes)]
    return np.concatenate([*parts, decoder.flush()])


def assert_is_tone(samples: np.ndarray) -> None:
    assert samples.dtype == np.float32 and len(samples) == pytest.approx(32_000, abs=700)
    middle = samples[8_000:24_000]
    assert np.argmax(np.abs(np.fft.rfft(middle))) == 440
    assert middle.std() == pytest.approx(0.4 / np.sqrt(2), rel=0.1)


def wav(rate_hz: int, tag: int, n_bits: int, data: bytes, n_channels: int = 1, extra: bytes = b"") -> bytes:
    frame = n_channels * n_bits // 8
    fmt = struct.pack("<HHIIHH", tag, n_channels, rate_hz, rate_hz * frame, frame, n_bits) + extra
    chunks = b"".join(
        struct.pack("<4sI", name, len(body)) + body for name, body in [(b"fmt ", fmt), (b"LIST", b"x" * 10)]
    )
    return b"RIFF\xff\xff\xff\xffWAVE" + chunks + b"data\xff\xff\xff\xff" + data


@pytest.mark.parametrize("kind", ["webm", "ogg"])
@pytest.mark.parametrize("n_channels", [1, 2])
def test_opus_in_a_container_gives_its_sound_whatever_the_cuts(kind: str, n_channels: int) -> None:
    data = encoded(np.repeat(tone(48_000)[:, None], n_channels, axis=1), kind, "libopus", 48_000)
    whole = heard(Sniffed(), data, len(data))
    assert_is_tone(whole)
    for n_bytes in (1, 333):
        np.testing.assert_array_equal(heard(Sniffed(), data, n_bytes), whole)


@pytest.mark.parametrize(("make", "codec", "rate_hz"), [(opus_packets, "libopus", 48_000), (g722, "g722", 16_000)])
def test_bare_packets_give_their_sound_and_one_that_is_none_is_lost_alone(make, codec, rate_hz) -> None:
    decoder = make()
    parts = []
    for index, packet in enumerate(packets(tone(rate_hz), codec, rate_hz)):
        if index == 3:
            decoder.push(b"")
            decoder.push(b"\xff" if codec == "libopus" else b"")
        parts.append(decoder.push(packet))
    assert_is_tone(np.concatenate([*parts, decoder.flush()]))


@pytest.mark.parametrize("rate_hz", [8_000, 16_000, 44_100])
@pytest.mark.parametrize(("tag", "n_bits", "dtype"), [(1, 16, "<i2"), (3, 32, "<f4")])
def test_wav_is_read_as_it_comes(rate_hz: int, tag: int, n_bits: int, dtype: str) -> None:
    scale = 32_767 if tag == 1 else 1
    data = wav(rate_hz, tag, n_bits, (tone(rate_hz) * scale).astype(dtype).tobytes())
    for n_bytes in (13, 97, len(data)):
        assert_is_tone(heard(Sniffed(), data, n_bytes))


def test_the_extensible_header_is_read_too() -> None:
    extra = struct.pack("<HHI", 22, 16, 0) + struct.pack("<H", 1) + bytes(14)
    assert_is_tone(
        heard(Sniffed(), wav(16_000, 0xFFFE, 16, (tone(16_000) * 32_767).astype("<i2").tobytes(), extra=extra), 50)
    )


@pytest.mark.parametrize(
    ("data", "seen"),
    [
        (b"hello there", "no container that is read live: WAV, and Opus in WebM or Ogg"),
        (wav(16_000, 2, 4, bytes(99)), "coding 2"),
        (wav(1, 1, 16, bytes(99)), "1"),
        (b"RIFF\0\0\0\0WAVEdata" + bytes(99), "no format"),
        (b"RIFF\0\0\0\0WAVELIST" + struct.pack("<I", 1 << 20) + bytes(99), "64 KiB"),
        (b"OggS" + bytes(23) + b"OggX", "no Ogg"),
        (b"\x1aE\xdf\xa3\0", "no WebM"),
    ],
)
def test_what_can_not_be_read_is_named(data: bytes, seen: str) -> None:
    with pytest.raises(LiveAudioError, match=seen):
        Sniffed().push(data)


def test_a_frame_that_unpacks_to_minutes_is_refused_before_it_is_decoded_whole() -> None:
    head = b"\x1aE\xdf\xa3\x80\xae\x80\xd7\x81\x01\x86\x86A_OPUS"
    block = b"\xa3\x86\x81\0\0\0\x1b\x02"  # two frames of 60 ms in two bytes
    decoder = Sniffed()
    assert len(decoder.push(head + block * 160)) > 18 * 16_000
    with pytest.raises(LiveAudioError, match="more than 20 s"):
        decoder.push(block * 200)


def recorded(kind: str, *pieces: tuple[float, np.ndarray], codec: str = "libopus", rate_hz: int = 48_000) -> bytes:
    """What a recorder writes that leaves out what lies between ``pieces``, each with the time that it begins at."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind, options=dict(FRAGMENTED if kind == "mp4" else {})) as output:
        stream = output.add_stream(codec, rate=rate_hz, layout="mono")
        stream.time_base = Fraction(1, rate_hz)
        to_frames = av.AudioResampler(format=stream.format, layout="mono", rate=rate_hz)
        frames = [part for _, samples in pieces for part in to_frames.resample(frame_of(samples, rate_hz))]
        packets = [packet for frame in frames for packet in stream.encode(frame)] + stream.encode(None)
        n_frame = 1_024 if codec == "aac" else 960
        begins = [round(at_s * rate_hz) for at_s, _ in pieces]
        lengths = [len(samples) for _, samples in pieces]
        for index, packet in enumerate(packets):
            at, piece = index * n_frame, 0
            while piece < len(pieces) - 1 and at >= lengths[piece]:
                at -= lengths[piece]
                piece += 1
            packet.pts = packet.dts = begins[piece] + at
            packet.duration, packet.time_base = n_frame, Fraction(1, rate_hz)
            output.mux(packet)
    return file.getvalue()


def frame_of(samples: np.ndarray, rate_hz: int) -> av.AudioFrame:
    frame = av.AudioFrame.from_ndarray((samples * 32_767).astype("<i2")[None], format="s16", layout="mono")
    frame.sample_rate = rate_hz
    return frame


@pytest.mark.parametrize(
    ("kind", "codec", "rate_hz"),
    [("webm", "libopus", 48_000), ("ogg", "libopus", 48_000), ("mp4", "libopus", 48_000), ("mp4", "aac", 44_100)],
)
@pytest.mark.parametrize("gap_s", [0.38, 5.0, 59.0])
@pytest.mark.parametrize("n_bytes", [61, 4_000])
def test_what_the_recorder_left_out_is_silence_of_its_length(
    kind: str, codec: str, rate_hz: int, gap_s: float, n_bytes: int
) -> None:
    second = tone(rate_hz)[:rate_hz]
    data = recorded(kind, (0.0, second), (1.0 + gap_s, second), codec=codec, rate_hz=rate_hz)
    whole = heard(Sniffed(), data, n_bytes)
    assert len(whole) == pytest.approx((2.0 + gap_s) * 16_000, abs=1_200)
    loud = np.flatnonzero(np.abs(whole) > 0.1)
    [hole] = np.flatnonzero(np.diff(loud) > 3_000)
    assert loud[hole + 1] / 16_000 == pytest.approx(1.0 + gap_s, abs=0.06)
    silence = whole[loud[hole] + 2_000 : loud[hole + 1] - 400]
    assert np.abs(silence).max(initial=0.0) < 1e-3


def test_a_clock_that_jumps_or_drifts_leaves_nothing_out() -> None:
    second = tone(48_000)[:48_000]
    streams = [recorded("webm", (0.0, second), (at_s, second)) for at_s in (1.0, 1.05, 3_600.0)]
    streams.append(2 * recorded("webm", (5.0, second)))
    for data in streams:
        assert len(heard(Sniffed(), data, 4_000)) == pytest.approx(2.0 * 16_000, abs=800)


def test_silence_of_minutes_in_one_frame_is_refused() -> None:
    head = b"\x1aE\xdf\xa3\x80\xae\x80\xd7\x81\x01\x86\x86A_OPUS"
    late = [b"\xe7\x83" + (40_000 * index).to_bytes(3, "big") + b"\xa3\x86\x81\0\0\0\x08\x00" for index in range(3)]
    decoder = Sniffed()
    assert len(decoder.push(head + late[0] + late[1])) > 39 * 16_000
    with pytest.raises(LiveAudioError, match="more than 60 s left out"):
        Sniffed().push(head + b"".join(late))


@pytest.mark.parametrize("head", [b"OggS", b"\x1aE\xdf\xa3", b"\0\0\0\x1cftyp"])
def test_without_pyav_opus_and_aac_are_refused_by_name(monkeypatch: pytest.MonkeyPatch, head: bytes) -> None:
    monkeypatch.setattr("gateway.live_audio.has_codecs", lambda: False)
    with pytest.raises(LiveAudioError, match=r"senseway\[media\]"):
        Sniffed().push(head)


@pytest.mark.parametrize(("codec", "rate_hz"), [("aac", 48_000), ("aac", 44_100), ("aac", 16_000), ("libopus", 48_000)])
def test_fragmented_mp4_gives_its_sound_whatever_the_cuts(codec: str, rate_hz: int) -> None:
    data = recorded("mp4", (0.0, tone(rate_hz)), codec=codec, rate_hz=rate_hz)
    whole = heard(Sniffed(), data, len(data))
    assert_is_tone(whole[: 32_000 + 700])
    for n_bytes in (1, 333):
        np.testing.assert_array_equal(heard(Sniffed(), data, n_bytes), whole)


def test_an_mp4_that_is_a_file_is_told_from_a_stream() -> None:
    data = encoded(tone(48_000)[:, None], "mp4", "aac", 48_000)
    with pytest.raises(LiveAudioError, match="a file, "):
        heard(Sniffed(), data, 4_000)
    pictures = recorded("mp4", (0.0, tone(48_000)), codec="aac").replace(b"soun", b"vide")
    with pytest.raises(LiveAudioError, match="no sound in AAC or Opus"):
        heard(Sniffed(), pictures, 4_000)


MP4 = recorded("mp4", (0.0, tone(48_000)[:24_000]), codec="aac")


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, len(MP4) - 1), st.integers(0, 255)), min_size=1, max_size=8))
def test_whatever_is_damaged_in_an_mp4_samples_come_or_an_error(changes: list[tuple[int, int]]) -> None:
    data = bytearray(MP4)
    for at, byte in changes:
        data[at % 1_200 if byte % 2 else at] = byte
    try:
        assert heard(Sniffed(), bytes(data), 997).dtype == np.float32
    except LiveAudioError:
        pass


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([b"RIFF", b"OggS", b"\x1aE\xdf\xa3", b""]), st.binary(max_size=200))
def test_whatever_the_bytes_samples_come_or_an_error(head: bytes, rest: bytes) -> None:
    try:
        assert Sniffed().push(head + rest).dtype == np.float32
    except LiveAudioError:
        pass


def test_a_wav_without_a_header_yet_gives_nothing() -> None:
    assert len(LiveWav().push(b"RIFF")) == len(LiveWav().flush()) == 0
