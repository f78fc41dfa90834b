"""Buffers of samples to what the joint network sees of their frames, on a device, many buffers in one pass.

The numbers of ``reference.py`` with projections and norms fused, in shapes of few kinds, each of which is one CUDA
graph where there is CUDA. Knows the order of the pieces (``fused.py``) and how buffers are padded to those shapes. Does
not know how a piece is computed, tokens, or where a buffer came from.
"""

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from .config import FRAME_SAMPLES, HOP_SAMPLES, n_frames_of
from .encoder import Block, sinusoids
from .features import MIN_SAMPLES
from .fused import SAMPLES_BEHIND, Layer, Lengths, Linear, Norm, Operations, Strides
from .reference import Parakeet

# Frames that buffers are padded to: up to each limit in steps of so many. Padding changes nothing but the time.
_STEPS_FRAMES = ((32, 4), (64, 8), (256, 16), (512, 32))
_LONG_STEP_FRAMES = 128
_TOGETHER_STEP_FRAMES = 32  # of several buffers, at least, so that their shapes are few enough to be ready beforehand
_BATCHES = (1, 2, 4, 8, 16, 32, 64)  # buffers of a pass; missing ones are padding too
_PADDED = [next(batch for batch in _BATCHES if batch >= size) for size in range(_BATCHES[-1] + 1)]  # by buffers
_MAX_ROWS = 10_240  # buffers x frames of a pass of several: more are no faster, and take memory
_PASS_COST_FRAMES = 500  # what a pass costs besides, as frames: 0.6B on an H200, 176 to 2816 rows


