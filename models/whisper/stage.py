"""Windows to what a decoder on the device attends to: features, encoder, and keys and values in the slots' cross cache.

The same numbers as ``reference.py`` with its ``SilentTail``, in few large operations of one shape for each class of
window lengths, so that a CUDA graph can repeat them. Knows torch and the layout of the cache. Does not know tokens, nor
what reads the cache.
"""

import copy
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from ..mel import FFT_SAMPLES, HOP_SAMPLES, N_BINS, POWER_FLOOR, RANGE_DECADES, mel_filters
from .reference import Attention, DecoderLayer, EncoderLayer, SilentTail, Whisper
from .window import DIGITAL_SILENCE, FRAMES_PER_POSITION, LOUDEST_FEATURE, POSITION_SAMPLES, encoded_positions

# Lengths that windows are encoded at. What is behind a window's own end is masked, so they change nothing but the time.
# Steps are small where streams are; multiples of 16 spare attention a padded copy of its bias in every layer.
_STEP_POSITIONS = 64
_LONG_STEP_POSITIONS = 128
_LONG_FROM_POSITIONS = 768
_ALIGNMENT = 16
_GROUPS = (8, 4, 2, 1)  # windows that are encoded together
_GROUP_COST_POSITIONS = 600  # what a group costs besides, as positions: large-v3's encoder on an H200, 250 to 4000

Module = TypeVar("Module", bound=nn.Module)


def bucket(lengths: Sequence[int], n_audio_positions: int) -> int:
    """The length at which windows of these positions are encoded together: at least the longest one's.

    Full windows have a bucket of their own, ``n_audio_positions``: no silence stands behind them, and their last frames
    see their own last samples mirrored. They can't be together with others.
    """
    longest = max(lengths)
    if longest == n_audio_positions:
        assert min(lengths) == longest, "full windows beside others"
        return n_audio_positions
    step = _STEP_POSITIONS if longest <= _LONG_FROM_POSITIONS else _LONG_STEP_POSITIONS
    return min(_round_up(longest, step), _masked_room(n_audio_positions))


def buckets(n_audio_positions: int) -> list[int]:
    """Every length that ``bucket`` gives."""
    return sorted({bucket([n_positions], n_audio_positions) for n_positions in range(1, n_audio_positions + 1)})


def _masked_room(n_audio_positions: int) -> int:
    """The largest bucket with silence behind: aligned, and told apart from the full windows' by its length."""
    return _round_up(n_audio_positions + 1, _ALIGNMENT)


