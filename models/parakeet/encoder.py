"""Parakeet's encoder, a FastConformer: mel features → audio states, one for 80 ms.

Written to be read beside the papers (Rekesh et al. 2023; relative attention: Dai et al. 2019) and to be compared with;
any float type, any device. Its parameters have the names of transformers' checkpoints. Does not know audio, tokens, or
how matrices are stored.

Shapes: B batch, M mel frames, T encoder frames, W width, H heads, D head size, C channels.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from .config import ParakeetConfig

N_STRIDES = 3  # each halves the frames


def n_encoder_frames(n_mel_frames: Tensor) -> Tensor:
    """How many encoder frames there are for so many mel frames: their eighth, rounded up."""
    for _ in range(N_STRIDES):
        n_mel_frames = _halved(n_mel_frames)
    return n_mel_frames


def _halved(n_frames: Tensor) -> Tensor:
    """Outputs of a convolution of kernel 3, stride 2, padding 1."""
    return (n_frames - 1) // 2 + 1


def _inside(n_frames: Tensor, length: int) -> Tensor:
    """[B, length]: true before the padding."""
    return torch.arange(length, device=n_frames.device) < n_frames[:, None]


class Subsampling(nn.Module):
    """Three strided convolutions over time and mel channels, two of them depthwise, then a linear over what is left."""

    def __init__(self, config: ParakeetConfig) -> None:
        super().__init__()
        channels = config.subsampling_channels

        def strided(n_in: int, groups: int) -> nn.Conv2d:
            return nn.Conv2d(n_in, channels, kernel_size=3, stride=2, padding=1, groups=groups)

        def pointwise() -> nn.Conv2d:
            return nn.Conv2d(channels, channels, kernel_size=1)

        self.layers = nn.ModuleList(
            [
                strided(1, groups=1),
                nn.ReLU(),
                *(strided(channels, groups=channels), pointwise(), nn.ReLU()),
                *(strided(channels, groups=channels), pointwise(), nn.ReLU()),
            ]
        )
        self.linear = nn.Linear(channels * (config.n_mels >> N_STRIDES), config.d_model)

    def forward(self, features: Tensor, n_mel_frames: Tensor) -> Tensor:
        """[B, M, n_mels] → [B, T, W]. What a bias puts into the padding is taken out again after every convolution."""
        x = features[:, None]  # [B, 1, M, n_mels]
        n_frames = n_mel_frames
        for layer in self.layers:
            x = layer(x)
            if isinstance(layer, nn.Conv2d):
                if layer.stride[0] > 1:
                    n_frames = _halved(n_frames)
                x = x * _inside(n_frames, x.shape[2])[:, None, :, None]
        projected: Tensor = self.linear(x.transpose(1, 2).flatten(2))  # [B, T, C · mel] → [B, T, W]
        return projected


class FeedForward(nn.Module):
    """The two-layer perceptron, of which each block has two halves."""

    def __init__(self, config: ParakeetConfig) -> None:
        super().__init__()
        self.linear1 = nn.Linear(config.d_model, config.d_ffn, bias=config.has_attention_bias)
        self.linear2 = nn.Linear(config.d_ffn, config.d_model, bias=config.has_attention_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, W] → [B, T, W]."""
        y: Tensor = self.linear2(functional.silu(self.linear1(x)))
        return y


