"""Greedy decoding of many streams at once in torch, some steps of all of them in one CUDA graph where there is CUDA.

The choices of ``greedy.py``, made on the device: a step scores each stream's frame, emits or goes on, and moves the
streams that emitted. Knows tensors and how streams are gathered into a batch. Does not know where frames come from.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from .config import ParakeetConfig
from .greedy import Decoded, Emission, Piece, TransducerState, ahead_in_two, start
from .reference import Parakeet
from .stage import capture, on

BATCHES = (1, 2, 4, 8, 16, 32, 64)  # streams of a graph; missing ones have no frames
STEPS = 8  # of a graph, after which the host looks whether any stream has frames left
_N_FIELDS = 4  # of a step's record: token or −1, frame, duration, log-probability


@dataclass(frozen=True, slots=True, eq=False)
class _Weights:
    """Of the prediction and joint networks, the LSTM's two matrices of a layer in one: it takes both inputs at once."""

    embedding: Tensor  # [V, P]
    layers: tuple[tuple[Tensor, Tensor], ...]  # [4 · P, 2 · P] and float32 [4 · P]
    projector: tuple[Tensor, Tensor]
    head: tuple[Tensor, Tensor]
    durations: Tensor  # int64 [N]


@dataclass(frozen=True, slots=True, eq=False)
class _Streams:
    """What steps work on. Streams' frames lie one after the other; ``first`` is where a stream's begin."""

    frames: Tensor  # [rows, P]
    first: Tensor  # int64 [B], as are those that follow
    n_frames: Tensor
    frame: Tensor
    n_symbols: Tensor
    hidden: Tensor  # [L, B, P]
    cell: Tensor  # float32 [L, B, P]
    projected: Tensor  # [B, P]
    records: Tensor  # float32 [STEPS + 1, B, _N_FIELDS], of which the last says at which frame each stream is


class GraphDecoder:
    """Fulfils ``greedy.TransducerDecoder``."""

    def __init__(self, model: Parakeet, like: Tensor, stream: torch.cuda.Stream | None) -> None:
        """Weights are copied to ``like``'s device and type. ``stream``: where everything runs, ``None`` on the CPU."""
        self._config = model.config
        self._like = like
        self._stream = stream
        self._weights = _weights(model, like)
        with torch.inference_mode():
            state = start(model)
        self._start = TransducerState(state.hidden.to(like), _floats(state.cell, like), state.projected.to(like))
        self._ready: dict[int, tuple[_Streams, Any]] = {}  # batch → memory, and what runs STEPS steps on it
        self._pool: Any = None if stream is None else torch.cuda.graph_pool_handle()  # torch's own type is private

    def prepare(self, batches: Sequence[int]) -> None:
        """Have what is needed for so many streams ready before it is asked for."""
        for batch in batches:
            self._of(batch, n_rows=_MIN_ROWS)

    def start(self) -> TransducerState:
        """See ``TransducerDecoder``."""
        return self._start

    @torch.inference_mode()
    def decode(self, batch: Sequence[tuple[Tensor, TransducerState]]) -> list[tuple[list[Emission], TransducerState]]:
        """See ``TransducerDecoder``."""
        results: list[tuple[list[Emission], TransducerState]] = []
        for begin in range(0, len(batch), BATCHES[-1]):
            results += self._decode_together(batch[begin : begin + BATCHES[-1]])
        return results

    def decode_ahead(self, batch: Sequence[Piece]) -> list[Decoded]:
        """See ``TransducerDecoder``."""
        return ahead_in_two(self, batch)

    def _decode_together(
        self, batch: Sequence[tuple[Tensor, TransducerState]]
    ) -> list[tuple[list[Emission], TransducerState]]:
        n_frames = [len(frames) for frames, _ in batch]
        if all(n <= state.time_jump for n, (_, state) in zip(n_frames, batch, strict=True)):
            return [([], _jumped(state, n)) for n, (_, state) in zip(n_frames, batch, strict=True)]
        streams, run = self._of(len(batch), n_rows=sum(n_frames))
        with on(self._stream):
            _fill(streams, batch)
            emissions, jumps = _run(streams, run, n_frames)
            hidden, cell, projected = (x.clone() for x in (streams.hidden, streams.cell, streams.projected))
        return [
            (emissions[i], TransducerState(hidden[:, i], cell[:, i], projected[i], time_jump=jumps[i]))
            for i in range(len(batch))
        ]

    def _of(self, n_streams: int, *, n_rows: int) -> tuple[_Streams, Any]:
        batch = next(batch for batch in BATCHES if batch >= n_streams)
        if batch not in self._ready or len(self._ready[batch][0].frames) < n_rows:
            with on(self._stream), torch.inference_mode():
                streams = self._room(batch, max(_MIN_ROWS, 1 << (n_rows - 1).bit_length()))
            work = partial(_steps, self._config, self._weights, streams)
            run = work if self._stream is None else capture(work, self._stream, self._pool)
            self._ready[batch] = streams, run
        return self._ready[batch]

    def _room(self, batch: int, n_rows: int) -> _Streams:
        config, like = self._config, self._like
        n_layers, width = config.n_predictor_layers, config.d_predictor

        def numbers() -> Tensor:
            return torch.zeros(batch, dtype=torch.int64, device=like.device)

        return _Streams(
            frames=like.new_zeros(n_rows, width),
            first=numbers(),
            n_frames=numbers(),
            frame=numbers(),
            n_symbols=numbers(),
            hidden=like.new_zeros(n_layers, batch, width),
            cell=like.new_zeros(n_layers, batch, width, dtype=torch.float32),
            projected=like.new_zeros(batch, width),
            records=like.new_zeros(STEPS + 1, batch, _N_FIELDS, dtype=torch.float32),
        )


