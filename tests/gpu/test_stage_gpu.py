"""The stage under CUDA graphs: near the float32 reference, the same bits each time, whatever ran in between."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from models.mel import log_mel
from models.whisper.config import WhisperConfig
from models.whisper.reference import Whisper
from models.whisper.stage import FrontEnd, Listener, Stage, n_attended
from models.whisper.torch_backend import silent_tail
from models.whisper.window import FRAMES_PER_POSITION, LOUDEST_FEATURE, encoded_positions

pytestmark = pytest.mark.gpu

CONFIG = WhisperConfig(80, 200, 384, 6, 1536, 4, 4, 1500, 448, ((0, 0),))
N_SLOTS = 8
# Root mean square of the error over that of the value, through four layers in bfloat16 (8 bits).
TOLERANCE = 0.02


@pytest.fixture(scope="module")
def model() -> Whisper:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    torch.manual_seed(2)
    return Whisper(CONFIG).eval().requires_grad_(False).cuda()


@pytest.fixture(scope="module")
def listener(model: Whisper) -> Listener:
    cache = torch.zeros(
        N_SLOTS, CONFIG.n_decoder_layers, 2, CONFIG.n_heads, 1500, 64, dtype=torch.bfloat16, device="cuda"
    )
    stage = Stage(model, silent_tail(model), cache)
    torch.cuda.synchronize()
    return Listener(stage, torch.cuda.Stream())


def noise(n_samples: int) -> NDArray[np.float32]:
    return np.random.default_rng(n_samples).normal(scale=0.1, size=n_samples).astype(np.float32)


def listen(listener: Listener, lengths: list[int], slots: list[int]) -> list[torch.Tensor]:
    """What each window's slot holds, as far as it is attended to."""
    with torch.inference_mode():
        positions = listener.listen([noise(length) for length in lengths], slots)
    stage = listener.stage
    return [
        stage.cross_cache[slot, ..., : n_attended(n_positions or 0, stage.n_tail, stage.stride), :].float()
        for slot, n_positions in zip(slots, positions, strict=True)
    ]


@torch.inference_mode()
def reference(model: Whisper, n_samples: int) -> torch.Tensor:
    """[layer, 2, H, n, D] in float32."""
    n_positions = encoded_positions(n_samples, CONFIG.n_audio_positions)
    features = log_mel(noise(n_samples), CONFIG.n_mels, FRAMES_PER_POSITION * n_positions)
    levelled = (features + (LOUDEST_FEATURE - features.max()))[None].cuda()
    tail = silent_tail(model)
    cache = model.decoder.open_cache(model.encoder(levelled, tail), tail)
    pairs = zip(cache.cross_keys, cache.cross_values, strict=True)
    return torch.stack([torch.stack([keys[0], values[0]]) for keys, values in pairs])


LENGTHS = [5_000, 16_000, 160_000, 161_000, 300_000, 471_000, 480_000, 20_000]


def test_slots_hold_what_the_reference_attends_to(model: Whisper, listener: Listener) -> None:
    for lengths in ([16_000], [480_000], LENGTHS[:2], LENGTHS):
        slots = [7, 1, 2, 3, 4, 5, 6, 0][: len(lengths)]
        for length, found in zip(lengths, listen(listener, lengths, slots), strict=True):
            wanted = reference(model, length)
            assert found.shape == wanted.shape
            error = (found - wanted).square().mean().sqrt() / wanted.square().mean().sqrt()
            assert float(error) < TOLERANCE, f"{length} of {lengths}"


def test_a_window_has_the_same_bits_again(listener: Listener) -> None:
    first = [listen(listener, [length], [2])[0].clone() for length in LENGTHS]
    listen(listener, LENGTHS, list(range(8)))
    for length, before in zip(LENGTHS, first, strict=True):
        assert torch.equal(listen(listener, [length], [5])[0], before)


def test_features_are_those_of_the_cpu(model: Whisper) -> None:
    samples = np.concatenate([noise(9_000), np.zeros(7_000, np.float32)])
    features, _ = FrontEnd(80, torch.device("cuda"))(torch.from_numpy(samples)[None].cuda())
    torch.testing.assert_close(features[0].cpu(), log_mel(samples, 80, 100), atol=1e-4, rtol=0)
