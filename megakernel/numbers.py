"""The arithmetic of every op in numpy, to the last bit: what ``evaluate`` and the interpreter both call.

Everything is elementwise float32 in an order that is written down here, so that a row's bits depend neither on how many
rows or weight rows a call is given nor on a library's blocking: a whole matrix or one granule, it is the same number.
Knows arrays. Does not know ops, phases, SMs or where values lie. (The device multiplies inside tensor cores, in another
order: it is compared by tolerance.)

bfloat16 values are float32 arrays that hold them exactly, or uint16 arrays of their bits where the name says bits.
"""

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .isa import STATS_ELEMENTS, TILE_K

_HALF_BF16 = np.uint32(0x7FFF)
_QUIET_NAN_BITS = np.uint16(0x7FC0)


def to_bits(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """The nearest bfloat16's bits, ties to even; what is past the largest becomes infinity."""
    words = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (words + _HALF_BF16 + (words >> np.uint32(16) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), _QUIET_NAN_BITS, rounded.astype(np.uint16))


def from_bits(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The values of bfloat16 bits."""
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def round_bf16(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """The nearest bfloat16, as float32."""
    return from_bits(to_bits(x))


def pack_pairs(x: NDArray[np.float32]) -> NDArray[np.uint32]:
    """[..., 2n] → [..., n] words of two bfloat16, the first in the low half."""
    bits = to_bits(x).astype(np.uint32)
    return bits[..., 0::2] | bits[..., 1::2] << np.uint32(16)


def unpack_pairs(words: NDArray[np.uint32]) -> NDArray[np.float32]:
    """[..., n] words of two bfloat16 → [..., 2n]."""
    low, high = words << np.uint32(16), words & np.uint32(0xFFFF0000)
    return np.stack([low, high], axis=-1).reshape(*words.shape[:-1], -1).view(np.float32)


def float_word(x: float) -> int:
    """A float32's bits as an unsigned word."""
    return int(np.float32(x).view(np.uint32))


def word_float(word: int) -> float:
    """The float32 whose bits these are."""
    return float(np.uint32(word).view(np.float32))


def k_warps(k: int, n_warps: int) -> int:
    """How many of ``n_warps`` share a granule of ``k`` columns: the largest power of two that leaves whole tiles."""
    n = n_warps
    while (k // TILE_K) % n:
        n //= 2
    return n


def accumulate(
    x: NDArray[np.float32],  # [..., rows, k]
    weight: NDArray[np.float32],  # [..., n, k]
    sums: NDArray[np.float32] | None = None,  # [..., rows, n] so far
) -> NDArray[np.float32]:
    """[..., rows, n]: products added one k after the other, as one warp does over its part of K.

    Going on from ``sums`` gives what one call over both parts gives.
    """
    columns = np.ascontiguousarray(np.moveaxis(weight, -1, 0))[..., None, :]  # [k, ..., 1, n]
    entries = np.ascontiguousarray(np.moveaxis(x, -1, 0))[..., None]  # [k, ..., rows, 1]
    shape = np.broadcast_shapes(columns.shape[1:], entries.shape[1:])
    total = np.zeros(shape, np.float32) if sums is None else sums.astype(np.float32, copy=True)
    product = np.empty(shape, np.float32)
    for column, entry in zip(columns, entries, strict=True):
        np.multiply(entry, column, out=product)
        np.add(total, product, out=total)
    return total


def add_in_order(parts: NDArray[np.float32]) -> NDArray[np.float32]:
    """[n, ...] → [...]: the first plus the second plus the third."""
    total: NDArray[np.float32] = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


def sum_in_order(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """[..., n] → [...]: the first plus the second plus the third. numpy's own sum pairs them."""
    sums: NDArray[np.float32] = np.add.accumulate(x, axis=-1)[..., -1]
    return sums


def linear_sums(x: NDArray[np.float32], weight: NDArray[np.float32], n_warps: int) -> NDArray[np.float32]:
    """x [rows, K] bfloat16 times weight [n, K] bfloat16 → [rows, n]: each warp's part of K, then the warps in order."""
    n_parts = k_warps(x.shape[1], n_warps)
    x_parts = x.reshape(x.shape[0], n_parts, -1).swapaxes(0, 1)  # [warps, rows, k]
    weight_parts = weight.reshape(weight.shape[0], n_parts, -1).swapaxes(0, 1)  # [warps, n, k]
    return add_in_order(accumulate(x_parts, weight_parts))


def row_stats(x: NDArray[np.float32], epsilon: float) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Mean and 1 / standard deviation [rows] of x [rows, K] bfloat16, for a norm that was folded into a linear.

    Sums of pieces of STATS_ELEMENTS, element after element, then the pieces in order. The variance is the mean square
    less the squared mean, not below 0.
    """
    n_rows, k = x.shape
    pieces = x.reshape(n_rows, -1, STATS_ELEMENTS)  # [rows, pieces, elements]
    sums = sum_in_order(sum_in_order(pieces))
    squares = sum_in_order(sum_in_order(pieces * pieces))
    mean = sums / np.float32(k)
    variance = np.maximum(squares / np.float32(k) - mean * mean, np.float32(0))
    return mean, np.float32(1) / np.sqrt(variance + np.float32(epsilon))


def apply_norm(
    sums: NDArray[np.float32],  # [rows, n]
    stats: tuple[NDArray[np.float32], NDArray[np.float32]],  # of the input rows
    row_sums: NDArray[np.float32],  # [n] of the weight
) -> NDArray[np.float32]:
    """What the linear of the normed rows is, from the linear of the rows themselves."""
    mean, rstd = stats
    return (sums - mean[:, None] * row_sums) * rstd[:, None]


def gelu(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """x · Φ(x) with the error function itself, in float64, rounded once."""
    wide = x.astype(np.float64)
    share = np.asarray(_erf(wide / math.sqrt(2)), np.float64)
    return (0.5 * wide * (1 + share)).astype(np.float32)


# Element by element through the C library: numpy has no erf, and its exp may take another path at an array's end.
_erf: Any = np.frompyfunc(math.erf, 1, 1)
_exp: Any = np.frompyfunc(math.exp, 1, 1)


def exp(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """e to the x ≤ 88, rounded once from float64."""
    return np.asarray(_exp(x.astype(np.float64)), np.float64).astype(np.float32)


_tanh: Any = np.frompyfunc(math.tanh, 1, 1)


def tanh(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """In float64, rounded once."""
    return np.asarray(_tanh(x.astype(np.float64)), np.float64).astype(np.float32)


def sigmoid(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """1 / (1 + e^-x) as half of 1 + tanh(x / 2), in float64, rounded once."""
    half = np.asarray(_tanh(x.astype(np.float64) / 2), np.float64)
    return ((1 + half) / 2).astype(np.float32)


def lstm_cells(
    gates: NDArray[np.float32],  # [..., units, 4] input, forget, cell, output
    cells: NDArray[np.float32],  # [..., units]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """One step: outputs [..., units] in bfloat16, and the cells behind it."""
    enter, forget, new, leave = (gates[..., gate] for gate in range(4))
    after = sigmoid(forget) * cells + sigmoid(enter) * tanh(new)
    return round_bf16(sigmoid(leave) * tanh(after)), after


def joint_rows(frames: NDArray[np.float32], predicted: NDArray[np.float32]) -> NDArray[np.float32]:
    """relu(frames + predicted) of bfloat16 rows [..., K], in bfloat16; what is no number stays none."""
    return round_bf16(np.maximum(frames + predicted, np.float32(0)))


def embed(token_row: NDArray[np.float32], position_row: NDArray[np.float32]) -> NDArray[np.float32]:
    """[..., width]: where the residual stream begins; rounded to bfloat16 it is the first linear's input."""
    return token_row + position_row


def block_scores(q: NDArray[np.float32], keys: NDArray[np.float32]) -> NDArray[np.float32]:
    """q [..., rows, D] and keys [..., positions, D] of heads, bfloat16 → [..., rows, positions], over the root of D."""
    return accumulate(q, keys) * np.float32(q.shape[-1] ** -0.5)


def attend_block(
    scores: NDArray[np.float32],  # [..., rows, positions] of one block
    values: NDArray[np.float32],  # [..., positions, D] bfloat16
    n_visible: NDArray[np.int64],  # [rows]: how many of the positions a row sees, at least 1
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Largest score [..., rows], sum of exponentials [..., rows] and mixed values [..., rows, D] in bfloat16."""
    is_visible = np.arange(scores.shape[-1]) < n_visible[:, None]
    seen = np.where(is_visible, scores, np.float32(-np.inf))
    largest = seen.max(axis=-1)
    weights = exp(seen - largest[..., None])
    total = sum_in_order(weights)
    mixed = accumulate(weights, values.swapaxes(-1, -2))
    return largest, total, round_bf16(mixed / total[..., None])


def combine_blocks(
    largest: NDArray[np.float32],  # [blocks, ...]
    totals: NDArray[np.float32],  # [blocks, ...]
    mixed: NDArray[np.float32],  # [blocks, ..., D] bfloat16
) -> NDArray[np.float32]:
    """[..., D] bfloat16: attention over all blocks of a row and head, in their order. One block is itself."""
    if len(mixed) == 1:
        alone: NDArray[np.float32] = mixed[0]
        return alone
    shares = totals * exp(largest - largest.max(axis=0))
    return round_bf16(add_in_order(shares[..., None] * mixed) / add_in_order(shares)[..., None])
