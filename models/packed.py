"""Linears as a CPU computes them fast: the one place that chooses number formats there.

Knows torch's CPU kernels. Does not know networks; ``models/<family>/cpu.py`` says which linears become what.
"""

import warnings

import torch
from torch import Tensor, nn


class Int8Linear(nn.Module):
    """A linear with int8 weights, scaled by output row, on inputs that are quantised to 8 bits as they come.

    Each input row has a scale of its own, so that a row's result does not depend on those beside it: a draft verified
    in one pass must give what single steps give. (With one scale for all rows a quarter of the partials differed.)
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach().float()
        scales = weight.abs().amax(dim=1).clamp_min(_TINY) / _INT8_MAX
        zeros = torch.zeros(len(scales), dtype=torch.long)
        with warnings.catch_warnings():
            # torch 2.13 calls its own quantised kernels deprecated; they are the quickest it has on a CPU, and torch is
            # pinned to releases that have them.
            warnings.filterwarnings("ignore", "torch.quantize_per_tensor, torch.quantize_per_channel", UserWarning)
            quantised = torch.quantize_per_channel(weight, scales, zeros, axis=0, dtype=torch.qint8)
        self.packed = torch.ops.quantized.linear_prepack(quantised, None)
        self.bias = None if linear.bias is None else linear.bias.detach().float()

    def forward(self, x: Tensor) -> Tensor:
        """[..., n_in] → [..., n_out]."""
        loudest = torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True).clamp_min_(_TINY)
        y: Tensor = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(
            x / loudest, 1 / _INT8_MAX, _UINT8_ZERO, self.packed
        )
        return y.mul_(loudest) if self.bias is None else torch.addcmul(self.bias, y, loudest)


_INT8_MAX = 127
_UINT8_ZERO = 128  # inputs are stored unsigned, as VNNI wants them
_TINY = 1e-8


class Bfloat16Linear(nn.Module):
    """A linear whose weights and products are bfloat16, with sums in float32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight.detach().bfloat16()
        self.bias = None if linear.bias is None else linear.bias.detach().bfloat16()

    def forward(self, x: Tensor) -> Tensor:
        """[..., n_in] → [..., n_out] in the input's type."""
        return nn.functional.linear(x.bfloat16(), self.weight, self.bias).to(x.dtype)


def swap_linears(module: nn.Module, packed: type[Int8Linear] | type[Bfloat16Linear]) -> None:
    """Swap every linear inside ``module`` in place; it can't be trained or moved afterwards."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, packed(child))
        else:
            swap_linears(child, packed)
