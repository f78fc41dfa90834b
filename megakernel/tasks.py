"""Fused ops → phases: what is done between two hand-offs, and the granules or units that it can be cut into.

Knows shapes, the limits of ``isa.py`` and which value each phase reads. Does not know SMs beyond the formulas that give
each attention unit its place, nor addresses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import assert_never

from .errors import CompileError
from .graph import Sizes
from .isa import GATES, GRANULE_ROWS, TILE_BYTES, TILE_K, Flag, Op
from .numbers import k_warps
from .ops import (
    FusedAttention,
    FusedHead,
    FusedJoint,
    FusedLinear,
    FusedLstm,
    FusedOp,
    FusedRecurrence,
    Norm,
)
from .target import X_CHUNK_ELEMENTS

HEAD_SIZE = 64
K_STEP = 128  # K is a multiple of this: pieces of a norm's sums, and at least four warps share a granule
N_STEP = 64  # N is a multiple of this
MAX_SCORE_HEADS = 32  # heads of a layer whose scores can be kept: bits of a word
WITH_WEIGHT = (Op.LINEAR, Op.HEAD, Op.LSTM, Op.RECUR, Op.JOINT)  # whose output rows are placed as granules
ENDS = (Op.SELECT, Op.TRANSDUCE)
STAGE = "tasks"


@dataclass(frozen=True, slots=True)
class PhaseTasks:
    """One phase and how it can be cut. The fields are the words of ``isa.Phase``, before anything has an address."""

    name: str  # of the value it makes
    op: Op
    op_index: int  # of the fused op it comes from
    reads: str | None  # the value whose rows it waits for; None: the embedding
    flags: Flag = field(default=Flag(0))
    k: int = 0  # elements of an input row
    n: int = 0  # elements of an output row; HEAD, SELECT: tokens
    k_warps: int = 0
    n_groups: int = 0  # of warps, which take different granules
    layer: int = 0
    n_heads: int = 0
    block: int = 0
    n_blocks: int = 0
    scores: int = 0
    score_heads: int = 0

    @property
    def n_granules(self) -> int:
        """How many pieces of the weight there are to place; 0 where there is no weight."""
        return -(-self.n // GRANULE_ROWS) if self.op in WITH_WEIGHT else 0

    @property
    def granule_tiles(self) -> int:
        """Tiles of one granule."""
        return self.k // TILE_K

    @property
    def granule_bytes(self) -> int:
        """Bytes of one granule's weights."""
        return self.granule_tiles * TILE_BYTES


def split_into_tasks(ops: Sequence[FusedOp], sizes: Sizes) -> tuple[PhaseTasks, ...]:
    """The phases of one step, in order. Raises CompileError for ops that no phase can do."""
    phases: list[PhaseTasks] = []
    has_stream = any(isinstance(op, FusedLinear) and op.residual for op in ops)
    for op_index, op in enumerate(ops):
        match op:
            case FusedLinear():
                phases.append(_linear(op, op_index, sizes, has_stream=has_stream))
            case FusedAttention():
                phases += _attention(op, op_index)
            case FusedHead():
                phases += _head(op, op_index, sizes)
            case FusedLstm():
                phases.append(_lstm(op, op_index, sizes))
            case FusedRecurrence():
                phases.append(_weighted(op, Op.RECUR, op_index, sizes, Flag(0), layer=op.layer))
            case FusedJoint():
                phases += _joint(op, op_index, sizes)
            case _:
                assert_never(op)
    result = tuple(phases)
    verify(result, sizes)
    _verify_alike(ops)
    return result


def _linear(op: FusedLinear, op_index: int, sizes: Sizes, *, has_stream: bool) -> PhaseTasks:
    flags = Flag(0)
    if op.embed is not None:
        flags |= Flag.EMBED | (Flag.STREAM if has_stream else Flag(0))
    flags |= _norm_flag(op.norm)
    flags |= Flag.GELU if op.gelu else Flag(0)
    flags |= Flag.RESIDUAL if op.residual else Flag(0)
    return _weighted(op, Op.LINEAR, op_index, sizes, flags)


def _weighted(
    op: FusedLinear | FusedHead | FusedLstm | FusedRecurrence | FusedJoint,
    kind: Op,
    op_index: int,
    sizes: Sizes,
    flags: Flag,
    *,
    layer: int = 0,
) -> PhaseTasks:
    """A phase that multiplies rows with the op's weight."""
    of_granule = k_warps(op.k, sizes.n_warps)
    n_groups = sizes.n_warps // of_granule
    return PhaseTasks(op.name, kind, op_index, op.x, flags, op.k, op.n, of_granule, n_groups, layer)


