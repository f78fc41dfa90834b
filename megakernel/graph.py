"""A model's step as a list of ops over named values, with the sizes that all of them share.

A model writes its graph with ``Builder``, which declares each constant's shape where it is used; ``verify`` says what
is wrong with a graph and ``dump`` prints it. Does not know what ops compute, fuse to or run on.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields

from .errors import CompileError
from .isa import EXTRA_DURATIONS, GRANULE_ROWS, MAX_SLOTS
from .ops import (
    Add,
    CrossAttention,
    Embed,
    Gelu,
    Head,
    Joint,
    Known,
    LayerNorm,
    Linear,
    Lookup,
    LstmStep,
    Op,
    Select,
    SelfAttention,
    Transduce,
)
from .ops import Sizes as Sizes

STAGE = "graph"


@dataclass(frozen=True, slots=True)
class Node:
    """An op and the name of the value it makes."""

    name: str
    op: Op


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes in order, and the shapes of the constants they name."""

    name: str
    sizes: Sizes
    nodes: tuple[Node, ...]
    constants: dict[str, tuple[int, ...]]


class Builder:
    """Adds one node a call and returns the name of its value; ``build`` once, at the end.

    Names of constants are the model's own. A constant may be used twice, with one shape.
    """

    def __init__(self, name: str, sizes: Sizes) -> None:
        self._name = name
        self._sizes = sizes
        self._nodes: list[Node] = []
        self._widths: dict[str, int] = {}
        self._constants: dict[str, tuple[int, ...]] = {}

    def embed(self, name: str, *, tokens: str, positions: str) -> str:
        """Where the residual stream begins."""
        self._declare(tokens, self._sizes.n_tokens, self._sizes.width)
        self._declare(positions, self._sizes.n_positions, self._sizes.width)
        return self._add(name, Embed(tokens, positions))

    def layer_norm(self, name: str, x: str, *, gamma: str, beta: str, epsilon: float = 1e-5) -> str:
        """Rows with mean 0 and variance 1, times gamma plus beta."""
        for constant in (gamma, beta):
            self._declare(constant, self._widths.get(x, 0))
        return self._add(name, LayerNorm(x, gamma, beta, epsilon))

    def linear(self, name: str, x: str, n: int, *, weight: str, bias: str | None) -> str:
        """Rows of ``n`` elements."""
        self._declare(weight, n, self._widths.get(x, 0))
        if bias is not None:
            self._declare(bias, n)
        return self._add(name, Linear(x, weight, bias))

    def gelu(self, name: str, x: str) -> str:
        """Of every element."""
        return self._add(name, Gelu(x))

    def add(self, name: str, x: str, residual: str) -> str:
        """The residual stream goes on."""
        return self._add(name, Add(x, residual))

    def self_attention(self, name: str, qkv: str, *, layer: int, n_heads: int) -> str:
        """Over the slot's own cache."""
        return self._add(name, SelfAttention(qkv, layer, n_heads))

    def cross_attention(
        self, name: str, q: str, *, layer: int, n_heads: int, dumped_heads: tuple[int, ...] = ()
    ) -> str:
        """Over what a stage wrote for the slot."""
        return self._add(name, CrossAttention(q, layer, n_heads, dumped_heads))

    def head(self, name: str, x: str, *, weight: str) -> str:
        """Logits, reduced at once."""
        self._declare(weight, self._sizes.n_tokens, self._widths.get(x, 0))
        return self._add(name, Head(x, weight))

    def select(self, name: str, head: str) -> str:
        """The end of the step."""
        return self._add(name, Select(head))

    def lookup(self, name: str, *, tokens: str) -> str:
        """The embedding of each slot's last token."""
        self._declare(tokens, self._sizes.n_tokens, self._sizes.width)
        return self._add(name, Lookup(tokens))

    def lstm_step(self, name: str, x: str, n: int, *, layer: int, weights: tuple[str, str, str, str]) -> str:
        """``n`` units. ``weights``: of the input, of the outputs before, and the bias of each."""
        for weight, k in zip(weights[:2], (self._widths.get(x, 0), n), strict=True):
            self._declare(weight, 4 * n, k)
        for bias in weights[2:]:
            self._declare(bias, 4 * n)
        return self._add(name, LstmStep(x, layer, *weights))

    def joint(self, name: str, x: str, *, weight: str, bias: str) -> str:
        """Logits of tokens and durations at the slots' frames, reduced at once."""
        transducer = self._sizes.transducer
        n = self._sizes.n_tokens + (len(transducer.durations) if transducer else 0)
        self._declare(weight, n, self._widths.get(x, 0))
        self._declare(bias, n)
        return self._add(name, Joint(x, weight, bias))

    def transduce(self, name: str, joint: str) -> str:
        """The end of a step over frames."""
        return self._add(name, Transduce(joint))

    def build(self) -> Graph:
        """The graph, verified. Raises CompileError for what ``verify`` refuses."""
        graph = Graph(self._name, self._sizes, tuple(self._nodes), self._constants)
        verify(graph)
        return graph

    def _declare(self, constant: str, *shape: int) -> None:
        earlier = self._constants.setdefault(constant, shape)
        if earlier != shape:
            raise CompileError(STAGE, constant, f"has the shape {list(earlier)}, and can't have {list(shape)} too")

    def _add(self, name: str, op: Op) -> str:
        known = Known(name, self._sizes, self._widths, self._constants)
        self._widths[name] = op.width(known)
        self._nodes.append(Node(name, op))
        return name


