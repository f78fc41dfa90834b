"""The small Parakeet that comes with the project: it loads as any other, and hears digits and, worse, sentences."""

import json
from functools import cache
from pathlib import Path

import jiwer
import numpy as np
import pytest
import soundfile
import soxr
from numpy.typing import NDArray

from models.catalog import load_engine
from models.parakeet.config import ParakeetConfig
from models.parakeet.engine import ParakeetEngine
from models.parakeet.training.data import spoken
from models.parakeet.training.train import SIZES
from models.store import TWO_CITIES_TEXT, recording
from streaming.engine import DecodeOptions
from streaming.transcript import text_of

FOLDER = Path(__file__).parents[3] / "models" / "parakeet" / "tiny"
MOST_CHARACTER_ERRORS = 0.6  # 0.47 when it was trained
MOST_DIGIT_ERRORS = 0.3  # 0.15 when it was trained
DIGITS = Path(__file__).parents[4] / "shared" / "audio" / "digits"


@cache
def engine() -> ParakeetEngine:
    loaded = load_engine(str(FOLDER), n_threads=1)
    assert isinstance(loaded, ParakeetEngine)
    return loaded


def heard(samples: NDArray[np.float32]) -> str:
    return text_of([word for part in engine().transcribe(samples, DecodeOptions()) for word in part.words])


def test_it_is_small_and_has_the_sizes_that_the_training_makes() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 12_000_000
    content = json.loads((FOLDER / "config.json").read_text(encoding="utf-8"))
    assert ParakeetConfig.from_transformers(content) == SIZES


def test_it_hears_more_than_chance_of_a_reader_whom_it_does_not_know() -> None:
    samples, rate_hz = soundfile.read(recording("two_cities", fetch_missing=True), dtype="float32")
    text = heard(np.asarray(soxr.resample(samples, rate_hz, 16_000), dtype=np.float32))
    assert jiwer.cer(spoken(TWO_CITIES_TEXT), text) < MOST_CHARACTER_ERRORS


def test_it_hears_most_digits_in_a_row() -> None:
    if not DIGITS.is_dir():
        pytest.skip("needs the recordings in ../shared/audio beside the checkout")
    lines = (DIGITS.parent / "manifest.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "digits"]
    spoken_texts, texts = [], []
    for row in rows:
        samples, rate_hz = soundfile.read(DIGITS.parent / row["file"], dtype="float32")
        spoken_texts.append(spoken(row["transcript"]))
        texts.append(heard(np.asarray(soxr.resample(samples, rate_hz, 16_000), dtype=np.float32)))
    assert jiwer.wer(spoken_texts, texts) < MOST_DIGIT_ERRORS
