"""The serialised program: every array that the kernel, the interpreter and the checker read.

Knows the layouts of ``isa.py``. Does not know how the arrays were made (``compile.py``) or what runs them.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .graph import Sizes
from .ops import FusedOp
from .target import Target


@dataclass(frozen=True, slots=True)
class WeightTiles:
    """One weight's part of the tape's sources: ``n`` rows (padded to granules) of ``k``, norm folded in if any."""

    phase: int  # the phase that reads it
    first_tile: int  # in the concatenation of all weights' tiles
    n_tiles: int


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A step for one target."""

    name: str
    target: Target
    sizes: Sizes
    ops: tuple[FusedOp, ...]  # in order; what the phases were made of
    op_of_phase: tuple[int, ...]  # [n_phases] index into ops
    phases: NDArray[np.uint32]  # [n_phases, PHASE_WORDS]
    tasks: NDArray[np.uint32]  # [n_sms, n_phases, TASK_WORDS]
    weights: tuple[WeightTiles, ...]
    tile_index: NDArray[np.int64]  # [n_tiles] of the tape, into the concatenation of all weights' tiles
    warp_tiles: NDArray[np.uint32]  # [n_sms, N_WARPS, 2] first tile, number of tiles
    aux_granules: int  # of the SM that has most
    exchange_words: int
    control_word: int  # where SM 0's control word lies in the exchange area
    epochs_per_step: int
    n_replicas: int
    n_score_heads: int
    residual_granules: int  # of the stream, on the SM that has most