# ---------------------------------------------------------------------- rules


def verify(graph: Graph) -> None:
    """Raise CompileError, which names the node and the rule, unless the graph is one step.

    Each value has one name and is read later, each op gets the shapes it takes, each cache is used once, and the one
    Select reads the one Head at the end.
    """
    _verify_sizes(graph)
    _verify_names(graph)
    widths_of(graph)
    _verify_end(graph)
    _verify_all_is_read(graph)
    _verify_caches(graph)


def widths_of(graph: Graph) -> dict[str, int]:
    """Elements of a row of every value. Raises CompileError where an op's shape rule does not hold."""
    widths: dict[str, int] = {}
    for node in graph.nodes:
        widths[node.name] = node.op.width(Known(node.name, graph.sizes, widths, graph.constants))
    return widths


def operands_of(op: Op) -> tuple[str, ...]:
    """The values that an op reads."""
    return tuple(getattr(op, name) for name in ("x", "residual", "qkv", "q", "head") if hasattr(op, name))


def constants_of(op: Op) -> tuple[str, ...]:
    """The constants that an op reads."""
    names = (
        *("token_table", "position_table", "gamma", "beta", "weight", "bias"),
        *("weight_input", "weight_hidden", "bias_input", "bias_hidden"),
    )
    found = (getattr(op, name, None) for name in names)
    return tuple(name for name in found if name is not None)


def _verify_sizes(graph: Graph) -> None:
    sizes = graph.sizes
    _verify_transducer(graph)
    for field in fields(sizes):
        if field.name == "transducer":
            continue
        least = 0 if field.name == "end_token" else 1
        if getattr(sizes, field.name) < least:
            raise CompileError(STAGE, graph.name, f"{field.name} is {getattr(sizes, field.name)}, below {least}")
    if not sizes.end_token < sizes.mark_begin <= sizes.n_tokens:
        raise CompileError(
            STAGE,
            graph.name,
            f"end token {sizes.end_token} < first marker {sizes.mark_begin} <= {sizes.n_tokens} tokens must hold",
        )
    if sizes.max_slots > MAX_SLOTS:
        raise CompileError(STAGE, graph.name, f"{sizes.max_slots} slots, at most {MAX_SLOTS}")


