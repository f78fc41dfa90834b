"""Padded, batched and fused, the encoder gives what the reference does; so do its kernels, run on this processor."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from models.mel import mel_filters
from models.parakeet.config import FRAME_SAMPLES, ParakeetConfig, n_frames_of
from models.parakeet.device import (
    KERNELS,
    Gpu,
    KernelOperations,
    Product,
    To,
    build,
    packed_filters,
    product_for,
    products,
    why_not,
    words,
)
from models.parakeet.encoder import n_encoder_frames
from models.parakeet.features import FFT_SAMPLES, MIN_SAMPLES, log_mel
from models.parakeet.fused import SAMPLES_BEHIND, Lengths, Operations, TorchOperations
from models.parakeet.reference import Parakeet
from models.parakeet.stage import Listener, Stage, bucket, passes, room_for, shapes
from tests.models.parakeet.emulator import COMPILER, EmulatedKernels
from tests.nvrtc import needs_nvrtc

SMALL = ParakeetConfig(32, 2, 64, 4, 96, 9, 32, 48, 1, 33, 32)
FOR_KERNELS = ParakeetConfig(32, 1, 256, 4, 512, 9, 64, 64, 1, 33, 32)
V3 = ParakeetConfig(128, 24, 1024, 8, 4096, 9, 256, 640, 2, 8193, 8192)
# SMs, and what a block may have of shared memory (CUDA programming guide, table of compute capabilities)
H200 = Gpu(132, 227 << 10)
GPUS = {
    "sm_80": Gpu(108, 163 << 10),
    "sm_86": Gpu(82, 99 << 10),
    "sm_89": Gpu(128, 99 << 10),
    "sm_90a": H200,
    "sm_100a": Gpu(148, 227 << 10),
    "sm_120": Gpu(170, 99 << 10),
}
MAX_FRAMES = 64
LENGTHS = [16_000, 31_999, 5_000, MIN_SAMPLES, 70_000, 1281]
# Distance from the float32 reference over its size, through one block in bfloat16 (8 bits).
TOLERANCE = 0.01


def model_of(config: ParakeetConfig) -> Parakeet:
    torch.manual_seed(1)
    model = Parakeet(config).eval().requires_grad_(False)
    for name, tensor in model.state_dict().items():
        if name.endswith(("running_mean", "bias_u", "bias_v")):
            tensor.normal_()
        elif name.endswith("running_var") or (name.endswith("weight") and "norm" in name):
            tensor.uniform_(0.5, 2.0)
    return model


def noise(n_samples: int) -> NDArray[np.float32]:
    loudness = np.linspace(0.01, 0.5, n_samples)
    return (np.random.default_rng(n_samples).normal(size=n_samples) * loudness).astype(np.float32)


@torch.inference_mode()
def reference(model: Parakeet, buffer: NDArray[np.float32]) -> Tensor:
    n_samples = torch.tensor([len(buffer)])
    features = log_mel(torch.from_numpy(buffer)[None], n_samples, model.config.n_mels)
    return model.encode(features, n_samples // 160)[0]


def listener(model: Parakeet, operations: Operations, dtype: torch.dtype = torch.float32) -> Listener:
    return Listener(Stage(model, operations, torch.zeros(1, dtype=dtype), max_frames=MAX_FRAMES), None)


def distance(found: Tensor, wanted: Tensor) -> float:
    assert found.shape == wanted.shape
    return float((found.float() - wanted).norm() / wanted.norm())


# --- shapes ---


@given(st.integers(1, 2000))
def test_a_bucket_holds_its_buffers_and_little_more(n_frames: int) -> None:
    room = bucket(n_frames)
    assert n_frames <= room == bucket(room)
    assert room - n_frames <= max(3, n_frames // 4)


@given(st.integers(MIN_SAMPLES, 500_000))
def test_frames_are_counted_as_the_encoder_does(n_samples: int) -> None:
    assert n_frames_of(n_samples) == int(n_encoder_frames(torch.tensor(n_samples // 160)))


@given(st.lists(st.integers(1, 600), min_size=1, max_size=150))
def test_each_buffer_is_in_one_pass_that_has_room_for_it(lengths: list[int]) -> None:
    taken = passes(lengths)
    assert sorted(index for _, _, indices in taken for index in indices) == list(range(len(lengths)))
    for batch, room, indices in taken:
        assert len(indices) <= batch <= 64
        assert room == room_for(max(lengths[index] for index in indices), batch)
        assert (batch, room) in shapes(600)
        assert batch == 1 or batch * room <= 10_240


def test_shapes_that_streams_need_are_few_enough_to_be_ready() -> None:
    assert len(shapes(150)) < 60
    assert {(1, 28), (1, 144), (2, 160), (64, 32)} <= set(shapes(150))


def test_buffers_of_a_length_share_a_pass_and_a_long_one_has_its_own() -> None:
    assert passes([25] * 16) == [(16, 32, list(range(16)))]
    assert [(batch, room) for batch, room, _ in passes([25] * 16 + [600])] == [(16, 32), (1, 640)]


def test_a_buffer_that_has_no_features_or_no_room_is_refused() -> None:
    heard = listener(model_of(SMALL), TorchOperations(SMALL, torch.float32))
    for n_samples in (MIN_SAMPLES - 1, (MAX_FRAMES + 1) * FRAME_SAMPLES):
        with pytest.raises(ValueError, match=f"a buffer of {n_samples} samples; from 320 to {MAX_FRAMES * 1280}"):
            heard.listen([noise(n_samples)])


# --- in torch ---


@pytest.mark.parametrize(
    "config",
    [
        SMALL,
        replace(SMALL, attention_span=(4, 2)),
        replace(SMALL, has_attention_bias=True, has_convolution_bias=True, scales_input=True),
    ],
    ids=["plain", "band", "biases and scale"],
)
def test_a_padded_batch_gives_what_the_reference_gives_alone(config: ParakeetConfig) -> None:
    model = model_of(config)
    for name, tensor in model.state_dict().items():
        if name.endswith("bias"):
            tensor.normal_(std=0.1)
    frames = listener(model, TorchOperations(config, torch.float32)).listen([noise(n) for n in LENGTHS])
    for n_samples, found in zip(LENGTHS, frames, strict=True):
        torch.testing.assert_close(found, reference(model, noise(n_samples)), atol=2e-5, rtol=1e-4)


def test_what_is_behind_a_buffer_from_before_changes_nothing() -> None:
    heard = listener(model_of(SMALL), TorchOperations(SMALL, torch.float32))
    (first,) = heard.listen([noise(20_000)])
    heard.listen([noise(20_479)])  # of the same bucket, longer and louder
    (again,) = heard.listen([noise(20_000)])
    assert torch.equal(first, again)


# --- the kernels, on this processor ---


@pytest.mark.parametrize(
    ("config", "max_own_rows"),
    [
        (FOR_KERNELS, 0),
        (FOR_KERNELS, 1 << 20),
        (replace(FOR_KERNELS, n_heads=2, attention_span=(5, 3), scales_input=True, conv_kernel=5), 0),
    ],
    ids=["the library's products", "own products", "wide heads, band, short convolution"],
)
def test_kernels_give_what_the_reference_gives(
    config: ParakeetConfig, max_own_rows: int, emulated: Callable[..., Operations]
) -> None:
    model = model_of(config)
    heard = listener(model, emulated(config, max_own_rows), torch.bfloat16)
    lengths = [48_000, 30_000] if max_own_rows else [70_000, 30_000, MIN_SAMPLES]
    for n_samples, found in zip(lengths, heard.listen([noise(n) for n in lengths]), strict=True):
        assert distance(found, reference(model, noise(n_samples))) < TOLERANCE


@pytest.fixture
def emulated(tmp_path: Path) -> Callable[[ParakeetConfig, int], Operations]:
    if COMPILER is None:
        pytest.skip("g++ is not installed, so kernels can't be run on this processor")

    def make(config: ParakeetConfig, max_own_rows: int) -> Operations:
        kernels = EmulatedKernels(config, tmp_path, Gpu(8, H200.shared_bytes))
        return KernelOperations(config, kernels, torch.device("cpu"), max_own_rows=max_own_rows)

    return make


def test_features_by_kernels_are_those_of_the_reference(emulated: Callable[..., Operations]) -> None:
    operations, room = emulated(FOR_KERNELS, 0), 8
    numbers = torch.tensor([[10_000, 4_321], [62, 27], [8, 4]], dtype=torch.int32)
    samples = torch.randn(2, room * FRAME_SAMPLES + SAMPLES_BEHIND)
    with torch.inference_mode():
        found = operations.features(samples, Lengths.of(numbers, room))
    torch.testing.assert_close(found, log_mel(samples, numbers[0], 32), atol=2e-4, rtol=1e-4)


# --- what is compiled ---


@needs_nvrtc
@pytest.mark.parametrize("arch", list(GPUS))
def test_kernels_compile_for_every_architecture_and_keep_to_their_registers(arch: str) -> None:
    cubin = build(V3, GPUS[arch], arch=arch, cache=None)
    assert {name for name, usage in cubin.usage.items() if usage.spill_bytes} == set()
    spread = products(V3, GPUS[arch])
    assert None not in spread.values()
    ours = [product.kernel for product in spread.values() if product]
    assert {*KERNELS, *ours} == set(cubin.usage)
    assert max(cubin.usage[name].registers for name in ours) <= 128  # two blocks of 256 threads on an SM


def test_sizes_that_no_kernel_is_made_for_are_named() -> None:
    assert why_not(V3) is None
    assert why_not(FOR_KERNELS) is None
    assert (
        why_not(SMALL) == "the encoder's kernels are not made for width 64, feed-forward width 96, head size 16, 32 "
        "subsampling channels"
    )
    assert "biases" in str(why_not(replace(V3, has_attention_bias=True)))


def test_products_of_the_published_size_have_a_block_for_nearly_every_sm() -> None:
    for (n, k, _), product in products(V3, H200).items():
        assert product is not None
        assert n // (product.columns * 8) * product.n_parts(k) == 128
        assert 2 * (product.shared_bytes + 1024) <= 227 * 1024  # the next one's weights come while this one computes


@given(
    st.integers(1, 600), st.integers(1, 80), st.sampled_from(To), st.integers(1, 200), st.sampled_from([99, 163, 227])
)
def test_a_product_is_spread_without_rest_or_not_at_all(
    n: int, pieces: int, to: To, n_sms: int, shared_kib: int
) -> None:
    shared_bytes = shared_kib << 10
    product = product_for(n * 8, pieces * 256, to, Gpu(n_sms, shared_bytes))
    if product is None:
        assert to is not To.SUM
        assert pieces not in (1, 2, 4)
        return
    assert n % product.columns == 0
    assert product.shared_bytes <= shared_bytes
    assert product.n_parts(pieces * 256) * product.chunks == pieces
    assert to is To.SUM or product.n_parts(pieces * 256) == 1


def test_the_shape_of_a_product_names_its_kernel() -> None:
    assert Product(4, 1, To.SUM).kernel == "product_4_1_0"


def test_filters_are_packed_whole() -> None:
    first, packed = packed_filters(128)
    whole = torch.zeros(128, FFT_SAMPLES // 2 + 1 + len(packed))
    for mel in range(128):
        whole[mel, first[mel] : first[mel] + len(packed)] = packed[:, mel]
    torch.testing.assert_close(whole[:, : FFT_SAMPLES // 2 + 1], mel_filters(128, FFT_SAMPLES))


def test_arguments_become_words() -> None:
    tensor = torch.zeros(3)
    structure = words([tensor, 7, 0.5, None])
    assert structure[:4].tolist() == [tensor.data_ptr(), 7, 0x3F000000, 0]
    with pytest.raises(AssertionError, match="argument 1 of a kernel has gaps"):
        words([None, torch.zeros(4, 4).T])
