"""Whisper's network in plain torch: the encoder, and a decoder that advances by any number of tokens.

Knows tensors, caches and shapes, written to be read beside the paper (Radford et al. 2022) and to be compared with; any
float type, any device. Does not know tokens' meaning, decoding rules, audio, or how matrices are stored on a CPU
(``cpu.py`` swaps the linears).

Shapes: B batch, T tokens of this call, N tokens in the cache, S encoder positions (20 ms each), H heads, D head size,
W width, V vocabulary.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional

from ..weights import load_exactly
from .config import WhisperConfig


class Attention(nn.Module):
    """Projections of one attention; keys have no bias, since a constant added to every score changes nothing."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width, bias=False)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def queries(self, x: Tensor) -> Tensor:
        """[B, T, W] → [B, H, T, D]."""
        return self._heads(self.q_proj(x))

    def keys_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[B, T, W] → keys and values [B, H, T, D]."""
        return self._heads(self.k_proj(x)), self._heads(self.v_proj(x))

    def output(self, x: Tensor) -> Tensor:
        """[B, H, T, D] → [B, T, W]."""
        merged: Tensor = self.out_proj(x.transpose(1, 2).flatten(2))
        return merged

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.n_heads, -1).transpose(1, 2)  # [B, H, T, D]


@dataclass(frozen=True, slots=True, eq=False)
class SilentTail:
    """What attention sees of the silence that fills a window up to 30 s: every ``stride``-th position of it.

    Whisper was trained on filled windows only. Over a shorter one the decoder loops, or writes on after the last word:
    the silence is where its heads rest. So a silent window is encoded once, and its keys and values stand behind every
    short window's own, each weighing as much as ``stride`` positions (benchmarks/results/whisper_padding.md).
    """

    encoder_keys: list[Tensor]  # per encoder layer [1, H, n_audio_positions / stride, D]
    encoder_values: list[Tensor]
    cross_keys: list[Tensor]  # per decoder layer, likewise
    cross_values: list[Tensor]
    stride: int

    def bias(self, n_positions: int) -> Tensor:
        """What is added to scores [n_positions + n_tail] behind a window of ``n_positions``."""
        n_tail = self.cross_keys[0].shape[2] - self._first(n_positions)
        bias = self.cross_keys[0].new_zeros(n_positions + n_tail)
        bias[n_positions:] = math.log(self.stride)
        return bias

    def behind(self, own: Tensor, remembered: Tensor) -> Tensor:
        """``remembered`` behind a window's ``own`` keys or values [1, H, S, D]."""
        return torch.cat([own, remembered[:, :, self._first(own.shape[2]) :]], dim=2)

    def _first(self, n_positions: int) -> int:
        """Index of the first remembered position behind ``n_positions``; where nothing is left, one past the last."""
        return min(-(-n_positions // self.stride), self.cross_keys[0].shape[2])


class EncoderLayer(nn.Module):
    """Pre-norm block: attention over the whole window, then the two-layer perceptron."""

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self.self_attn_layer_norm = nn.LayerNorm(config.width)
        self.self_attn = Attention(config.width, config.n_heads)
        self.final_layer_norm = nn.LayerNorm(config.width)
        self.fc1 = nn.Linear(config.width, config.n_ffn)
        self.fc2 = nn.Linear(config.n_ffn, config.width)

    def forward(self, x: Tensor, tail: SilentTail | None, index: int) -> Tensor:
        """[B, S, W] → [B, S, W]; ``index`` is this layer's in ``tail``."""
        normed = self.self_attn_layer_norm(x)
        keys, values = self.self_attn.keys_values(normed)
        bias = None
        if tail is not None:
            bias = tail.bias(x.shape[1])[None]  # [1, S + tail], the same for every query
            keys = tail.behind(keys, tail.encoder_keys[index])
            values = tail.behind(values, tail.encoder_values[index])
        mixed = functional.scaled_dot_product_attention(self.self_attn.queries(normed), keys, values, attn_mask=bias)
        x = x + self.self_attn.output(mixed)
        hidden: Tensor = self.fc2(functional.gelu(self.fc1(self.final_layer_norm(x))))
        return x + hidden


class Encoder(nn.Module):
    """Mel frames to audio states, one for two frames. A window shorter than 30 s takes a prefix of the positions."""

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self.n_positions = config.n_audio_positions
        self.conv1 = nn.Conv1d(config.n_mels, config.width, kernel_size=3, padding=1)
        self.conv2 = nn.Conv1d(config.width, config.width, kernel_size=3, stride=2, padding=1)
        self.embed_positions = nn.Embedding(config.n_audio_positions, config.width)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.n_encoder_layers))
        self.layer_norm = nn.LayerNorm(config.width)

    def forward(self, mel: Tensor, tail: SilentTail | None = None) -> Tensor:
        """[B, n_mels, 2·S] → [B, S, W]. With ``tail`` (B = 1) the silence up to the full window is attended to.

        Raises:
            ValueError: for more frames than there are positions, or an odd number of them.
        """
        n_frames = mel.shape[-1]
        if n_frames % 2 or not 0 < n_frames <= 2 * self.n_positions:
            raise ValueError(
                f"the encoder takes an even number of mel frames up to {2 * self.n_positions}, not {n_frames}"
            )
        x = self._embed(mel)
        for index, layer in enumerate(self.layers):
            x = layer(x, tail, index)
        normed: Tensor = self.layer_norm(x)
        return normed

    def keys_values(self, mel: Tensor) -> list[tuple[Tensor, Tensor]]:
        """What the layers attend to in a window: keys and values [B, H, S, D] of each."""
        x = self._embed(mel)
        attended = []
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, EncoderLayer)  # a ModuleList forgets what it holds
            attended.append(layer.self_attn.keys_values(layer.self_attn_layer_norm(x)))
            x = layer(x, None, index)
        return attended

    def _embed(self, mel: Tensor) -> Tensor:
        x = functional.gelu(self.conv1(mel))
        x = functional.gelu(self.conv2(x)).transpose(1, 2)  # [B, S, W]
        return x + self.embed_positions.weight[: x.shape[1]]