def bucket(n_frames: int) -> int:
    """The frames at which a buffer of ``n_frames`` is encoded."""
    for limit, step in _STEPS_FRAMES:
        if n_frames <= limit:
            return -(-n_frames // step) * step
    return -(-n_frames // _LONG_STEP_FRAMES) * _LONG_STEP_FRAMES


def room_for(n_frames: int, batch: int) -> int:
    """The frames at which ``batch`` buffers of up to ``n_frames`` are encoded together."""
    if batch > 1:
        n_frames = -(-n_frames // _TOGETHER_STEP_FRAMES) * _TOGETHER_STEP_FRAMES
    return bucket(n_frames)


def shapes(max_frames: int) -> list[tuple[int, int]]:
    """Every (buffers, frames) at which buffers up to ``max_frames`` are encoded."""
    all_shapes = {(batch, room_for(n, batch)) for batch in _BATCHES for n in range(1, max_frames + 1)}
    return sorted((batch, room) for batch, room in all_shapes if _is_possible(batch, room))


def _is_possible(batch: int, room: int) -> bool:
    return batch == 1 or batch * room <= _MAX_ROWS


def passes(lengths: Sequence[int]) -> list[tuple[int, int, list[int]]]:
    """Which buffers are encoded together: (buffers with padding, frames with padding, indices) of each pass.

    Of all ways to cut the buffers, in order of length, into passes, the cheapest.
    """
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    rooms = [{batch: room_for(lengths[index], batch) for batch in _BATCHES} for index in order]
    costs, sizes = [0], [0]  # of the shortest i buffers, and how many of them the last pass has
    for end in range(1, len(order) + 1):
        room = rooms[end - 1]
        ways = [
            (costs[end - size] + _PASS_COST_FRAMES + _PADDED[size] * room[_PADDED[size]], size)
            for size in range(1, min(end, _BATCHES[-1]) + 1)
            if _is_possible(_PADDED[size], room[_PADDED[size]])
        ]
        cost, size = min(ways)
        costs.append(cost)
        sizes.append(size)
    taken: list[tuple[int, int, list[int]]] = []
    end = len(order)
    while end:
        batch = _PADDED[sizes[end]]
        taken.append((batch, rooms[end - 1][batch], order[end - sizes[end] : end]))
        end -= sizes[end]
    return taken[::-1]


class Stage:
    """Front end, encoder and projection of one checkpoint."""

    def __init__(self, model: Parakeet, operations: Operations, like: Tensor, *, max_frames: int) -> None:
        """Weights are copied to ``like``'s device and type. ``max_frames`` is what the longest buffer is padded to."""
        model = model.eval()
        self.max_frames = max_frames
        self.like = like
        self._operations = operations
        self._n_mels = model.config.n_mels
        self._scale = model.config.d_model**0.5 if model.config.scales_input else 1.0
        self._strides = _strides(model, like)
        positions = sinusoids(max_frames, model.config.d_model, model.encoder_projector.weight.device)
        self._layers = [_layer(block, positions, like) for block in model.encoder.layers if isinstance(block, Block)]
        self._projector = copy.deepcopy(model.encoder_projector).to(like).requires_grad_(False)

    def __call__(self, samples: Tensor, lengths: Lengths) -> Tensor:
        """float32 [B, T · FRAME_SAMPLES + SAMPLES_BEHIND], anything behind a buffer's own → projected frames [B, T, P].

        No value is looked at, so that a CUDA graph may hold it.
        """
        return self.encode(self._operations.features(samples, lengths), lengths)

    def encode(self, features: Tensor, lengths: Lengths) -> Tensor:
        """float32 [B, 8 · T, n_mels], zeros behind a buffer's own → projected frames [B, T, P]."""
        states = self.states(features, lengths)
        projected: Tensor = self._projector(states)
        return projected.view(lengths.batch, lengths.room, -1)

    def states(self, features: Tensor, lengths: Lengths) -> Tensor:
        """The encoder alone → [B · T, W]."""
        do, strides, layers = self._operations, self._strides, self._layers
        x = _pointwise(do.first_strides(features, strides, lengths), strides.second_point)
        x = _pointwise(do.second_stride(x, strides, lengths), strides.third_point).relu_()
        flat = x.view(lengths.batch * lengths.room, -1)
        residual, x = do.advance(None, flat, strides.out, factor=self._scale, norm=layers[0].norm_feed_forward1)
        for layer, following in zip(layers, [*layers[1:], None], strict=True):
            x = do.product(x, layer.feed_forward1_in, silu=True)
            residual, x = do.advance(residual, x, layer.feed_forward1_out, factor=0.5, norm=layer.norm_attention)
            x = do.attend(do.product(x, layer.qkv), layer, lengths)
            residual, x = do.advance(residual, x, layer.out, norm=layer.norm_convolution)
            x = do.convolve(do.product(x, layer.gate), layer, lengths)
            residual, x = do.advance(residual, x, layer.mix, norm=layer.norm_feed_forward2)
            x = do.product(x, layer.feed_forward2_in, silu=True)
            norm = None if following is None else following.norm_feed_forward1
            residual, x = do.advance(residual, x, layer.feed_forward2_out, factor=0.5, end=layer.norm_out, norm=norm)
        return x


# --- weights ---------------------------------------------------------------------------------------------------------


def _strides(model: Parakeet, like: Tensor) -> Strides:
    first, second, second_point, third, third_point = (
        layer for layer in model.encoder.subsampling.layers if isinstance(layer, nn.Conv2d)
    )
    out = model.encoder.subsampling.linear
    channels = model.config.subsampling_channels
    # The checkpoint's order is channel · frequency, ours frequency · channel, as the convolutions leave it.
    flat = out.weight.detach().view(len(out.weight), channels, -1).transpose(1, 2).flatten(1)
    return Strides(
        first_taps=_taps(first, like),
        first_bias=_floats(first.bias, like),
        second_taps=_taps(second, like),
        second_bias=_floats(second.bias, like),
        second_point=_linear(second_point.weight.flatten(1), second_point.bias, like),
        third_taps=_taps(third, like),
        third_bias=_floats(third.bias, like),
        third_point=_linear(third_point.weight.flatten(1), third_point.bias, like),
        out=_linear(flat, out.bias, like),
    )


def _taps(conv: nn.Conv2d, like: Tensor) -> Tensor:
    """float32 [9, C]."""
    return _floats(conv.weight.detach().flatten(1).T, like)


def _layer(block: Block, positions: Tensor, like: Tensor) -> Layer:
    attention, convolution = block.self_attn, copy.deepcopy(block.conv).float()
    convolution.fold_norm()
    taps, taps_bias = convolution.depthwise_conv.weight, convolution.depthwise_conv.bias
    queries, keys, values = attention.q_proj, attention.k_proj, attention.v_proj
    weights: list[Tensor] = [linear.weight for linear in (queries, keys, values)]
    biases: list[Tensor] = [linear.bias for linear in (queries, keys, values) if linear.bias is not None]
    distances = attention.position_keys(positions.to(attention.relative_k_proj.weight))  # [H, 2 · T − 1, D]
    return Layer(
        norm_feed_forward1=_norm(block.norm_feed_forward1, like),
        feed_forward1_in=_linear_of(block.feed_forward1.linear1, like),
        feed_forward1_out=_linear_of(block.feed_forward1.linear2, like),
        norm_attention=_norm(block.norm_self_att, like),
        qkv=_linear(torch.cat(weights), torch.cat(biases) if biases else None, like),
        content_bias=attention.bias_u.detach().to(like),
        distance_bias=attention.bias_v.detach().to(like),
        distances=distances.detach().transpose(0, 1).to(like).contiguous(),
        out=_linear_of(attention.o_proj, like),
        norm_convolution=_norm(block.norm_conv, like),
        gate=_linear(block.conv.pointwise_conv1.weight[..., 0], block.conv.pointwise_conv1.bias, like),
        taps=_floats(taps.detach()[:, 0].T, like),
        taps_bias=_floats(taps_bias, like),
        mix=_linear(block.conv.pointwise_conv2.weight[..., 0], block.conv.pointwise_conv2.bias, like),
        norm_feed_forward2=_norm(block.norm_feed_forward2, like),
        feed_forward2_in=_linear_of(block.feed_forward2.linear1, like),
        feed_forward2_out=_linear_of(block.feed_forward2.linear2, like),
        norm_out=_norm(block.norm_out, like),
    )


def _linear_of(linear: nn.Linear, like: Tensor) -> Linear:
    return _linear(linear.weight, linear.bias, like)


def _linear(weight: Tensor, bias: Tensor | None, like: Tensor) -> Linear:
    return Linear(weight.detach().to(like).contiguous(), None if bias is None else _floats(bias, like))


def _norm(norm: nn.LayerNorm, like: Tensor) -> Norm:
    return Norm(_floats(norm.weight, like), _floats(norm.bias, like))


def _floats(tensor: Tensor | None, like: Tensor) -> Tensor:
    assert tensor is not None, "a bias that every checkpoint has"
    return tensor.detach().to(like.device, torch.float32).contiguous()


def _pointwise(x: Tensor, linear: Linear) -> Tensor:
    assert linear.bias is not None, "the subsampling has biases"
    return functional.linear(x, linear.weight, linear.bias.to(x.dtype))


# --- from the host ---------------------------------------------------------------------------------------------------


class Listener:
    """A stage fed from the host: buffers in passes of a few shapes, each a CUDA graph where there is CUDA."""

    def __init__(self, stage: Stage, stream: torch.cuda.Stream | None) -> None:
        """``stream`` is where everything runs, ``None`` on the CPU."""
        self.stage = stage
        self._stream = stream
        self._captured: dict[tuple[int, int], _Captured] = {}
        # Memory that this listener's graphs share, since no two of them run at a time; a pool ends with its last graph.
        self._pool: Any = None if stream is None else torch.cuda.graph_pool_handle()  # torch's own type is private

    def prepare(self, max_frames: int) -> None:
        """Have what is needed for buffers up to ``max_frames`` ready before it is asked for."""
        for batch, room in shapes(max_frames):
            self._of(batch, room)

    @torch.inference_mode()
    def listen(self, buffers: Sequence[NDArray[np.float32]]) -> list[Tensor]:
        """Projected frames [T, P] of each buffer [n_samples], on the stage's device and in its type.

        Raises:
            ValueError: for a buffer that is too short to have features, or longer than the stage was made for.
        """
        lengths = [self._length(buffer) for buffer in buffers]
        frames: dict[int, Tensor] = {}
        for batch, room, indices in passes(lengths):
            result = self._of(batch, room).run([buffers[index] for index in indices])
            frames |= {index: result[row, : lengths[index]] for row, index in enumerate(indices)}
        return [frames[index] for index in range(len(buffers))]

    def _length(self, buffer: NDArray[np.float32]) -> int:
        n_frames = n_frames_of(len(buffer))
        if len(buffer) < MIN_SAMPLES or n_frames > self.stage.max_frames:
            raise ValueError(
                f"a buffer of {len(buffer)} samples; from {MIN_SAMPLES} to {self.stage.max_frames * FRAME_SAMPLES}"
            )
        return n_frames

    def _of(self, batch: int, room: int) -> "_Captured":
        key = batch, min(room, self.stage.max_frames)
        if key not in self._captured:
            self._captured[key] = _Captured(self.stage, *key, self._stream, self._pool)
        return self._captured[key]


def on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    """What is inside is put on ``stream``."""
    return nullcontext() if stream is None else torch.cuda.stream(stream)


class _Captured:
    """One shape of the stage's inputs: where they lie, and the graph that works on them."""

    def __init__(self, stage: Stage, batch: int, room: int, stream: torch.cuda.Stream | None, pool: Any) -> None:
        device = stage.like.device
        is_cuda = device.type == "cuda"
        self._stream = stream
        self._host_samples = torch.zeros(batch, room * FRAME_SAMPLES + SAMPLES_BEHIND, pin_memory=is_cuda)
        self._host_lengths = torch.zeros(3, batch, dtype=torch.int32, pin_memory=is_cuda)
        self._set_lengths(range(batch), [MIN_SAMPLES] * batch)
        self._samples = self._host_samples.to(device)
        self._lengths = self._host_lengths.to(device)
        work = partial(stage, self._samples, Lengths.of(self._lengths, room))
        self._replay: Callable[[], Tensor] = work if stream is None else capture(work, stream, pool)

    def run(self, buffers: Sequence[NDArray[np.float32]]) -> Tensor:
        """Frames [buffers with padding, T, P] of a batch, complete, which are the caller's."""
        rows = self._host_samples.numpy()
        for row, buffer in enumerate(buffers):
            rows[row, : len(buffer)] = buffer
        self._set_lengths(range(len(buffers)), [len(buffer) for buffer in buffers])
        self._set_lengths(range(len(buffers), len(rows)), [MIN_SAMPLES] * (len(rows) - len(buffers)))
        with on(self._stream):
            self._samples.copy_(self._host_samples, non_blocking=True)
            self._lengths.copy_(self._host_lengths, non_blocking=True)
            frames = self._replay().clone()
        if self._stream is not None:
            self._stream.synchronize()  # others read the frames, and the next buffers take the place of these
        return frames

    def _set_lengths(self, rows: Sequence[int], n_samples: Sequence[int]) -> None:
        lengths = self._host_lengths.numpy()
        for row, n in zip(rows, n_samples, strict=True):
            lengths[:, row] = n, n // HOP_SAMPLES, n_frames_of(n)


def capture(work: Callable[[], Tensor], stream: torch.cuda.Stream, pool: Any) -> Callable[[], Tensor]:
    """``work`` as a graph that gives the same result. Not by ``torch.cuda.graph``, which collects garbage first."""
    graph: Any = torch.cuda.CUDAGraph()  # its methods have no types
    with on(stream), torch.inference_mode():
        work()  # in which libraries choose and allocate
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
