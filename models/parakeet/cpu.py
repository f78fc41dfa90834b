"""How Parakeet's matrices are stored for a CPU.

The encoder, nearly all of the work, takes a batch of frames at a time: bfloat16. Knows which linears are written as
convolutions. Does not know what the network computes.
"""

from torch import nn

from ..packed import Bfloat16Linear, swap_linears
from .encoder import PointwiseConv
from .reference import Parakeet


def pack(model: Parakeet) -> None:
    """Swap the encoder's linears in place and fold its batch norms; it can't be trained or moved afterwards.

    The projection, the prediction network and the joint network stay as they are: a step reads them once for one frame,
    and what they choose is a maximum over thousands.
    """
    for block in model.encoder.blocks:
        block.conv.fold_norm()
        for name, child in block.conv.named_children():
            if isinstance(child, PointwiseConv):
                setattr(block.conv, name, Bfloat16Linear(_as_linear(child)))
    swap_linears(model.encoder, Bfloat16Linear)


def _as_linear(conv: PointwiseConv) -> nn.Linear:
    linear = nn.Linear(conv.in_channels, conv.out_channels, bias=conv.bias is not None)
    linear.weight = nn.Parameter(conv.weight[..., 0])
    linear.bias = conv.bias  # type: ignore[assignment]  # None is a bias too, which torch's types leave out
    return linear
