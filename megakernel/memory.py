"""Addresses: the tape of weight tiles, the floats beside it, the exchange area, and what an SM keeps at hand.

Knows the order in which a warp uses tiles and the layout of exchanged rows. Does not know what phases compute, nor how
records are encoded.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import CompileError
from .graph import Sizes
from .isa import (
    BEST_WORDS,
    BLOCK_STATS_WORDS,
    GATES,
    GRANULE_ROWS,
    GRANULE_UNITS,
    MAX_SLOTS,
    PARTIAL_WORDS,
    STATS_ELEMENTS,
    TILE_BYTES,
    Flag,
    Op,
    Phase,
    Task,
)
from .schedule import Schedule, tiles_of_warps
from .target import MIN_RING_TILES, MISC_BYTES, SUMS_BYTES, Target
from .tasks import HEAD_SIZE, PhaseTasks, output_elements

N_PARITIES = 2  # of JOINT's results and the control word: a step without predictor joins nobody before it writes
ALIGN_WORDS = 16  # of the exchange area's parts: a line of 128 bytes
WORD_BYTES = 4
FIXED_BYTES = 4864  # of what every program has at hand: parameters, slots, rows (`struct Misc` in machine.cuh)
STATS_BYTES = 2 * 2 * WORD_BYTES  # for a row's sum and sum of squares over STATS_ELEMENTS, by parity of the phase
AUX_GRANULE_BYTES = GRANULE_ROWS * 2 * WORD_BYTES
ALIGN_BYTES = 128  # of the parts of shared memory
TRANSDUCER_FIXED_BYTES = 2048  # the same of a transducer (`struct Misc` in transducer_layout.cuh)
TABLE_UNITS = 32  # of a layer on an SM, of which what a token adds is fetched ahead: one for each lane
STAGE = "memory"


@dataclass(frozen=True, slots=True)
class WeightTiles:
    """One weight's part of the tape's sources: ``n`` rows (padded to granules) of ``k``, norm folded in if any."""

    phase: int  # the phase that reads it
    first_tile: int  # in the concatenation of all weights' tiles
    n_tiles: int


@dataclass(frozen=True, slots=True)
class Buffers:
    """Where a phase's rows and blocks lie in the exchange area, in words, and which epoch of the step they carry."""

    input: int
    input_epoch: int
    output: int
    partial: int
    epoch: int


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """Every address of a program."""

    weights: tuple[WeightTiles, ...]
    tile_index: NDArray[np.int64]  # [n_tiles] of the tape, into the concatenation of all weights' tiles
    warp_tiles: NDArray[np.uint32]  # [n_sms, n_warps, 2] first tile, number of tiles
    aux: NDArray[np.int64]  # [n_phases, n_sms] first granule's index in the SM's auxiliary floats
    aux_granules: int  # of the SM that has most
    linear_aux_granules: int  # of these, the ones before the head's, on the SM that has most
    aux_in_shared: bool  # whether those fit misc_bytes beside the rest
    records_bytes: int  # of misc_bytes that are taken before: records of phases, residual stream, rows, slots
    misc_bytes: int  # of shared memory for all that: MISC_BYTES, or more where the records need it
    x_bytes: int  # of shared memory for rows of activations
    ring_tiles: int  # that each warp loads ahead, in what shared memory is left; a transducer's: that stay there
    buffers: tuple[Buffers, ...]  # [n_phases]
    exchange_words: int
    control_word: int
    epochs_per_step: int
    residual_granules: int
    n_replicas: int


