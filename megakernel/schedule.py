"""Granules → SMs and warp groups: who computes which output rows of each phase.

Levels the bytes that each SM, and in it each warp, has read up to every phase, since the stream runs ahead of the
phases. Does not know addresses or what a phase computes.
"""

import heapq
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import CompileError
from .isa import TILE_BYTES, Flag, Op
from .target import Target
from .tasks import PhaseTasks

STAGE = "schedule"


@dataclass(frozen=True, slots=True, eq=False)
class Schedule:
    """For every phase and SM a range of granules, and the warp group that takes the first of them."""

    first_granule: NDArray[np.int64]  # [n_phases, n_sms]
    n_granules: NDArray[np.int64]  # [n_phases, n_sms]
    first_group: NDArray[np.int64]  # [n_phases, n_sms]


def assign_to_sms(phases: Sequence[PhaseTasks], target: Target) -> Schedule:
    """Every granule to one SM, in ranges that follow the SMs' order; a stream's rows stay on their SM throughout."""
    n_granules = np.zeros((len(phases), target.n_sms), np.int64)
    sm_bytes = [0] * target.n_sms
    is_at_hand = phases[-1].op is Op.TRANSDUCE  # its tape does not stream, so bytes need no evening out
    kept: dict[Hashable, NDArray[np.int64]] = {}  # what rows have to stay with → [n_sms] granules
    for index, phase in enumerate(phases):
        if phase.n_granules == 0:
            continue
        owner = owner_of(phase)
        counts = _fill(phase, sm_bytes, is_at_hand=is_at_hand) if owner is None or owner not in kept else kept[owner]
        if owner is not None:
            kept[owner] = counts
        n_granules[index] = counts
        sm_bytes = [sum_ + int(count) * phase.granule_bytes for sum_, count in zip(sm_bytes, counts, strict=True)]
    first_granule = np.where(n_granules > 0, np.cumsum(n_granules, axis=1) - n_granules, 0)
    schedule = Schedule(first_granule, n_granules, _rotate(phases, n_granules))
    verify(schedule, phases)
    return schedule


def owner_of(phase: PhaseTasks) -> Hashable | None:
    """What a phase's rows stay on their SM with: the residual stream, or the cells of an LSTM's layer."""
    if Flag.RESIDUAL in phase.flags:
        return "stream"
    return ("layer", phase.layer) if phase.op in (Op.LSTM, Op.RECUR) else None


