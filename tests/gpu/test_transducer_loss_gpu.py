"""The loss's kernels against its definition in torch."""

import pytest
import torch
from torch import Tensor

from models.parakeet.training.loss import tdt_loss

pytestmark = pytest.mark.gpu


def test_kernels_give_the_loss_and_gradient_of_the_definition() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    generator = torch.Generator().manual_seed(5)
    shapes = {"blank": (9, 120, 41), "labels": (9, 120, 40), "durations": (9, 120, 41, 5)}
    inputs = [torch.randn(shape, generator=generator).sub(2.0) for shape in shapes.values()]
    n_frames = torch.randint(30, 121, (9,), generator=generator)
    n_labels = torch.randint(0, 41, (9,), generator=generator)

    def loss_and_gradients(device: str, dtype: torch.dtype) -> list[Tensor]:
        blank, labels, durations = (tensor.to(device, dtype).requires_grad_() for tensor in inputs)
        loss = tdt_loss(blank, labels, durations, n_frames=n_frames.to(device), n_labels=n_labels.to(device))
        loss.sum().backward()
        tensors = [loss.detach(), blank.grad, labels.grad, durations.grad]
        return [tensor.cpu().double() for tensor in tensors if tensor is not None]

    computed, defined = loss_and_gradients("cuda", torch.float32), loss_and_gradients("cpu", torch.float64)
    for ours, expected in zip(computed, defined, strict=True):
        assert torch.linalg.norm(ours - expected) / torch.linalg.norm(expected) < 1e-4