def _round_up(value: int, step: int) -> int:
    return -(-value // step) * step


def n_attended(n_positions: int, n_tail: int, stride: int) -> int:
    """Positions that the decoder sees of a window: its own, and the remembered silence up to the full length."""
    return n_positions + n_tail - min(-(-n_positions // stride), n_tail)


@dataclass(frozen=True, slots=True, eq=False)
class _Layer:
    """An encoder layer's weights, queries, keys and values in one matrix, and what it sees of the silence."""

    norm_attention: nn.LayerNorm
    qkv_weight: Tensor  # [3 · W, W]
    qkv_bias: Tensor  # [3 · W], zeros for the keys
    out: nn.Linear
    norm_ffn: nn.LayerNorm
    fc1: nn.Linear
    fc2: nn.Linear
    tail_keys: Tensor  # [1, H, n_tail, D]
    tail_values: Tensor


class Stage:
    """Front end, encoder and cross projections of one checkpoint, in the cache's float type, on its device."""

    def __init__(self, model: Whisper, tail: SilentTail, cross_cache: Tensor) -> None:
        """Write into ``cross_cache`` [n_slots, n_layers, 2 (keys, values), H, n_cross_positions, D].

        ``model`` and ``tail`` are copied to the cache's device and type. The cache has room for as many positions as
        the encoder has.
        """
        config, decoder_layers = model.config, _decoder_layers(model)
        if cross_cache.shape[1:4] != (config.n_decoder_layers, 2, config.n_heads):
            raise ValueError(f"a cross cache of shape {list(cross_cache.shape)} does not fit {config}")
        if cross_cache.shape[4] < config.n_audio_positions:
            raise ValueError(f"a cross cache of {cross_cache.shape[4]} positions, needed: {config.n_audio_positions}")
        self.config = config
        self.stride = tail.stride
        self.n_tail = tail.cross_keys[0].shape[2]
        self.cross_cache = cross_cache
        self._like = cross_cache
        self._front_end = FrontEnd(config.n_mels, cross_cache.device)
        self._conv1, self._conv2 = self._own(model.encoder.conv1), self._own(model.encoder.conv2)
        n_behind = _masked_room(config.n_audio_positions) - config.n_audio_positions
        positions = functional.pad(model.encoder.embed_positions.weight.detach(), (0, 0, 0, n_behind))
        self._positions = positions.to(cross_cache)
        self._layers = [self._layer(layer, tail, index) for index, layer in enumerate(_encoder_layers(model))]
        self._norm = self._own(model.encoder.layer_norm)
        crossed = [_key_value_weights(layer.encoder_attn) for layer in decoder_layers]
        self._cross_weight = torch.cat([weight for weight, _ in crossed]).to(cross_cache)  # [n_layers · 2 · W, W]
        self._cross_bias = torch.cat([bias for _, bias in crossed]).to(cross_cache)
        tails = [torch.stack(pair) for pair in zip(tail.cross_keys, tail.cross_values, strict=True)]
        stacked = torch.stack(tails)[:, :, 0].to(cross_cache)  # [n_layers, 2, H, n_tail, D]
        self._cross_tail = stacked.permute(3, 0, 1, 2, 4).flatten(1)[None]  # [1, n_tail, n_layers · 2 · W]

    def __call__(self, samples: Tensor, n_positions: Tensor, slots: Tensor) -> Tensor:
        """Encode windows and write them to their slots' part of the cache; their loudest features float32 [B].

        ``samples`` float32 [B, n_encoded · POSITION_SAMPLES], zeros behind a window's own; ``n_positions`` int64 [B] of
        each window; ``slots`` int64 [B]. No value is looked at, so that a CUDA graph may hold it.
        """
        n_encoded = samples.shape[1] // POSITION_SAMPLES
        features, loudest = self._front_end(samples)
        features = features + (LOUDEST_FEATURE - loudest)[:, None, None]
        own_frames = torch.arange(features.shape[2], device=samples.device) < FRAMES_PER_POSITION * n_positions[:, None]
        features = features * own_frames[:, None]  # zeros behind the window, as a convolution pads
        audio = self._encode(features.to(self._like.dtype), self._bias(n_positions, n_encoded))
        self._write(audio, n_positions, slots)
        return loudest

    # ------------------------------------------------------------------ encoder

    def _encode(self, features: Tensor, bias: Tensor | None) -> Tensor:
        """[B, n_mels, 2 · S] → [B, S, W]."""
        x = functional.gelu(self._conv1(features))
        x = functional.gelu(self._conv2(x)).transpose(1, 2)  # [B, S, W]
        x = x + self._positions[: x.shape[1]]
        for layer in self._layers:
            x = x + layer.out(self._attend(layer, layer.norm_attention(x), bias))
            x = x + layer.fc2(functional.gelu(layer.fc1(layer.norm_ffn(x))))
        normed: Tensor = self._norm(x)
        return normed

    def _attend(self, layer: _Layer, x: Tensor, bias: Tensor | None) -> Tensor:
        """[B, S, W] → [B, S, W]; without ``bias`` there is no silence behind."""
        batch, n_positions, width = x.shape
        qkv = functional.linear(x, layer.qkv_weight, layer.qkv_bias)
        heads = qkv.view(batch, n_positions, 3, self.config.n_heads, -1).permute(2, 0, 3, 1, 4)  # [3, B, H, S, D]
        queries, keys, values = heads.unbind()
        if bias is not None:
            keys = torch.cat([keys, layer.tail_keys.expand(batch, -1, -1, -1)], dim=2)
            values = torch.cat([values, layer.tail_values.expand(batch, -1, -1, -1)], dim=2)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=bias)
        return mixed.transpose(1, 2).reshape(batch, n_positions, width)

    def _bias(self, n_positions: Tensor, n_encoded: int) -> Tensor | None:
        """Added to scores: [B, 1, S, S + tail padded], minus infinity behind a window and before its silence."""
        if n_encoded == self.config.n_audio_positions:
            return None
        device = n_positions.device
        is_own = torch.arange(n_encoded, device=device) < n_positions[:, None]  # [B, S]
        tail = torch.arange(_round_up(self.n_tail, _ALIGNMENT), device=device)
        is_silence = (tail >= self._first_of_tail(n_positions)[:, None]) & (tail < self.n_tail)
        bias = torch.cat(
            [torch.where(is_own, 0.0, -torch.inf), torch.where(is_silence, math.log(self.stride), -torch.inf)], dim=1
        )
        return bias.to(self._like.dtype)[:, None, None].expand(-1, 1, n_encoded, -1)

    def _first_of_tail(self, n_positions: Tensor) -> Tensor:
        """Index of the first remembered position behind each window."""
        return ((n_positions + self.stride - 1) // self.stride).clamp_max(self.n_tail)

    # ------------------------------------------------------------------ cross cache

    def _write(self, audio: Tensor, n_positions: Tensor, slots: Tensor) -> None:
        """Keys and values of ``audio`` [B, S, W], and of the silence right behind each window's own positions."""
        config, (batch, n_encoded, _) = self.config, audio.shape
        rows = functional.linear(audio, self._cross_weight, self._cross_bias)  # [B, S, n_layers · 2 · W]
        rows = torch.cat([rows, self._cross_tail.expand(batch, -1, -1)], dim=1)
        n_written = min(n_encoded + self.n_tail, config.n_audio_positions)
        position = torch.arange(n_written, device=audio.device)
        behind = position - n_positions[:, None]
        of_tail = (n_encoded + self._first_of_tail(n_positions)[:, None] + behind).clamp_max(rows.shape[1] - 1)
        source = torch.where(behind < 0, position, of_tail)  # [B, n_written]
        chosen = torch.gather(rows, 1, source[:, :, None].expand(-1, -1, rows.shape[2]))
        shape = (batch, n_written, config.n_decoder_layers, 2, config.n_heads, -1)
        cache = self.cross_cache[:, :, :, :, :n_written]
        cache.index_copy_(0, slots, chosen.view(shape).permute(0, 2, 3, 4, 1, 5))

    # ------------------------------------------------------------------ weights

    def _layer(self, layer: EncoderLayer, tail: SilentTail, index: int) -> _Layer:
        attention = layer.self_attn
        kv_weight, kv_bias = _key_value_weights(attention)
        return _Layer(
            norm_attention=self._own(layer.self_attn_layer_norm),
            qkv_weight=torch.cat([attention.q_proj.weight.detach(), kv_weight]).to(self._like),
            qkv_bias=torch.cat([attention.q_proj.bias.detach(), kv_bias]).to(self._like),
            out=self._own(attention.out_proj),
            norm_ffn=self._own(layer.final_layer_norm),
            fc1=self._own(layer.fc1),
            fc2=self._own(layer.fc2),
            tail_keys=self._padded(tail.encoder_keys[index]),
            tail_values=self._padded(tail.encoder_values[index]),
        )

    def _padded(self, tail: Tensor) -> Tensor:
        """[1, H, n_tail, D] → the same with zeros up to a multiple of the alignment, which the bias masks."""
        return functional.pad(tail, (0, 0, 0, _round_up(self.n_tail, _ALIGNMENT) - self.n_tail)).to(self._like)

    def _own(self, module: Module) -> Module:
        """A copy on the cache's device, in its type."""
        return copy.deepcopy(module).to(self._like.device, self._like.dtype).requires_grad_(False)


class FrontEnd:
    """Features as ``models/mel.py`` makes them, of windows that lie on a device, as products of float32 matrices."""

    def __init__(self, n_mels: int, device: torch.device) -> None:
        window = torch.hann_window(FFT_SAMPLES, periodic=True, dtype=torch.float64)
        angles = 2 * math.pi / FFT_SAMPLES * torch.outer(torch.arange(FFT_SAMPLES), torch.arange(N_BINS)).double()
        basis = torch.cat([angles.cos(), angles.sin()], dim=1) * window[:, None]  # [FFT_SAMPLES, 2 · N_BINS]
        self._basis = basis.float().to(device)
        self._filters = mel_filters(n_mels).T.contiguous().to(device)  # [N_BINS, n_mels]

    def __call__(self, samples: Tensor) -> tuple[Tensor, Tensor]:
        """[B, n_frames · HOP_SAMPLES] → features float32 [B, n_mels, n_frames] and each window's loudest [B]."""
        padded = functional.pad(samples[:, None], (FFT_SAMPLES // 2, FFT_SAMPLES // 2), mode="reflect")[:, 0]
        frames = padded.unfold(1, FFT_SAMPLES, HOP_SAMPLES)[:, :-1]  # the frame centred on the end is left out
        spectrum = frames @ self._basis  # [B, n_frames, 2 · N_BINS]: real parts, imaginary parts
        power = (spectrum[..., :N_BINS].square() + spectrum[..., N_BINS:].square()) @ self._filters
        log_power = power.clamp_min(POWER_FLOOR).log10()
        loudest = log_power.amax((1, 2))
        floored = torch.maximum(log_power, (loudest - RANGE_DECADES)[:, None, None])
        return ((floored + 4.0) / 4.0).transpose(1, 2), (loudest + 4.0) / 4.0


class Listener:
    """A stage fed from the host: windows in groups of one length, each group a CUDA graph where there is CUDA."""

    def __init__(self, stage: Stage, stream: torch.cuda.Stream | None) -> None:
        """``stream`` is where everything runs, ``None`` on the CPU."""
        self.stage = stage
        self._stream = stream
        self._captured: dict[tuple[int, int], _Captured] = {}
        # Memory that this listener's graphs share, since no two of them run at a time; a pool ends with its last graph.
        self._pool: Any = None if stream is None else torch.cuda.graph_pool_handle()  # torch's own type is private

    def prepare(self, shapes: Sequence[tuple[int, int]]) -> None:
        """Have what is needed for these (windows, encoded positions) ready before it is asked for."""
        for n_windows, n_encoded in shapes:
            self._of(n_encoded, range(n_windows))

    def listen(self, windows: Sequence[NDArray[np.float32]], slots: Sequence[int]) -> list[int | None]:
        """Write each window [n_samples] to its slot: how many positions it has, ``None`` for digital silence."""
        config = self.stage.config
        lengths = [encoded_positions(len(window), config.n_audio_positions) for window in windows]
        loudest: dict[int, float] = {}
        for n_encoded, indices in grouped(lengths, config.n_audio_positions):
            captured = self._of(n_encoded, [slots[index] for index in indices])
            captured.fill([(windows[index], lengths[index], slots[index]) for index in indices])
            loudest |= dict(zip(indices, captured.run(), strict=True))
        return [length if loudest[index] > DIGITAL_SILENCE else None for index, length in enumerate(lengths)]

    def _of(self, n_encoded: int, slots: Sequence[int]) -> "_Captured":
        """The shape's; where it is new, ``slots`` are written to on the way, which no one else may be reading."""
        key = len(slots), n_encoded
        if key not in self._captured:
            self._captured[key] = _Captured(self.stage, n_encoded, slots, self._stream, self._pool)
        return self._captured[key]


def grouped(lengths: Sequence[int], n_audio_positions: int) -> list[tuple[int, list[int]]]:
    """Which windows are encoded together: positions to encode at and indices of each group, neighbours in length.

    Of all ways to cut the windows, in order of length, into groups of the sizes that have graphs, the cheapest.
    """
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    cheapest: list[tuple[int, list[tuple[int, list[int]]]]] = [(0, [])]  # cost and groups of the shortest i windows
    for end in range(1, len(order) + 1):
        ways = []
        for size in (size for size in _GROUPS if size <= end):
            indices = order[end - size : end]
            if lengths[indices[0]] < lengths[indices[-1]] == n_audio_positions:
                continue
            n_encoded = bucket([lengths[index] for index in indices], n_audio_positions)
            cost, groups = cheapest[end - size]
            ways.append((cost + _GROUP_COST_POSITIONS + size * n_encoded, [*groups, (n_encoded, indices)]))
        cheapest.append(min(ways, key=lambda way: way[0]))
    return cheapest[-1][1]


def on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """What is inside is put on ``stream``."""
    return torch.cuda.stream(stream)


class _Captured:
    """One shape of the stage's inputs: where they lie, and the graph that works on them."""

    def __init__(
        self, stage: Stage, n_encoded: int, slots: Sequence[int], stream: torch.cuda.Stream | None, pool: Any
    ) -> None:
        """``slots`` are those that the runs before capture write to."""
        n_windows, device = len(slots), stage.cross_cache.device
        self._stream = stream
        is_cuda = device.type == "cuda"
        self._host_samples = torch.zeros(n_windows, n_encoded * POSITION_SAMPLES, pin_memory=is_cuda)
        self._host_numbers = torch.zeros(2, n_windows, dtype=torch.int64, pin_memory=is_cuda)
        self._host_numbers[0] = 1  # windows of nothing, for the runs before capture
        self._host_numbers[1] = torch.tensor(list(slots))
        self._samples = self._host_samples.to(device)
        self._numbers = self._host_numbers.to(device)
        work = partial(stage, self._samples, *self._numbers.unbind())
        self._replay: Callable[[], Tensor] = work if stream is None else _capture(work, stream, pool)

    def fill(self, windows: Sequence[tuple[NDArray[np.float32], int, int]]) -> None:
        """Take (samples, positions, slot) of each window. What was run before must be over."""
        rows, numbers = self._host_samples.numpy(), self._host_numbers.numpy()
        for index, (samples, n_positions, slot) in enumerate(windows):
            rows[index, : len(samples)], rows[index, len(samples) :] = samples, 0.0
            numbers[:, index] = n_positions, slot

    def run(self) -> list[float]:
        """Carry it out; the windows' loudest features."""
        with on(self._stream):
            self._samples.copy_(self._host_samples, non_blocking=True)
            self._numbers.copy_(self._host_numbers, non_blocking=True)
            levels: list[float] = self._replay().cpu().numpy().tolist()
            return levels


_N_WARM_UPS = 2  # libraries choose and allocate in the first


def _capture(work: Callable[[], Tensor], stream: torch.cuda.Stream, pool: Any) -> Callable[[], Tensor]:
    """``work`` as a graph that gives the same result. Not by ``torch.cuda.graph``, which collects garbage first."""
    graph: Any = torch.cuda.CUDAGraph()  # its methods have no types
    with on(stream):
        for _ in range(_N_WARM_UPS):
            work()
        stream.synchronize()
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            result = work()
        finally:
            graph.capture_end()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def _encoder_layers(model: Whisper) -> list[EncoderLayer]:
    return [layer for layer in model.encoder.layers if isinstance(layer, EncoderLayer)]


def _decoder_layers(model: Whisper) -> list[DecoderLayer]:
    return [layer for layer in model.decoder.layers if isinstance(layer, DecoderLayer)]


def _key_value_weights(attention: Attention) -> tuple[Tensor, Tensor]:
    """Weight [2 · W, W] and bias [2 · W] of keys, which have none, and values."""
    bias = attention.v_proj.bias.detach()
    weight = torch.cat([attention.k_proj.weight.detach(), attention.v_proj.weight.detach()])
    return weight, torch.cat([torch.zeros_like(bias), bias])
