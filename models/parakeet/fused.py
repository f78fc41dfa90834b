"""What lies between the matrix products of Parakeet's encoder, in as few pieces as can be: the interface, and in torch.

``stage.py`` says in which order the pieces come, ``device.py`` has them as kernels. The torch pieces compute on any
device and in any float type what ``encoder.py`` does. Does not know audio or the network around them.

Shapes: B batch, M mel frames, T encoder frames, R = B · T rows, W width, H heads, D head size, C channels.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from .config import ParakeetConfig
from .encoder import band, relative_shift
from .features import log_mel

EPSILON = 1e-5  # of every norm


@dataclass(frozen=True, slots=True, eq=False)
class Norm:
    """A layer norm; float32 [W] each."""

    scale: Tensor
    offset: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Linear:
    """A weight [n_out, n_in] in the type that is computed in, and its bias in float32."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Strides:
    """The subsampling. Taps are [9, C], biases [C], float32; a tap's number is 3 · (its row) + (its column)."""

    first_taps: Tensor
    first_bias: Tensor
    second_taps: Tensor
    second_bias: Tensor
    second_point: Linear  # [C, C]
    third_taps: Tensor
    third_bias: Tensor
    third_point: Linear
    out: Linear  # [W, mel channels left · C], in this order


@dataclass(frozen=True, slots=True, eq=False)
class Layer:
    """One block. The batch norm is in the taps, and the keys of distances are computed."""

    norm_feed_forward1: Norm
    feed_forward1_in: Linear
    feed_forward1_out: Linear
    norm_attention: Norm
    qkv: Linear  # [3 · W, W]
    content_bias: Tensor  # [H, D], u of the papers
    distance_bias: Tensor  # [H, D], v
    distances: Tensor  # [2 · largest T − 1, H, D]: keys of the distances T − 1 (to the left) to −(T − 1)
    out: Linear
    norm_convolution: Norm
    gate: Linear  # [2 · W, W]
    taps: Tensor  # float32 [kernel, W]
    taps_bias: Tensor  # float32 [W]
    mix: Linear
    norm_feed_forward2: Norm
    feed_forward2_in: Linear
    feed_forward2_out: Linear
    norm_out: Norm


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """What is each buffer's own of a padded batch: int32 [B] each, on the device. ``room`` is T with the padding."""

    n_samples: Tensor
    n_mel_frames: Tensor
    n_frames: Tensor
    room: int

    @classmethod
    def of(cls, numbers: Tensor, room: int) -> "Lengths":
        """From int32 [3, B]."""
        n_samples, n_mel_frames, n_frames = numbers.unbind()
        return cls(n_samples, n_mel_frames, n_frames, room)

    @property
    def batch(self) -> int:
        """B."""
        return len(self.n_frames)


class Operations(Protocol):
    """The pieces. No value is looked at, so that a CUDA graph may hold any of them."""

    def features(self, samples: Tensor, lengths: Lengths) -> Tensor:
        """float32 [B, 1280 · T + SAMPLES_BEHIND] → float32 [B, M, n_mels], zeros behind what is a buffer's own."""

    def first_strides(self, features: Tensor, strides: Strides, lengths: Lengths) -> Tensor:
        """The first convolution, ReLU, the second depthwise one: [B, M, n_mels] → [B, M / 4, n_mels / 4, C]."""

    def second_stride(self, x: Tensor, strides: Strides, lengths: Lengths) -> Tensor:
        """ReLU and the third depthwise convolution: [B, M / 4, n_mels / 4, C] → [B, T, n_mels / 8, C]."""

    def product(self, x: Tensor, linear: Linear, *, silu: bool = False) -> Tensor:
        """[R, n_in] → [R, n_out]."""

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
        """``residual`` float32 [R, W], which is used up, plus ``factor`` times the product with ``x`` [R, n_in].

        Where a block ends, the sum is normed by ``end``. Second, what comes next: the sum normed by ``norm``.
        """

    def attend(self, qkv: Tensor, layer: Layer, lengths: Lengths) -> Tensor:
        """[R, 3 · W] → [R, W]: attention by content and distance within each buffer."""

    def convolve(self, x: Tensor, layer: Layer, lengths: Lengths) -> Tensor:
        """[R, 2 · W] → [R, W]: gate, depthwise convolution, SiLU."""


SAMPLES_BEHIND = 159  # at most, behind a buffer's last whole hop: its last frame sees some of them


