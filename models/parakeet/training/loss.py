"""The loss of a token-and-duration transducer: minus the log-probability of the labels over all their alignments.

It knows the lattice of frames and labels and sums over it by anti-diagonals, in log space, with its gradient worked out
rather than taped. It knows neither the network nor what the labels mean. (Xu et al. 2023, "Efficient sequence
transduction by jointly predicting tokens and durations".)

A state (t, u) is "at frame t, u labels emitted". A label of duration d leads to (t + d, u + 1), a blank of duration
d > 0 to (t + d, u); an alignment ends exactly at the last frame's end with all labels emitted. Durations are 0 … D - 1.
"""

import importlib.util

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx

triton_is_there = importlib.util.find_spec("triton") is not None
if triton_is_there:
    from models.parakeet.training.sweep import posterior_on_device, to_end_on_device

IMPOSSIBLE = -1e30  # log-probability of what can't be; finite, so that differences of two stay numbers


def tdt_loss(blank: Tensor, labels: Tensor, durations: Tensor, *, n_frames: Tensor, n_labels: Tensor) -> Tensor:
    """Minus log-probability of each row's labels: [B].

    Args:
        blank: log-probability of the blank at each state, [B, T, U + 1].
        labels: log-probability of the label that comes next, [B, T, U].
        durations: log-probability of each duration, [B, T, U + 1, D].
        n_frames: frames of each row, [B], 1 … T.
        n_labels: labels of each row, [B], 0 … U.
    """
    arcs = _arcs(blank, labels, durations)  # [2D - 1, B, T, U + 1]
    n_steps, n_states = arcs.shape[2], arcs.shape[3]
    frame = torch.arange(n_steps, device=arcs.device)[None, :, None]
    label = torch.arange(n_states, device=arcs.device)[None, None, :]
    inside = (frame < n_frames[:, None, None]) & (label <= n_labels[:, None, None])
    arcs = torch.where(inside, arcs, IMPOSSIBLE)
    total: Tensor = _Lattice.apply(arcs, n_frames, n_labels)  # type: ignore[no-untyped-call]
    return -total


def _arcs(blank: Tensor, labels: Tensor, durations: Tensor) -> Tensor:
    """What leaves each state: blanks of duration 1 … D - 1, then labels of 0 … D - 1. [2D - 1, B, T, U + 1]."""
    by_duration = durations.movedim(-1, 0)
    no_label = labels.new_full((*labels.shape[:2], 1), IMPOSSIBLE)
    return torch.cat((blank + by_duration[1:], torch.cat((labels, no_label), dim=2) + by_duration))


class _Lattice(torch.autograd.Function):
    """Log-probability of reaching the end, [B], from the arcs' log-probabilities [2D - 1, B, T, U + 1]."""

    @staticmethod
    def forward(ctx: FunctionCtx, arcs: Tensor, n_frames: Tensor, n_labels: Tensor) -> Tensor:
        skewed = _skew(arcs)
        to_end = _log_probability_to_end(skewed, n_frames, n_labels)
        ctx.save_for_backward(skewed, to_end)
        return to_end[0, :, 0].clone()

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None, None]:
        skewed, to_end = ctx.saved_tensors  # type: ignore[attr-defined]
        posterior = _posterior(skewed, to_end)
        return _unskew(posterior) * grad[:, None, None], None, None


def _skew(arcs: Tensor) -> Tensor:
    """States by anti-diagonal t + u: [K, B, T, U + 1] → [T + U, K, B, U + 1]; there is nothing outside the lattice."""
    _, _, n_steps, n_states = arcs.shape
    diagonal = torch.arange(n_steps + n_states - 1, device=arcs.device)[:, None]
    label = torch.arange(n_states, device=arcs.device)[None, :]
    frame = diagonal - label
    inside = (frame >= 0) & (frame < n_steps)
    skewed = arcs[:, :, frame.clamp(0, n_steps - 1), label]  # [K, B, T + U, U + 1]
    return torch.where(inside, skewed, IMPOSSIBLE).movedim(2, 0).contiguous()


def _unskew(skewed: Tensor) -> Tensor:
    """[T + U, K, B, U + 1] → [K, B, T, U + 1]."""
    n_states = skewed.shape[3]
    n_steps = skewed.shape[0] - n_states + 1
    label = torch.arange(n_states, device=skewed.device)[None, :]
    diagonal = torch.arange(n_steps, device=skewed.device)[:, None] + label
    return skewed.permute(1, 2, 0, 3)[:, :, diagonal, label]


def _has_kernels(skewed: Tensor) -> bool:
    return skewed.is_cuda and skewed.dtype == torch.float32 and triton_is_there


def _successors(to_end: Tensor, diagonal: int, n_durations: int) -> Tensor:
    """The value of the state behind each arc of one diagonal: [2D - 1, B, U + 1]."""
    ahead = to_end[diagonal + 1 : diagonal + 1 + n_durations]
    return torch.cat((ahead[:-1, :, :-1], ahead[:, :, 1:]))


def _log_probability_to_end(skewed: Tensor, n_frames: Tensor, n_labels: Tensor) -> Tensor:
    """For each state the log-probability of what follows: [T + U + D + 1, B, U + 2], with impossible margins."""
    n_diagonals, n_arcs, n_rows, n_states = skewed.shape
    n_durations = (n_arcs + 1) // 2
    to_end = skewed.new_full((n_diagonals + n_durations + 1, n_rows, n_states + 1), IMPOSSIBLE)
    to_end[n_frames + n_labels, torch.arange(n_rows, device=skewed.device), n_labels] = 0.0
    if _has_kernels(skewed):
        to_end_on_device(skewed, to_end, n_frames + n_labels)
        return to_end
    for diagonal in range(n_diagonals - 1, -1, -1):
        paths = _successors(to_end, diagonal, n_durations).add_(skewed[diagonal])
        largest = paths.amax(dim=0)
        total = paths.sub_(largest).exp_().sum(dim=0).log_().add_(largest)
        own = to_end[diagonal, :, :-1]
        torch.maximum(total, own, out=own)  # what is there already is impossible, but for a row's end
    return to_end


def _posterior(skewed: Tensor, to_end: Tensor) -> Tensor:
    """For each arc the probability that an alignment takes it, given that it reaches the end: shape of ``skewed``."""
    if _has_kernels(skewed):
        return posterior_on_device(skewed, to_end)
    n_diagonals, n_arcs, n_rows, n_states = skewed.shape
    n_durations = (n_arcs + 1) // 2
    n_blanks = n_durations - 1
    flow = torch.empty_like(skewed)
    for duration in range(1, n_durations):
        flow[:, duration - 1] = to_end[duration : duration + n_diagonals, :, :-1]
    for duration in range(n_durations):
        flow[:, n_blanks + duration] = to_end[duration + 1 : duration + 1 + n_diagonals, :, 1:]
    flow.add_(skewed).sub_(to_end[:n_diagonals, None, :, :-1]).exp_()  # probability of each arc, given its state
    visits = skewed.new_zeros((n_diagonals + n_durations + 1, n_rows, n_states + 1))
    visits[0, :, 0] = 1.0
    for diagonal in range(n_diagonals):
        leaving = flow[diagonal].mul_(visits[diagonal, :, :-1])
        visits[diagonal + 1 : diagonal + n_durations, :, :-1].add_(leaving[:n_blanks])
        visits[diagonal + 1 : diagonal + 1 + n_durations, :, 1:].add_(leaving[n_blanks:])
    return flow
