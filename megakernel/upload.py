"""Constants → the tape and the floats beside it, in torch, on whatever device it is asked to: what ``pack.py`` and
``fuse.fold`` do in numpy.

Takes a weight some rows at a time, so that beside the result only a few tens of megabytes are in use. Knows torch.
Does not know the driver.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import torch

from .errors import CompileError
from .fuse import has_weight
from .isa import GATES, GRANULE_ROWS, TILE_K
from .ops import FusedHead, FusedJoint, FusedLinear, FusedLstm, FusedRecurrence, WeightOp
from .pack import TILE_ELEMENTS, granule_places, tape_positions
from .program import Program

STAGE = "upload"
_CHUNK_ELEMENTS = 1 << 22  # of a weight that are folded at a time: 16 MB in float32, 32 in float64

Constants = Mapping[str, torch.Tensor]  # by name, of any floating type, on any device


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A program's weights as the kernel reads them."""

    tape: torch.Tensor  # [n_tiles, 256] bfloat16
    aux: torch.Tensor  # [n_sms, aux_granules, GRANULE_ROWS, 2] float32: row sum and bias


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """Some rows of a weight with the norm folded in."""

    first: int
    weight: torch.Tensor  # [rows, k] bfloat16
    aux: torch.Tensor  # [rows, 2] float32