class TorchOperations:
    """The pieces in torch."""

    def __init__(self, config: ParakeetConfig, dtype: torch.dtype) -> None:
        self._config = config
        self._dtype = dtype

    def features(self, samples: Tensor, lengths: Lengths) -> Tensor:
        """See ``Operations``."""
        return log_mel(samples, lengths.n_samples, self._config.n_mels)

    def first_strides(self, features: Tensor, strides: Strides, lengths: Lengths) -> Tensor:
        """See ``Operations``."""
        n_first = _halved(lengths.n_mel_frames)
        x = _strided(features[:, None], strides.first_taps, strides.first_bias, groups=1)
        x = x.relu() * _inside(n_first, x.shape[2])[:, None, :, None]
        x = _strided(x, strides.second_taps, strides.second_bias, groups=x.shape[1])
        x = x * _inside(_halved(n_first), x.shape[2])[:, None, :, None]
        return x.permute(0, 2, 3, 1).to(self._dtype)

    def second_stride(self, x: Tensor, strides: Strides, lengths: Lengths) -> Tensor:
        """See ``Operations``."""
        n_own = _halved(_halved(lengths.n_mel_frames))
        x = x.relu().float() * _inside(n_own, x.shape[1])[:, :, None, None]
        x = _strided(x.permute(0, 3, 1, 2), strides.third_taps, strides.third_bias, groups=x.shape[3])
        return x.permute(0, 2, 3, 1).to(self._dtype)

    def product(self, x: Tensor, linear: Linear, *, silu: bool = False) -> Tensor:
        """See ``Operations``."""
        y = functional.linear(x, linear.weight, None if linear.bias is None else linear.bias.to(self._dtype))
        return functional.silu(y) if silu else y

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
        """See ``Operations``."""
        y = functional.linear(x, linear.weight).float()
        if linear.bias is not None:
            y = y + linear.bias
        y = factor * y if residual is None else residual + factor * y
        if end is not None:
            y = _normed(y, end)
        return y, (y if norm is None else _normed(y, norm)).to(self._dtype)

    def attend(self, qkv: Tensor, layer: Layer, lengths: Lengths) -> Tensor:
        """See ``Operations``."""
        room, n_heads = lengths.room, self._config.n_heads
        heads = qkv.view(lengths.batch, room, 3, n_heads, -1).permute(2, 0, 3, 1, 4)  # [3, B, H, T, D]
        queries, keys, values = heads.unbind()
        middle = len(layer.distances) // 2
        distances = layer.distances[middle - room + 1 : middle + room].permute(1, 2, 0)  # [H, D, 2 · T − 1]
        by_distance = (queries + layer.distance_bias[:, None]) @ distances
        bias = relative_shift(by_distance) * queries.shape[-1] ** -0.5
        bias = bias.masked_fill(~self._allowed(lengths), torch.finfo(bias.dtype).min)
        mixed = functional.scaled_dot_product_attention(
            queries + layer.content_bias[:, None], keys, values, attn_mask=bias
        )
        return mixed.transpose(1, 2).reshape(len(qkv), -1)

    def _allowed(self, lengths: Lengths) -> Tensor:
        """[B, 1, 1 or T, T]."""
        inside = _inside(lengths.n_frames, lengths.room)[:, None, None]
        span = self._config.attention_span
        return inside if span is None else inside & band(lengths.room, *span, inside.device)

    def convolve(self, x: Tensor, layer: Layer, lengths: Lengths) -> Tensor:
        """See ``Operations``."""
        inside = _inside(lengths.n_frames, lengths.room)[..., None]  # [B, T, 1]
        gated = functional.glu(x.view(lengths.batch, lengths.room, -1), dim=-1) * inside
        taps, bias = layer.taps.T[:, None].to(x.dtype), layer.taps_bias.to(x.dtype)
        width, kernel = taps.shape[0], taps.shape[2]
        mixed = functional.conv1d(gated.transpose(1, 2), taps, bias, padding=kernel // 2, groups=width)
        return functional.silu(mixed).transpose(1, 2).reshape(len(x), width)


def _inside(n_frames: Tensor, room: int) -> Tensor:
    """[B, room]: true before the padding."""
    return torch.arange(room, device=n_frames.device) < n_frames[:, None]


def _halved(n_frames: Tensor) -> Tensor:
    return (n_frames - 1) // 2 + 1


def _strided(x: Tensor, taps: Tensor, bias: Tensor, *, groups: int) -> Tensor:
    return functional.conv2d(x, taps.T.reshape(-1, 1, 3, 3), bias, stride=2, padding=1, groups=groups)


def _normed(x: Tensor, norm: Norm) -> Tensor:
    return functional.layer_norm(x, (x.shape[-1],), norm.scale, norm.offset, EPSILON)
