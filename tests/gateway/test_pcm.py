import io

import numpy as np
import pytest
import soundfile
from hypothesis import given
from hypothesis import strategies as st

from gateway.pcm import ENCODINGS, AudioFormat, decode, mended

FULL = 1 - 2**-15


def samples_of(data: bytes, encoding: str) -> np.ndarray:
    return decode(data, AudioFormat(encoding, 16_000)).samples


@pytest.mark.parametrize(
    ("encoding", "data", "expected"),
    [
        ("s16le", bytes.fromhex("0000 ff7f 0080 0100"), [0, 1 - 2**-15, -1, 2**-15]),
        ("s16be", bytes.fromhex("0000 7fff 8000 0001"), [0, 1 - 2**-15, -1, 2**-15]),
        ("s24le", bytes.fromhex("000000 ffff7f 000080 000100"), [0, 1 - 2**-23, -1, 2**-15]),
        ("s32le", bytes.fromhex("00000000 ffffff7f 00000080 00000100"), [0, 1, -1, 2**-15]),
        ("f32le", np.array([0, 0.5, -1, 1], dtype="<f4").tobytes(), [0, 0.5, -1, 1]),
    ],
)
def test_known_bytes_give_known_samples(encoding: str, data: bytes, expected: list[float]) -> None:
    assert samples_of(data, encoding) == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize(("encoding", "subtype"), [("mulaw", "ULAW"), ("alaw", "ALAW")])
def test_g711_tables_equal_those_of_libsndfile(encoding: str, subtype: str) -> None:
    codes = bytes(range(256))
    options = {"samplerate": 8000, "channels": 1, "subtype": subtype, "format": "RAW"}
    expected, _ = soundfile.read(io.BytesIO(codes), dtype="float32", **options)
    assert np.array_equal(samples_of(codes, encoding), expected)


@given(st.sampled_from(ENCODINGS), st.integers(1, 8), st.integers(0, 50), st.data())
def test_one_channel_of_many_is_that_channel_and_all_of_them_are_their_mean(
    encoding: str, n_channels: int, n_frames: int, data: st.DataObject
) -> None:
    n_bytes = n_frames * AudioFormat(encoding, 8000, n_channels).frame_bytes
    audio = data.draw(st.binary(min_size=n_bytes, max_size=n_bytes))
    single = [decode(audio, AudioFormat(encoding, 8000, n_channels, channel)).samples for channel in range(n_channels)]
    mixed = decode(audio, AudioFormat(encoding, 8000, n_channels))
    assert mixed.samples.dtype == np.float32 and mixed.samples.shape == (n_frames,)
    assert np.abs(mixed.samples).max(initial=0.0) <= 1
    assert mixed.samples == pytest.approx(np.mean(single, axis=0), abs=1e-6)
    assert (encoding == "f32le") or (mixed.n_non_finite == mixed.n_clipped == 0)


def test_nan_and_infinity_become_silence_and_are_counted() -> None:
    pcm = decode(np.array([0.5, np.nan, np.inf, -np.inf], dtype="<f4").tobytes(), AudioFormat("f32le", 16_000))
    assert pcm.samples.tolist() == [0.5, 0, 0, 0]
    assert (pcm.n_non_finite, pcm.n_clipped) == (3, 0)


def test_floats_beyond_full_scale_are_clipped_and_counted() -> None:
    pcm = decode(np.array([1.0, 1.5, -300.0, 0.1], dtype="<f4").tobytes(), AudioFormat("f32le", 16_000))
    assert pcm.samples == pytest.approx([1, 1, -1, 0.1])
    assert (pcm.n_non_finite, pcm.n_clipped) == (0, 2)


def test_a_broken_channel_that_was_not_chosen_is_not_counted() -> None:
    assert mended(np.array([[np.nan, 0.5]], dtype=np.float32), 1).n_non_finite == 0


def test_bytes_that_end_inside_a_sample_frame_are_refused() -> None:
    with pytest.raises(ValueError, match="5 bytes are no whole number of 4-byte sample frames"):
        decode(bytes(5), AudioFormat("s16le", 16_000, 2))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("pcm", 16_000), "encoding 'pcm' is not known; accepted are s16le, s24le, s32le, f32le, mulaw, alaw, s16be"),
        (("s16le", 7_999), "sample_rate_hz is 7999; it must be an integer in 8000..48000 Hz"),
        (("s16le", 48_001), "sample_rate_hz is 48001; it must be an integer in 8000..48000 Hz"),
        (("s16le", 16_000.0), "sample_rate_hz is 16000.0; it must be an integer"),
        (("s16le", True), "sample_rate_hz is True; it must be an integer"),
        (("s16le", 16_000, 0), "channels is 0; it must be an integer in 1..8"),
        (("s16le", 16_000, 9), "channels is 9; it must be an integer in 1..8"),
        (("s16le", 16_000, 2, 2), "channel is 2; it must be an integer in 0..1 for 2 channels, or null"),
        (("s16le", 16_000, 2, -1), "channel is -1; it must be an integer in 0..1 for 2 channels, or null"),
    ],
)
def test_a_format_outside_what_is_accepted_is_refused_with_what_is(arguments: tuple[object, ...], told: str) -> None:
    with pytest.raises(ValueError) as refusal:
        AudioFormat(*arguments)  # type: ignore[arg-type]
    assert told in str(refusal.value)
