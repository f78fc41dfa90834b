"""A step of fused ops in numpy, op by op over whole rows: what the packed program must compute, bit for bit.

Also the loop around it, so that requests are decoded to their end. Knows ops, caches and slots. Does not know phases,
SMs or tapes; the one trace of a machine is how tokens are shared out in the head, as log-sum-exps are merged from SM to
SM.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from . import numbers
from .errors import CompileError
from .fuse import fold_constants
from .isa import MAX_ROWS
from .ops import (
    Embed,
    FusedAttention,
    FusedHead,
    FusedJoint,
    FusedLinear,
    FusedLstm,
    FusedOp,
    FusedRecurrence,
    Sizes,
)
from .pick import HeadPartial, Row, allowed_tokens, merge, partial_of
from .request import Request
from .select import Emitted, Slot, Slots, accept, rows_of_step

TokenRange = tuple[int, int]  # first token, number of tokens


@dataclass(frozen=True, slots=True, eq=False)
class Network:
    """Fused ops with their constants, as float32 arrays that hold what the machine holds."""

    sizes: Sizes
    ops: tuple[FusedOp, ...]
    weights: Mapping[str, NDArray[np.float32]]  # by op: [n, k] bfloat16, norm folded in
    row_sums: Mapping[str, NDArray[np.float32]]  # by op: [n]
    biases: Mapping[str, NDArray[np.float32]]  # by op: [n]
    token_table: NDArray[np.float32]  # [n_tokens, width] bfloat16
    position_table: NDArray[np.float32]  # [n_positions, width]

    @property
    def n_score_heads(self) -> int:
        """Heads whose scores are kept, in all layers."""
        return sum(len(op.dumped_heads) for op in self.ops if isinstance(op, FusedAttention))


def network_of(ops: Sequence[FusedOp], sizes: Sizes, constants: Mapping[str, NDArray[np.float32]]) -> Network:
    """Fold ``constants``, named as in the graph, into ``ops``. Raises CompileError for a missing or misshapen one."""
    with_weights = [op for op in ops if not isinstance(op, FusedAttention)]
    folded = dict(zip((op.name for op in with_weights), fold_constants(ops, constants), strict=True))
    embed = _embedding(ops)
    return Network(
        sizes=sizes,
        ops=tuple(ops),
        weights={name: numbers.from_bits(each.weight) for name, each in folded.items()},
        row_sums={name: each.row_sums for name, each in folded.items()},
        biases={name: each.bias for name, each in folded.items()},
        token_table=numbers.round_bf16(constants[embed.token_table]),
        position_table=constants[embed.position_table],
    )


def _embedding(ops: Sequence[FusedOp]) -> Embed:
    first = ops[0]
    if not isinstance(first, FusedLinear) or first.embed is None:
        raise CompileError("evaluate", first.name, "the first op reads the embedding")
    return first.embed


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """What slots keep from step to step; NaN where nothing was written. A step writes into it."""

    self_cache: NDArray[np.float32]  # [slot, layer, keys or values, head, n_positions, head size] bfloat16
    cross_cache: NDArray[np.float32]  # [slot, layer, keys or values, head, n_cross_positions, head size] bfloat16
    scores: NDArray[np.float32]  # [slot, dumped head, n_positions, n_cross_positions]

    @staticmethod
    def empty(sizes: Sizes, n_score_heads: int) -> "Memory":
        """Nothing written yet."""
        n_heads = sizes.width // sizes.head_size
        own = (sizes.max_slots, sizes.n_layers, 2, n_heads, sizes.n_positions, sizes.head_size)
        cross = (sizes.max_slots, sizes.n_layers, 2, n_heads, sizes.n_cross_positions, sizes.head_size)
        scores = (sizes.max_slots, n_score_heads, sizes.n_positions, sizes.n_cross_positions)
        return Memory(*(np.full(shape, np.nan, np.float32) for shape in (own, cross, scores)))


# ---------------------------------------------------------------------- one step


def evaluate(network: Network, memory: Memory, rows: Sequence[Row]) -> dict[str, NDArray[np.float32]]:
    """Every value of a step by the name of its op, [rows, n] bfloat16; the head's are its logits, float32.

    The rows' keys and values go into ``memory``, and the scores that are kept.
    """
    values: dict[str, NDArray[np.float32]] = {}
    stream = np.zeros((len(rows), network.sizes.width), np.float32)
    for op in network.ops:
        match op:
            case FusedLinear():
                x = stream if op.x is None else values[op.x]
                if op.embed is not None:
                    stream = _embed(network, rows)
                    x = numbers.round_bf16(stream)
                y = _linear(network, op, x)
                if op.gelu:
                    y = numbers.gelu(y)
                if op.residual:
                    stream = stream + y
                    y = stream
                values[op.name] = numbers.round_bf16(y)
            case FusedAttention():
                values[op.name] = _attention(op, memory, rows, values[op.x])
            case FusedHead():
                values[op.name] = _linear(network, op, values[op.x])
            case FusedLstm() | FusedRecurrence() | FusedJoint():
                raise CompileError("evaluate", op.name, "is a transducer's, which evaluate_transducer.py computes")
            case _:
                assert_never(op)
    return values


def _embed(network: Network, rows: Sequence[Row]) -> NDArray[np.float32]:
    tokens, positions = [row.token for row in rows], [row.position for row in rows]
    return numbers.embed(network.token_table[tokens], network.position_table[positions])


def _linear(network: Network, op: FusedLinear | FusedHead, x: NDArray[np.float32]) -> NDArray[np.float32]:
    y = numbers.linear_sums(x, network.weights[op.name], network.sizes.n_warps)
    if op.norm is not None:
        y = numbers.apply_norm(y, numbers.row_stats(x, op.norm.epsilon), network.row_sums[op.name])
    return y + network.biases[op.name]


def _attention(op: FusedAttention, memory: Memory, rows: Sequence[Row], x: NDArray[np.float32]) -> NDArray[np.float32]:
    heads = x.reshape(len(rows), -1, op.n_heads, op.width // op.n_heads)  # [rows, queries (keys, values), head, D]
    mixed = [np.zeros((0, op.n_heads, heads.shape[-1]), np.float32)]
    if not op.is_cross:
        for row, (_, keys, values) in zip(rows, heads, strict=True):
            memory.self_cache[row.slot, op.layer, 0, :, row.position] = keys
            memory.self_cache[row.slot, op.layer, 1, :, row.position] = values
    for row, own in zip(rows, heads, strict=True):
        attend = _attend_cross if op.is_cross else _attend_self
        mixed.append(attend(op, memory, row, own[0])[None])
    return np.concatenate(mixed).reshape(len(rows), op.width)


def _attend_self(op: FusedAttention, memory: Memory, row: Row, q: NDArray[np.float32]) -> NDArray[np.float32]:
    """[head, D] of one row, over its own position and those before."""
    keys, values = memory.self_cache[row.slot, op.layer]
    scores = numbers.block_scores(q[:, None], keys[:, : row.position + 1])[:, 0]
    return _mix(op, scores, values)


def _attend_cross(op: FusedAttention, memory: Memory, row: Row, q: NDArray[np.float32]) -> NDArray[np.float32]:
    """[head, D] of one row; the tail weighs more, in the scores that count but not in those that are kept."""
    n_positions = row.request.n_positions
    n_plain = n_positions if row.request.n_plain is None else row.request.n_plain
    keys, values = memory.cross_cache[row.slot, op.layer]
    scores = numbers.block_scores(q[:, None], keys[:, :n_positions])[:, 0]
    kept = slice(op.first_dump, op.first_dump + len(op.dumped_heads))
    memory.scores[row.slot, kept, row.position, :n_positions] = scores[list(op.dumped_heads)]
    scores[:, n_plain:] += np.float32(row.request.tail_bias)
    return _mix(op, scores, values)


def _mix(op: FusedAttention, scores: NDArray[np.float32], values: NDArray[np.float32]) -> NDArray[np.float32]:
    """[head, D] from scores [head, positions]: block after block, then the blocks together."""
    blocks = []
    for begin in range(0, scores.shape[1], op.block):
        own = scores[:, None, begin : begin + op.block]  # [head, 1, positions]
        seen = values[:, begin : begin + own.shape[-1]]
        blocks.append(numbers.attend_block(own, seen, np.array([own.shape[-1]])))
    largest, totals, mixed = (np.stack(parts)[:, :, 0] for parts in zip(*blocks, strict=True))
    return numbers.combine_blocks(largest, totals, mixed)


# ---------------------------------------------------------------------- whole decodes


def merged_partials(
    logits: NDArray[np.float32],  # [rows, n_tokens]
    rows: Sequence[Row],
    bitmaps: NDArray[np.uint32],  # [n_rules, 2, ceil(n_tokens / 32)]
    sizes: Sizes,
    ranges: Sequence[TokenRange],
) -> list[HeadPartial]:
    """Of each row what SELECT sees, when SM i has the tokens ``ranges[i]``."""
    merged = []
    for row, own in zip(rows, logits, strict=True):
        allowed = allowed_tokens(row, bitmaps, sizes)
        merged.append(merge([partial_of(own[first : first + n], first, row, allowed, sizes) for first, n in ranges]))
    return merged


def run_step(
    network: Network,
    memory: Memory,
    slots: Slots,
    bitmaps: NDArray[np.uint32],
    *,
    max_rows: int = MAX_ROWS,
    ranges: Sequence[TokenRange] | None = None,  # None: one SM has all tokens
) -> tuple[Slots, tuple[Emitted, ...]]:
    """One step of all active slots: the slots after it, and what the host is told.

    Raises:
        SelectError: if a row has nothing to pick.
    """
    sizes = network.sizes
    rows = rows_of_step(slots, max_rows, sizes)
    logits = evaluate(network, memory, rows)[network.ops[-1].name]
    merged = merged_partials(logits, rows, bitmaps, sizes, ranges or [(0, sizes.n_tokens)])
    return accept(slots, rows, merged, sizes)


def run_requests(
    network: Network,
    memory: Memory,
    requests: Sequence[Request],
    bitmaps: NDArray[np.uint32],
    *,
    max_rows: int = MAX_ROWS,
    ranges: Sequence[TokenRange] | None = None,
) -> list[Emitted]:
    """What the host is told until all ``requests``, one a slot from slot 0 on, are done."""
    slots: Slots = tuple(Slot.of(request, ticket) for ticket, request in enumerate(requests))
    told: list[Emitted] = []
    while any(slot is not None for slot in slots):
        slots, emitted = run_step(network, memory, slots, bitmaps, max_rows=max_rows, ranges=ranges)
        told += emitted
    return told