@dataclass(slots=True, eq=False)
class DecoderCache:
    """What the decoder remembers of one window. ``n_tokens`` may be set back to forget the last tokens."""

    cross_keys: list[Tensor]  # per layer [B, H, S, D]
    cross_values: list[Tensor]  # per layer [B, H, S, D]
    self_keys: list[Tensor]  # per layer [B, H, n_text_positions, D], valid up to n_tokens
    self_values: list[Tensor]  # per layer [B, H, n_text_positions, D], valid up to n_tokens
    audio_bias: Tensor | None = None  # [S], added to the scores of the audio
    n_tokens: int = 0
    alignment_scores: list[Tensor] = field(default_factory=list)  # of the last call, per alignment head [B, T, S]


class DecoderLayer(nn.Module):
    """Pre-norm block: causal attention over tokens, attention over audio, the two-layer perceptron."""

    def __init__(self, config: WhisperConfig, index: int) -> None:
        super().__init__()
        self.index = index
        self.alignment_heads = [head for layer, head in config.alignment_heads if layer == index]
        self.self_attn_layer_norm = nn.LayerNorm(config.width)
        self.self_attn = Attention(config.width, config.n_heads)
        self.encoder_attn_layer_norm = nn.LayerNorm(config.width)
        self.encoder_attn = Attention(config.width, config.n_heads)
        self.final_layer_norm = nn.LayerNorm(config.width)
        self.fc1 = nn.Linear(config.width, config.n_ffn)
        self.fc2 = nn.Linear(config.n_ffn, config.width)

    def forward(self, x: Tensor, cache: DecoderCache, mask: Tensor | None) -> Tensor:
        """[B, T, W] → [B, T, W]; ``mask`` [T, N + T] is true where a token may look."""
        x = x + self._attend_tokens(self.self_attn_layer_norm(x), cache, mask)
        x = x + self._attend_audio(self.encoder_attn_layer_norm(x), cache)
        hidden: Tensor = self.fc2(functional.gelu(self.fc1(self.final_layer_norm(x))))
        return x + hidden

    def _attend_tokens(self, x: Tensor, cache: DecoderCache, mask: Tensor | None) -> Tensor:
        begin, end = cache.n_tokens, cache.n_tokens + x.shape[1]
        keys, values = cache.self_keys[self.index], cache.self_values[self.index]
        keys[:, :, begin:end], values[:, :, begin:end] = self.self_attn.keys_values(x)
        mixed = functional.scaled_dot_product_attention(
            self.self_attn.queries(x), keys[:, :, :end], values[:, :, :end], attn_mask=mask
        )
        return self.self_attn.output(mixed)

    def _attend_audio(self, x: Tensor, cache: DecoderCache) -> Tensor:
        queries, keys = self.encoder_attn.queries(x), cache.cross_keys[self.index]
        scores = (queries * queries.shape[-1] ** -0.5) @ keys.transpose(-1, -2)  # [B, H, T, S]
        if cache.audio_bias is not None:
            scores = scores + cache.audio_bias
        cache.alignment_scores += [scores[:, head] for head in self.alignment_heads]
        return self.encoder_attn.output(scores.softmax(-1) @ cache.cross_values[self.index])


