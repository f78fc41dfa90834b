"""The transducer's loss against sums over every alignment, and its gradient against differences."""

from functools import cache

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.parakeet.training.loss import tdt_loss


def lattice(n_steps: int, n_labels: int, n_durations: int, *, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    tokens = draw(n_steps, n_labels + 1, 7).log_softmax(-1)
    durations = draw(n_steps, n_labels + 1, n_durations).log_softmax(-1)
    return tokens[:, :, 6], tokens[:, :n_labels, 2], durations


def sum_over_alignments(blank: Tensor, labels: Tensor, durations: Tensor) -> float:
    """The probability as the paper defines it, one alignment after the other."""
    n_steps, n_labels, n_durations = blank.shape[0], labels.shape[1], durations.shape[2]

    @cache
    def probability(t: int, u: int) -> float:
        if t >= n_steps:
            return float(t == n_steps and u == n_labels)
        total = 0.0
        for d in range(n_durations):
            p = durations[t, u, d].exp().item()
            if d > 0:
                total += p * blank[t, u].exp().item() * probability(t + d, u)
            if u < n_labels:
                total += p * labels[t, u].exp().item() * probability(t + d, u + 1)
        return total

    return probability(0, 0)


@settings(max_examples=40, deadline=None)
@given(
    n_steps=st.integers(1, 7),
    n_labels=st.integers(0, 5),
    n_durations=st.integers(2, 5),
    seed=st.integers(0, 1000),
)
def test_the_loss_is_the_sum_over_every_alignment(n_steps: int, n_labels: int, n_durations: int, seed: int) -> None:
    blank, labels, durations = lattice(n_steps, n_labels, n_durations, seed=seed)
    loss = tdt_loss(
        blank[None],
        labels[None],
        durations[None],
        n_frames=torch.tensor([n_steps]),
        n_labels=torch.tensor([n_labels]),
    )
    expected = sum_over_alignments(blank, labels, durations)
    assert torch.exp(-loss).item() == pytest.approx(expected, rel=1e-10)


def padded_batch() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    n_frames, n_labels = torch.tensor([6, 3, 5]), torch.tensor([2, 4, 0])
    blank, labels, durations = torch.randn(3, 6, 5), torch.randn(3, 6, 4), torch.randn(3, 6, 5, 5)
    tensors = [tensor.double() for tensor in (blank, labels, durations)]
    return tensors[0], tensors[1], tensors[2].log_softmax(-1), n_frames, n_labels


def test_what_lies_behind_a_rows_frames_and_labels_changes_nothing() -> None:
    torch.manual_seed(1)
    blank, labels, durations, n_frames, n_labels = padded_batch()
    together = tdt_loss(blank, labels, durations, n_frames=n_frames, n_labels=n_labels)
    for row in range(3):
        t, u = int(n_frames[row]), int(n_labels[row])
        alone = tdt_loss(
            blank[row : row + 1, :t, : u + 1],
            labels[row : row + 1, :t, :u],
            durations[row : row + 1, :t, : u + 1],
            n_frames=n_frames[row : row + 1],
            n_labels=n_labels[row : row + 1],
        )
        assert alone.item() == pytest.approx(together[row].item(), rel=1e-12)


def test_the_gradient_agrees_with_differences() -> None:
    torch.manual_seed(2)
    blank, labels, durations, n_frames, n_labels = padded_batch()

    def loss(blank: Tensor, labels: Tensor, durations: Tensor) -> Tensor:
        return tdt_loss(blank, labels, durations, n_frames=n_frames, n_labels=n_labels)

    inputs = tuple(tensor.requires_grad_() for tensor in (blank, labels, durations))
    assert torch.autograd.gradcheck(loss, inputs)


def test_a_long_lattice_in_single_precision_keeps_its_gradient() -> None:
    torch.manual_seed(3)
    blank = torch.randn(1, 400, 101).sub(3.0).requires_grad_()
    labels = torch.randn(1, 400, 100).sub(6.0)
    durations = torch.randn(1, 400, 101, 5).log_softmax(-1)
    lengths = {"n_frames": torch.tensor([400]), "n_labels": torch.tensor([100])}
    (single,) = torch.autograd.grad(tdt_loss(blank, labels, durations, **lengths).sum(), blank)
    wide = blank.detach().double().requires_grad_()
    (double,) = torch.autograd.grad(tdt_loss(wide, labels.double(), durations.double(), **lengths).sum(), wide)
    assert torch.linalg.norm(single - double) / torch.linalg.norm(double) < 1e-3
