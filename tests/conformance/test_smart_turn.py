"""Our features and answers of Smart Turn beside those of Pipecat's own code, out of the same wheel."""

import wave
from pathlib import Path

import numpy as np
import pytest

from models.smart_turn import SmartTurn, features
from models.store import turn_model
from tests.conformance.clients import drive
from tests.fetched import or_skip

pytestmark = [pytest.mark.weights, pytest.mark.e2e]


@pytest.mark.parametrize("end_s", [2.0, 3.7, 9.7])
def test_features_and_probability_are_those_of_pipecats_code(
    speech_file_16k: Path, tmp_path: Path, end_s: float
) -> None:
    with or_skip():
        model = SmartTurn(turn_model())
    with wave.open(str(speech_file_16k)) as file:
        data = file.readframes(int(end_s * 16_000))
    path = tmp_path / "turn.wav"
    with wave.open(str(path), "wb") as file:
        file.setparams((1, 2, 16_000, 0, "NONE", ""))
        file.writeframes(data)
    samples = np.frombuffer(data, "<i2").astype(np.float32) / 32_768
    [theirs] = drive("smart_turn", str(path), client="pipecat")
    np.testing.assert_allclose(features(samples), np.array(theirs["features"]), atol=1e-3)
    assert model.probability(samples) == pytest.approx(theirs["probability"], abs=0.02)
