import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

from gateway.audio_file import read_audio
from gateway.pcm import AudioFormat, decode
from gateway.suspicion import suspect

RECORDINGS = Path(__file__).parents[2].parent / "shared" / "audio"
RATE_HZ = 16_000
needs_recordings = pytest.mark.skipif(not RECORDINGS.is_dir(), reason="needs the recordings in ../shared/audio")


def voice_like(seed: int = 0) -> np.ndarray:
    """Two seconds of buzzing syllables over a little noise, -20 dBFS."""
    t_s = np.arange(2 * RATE_HZ) / RATE_HZ
    buzz = sum(np.sin(2 * np.pi * 130 * harmonic * t_s) / harmonic for harmonic in range(1, 25))
    syllables = np.clip(np.sin(2 * np.pi * 3 * t_s), 0, 1)
    noise = 0.002 * np.random.default_rng(seed).normal(size=len(t_s))
    return (0.15 * buzz * syllables + noise).astype(np.float32)


def read_as(data: bytes, encoding: str) -> np.ndarray:
    audio_format = AudioFormat(encoding, RATE_HZ)
    return decode(data[: len(data) // audio_format.frame_bytes * audio_format.frame_bytes], audio_format).samples


def as_s16(samples: np.ndarray) -> np.ndarray:
    return np.round(samples * 32_767).astype("<i2")


def test_a_voice_is_not_suspected() -> None:
    assert suspect(voice_like()) is None


@pytest.mark.parametrize("wrong", ["s16be", "s24le", "f32le", "mulaw", "alaw"])
def test_s16le_read_in_another_encoding_is_suspected(wrong: str) -> None:
    told = suspect(read_as(as_s16(voice_like()).tobytes(), wrong))
    assert told is not None and "check the declared encoding, channels and sample rate" in told


def test_s16le_that_begins_inside_a_sample_is_suspected() -> None:
    assert suspect(read_as(as_s16(voice_like()).tobytes()[1:], "s16le")) is not None


def test_floats_read_as_integers_are_suspected() -> None:
    assert suspect(read_as(voice_like().tobytes(), "s16le")) is not None


def test_floats_on_the_scale_of_integers_are_suspected() -> None:
    told = suspect(read_as((voice_like() * 32_767).astype("<f4").tobytes(), "f32le"))
    assert told is not None and "at full scale" in told


def test_telephone_bytes_read_as_s16le_are_suspected() -> None:
    codes = np.random.default_rng(0).integers(0x6A, 0x7F, size=4 * RATE_HZ, dtype=np.uint8)
    codes ^= np.where(np.random.default_rng(1).random(len(codes)) < 0.5, 0x80, 0).astype(np.uint8)
    assert suspect(read_as(codes.tobytes(), "s16le")) is not None


def test_stereo_read_as_mono_is_suspected() -> None:
    told = suspect(np.repeat(voice_like(), 2))
    assert told is not None and "stereo taken for mono" in told


def test_16_bit_audio_in_32_bit_words_read_as_s16le_is_suspected() -> None:
    told = suspect(read_as((as_s16(voice_like()).astype("<i4") << 16).tobytes(), "s16le"))
    assert told is not None and "every other sample is silent" in told


@pytest.mark.parametrize("level_dbfs", [-90, -60, -40, -20])
def test_white_noise_of_a_level_that_microphones_give_passes(level_dbfs: float) -> None:
    noise = np.random.default_rng(0).normal(scale=10 ** (level_dbfs / 20), size=2 * RATE_HZ)
    assert suspect(noise.astype(np.float32)) is None


@pytest.mark.parametrize("level", [0.0, 1.0, 0.3])
def test_a_constant_says_nothing(level: float) -> None:
    assert suspect(np.full(2 * RATE_HZ, level, dtype=np.float32)) is None


@pytest.mark.parametrize("n_samples", [0, 1, 511, 8191])
def test_too_little_audio_says_nothing(n_samples: int) -> None:
    assert suspect(np.random.default_rng(0).uniform(-1, 1, n_samples).astype(np.float32)) is None


@needs_recordings
def test_no_two_seconds_of_a_recording_read_rightly_are_suspected() -> None:
    rows = [json.loads(line) for line in (RECORDINGS / "manifest.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["kind"] != "formats" and row["channels"] == 1]
    for row in rows[::3]:
        samples, _ = read_audio(RECORDINGS / row["file"])
        for start in range(0, len(samples), RATE_HZ):
            assert suspect(samples[start : start + 2 * RATE_HZ]) is None, (row["id"], start / RATE_HZ)


@needs_recordings
def test_nine_of_ten_recordings_are_suspected_when_their_bytes_are_shifted_by_one() -> None:
    rows = [json.loads(line) for line in (RECORDINGS / "manifest.jsonl").read_text().splitlines()]
    files = [RECORDINGS / row["file"] for row in rows if row["kind"] in ("read-clean", "accents", "noisy")][::6]
    shifted = [soundfile.read(file, dtype="int16", frames=2 * RATE_HZ)[0].tobytes()[1:] for file in files]
    assert sum(suspect(read_as(data, "s16le")) is not None for data in shifted) > 0.9 * len(files)
