"""Log-mel features: those of the published extractor, and the same in a short window as in a long one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from models.mel import FFT_SAMPLES, HOP_SAMPLES, N_BINS, _padded, _power, log_mel, mel_filters

EDGE_FRAMES = 2  # frames whose FFT reaches over the end of the window: 200 samples are less than two hops


def noise(n_samples: int, seed: int = 0) -> NDArray[np.float32]:
    """Noise whose loudness varies, so that the floor cuts some of it off."""
    generator = np.random.default_rng(seed)
    envelope = np.exp(generator.uniform(-12, 0, n_samples // 1000 + 1)).repeat(1000)[:n_samples]
    return (generator.uniform(-1, 1, n_samples) * envelope).astype(np.float32)


@pytest.mark.parametrize("n_mels", [80, 128])
@pytest.mark.parametrize("n_samples", [480_000, 123_457, 0])
def test_full_window_equals_the_extractor_of_transformers(n_mels: int, n_samples: int) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the reference for features")
    extractor = transformers.WhisperFeatureExtractor(feature_size=n_mels)
    samples = noise(n_samples)
    reference = extractor(samples, sampling_rate=16_000, return_tensors="pt").input_features[0]
    features = log_mel(samples, n_mels)
    assert features.shape == (n_mels, 3000)
    assert features.dtype == torch.float32
    # float32 FFTs that round differently: at the floor, 1e-10 of the loudest, a log10 moves by about 1e-4
    torch.testing.assert_close(features, reference, rtol=0, atol=2e-4)


@pytest.mark.parametrize("n_mels", [80, 128])
def test_filters_equal_the_bank_of_transformers(n_mels: int) -> None:
    audio_utils = pytest.importorskip("transformers.audio_utils", reason="transformers is the reference for filters")
    reference = audio_utils.mel_filter_bank(N_BINS, n_mels, 0.0, 8000.0, 16_000, norm="slaney", mel_scale="slaney")
    np.testing.assert_allclose(mel_filters(n_mels).numpy(), reference.T, rtol=0, atol=1e-8)


@settings(max_examples=25, deadline=None)
@given(
    n_short=st.integers(min_value=3, max_value=60),
    n_more=st.integers(min_value=0, max_value=60),
    seed=st.integers(min_value=0, max_value=9),
)
def test_frames_of_a_longer_window_equal_those_of_a_shorter_one(n_short: int, n_more: int, seed: int) -> None:
    samples = noise((n_short + n_more) * HOP_SAMPLES, seed)
    short = _power(_padded(samples[: n_short * HOP_SAMPLES], n_short))
    long = _power(_padded(samples, n_short + n_more))
    n_same = n_short - EDGE_FRAMES if n_more else n_short
    torch.testing.assert_close(short[:, :n_same], long[:, :n_same], rtol=1e-5, atol=1e-6)


@settings(max_examples=25, deadline=None)
@given(hops=st.integers(min_value=1, max_value=50), seed=st.integers(min_value=0, max_value=9))
def test_a_window_that_begins_hops_later_has_the_later_frames(hops: int, seed: int) -> None:
    samples = noise(100 * HOP_SAMPLES, seed)
    whole, late = _power(_padded(samples, 100)), _power(_padded(samples[hops * HOP_SAMPLES :], 100 - hops))
    torch.testing.assert_close(late[:, EDGE_FRAMES:], whole[:, hops + EDGE_FRAMES :], rtol=1e-5, atol=1e-6)


def test_silence_is_flat_at_the_floor() -> None:
    torch.testing.assert_close(log_mel(np.zeros(800, np.float32), 80, 10), torch.full((80, 10), -1.5))


def test_quiet_parts_are_cut_eight_decades_under_the_loudest() -> None:
    samples = np.zeros(100 * HOP_SAMPLES, np.float32)
    samples[: 50 * HOP_SAMPLES] = noise(50 * HOP_SAMPLES)
    features = log_mel(samples, 80, 100)
    torch.testing.assert_close(features.max() - features.min(), torch.tensor(2.0))


def test_tone_is_loudest_in_the_filter_around_it() -> None:
    tone_hz = 1000.0
    samples = np.sin(2 * np.pi * tone_hz / 16_000 * np.arange(16_000)).astype(np.float32)
    loudest = log_mel(samples, 80, 100)[:, 50].argmax()
    assert mel_filters(80)[loudest, round(tone_hz / 16_000 * FFT_SAMPLES)] > 0


def test_input_may_be_read_only_and_is_not_changed() -> None:
    samples = noise(1600)
    before = samples.copy()
    samples.flags.writeable = False
    log_mel(samples, 80, 10)
    np.testing.assert_array_equal(samples, before)


@pytest.mark.parametrize(
    ("shape", "n_frames", "message"),
    [
        ((2, 1600), 20, r"one channel, got samples of shape \[2, 1600\]"),
        ((1601,), 10, "1601 samples do not fit 10 frames of 160"),
        ((100,), 1, "at least 2 frames, got 1"),
    ],
)
def test_input_that_is_no_window_is_refused(shape: tuple[int, ...], n_frames: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        log_mel(np.zeros(shape, np.float32), 80, n_frames)
