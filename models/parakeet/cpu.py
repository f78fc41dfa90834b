"""How Parakeet's matrices are stored for a CPU.

The encoder, nearly all of the work, takes many frames at a time: bfloat16. A step of the decoder reads its matrices for
one frame, so that their size is what takes the time: int8, in which a step of the full size takes 0.5 ms in place of 9.
Knows which linears are written as convolutions or inside an LSTM. Does not know what the network computes.
"""

import torch
from torch import Tensor, nn

from ..packed import Bfloat16Linear, Int8Linear, swap_linears
from .encoder import PointwiseConv
from .reference import Parakeet


def pack(model: Parakeet) -> None:
    """Swap linears in place and fold the batch norms; the network can't be trained or moved afterwards."""
    for block in model.encoder.blocks:
        block.conv.fold_norm()
        for name, child in block.conv.named_children():
            if isinstance(child, PointwiseConv):
                setattr(block.conv, name, Bfloat16Linear(_linear(child.weight[..., 0], child.bias)))
    swap_linears(model.encoder, Bfloat16Linear)
    model.decoder.lstm = Int8Lstm(model.decoder.lstm)  # type: ignore[assignment]  # it is called in the same way
    swap_linears(model.decoder, Int8Linear)
    swap_linears(model.joint, Int8Linear)


class Int8Lstm(nn.Module):
    """An LSTM with int8 matrices; called as torch's is, with ``batch_first``."""

    def __init__(self, lstm: nn.LSTM) -> None:
        super().__init__()
        weights = dict(lstm.named_parameters())
        sides = [(f"ih_l{layer}", f"hh_l{layer}") for layer in range(lstm.num_layers)]
        self.layers = nn.ModuleList(
            nn.ModuleList(Int8Linear(_linear(weights[f"weight_{side}"], weights[f"bias_{side}"])) for side in both)
            for both in sides
        )

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """[B, n, P] after a state [L, B, P] twice → outputs [B, n, P], and the state behind them."""
        hidden, cell = list(state[0]), list(state[1])
        outputs = []
        for step in x.unbind(dim=1):
            for index, layer in enumerate(self.layers):
                assert isinstance(layer, nn.ModuleList)
                from_input, from_hidden = layer
                gates = from_input(step) + from_hidden(hidden[index])
                admit, keep, update, show = gates.chunk(4, dim=-1)  # torch's order
                cell[index] = keep.sigmoid() * cell[index] + admit.sigmoid() * update.tanh()
                step = hidden[index] = show.sigmoid() * cell[index].tanh()
            outputs.append(step)
        return torch.stack(outputs, dim=1), (torch.stack(hidden), torch.stack(cell))


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None)
    linear.weight = nn.Parameter(weight.detach())
    if bias is not None:
        linear.bias = nn.Parameter(bias.detach())
    return linear
