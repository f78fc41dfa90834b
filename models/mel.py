"""Log-mel features as Whisper was trained on: samples of one window → [n_mels, n_frames].

Knows the short-time Fourier transform, Slaney's mel scale and Whisper's compression of the range. Windows of any length
are taken; the loudest frame of the window sets the floor, since a stream has no whole file to take it from.
"""

from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray

from vad.audio import SAMPLE_RATE_HZ, exact_div

FFT_SAMPLES = 400  # 25 ms
HOP_SAMPLES = 160  # 10 ms, one mel frame
N_BINS = FFT_SAMPLES // 2 + 1
FRAMES_PER_S = exact_div(SAMPLE_RATE_HZ, HOP_SAMPLES)
WINDOW_S = 30  # what the encoder was trained on
WINDOW_FRAMES = WINDOW_S * FRAMES_PER_S

MIN_FRAMES = 2  # reflecting half an FFT at the edge takes more samples than one hop has
POWER_FLOOR = 1e-10
RANGE_DECADES = 8.0  # below the loudest value everything counts as silence


def log_mel(samples: NDArray[np.float32], n_mels: int, n_frames: int = WINDOW_FRAMES) -> torch.Tensor:
    """Log-mel features float32 [n_mels, n_frames] of mono 16 kHz ``samples`` [n_samples] in -1..1.

    The samples are followed by silence up to ``n_frames`` hops. Equals ``WhisperFeatureExtractor`` of transformers for
    3000 frames; features are about -1.5..1.5.

    Raises:
        ValueError: if the samples are not one channel, or are longer than ``n_frames`` hops.
    """
    power = _power(_padded(samples, n_frames))
    log_power = torch.log10_(mel_filters(n_mels).matmul(power).clamp_(min=POWER_FLOOR))
    floor = log_power.max() - RANGE_DECADES
    return torch.maximum(log_power, floor, out=log_power).add_(4.0).div_(4.0)


def _padded(samples: NDArray[np.float32], n_frames: int) -> torch.Tensor:
    if samples.ndim != 1:
        raise ValueError(f"features are made of one channel, got samples of shape {list(samples.shape)}")
    if n_frames < MIN_FRAMES:
        raise ValueError(f"a window has at least {MIN_FRAMES} frames, got {n_frames}")
    if len(samples) > n_frames * HOP_SAMPLES:
        raise ValueError(f"{len(samples)} samples do not fit {n_frames} frames of {HOP_SAMPLES} samples")
    padded = np.zeros(n_frames * HOP_SAMPLES, np.float32)
    padded[: len(samples)] = samples
    return torch.from_numpy(padded)


def _power(samples: torch.Tensor) -> torch.Tensor:
    """Power spectrum [N_BINS, n_frames]; frame i is centred on sample i · HOP_SAMPLES, the edges are reflected."""
    spectrum = torch.stft(
        samples,
        FFT_SAMPLES,
        HOP_SAMPLES,
        window=_hann_window(),
        center=True,
        pad_mode="reflect",
        return_complex=True,
    )
    return torch.view_as_real(spectrum[:, :-1]).square_().sum(dim=-1)  # the frame centred on the end is left out


@cache
def _hann_window() -> torch.Tensor:
    return torch.hann_window(FFT_SAMPLES, periodic=True)


@cache
def mel_filters(n_mels: int, fft_samples: int = FFT_SAMPLES) -> torch.Tensor:
    """Triangular filters float32 [n_mels, fft_samples / 2 + 1], 0 to 8000 Hz, each of unit area (Slaney, 1998)."""
    nyquist_hz = SAMPLE_RATE_HZ / 2
    bins_hz = np.linspace(0, nyquist_hz, fft_samples // 2 + 1)
    edges_hz = _mel_to_hz(np.linspace(0, _hz_to_mel(nyquist_hz), n_mels + 2))
    lower, centre, upper = edges_hz[:-2, None], edges_hz[1:-1, None], edges_hz[2:, None]
    rising = (bins_hz - lower) / (centre - lower)
    falling = (upper - bins_hz) / (upper - centre)
    triangles = np.maximum(0, np.minimum(rising, falling))
    return torch.from_numpy((triangles * 2 / (upper - lower)).astype(np.float32))


# Slaney's scale: linear up to 1000 Hz, then logarithmic with 27 steps to 6400 Hz.
_HZ_PER_MEL = 200 / 3
_BREAK_HZ = 1000.0
_BREAK_MEL = _BREAK_HZ / _HZ_PER_MEL
_LOG_STEP = np.log(6.4) / 27


def _hz_to_mel(hz: float) -> float:
    """Valid from the break on, which is where the top of the scale lies."""
    return _BREAK_MEL + float(np.log(hz / _BREAK_HZ) / _LOG_STEP)


def _mel_to_hz(mel: NDArray[np.float64]) -> NDArray[np.float64]:
    above = _BREAK_HZ * np.exp(_LOG_STEP * (mel - _BREAK_MEL))
    return np.where(mel < _BREAK_MEL, mel * _HZ_PER_MEL, above)