def _norm_flag(norm: Norm | None) -> Flag:
    return Flag(0) if norm is None else Flag.NORM


def _attention(op: FusedAttention, op_index: int) -> list[PhaseTasks]:
    kind = Op.ATTEND_CROSS if op.is_cross else Op.ATTEND_SELF
    blocks = f"{op.name}.blocks"
    attend = PhaseTasks(
        blocks,
        kind,
        op_index,
        op.x,
        k=op.width if op.is_cross else 3 * op.width,
        n=op.width,
        layer=op.layer,
        n_heads=op.n_heads,
        block=op.block,
        n_blocks=op.n_blocks,
        scores=op.first_dump + 1 if op.dumped_heads else 0,
        score_heads=sum(1 << head for head in op.dumped_heads),
    )
    combine = PhaseTasks(
        op.name,
        Op.COMBINE,
        op_index,
        blocks,
        k=op.width,
        n=op.width,
        layer=op.layer,
        n_heads=op.n_heads,
        block=op.block,
        n_blocks=op.n_blocks,
    )
    return [attend, combine]


def _head(op: FusedHead, op_index: int, sizes: Sizes) -> list[PhaseTasks]:
    head = _weighted(op, Op.HEAD, op_index, sizes, _norm_flag(op.norm))
    return [head, PhaseTasks("select", Op.SELECT, op_index, op.name, n=op.n)]


def _lstm(op: FusedLstm, op_index: int, sizes: Sizes) -> PhaseTasks:
    if op.token_table is not None:  # a row of a table: granules, but no tiles
        return PhaseTasks(op.name, Op.LSTM, op_index, None, Flag.EMBED, 0, op.n, sizes.n_warps, 1, op.layer)
    return _weighted(op, Op.LSTM, op_index, sizes, Flag(0), layer=op.layer)


def _joint(op: FusedJoint, op_index: int, sizes: Sizes) -> list[PhaseTasks]:
    joint = _weighted(op, Op.JOINT, op_index, sizes, Flag(0))
    return [joint, PhaseTasks("transduce", Op.TRANSDUCE, op_index, op.name, n=op.n)]


# ---------------------------------------------------------------------- where units go, whatever is active


def self_unit_sm(slot: int, head: int, block: int, *, n_heads: int, n_blocks: int, n_sms: int) -> int:
    """The SM that keeps one block of one head of a slot's own cache, and attends over it."""
    return ((slot * n_blocks + block) * n_heads + head) % n_sms


def cross_unit_sm(slot: int, head: int, block: int, *, n_heads: int, n_blocks: int, n_sms: int) -> int:
    """The SM that attends over one block of one head of what a slot listens to."""
    return ((slot * n_heads + head) * n_blocks + block) % n_sms


def combine_unit_sm(row: int, head: int, *, n_heads: int, n_sms: int) -> int:
    """The SM that combines the blocks of one head of a row."""
    return (row * n_heads + head) % n_sms


# ---------------------------------------------------------------------- rules


def verify(phases: Sequence[PhaseTasks], sizes: Sizes) -> None:
    """Raise CompileError unless every phase reads a value that an earlier one made, in shapes that the kernel has."""
    widths: dict[str, int] = {}
    for index, phase in enumerate(phases):
        if phase.name in widths:
            raise _broken(phase, "a value is made once")
        if phase.reads is not None and widths.get(phase.reads) != phase.k and phase.op not in ENDS:
            raise _broken(phase, f"reads {phase.k} elements of {phase.reads!r}, which has {widths.get(phase.reads)}")
        if phase.op in (Op.LINEAR, Op.HEAD):
            _verify_weight(phase)
            _verify_stream(phase, sizes, is_first=index == 0)
            _verify_alike_width(phase, sizes)
        elif phase.op in (Op.LSTM, Op.RECUR, Op.JOINT):
            _verify_transducer(phase, sizes, is_first=index == 0)
        elif phase.op not in ENDS:
            _verify_attention(phase, sizes)
        widths[phase.name] = output_elements(phase)
    ends = [phase.op for phase in phases if phase.op in ENDS]
    if len(ends) != 1 or phases[-1].op not in ENDS:
        raise CompileError(STAGE, [phase.name for phase in phases], "a step ends in its one head")


def output_elements(phase: PhaseTasks) -> int:
    """Elements of a row that a phase hands on: an LSTM's N are gates, four of each unit."""
    return phase.n // GATES if phase.op is Op.LSTM else phase.n