def _fill(phase: PhaseTasks, sm_bytes: Sequence[int], *, is_at_hand: bool) -> NDArray[np.int64]:
    """Granules of each SM: one at a time to the SM with the fewest bytes so far, none far above the mean."""
    n_all = n_sms = len(sm_bytes)
    mean = -(-phase.n_granules // n_sms)
    # A phase lasts as long as its slowest SM, so it evens out little of what lies before; the last one, all it can.
    limit = mean + (0 if is_at_hand else max(1, mean // 8) if phase.op is Op.HEAD else 1)
    # Every SM has a part of the head: the wait for all of these is what separates two steps.
    at_least = 1 if phase.op in (Op.HEAD, Op.JOINT) else 0
    if phase.n_granules < at_least * n_sms:
        raise CompileError(STAGE, phase, f"the head's {phase.n_granules} granules give each of {n_sms} SMs one")
    if is_at_hand and phase.op is not Op.JOINT and n_sms > 1:
        # The last SM talks to the host meanwhile; nobody waits for it before the joint.
        n_sms, sm_bytes = n_sms - 1, sm_bytes[:-1]
        limit = -(-phase.n_granules // n_sms)
    counts = np.full(n_sms, at_least, np.int64)
    granule_bytes = phase.granule_bytes or 1  # an LSTM with a table has none, and is shared out evenly too
    queue = [(bytes_ + at_least * granule_bytes, sm) for sm, bytes_ in enumerate(sm_bytes)]
    heapq.heapify(queue)
    for _ in range(phase.n_granules - at_least * n_sms):
        bytes_, sm = queue[0]
        counts[sm] += 1
        if counts[sm] < limit:
            heapq.heapreplace(queue, (bytes_ + granule_bytes, sm))
        else:
            heapq.heappop(queue)
    return np.pad(counts, (0, n_all - n_sms))


def _rotate(phases: Sequence[PhaseTasks], n_granules: NDArray[np.int64]) -> NDArray[np.int64]:
    """The first group of every phase and SM, such that the fullest warp so far is as empty as can be."""
    n_sms = n_granules.shape[1]
    first_group = np.zeros_like(n_granules)
    warp_tiles = np.zeros((n_sms, _n_warps(phases)), np.int64)
    for index, phase in enumerate(phases):
        if phase.n_granules == 0:
            continue
        firsts = np.arange(phase.n_groups)[:, None].repeat(n_sms, axis=1)
        choices = _tiles_of_warps(phase, np.broadcast_to(n_granules[index], firsts.shape), firsts)
        after = warp_tiles + choices  # [n_groups, n_sms, n_warps]
        first_group[index] = np.where(n_granules[index] > 0, (after**2).sum(axis=2).argmin(axis=0), 0)
        warp_tiles = after[first_group[index], np.arange(n_sms)]
    return first_group


def granules_of_group(
    n_granules: NDArray[np.int64], first_group: NDArray[np.int64], n_groups: int
) -> NDArray[np.int64]:
    """How many of an SM's granules each warp group takes: the first one's group takes the first, the next group the
    second, and so on in turn. [...] and [...] → [..., n_groups]
    """
    turn = (np.arange(n_groups) - first_group[..., None]) % n_groups
    return (n_granules[..., None] - turn + n_groups - 1) // n_groups


def _n_warps(phases: Sequence[PhaseTasks]) -> int:
    """Of the block; every phase with a weight uses them all."""
    return max(phase.k_warps * phase.n_groups for phase in phases)


def _tiles_of_warps(
    phase: PhaseTasks, n_granules: NDArray[np.int64], first_group: NDArray[np.int64]
) -> NDArray[np.int64]:
    """[...] and [...] → [..., n_warps] tiles that each warp reads in this phase."""
    of_group = granules_of_group(n_granules, first_group, phase.n_groups)
    return np.repeat(of_group * (phase.granule_tiles // phase.k_warps), phase.k_warps, axis=-1)


def tiles_of_warps(phases: Sequence[PhaseTasks], schedule: Schedule) -> NDArray[np.int64]:
    """[n_phases, n_sms, n_warps] tiles that each warp reads."""
    n_phases, n_sms = schedule.n_granules.shape
    tiles = np.zeros((n_phases, n_sms, _n_warps(phases)), np.int64)
    for index, phase in enumerate(phases):
        if phase.n_granules:
            tiles[index] = _tiles_of_warps(phase, schedule.n_granules[index], schedule.first_group[index])
    return tiles


def bytes_of_sms(phases: Sequence[PhaseTasks], schedule: Schedule) -> NDArray[np.int64]:
    """[n_phases, n_sms] bytes of weights that each SM reads."""
    granule_bytes = np.array([phase.granule_bytes for phase in phases], np.int64)
    return schedule.n_granules * granule_bytes[:, None]


def balance(load: NDArray[np.int64]) -> float:
    """The largest over the mean; 1 where there is nothing."""
    mean = float(load.mean())
    return float(load.max()) / mean if mean else 1.0


def verify(schedule: Schedule, phases: Sequence[PhaseTasks]) -> None:
    """Raise CompileError unless every granule has one place and the stream's rows keep theirs."""
    kept: dict[Hashable, tuple[NDArray[np.int64], NDArray[np.int64]]] = {}
    for index, phase in enumerate(phases):
        first, n = schedule.first_granule[index], schedule.n_granules[index]
        ends = np.cumsum(n)
        if ends[-1] != phase.n_granules or (n < 0).any() or (first != np.where(n > 0, ends - n, 0)).any():
            raise CompileError(STAGE, phase, "every granule lies on one SM, in the SMs' order")
        groups = phase.n_groups if phase.n_granules else 1
        if (schedule.first_group[index] < 0).any() or (schedule.first_group[index] >= groups).any():
            raise CompileError(STAGE, phase, f"the first group is one of {groups}")
        owner = owner_of(phase)
        if owner is not None:
            before = kept.setdefault(owner, (first, n))
            if (first != before[0]).any() or (n != before[1]).any():
                raise CompileError(STAGE, phase, "a row of the residual stream, or of a layer's cells, stays on its SM")


def dump(schedule: Schedule, phases: Sequence[PhaseTasks]) -> str:
    """One line a phase: how many SMs have how many granules, and how level the bytes are up to there."""
    lines: list[str] = []
    sm_bytes = np.zeros(schedule.n_granules.shape[1], np.int64)
    for index, phase in enumerate(phases):
        if phase.n_granules == 0:
            continue
        sm_bytes = sm_bytes + schedule.n_granules[index] * phase.granule_bytes
        counts, sms = np.unique(schedule.n_granules[index], return_counts=True)
        spread = ", ".join(f"{n} on {sm}" for n, sm in zip(counts.tolist(), sms.tolist(), strict=True))
        lines.append(f"{index:4} {phase.name:24} granules: {spread}; bytes so far max/mean {balance(sm_bytes):.3f}\n")
    warps = tiles_of_warps(phases, schedule).sum(axis=0)
    lines.append(f"     bytes of an SM max/mean {balance(sm_bytes):.4f}, of a warp {balance(warps * TILE_BYTES):.4f}\n")
    return "".join(lines)