def lay_out(phases: Sequence[PhaseTasks], schedule: Schedule, target: Target, sizes: Sizes) -> Memory:
    """Addresses for a schedule. Raises CompileError where the records don't fit an SM's shared memory."""
    weights, tile_index, warp_tiles = _tape(phases, schedule, sizes.batch_granules)
    aux, ends = _aux(schedule)
    aux_granules = int(ends[-1].max())
    heads = [phase.op is Op.HEAD for phase in phases]
    linear_aux_granules = int(aux[heads].max()) if any(heads) else aux_granules
    residual_granules = _residual_granules(phases, schedule)
    if sizes.transducer is None:
        x_bytes = target.x_bytes
        records_bytes = _records_bytes(len(phases), residual_granules, target, sizes)
        misc_bytes = max(MISC_BYTES, -(-records_bytes // ALIGN_BYTES) * ALIGN_BYTES)
        ring_tiles = target.ring_tiles(misc_bytes)
    else:
        x_bytes = 0  # rows go from words to registers
        records_bytes = _transducer_bytes(phases, schedule, target, sizes)
        misc_bytes = -(-(records_bytes + aux_granules * AUX_GRANULE_BYTES) // ALIGN_BYTES) * ALIGN_BYTES
        ring_tiles = (target.shared_bytes - x_bytes - SUMS_BYTES - misc_bytes) // (sizes.n_warps * TILE_BYTES)
        ring_tiles = min(ring_tiles, int(warp_tiles[:, :, 1].max()))
    if ring_tiles < MIN_RING_TILES:
        rule = (
            f"records, rows and residual stream of an SM take {records_bytes} bytes, which leaves no room for the ring"
        )
        raise CompileError(STAGE, f"{len(phases)} phases on {target.name}", rule)
    buffers, control_word = _exchange(phases, target, sizes.n_replicas)
    memory = Memory(
        weights=weights,
        tile_index=tile_index,
        warp_tiles=warp_tiles,
        aux=aux,
        aux_granules=aux_granules,
        linear_aux_granules=linear_aux_granules,
        aux_in_shared=records_bytes + linear_aux_granules * AUX_GRANULE_BYTES <= misc_bytes,
        records_bytes=records_bytes,
        misc_bytes=misc_bytes,
        x_bytes=x_bytes,
        ring_tiles=ring_tiles,
        buffers=buffers,
        exchange_words=control_word + ALIGN_WORDS,
        control_word=control_word,
        epochs_per_step=max(buffer.epoch for buffer in buffers),
        residual_granules=residual_granules,
        n_replicas=sizes.n_replicas,
    )
    verify(memory, phases, schedule, target)
    return memory


# ---------------------------------------------------------------------- tape


def _tape(
    phases: Sequence[PhaseTasks], schedule: Schedule, batch_granules: int
) -> tuple[tuple[WeightTiles, ...], NDArray[np.int64], NDArray[np.uint32]]:
    """Each warp's tiles in one piece, phase after phase, SM after SM."""
    tiles = tiles_of_warps(phases, schedule)  # [n_phases, n_sms, n_warps]
    of_warp = tiles.sum(axis=0)
    first_of_warp = (np.cumsum(of_warp) - of_warp.ravel()).reshape(of_warp.shape)
    first_of_phase = first_of_warp + np.cumsum(tiles, axis=0) - tiles
    tile_index = np.empty(int(of_warp.sum()), np.int64)
    weights: list[WeightTiles] = []
    first_tile = 0
    for index, phase in enumerate(phases):
        if phase.n_granules * phase.granule_tiles == 0:
            continue
        position = _positions(phase, schedule, index, first_of_phase[index], batch_granules)
        tile_index[position.ravel()] = np.arange(first_tile, first_tile + position.size)
        weights.append(WeightTiles(index, first_tile, position.size))
        first_tile += position.size
    return tuple(weights), tile_index, np.stack([first_of_warp, of_warp], axis=2).astype(np.uint32)


def _positions(
    phase: PhaseTasks, schedule: Schedule, index: int, first_of_phase: NDArray[np.int64], batch_granules: int
) -> NDArray[np.int64]:
    """[n_granules, granule_tiles] where on the tape each tile of a weight lies.

    A warp walks its slice of K once for every batch of granules, and takes all of the batch at each step.
    """
    n_granules = schedule.n_granules[index]
    n_groups, slice_tiles = phase.n_groups, phase.granule_tiles // phase.k_warps
    sm = np.repeat(np.arange(len(n_granules)), n_granules)  # [n_granules]
    nth = np.arange(phase.n_granules) - schedule.first_granule[index][sm]  # of the SM's granules
    group = (schedule.first_group[index][sm] + nth) % n_groups
    batch, place = np.divmod(nth // n_groups, batch_granules)
    in_group = (n_granules[sm] - nth % n_groups + n_groups - 1) // n_groups  # granules of this group
    in_batch = np.minimum(batch_granules, in_group - batch * batch_granules)
    k_warp, tile = np.divmod(np.arange(phase.granule_tiles), slice_tiles)  # [granule_tiles]
    first = first_of_phase[sm[:, None], group[:, None] * phase.k_warps + k_warp]
    first_of_batch = batch * batch_granules * slice_tiles
    return np.asarray(first + first_of_batch[:, None] + tile * in_batch[:, None] + place[:, None])


def _aux(schedule: Schedule) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[n_phases, n_sms] where a phase's granules begin and end among those of its SM."""
    ends = np.cumsum(schedule.n_granules, axis=0)
    return ends - schedule.n_granules, ends


def _residual_granules(phases: Sequence[PhaseTasks], schedule: Schedule) -> int:
    residual = [Flag.RESIDUAL in phase.flags for phase in phases]
    return int(schedule.n_granules[residual].max()) if any(residual) else 0


def _records_bytes(n_phases: int, residual_granules: int, target: Target, sizes: Sizes) -> int:
    of_row = STATS_BYTES * (sizes.width // STATS_ELEMENTS) + residual_granules * GRANULE_ROWS * WORD_BYTES
    return FIXED_BYTES + n_phases * (len(Task) + len(Phase)) * WORD_BYTES + target.max_rows * of_row


def kept_granules(phases: Sequence[PhaseTasks], schedule: Schedule) -> int:
    """Of an LSTM layer, on the SM that has most of it."""
    own = [phase.op is Op.RECUR for phase in phases]
    return int(schedule.n_granules[own].max()) if any(own) else 0


def _transducer_bytes(phases: Sequence[PhaseTasks], schedule: Schedule, target: Target, sizes: Sizes) -> int:
    """Of every row 32 units' entries of the table; of every layer's granules what all slots have kept, and cells."""
    granule_bytes = MAX_SLOTS * (GRANULE_ROWS + GRANULE_UNITS) * WORD_BYTES
    entries = target.max_rows * TABLE_UNITS * GATES * WORD_BYTES
    return TRANSDUCER_FIXED_BYTES + entries + sizes.n_layers * kept_granules(phases, schedule) * granule_bytes


# ---------------------------------------------------------------------- exchange area


class _Area:
    """Hands out the words of the exchange area, one part behind the other."""

    def __init__(self) -> None:
        self.end = 0

    def take(self, n_words: int) -> int:
        first = self.end
        self.end += -(-n_words // ALIGN_WORDS) * ALIGN_WORDS
        return first


def _exchange(phases: Sequence[PhaseTasks], target: Target, n_replicas: int) -> tuple[tuple[Buffers, ...], int]:
    """Buffers of every phase, and the control word behind them. No two phases share one: a buffer is written again a
    step later, when every SM has passed the head.
    """
    area = _Area()
    made: dict[str, tuple[int, int]] = {}  # value → where it lies, the epoch it carries
    buffers: list[Buffers] = []
    epoch = 0
    for index, phase in enumerate(phases):
        source, source_epoch = made[phase.reads] if phase.reads is not None else (0, 0)
        match phase.op:
            case Op.SELECT | Op.TRANSDUCE | Op.RECUR:
                buffers.append(Buffers(source, source_epoch, 0, 0, 0))
                continue
            case Op.JOINT:
                output = area.take(output_words(phase, target, n_replicas))
                partial = area.take(partial_words(phase, target))
                made[phase.name] = output, epoch + 1
            case Op.LINEAR | Op.HEAD | Op.LSTM:
                output, partial = area.take(output_words(phase, target, n_replicas)), 0
                made[phase.name] = output, epoch + 1
            case Op.ATTEND_SELF | Op.ATTEND_CROSS:
                # Shared with the COMBINE behind it: a row of one block goes there at once, under COMBINE's epoch.
                output = area.take(output_words(phases[index + 1], target, n_replicas))
                partial = area.take(partial_words(phase, target))
                made[phase.name] = partial, epoch + 1
            case Op.COMBINE:
                output, partial = buffers[-1].output, buffers[-1].partial
                made[phase.name] = output, epoch + 1
        epoch += 1
        buffers.append(Buffers(source, source_epoch, output, partial, epoch))
    return tuple(buffers), area.end


def output_words(phase: PhaseTasks, target: Target, n_replicas: int) -> int:
    """Words of the rows that a phase hands on, or of HEAD's results."""
    if phase.op is Op.HEAD:
        return target.n_sms * target.max_rows * PARTIAL_WORDS
    if phase.op is Op.JOINT:
        return N_PARITIES * target.max_rows * target.n_sms * BEST_WORDS
    return n_replicas * target.max_rows * output_elements(phase) // 2


def partial_words(phase: PhaseTasks, target: Target) -> int:
    """Words of an attention's blocks; of JOINT each SM's log-sum-exp of a row, and the row's duration."""
    if phase.op is Op.JOINT:
        return N_PARITIES * target.max_rows * (target.n_sms + 1)
    return target.max_rows * phase.n_heads * phase.n_blocks * (BLOCK_STATS_WORDS + HEAD_SIZE // 2)


# ---------------------------------------------------------------------- rules


def parts(phases: Sequence[PhaseTasks], memory: Memory, target: Target) -> Iterator[tuple[str, int, int]]:
    """Name, first word and number of words of every part of the exchange area."""
    for phase, buffers in zip(phases, memory.buffers, strict=True):
        if phase.op in (Op.LINEAR, Op.HEAD, Op.COMBINE, Op.LSTM, Op.JOINT):
            yield phase.name, buffers.output, output_words(phase, target, memory.n_replicas)
        if phase.op is Op.JOINT:
            yield f"{phase.name}.sums", buffers.partial, partial_words(phase, target)
        if phase.op is Op.COMBINE:
            yield f"{phase.name}.blocks", buffers.partial, partial_words(phase, target)
    yield "control", memory.control_word, N_PARITIES if phases[-1].op is Op.TRANSDUCE else 1


def verify(memory: Memory, phases: Sequence[PhaseTasks], schedule: Schedule, target: Target) -> None:
    """Raise CompileError unless every tile has one place and no two parts of the exchange area overlap."""
    n_tiles = sum(phase.n_granules * phase.granule_tiles for phase in phases)
    if not _is_permutation(memory.tile_index, n_tiles):
        raise CompileError(STAGE, f"tape of {len(memory.tile_index)} tiles", f"holds each of {n_tiles} tiles once")
    ends = memory.warp_tiles.astype(np.int64).sum(axis=2).ravel()
    firsts = memory.warp_tiles[:, :, 0].ravel()
    if firsts[0] != 0 or (firsts[1:] != ends[:-1]).any() or ends[-1] != n_tiles:
        raise CompileError(STAGE, "tape", "each warp's tiles follow those of the warp before")
    by_place = sorted(parts(phases, memory, target), key=lambda part: part[1])
    for (name, first, n_words), (next_name, next_first, _) in zip(by_place, by_place[1:], strict=False):
        if first + n_words > next_first:
            raise CompileError(STAGE, name, f"does not reach into {next_name}")
    if by_place[-1][1] + by_place[-1][2] > memory.exchange_words:
        raise CompileError(STAGE, by_place[-1][0], f"ends within the area of {memory.exchange_words} words")
    if ((memory.aux + schedule.n_granules) > memory.aux_granules).any():
        raise CompileError(STAGE, "auxiliary floats", f"an SM has at most {memory.aux_granules} granules")


def _is_permutation(index: NDArray[np.int64], n: int) -> bool:
    if len(index) != n or (n and (index.min() < 0 or index.max() >= n)):
        return False
    return bool((np.bincount(index, minlength=n) == 1).all())


def dump(memory: Memory, phases: Sequence[PhaseTasks], target: Target) -> str:
    """Where everything lies."""
    of_warp = memory.warp_tiles[:, :, 1]
    aux_bytes = memory.linear_aux_granules * AUX_GRANULE_BYTES
    lines = [
        f"tape      {len(memory.tile_index)} tiles of {TILE_BYTES} bytes, {of_warp.min()} to {of_warp.max()} a warp",
        f"ring      {memory.ring_tiles} tiles a warp",
        f"at hand   {memory.records_bytes} + {aux_bytes} of {memory.misc_bytes} bytes: records and stream"
        f" + row sums and biases{'' if memory.aux_in_shared else ', which stay in global memory'}",
        f"exchange  {memory.exchange_words} words, {memory.epochs_per_step} epochs a step",
    ]
    lines += [
        f"  {first:9} {n_words:8}  {name}"
        for name, first, n_words in sorted(parts(phases, memory, target), key=lambda part: part[1])
    ]
    return "\n".join(lines) + "\n"
