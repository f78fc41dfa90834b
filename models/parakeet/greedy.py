"""Greedy decoding of a token-and-duration transducer (Xu et al. 2023), with its state as a value.

At each frame the joint network names the likeliest token and, apart from it, how many frames to go on by. Frames can be
given in pieces of any size: what is emitted and the state behind it are the same, bit for bit, since every number is
computed from one frame and one prediction. Does not know where frames come from, or what tokens mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from .reference import Parakeet


@dataclass(frozen=True, slots=True, eq=False)
class TransducerState:
    """Between two frames: the text so far as the prediction network remembers it. Never changed in place.

    ``time_jump`` frames of those that follow are passed over: the last duration reached beyond what was given.
    """

    hidden: Tensor  # [L, P]
    cell: Tensor  # [L, P]
    projected: Tensor  # [P], the prediction network's output as the joint network sees it
    time_jump: int = 0


@dataclass(frozen=True, slots=True)
class Emission:
    """One token. ``frame`` counts from the first frame of the call; ``logprob`` is among the tokens."""

    token_id: int
    frame: int
    duration: int  # frames
    logprob: float


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Frames of one stream to decode for good, and those behind, which will come again with more context."""

    frames: Tensor  # [T, P], T may be 0
    state: TransducerState
    behind: Tensor  # [T, P], T may be 0


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    """What a piece says; frames of ``ahead`` count from the first one behind the piece."""

    emissions: list[Emission]
    state: TransducerState  # behind the piece: what lies ahead has not changed it
    ahead: list[Emission]


class TransducerDecoder(Protocol):
    """Whatever decodes: torch here, a megakernel elsewhere. Called from one thread."""

    def start(self) -> TransducerState:
        """The state before the first frame."""

    def decode(self, batch: Sequence[tuple[Tensor, TransducerState]]) -> list[tuple[list[Emission], TransducerState]]:
        """For each pair of projected frames [T, P] and a state: what they say, and the state behind them."""

    def decode_ahead(self, batch: Sequence[Piece]) -> list[Decoded]:
        """Each piece as ``decode`` does, and what the frames behind it say for now."""


def ahead_in_two(decoder: TransducerDecoder, batch: Sequence[Piece]) -> list[Decoded]:
    """``decode_ahead`` by two calls of ``decode``."""
    settled = decoder.decode([(piece.frames, piece.state) for piece in batch])
    ahead = decoder.decode([(piece.behind, state) for piece, (_, state) in zip(batch, settled, strict=True)])
    return [Decoded(emissions, state, more) for (emissions, state), (more, _) in zip(settled, ahead, strict=True)]


class TorchDecoder:
    """The reference: one stream after another, one frame at a time, where the network is."""

    def __init__(self, model: Parakeet) -> None:
        self._model = model
        self._start = start(model)

    def start(self) -> TransducerState:
        """See ``TransducerDecoder``."""
        return self._start

    def decode(self, batch: Sequence[tuple[Tensor, TransducerState]]) -> list[tuple[list[Emission], TransducerState]]:
        """See ``TransducerDecoder``."""
        return [decode(self._model, frames, state) for frames, state in batch]

    def decode_ahead(self, batch: Sequence[Piece]) -> list[Decoded]:
        """See ``TransducerDecoder``."""
        return ahead_in_two(self, batch)


@torch.inference_mode()
def start(model: Parakeet) -> TransducerState:
    """The state before the first frame: the prediction network has seen one blank, for a begin of text."""
    config = model.config
    weight = model.encoder_projector.weight  # tells where and in which type to compute
    nothing = weight.new_zeros(config.n_predictor_layers, config.d_predictor)
    return _after(model, config.blank_id, TransducerState(nothing, nothing, weight.new_zeros(config.d_predictor)))


@torch.inference_mode()
def decode(model: Parakeet, frames: Tensor, state: TransducerState) -> tuple[list[Emission], TransducerState]:
    """What projected ``frames`` [T, P] say behind ``state``, which stays as it is, and the state behind them."""
    config = model.config
    emissions: list[Emission] = []
    n_symbols = 0  # at this frame
    t = state.time_jump
    while t < len(frames):
        logits = model.joint(frames[t : t + 1], state.projected[None])[0].float()
        token_logits = logits[: config.vocabulary_size]
        token_id = int(token_logits.argmax())
        duration = config.durations[int(logits[config.vocabulary_size :].argmax())]
        if token_id == config.blank_id:
            n_ahead = max(duration, 1)  # else the same frame would be blank for ever
        else:
            logprob = float(token_logits[token_id] - token_logits.logsumexp(dim=0))
            emissions.append(Emission(token_id, t, duration, logprob))
            state = _after(model, token_id, state)
            n_symbols += 1
            n_ahead = max(duration, 1) if n_symbols == config.max_symbols else duration
        if n_ahead:
            n_symbols = 0
        t += n_ahead
    return emissions, replace(state, time_jump=t - len(frames))


def _after(model: Parakeet, token_id: int, state: TransducerState) -> TransducerState:
    """The state once ``token_id`` belongs to the text."""
    token = torch.tensor([[token_id]], device=state.hidden.device)
    projected, hidden, cell = model.decoder(token, state.hidden[:, None], state.cell[:, None])
    return replace(state, hidden=hidden[:, 0], cell=cell[:, 0], projected=projected[0, 0])