def _verify_transducer(phase: PhaseTasks, sizes: Sizes, *, is_first: bool) -> None:
    if (Flag.EMBED in phase.flags) != (phase.op is Op.LSTM and is_first):
        raise _broken(phase, "the LSTM behind the lookup is the first phase, and reads nothing else")
    if Flag.EMBED not in phase.flags:
        _verify_weight(phase)
    _verify_alike_width(phase, sizes)
    if phase.op in (Op.LSTM, Op.RECUR) and (phase.n % (GATES * K_STEP) or not 0 <= phase.layer < sizes.n_layers):
        raise _broken(phase, f"{phase.n} gates of layer {phase.layer}: of units in multiples of {K_STEP}")


def _verify_alike_width(phase: PhaseTasks, sizes: Sizes) -> None:
    if sizes.transducer is not None and phase.k not in (0, sizes.width):
        raise _broken(phase, f"rows of {phase.k} elements: all of a transducer's have the width {sizes.width}")


def _verify_weight(phase: PhaseTasks) -> None:
    if phase.k < K_STEP or phase.k % K_STEP:
        raise _broken(phase, f"K = {phase.k} must be a multiple of {K_STEP}")
    if Flag.NORM in phase.flags and phase.k > X_CHUNK_ELEMENTS:
        raise _broken(phase, f"K = {phase.k} behind a norm must be at most {X_CHUNK_ELEMENTS}")
    if phase.op is Op.LINEAR and (phase.n < N_STEP or phase.n % N_STEP):
        raise _broken(phase, f"N = {phase.n} must be a multiple of {N_STEP}")
    if phase.n < 1:
        raise _broken(phase, "there must be a token")


def _verify_stream(phase: PhaseTasks, sizes: Sizes, *, is_first: bool) -> None:
    if (phase.reads is None) != (Flag.EMBED in phase.flags):
        raise _broken(phase, "reads either a value or the embedding")
    if Flag.EMBED in phase.flags and (not is_first or phase.k != sizes.width):
        raise _broken(phase, f"the embedding of {sizes.width} elements is read by the first phase alone")
    if Flag.RESIDUAL in phase.flags and (is_first or phase.n != sizes.width):
        raise _broken(phase, f"the residual stream has {sizes.width} elements, and begins with the embedding")


def _verify_attention(phase: PhaseTasks, sizes: Sizes) -> None:
    if phase.n != phase.n_heads * HEAD_SIZE or sizes.head_size != HEAD_SIZE:
        raise _broken(phase, f"{phase.n} elements must be {phase.n_heads} heads of {HEAD_SIZE}")
    if not 0 <= phase.layer < sizes.n_layers:
        raise _broken(phase, f"layer {phase.layer} of {sizes.n_layers}")
    is_cross = phase.op is Op.ATTEND_CROSS
    n_positions = sizes.n_cross_positions if is_cross else sizes.n_positions
    if phase.op is not Op.COMBINE and phase.n_blocks != -(-n_positions // phase.block):
        raise _broken(phase, f"{phase.n_blocks} blocks of {phase.block} do not make up {n_positions} positions")
    if phase.score_heads >> min(phase.n_heads, MAX_SCORE_HEADS):
        raise _broken(phase, f"scores are kept of heads below {min(phase.n_heads, MAX_SCORE_HEADS)}")


def _verify_alike(ops: Sequence[FusedOp]) -> None:
    """What the kernel holds one number of."""
    norms = [op.norm for op in ops if isinstance(op, FusedLinear | FusedHead)]
    epsilons = {norm.epsilon for norm in norms if norm is not None}
    n_heads = {op.n_heads for op in ops if isinstance(op, FusedAttention)}
    for numbers, rule in ((epsilons, "all norms add the same epsilon"), (n_heads, "all attention has as many heads")):
        if len(numbers) > 1:
            raise CompileError(STAGE, sorted(numbers), rule)


def _broken(phase: PhaseTasks, rule: str) -> CompileError:
    return CompileError(STAGE, phase, rule)


def dump(phases: Sequence[PhaseTasks]) -> str:
    """One line a phase."""
    return "".join(f"{index:4} {describe(phase)}\n" for index, phase in enumerate(phases))


def describe(phase: PhaseTasks) -> str:
    """One phase in words."""
    head = f"{phase.name:24} {phase.op.name:12} ← {phase.reads or 'embedding':24}"
    if phase.op in WITH_WEIGHT:
        flags = " ".join(flag.name or "" for flag in phase.flags)
        cut = f"{phase.n_granules} granules of {phase.granule_tiles} tiles, {phase.k_warps} warps x {phase.n_groups}"
        return f"{head} {phase.k} → {phase.n}: {cut}  {flags}".rstrip()
    if phase.op in ENDS:
        return f"{head} {phase.n} tokens"
    return f"{head} layer {phase.layer}: {phase.n_heads} heads, {phase.n_blocks} blocks of {phase.block}"
