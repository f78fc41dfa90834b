"""Folded weights → the tape, and row sums and biases → the floats beside it; and back.

Knows how the elements of a tile lie. Does not know devices: whoever packs on a GPU takes ``tape_positions`` and does
there what ``tiles_of`` does here.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import CompileError
from .folded import Folded
from .isa import GRANULE_ROWS, TILE_BYTES, TILE_K, Phase, Task
from .program import Program

STAGE = "pack"
TILE_ELEMENTS = TILE_BYTES // 2


def tiles_of(weight: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """[n, k] → [granules of 8 rows x k / 32, 256] tiles, granule after granule; rows past the last are zero.

    In a tile lane l of a warp has 8 elements: of row l // 4, from column 8 (l % 4) on. Lane after lane, that is the
    tile row by row.
    """
    n, k = weight.shape
    n_granules = -(-n // GRANULE_ROWS)
    if n % GRANULE_ROWS:
        weight = np.concatenate([weight, np.zeros((n_granules * GRANULE_ROWS - n, k), weight.dtype)])
    tiles = weight.reshape(n_granules, GRANULE_ROWS, k // TILE_K, TILE_K).swapaxes(1, 2)  # [granule, tile, row, column]
    return tiles.reshape(-1, TILE_ELEMENTS)


def weight_of(tiles: NDArray[np.uint16], n: int, k: int) -> NDArray[np.uint16]:
    """[n_tiles, 256] in ``tiles_of``'s order → [n, k]."""
    rows = tiles.reshape(-1, k // TILE_K, GRANULE_ROWS, TILE_K).swapaxes(1, 2)
    return rows.reshape(-1, k)[:n]


def tape_positions(program: Program) -> NDArray[np.int64]:
    """[n_tiles] where on the tape each tile of all weights, one weight after the other, lies: scatter to these."""
    positions = np.empty_like(program.tile_index)
    positions[program.tile_index] = np.arange(len(program.tile_index))
    return positions


def pack_tape(program: Program, folded: Sequence[Folded]) -> NDArray[np.uint16]:
    """The tape [n_tiles, 256]. ``folded`` has one entry for each of ``program.weights``, in that order."""
    check(program, folded)
    positions = tape_positions(program)
    tape = np.empty((len(positions), TILE_ELEMENTS), np.uint16)
    for part, constants in zip(program.weights, folded, strict=True):
        tape[positions[part.first_tile : part.first_tile + part.n_tiles]] = tiles_of(constants.weight)
    return tape


def unpack_tape(program: Program, tape: NDArray[np.uint16]) -> list[NDArray[np.uint16]]:
    """The weights [n, k] that a tape holds, one for each of ``program.weights``."""
    positions = tape_positions(program)
    weights: list[NDArray[np.uint16]] = []
    for part in program.weights:
        tiles = tape[positions[part.first_tile : part.first_tile + part.n_tiles]]
        n, k = (int(program.phases[part.phase, word]) for word in (Phase.N, Phase.K))
        weights.append(weight_of(tiles, n, k))
    return weights


def pack_aux(program: Program, folded: Sequence[Folded]) -> NDArray[np.float32]:
    """[n_sms, aux_granules, GRANULE_ROWS, 2] row sum and bias of every output row; zeros past the last."""
    check(program, folded)
    aux = np.zeros((program.target.n_sms, program.aux_granules, GRANULE_ROWS, 2), np.float32)
    for part, constants in zip(program.weights, folded, strict=True):
        n = len(constants.bias)
        rows = np.zeros((-(-n // GRANULE_ROWS) * GRANULE_ROWS, 2), np.float32)
        rows[:n, 0], rows[:n, 1] = constants.row_sums, constants.bias
        sm, nth, granule = granule_places(program, part.phase)
        aux[sm, nth] = rows.reshape(-1, GRANULE_ROWS, 2)[granule]
    return aux


def granule_places(program: Program, phase: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Of every granule of a phase: its SM, its index among the auxiliary floats of that SM, its number."""
    tasks = program.tasks[:, phase].astype(np.int64)
    n = tasks[:, Task.N_GRANULES]
    sm = np.repeat(np.arange(len(n)), n)
    granule = np.arange(int(n.sum()))
    return sm, tasks[sm, Task.AUX] + granule - tasks[sm, Task.FIRST_GRANULE], granule


def check(program: Program, folded: Sequence[Folded]) -> None:
    """Raise CompileError unless the constants have the shapes and types that the program was made for."""
    if len(folded) != len(program.weights):
        raise CompileError(STAGE, program.name, f"takes {len(program.weights)} weights, not {len(folded)}")
    for part, constants in zip(program.weights, folded, strict=True):
        n, k = (int(program.phases[part.phase, word]) for word in (Phase.N, Phase.K))
        name = program.phase_names[part.phase]
        _check(f"{name}.weight", constants.weight, (n, k), np.dtype(np.uint16))
        _check(f"{name}.row_sums", constants.row_sums, (n,), np.dtype(np.float32))
        _check(f"{name}.bias", constants.bias, (n,), np.dtype(np.float32))


def _check(
    name: str, array: NDArray[np.uint16] | NDArray[np.float32], shape: tuple[int, ...], dtype: np.dtype[Any]
) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise CompileError(STAGE, name, f"is {dtype} of shape {shape}, not {array.dtype} of {array.shape}")
