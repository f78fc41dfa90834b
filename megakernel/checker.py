"""Proves of a program, without running it, that it can neither race nor wait for ever and reads its tape in order.

Knows the layouts of ``isa.py`` and the ops that the phases were made of, and derives from them anew what must stand
where. Does not know how the program was made (shares no code with schedule and memory) nor any numbers of the model.

Why no wait can last for ever: every word that a phase reads is written by an earlier phase of the same step
(``edges``), all SMs are on the device at once and run the phases in the same order, so the waits have no cycle. Why
nothing is overwritten too early: a word is written again one step later, and ``joins`` follows with vector clocks what
its writer has heard by then. Why the ring never falls behind: a warp takes one tile at a time and at once loads the one
that is a ring's depth further on, which wraps with its part of the tape; that part is what a step uses (``tape``).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import product

import numpy as np
from numpy.typing import NDArray

from .errors import CompileError
from .isa import (
    BEST_WORDS,
    BLOCK_STATS_WORDS,
    CROSS_BLOCK,
    GATES,
    GRANULE_ROWS,
    MAX_BLOCKS,
    PARTIAL_WORDS,
    PROGRAM_VERSION,
    SELF_BLOCK,
    STATS_ELEMENTS,
    TILE_BYTES,
    TILE_K,
    Flag,
    Op,
    Phase,
    Task,
)
from .ops import FusedAttention, FusedHead, FusedJoint, FusedLinear, FusedLstm, FusedRecurrence
from .program import Program

MAX_IMBALANCE = 0.02  # of an SM's bytes above the mean
HEAD_SIZE = 64  # elements of a head that the kernel's attention takes
N_PARITIES = 2  # places that take turns, of what a transducer's JOINT leaves
WITH_WEIGHT = (Op.LINEAR, Op.HEAD, Op.LSTM, Op.RECUR, Op.JOINT)
SILENT = (Op.SELECT, Op.TRANSDUCE, Op.RECUR)  # publish nothing

Words = dict[Phase, int]


def check(program: Program) -> None:
    """Check every rule; the first that does not hold is a CompileError that names phase, SM and rule."""
    for rule in (shapes, records, limits, edges, epochs, buffers, granules, aux, residual, tape):
        rule(program)
    if program.sizes.transducer is None:
        balance(program)
        joins(program)
    else:
        cells(program)
        transducer_joins(program)


def wrong(program: Program, rule: str, phase: int | None = None, sm: int | None = None) -> CompileError:
    """The error for one broken rule. ``phase`` is an index into the program's phases."""
    where = [program.name]
    if phase is not None:
        op = program.ops[program.op_of_phase[phase]]
        where.append(f"phase {phase} ({op.name})")
    if sm is not None:
        where.append(f"SM {sm}")
    return CompileError("check", ", ".join(where), rule)


# ---------------------------------------------------------------------- records


def shapes(program: Program) -> None:
    """Every array has the shape that the others imply."""
    n_phases, n_sms = len(program.op_of_phase), program.target.n_sms
    expected = {
        "phases": (n_phases, len(Phase)),
        "tasks": (n_sms, n_phases, len(Task)),
        "warp_tiles": (n_sms, program.sizes.n_warps, 2),
    }
    for name, shape in expected.items():
        array: NDArray[np.uint32] = getattr(program, name)
        if array.shape != shape or array.dtype != np.uint32:
            raise wrong(program, f"{name} is {array.dtype} {array.shape}, not uint32 {shape}")
    if program.version != PROGRAM_VERSION:
        raise wrong(program, f"version {program.version}, not {PROGRAM_VERSION}")
    if program.tile_index.ndim != 1:
        raise wrong(program, f"tile_index has {program.tile_index.ndim} dimensions")
    if program.n_replicas != program.sizes.n_replicas:
        raise wrong(program, f"{program.n_replicas} replicas, not {program.sizes.n_replicas}")


def k_warps_of(k: int, n_warps: int) -> int:
    """How many warps share one granule's K: the largest power of two that divides its tiles."""
    n_tiles = k // TILE_K
    return min(n_warps, n_tiles & -n_tiles)


