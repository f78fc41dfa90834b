"""Log-mel features as Parakeet was trained on: samples of a batch of buffers → [B, n_mel_frames, n_mels].

Knows pre-emphasis, the short-time Fourier transform, and the normalisation of each channel over the frames of a buffer.
Since that is over the buffer, the features of old audio change when the buffer does: a stream has to recompute them.
Does not know where a buffer came from.
"""

from functools import cache

import torch
from torch import Tensor

from ..mel import mel_filters
from .config import HOP_SAMPLES

FFT_SAMPLES = 512
WINDOW_SAMPLES = 400  # 25 ms, in the middle of the FFT
PRE_EMPHASIS = 0.97
POWER_GUARD = 2.0**-24  # added before the logarithm
DEVIATION_GUARD = 1e-5  # added before dividing by it

MIN_MEL_FRAMES = 2  # a deviation takes two
MIN_SAMPLES = MIN_MEL_FRAMES * HOP_SAMPLES


def n_mel_frames(n_samples: Tensor) -> Tensor:
    """How many frames buffers of ``n_samples`` have; what is left behind the last whole hop makes none."""
    return n_samples // HOP_SAMPLES


def log_mel(samples: Tensor, n_samples: Tensor, n_mels: int) -> Tensor:
    """Features float32 [B, n_mel_frames, n_mels] of mono 16 kHz buffers, zero behind each buffer's own frames.

    ``samples`` [B, N] in -1..1 are padded with anything behind ``n_samples`` [B]; each buffer needs ``MIN_SAMPLES``.
    Frame i is centred on sample i · HOP_SAMPLES, beyond the edges there is silence. Equals transformers'
    ``ParakeetFeatureExtractor`` without the frame centred on the end, which is masked there.
    """
    inside = torch.arange(samples.shape[1], device=samples.device) < n_samples[:, None]
    emphasised = samples.clone()
    emphasised[:, 1:] -= PRE_EMPHASIS * samples[:, :-1]
    power = _power(emphasised * inside)  # [B, bins, M]
    log_power = (_filters(n_mels, samples.device) @ power).add_(POWER_GUARD).log_().transpose(1, 2)
    return _normalised(log_power, n_mel_frames(n_samples))


def _power(samples: Tensor) -> Tensor:
    spectrum = torch.stft(
        samples,
        FFT_SAMPLES,
        HOP_SAMPLES,
        win_length=WINDOW_SAMPLES,
        window=_hann_window(samples.device),
        center=True,
        pad_mode="constant",
        return_complex=True,
    )
    n_frames = samples.shape[1] // HOP_SAMPLES
    return torch.view_as_real(spectrum[..., :n_frames]).square().sum(dim=-1)


def _normalised(features: Tensor, n_frames: Tensor) -> Tensor:
    """Each channel of each buffer with mean 0 and deviation 1 over the buffer's own frames, 0 behind them."""
    inside = (torch.arange(features.shape[1], device=features.device) < n_frames[:, None])[..., None]  # [B, M, 1]
    n = n_frames[:, None, None]
    mean = (features * inside).sum(dim=1, keepdim=True) / n
    centred = (features - mean) * inside
    deviation = (centred.square().sum(dim=1, keepdim=True) / (n - 1)).sqrt()
    return centred / (deviation + DEVIATION_GUARD)


@cache
def _hann_window(device: torch.device) -> Tensor:
    return torch.hann_window(WINDOW_SAMPLES, periodic=False).to(device)


@cache
def _filters(n_mels: int, device: torch.device) -> Tensor:
    return mel_filters(n_mels, FFT_SAMPLES).to(device)
