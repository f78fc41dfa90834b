"""Weights and recordings that are fetched on first use, for tests that are skipped where they can't be had."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import soundfile
import soxr
from numpy.typing import NDArray

from models.catalog import load_engine
from models.errors import ModelUnavailableError
from models.store import recording
from streaming.engine import SpeechEngine
from vad.audio import SAMPLE_RATE_HZ


@contextmanager
def or_skip() -> Iterator[None]:
    """Skip the test if what is fetched inside can't be had."""
    try:
        yield
    except ModelUnavailableError as error:
        pytest.skip(f"can't be had here: {error}")


@cache
def engine_of(name: str) -> SpeechEngine:
    """The model on one thread, loaded once for all tests."""
    with or_skip():
        return load_engine(name, n_threads=1)


@cache
def recorded(name: str) -> NDArray[np.float32]:
    """A recording [n_samples] at 16 kHz."""
    with or_skip():
        return read(recording(name))


def clip(name: str, start_s: float, end_s: float) -> NDArray[np.float32]:
    """A part of a recording [n_samples] at 16 kHz."""
    return recorded(name)[int(start_s * SAMPLE_RATE_HZ) : int(end_s * SAMPLE_RATE_HZ)]


def read(path: Path) -> NDArray[np.float32]:
    """A file [n_samples], mixed down, at 16 kHz."""
    samples, rate_hz = soundfile.read(path, dtype="float32", always_2d=True)
    mono: NDArray[np.float32] = samples.mean(axis=1)
    return mono if rate_hz == SAMPLE_RATE_HZ else soxr.resample(mono, rate_hz, SAMPLE_RATE_HZ)