def expected_words(program: Program) -> Iterator[tuple[int, Words]]:
    """What an op's phases must say, phase after phase: op index and every word but offsets and epochs."""
    has_stream = any(isinstance(op, FusedLinear) and op.residual for op in program.ops)
    n_warps = program.sizes.n_warps
    for index, op in enumerate(program.ops):
        match op:
            case FusedLinear():
                flags = Flag.EMBED if op.embed else Flag(0)
                flags |= Flag.STREAM if op.embed and has_stream else Flag(0)
                flags |= Flag.NORM if op.norm else Flag(0)
                flags |= Flag.GELU if op.gelu else Flag(0)
                flags |= Flag.RESIDUAL if op.residual else Flag(0)
                yield index, linear_words(Op.LINEAR, flags, op.k, op.n, n_warps)
            case FusedAttention():
                words = {Phase.K: op.width, Phase.N: op.width, Phase.N_HEADS: op.n_heads, Phase.BLOCK: op.block}
                words |= {Phase.N_BLOCKS: op.n_blocks, Phase.LAYER: op.layer}
                dumped = {Phase.SCORES: op.first_dump + 1, Phase.SCORE_HEADS: sum(1 << h for h in op.dumped_heads)}
                first: Words = {Phase.OP: Op.ATTEND_CROSS if op.is_cross else Op.ATTEND_SELF}
                first[Phase.K] = op.width if op.is_cross else 3 * op.width
                yield index, {**words, **first, **(dumped if op.dumped_heads else {})}
                yield index, {Phase.OP: Op.COMBINE, **words}
            case FusedHead():
                yield index, linear_words(Op.HEAD, Flag.NORM if op.norm else Flag(0), op.k, op.n, n_warps)
                yield index, {Phase.OP: Op.SELECT, Phase.N: op.n}
            case FusedLstm() if op.token_table is not None:
                table: Words = {Phase.OP: Op.LSTM, Phase.FLAGS: Flag.EMBED, Phase.N: op.n, Phase.K_WARPS: n_warps}
                yield index, {**table, Phase.LAYER: op.layer}
            case FusedLstm():
                yield index, {**linear_words(Op.LSTM, Flag(0), op.k, op.n, n_warps), Phase.LAYER: op.layer}
            case FusedRecurrence():
                yield index, {**linear_words(Op.RECUR, Flag(0), op.k, op.n, n_warps), Phase.LAYER: op.layer}
            case FusedJoint():
                yield index, linear_words(Op.JOINT, Flag(0), op.k, op.n, n_warps)
                yield index, {Phase.OP: Op.TRANSDUCE, Phase.N: op.n}


def linear_words(op: Op, flags: Flag, k: int, n: int, n_warps: int) -> Words:
    """Words of a phase that reads the tape."""
    return {Phase.OP: op, Phase.FLAGS: flags, Phase.K: k, Phase.N: n, Phase.K_WARPS: k_warps_of(k, n_warps)}


WHERE_AND_WHEN = (Phase.INPUT, Phase.OUTPUT, Phase.PARTIAL, Phase.EPOCH, Phase.INPUT_EPOCH)


def records(program: Program) -> None:
    """Phases are those of the ops, in their order, and say what the ops say."""
    expected = list(expected_words(program))
    if [index for index, _ in expected] != list(program.op_of_phase):
        raise wrong(program, f"phases are of ops {program.op_of_phase}, not {[index for index, _ in expected]}")
    for phase, (_, words) in enumerate(expected):
        for word in Phase:
            value = int(program.phases[phase, word])
            if word not in WHERE_AND_WHEN and value != words.get(word, 0):
                raise wrong(program, f"{word.name} is {value}, not {words.get(word, 0)}", phase)
    end = Op.SELECT if program.sizes.transducer is None else Op.TRANSDUCE
    if not program.phases.shape[0] or program.phases[-1, Phase.OP] != end:
        raise wrong(program, f"the last phase is not {end.name}")
    n_dumped = sum(len(op.dumped_heads) for op in program.ops if isinstance(op, FusedAttention))
    if program.n_score_heads != n_dumped:
        raise wrong(program, f"{program.n_score_heads} heads' scores are kept, not {n_dumped}")


def limits(program: Program) -> None:
    """What the kernel's bodies are written for."""
    if program.sizes.head_size != HEAD_SIZE:
        raise wrong(program, f"heads of {program.sizes.head_size} elements, not {HEAD_SIZE}")
    for phase, row in enumerate(program.phases):
        kind, k, block = Op(int(row[Phase.OP])), int(row[Phase.K]), int(row[Phase.BLOCK])
        if kind in WITH_WEIGHT and k % STATS_ELEMENTS:
            raise wrong(program, f"rows of {k} elements are no pieces of {STATS_ELEMENTS}", phase)
        if program.sizes.transducer is not None and k not in (0, program.sizes.width):
            raise wrong(program, f"rows of {k} elements, and all of a transducer's have {program.sizes.width}", phase)
        if row[Phase.FLAGS] & (Flag.NORM | Flag.EMBED) and kind is not Op.LSTM and k != program.sizes.width:
            raise wrong(program, f"norms and embeddings are of {program.sizes.width} elements, not {k}", phase)
        if kind in (Op.ATTEND_SELF, Op.ATTEND_CROSS):
            expected = SELF_BLOCK if kind == Op.ATTEND_SELF else CROSS_BLOCK
            if block != expected or row[Phase.N_BLOCKS] > MAX_BLOCKS:
                rule = f"{row[Phase.N_BLOCKS]} blocks of {block}, not at most {MAX_BLOCKS} of {expected}"
                raise wrong(program, rule, phase)


