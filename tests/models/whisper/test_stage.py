"""The fused stage against the reference network, window by window and together, and how windows are grouped."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from models.mel import log_mel
from models.whisper.config import WhisperConfig
from models.whisper.reference import DecoderCache, SilentTail, Whisper
from models.whisper.stage import FrontEnd, Listener, Stage, bucket, grouped, n_attended
from models.whisper.window import (
    FRAMES_PER_POSITION,
    LOUDEST_FEATURE,
    QUIETEST_FEATURE,
    TAIL_STRIDE,
    encoded_positions,
)

CONFIG = WhisperConfig(80, 96, 128, 2, 256, 2, 3, 100, 32, ((0, 0), (1, 0)))
N_SLOTS = 4
# float32 in other orders of summation. The front end's products see 400 terms where the transform sees its few stages.
TOLERANCE = 2e-4


def noise(n_samples: int) -> NDArray[np.float32]:
    return np.random.default_rng(n_samples).normal(scale=0.1, size=n_samples).astype(np.float32)


@pytest.fixture(scope="module")
def model() -> Whisper:
    torch.manual_seed(2)
    model = Whisper(CONFIG).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module")
def tail(model: Whisper) -> SilentTail:
    silence = torch.full((1, CONFIG.n_mels, FRAMES_PER_POSITION * CONFIG.n_audio_positions), QUIETEST_FEATURE)
    with torch.inference_mode():
        return model.silent_tail(silence, stride=TAIL_STRIDE)


def reference(model: Whisper, tail: SilentTail, samples: NDArray[np.float32]) -> DecoderCache:
    """As the torch backend listens."""
    n_positions = encoded_positions(len(samples), CONFIG.n_audio_positions)
    features = log_mel(samples, CONFIG.n_mels, FRAMES_PER_POSITION * n_positions)
    audio = model.encoder((features + (LOUDEST_FEATURE - features.max()))[None], tail)
    return model.decoder.open_cache(audio, tail)


@pytest.mark.parametrize("lengths", [(5_000,), (100, 24_000), (8_000, 23_999, 31_000, 32_000)])
@torch.inference_mode()
def test_slots_hold_what_the_reference_attends_to(model: Whisper, tail: SilentTail, lengths: tuple[int, ...]) -> None:
    cross_cache = torch.full((N_SLOTS, 3, 2, 2, CONFIG.n_audio_positions, 64), torch.nan)
    listener = Listener(Stage(model, tail, cross_cache), None)
    slots = [3, 1, 0, 2][: len(lengths)]
    positions = listener.listen([noise(length) for length in lengths], slots)
    for length, slot, n_positions in zip(lengths, slots, positions, strict=True):
        wanted = reference(model, tail, noise(length))
        n = n_attended(n_positions, len(tail.cross_keys[0][0, 0]), TAIL_STRIDE)
        assert n == wanted.cross_keys[0].shape[2]
        for layer in range(CONFIG.n_decoder_layers):
            for which, expected in enumerate((wanted.cross_keys[layer], wanted.cross_values[layer])):
                found = cross_cache[slot, layer, which, :, :n]
                torch.testing.assert_close(found, expected[0], atol=TOLERANCE, rtol=TOLERANCE)


@torch.inference_mode()
def test_digital_silence_is_told_apart(model: Whisper, tail: SilentTail) -> None:
    cross_cache = torch.zeros(N_SLOTS, 3, 2, 2, CONFIG.n_audio_positions, 64)
    listener = Listener(Stage(model, tail, cross_cache), None)
    heard = listener.listen([noise(4_000), np.zeros(9_000, np.float32), noise(4_001)], [0, 1, 2])
    assert [positions is None for positions in heard] == [False, True, False]


def test_features_are_those_of_the_cpu_front_end() -> None:
    samples = np.concatenate([noise(9_000), np.zeros(7_000, np.float32)])
    samples[3_000:5_000] *= 1e-4  # quiet: eight decades of power lie in one window
    features, loudest = FrontEnd(80, torch.device("cpu"))(torch.from_numpy(samples)[None])
    wanted = log_mel(samples, 80, 100)
    torch.testing.assert_close(features[0], wanted, atol=1e-4, rtol=0)
    assert float(loudest) == pytest.approx(float(wanted.max()), abs=1e-5)


def test_a_cache_of_another_checkpoint_is_refused(model: Whisper, tail: SilentTail) -> None:
    with pytest.raises(ValueError, match="does not fit"):
        Stage(model, tail, torch.zeros(N_SLOTS, 2, 2, 2, 100, 64))
    with pytest.raises(ValueError, match="needed: 100"):
        Stage(model, tail, torch.zeros(N_SLOTS, 3, 2, 2, 99, 64))


@given(st.lists(st.integers(1, 1499), min_size=1, max_size=8))
def test_a_bucket_holds_its_windows_and_wastes_little(lengths: list[int]) -> None:
    n_encoded = bucket(lengths, 1500)
    assert max(lengths) <= n_encoded <= max(lengths) + 127
    assert n_encoded % 16 == 0
    assert bucket([1500] * len(lengths), 1500) == 1500


@given(st.lists(st.integers(1, 1500), max_size=8))
def test_every_window_is_in_one_group_that_is_long_enough(lengths: list[int]) -> None:
    groups = grouped(lengths, 1500)
    assert sorted(index for _, indices in groups for index in indices) == list(range(len(lengths)))
    assert {len(indices) for _, indices in groups} <= {1, 2, 4, 8}
    assert all(lengths[index] <= n_encoded for n_encoded, indices in groups for index in indices)


def test_short_windows_are_not_encoded_as_long_as_a_long_one_beside_them() -> None:
    assert grouped([60, 1400, 50, 500], 1500) == [(64, [2, 0]), (512, [3]), (1408, [1])]
    assert grouped([500, 510, 490, 505], 1500) == [(512, [2, 0, 3, 1])]
    assert grouped([1500, 1499, 1500], 1500) == [(1504, [1]), (1500, [0, 2])]