class RelativeAttention(nn.Module):
    """Attention whose scores are (q + u)·k + (q + v)·r: what is there, and how far away it is."""

    def __init__(self, config: ParakeetConfig) -> None:
        super().__init__()
        self.n_heads = config.n_heads
        self.q_proj = nn.Linear(config.d_model, config.d_model, bias=config.has_attention_bias)
        self.k_proj = nn.Linear(config.d_model, config.d_model, bias=config.has_attention_bias)
        self.v_proj = nn.Linear(config.d_model, config.d_model, bias=config.has_attention_bias)
        self.o_proj = nn.Linear(config.d_model, config.d_model, bias=config.has_attention_bias)
        self.relative_k_proj = nn.Linear(config.d_model, config.d_model, bias=False)
        self.bias_u = nn.Parameter(torch.zeros(config.n_heads, config.d_model // config.n_heads))
        self.bias_v = nn.Parameter(torch.zeros(config.n_heads, config.d_model // config.n_heads))

    def position_keys(self, positions: Tensor) -> Tensor:
        """Sinusoids [2·T − 1, W] → keys [H, 2·T − 1, D] of each distance."""
        return self._heads(self.relative_k_proj(positions)[None])[0]

    def forward(self, x: Tensor, position_keys: Tensor, allowed: Tensor) -> Tensor:
        """[B, T, W] → [B, T, W]. ``allowed`` [B, 1, T or 1, T] is true where a frame (row) may look (column)."""
        queries, keys, values = self._heads(self.q_proj(x)), self._heads(self.k_proj(x)), self._heads(self.v_proj(x))
        by_distance = (queries + self.bias_v[:, None]) @ position_keys.transpose(-1, -2)  # [B, H, T, 2·T − 1]
        bias = relative_shift(by_distance) * queries.shape[-1] ** -0.5  # [B, H, T, T]
        # Not -inf: a padded row that may look nowhere would be NaN, and spread.
        bias = bias.masked_fill(~allowed, torch.finfo(bias.dtype).min)
        mixed = functional.scaled_dot_product_attention(
            queries + self.bias_u[:, None], keys, values, attn_mask=bias
        )  # [B, H, T, D]
        y: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return y

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.n_heads, -1).transpose(1, 2)  # [B, H, T, D]


def relative_shift(by_distance: Tensor) -> Tensor:
    """Scores by distance [..., T, 2·T − 1], farthest to the left last → scores by position [..., T, T].

    Row i begins at its distance i, which is column T − 1 − i; one column more in front makes all rows line up when they
    are read with a length of T (Dai et al. 2019, appendix B).
    """
    n_frames = by_distance.shape[-2]
    longer = functional.pad(by_distance, (1, 0)).flatten(-2)
    return longer[..., n_frames:].view(by_distance.shape)[..., :n_frames]


class PointwiseConv(nn.Conv1d):
    """A linear at every frame, whose weight is kept as that of a convolution of kernel 1."""

    def __init__(self, n_in: int, n_out: int, *, bias: bool) -> None:
        super().__init__(n_in, n_out, kernel_size=1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[B, T, n_in] → [B, T, n_out]."""
        return functional.linear(x, self.weight[..., 0], self.bias)


class ConvolutionModule(nn.Module):
    """A gate, a depthwise convolution over time, and a linear."""

    def __init__(self, config: ParakeetConfig) -> None:
        super().__init__()
        width, kernel, has_bias = config.d_model, config.conv_kernel, config.has_convolution_bias
        self.pointwise_conv1 = PointwiseConv(width, 2 * width, bias=has_bias)
        self.depthwise_conv = nn.Conv1d(width, width, kernel, padding=kernel // 2, groups=width, bias=has_bias)
        self.norm: nn.Module = nn.BatchNorm1d(width)
        self.pointwise_conv2 = PointwiseConv(width, width, bias=has_bias)

    def forward(self, x: Tensor, inside: Tensor) -> Tensor:
        """[B, T, W] → [B, T, W]. ``inside`` [B, T, 1]: what is behind it must not reach the frames before it."""
        gated = functional.glu(self.pointwise_conv1(x), dim=-1) * inside
        mixed = self.norm(self.depthwise_conv(gated.transpose(1, 2))).transpose(1, 2)
        y: Tensor = self.pointwise_conv2(functional.silu(mixed))
        return y

    def fold_norm(self) -> None:
        """Put the batch norm, a scale and an offset by channel once trained, into the convolution before it."""
        norm, conv = self.norm, self.depthwise_conv
        if isinstance(norm, nn.BatchNorm1d):
            folded = nn.utils.fusion.fuse_conv_bn_eval(conv.eval(), norm.eval())
            self.depthwise_conv, self.norm = folded, nn.Identity()


class Block(nn.Module):
    """Half a feed-forward, attention, convolution, the other half; the residual is normed at the end."""

    def __init__(self, config: ParakeetConfig) -> None:
        super().__init__()
        self.norm_feed_forward1 = nn.LayerNorm(config.d_model)
        self.feed_forward1 = FeedForward(config)
        self.norm_self_att = nn.LayerNorm(config.d_model)
        self.self_attn = RelativeAttention(config)
        self.norm_conv = nn.LayerNorm(config.d_model)
        self.conv = ConvolutionModule(config)
        self.norm_feed_forward2 = nn.LayerNorm(config.d_model)
        self.feed_forward2 = FeedForward(config)
        self.norm_out = nn.LayerNorm(config.d_model)

    def forward(self, x: Tensor, position_keys: Tensor, allowed: Tensor, inside: Tensor) -> Tensor:
        """[B, T, W] → [B, T, W]."""
        x = x + 0.5 * self.feed_forward1(self.norm_feed_forward1(x))
        x = x + self.self_attn(self.norm_self_att(x), position_keys, allowed)
        x = x + self.conv(self.norm_conv(x), inside)
        x = x + 0.5 * self.feed_forward2(self.norm_feed_forward2(x))
        y: Tensor = self.norm_out(x)
        return y


class Encoder(nn.Module):
    """Subsampling, then the blocks. In evaluation ``prepare`` computes the keys of distances once."""

    def __init__(self, config: ParakeetConfig) -> None:
        super().__init__()
        self.config = config
        self.subsampling = Subsampling(config)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self._prepared: list[Tensor] = []  # per layer [H, 2·N − 1, D]

    @property
    def blocks(self) -> list[Block]:
        """The layers, with the type that a ``ModuleList`` forgets."""
        return [layer for layer in self.layers if isinstance(layer, Block)]

    @torch.no_grad()
    def prepare(self, n_frames: int) -> None:
        """Compute the keys of all distances up to ``n_frames`` once, which takes 2 GFLOP a second of them otherwise.

        Once the weights are loaded and where they shall be; again after any change of them. Longer batches than
        ``n_frames`` are computed all the same.
        """
        self._prepared = []
        self._prepared = self.position_keys(n_frames)

    def position_keys(self, n_frames: int) -> list[Tensor]:
        """For each layer the keys [H, 2·n_frames − 1, D] of the distances n_frames − 1 down to −(n_frames − 1)."""
        if self._prepared and (n_spare := (self._prepared[0].shape[1] + 1) // 2 - n_frames) >= 0:
            return [keys[:, n_spare : n_spare + 2 * n_frames - 1] for keys in self._prepared]
        weight = self.blocks[0].self_attn.bias_u  # tells where and in which type to compute
        positions = sinusoids(n_frames, self.config.d_model, weight.device).to(weight.dtype)
        return [block.self_attn.position_keys(positions) for block in self.blocks]

    def forward(self, features: Tensor, n_mel_frames: Tensor) -> Tensor:
        """[B, M, n_mels] → [B, T, W]; rows behind ``n_encoder_frames(n_mel_frames)`` [B] mean nothing."""
        x = self.subsampling(features, n_mel_frames)
        if self.config.scales_input:
            x = x * math.sqrt(self.config.d_model)
        inside = _inside(n_encoder_frames(n_mel_frames), x.shape[1])  # [B, T]
        allowed = inside[:, None, None]  # [B, 1, 1, T]
        if self.config.attention_span is not None:
            allowed = allowed & band(x.shape[1], *self.config.attention_span, x.device)
        for block, position_keys in zip(self.blocks, self.position_keys(x.shape[1]), strict=True):
            x = block(x, position_keys, allowed, inside[..., None])
        states: Tensor = x
        return states


def sinusoids(n_frames: int, width: int, device: torch.device) -> Tensor:
    """float32 [2·n_frames − 1, width]: distances n_frames − 1 down to −(n_frames − 1), sines and cosines in turn."""
    distances = torch.arange(n_frames - 1, -n_frames, -1, device=device, dtype=torch.float32)
    frequencies = 10_000.0 ** (-torch.arange(0, width, 2, device=device, dtype=torch.float32) / width)
    angles = torch.outer(distances, frequencies)
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(1)


def band(n_frames: int, left: int, right: int, device: torch.device) -> Tensor:
    """[n_frames, n_frames]: true where the column is at most ``left`` frames before the row, or ``right`` behind it."""
    ahead = torch.arange(n_frames, device=device) - torch.arange(n_frames, device=device)[:, None]
    return (ahead >= -left) & (ahead <= right)