# ---------------------------------------------------------------------- who reads what, and when


@dataclass(frozen=True, slots=True)
class Source:
    """Where the words lie that a phase waits for, and the epoch that they carry."""

    phase: int  # that writes them
    offset: int
    epoch: int


def source_of(program: Program, phase: int) -> Source | None:
    """The one earlier phase whose words ``phase`` must read, by the ops' names; None if it reads a table."""
    op = program.ops[program.op_of_phase[phase]]
    kind = Op(int(program.phases[phase, Phase.OP]))
    if kind in (Op.COMBINE, Op.SELECT, Op.TRANSDUCE):
        writer, where = phase - 1, Phase.PARTIAL if kind == Op.COMBINE else Phase.OUTPUT
    elif op.x is None:
        return None
    else:
        named = [p for p in range(phase) if program.ops[program.op_of_phase[p]].name == op.x]
        if not named:
            raise wrong(program, f"no earlier phase makes {op.x}", phase)
        writer, where = named[-1], Phase.OUTPUT  # of attention's two phases, COMBINE
    row = program.phases[writer]
    return Source(writer, int(row[where]), int(row[Phase.EPOCH]))


def edges(program: Program) -> None:
    """Every word read has one writer, in an earlier phase, and is awaited where and with what that one writes."""
    for phase, row in enumerate(program.phases):
        source = source_of(program, phase)
        offset, epoch = int(row[Phase.INPUT]), int(row[Phase.INPUT_EPOCH])
        expected = (source.offset, source.epoch) if source else (0, 0)
        if (offset, epoch) != expected:
            raise wrong(program, f"reads word {offset} at epoch {epoch}; its input is at {expected}", phase)
        is_end = row[Phase.OP] in (Op.SELECT, Op.TRANSDUCE)
        if source and not is_end and row[Phase.K] != elements(program.phases[source.phase]):
            written = elements(program.phases[source.phase])
            raise wrong(program, f"reads rows of {row[Phase.K]}, written are {written}", phase)
        if row[Phase.OP] in (Op.ATTEND_SELF, Op.ATTEND_CROSS):
            shared = (Phase.OUTPUT, Phase.PARTIAL)
            if any(row[word] != program.phases[phase + 1, word] for word in shared):
                raise wrong(program, "its blocks go elsewhere than where COMBINE looks", phase)
            if row[Phase.N_HEADS] * program.sizes.head_size != row[Phase.N]:
                raise wrong(program, f"{row[Phase.N_HEADS]} heads do not make a row of {row[Phase.N]}", phase)
            n_positions = program.sizes.n_positions
            if row[Phase.OP] == Op.ATTEND_CROSS:
                n_positions = program.sizes.n_cross_positions
            if row[Phase.N_BLOCKS] != -(-n_positions // int(row[Phase.BLOCK])):
                raise wrong(program, f"{row[Phase.N_BLOCKS]} blocks do not hold {n_positions} positions", phase)


def elements(row: NDArray[np.uint32]) -> int:
    """Elements of a row that a phase hands on: of an LSTM's gates, one unit's four make one."""
    return int(row[Phase.N]) // (GATES if row[Phase.OP] == Op.LSTM else 1)


def epochs(program: Program) -> None:
    """What is published in a step carries an epoch of its own, 1 and up; the next step's begin behind the last."""
    last = 0
    for phase, row in enumerate(program.phases):
        epoch = int(row[Phase.EPOCH])
        if row[Phase.OP] in SILENT:
            if epoch:
                raise wrong(program, f"{Op(int(row[Phase.OP])).name} publishes nothing, but has epoch {epoch}", phase)
        elif epoch != last + 1:
            raise wrong(program, f"epoch {epoch} does not follow {last}", phase)
        else:
            last = epoch
    if program.epochs_per_step != last:
        raise wrong(program, f"a step has {program.epochs_per_step} epochs, its phases use {last}")


def regions(program: Program) -> Iterator[tuple[int, int, int]]:
    """Every buffer of the exchange area once: phase that writes it last, first word, number of words."""
    rows = program.n_replicas * program.target.max_rows
    for phase, row in enumerate(program.phases):
        n, output, partial = int(row[Phase.N]), int(row[Phase.OUTPUT]), int(row[Phase.PARTIAL])
        match Op(int(row[Phase.OP])):
            case Op.LINEAR | Op.LSTM:
                yield phase, output, rows * elements(row) // 2
            case Op.JOINT:
                of_row = program.target.max_rows * program.target.n_sms
                yield phase, output, N_PARITIES * of_row * BEST_WORDS
                yield phase, partial, N_PARITIES * (of_row + program.target.max_rows)
                yield phase, program.control_word, N_PARITIES
            case Op.COMBINE:
                yield phase, output, rows * n // 2
                n_units = program.target.max_rows * int(row[Phase.N_HEADS]) * int(row[Phase.N_BLOCKS])
                yield phase, partial, n_units * (BLOCK_STATS_WORDS + program.sizes.head_size // 2)
            case Op.HEAD:
                yield phase, output, program.target.n_sms * program.target.max_rows * PARTIAL_WORDS
                yield phase, program.control_word, 1


def buffers(program: Program) -> None:
    """Buffers lie inside the exchange area and share no word; a phase has no offset that it does not use."""
    end, before = 0, -1
    for phase, start, n_words in sorted(regions(program), key=lambda region: region[1]):
        if start < end:
            raise wrong(program, f"its buffer at word {start} begins inside that of phase {before}", phase)
        end, before = start + n_words, phase
    if end > program.exchange_words:
        raise wrong(program, f"its buffer ends at word {end} of {program.exchange_words}", before)
    for phase, row in enumerate(program.phases):
        op = row[Phase.OP]
        has_partial = op in (Op.ATTEND_SELF, Op.ATTEND_CROSS, Op.COMBINE, Op.JOINT)
        if op in SILENT and row[Phase.OUTPUT] or not has_partial and row[Phase.PARTIAL]:
            raise wrong(program, "has an offset that nobody uses", phase)


# ---------------------------------------------------------------------- weights


def reads_tape(program: Program) -> list[int]:
    """The phases that read the tape, in order."""
    return [p for p in places_granules(program) if program.phases[p, Phase.K]]


def places_granules(program: Program) -> list[int]:
    """The phases whose output rows are shared out among the SMs, in order."""
    return [p for p, row in enumerate(program.phases) if row[Phase.OP] in WITH_WEIGHT]


def granules(program: Program) -> None:
    """Each granule of a weight is one SM's, and only phases with weights have granules."""
    weights = {weight.phase: weight for weight in program.weights}
    if list(weights) != reads_tape(program):
        raise wrong(program, f"weights belong to phases {list(weights)}, not {reads_tape(program)}")
    next_tile = 0
    for phase, row in enumerate(program.phases):
        first = program.tasks[:, phase, Task.FIRST_GRANULE].astype(np.int64)
        n = program.tasks[:, phase, Task.N_GRANULES].astype(np.int64)
        idle = np.flatnonzero((n == 0) & program.tasks[:, phase].any(axis=1))
        if idle.size:
            raise wrong(program, "has no granules, but its task is not all zero", phase, int(idle[0]))
        if row[Phase.OP] not in WITH_WEIGHT:
            if n.any():
                raise wrong(program, "granules in a phase without weight", phase, int(np.argmax(n)))
            continue
        n_granules = -(-int(row[Phase.N]) // GRANULE_ROWS)
        covered = 0
        for sm in np.flatnonzero(n)[np.argsort(first[n > 0], kind="stable")]:
            if first[sm] != covered:
                raise wrong(program, f"granules {covered} to {first[sm]} are nobody's, or two SMs'", phase, int(sm))
            covered += int(n[sm])
        if covered != n_granules:
            raise wrong(program, f"{covered} granules are given out of {n_granules}", phase)
        n_tiles = n_granules * int(row[Phase.K]) // TILE_K
        if n_tiles and (weights[phase].first_tile, weights[phase].n_tiles) != (next_tile, n_tiles):
            raise wrong(program, f"its weight's tiles are not {n_tiles} from {next_tile}", phase)
        next_tile += n_tiles
        n_groups = program.sizes.n_warps // int(row[Phase.K_WARPS])
        group = program.tasks[:, phase, Task.FIRST_GROUP]
        if (group >= n_groups).any():
            raise wrong(program, f"begins with a group past the {n_groups}", phase, int(np.argmax(group >= n_groups)))


def aux(program: Program) -> None:
    """An SM's row sums and biases lie in the order of use, inside its part."""
    n_before = np.zeros(program.target.n_sms, np.int64)
    n_linear = 0
    for phase in places_granules(program):
        n = program.tasks[:, phase, Task.N_GRANULES].astype(np.int64)
        off = np.flatnonzero((n > 0) & (program.tasks[:, phase, Task.AUX] != n_before))
        if off.size:
            sm = int(off[0])
            found = program.tasks[sm, phase, Task.AUX]
            raise wrong(program, f"row sums and biases at granule {found}, not {n_before[sm]}", phase, sm)
        n_before += n
        if program.phases[phase, Phase.OP] != Op.HEAD:
            n_linear = int(n_before.max())
    found = (program.aux_granules, program.linear_aux_granules)
    if found != (n_before.max(), n_linear):
        raise wrong(program, f"room for {found} granules' row sums, all and linears', not {(n_before.max(), n_linear)}")


def residual(program: Program) -> None:
    """A row of the residual stream never changes its SM."""
    owners = [p for p, row in enumerate(program.phases) if row[Phase.FLAGS] & Flag.RESIDUAL]
    for phase in owners:
        words = (Task.FIRST_GRANULE, Task.N_GRANULES)
        other = (program.tasks[:, phase, words] != program.tasks[:, owners[0], words]).any(axis=1)
        if other.any():
            raise wrong(program, f"owns other rows than in phase {owners[0]}", phase, int(np.argmax(other)))
    most = int(program.tasks[:, owners[0], Task.N_GRANULES].max()) if owners else 0
    if program.residual_granules != most:
        raise wrong(program, f"room for {program.residual_granules} granules of the stream, not {most}")


def cells(program: Program) -> None:
    """An LSTM's cells, and what is kept for them, never change their SM."""
    most = 0
    for layer in range(program.sizes.n_layers):
        of_layer = [
            p
            for p, row in enumerate(program.phases)
            if row[Phase.OP] in (Op.LSTM, Op.RECUR) and row[Phase.LAYER] == layer
        ]
        words = (Task.FIRST_GRANULE, Task.N_GRANULES)
        for phase in of_layer:
            other = (program.tasks[:, phase, words] != program.tasks[:, of_layer[0], words]).any(axis=1)
            if other.any():
                rule = f"has other units of layer {layer} than in phase {of_layer[0]}"
                raise wrong(program, rule, phase, int(np.argmax(other)))
            most = max(most, int(program.tasks[:, phase, Task.N_GRANULES].max()))
    if program.kept_granules != most:
        raise wrong(program, f"room for {program.kept_granules} granules of a layer, not {most}")


def tape(program: Program) -> None:
    """Each warp finds the tiles that it will use, in the order of use, and no others."""
    # tiles that a warp has used before the phase
    used = np.zeros((program.target.n_sms, program.sizes.n_warps), np.int64)
    first = program.warp_tiles[:, :, 0].astype(np.int64)
    n = program.warp_tiles[:, :, 1].astype(np.int64)
    order = np.lexsort((n.ravel(), first.ravel()))
    ends = np.cumsum(n.ravel()[order])
    if (first.ravel()[order] != ends - n.ravel()[order]).any() or ends[-1] != len(program.tile_index):
        raise wrong(program, "the warps' parts of the tape overlap, or leave a gap")
    for weight in program.weights:
        phase = weight.phase
        sm, warp, place, tile = tiles_of(program, phase)
        place = place + used[sm, warp]
        over = place >= n[sm, warp]
        if over.any():
            at = int(np.argmax(over))
            raise wrong(program, f"warp {warp[at]} uses more than its {n[sm[at], warp[at]]} tiles", phase, int(sm[at]))
        found = program.tile_index[first[sm, warp] + place]
        other = found != tile + weight.first_tile
        if other.any():
            at = int(np.argmax(other))
            raise wrong(
                program,
                f"warp {warp[at]} finds tile {found[at]} of the weights, not {tile[at] + weight.first_tile}",
                phase,
                int(sm[at]),
            )
        np.add.at(used, (sm, warp), 1)
    if (used != n).any():
        at_sm, at_warp = np.argwhere(used != n)[0]
        rule = f"warp {at_warp} uses {used[at_sm, at_warp]} tiles of {n[at_sm, at_warp]} in a step"
        raise wrong(program, rule, sm=int(at_sm))


Index = NDArray[np.int64]  # [n_tiles of a phase]


def tiles_of(program: Program, phase: int) -> tuple[Index, Index, Index, Index]:
    """SM, warp, place among the tiles that this warp uses in this phase, and index in its weight, of every tile."""
    k_warps, n_k_tiles = int(program.phases[phase, Phase.K_WARPS]), int(program.phases[phase, Phase.K]) // TILE_K
    n_groups, n_slice = program.sizes.n_warps // k_warps, n_k_tiles // k_warps
    n = program.tasks[:, phase, Task.N_GRANULES].astype(np.int64)
    sm = np.repeat(np.arange(program.target.n_sms), n)  # of each granule, SM after SM
    j = np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)  # within its SM
    granule = program.tasks[sm, phase, Task.FIRST_GRANULE].astype(np.int64) + j
    group = (program.tasks[sm, phase, Task.FIRST_GROUP].astype(np.int64) + j) % n_groups
    turn = j // n_groups  # within its group
    n_of_group = (n[sm] - j % n_groups + n_groups - 1) // n_groups
    of_batch = program.sizes.batch_granules
    batch = turn // of_batch
    n_of_batch = np.minimum(of_batch, n_of_group - batch * of_batch)
    k_tile = np.arange(n_k_tiles)
    warp = group[:, None] * k_warps + k_tile // n_slice
    place = (batch * of_batch * n_slice)[:, None] + (k_tile % n_slice) * n_of_batch[:, None]
    place = place + (turn % of_batch)[:, None]
    tile = granule[:, None] * n_k_tiles + k_tile
    return np.repeat(sm, n_k_tiles), warp.ravel(), place.ravel(), tile.ravel()


def balance(program: Program) -> None:
    """No SM reads over 2 % more than the mean, or one granule of the widest weight where that is more."""
    n_bytes = program.warp_tiles[:, :, 1].sum(axis=1, dtype=np.int64) * TILE_BYTES
    mean = float(n_bytes.mean())
    granule = GRANULE_ROWS * 2 * max(int(program.phases[p, Phase.K]) for p in reads_tape(program))
    if n_bytes.max() - mean > max(MAX_IMBALANCE * mean, granule):
        rule = f"reads {n_bytes.max()} bytes, {n_bytes.max() / mean:.3f} times the mean"
        raise wrong(program, rule, sm=int(np.argmax(n_bytes)))


# ---------------------------------------------------------------------- write after read


def joins(program: Program) -> None:
    """Whoever writes a word again has heard from all who read its last value, whatever rows a step has.

    Clocks: what an SM has heard of is, for each SM, the last phase known to be over, counted across two steps. Only
    edges that every step has are followed, those of its first row and its first two blocks, since more rows and blocks
    add edges and take none away; as readers count all who ever may read. An SM that does several units of a phase may
    publish one before it reads for the next.
    """
    for slot in range(program.sizes.max_slots):
        for n_blocks in (1, 2):
            Joins(program, slot, n_blocks).follow()


Clock = NDArray[np.int32]  # [..., n_sms] the last event known to be over on each SM; event = step x phases + phase + 1


class Joins:
    """The clocks of two steps whose first row is of ``slot`` and has ``n_blocks`` blocks, if there are so many."""

    def __init__(self, program: Program, slot: int, n_blocks: int) -> None:
        self.program = program
        self.slot = slot
        self.n_blocks = n_blocks
        self.sms = np.arange(program.target.n_sms)
        self.heard: Clock = np.zeros((len(self.sms), len(self.sms)), np.int32)  # [SM, of SM]
        self.said: dict[int, Clock] = {}  # phase → [SM or head, of SM] what comes with its words
        self.read: dict[tuple[int, Phase], Clock] = {}  # buffer → [SM] when it was last read

    def follow(self) -> None:
        """Two steps; the second writes what the first has read."""
        for step in range(2):
            for phase, row in enumerate(self.program.phases):
                event = step * len(self.program.phases) + phase + 1
                match Op(int(row[Phase.OP])):
                    case Op.LINEAR | Op.HEAD:
                        self.linear(phase, event)
                    case Op.ATTEND_SELF | Op.ATTEND_CROSS:
                        self.attend(phase, event)
                    case Op.COMBINE:
                        self.combine(phase, event)
                    case Op.SELECT:
                        self.select(phase, event)

    def must_be_over(self, phase: int, buffer: tuple[int, Phase], sm: int, clock: Clock) -> None:
        """The reads of a buffer's last values, before ``sm`` writes it."""
        last = self.read.get(buffer)
        if last is not None:
            late = (last > clock) & (self.sms != sm)
            if late.any():
                rule = f"writes {buffer[1].name} of phase {buffer[0]} while SM {np.argmax(late)} may still read it"
                raise wrong(self.program, rule, phase, sm)

    def linear(self, phase: int, event: int) -> None:
        """SMs with granules wait for whole rows. What HEAD reads is read before it publishes; a LINEAR may go on."""
        n = self.program.tasks[:, phase, Task.N_GRANULES]
        source = source_of(self.program, phase)
        if source:
            told = self.said[source.phase].max(axis=0)
            self.heard[n > 0] = np.maximum(self.heard[n > 0], told)
            self.read[source.phase, Phase.OUTPUT] = np.where(n > 0, event, 0).astype(np.int32)
        is_head = self.program.phases[phase, Phase.OP] == Op.HEAD
        writers = self.sms if is_head else np.flatnonzero(n)
        self.heard[self.sms, self.sms] = event if is_head else event - 1
        for sm in writers:
            self.must_be_over(phase, (phase, Phase.OUTPUT), int(sm), self.heard[sm])
        self.said[phase] = self.heard[writers].copy()
        self.heard[self.sms, self.sms] = event

    def attend(self, phase: int, event: int) -> None:
        """A unit waits for its head's queries; which unit takes the row's key and value too depends on its position."""
        program, row = self.program, self.program.phases[phase]
        source = source_of(program, phase)
        assert source is not None  # edges() has seen to it
        n_heads, n_all = int(row[Phase.N_HEADS]), int(row[Phase.N_BLOCKS])
        is_self = row[Phase.OP] == Op.ATTEND_SELF
        before = self.heard.copy()
        said: Clock = np.zeros((n_heads, len(self.sms)), np.int32)
        for head in range(n_heads):
            told = self.of_queries(source.phase, head)
            for block in range(min(self.n_blocks, n_all)):
                unit = (self.slot * n_all + block) * n_heads + head
                sm = (unit if is_self else (self.slot * n_heads + head) * n_all + block) % len(self.sms)
                clock = np.maximum(before[sm], told)
                for buffer in ((phase + 1, Phase.OUTPUT), (phase + 1, Phase.PARTIAL)):
                    self.must_be_over(phase, buffer, sm, clock)
                said[head] = np.maximum(said[head], clock)
                self.heard[sm] = np.maximum(self.heard[sm], clock)
        self.read[source.phase, Phase.OUTPUT] = np.full(len(self.sms), event, np.int32)
        self.heard[self.sms, self.sms] = event
        self.said[phase] = said

    def of_queries(self, phase: int, head: int) -> Clock:
        """What comes with the columns of a head of a linear's rows."""
        per_head = self.program.sizes.head_size // GRANULE_ROWS
        n = self.program.tasks[:, phase, Task.N_GRANULES].astype(np.int64)
        first = self.program.tasks[:, phase, Task.FIRST_GRANULE].astype(np.int64)
        writers = np.flatnonzero(n)  # whose words of the phase are in ``said``, in this order
        owns = (first < (head + 1) * per_head) & (first + n > head * per_head)
        told: Clock = self.said[phase][owns[writers]].max(axis=0)
        return told

    def combine(self, phase: int, event: int) -> None:
        """A unit waits for its head's blocks, of which one alone has gone to the output already."""
        n_all, n_heads = (int(self.program.phases[phase, word]) for word in (Phase.N_BLOCKS, Phase.N_HEADS))
        if min(self.n_blocks, n_all) == 1:
            self.said[phase] = self.said[phase - 1]
        else:
            before = self.heard.copy()
            said: Clock = np.zeros((n_heads, len(self.sms)), np.int32)
            for head in range(n_heads):
                sm = head % len(self.sms)  # of row 0
                said[head] = np.maximum(before[sm], self.said[phase - 1][head])
                self.must_be_over(phase, (phase, Phase.OUTPUT), sm, said[head])
                self.heard[sm] = np.maximum(self.heard[sm], said[head])
            self.said[phase] = said
        self.read[phase, Phase.PARTIAL] = np.full(len(self.sms), event, np.int32)
        self.heard[self.sms, self.sms] = event

    def select(self, phase: int, event: int) -> None:
        """Every SM waits for all; the last one's control word comes with its partials."""
        self.heard = np.maximum(self.heard, self.said[phase - 1].max(axis=0))
        self.heard[self.sms, self.sms] = event
        self.read[phase - 1, Phase.OUTPUT] = np.full(len(self.sms), event, np.int32)


class StepKind(Enum):
    """What a transducer's step does: there are no others."""

    WHOLE = (True, True)  # predictor, and frames
    FRAMES = (False, True)
    PREDICTOR = (True, False)
    IDLE = (False, False)


def transducer_joins(program: Program, *, n_parities: int = N_PARITIES) -> None:
    """The same of a transducer, whose steps may leave the predictor or the frames out: every order of four of them."""
    for kinds in product(StepKind, repeat=4):
        TransducerJoins(program, n_parities).follow(kinds)


class TransducerJoins:
    """The clocks of some steps in a row. What JOINT leaves has ``n_parities`` places that take turns."""

    def __init__(self, program: Program, n_parities: int) -> None:
        self.program = program
        self.n_parities = n_parities
        self.sms = np.arange(program.target.n_sms)
        self.heard: Clock = np.zeros((len(self.sms), len(self.sms)), np.int32)  # [SM, of SM]
        self.said: dict[int, Clock] = {}  # phase → [of SM] what comes with all its words
        self.read: dict[tuple[int, Phase, int], Clock] = {}  # buffer, parity → [SM] when it was last read

    def follow(self, kinds: Sequence[StepKind]) -> None:
        """Raise CompileError where one writes what others may still read."""
        n_phases = len(self.program.phases)
        joint = n_phases - 2
        for step, kind in enumerate(kinds):
            has_predictor, has_frames = kind.value
            for phase, row in enumerate(self.program.phases):
                event, parity = step * n_phases + phase + 1, step % self.n_parities
                if phase == 0 and step:  # the last SM tells the host of the step before
                    self.reads(joint, Phase.PARTIAL, (step - 1) % self.n_parities, self.sms == self.sms[-1], event)
                match Op(int(row[Phase.OP])):
                    case Op.JOINT:
                        self.joint(phase, event, parity, has_frames=has_frames and bool(self.said))
                    case Op.TRANSDUCE:
                        self.heard = np.maximum(self.heard, self.said[joint])
                        for buffer in (Phase.OUTPUT, Phase.PARTIAL, Phase.K):
                            self.reads(joint, buffer, parity, self.sms >= 0, event)
                    case _ if has_predictor:
                        self.predictor(phase, event)

    def predictor(self, phase: int, event: int) -> None:
        """SMs with granules wait for whole rows, and all but RECUR publish."""
        works = self.program.tasks[:, phase, Task.N_GRANULES] > 0
        source = source_of(self.program, phase)
        if source:
            self.heard[works] = np.maximum(self.heard[works], self.said[source.phase])
            self.reads(source.phase, Phase.OUTPUT, 0, works, event)
        if self.program.phases[phase, Phase.OP] != Op.RECUR:
            self.writes(phase, Phase.OUTPUT, 0, works, event - 1)

    def joint(self, phase: int, event: int, parity: int, *, has_frames: bool) -> None:
        """The control word (here under the word K) leaves before anything is waited for."""
        last = self.sms == self.sms[-1]
        self.may_write(phase, Phase.K, parity, last)
        source = source_of(self.program, phase)
        if has_frames and source and source.phase in self.said:
            self.heard = np.maximum(self.heard, self.said[source.phase])
            self.reads(source.phase, Phase.OUTPUT, 0, self.sms >= 0, event)
        for buffer in (Phase.OUTPUT, Phase.PARTIAL):
            self.may_write(phase, buffer, parity, self.sms >= 0)
        self.writes(phase, Phase.OUTPUT, parity, self.sms >= 0, event)

    def reads(self, phase: int, buffer: Phase, parity: int, who: NDArray[np.bool_], event: int) -> None:
        """Note when a buffer was read."""
        before = self.read.get((phase, buffer, parity), np.zeros(len(self.sms), np.int32))
        self.read[phase, buffer, parity] = np.where(who, event, before).astype(np.int32)
        self.heard[self.sms[who], self.sms[who]] = event

    def writes(self, phase: int, buffer: Phase, parity: int, who: NDArray[np.bool_], event: int) -> None:
        """What comes with the words of those who write."""
        self.heard[self.sms[who], self.sms[who]] = np.maximum(self.heard[self.sms[who], self.sms[who]], event)
        self.may_write(phase, buffer, parity, who)
        self.said[phase] = self.heard[who].max(axis=0)

    def may_write(self, phase: int, buffer: Phase, parity: int, who: NDArray[np.bool_]) -> None:
        """The reads of a buffer's last values are over, so far as its writers know."""
        last = self.read.get((phase, buffer, parity))
        if last is None:
            return
        for sm in self.sms[who]:
            late = (last > self.heard[sm]) & (self.sms != sm)
            if late.any():
                rule = f"writes {buffer.name} while SM {np.argmax(late)} may still read it"
                raise wrong(self.program, rule, phase, int(sm))