def upload_weights(program: Program, constants: Constants, device: torch.device) -> Packed:
    """Fold, round and lay out every weight of ``program``.

    Raises:
        CompileError: if a constant is missing or has another shape than the graph says.
    """
    positions = torch.from_numpy(tape_positions(program))
    tape = torch.empty((len(positions), TILE_ELEMENTS), dtype=torch.bfloat16, device=device)
    aux = torch.zeros((program.target.n_sms, program.aux_granules, GRANULE_ROWS, 2), device=device)
    for part in program.weights:
        op = program.ops[program.op_of_phase[part.phase]]
        assert has_weight(op), f"phase {part.phase} reads a weight and is none of a linear"
        to = positions[part.first_tile : part.first_tile + part.n_tiles].to(device)
        rows_aux = torch.zeros((part.n_tiles * TILE_K // op.k * GRANULE_ROWS, 2), device=device)
        for rows in _folded_rows(op, constants, device):
            tiles = _tiles_of(rows.weight)
            first_tile = rows.first // GRANULE_ROWS * (op.k // TILE_K)
            tape[to[first_tile : first_tile + len(tiles)]] = tiles
            rows_aux[rows.first : rows.first + len(rows.aux)] = rows.aux
        sm, nth, granule = (torch.from_numpy(places).to(device) for places in granule_places(program, part.phase))
        aux[sm, nth] = rows_aux.view(-1, GRANULE_ROWS, 2)[granule]
    return Packed(tape, aux)


def constant(constants: Constants, name: str, *shape: int) -> torch.Tensor:
    """The constant ``name``, where it is.

    Raises:
        CompileError: if it is missing or has another shape.
    """
    found = constants.get(name)
    if found is None or found.shape != shape:
        raise CompileError(STAGE, name, f"has shape {shape}, not {None if found is None else tuple(found.shape)}")
    return found


def upload_table(op: FusedLstm, constants: Constants, device: torch.device) -> torch.Tensor:
    """As ``fuse.fold_table``, in torch: [n_tokens, units, GATES] float32 on ``device``."""
    assert op.token_table is not None, "the LSTM behind the lookup has a table"
    weight = by_unit(constant(constants, op.weight_input, op.n, op.k)).to(device, torch.float64)
    bias = sum(by_unit(constant(constants, name, op.n)).double() for name in op.biases)
    assert isinstance(bias, torch.Tensor), "two tensors added"
    tokens = constants[op.token_table]
    table = torch.empty((len(tokens), op.n // GATES, GATES), device=device)
    n_rows = max(_CHUNK_ELEMENTS // op.n, 1)
    for first in range(0, len(tokens), n_rows):
        rows = tokens[first : first + n_rows].to(device, torch.float64) @ weight.T + bias.to(device)
        table[first : first + n_rows] = rows.float().view(-1, op.n // GATES, GATES)
    return table


def by_unit(rows: torch.Tensor) -> torch.Tensor:
    """As ``fuse.by_unit``, in torch."""
    return rows.reshape(GATES, -1, *rows.shape[1:]).transpose(0, 1).reshape(rows.shape)


def _given(op: WeightOp, constants: Constants) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Weight [n, k] and bias [n] of ``op``, in the order of the program's rows."""
    match op:
        case FusedLstm():
            first, second = (constant(constants, name, op.n).double() for name in op.biases)
            return by_unit(constant(constants, op.weight_input, op.n, op.k)), by_unit(first + second)
        case FusedRecurrence():
            return by_unit(constant(constants, op.weight, op.n, op.k)), None
        case FusedJoint():
            given, padding = op.n_tokens + op.n_durations, op.first_duration - op.n_tokens
            weight, bias = constant(constants, op.weight, given, op.k), constant(constants, op.bias, given)
            tokens = torch.nn.functional.pad(weight[: op.n_tokens], (0, 0, 0, padding))
            of_tokens = torch.nn.functional.pad(bias[: op.n_tokens], (0, padding))
            return torch.cat([tokens, weight[op.n_tokens :]]), torch.cat([of_tokens, bias[op.n_tokens :]])
        case FusedLinear() if op.bias is not None:
            return constant(constants, op.weight, op.n, op.k), constant(constants, op.bias, op.n)
        case _:
            return constant(constants, op.weight, op.n, op.k), None


def _folded_rows(op: WeightOp, constants: Constants, device: torch.device) -> Iterator[_Rows]:
    """The weight of ``op``, whole granules at a time."""
    weight, given = _given(op, constants)
    bias = torch.zeros(op.n, dtype=torch.float64) if given is None else given.double()
    bias = bias.to(device)
    gamma = beta = None
    if isinstance(op, FusedLinear | FusedHead) and op.norm:
        gamma = constant(constants, op.norm.gamma, op.k).to(device, torch.float32)
        beta = constant(constants, op.norm.beta, op.k).to(device, torch.float64)
    n_rows = max(_CHUNK_ELEMENTS // op.k // GRANULE_ROWS, 1) * GRANULE_ROWS
    for first in range(0, op.n, n_rows):
        chunk = weight[first : first + n_rows].to(device, torch.float32)
        yield _fold(first, chunk, bias[first : first + n_rows], gamma, beta)


def _fold(
    first: int,
    weight: torch.Tensor,  # [rows, k] float32
    bias: torch.Tensor,  # [rows] float64
    gamma: torch.Tensor | None,  # [k] float32
    beta: torch.Tensor | None,  # [k] float64
) -> _Rows:
    if gamma is None or beta is None:
        return _Rows(first, weight.bfloat16(), torch.stack([torch.zeros_like(bias), bias], dim=1).float())
    rounded = (weight * gamma).bfloat16()
    row_sums = rounded.double().sum(dim=1)
    wide_bias = bias + (weight.double() * beta).sum(dim=1)
    return _Rows(first, rounded, torch.stack([row_sums, wide_bias], dim=1).float())


def _tiles_of(weight: torch.Tensor) -> torch.Tensor:
    """As ``pack.tiles_of``, in torch: [rows, k] → [granules x k / 32, 256]."""
    n, k = weight.shape
    if n % GRANULE_ROWS:
        weight = torch.nn.functional.pad(weight, (0, 0, 0, -n % GRANULE_ROWS))
    tiles = weight.view(-1, GRANULE_ROWS, k // TILE_K, TILE_K).transpose(1, 2)
    return tiles.reshape(-1, TILE_ELEMENTS)


def as_tensor(array: np.ndarray[tuple[int, ...], np.dtype[np.uint32]], device: torch.device) -> torch.Tensor:
    """Words as they are: torch's unsigned types are young, so they go as int32."""
    return torch.from_numpy(array.view(np.int32).copy()).to(device)
