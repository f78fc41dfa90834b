"""The pieces of ``fused.py`` as kernels of our own, compiled for the GPU that is there, for sizes that they fit.

Few rows go through products of our own as well: a matrix of 8 MB is read in 2 µs, less than what it takes to start a
library's product, so each kernel fetches its weights while the one before it computes (programmatic dependent launch).
Many rows go to the library. Knows torch tensors as memory. Does not know the order of the pieces.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from importlib import resources
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor

from megakernel.cubin import Cubin, compile_sources
from megakernel.device import Device, Launch, call, launch, opt_in

from ..mel import mel_filters
from .config import HOP_SAMPLES, ParakeetConfig
from .features import FFT_SAMPLES, WINDOW_SAMPLES
from .fused import Layer, Lengths, Linear, Norm, Strides

ENTRY = "encoder.cu"
SIZES_HEADER = "sizes.h"
KERNELS = (  # besides the products
    "silu",
    "advance_floats",
    "advance_bf16",
    "attend",
    "convolve",
    "first_strides",
    "second_stride",
    "cut_frames",
    "mel_logarithms",
    "normalise",
)

Argument: TypeAlias = Tensor | int | float | None

# As in encoder.cu
_N_ARGUMENTS = 12
_PRODUCT_THREADS = 256
_PRODUCT_ROWS = 32
_K_OF_CHUNK = 256  # of a block's
_TILE_COLUMNS = 8
_COLUMNS, _CHUNKS = (4, 3, 2, 1), (4, 2, 1)  # that a kernel can be made for
_SUM_STRIDE_FLOATS = 8
_ATTEND_ROWS, _ATTEND_THREADS = 16, 128
_CONVOLVE_FRAMES, _CONVOLVE_THREADS = 4, 128
_STRIDE_COLUMNS = 8
_NORMALISE_CHANNELS, _NORMALISE_THREADS = 16, 512

_N_BINS = FFT_SAMPLES // 2 + 1
_FAR = 1 << 30  # frames; an attention span that is none
_CUT_THREADS = 128
_SILU_THREADS, _SILU_PIECE = 256, 8

MAX_OWN_ROWS = 48  # up to which our products are faster than the library's, on an H200


class To(IntEnum):
    """What a product leaves: float32 parts to be summed, bfloat16, or its SiLU."""

    SUM = 0
    PLAIN = 1
    SILU = 2


@dataclass(frozen=True, slots=True)
class Product:
    """How a product of one shape is spread over blocks: ``columns`` · 8 outputs and ``chunks`` · 256 of k each."""

    columns: int
    chunks: int
    to: To

    @property
    def kernel(self) -> str:
        """Its name."""
        return f"product_{self.columns}_{self.chunks}_{self.to.value}"

    @property
    def shared_bytes(self) -> int:
        """Of a block: weights, and the sums of its warps."""
        weights = self.chunks * _K_OF_CHUNK * self.columns * _TILE_COLUMNS * 2
        n_warps = _PRODUCT_THREADS // 32
        return weights + n_warps * _PRODUCT_ROWS * (self.columns * _TILE_COLUMNS + _SUM_STRIDE_FLOATS) * 4

    def n_parts(self, k: int) -> int:
        """Into how many pieces k is cut."""
        return k // (self.chunks * _K_OF_CHUNK)


@dataclass(frozen=True, slots=True)
class Gpu:
    """What of a GPU decides how products are spread."""

    n_sms: int
    shared_bytes: int  # that a block may have

    @staticmethod
    def of(device: Device) -> "Gpu":
        """Of a device as its driver describes it."""
        return Gpu(device.n_sms, device.shared_bytes)


def product_for(n: int, k: int, to: To, gpu: Gpu) -> Product | None:
    """How to spread x · w[n, k]ᵀ over the GPU, as nearly one block for each SM as can be; ``None`` if it can't be."""
    pieces = k // _K_OF_CHUNK
    if k % _K_OF_CHUNK or (to is not To.SUM and pieces not in _CHUNKS):
        return None
    possible = [
        (n // (columns * _TILE_COLUMNS) * (pieces // chunks), Product(columns, chunks, to))
        for columns in _COLUMNS
        for chunks in (_CHUNKS if to is To.SUM else (pieces,))
        if n % (columns * _TILE_COLUMNS) == 0 and pieces % chunks == 0
    ]
    fitting = [(n_blocks, product) for n_blocks, product in possible if product.shared_bytes <= gpu.shared_bytes]
    if to is To.SUM:  # fewer parts are fewer to read again; wider blocks read x less often
        enough = [product for n_blocks, product in fitting if n_blocks >= gpu.n_sms * 3 // 4]
        best = max(enough, key=lambda product: (product.columns, product.chunks), default=None)
        return best or max((product for _, product in fitting), key=lambda product: -product.chunks, default=None)
    at_once = [product for n_blocks, product in fitting if n_blocks <= gpu.n_sms]
    most = max((product for _, product in fitting), key=lambda product: product.columns, default=None)
    return min(at_once, key=lambda product: product.columns, default=most)


def products(config: ParakeetConfig, gpu: Gpu) -> dict[tuple[int, int, To], Product | None]:
    """(n, k, what it leaves) → how it is spread, of every product that the encoder's blocks have."""
    width, ffn = config.d_model, config.d_ffn
    flat = config.subsampling_channels * (config.n_mels // 8)
    asked = [
        (ffn, width, To.SILU),
        (width, ffn, To.SUM),
        (3 * width, width, To.PLAIN),
        (2 * width, width, To.PLAIN),
        (width, width, To.SUM),
        (width, flat, To.SUM),
    ]
    return {shape: product_for(*shape, gpu) for shape in asked}


def why_not(config: ParakeetConfig) -> str | None:
    """What of these sizes the kernels do not do; ``None`` if they do all."""
    rules = {
        "biases in attention or convolution": config.has_attention_bias or config.has_convolution_bias,
        f"width {config.d_model}": config.d_model not in (256, 512, 1024),
        f"feed-forward width {config.d_ffn}": config.d_ffn % _K_OF_CHUNK != 0,
        f"head size {config.d_model // config.n_heads}": config.d_model // config.n_heads not in (64, 128),
        f"{config.n_mels} mel channels": config.n_mels % 32 != 0 or not 32 <= config.n_mels <= 256,
        f"{config.subsampling_channels} subsampling channels": config.subsampling_channels not in (64, 128, 256, 512),
        f"a convolution over {config.conv_kernel} frames": config.conv_kernel > 15,
    }
    broken = [what for what, is_broken in rules.items() if is_broken]
    return f"the encoder's kernels are not made for {', '.join(broken)}" if broken else None


def sources(config: ParakeetConfig, gpu: Gpu) -> dict[str, str]:
    """File name → text of everything that is compiled."""
    folder = resources.files(__package__) / "kernels"
    texts = {file.name: file.read_text() for file in sorted(folder.iterdir(), key=lambda file: file.name)}
    sizes = {
        "N_ARGUMENTS": _N_ARGUMENTS,
        "D_MODEL": config.d_model,
        "HEAD_SIZE": config.d_model // config.n_heads,
        "CONV_KERNEL": config.conv_kernel,
        "CHANNELS": config.subsampling_channels,
        "N_MELS": config.n_mels,
        "N_BINS": _N_BINS,
        "WINDOW_SAMPLES": WINDOW_SAMPLES,
        "HOP_SAMPLES": HOP_SAMPLES,
    }
    used = sorted({(p.columns, p.chunks, p.to.value) for p in products(config, gpu).values() if p})
    lines = ["#pragma once", *(f"#define {name} {value}" for name, value in sizes.items())]
    lines.append(f"#define PRODUCTS(X) {' '.join(f'X({columns},{chunks},{to})' for columns, chunks, to in used)}")
    return {**texts, SIZES_HEADER: "\n".join([*lines, ""])}


def build(config: ParakeetConfig, gpu: Gpu, *, arch: str, cache: Path | None) -> Cubin:
    """Machine code of the kernels for one GPU, from ``cache`` if it is there.

    Raises:
        CompilerMissingError, KernelCompileError: as ``megakernel.cubin`` does.
    """
    return compile_sources(sources(config, gpu), arch=arch, cache=cache, entry=ENTRY)


class Kernels(Protocol):
    """Kernels that can be launched by name."""

    gpu: Gpu

    def launch(
        self, name: str, arguments: Sequence[Argument], blocks: tuple[int, int, int], n_threads: int, shared_bytes: int
    ) -> None:
        """Put one launch onto torch's stream."""


class DeviceKernels:
    """The kernels in a GPU's memory."""

    def __init__(self, config: ParakeetConfig, device: Device, cubin: Cubin) -> None:
        """The calling thread's context must be the one that torch works in.

        Raises:
            DriverError: if the driver refuses them.
        """
        self.gpu = Gpu.of(device)
        self._is_dependent = device.capability >= (9, 0)
        self._module = call("cuModuleLoadData", np.frombuffer(cubin.code, np.uint8).ctypes.data)
        spread = [product for product in products(config, self.gpu).values() if product is not None]
        names = {*KERNELS, *(product.kernel for product in spread)}
        self._functions: dict[str, Any] = {
            name: call("cuModuleGetFunction", self._module, name.encode()) for name in names
        }
        for product in spread:
            opt_in(self._functions[product.kernel], product.shared_bytes)

    def launch(
        self, name: str, arguments: Sequence[Argument], blocks: tuple[int, int, int], n_threads: int, shared_bytes: int
    ) -> None:
        """See ``Kernels``."""
        how = Launch(
            n_blocks=blocks[0],
            n_blocks_y=blocks[1],
            n_blocks_z=blocks[2],
            n_threads=n_threads,
            shared_bytes=shared_bytes,
            is_dependent=self._is_dependent,
        )
        launch(self._functions[name], how, torch.cuda.current_stream().cuda_stream, words(arguments))


def words(arguments: Sequence[Argument]) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """The structure that a kernel takes: addresses, numbers, floats in the low half of a word, 0 for what is absent."""
    structure = np.zeros(_N_ARGUMENTS, np.uint64)
    for index, argument in enumerate(arguments):
        match argument:
            case Tensor():
                assert argument.is_contiguous(), f"argument {index} of a kernel has gaps"
                structure[index] = argument.data_ptr()
            case float():
                structure[index] = np.float32(argument).view(np.uint32)
            case int():
                structure[index] = argument
    return structure


class KernelOperations:
    """The pieces as kernels; activations are bfloat16."""

    def __init__(
        self, config: ParakeetConfig, kernels: Kernels, device: torch.device, *, max_own_rows: int = MAX_OWN_ROWS
    ) -> None:
        """``max_own_rows``: products of more rows are the library's."""
        self._config = config
        self._kernels = kernels
        self._products: Mapping[tuple[int, int, To], Product | None] = products(config, kernels.gpu)
        self._max_own_rows = max_own_rows
        self._basis = _fourier_basis().to(device)
        first, filters = packed_filters(config.n_mels)
        self._first_bins, self._filters = first.to(device), filters.to(device)
        span = config.attention_span
        self._left, self._right = span if span is not None else (_FAR, _FAR)

    def features(self, samples: Tensor, lengths: Lengths) -> Tensor:
        """See ``Operations``."""
        n_mels, batch, n_mel_frames = self._config.n_mels, lengths.batch, lengths.room * 8
        cut = samples.new_empty(batch * n_mel_frames, WINDOW_SAMPLES)
        arguments = (samples, lengths.n_samples, cut, samples.shape[1])
        self._launch("cut_frames", arguments, (n_mel_frames, batch), _CUT_THREADS)
        spectrum = cut @ self._basis  # [B · M, 2 · bins]
        features = samples.new_empty(batch, n_mel_frames, n_mels)
        packed = (self._first_bins, self._filters)
        self._launch("mel_logarithms", (spectrum, *packed, features, len(self._filters)), (len(cut),), n_mels)
        blocks = (n_mels // _NORMALISE_CHANNELS, batch)
        self._launch("normalise", (features, lengths.n_mel_frames, n_mel_frames), blocks, _NORMALISE_THREADS)
        return features

    def first_strides(self, features: Tensor, strides: Strides, lengths: Lengths) -> Tensor:
        """See ``Operations``."""
        n_columns, channels = self._config.n_mels // 4, self._config.subsampling_channels
        n_rows = lengths.room * 2
        out = self._empty(lengths.batch, n_rows, n_columns, channels)
        weights = (strides.first_taps, strides.first_bias, strides.second_taps, strides.second_bias)
        arguments = (features, *weights, lengths.n_mel_frames, out, features.shape[1])
        self._launch("first_strides", arguments, (n_rows, n_columns // _STRIDE_COLUMNS, lengths.batch), channels)
        return out

    def second_stride(self, x: Tensor, strides: Strides, lengths: Lengths) -> Tensor:
        """See ``Operations``."""
        n_columns, channels = self._config.n_mels // 8, self._config.subsampling_channels
        out = self._empty(lengths.batch, lengths.room, n_columns, channels)
        arguments = (x, strides.third_taps, strides.third_bias, lengths.n_mel_frames, out, x.shape[1])
        self._launch("second_stride", arguments, (n_columns, lengths.room, lengths.batch), channels // 2)
        return out

    def product(self, x: Tensor, linear: Linear, *, silu: bool = False) -> Tensor:
        """See ``Operations``."""
        assert linear.bias is None, "why_not refuses biases"
        n, k = linear.weight.shape
        spread = self._spread(len(x), n, k, To.SILU if silu else To.PLAIN)
        if spread is not None:
            y = x.new_empty(len(x), n)
            self._multiply(spread, x, linear, y)
            return y
        y = x @ linear.weight.T
        if silu:
            n_pieces = y.numel() // _SILU_PIECE
            self._launch("silu", (y, n_pieces), (-(-n_pieces // _SILU_THREADS),), _SILU_THREADS)
        return y

    def advance(
        self,
        residual: Tensor | None,
        x: Tensor,
        linear: Linear,
        *,
        factor: float = 1.0,
        end: Norm | None = None,
        norm: Norm | None,
    ) -> tuple[Tensor, Tensor]:
        """See ``Operations``. ``residual`` is overwritten."""
        n, k = linear.weight.shape
        spread = self._spread(len(x), n, k, To.SUM)
        n_parts = 1 if spread is None else spread.n_parts(k)
        if spread is None:
            parts = x @ linear.weight.T
        else:
            parts = x.new_empty(n_parts, len(x), n, dtype=torch.float32)
            self._multiply(spread, x, linear, parts)
        after = x.new_empty(len(x), n, dtype=torch.float32) if residual is None else residual
        normed = x.new_empty(len(x), n)
        norms = (*_pair(end), *_pair(norm))
        arguments = (residual, after, parts, n_parts, factor, linear.bias, *norms, normed, len(x))
        self._launch("advance_bf16" if spread is None else "advance_floats", arguments, (len(x),), n // 4)
        return after, normed

    def attend(self, qkv: Tensor, layer: Layer, lengths: Lengths) -> Tensor:
        """See ``Operations``."""
        room, n_longest = lengths.room, len(layer.distances) // 2 + 1
        assert room <= n_longest, f"{room} frames, distances of {n_longest}"
        out = qkv.new_empty(len(qkv), self._config.d_model)
        weights = (layer.content_bias, layer.distance_bias, layer.distances)
        arguments = (qkv, *weights, lengths.n_frames, out, room, n_longest, self._left, self._right)
        blocks = (-(-room // _ATTEND_ROWS), self._config.n_heads, lengths.batch)
        self._launch("attend", arguments, blocks, _ATTEND_THREADS)
        return out

    def convolve(self, x: Tensor, layer: Layer, lengths: Lengths) -> Tensor:
        """See ``Operations``."""
        width = self._config.d_model
        out = x.new_empty(len(x), width)
        arguments = (x, layer.taps, layer.taps_bias, lengths.n_frames, out, lengths.room)
        blocks = (-(-width // (2 * _CONVOLVE_THREADS)), -(-lengths.room // _CONVOLVE_FRAMES), lengths.batch)
        self._launch("convolve", arguments, blocks, _CONVOLVE_THREADS)
        return out

    def _spread(self, n_rows: int, n: int, k: int, to: To) -> Product | None:
        return self._products.get((n, k, to)) if n_rows <= self._max_own_rows else None

    def _multiply(self, spread: Product, x: Tensor, linear: Linear, out: Tensor) -> None:
        n, k = linear.weight.shape
        blocks = (n // (spread.columns * _TILE_COLUMNS), spread.n_parts(k))
        arguments = (x, linear.weight, out, len(x), n, k)
        self._launch(spread.kernel, arguments, blocks, _PRODUCT_THREADS, spread.shared_bytes)

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=self._basis.device)

    def _launch(
        self, name: str, arguments: Sequence[Argument], blocks: tuple[int, ...], n_threads: int, shared_bytes: int = 0
    ) -> None:
        x, y, z = (*blocks, 1, 1)[:3]
        self._kernels.launch(name, arguments, (x, y, z), n_threads, shared_bytes)


def _pair(norm: Norm | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if norm is None else (norm.scale, norm.offset)


def _fourier_basis() -> Tensor:
    """float32 [WINDOW_SAMPLES, 2 · bins]: the window times cosines and times sines."""
    window = torch.hann_window(WINDOW_SAMPLES, periodic=False, dtype=torch.float64)
    angles = 2 * math.pi / FFT_SAMPLES * torch.outer(torch.arange(WINDOW_SAMPLES), torch.arange(_N_BINS)).double()
    return (torch.cat([angles.cos(), angles.sin()], dim=1) * window[:, None]).float()


def packed_filters(n_mels: int) -> tuple[Tensor, Tensor]:
    """Each mel channel's first bin, int32 [n_mels], and its filter from there on, float32 [longest, n_mels]."""
    filters = mel_filters(n_mels, FFT_SAMPLES).numpy()  # [n_mels, bins]
    first = (filters != 0).argmax(axis=1)
    longest = int((filters != 0).sum(axis=1).max())
    bins = np.minimum(first[:, None] + np.arange(longest), _N_BINS - 1)
    packed = np.take_along_axis(filters, bins, axis=1) * (first[:, None] + np.arange(longest) < _N_BINS)
    return torch.from_numpy(first.astype(np.int32)), torch.from_numpy(np.ascontiguousarray(packed.T))
