"""A transducer's step in numpy, op by op: what the packed program must compute, bit for bit; and the loop around it.

Knows ops, and what slots keep from step to step. Does not know phases, SMs or tapes; the one trace of a machine is how
tokens are shared out in the joint, as log-sum-exps are merged from SM to SM.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import numbers
from .evaluate import TokenRange
from .fuse import fold_constants, fold_table, has_weight
from .isa import GATES, MAX_ROWS
from .ops import FusedJoint, FusedLinear, FusedLstm, FusedOp, FusedRecurrence, Sizes
from .request import TransducerRequest
from .select import Emitted
from .transduce import Best, Feed, FramePick, FrameRow, Slot, Slots, Told, accept, log_sum_exp, rows_of_step

Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class TransducerNetwork:
    """Fused ops with their constants, as float32 arrays that hold what the machine holds."""

    sizes: Sizes
    ops: tuple[FusedOp, ...]
    weights: Mapping[str, Floats]  # by op: [n, k] bfloat16
    biases: Mapping[str, Floats]  # by op: [n]
    table: Floats  # [n_tokens, units, GATES]

    @staticmethod
    def of(ops: Sequence[FusedOp], sizes: Sizes, constants: Mapping[str, Floats]) -> "TransducerNetwork":
        """Fold ``constants``, named as in the graph. Raises CompileError for a missing or misshapen one."""
        names = [op.name for op in ops if has_weight(op)]
        folded = dict(zip(names, fold_constants(ops, constants), strict=True))
        first = ops[0]
        assert isinstance(first, FusedLstm), "a transducer begins with the LSTM behind its lookup"
        weights = {name: numbers.from_bits(each.weight) for name, each in folded.items()}
        biases = {name: each.bias for name, each in folded.items()}
        return TransducerNetwork(sizes, tuple(ops), weights, biases, fold_table(first, constants))


@dataclass(frozen=True, slots=True, eq=False)
class TransducerMemory:
    """What slots keep from step to step. A step writes into all but ``frames`` and ``state_in``."""

    frames: Floats  # [seat, n_frames, width] bfloat16
    state_in: Floats  # [seat, layer, 2, units] outputs, cells
    state_out: Floats  # [seat, layer, 2, units]
    kept: Floats  # [slot, layer, units, GATES] recurrent products
    predicted: Floats  # [slot, width] bfloat16

    @staticmethod
    def empty(sizes: Sizes) -> "TransducerMemory":
        """Nothing written yet: not a number anywhere."""
        assert sizes.transducer is not None, "a transducer's sizes"
        n_slots, n_seats = sizes.max_slots, sizes.transducer.n_seats
        state = (n_seats, sizes.n_layers, 2, sizes.width)
        frames = (n_seats, sizes.transducer.n_frames, sizes.width)
        kept = (n_slots, sizes.n_layers, sizes.width, GATES)
        shapes = (frames, state, state, kept, (n_slots, sizes.width))
        return TransducerMemory(*(np.full(shape, np.nan, np.float32) for shape in shapes))


def evaluate_transducer(
    network: TransducerNetwork, memory: TransducerMemory, slots: Slots, rows: Sequence[FrameRow]
) -> Floats:
    """The joint's logits [rows, n], durations behind the padded tokens. What slots keep goes into ``memory``."""
    stepping = [index for index, slot in enumerate(slots) if slot is not None and slot.has_step]
    values: dict[str, Floats] = {}
    logits = np.zeros((0, 0), np.float32)
    for op in network.ops:
        if not stepping and not isinstance(op, FusedJoint):
            continue
        match op:
            case FusedLstm():
                x = None if op.x is None else values[op.x]
                values[op.name] = np.stack([_lstm(network, memory, slots, op, slot, x) for slot in stepping])
            case FusedRecurrence():
                kept = _sums(network, op, values[op.x])
                memory.kept[stepping, op.layer] = kept.reshape(len(stepping), -1, GATES)
            case FusedLinear():
                assert op.x is not None, "a transducer's linear reads a value"
                y = _sums(network, op, values[op.x]) + network.biases[op.name]
                values[op.name] = numbers.round_bf16(y)
            case FusedJoint():
                if stepping:
                    memory.predicted[stepping] = values[op.x]
                own = [(row.slot, row.frame) for row in rows]
                if not own:
                    continue
                frames = np.stack([memory.frames[_seat(slots, slot), frame] for slot, frame in own])
                x = numbers.joint_rows(frames, memory.predicted[[slot for slot, _ in own]])
                logits = _sums(network, op, x) + network.biases[op.name]
    return logits


