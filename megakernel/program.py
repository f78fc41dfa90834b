"""The serialised program: every array that the kernel, the interpreter and the checker read.

Knows the layouts of ``isa.py``, how to write the stages' results in them, and what must hold of the words. Does not
know how anything was decided, or what runs it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import CompileError
from .graph import Sizes
from .isa import GRANULE_ROWS, PROGRAM_VERSION, TILE_BYTES, TILE_K, Flag, Op, Phase, Task
from .memory import Buffers, Memory, WeightTiles, kept_granules
from .ops import FusedAttention, FusedOp
from .schedule import Schedule, balance, granules_of_group
from .target import Target
from .tasks import PhaseTasks

STAGE = "program"
WEIGHT_OPS = (Op.LINEAR, Op.HEAD, Op.LSTM, Op.RECUR, Op.JOINT)
SILENT_OPS = (Op.SELECT, Op.TRANSDUCE, Op.RECUR)  # that publish nothing


@dataclass(frozen=True, slots=True, eq=False)
class Program:
    """A step for one target."""

    name: str
    target: Target
    sizes: Sizes
    ops: tuple[FusedOp, ...]  # in order; what the phases were made of
    op_of_phase: tuple[int, ...]  # [n_phases] index into ops
    phase_names: tuple[str, ...]  # [n_phases] the values that they make
    phases: NDArray[np.uint32]  # [n_phases, PHASE_WORDS]
    tasks: NDArray[np.uint32]  # [n_sms, n_phases, TASK_WORDS]
    weights: tuple[WeightTiles, ...]
    tile_index: NDArray[np.int64]  # [n_tiles] of the tape, into the concatenation of all weights' tiles
    warp_tiles: NDArray[np.uint32]  # [n_sms, n_warps, 2] first tile, number of tiles
    aux_granules: int  # of the SM that has most
    linear_aux_granules: int  # of these, the ones of LINEAR phases, which come first; on the SM that has most
    aux_in_shared: bool  # whether an SM has room for those; else they stay in global memory
    misc_bytes: int  # of shared memory for records, rows, statistics, the residual stream and what of aux fits
    x_bytes: int  # of shared memory for rows of activations
    ring_tiles: int  # that each warp loads ahead; a transducer's: that stay there
    exchange_words: int
    control_word: int  # where the control word lies in the exchange area
    epochs_per_step: int
    n_replicas: int
    n_score_heads: int
    residual_granules: int  # of the stream, on the SM that has most
    kept_granules: int = 0  # of an LSTM's layer, on the SM that has most
    version: int = PROGRAM_VERSION


def encode(
    name: str,
    ops: Sequence[FusedOp],
    phases: Sequence[PhaseTasks],
    schedule: Schedule,
    memory: Memory,
    target: Target,
    sizes: Sizes,
) -> Program:
    """The words of a program whose every number is decided."""
    phase_words = [_phase_words(phase, buffers) for phase, buffers in zip(phases, memory.buffers, strict=True)]
    program = Program(
        name=name,
        target=target,
        sizes=sizes,
        ops=tuple(ops),
        op_of_phase=tuple(phase.op_index for phase in phases),
        phase_names=tuple(phase.name for phase in phases),
        phases=np.array(phase_words, np.uint32),
        tasks=_task_words(schedule, memory),
        weights=memory.weights,
        tile_index=memory.tile_index,
        warp_tiles=memory.warp_tiles,
        aux_granules=memory.aux_granules,
        linear_aux_granules=memory.linear_aux_granules,
        aux_in_shared=memory.aux_in_shared,
        misc_bytes=memory.misc_bytes,
        x_bytes=memory.x_bytes,
        ring_tiles=memory.ring_tiles,
        exchange_words=memory.exchange_words,
        control_word=memory.control_word,
        epochs_per_step=memory.epochs_per_step,
        n_replicas=memory.n_replicas,
        n_score_heads=sum(len(op.dumped_heads) for op in ops if isinstance(op, FusedAttention)),
        residual_granules=memory.residual_granules,
        kept_granules=kept_granules(phases, schedule),
    )
    verify(program)
    return program


def _phase_words(phase: PhaseTasks, buffers: Buffers) -> list[int]:
    words: dict[Phase, int] = {
        Phase.OP: phase.op,
        Phase.FLAGS: phase.flags,
        Phase.K: phase.k,
        Phase.N: phase.n,
        Phase.K_WARPS: phase.k_warps,
        Phase.INPUT: buffers.input,
        Phase.OUTPUT: buffers.output,
        Phase.PARTIAL: buffers.partial,
        Phase.LAYER: phase.layer,
        Phase.N_HEADS: phase.n_heads,
        Phase.BLOCK: phase.block,
        Phase.N_BLOCKS: phase.n_blocks,
        Phase.EPOCH: buffers.epoch,
        Phase.INPUT_EPOCH: buffers.input_epoch,
        Phase.SCORES: phase.scores,
        Phase.SCORE_HEADS: phase.score_heads,
    }
    return [words[word] for word in Phase]


def _task_words(schedule: Schedule, memory: Memory) -> NDArray[np.uint32]:
    """[n_sms, n_phases, TASK_WORDS]"""
    words = {
        Task.FIRST_GRANULE: schedule.first_granule,
        Task.N_GRANULES: schedule.n_granules,
        Task.AUX: memory.aux,
        Task.FIRST_GROUP: schedule.first_group,
    }
    tasks = np.stack([words[word].T for word in Task], axis=-1)
    tasks[tasks[..., Task.N_GRANULES] == 0] = 0
    return np.ascontiguousarray(tasks, np.uint32)


# ---------------------------------------------------------------------- rules


def verify(program: Program) -> None:
    """Raise CompileError unless the words fit each other: placed once, laid out once, waited for what is published."""
    _verify_shapes(program)
    kept: dict[tuple[int, int], NDArray[np.uint32]] = {}  # what rows stay with → their granules
    aux = np.zeros(program.target.n_sms, np.int64)
    n_tiles = np.zeros((program.target.n_sms, program.sizes.n_warps), np.int64)
    for index in range(len(program.phases)):
        words, tasks = program.phases[index], program.tasks[:, index]
        if words[Phase.OP] not in WEIGHT_OPS:
            if tasks.any():
                raise _broken(program, index, "a phase without a weight has no granules")
            continue
        _verify_tasks(program, index, aux)
        aux += tasks[:, Task.N_GRANULES]
        n_tiles += _tiles_of_warps(words, tasks, program.sizes.n_warps)
        is_cells = words[Phase.OP] in (Op.LSTM, Op.RECUR)
        if words[Phase.FLAGS] & Flag.RESIDUAL or is_cells:
            rows, owner = tasks[:, : Task.N_GRANULES + 1], (int(is_cells), int(words[Phase.LAYER]) * is_cells)
            if (rows != kept.setdefault(owner, rows)).any():
                name = "a layer's cells" if is_cells else "the residual stream"
                raise _broken(program, index, f"a row of {name} stays on its SM")
    if (n_tiles != program.warp_tiles[:, :, 1]).any():
        raise CompileError(STAGE, program.name, "each warp's part of the tape is as long as its tasks")
    _verify_tape(program)
    _verify_epochs(program)


def _verify_shapes(program: Program) -> None:
    n_phases, n_sms = len(program.op_of_phase), program.target.n_sms
    n_tiles = sum(weight.n_tiles for weight in program.weights)
    wanted: dict[str, tuple[NDArray[np.uint32] | NDArray[np.int64], tuple[int, ...]]] = {
        "phases": (program.phases, (n_phases, len(Phase))),
        "tasks": (program.tasks, (n_sms, n_phases, len(Task))),
        "warp_tiles": (program.warp_tiles, (n_sms, program.sizes.n_warps, 2)),
        "tile_index": (program.tile_index, (n_tiles,)),
    }
    for name, (array, shape) in wanted.items():
        if array.shape != shape:
            raise CompileError(STAGE, name, f"has shape {shape}, not {array.shape}")
    if program.version != PROGRAM_VERSION:
        raise CompileError(STAGE, program.name, f"is of version {PROGRAM_VERSION}, not {program.version}")


def _verify_tasks(program: Program, index: int, aux: NDArray[np.int64]) -> None:
    words, tasks = program.phases[index], program.tasks[:, index].astype(np.int64)
    n, has, n_warps = tasks[:, Task.N_GRANULES], tasks[:, Task.N_GRANULES] > 0, program.sizes.n_warps
    ends = np.cumsum(n)
    if ends[-1] != -(-int(words[Phase.N]) // GRANULE_ROWS) or (tasks[has, Task.FIRST_GRANULE] != (ends - n)[has]).any():
        raise _broken(program, index, "every granule lies on one SM, in the SMs' order")
    if (tasks[has, Task.AUX] != aux[has]).any() or (aux + n > program.aux_granules).any():
        raise _broken(program, index, "row sums and biases follow those of the phase before")
    if (tasks[:, Task.FIRST_GROUP] * words[Phase.K_WARPS] >= n_warps).any():
        raise _broken(program, index, f"the first group is one of {n_warps // int(words[Phase.K_WARPS])}")


def _tiles_of_warps(words: NDArray[np.uint32], tasks: NDArray[np.uint32], n_warps: int) -> NDArray[np.int64]:
    """[n_sms, n_warps] tiles that each warp reads in one phase."""
    k_warps = int(words[Phase.K_WARPS])
    n, first = tasks[:, Task.N_GRANULES].astype(np.int64), tasks[:, Task.FIRST_GROUP].astype(np.int64)
    of_group = granules_of_group(n, first, n_warps // k_warps)
    return np.repeat(of_group * (int(words[Phase.K]) // TILE_K // k_warps), k_warps, axis=1)


def _verify_tape(program: Program) -> None:
    n_tiles = len(program.tile_index)
    if (np.sort(program.tile_index) != np.arange(n_tiles)).any():
        raise CompileError(STAGE, "tile_index", f"holds each of {n_tiles} tiles once")
    ends = np.cumsum(program.warp_tiles[:, :, 1].astype(np.int64))
    if (program.warp_tiles[:, :, 0].ravel() != ends - program.warp_tiles[:, :, 1].ravel()).any():
        raise CompileError(STAGE, "warp_tiles", "each warp's tiles follow those of the warp before")


def _verify_epochs(program: Program) -> None:
    """Epochs count the publishing phases, and every phase waits for what an earlier one publishes."""
    published: set[tuple[int, int]] = {(0, 0)}  # where, under which epoch; the embedding is always there
    epoch = 0
    for index, words in enumerate(program.phases):
        if (int(words[Phase.INPUT]), int(words[Phase.INPUT_EPOCH])) not in published:
            raise _broken(program, index, "waits for what an earlier phase publishes")
        if words[Phase.OP] in SILENT_OPS:
            if words[Phase.EPOCH]:
                raise _broken(program, index, "publishes nothing, so it has no epoch")
            continue
        epoch += 1
        if words[Phase.EPOCH] != epoch:
            raise _broken(program, index, f"publishes under epoch {epoch}, not {words[Phase.EPOCH]}")
        is_attend = words[Phase.OP] in (Op.ATTEND_SELF, Op.ATTEND_CROSS)
        place = int(words[Phase.PARTIAL if is_attend else Phase.OUTPUT])
        if not 0 <= place < program.exchange_words:
            raise _broken(program, index, f"publishes within the area of {program.exchange_words} words")
        published.add((place, epoch))
    if epoch != program.epochs_per_step:
        raise CompileError(STAGE, program.name, f"has {epoch} epochs a step, not {program.epochs_per_step}")


def _broken(program: Program, index: int, rule: str) -> CompileError:
    return CompileError(STAGE, f"phase {index} ({program.phase_names[index]})", rule)


# ---------------------------------------------------------------------- reading


def weight_bytes(program: Program) -> NDArray[np.int64]:
    """[n_phases, n_sms] bytes of weights that each SM reads in a step."""
    granule_bytes = program.phases[:, Phase.K].astype(np.int64) // TILE_K * TILE_BYTES
    return program.tasks[:, :, Task.N_GRANULES].astype(np.int64).T * granule_bytes[:, None]


def padding_bytes(program: Program) -> int:
    """Bytes of the tape that hold rows past the last."""
    weights = np.isin(program.phases[:, Phase.OP], WEIGHT_OPS) & (program.phases[:, Phase.K] > 0)
    k, n = program.phases[weights, Phase.K].astype(np.int64), program.phases[weights, Phase.N].astype(np.int64)
    return int((-n % GRANULE_ROWS * k * (TILE_BYTES // (GRANULE_ROWS * TILE_K))).sum())


def dump(program: Program) -> str:
    """The program as text: sizes, one line a phase, and how level the bytes are."""
    target, sizes = program.target, program.sizes
    bytes_ = weight_bytes(program)
    lines = [
        f"{program.name} for {target.name} ({target.arch}, {target.n_sms} SMs, {target.max_rows} rows), "
        f"version {program.version}",
        f"sizes      width {sizes.width}, {sizes.n_layers} layers, {sizes.n_positions} positions and "
        f"{sizes.n_cross_positions} of others, {sizes.n_tokens} tokens, {sizes.max_slots} slots",
        f"tape       {len(program.tile_index)} tiles, {int(bytes_.sum())} bytes, of these padding "
        f"{padding_bytes(program)}",
        f"balance    bytes of an SM max/mean {balance(bytes_.sum(axis=0)):.4f}, "
        f"of a warp {balance(program.warp_tiles[:, :, 1].astype(np.int64)):.4f}",
        f"ring       {program.ring_tiles} tiles a warp{_resident(program)}",
        f"exchange   {program.exchange_words} words in {program.n_replicas} replicas, control at "
        f"{program.control_word}, {program.epochs_per_step} epochs a step",
        f"residual   {program.residual_granules} granules an SM at most",
        f"aux        {program.aux_granules} granules an SM at most, {program.linear_aux_granules} of linears, "
        f"in {'shared' if program.aux_in_shared else 'global'} memory",
        f"scores     of {program.n_score_heads} heads",
        "",
        "phase name                     op               k      n  waits for       publishes       granules on SMs",
    ]
    lines += [_describe(program, index) for index in range(len(program.phases))]
    return "\n".join(lines) + "\n"


def _resident(program: Program) -> str:
    if program.sizes.transducer is None:
        return ""
    n_tiles = int(program.warp_tiles[:, :, 1].max())
    return f" of {n_tiles}, which stay in shared memory" + (
        "" if n_tiles <= program.ring_tiles else "; the rest from L2"
    )


def _describe(program: Program, index: int) -> str:
    words = program.phases[index]
    op = Op(int(words[Phase.OP]))
    place = words[Phase.PARTIAL if op in (Op.ATTEND_SELF, Op.ATTEND_CROSS) else Phase.OUTPUT]
    waits = f"{words[Phase.INPUT]}@{words[Phase.INPUT_EPOCH]}" if words[Phase.INPUT_EPOCH] else "-"
    publishes = f"{place}@{words[Phase.EPOCH]}" if words[Phase.EPOCH] else "-"
    head = f"{index:5} {program.phase_names[index]:24} {op.name:12} {words[Phase.K]:5} {words[Phase.N]:6}"
    return f"{head}  {waits:15} {publishes:15} {_work(program, index)}".rstrip()


def _work(program: Program, index: int) -> str:
    words = program.phases[index]
    if words[Phase.OP] in WEIGHT_OPS:
        counts, sms = np.unique(program.tasks[:, index, Task.N_GRANULES], return_counts=True)
        spread = ", ".join(f"{n} on {sm}" for n, sm in zip(counts.tolist(), sms.tolist(), strict=True))
        flags = " ".join(flag.name or "" for flag in Flag(int(words[Phase.FLAGS])))
        return f"{spread}; {words[Phase.K_WARPS]} warps each  {flags}"
    if words[Phase.OP] in (Op.SELECT, Op.TRANSDUCE):
        return ""
    cut = f"{words[Phase.N_HEADS]} heads x {words[Phase.N_BLOCKS]} blocks of {words[Phase.BLOCK]}"
    return f"{cut}, layer {words[Phase.LAYER]}"
