"""Graph → fused ops, each one phase of the kernel, and the constants of each as the machine takes them.

A norm goes into the linears that read it: gamma into the weight, beta into the bias, the rest into the epilogue. GELU
and the residual go into the linear in front, the embedding into the first linear. Knows the patterns and refuses what
fits none. Does not know phases, tiles or SMs.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeGuard

import numpy as np
from numpy.typing import NDArray

from . import numbers
from .errors import CompileError
from .folded import Folded
from .graph import Graph, Node, operands_of, verify, widths_of
from .isa import GATES
from .ops import (
    Add,
    CrossAttention,
    Embed,
    FusedAttention,
    FusedHead,
    FusedJoint,
    FusedLinear,
    FusedLstm,
    FusedOp,
    FusedRecurrence,
    Gelu,
    Head,
    Joint,
    LayerNorm,
    Linear,
    Lookup,
    LstmStep,
    Norm,
    Op,
    SelfAttention,
    Transduce,
    WeightOp,
)

STAGE = "fuse"


def fuse(graph: Graph) -> tuple[FusedOp, ...]:
    """What runs as one phase each, in order.

    Raises:
        CompileError: naming the node that fits no pattern: a norm that something else than linears and the head reads,
            a GELU or an addition that does not follow a linear of its own, a second residual stream, or an embedding
            that is read by more than the first linear and the stream.
    """
    verify(graph)
    if graph.sizes.transducer is not None:
        return tuple(_fuse_transducer(graph))
    return tuple(_Fusion(graph).run())


def _fuse_transducer(graph: Graph) -> Iterator[FusedOp]:
    """The recurrent product of a layer comes behind the op that waits for the layer's outputs, so that it fills the
    time in which that op's own result is on its way.
    """
    later: FusedRecurrence | None = None
    ops = {node.name: node.op for node in graph.nodes}
    for node in graph.nodes:
        n, k = graph.constants.get(getattr(node.op, "weight", ""), (0, 0))
        fused: FusedOp
        match node.op:
            case Lookup() | Transduce():
                continue
            case LstmStep() as op:
                fused = _lstm(node.name, op, ops[op.x], graph)
            case Linear() as op if not isinstance(ops[op.x], Lookup):
                fused = FusedLinear(node.name, op.x, op.weight, op.bias, n, k)
            case Joint() as op if not isinstance(ops[op.x], Lookup):
                n_durations = n - graph.sizes.n_tokens
                fused = FusedJoint(node.name, op.x, op.weight, op.bias, graph.sizes.n_tokens, n_durations, k)
            case _:
                raise CompileError(
                    STAGE, node.name, "a transducer has a lookup, LSTMs, linears behind them and a joint"
                )
        yield fused
        if later is not None:
            yield later
        later = None
        if isinstance(fused, FusedLstm) and isinstance(node.op, LstmStep):
            weight = node.op.weight_hidden
            later = FusedRecurrence(f"{node.name}.next", node.name, fused.layer, weight, fused.n, fused.n // GATES)


def _lstm(name: str, op: LstmStep, source: Op, graph: Graph) -> FusedLstm:
    n, k = graph.constants[op.weight_input]
    biases = op.bias_input, op.bias_hidden
    if isinstance(source, Lookup):
        return FusedLstm(name, None, op.layer, op.weight_input, biases, n, k, source.token_table)
    return FusedLstm(name, op.x, op.layer, op.weight_input, biases, n, k)


class _Fusion:
    """One walk over a graph."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.ops: dict[str, Op] = {node.name: node.op for node in graph.nodes}
        self.widths = widths_of(graph)
        self.readers: dict[str, list[Node]] = {node.name: [] for node in graph.nodes}
        for node in graph.nodes:
            for value in operands_of(node.op):
                self.readers[value].append(node)
        self.stream = next(node.name for node in graph.nodes if isinstance(node.op, Embed))
        self.absorbed: set[str] = set()
        self.n_fused = 0
        self.n_dumped = 0

    def run(self) -> Iterator[FusedOp]:
        for node in self.graph.nodes:
            fused = self._fused(node)
            if fused is not None:
                yield fused
                self.n_fused += 1

    def _fused(self, node: Node) -> FusedOp | None:
        match node.op:
            case Linear():
                return self._linear(node, node.op)
            case Head():
                x, embed, norm = self._input(node, node.op.x)
                if x is None or embed is not None:
                    raise CompileError(STAGE, node.name, "there is no linear between the embedding and the head")
                n, k = self.graph.constants[node.op.weight]
                return FusedHead(node.name, x, node.op.weight, n, k, norm)
            case SelfAttention() | CrossAttention():
                return self._attention(node, node.op)
            case Gelu() | Add():
                if node.name not in self.absorbed:
                    raise CompileError(
                        STAGE, node.name, f"follows no linear whose result only this {type(node.op).__name__} reads"
                    )
            case LayerNorm():
                for reader in self.readers[node.name]:
                    if not isinstance(reader.op, Linear | Head):
                        raise CompileError(STAGE, reader.name, f"reads the norm {node.name!r}; linears and heads may")
        return None

    def _input(self, node: Node, x: str) -> tuple[str | None, Embed | None, Norm | None]:
        """What a linear reads behind a norm: a value's name, or the embedding."""
        norm, op = None, self.ops[x]
        if isinstance(op, LayerNorm):
            norm = Norm(op.gamma, op.beta, op.epsilon)
            x, op = op.x, self.ops[op.x]
        if not isinstance(op, Embed):
            return x, None, norm
        if self.n_fused:
            raise CompileError(STAGE, node.name, "reads the embedding, which only the first linear does")
        return None, op, norm

    def _linear(self, node: Node, op: Linear) -> FusedLinear:
        x, embed, norm = self._input(node, op.x)
        n, k = self.graph.constants[op.weight]
        fused = FusedLinear(node.name, x, op.weight, op.bias, n, k, embed, norm)
        while True:
            readers = self.readers[fused.name]
            if len(readers) != 1 or fused.residual:
                return fused
            reader = readers[0]
            if isinstance(reader.op, Gelu) and not fused.gelu:
                fused = replace(fused, name=reader.name, gelu=True)
            elif isinstance(reader.op, Add) and reader.op.x == fused.name:
                self._advance_stream(reader, reader.op)
                fused = replace(fused, name=reader.name, residual=True)
            else:
                return fused
            self.absorbed.add(reader.name)

    def _advance_stream(self, node: Node, op: Add) -> None:
        if op.residual != self.stream:
            raise CompileError(STAGE, node.name, f"adds to {op.residual!r}; the residual stream is at {self.stream!r}")
        self.stream = node.name

    def _attention(self, node: Node, op: SelfAttention | CrossAttention) -> FusedAttention:
        is_cross = isinstance(op, CrossAttention)
        x = op.q if isinstance(op, CrossAttention) else op.qkv
        if isinstance(self.ops[x], Embed):
            raise CompileError(STAGE, node.name, "reads the embedding, which only the first linear does")
        sizes = self.graph.sizes
        n_positions = sizes.n_cross_positions if is_cross else sizes.n_positions
        dumped = op.dumped_heads if isinstance(op, CrossAttention) else ()
        first_dump, self.n_dumped = self.n_dumped, self.n_dumped + len(dumped)
        return FusedAttention(
            name=node.name,
            x=x,
            width=self.widths[node.name],
            n_heads=op.n_heads,
            layer=op.layer,
            block=op.block,
            n_blocks=-(-n_positions // op.block),
            is_cross=is_cross,
            dumped_heads=dumped,
            first_dump=first_dump if dumped else 0,
        )


def dump(ops: Sequence[FusedOp]) -> str:
    """One line a fused op: value, what it reads, and what went into it."""
    column = max(len(op.name) for op in ops)
    return "".join(f"  {op.name:{column}} = {_describe(op)}\n" for op in ops)


def _describe(op: FusedOp) -> str:
    if isinstance(op, FusedLstm):
        source = f"{op.token_table}[token]" if op.x is None else op.x
        return f"lstm({source})  {op.k} → {op.n // GATES} units of layer {op.layer}  {op.weight_input}"
    if isinstance(op, FusedRecurrence):
        return f"kept for {op.x}'s next step  {op.k} → {op.n}  {op.weight}"
    if isinstance(op, FusedJoint):
        return f"joint(relu(frames + {op.x}))  {op.k} → {op.n_tokens} tokens, {op.n_durations} durations  {op.weight}"
    if isinstance(op, FusedAttention):
        kind = "cross" if op.is_cross else "self"
        return f"{kind} attention({op.x})  layer {op.layer}: {op.n_heads} heads, {op.n_blocks} blocks of {op.block}"
    kind = "linear" if isinstance(op, FusedLinear) else "head"
    source = op.x or "embedding"
    inner = source if op.norm is None else f"norm({source})"
    parts = [f"{kind}({inner})  {op.k} → {op.n}  {op.weight}"]
    if isinstance(op, FusedLinear):
        parts += ["gelu"] * op.gelu + ["+ residual"] * op.residual
    return "  ".join(parts)


# ---------------------------------------------------------------------- constants


def fold(
    weight: NDArray[np.float32],  # [n, k]
    bias: NDArray[np.float32] | None,  # [n]
    gamma: NDArray[np.float32] | None = None,  # [k]
    beta: NDArray[np.float32] | None = None,  # [k]
) -> Folded:
    """A linear's constants with the norm in front of it folded in.

    W(γ·x̂ + β) + b is (W·γ)x̂ + (b + Wβ), and x̂ = (x - mean)/deviation comes out of the sums over x itself once the sum
    of each row of W·γ is known: of the rounded one, as it is that which x is multiplied by.
    """
    n, k = weight.shape
    wide_bias = np.zeros(n) if bias is None else bias.astype(np.float64)
    if gamma is None or beta is None:
        return Folded(numbers.to_bits(weight), np.zeros(n, np.float32), wide_bias.astype(np.float32))
    rounded = numbers.round_bf16(weight * gamma)
    wide_bias = wide_bias + np.einsum("nk,k->n", weight, beta, dtype=np.float64, casting="same_kind")
    return Folded(
        numbers.to_bits(rounded),
        rounded.sum(axis=1, dtype=np.float64).astype(np.float32),
        wide_bias.astype(np.float32),
    )


def fold_constants(ops: Sequence[FusedOp], constants: Mapping[str, NDArray[np.float32]]) -> tuple[Folded, ...]:
    """The constants of each op that multiplies, in order. Raises CompileError for a missing or misshapen one."""
    return tuple(_fold_op(op, constants) for op in ops if has_weight(op))


def has_weight(op: FusedOp) -> TypeGuard[WeightOp]:
    """Whether it reads the tape."""
    return not isinstance(op, FusedAttention) and not (isinstance(op, FusedLstm) and op.token_table is not None)


def fold_table(op: FusedLstm, constants: Mapping[str, NDArray[np.float32]]) -> NDArray[np.float32]:
    """[n_tokens, units, GATES]: the product of each token's embedding with the input's weight, and both biases."""
    assert op.token_table is not None, "the LSTM behind the lookup has a table"
    tokens, weight = constants[op.token_table], constants[op.weight_input]
    rows = tokens.astype(np.float64) @ by_unit(weight).astype(np.float64).T
    rows += sum(by_unit(constants[bias]).astype(np.float64) for bias in op.biases)
    return rows.astype(np.float32).reshape(len(tokens), -1, GATES)


def by_unit(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """[4 · units, ...] gate after gate → the same rows unit after unit."""
    gates = rows.reshape(GATES, -1, *rows.shape[1:])
    return np.ascontiguousarray(gates.swapaxes(0, 1)).reshape(rows.shape)


def _fold_op(op: WeightOp, constants: Mapping[str, NDArray[np.float32]]) -> Folded:
    def constant(name: str, *shape: int) -> NDArray[np.float32]:
        found = constants.get(name)
        if found is None or found.shape != shape:
            raise CompileError(
                STAGE, op.name, f"takes {name!r} of shape {shape}, not {None if found is None else found.shape}"
            )
        return found

    match op:
        case FusedLstm():
            first, second = (constant(bias, op.n) for bias in op.biases)
            bias = (first.astype(np.float64) + second).astype(np.float32)
            return fold(by_unit(constant(op.weight_input, op.n, op.k)), by_unit(bias))
        case FusedRecurrence():
            return fold(by_unit(constant(op.weight, op.n, op.k)), None)
        case FusedJoint():
            given = op.n_tokens + op.n_durations
            return fold(*pad_joint(op, constant(op.weight, given, op.k), constant(op.bias, given)))
        case _:
            return _fold_linear(op, constant)


def pad_joint(
    op: FusedJoint, weight: NDArray[np.float32], bias: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Weight [tokens + durations, k] and bias with zeros between the two, so that durations begin a granule."""
    padding = ((0, op.first_duration - op.n_tokens), (0, 0))
    tokens = np.pad(weight[: op.n_tokens], padding)
    biases = np.pad(bias[: op.n_tokens], padding[0])
    return np.concatenate([tokens, weight[op.n_tokens :]]), np.concatenate([biases, bias[op.n_tokens :]])


class _Constant(Protocol):
    def __call__(self, name: str, *shape: int) -> NDArray[np.float32]: ...


def _fold_linear(op: FusedLinear | FusedHead, constant: _Constant) -> Folded:
    bias = constant(op.bias, op.n) if isinstance(op, FusedLinear) and op.bias is not None else None
    weight = constant(op.weight, op.n, op.k)
    if op.norm is None:
        return fold(weight, bias)
    return fold(weight, bias, constant(op.norm.gamma, op.k), constant(op.norm.beta, op.k))