_MIN_ROWS = 1024


def _jumped(state: TransducerState, n_frames: int) -> TransducerState:
    return TransducerState(state.hidden, state.cell, state.projected, time_jump=state.time_jump - n_frames)


def _fill(streams: _Streams, batch: Sequence[tuple[Tensor, TransducerState]]) -> None:
    """Put frames and states where the steps work on them."""
    n, device = len(batch), streams.first.device
    n_frames = [len(frames) for frames, _ in batch]
    first = [sum(n_frames[:i]) for i in range(n)]
    states = [state for _, state in batch]
    numbers = torch.zeros(3, len(streams.first), dtype=torch.int64)
    numbers[:, :n] = torch.tensor([first, n_frames, [state.time_jump for state in states]])
    for to, values in zip((streams.first, streams.n_frames, streams.frame), numbers.to(device), strict=True):
        to.copy_(values)
    streams.n_symbols.zero_()
    streams.frames[: sum(n_frames)] = torch.cat([frames for frames, _ in batch])
    streams.hidden[:, :n] = torch.stack([state.hidden for state in states], dim=1)
    streams.cell[:, :n] = torch.stack([state.cell for state in states], dim=1)
    streams.projected[:n] = torch.stack([state.projected for state in states])


def _run(streams: _Streams, run: Any, n_frames: Sequence[int]) -> tuple[list[list[Emission]], list[int]]:
    """Steps until no stream has frames left: what each emits, and how far beyond its frames it has gone.

    The host waits for the device once for all ``STEPS``: where others compute on it too, it is their turn every time.
    """
    emissions: list[list[Emission]] = [[] for _ in n_frames]
    while True:
        run()
        *steps, last = streams.records[:, : len(n_frames)].tolist()
        for step in steps:
            for own, (token, frame, duration, logprob) in zip(emissions, step, strict=True):
                if token >= 0:
                    own.append(Emission(int(token), int(frame), int(duration), logprob))
        jumps = [int(frame) - n for (frame, *_), n in zip(last, n_frames, strict=True)]
        if min(jumps) >= 0:
            return emissions, jumps


# --- a step ----------------------------------------------------------------------------------------------------------


def _steps(config: ParakeetConfig, weights: _Weights, streams: _Streams) -> Tensor:
    for index in range(STEPS):
        step(config, weights, streams, streams.records[index])
    streams.records[STEPS, :, 0] = streams.frame
    return streams.records


def step(config: ParakeetConfig, weights: _Weights, streams: _Streams, record: Tensor) -> None:
    """One joint evaluation of every stream that has frames left, and the prediction network where a token came of it.

    ``record`` [B, 4] is written. No value is looked at, so that a CUDA graph may hold it.
    """
    is_alive = streams.frame < streams.n_frames
    frames = streams.frames[(streams.first + streams.frame).clamp_max(len(streams.frames) - 1)]
    logits = functional.linear(torch.relu(frames + streams.projected), *weights.head).float()
    token_logits = logits[:, : config.vocabulary_size]
    best, tokens = token_logits.max(dim=1)
    durations = weights.durations[logits[:, config.vocabulary_size :].argmax(dim=1)]
    is_token = is_alive & (tokens != config.blank_id)
    logprobs = best - token_logits.logsumexp(dim=1)
    fields = (torch.where(is_token, tokens, -1), streams.frame, durations, logprobs)
    record.copy_(torch.stack([field.float() for field in fields], dim=1))

    n_symbols = streams.n_symbols + 1
    must_go_on = ~is_token | (n_symbols == config.max_symbols)
    ahead = torch.where(must_go_on, durations.clamp_min(1), durations)
    streams.n_symbols.copy_(torch.where(ahead > 0, 0, n_symbols))
    streams.frame.add_(ahead * is_alive)
    _predict(weights, streams, tokens, is_token[:, None])


def _predict(weights: _Weights, streams: _Streams, tokens: Tensor, is_token: Tensor) -> None:
    x = weights.embedding[tokens]
    for layer, (matrix, bias) in enumerate(weights.layers):
        hidden, cell = streams.hidden[layer], streams.cell[layer]
        gates = functional.linear(torch.cat([x, hidden], dim=1), matrix).float() + bias
        taken, kept, new, shown = gates.chunk(4, dim=1)
        after = kept.sigmoid() * cell + taken.sigmoid() * new.tanh()
        x = (shown.sigmoid() * after.tanh()).to(x.dtype)
        hidden.copy_(torch.where(is_token, x, hidden))
        cell.copy_(torch.where(is_token, after, cell))
    projected = functional.linear(x, *weights.projector)
    streams.projected.copy_(torch.where(is_token, projected, streams.projected))


def _weights(model: Parakeet, like: Tensor) -> _Weights:
    lstm, config = model.decoder.lstm, model.config

    def layer(index: int) -> tuple[Tensor, Tensor]:
        of_input, of_state, input_bias, state_bias = (
            getattr(lstm, f"{name}_l{index}").detach() for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")
        )
        return torch.cat([of_input, of_state], dim=1).to(like), _floats(input_bias + state_bias, like)

    def linear(module: torch.nn.Linear) -> tuple[Tensor, Tensor]:
        return module.weight.detach().to(like), module.bias.detach().to(like)

    return _Weights(
        embedding=model.decoder.embedding.weight.detach().to(like),
        layers=tuple(layer(index) for index in range(config.n_predictor_layers)),
        projector=linear(model.decoder.decoder_projector),
        head=linear(model.joint.head),
        durations=torch.tensor(config.durations, device=like.device),
    )


def _floats(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.detach().to(like.device, torch.float32)
