"""A LINEAR's or HEAD's constants as the machine takes them: what evaluation, packing and the kernel share.

Knows shapes and types. Does not know how a norm is folded into them, nor tiles.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Folded:
    """One weight and what belongs to its output rows, after a norm in front has gone into them.

    ``row_sums`` are those of the rounded weight; zeros where there is no norm. ``bias`` is zeros where there is none.
    """

    weight: NDArray[np.uint16]  # [n, k] bit patterns of bfloat16
    row_sums: NDArray[np.float32]  # [n]
    bias: NDArray[np.float32]  # [n]