def _verify_transducer(graph: Graph) -> None:
    own = graph.sizes.transducer
    if own is None:
        return
    least = min(own.n_frames, own.n_seats, own.max_symbols)
    if least < 1 or not 0 <= own.blank < graph.sizes.n_tokens:
        sizes = f"{own.n_frames} frames, {own.n_seats} seats, {own.max_symbols} tokens at a frame, blank {own.blank}"
        rule = f"{sizes}: at least 1, 1, 1, and one of the tokens"
        raise CompileError(STAGE, graph.name, rule)
    if not 1 <= len(own.durations) <= GRANULE_ROWS or not all(0 <= d < EXTRA_DURATIONS for d in own.durations):
        rule = f"durations {own.durations}: 1 to {GRANULE_ROWS}, each from 0 to {EXTRA_DURATIONS - 1}"
        raise CompileError(STAGE, graph.name, rule)


def _verify_names(graph: Graph) -> None:
    for name, count in Counter(node.name for node in graph.nodes).items():
        if count > 1 or not name:
            raise CompileError(STAGE, name, "each value has a name of its own")


def _verify_end(graph: Graph) -> None:
    ends: tuple[type[Op], ...] = (Embed, Head, Select)
    if graph.sizes.transducer is not None:
        ends = (Lookup, Joint, Transduce)
    for kind in ends:
        found = [node.name for node in graph.nodes if isinstance(node.op, kind)]
        if len(found) != 1:
            raise CompileError(STAGE, graph.name, f"has one {kind.__name__}, not {found}")
    last = graph.nodes[-1]
    ops = {node.name: node.op for node in graph.nodes}
    if not isinstance(last.op, Select | Transduce) or not isinstance(ops[last.op.head], Head | Joint):
        raise CompileError(STAGE, last.name, f"the {ends[2].__name__} of a {ends[1].__name__} ends the step")


def _verify_all_is_read(graph: Graph) -> None:
    read = {value for node in graph.nodes for value in operands_of(node.op)}
    for node in graph.nodes[:-1]:
        if node.name not in read:
            raise CompileError(STAGE, node.name, "is made and never read")
    used = {constant for node in graph.nodes for constant in constants_of(node.op)}
    for constant in graph.constants:
        if constant not in used:
            raise CompileError(STAGE, constant, "is a constant that no node reads")


def _verify_caches(graph: Graph) -> None:
    seen: set[tuple[type[Op], int]] = set()
    for node in graph.nodes:
        if isinstance(node.op, SelfAttention | CrossAttention | LstmStep):
            cache = (type(node.op), node.op.layer)
            if cache in seen:
                done = "stepped" if isinstance(node.op, LstmStep) else "attended"
                raise CompileError(STAGE, node.name, f"layer {node.op.layer} has {done} already")
            seen.add(cache)


# ---------------------------------------------------------------------- text


def dump(graph: Graph) -> str:
    """The sizes, then one line a node: value, elements of its row, op, what it reads."""
    found = ((field.name, getattr(graph.sizes, field.name)) for field in fields(graph.sizes))
    sizes = "  ".join(f"{name}={value}" for name, value in found if value is not None)
    return "\n".join([f"graph {graph.name}", f"  {sizes}", *_lines(graph)]) + "\n"


def _lines(graph: Graph) -> Iterator[str]:
    widths = widths_of(graph)
    column = max(len(node.name) for node in graph.nodes)
    for node in graph.nodes:
        reads = ", ".join([*operands_of(node.op), *constants_of(node.op)])
        value = f"{node.name:{column}} [rows, {widths[node.name]:5}]"
        yield f"  {value} = {type(node.op).__name__}({reads}){_note(node.op)}"


def _note(op: Op) -> str:
    match op:
        case SelfAttention():
            return f"  layer {op.layer}: {op.n_heads} heads, blocks of {op.block}"
        case CrossAttention():
            kept = f", keeps heads {', '.join(map(str, op.dumped_heads))}" if op.dumped_heads else ""
            return f"  layer {op.layer}: {op.n_heads} heads, blocks of {op.block}{kept}"
        case LayerNorm():
            return f"  epsilon {op.epsilon:g}"
        case LstmStep():
            return f"  layer {op.layer}"
        case _:
            return ""
