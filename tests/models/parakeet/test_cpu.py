"""Matrices packed for a CPU: nearly the same numbers, and still the same whatever the cuts."""

import numpy as np
import pytest
import torch

from models.packed import Bfloat16Linear, Int8Linear
from models.parakeet.cpu import Int8Lstm, pack
from models.parakeet.encoder import PointwiseConv
from models.parakeet.greedy import decode, start
from models.parakeet.reference import Parakeet
from tests.models.parakeet.small import SMALL, small_model

PLAIN = small_model(seed=2)
PACKED = small_model(seed=2)
pack(PACKED)
FRAMES = 2 * torch.randn(32, SMALL.d_predictor, generator=torch.Generator().manual_seed(1))


def count(model: Parakeet, *kinds: type[torch.nn.Module]) -> int:
    return sum(isinstance(module, kinds) for module in model.modules())


def test_every_matrix_but_the_projection_is_packed() -> None:
    assert count(PACKED, Bfloat16Linear) == 1 + SMALL.n_layers * (2 + 2 + 5 + 2)
    assert count(PACKED, Int8Linear) == 2 * SMALL.n_predictor_layers + 2
    assert count(PACKED, torch.nn.Linear) == 1
    assert count(PACKED, PointwiseConv, torch.nn.BatchNorm1d, torch.nn.LSTM) == 0


@torch.inference_mode()
def test_the_encoder_gives_nearly_the_same() -> None:
    features = torch.randn(1, 200, SMALL.n_mels, generator=torch.Generator().manual_seed(0))
    n_frames = torch.tensor([200])
    expected, given = PLAIN.encode(features, n_frames), PACKED.encode(features, n_frames)
    assert (given - expected).abs().max() < 0.1 * expected.std()  # bfloat16 has 8 bits
    assert np.corrcoef(given.flatten(), expected.flatten())[0, 1] > 0.999


@pytest.mark.parametrize("n_steps", [1, 5])
@torch.inference_mode()
def test_an_lstm_gives_nearly_the_same(n_steps: int) -> None:
    torch.manual_seed(0)
    lstm = torch.nn.LSTM(40, 40, 2, batch_first=True)
    x, hidden, cell = torch.randn(3, n_steps, 40), torch.randn(2, 3, 40), torch.randn(2, 3, 40)
    expected, (expected_hidden, expected_cell) = lstm(x, (hidden, cell))
    outputs, (after_hidden, after_cell) = Int8Lstm(lstm)(x, (hidden, cell))
    for given, wanted in ((outputs, expected), (after_hidden, expected_hidden), (after_cell, expected_cell)):
        torch.testing.assert_close(given, wanted, atol=0.02, rtol=0)


def test_cut_anywhere_the_same_is_emitted_bit_for_bit() -> None:
    whole, whole_state = decode(PACKED, FRAMES, start(PACKED))
    assert len(whole) > 5
    for cut in range(len(FRAMES) + 1):
        first, state = decode(PACKED, FRAMES[:cut], start(PACKED))
        rest, state = decode(PACKED, FRAMES[cut:], state)
        assert [e.token_id for e in first + rest] == [e.token_id for e in whole]
        assert [e.logprob for e in first + rest] == [e.logprob for e in whole]
        assert torch.equal(state.projected, whole_state.projected)
        assert torch.equal(state.cell, whole_state.cell)


def test_most_of_what_is_said_is_the_same() -> None:
    plain, _ = decode(PLAIN, FRAMES, start(PLAIN))
    packed, _ = decode(PACKED, FRAMES, start(PACKED))
    assert packed[0].token_id == plain[0].token_id
    assert packed[0].logprob == pytest.approx(plain[0].logprob, abs=0.1)
