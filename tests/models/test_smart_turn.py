from functools import cache
from pathlib import Path

import numpy as np
import pytest
from transformers import WhisperFeatureExtractor

from models.smart_turn import N_FRAMES, N_MELS, SmartTurn, features
from models.store import turn_model
from tests.fetched import or_skip, recorded
from vad.audio import SAMPLE_RATE_HZ
from vad.turn import MAX_TURN_SAMPLES

N_8_S = 8 * SAMPLE_RATE_HZ


@cache
def model() -> SmartTurn:
    with or_skip():
        return SmartTurn(turn_model())


def beckett() -> np.ndarray:
    """'Ever tried. Ever failed. No matter. Try again. Fail again. Fail better.' at 16 kHz."""
    return recorded("beckett")


def noise(n: int, level: float = 0.1) -> np.ndarray:
    return np.random.default_rng(3).normal(0, level, n).astype(np.float32)


@pytest.mark.parametrize("n_samples", [1, 1_000, 60_000, N_8_S, N_8_S + 5_000])
def test_features_are_those_of_transformers(n_samples: int) -> None:
    samples = noise(n_samples)
    window = np.pad(samples[-N_8_S:], (max(0, N_8_S - n_samples), 0))
    extractor = WhisperFeatureExtractor(chunk_length=8)
    expected = extractor(window, sampling_rate=SAMPLE_RATE_HZ, do_normalize=True, return_tensors="np").input_features[0]
    np.testing.assert_allclose(features(samples), expected, atol=2e-4)


def test_features_have_the_shape_that_the_model_takes() -> None:
    assert features(noise(1_000)).shape == (N_MELS, N_FRAMES) == (80, 800)
    assert MAX_TURN_SAMPLES == N_8_S


def test_silence_and_nothing_have_features_too() -> None:
    assert np.isfinite(features(np.zeros(1_000, np.float32))).all()
    assert np.isfinite(features(np.zeros(0, np.float32))).all()


@pytest.mark.weights
def test_a_voice_is_judged_alike_however_loud() -> None:
    said = beckett()[: 9 * SAMPLE_RATE_HZ]
    assert model().probability(said * 0.05) == pytest.approx(model().probability(said), abs=0.05)


@pytest.mark.weights
def test_a_sentence_that_breaks_off_is_less_complete_than_a_whole_one() -> None:
    whole = beckett()
    broken = whole[: int(1.9 * SAMPLE_RATE_HZ)]
    assert model().probability(whole) > 0.8
    assert model().probability(broken) < model().probability(whole)


@pytest.mark.weights
def test_only_the_last_eight_seconds_count() -> None:
    said = beckett()[-N_8_S:]
    assert model().probability(np.concatenate([noise(20_000), said])) == model().probability(said)


@pytest.mark.weights
def test_the_licence_is_kept_beside_the_model() -> None:
    model()
    assert "BSD 2-Clause License" in (Path(turn_model()).parent / "LICENSE").read_text(encoding="utf-8")
