"""Features against transformers' ``ParakeetFeatureExtractor``, alone and in padded batches."""

import numpy as np
import pytest
import torch
import transformers

from models.parakeet.features import MIN_SAMPLES, log_mel, n_mel_frames
from tests.models.parakeet.small import noise

# float32 logarithms of sums in another order, divided by a deviation of about 1.
TOLERANCE = 1e-4


def theirs(buffers: list[torch.Tensor], n_mels: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Features, and the number of valid frames of each."""
    extractor = transformers.ParakeetFeatureExtractor(feature_size=n_mels)
    batch = extractor([buffer.numpy() for buffer in buffers], sampling_rate=16_000)
    return batch["input_features"], batch["attention_mask"].sum(-1)


def padded(buffers: list[torch.Tensor], *, filler: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    n_samples = torch.tensor([len(buffer) for buffer in buffers])
    return torch.nn.utils.rnn.pad_sequence(buffers, batch_first=True, padding_value=filler), n_samples


@pytest.mark.parametrize("n_mels", [80, 128])
def test_features_of_a_batch_equal_those_of_transformers(n_mels: int) -> None:
    buffers = [noise(n, seed=n) for n in (16_000, 9_999, MIN_SAMPLES, 23_519)]
    expected, n_expected = theirs(buffers, n_mels)
    samples, n_samples = padded(buffers)
    features = log_mel(samples, n_samples, n_mels)
    assert n_mel_frames(n_samples).tolist() == n_expected.tolist()
    assert features.shape == (4, 23_519 // 160, n_mels)
    torch.testing.assert_close(features, expected[:, : features.shape[1]], atol=TOLERANCE, rtol=TOLERANCE)


def test_what_lies_behind_a_buffer_in_its_batch_changes_nothing() -> None:
    buffers = [noise(12_345), noise(30_000)]
    alone = log_mel(*padded(buffers[:1]), 16)
    for filler in (0.0, 0.7):
        together = log_mel(*padded(buffers, filler=filler), 16)
        torch.testing.assert_close(together[0, : alone.shape[1]], alone[0], atol=TOLERANCE, rtol=TOLERANCE)
        assert not together[0, alone.shape[1] :].any()


def test_each_channel_has_mean_zero_and_deviation_one() -> None:
    features = log_mel(noise(20_000)[None], torch.tensor([20_000]), 16)[0]
    np.testing.assert_allclose(features.mean(dim=0), 0, atol=1e-4)
    np.testing.assert_allclose(features.std(dim=0), 1, atol=1e-4)


def test_loudness_changes_nothing_above_the_guard() -> None:
    quiet = 0.1 * torch.randn(20_000, generator=torch.Generator().manual_seed(0))
    n_samples = torch.tensor([20_000])
    torch.testing.assert_close(
        log_mel(4 * quiet[None], n_samples, 16), log_mel(quiet[None], n_samples, 16), atol=1e-3, rtol=1e-3
    )


def test_digital_silence_gives_finite_features() -> None:
    assert log_mel(torch.zeros(1, 16_000), torch.tensor([16_000]), 128).isfinite().all()