class Decoder(nn.Module):
    """Tokens and audio states to the logits of the next token."""

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self.n_positions = config.n_text_positions
        self.embed_tokens = nn.Embedding(config.n_vocab, config.width)
        self.embed_positions = nn.Embedding(config.n_text_positions, config.width)
        self.layers = nn.ModuleList(DecoderLayer(config, index) for index in range(config.n_decoder_layers))
        self.layer_norm = nn.LayerNorm(config.width)

    def open_cache(self, audio: Tensor, tail: SilentTail | None = None) -> DecoderCache:
        """A cache without tokens for audio states [B, S, W]; the keys and values of the audio are computed here, once.

        With ``tail`` (B = 1) the silence up to the full window follows the audio, also in the alignment scores.
        """
        crossed = self.keys_values(audio)
        batch, n_heads, n_positions, head_size = crossed[0][0].shape
        if tail is not None:
            crossed = [
                (tail.behind(keys, tail.cross_keys[index]), tail.behind(values, tail.cross_values[index]))
                for index, (keys, values) in enumerate(crossed)
            ]
        room = (batch, n_heads, self.n_positions, head_size)
        return DecoderCache(
            cross_keys=[keys.contiguous() for keys, _ in crossed],
            cross_values=[values.contiguous() for _, values in crossed],
            self_keys=[audio.new_empty(room) for _ in self.layers],
            self_values=[audio.new_empty(room) for _ in self.layers],
            audio_bias=None if tail is None else tail.bias(n_positions),
        )

    def keys_values(self, audio: Tensor) -> list[tuple[Tensor, Tensor]]:
        """What the layers attend to in audio states [B, S, W]: keys and values [B, H, S, D] of each."""
        crossed = []
        for layer in self.layers:
            assert isinstance(layer, DecoderLayer)  # a ModuleList forgets what it holds
            crossed.append(layer.encoder_attn.keys_values(audio))
        return crossed

    def forward(self, tokens: Tensor, cache: DecoderCache) -> Tensor:
        """Advance by ``tokens`` [B, T]: hidden states [B, T, W] after the last norm.

        Leaves the alignment heads' scores of this call in the cache, in the order of ``config.alignment_heads`` if that
        is sorted by layer.

        Raises:
            ValueError: if the tokens do not fit behind those in the cache.
        """
        begin, end = cache.n_tokens, cache.n_tokens + tokens.shape[1]
        if end > self.n_positions:
            raise ValueError(f"{end} tokens exceed the decoder's {self.n_positions} positions")
        x = self.embed_tokens(tokens) + self.embed_positions.weight[begin:end]
        mask = None if tokens.shape[1] == 1 else _causal_mask(begin, end, x.device)
        cache.alignment_scores = []
        for layer in self.layers:
            x = layer(x, cache, mask)
        cache.n_tokens = end
        normed: Tensor = self.layer_norm(x)
        return normed


def _causal_mask(begin: int, end: int, device: torch.device) -> Tensor:
    """[end - begin, end]: token ``begin + i`` sees itself and everything before it."""
    return torch.ones(end - begin, end, dtype=torch.bool, device=device).tril(diagonal=begin)


class Whisper(nn.Module):
    """Encoder, decoder, and the head that shares its weights with the token embedding."""

    def __init__(self, config: WhisperConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)
        head = nn.Linear(config.width, config.n_vocab, bias=False)
        head.weight = self.decoder.embed_tokens.weight
        self.proj_out: nn.Module = head

    @classmethod
    def without_values(cls, config: WhisperConfig, *, device: str = "cpu") -> "Whisper":
        """A network whose weights are whatever lay in memory, to be loaded: drawing them takes seconds."""
        with torch.device("meta"):
            model = cls(config)
        model.to_empty(device=device)
        assert isinstance(model.proj_out, nn.Linear), "not packed"
        model.proj_out.weight = model.decoder.embed_tokens.weight  # to_empty gave it a memory of its own
        return model

    def silent_tail(self, mel: Tensor, *, stride: int) -> SilentTail:
        """The tail from the features [1, n_mels, 2·n_audio_positions] of a silent window."""
        every = slice(stride // 2, None, stride)
        encoded = [(keys[:, :, every], values[:, :, every]) for keys, values in self.encoder.keys_values(mel)]
        crossed = self.decoder.keys_values(self.encoder(mel)[:, every])
        return SilentTail(
            encoder_keys=[keys for keys, _ in encoded],
            encoder_values=[values for _, values in encoded],
            cross_keys=[keys for keys, _ in crossed],
            cross_values=[values for _, values in crossed],
            stride=stride,
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden states [..., W] → float32 logits [..., V]."""
        projected: Tensor = self.proj_out(hidden)
        return projected.float()

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy HF-named tensors in; the head may be absent, as it shares the embedding.

        Raises:
            WeightsError: unless they are exactly this network's.
        """
        own_names = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
        load_exactly(self, own_names, tied={"proj_out.weight": "decoder.embed_tokens.weight"})