def _sums(network: TransducerNetwork, op: FusedOp, x: Floats) -> Floats:
    return numbers.linear_sums(x, network.weights[op.name], network.sizes.n_warps)


def _lstm(
    network: TransducerNetwork,
    memory: TransducerMemory,
    slots: Slots,
    op: FusedLstm,
    index: int,
    x: Floats | None,  # [stepping slots, k]
) -> Floats:
    """[units] one slot's outputs."""
    slot, seat = slots[index], _seat(slots, index)
    assert slot is not None, "an active slot"
    if slot.resumes or slot.feed is Feed.STATE:
        state = memory.state_out[slot.state_seat] if slot.resumes else memory.state_in[seat]
        outputs, cells = numbers.round_bf16(state[op.layer, 0]), state[op.layer, 1]
    else:
        is_new = np.float32(0) if slot.is_new else None
        kept = memory.kept[index, op.layer] if is_new is None else np.zeros((op.n // GATES, GATES), np.float32)
        if x is None:
            gates = network.table[slot.token] + kept
        else:
            own = [i for i, other in enumerate(slots) if other is not None and other.has_step].index(index)
            sums = _sums(network, op, x[own : own + 1]).reshape(-1, GATES)
            gates = (sums + kept) + network.biases[op.name].reshape(-1, GATES)
        before = memory.state_out[slot.state_seat, op.layer, 1] if is_new is None else np.zeros(len(gates), np.float32)
        outputs, cells = numbers.lstm_cells(gates, before)
    memory.state_out[seat, op.layer] = outputs, cells
    return outputs


def _seat(slots: Slots, index: int) -> int:
    slot = slots[index]
    assert slot is not None, "an active slot"
    return slot.part.seat


def run_step(
    network: TransducerNetwork,
    memory: TransducerMemory,
    slots: Slots,
    *,
    max_rows: int = MAX_ROWS,
    ranges: Sequence[TokenRange] | None = None,  # None: one SM has all tokens
) -> tuple[Slots, list[Emitted]]:
    """One step of all active slots: the slots after it, and what the host is told.

    Raises:
        SelectError: if a row has nothing to pick.
    """
    sizes, joint = network.sizes, network.ops[-1]
    assert isinstance(joint, FusedJoint), "a transducer ends with its joint"
    rows = rows_of_step(slots, max_rows)
    logits = evaluate_transducer(network, memory, slots, rows)
    ranges = ranges or [(0, sizes.n_tokens)]
    picks = []
    for own in logits:
        best = Best.among([Best.of(own[first : first + n], first) for first, n in ranges])
        picks.append(FramePick(best.token, best.logit, int(np.argmax(own[joint.first_duration :]))))
    slots, told = accept(slots, rows, picks, sizes)

    def lse(row: int) -> float:
        sums = [log_sum_exp(logits[row, first : first + n]) for first, n in ranges]
        return log_sum_exp(np.array(sums, np.float32))

    return slots, [one.emitted(lse(one.row)) if isinstance(one, Told) else one for one in told]


def run_transducer(
    network: TransducerNetwork,
    memory: TransducerMemory,
    requests: Sequence[TransducerRequest],
    *,
    max_rows: int = MAX_ROWS,
    ranges: Sequence[TokenRange] | None = None,
) -> list[Emitted]:
    """What the host is told until all ``requests``, one a slot from slot 0 on, are done."""
    transducer = network.sizes.transducer
    assert transducer is not None, "a transducer's sizes"
    slots: Slots = tuple(Slot.of(request, ticket, transducer) for ticket, request in enumerate(requests))
    told: list[Emitted] = []
    while any(slot is not None for slot in slots):
        slots, emitted = run_step(network, memory, slots, max_rows=max_rows, ranges=ranges)
        told += emitted
    return told
