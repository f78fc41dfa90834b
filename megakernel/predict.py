"""How long a step should take: a fluid model of the weight stream against the latency of the phases.

Every SM streams its tape at its share of the bandwidth, at most a ring ahead of what it has used; a phase begins when
the slowest SM has ended the one before, and lasts as long as its own latency or as its bytes still on the way. Knows a
program's words. Does not know what phases compute: arithmetic is never the limit in it.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .isa import TILE_BYTES, Op, Phase
from .program import Program, padding_bytes, weight_bytes
from .schedule import balance
from .tasks import HEAD_SIZE, cross_unit_sm, self_unit_sm

# Of 400 chained phases with one granule on each of 128 SMs of an H200: 1.75 µs a phase, 1.0 of them without the wait.
HOP_US = 0.75
BODY_US = 1.0
KEY_VALUE_BYTES = 2 * 2  # an element's key and value in bfloat16
BYTES_PER_US_OF_GB_S = 1e3
N_STEPS = 4  # simulated: the ring's state repeats after one or two


@dataclass(frozen=True, slots=True)
class Prediction:
    """One step. Times in µs, None where the target's bandwidth is not known."""

    n_slots: int
    n_positions: int  # of each slot's own
    step_us: float | None
    floor_us: float | None  # all bytes at the full bandwidth
    n_hops: int  # times that the step waits for other SMs
    weight_bytes: int
    padding_bytes: int  # part of these
    cache_bytes: int  # keys and values
    balance: float  # of the weights' bytes on SMs, max over mean


def predict(
    program: Program, *, n_slots: int = 1, n_positions: int = 64, n_cross_positions: int | None = None
) -> Prediction:
    """A step of one row for each of ``n_slots`` slots with so many positions; ``n_cross_positions`` None: all.

    Of a transducer: a step with a token. Its weights stay at hand, so hops are all that counts.
    """
    if program.sizes.transducer is not None:
        return _of_transducer(program, n_slots)
    n_cross = program.sizes.n_cross_positions if n_cross_positions is None else n_cross_positions
    visible = {Op.ATTEND_SELF: n_positions, Op.ATTEND_CROSS: n_cross}
    weights = weight_bytes(program)  # [n_phases, n_sms]
    caches = np.zeros_like(weights)
    waits = np.ones(len(weights), np.bool_)
    for index, words in enumerate(program.phases):
        op = Op(int(words[Phase.OP]))
        if op in visible:
            caches[index] = _cache_bytes(words, n_slots, visible[op], program.target.n_sms)
            waits[index + 1] = visible[op] > words[Phase.BLOCK]  # a row of one block needs no COMBINE
    total_bytes = int(weights.sum() + caches.sum())
    bandwidth = program.target.bandwidth_gb_s
    ring_bytes = program.ring_tiles * program.sizes.n_warps * TILE_BYTES
    return Prediction(
        n_slots=n_slots,
        n_positions=n_positions,
        step_us=None if bandwidth is None else _step_us(weights, caches, waits, ring_bytes, bandwidth),
        floor_us=None if bandwidth is None else total_bytes / (bandwidth * BYTES_PER_US_OF_GB_S),
        n_hops=int(waits.sum()),
        weight_bytes=int(weights.sum()),
        padding_bytes=padding_bytes(program),
        cache_bytes=int(caches.sum()),
        balance=balance(weights.sum(axis=0)),
    )


def _of_transducer(program: Program, n_slots: int) -> Prediction:
    weights = weight_bytes(program)
    n_hops = int((program.phases[:, Phase.INPUT_EPOCH] > 0).sum() - (program.phases[:, Phase.OP] == Op.RECUR).sum())
    return Prediction(
        n_slots=n_slots,
        n_positions=0,
        step_us=n_hops * (HOP_US + BODY_US),
        floor_us=0.0,
        n_hops=n_hops,
        weight_bytes=int(weights.sum()),
        padding_bytes=padding_bytes(program),
        cache_bytes=0,
        balance=balance(weights.sum(axis=0)),
    )


def _cache_bytes(words: NDArray[np.uint32], n_slots: int, n_positions: int, n_sms: int) -> NDArray[np.int64]:
    """[n_sms] bytes of keys and values that each SM reads in an ATTEND phase."""
    place = cross_unit_sm if words[Phase.OP] == Op.ATTEND_CROSS else self_unit_sm
    block, n_heads, n_blocks = (int(words[word]) for word in (Phase.BLOCK, Phase.N_HEADS, Phase.N_BLOCKS))
    bytes_ = np.zeros(n_sms, np.int64)
    for first in range(0, n_positions, block):
        n_bytes = min(block, n_positions - first) * HEAD_SIZE * KEY_VALUE_BYTES
        for slot in range(n_slots):
            for head in range(n_heads):
                sm = place(slot, head, first // block, n_heads=n_heads, n_blocks=n_blocks, n_sms=n_sms)
                bytes_[sm] += n_bytes
    return bytes_


def _step_us(
    weights: NDArray[np.int64],  # [n_phases, n_sms]
    caches: NDArray[np.int64],  # [n_phases, n_sms]
    waits: NDArray[np.bool_],  # [n_phases]
    ring_bytes: int,
    bandwidth_gb_s: int,
) -> float:
    """The time of a step once the ring's state repeats.

    The bandwidth goes to the SMs in equal shares, also while others have full rings and could leave them theirs.
    """
    n_sms = weights.shape[1]
    share = bandwidth_gb_s * BYTES_PER_US_OF_GB_S / n_sms  # bytes per µs
    ahead = np.full(n_sms, float(ring_bytes))  # bytes in the ring
    step_us = 0.0
    for _ in range(N_STEPS):
        step_us = 0.0
        for weight, cache, is_hop in zip(weights, caches, waits, strict=True):
            if not is_hop:
                continue
            ahead = np.minimum(ring_bytes, ahead + share * HOP_US)
            missing = np.maximum(0, weight - ahead) + cache
            body_us = max(BODY_US, float(missing.max()) / share)
            ahead = np.minimum(ring_bytes, ahead + share * body_us - cache - weight)
            step_us += HOP_US + body_us
    return step_us


def dump(prediction: Prediction) -> str:
    """The prediction as text."""
    times = "bandwidth not known"
    if prediction.step_us is not None and prediction.floor_us is not None:
        times = f"{prediction.step_us:.1f} µs a step, floor {prediction.floor_us:.1f}"
    return (
        f"predicted  {times}; {prediction.n_slots} slots of {prediction.n_positions} positions\n"
        f"           {prediction.n_hops} hops, {prediction.weight_bytes} bytes of weights (padding "
        f"{prediction.padding_bytes}) and {prediction.cache_bytes} of caches, balance {prediction.balance:.4f}\n"
    )
