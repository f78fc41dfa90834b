"""Does this audio look as if its bytes were read in a format that it is not in?

Knows what misread audio has in common: a loud noise of even spectrum, samples at full scale, or one sound interleaved
with another. A wrong sample rate can't be heard (slow speech is speech), but it can be seen in live audio: it comes at
a pace that is the ratio of two rates. Does not know the declared format.

The limits are measured on 288 recordings, each read rightly and in every wrong way; see benchmarks/results/ingest.md.
"""

import numpy as np
from numpy.typing import NDArray

WINDOW_SAMPLES = 512
MIN_WINDOWS = 16  # half a second that isn't digital silence, or there is nothing to say
BAND = slice(7, 110)  # bins of 220 to 3440 Hz, which every sample rate has
FULL_SCALE = 0.99


def suspect(samples: NDArray[np.float32]) -> str | None:
    """What is odd about the first seconds of a stream [n], in words for the client, or ``None``.

    ``samples`` are mono at 16 kHz; two seconds are a good length. Recordings of speech, music and noise pass.
    """
    windows = samples[: len(samples) // WINDOW_SAMPLES * WINDOW_SAMPLES].reshape(-1, WINDOW_SAMPLES)
    windows = windows[windows.std(axis=1) > 1e-4]
    if len(windows) < MIN_WINDOWS:
        return None
    for oddity in (_at_full_scale(windows), _loud_noise(windows), _interleaved(windows)):
        if oddity is not None:
            return f"{oddity}: check the declared encoding, channels and sample rate"
    return None


RATES_HZ = (8_000, 11_025, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000)
PACE_TOLERANCE = 0.04  # packets of 100 ms leave this much doubt after two seconds
MIN_PACE_DEVIATION = 0.2  # nearer to real time a slow network or a sloppy clock looks the same


def suspect_pace(pace: float, declared_hz: int) -> str | None:
    """What is odd about live audio that came ``pace`` times as fast as its declared rate says, or ``None``.

    A file sent as fast as it goes comes at no such ratio, but for a chance; a late network has no steady pace.
    """
    if abs(pace - 1) < MIN_PACE_DEVIATION:
        return None
    for rate_hz in RATES_HZ:
        if rate_hz != declared_hz and abs(pace * declared_hz / rate_hz - 1) < PACE_TOLERANCE:
            return (
                f"audio comes at {pace:.2f} times the pace of {declared_hz} Hz, as {rate_hz} Hz would: "
                "check the declared sample rate"
            )
    return None


def _at_full_scale(windows: NDArray[np.float32]) -> str | None:
    share = float(np.mean(np.abs(windows) >= FULL_SCALE))
    return f"{share:.0%} of the samples are at full scale" if share > 0.2 else None


def _loud_noise(windows: NDArray[np.float32]) -> str | None:
    levels_dbfs = 10 * np.log10(np.mean(windows**2, axis=1))
    loudest = windows[np.argsort(levels_dbfs)[-max(1, len(windows) // 4) :]]
    is_steady = levels_dbfs.std() < 3.5 and levels_dbfs.mean() > -16 and _flatness(windows) > 0.35
    is_noise = 10 * np.log10(np.mean(loudest**2)) > -11 and _flatness(loudest) > 0.7
    return "the audio is a loud noise of even spectrum" if is_steady or is_noise else None


def _flatness(windows: NDArray[np.float32]) -> float:
    """Geometric over arithmetic mean of the power spectrum: 1 for white noise, below 0.3 for speech."""
    power = np.mean(np.abs(np.fft.rfft(windows * np.hanning(WINDOW_SAMPLES), axis=1)) ** 2, axis=0)[BAND] + 1e-12
    return float(np.exp(np.mean(np.log(power))) / np.mean(power))


def _interleaved(windows: NDArray[np.float32]) -> str | None:
    even, odd = windows[:, ::2], windows[:, 1::2]
    if not 1e-3 < np.mean(even**2) / (np.mean(odd**2) + 1e-12) < 1e3:
        return "every other sample is silent"
    within, between = np.mean((odd - even) ** 2), np.mean((even[:, 1:] - odd[:, :-1]) ** 2)
    if not 0.05 < within / (between + 1e-12) < 20:
        return "samples come in equal pairs, as in stereo taken for mono"
    return None
