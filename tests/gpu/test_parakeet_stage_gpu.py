"""Parakeet's encoder in CUDA graphs: near the float32 reference, alone and in padded batches, the same bits again."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakernel.device import find_device
from models.parakeet.config import ParakeetConfig
from models.parakeet.device import DeviceKernels, Gpu, KernelOperations, build
from models.parakeet.features import MIN_SAMPLES, log_mel
from models.parakeet.fused import Operations, TorchOperations
from models.parakeet.reference import Parakeet
from models.parakeet.stage import Listener, Stage

pytestmark = pytest.mark.gpu

CONFIG = ParakeetConfig(128, 4, 1024, 8, 4096, 9, 256, 640, 2, 129, 128)  # of 0.6B, with four blocks
LENGTHS = [32_000, 224_000, 31_999, 160_000, MIN_SAMPLES, 33_000, 100_000]
# Distance from the float32 reference over its size, through four blocks in bfloat16 (8 bits).
TOLERANCE = 0.015


@pytest.fixture(scope="module")
def model() -> Parakeet:
    if not torch.cuda.is_available():
        pytest.skip("torch finds no CUDA device")
    torch.manual_seed(2)
    model = Parakeet(CONFIG).eval().requires_grad_(False)
    for name, tensor in model.state_dict().items():
        if name.endswith(("running_mean", "bias_u", "bias_v")):
            tensor.normal_(std=0.5)
        elif name.endswith("running_var"):
            tensor.uniform_(0.5, 2.0)
    return model.cuda()


@pytest.fixture(scope="module", params=["kernels", "torch"])
def listener(model: Parakeet, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Listener:
    operations: Operations = TorchOperations(CONFIG, torch.bfloat16)
    if request.param == "kernels":
        device, cache = find_device(), Path(tmp_path_factory.mktemp("cubins"))
        cubin = build(CONFIG, Gpu.of(device), arch=device.arch, cache=cache)
        operations = KernelOperations(CONFIG, DeviceKernels(CONFIG, device, cubin), torch.device("cuda"))
    stage = Stage(model, operations, torch.zeros(1, dtype=torch.bfloat16, device="cuda"), max_frames=192)
    torch.cuda.synchronize()
    return Listener(stage, torch.cuda.Stream())


def noise(n_samples: int) -> NDArray[np.float32]:
    loudness = np.linspace(0.01, 0.5, n_samples)
    return (np.random.default_rng(n_samples).normal(size=n_samples) * loudness).astype(np.float32)


@torch.inference_mode()
def reference(model: Parakeet, n_samples: int) -> Tensor:
    length = torch.tensor([n_samples], device="cuda")
    features = log_mel(torch.from_numpy(noise(n_samples))[None].cuda(), length, CONFIG.n_mels)
    return model.encode(features, length // 160)[0]


def test_frames_are_those_of_the_reference_alone_and_in_padded_batches(model: Parakeet, listener: Listener) -> None:
    for lengths in ([32_000], [224_000], LENGTHS, LENGTHS * 3):
        for n_samples, found in zip(lengths, listener.listen([noise(n) for n in lengths]), strict=True):
            wanted = reference(model, n_samples)
            assert found.shape == wanted.shape
            assert float((found.float() - wanted).norm() / wanted.norm()) < TOLERANCE, f"{n_samples} of {len(lengths)}"


def test_a_buffer_has_the_same_bits_again_whatever_ran_in_between(listener: Listener) -> None:
    (before,) = listener.listen([noise(100_000)])
    listener.listen([noise(n) for n in LENGTHS])
    (after,) = listener.listen([noise(100_000)])
    assert torch.equal(before, after)
