"""How Whisper's matrices are stored for a CPU.

Knows which of them are large, and which must give the same row by row. Does not know what the network computes.
"""

from ..packed import Bfloat16Linear, Int8Linear, swap_linears
from .reference import Whisper


def pack(model: Whisper) -> None:
    """Swap the linears of ``model`` in place; it can't be trained or moved afterwards."""
    swap_linears(model.encoder, Bfloat16Linear)
    swap_linears(model, Int8Linear)  # what is left: the decoder and the head
