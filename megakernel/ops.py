"""The ops of a step: what an author writes, with the shape rule of each, and what they fuse to.

An author's graph holds the first group; ``fuse.py`` turns it into the second, of which each is one phase of the kernel.
Knows tensors of rows, in elements. Does not know models, SMs or numbers' bits (``numbers.py`` does).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .errors import CompileError
from .isa import (
    GRANULE_ROWS,
    LOOP_BATCH_GRANULES,
    LOOP_WARPS,
    TRANSDUCER_BATCH_GRANULES,
    TRANSDUCER_WARPS,
)


@dataclass(frozen=True, slots=True)
class Transducer:
    """What a step over a slot's frames has beside the sizes of every step."""

    n_frames: int  # of a seat, at most
    n_seats: int  # for streams' frames and states; a slot takes one after the other
    blank: int  # the token that stands for none
    durations: tuple[int, ...]  # frames to go on by; what the joint's outputs behind the tokens stand for
    max_symbols: int  # tokens at one frame, after which the next frame is forced


@dataclass(frozen=True, slots=True)
class Sizes:
    """What the ops of a graph share. Widths in elements."""

    width: int
    head_size: int
    n_layers: int
    n_positions: int  # of a slot's own cache
    n_cross_positions: int
    n_tokens: int  # of the vocabulary
    end_token: int
    mark_begin: int  # first marker; n_tokens if there are none
    max_slots: int = 8
    transducer: Transducer | None = None

    @property
    def n_warps(self) -> int:
        """Of the block that an SM runs."""
        return LOOP_WARPS if self.transducer is None else TRANSDUCER_WARPS

    @property
    def batch_granules(self) -> int:
        """Granules whose sums a warp keeps in registers at a time."""
        return LOOP_BATCH_GRANULES if self.transducer is None else TRANSDUCER_BATCH_GRANULES

    @property
    def n_replicas(self) -> int:
        """Of exchanged rows; an SM reads replica SM mod this. In the token loop four take 2 % longer on 132 SMs."""
        return 1 if self.transducer is None else 4

    @staticmethod
    def for_transducer(*, width: int, n_layers: int, n_tokens: int, max_slots: int, transducer: Transducer) -> "Sizes":
        """A step over frames: it has no caches, no markers and no end token. ``n_layers`` of LSTM."""
        return Sizes(width, 64, n_layers, 1, 1, n_tokens, n_tokens - 1, n_tokens, max_slots, transducer)


@dataclass(frozen=True, slots=True)
class Known:
    """What an op's shape rule may look at: the graph's sizes, its constants, and the values made before ``node``."""

    node: str
    sizes: Sizes
    widths: Mapping[str, int]  # elements of a row of each value
    constants: Mapping[str, tuple[int, ...]]

    def width(self, value: str) -> int:
        """Elements of a row of ``value``. Raises CompileError if no earlier node makes it."""
        if value not in self.widths:
            raise self.broken(f"reads {value!r}, which no earlier node makes")
        return self.widths[value]

    def expect(self, constant: str, *shape: int) -> None:
        """Raise CompileError unless ``constant`` has this shape."""
        found = self.constants.get(constant)
        if found != shape:
            raise self.broken(f"takes {constant!r} of shape {list(shape)}, not {found and list(found)}")

    def expect_width(self, value: str, width: int) -> None:
        """Raise CompileError unless rows of ``value`` have this many elements."""
        if self.width(value) != width:
            raise self.broken(f"takes rows of {width} elements, and {value!r} has {self.width(value)}")

    def expect_layer(self, layer: int) -> None:
        """Raise CompileError unless the caches have this layer."""
        if not 0 <= layer < self.sizes.n_layers:
            raise self.broken(f"layer {layer} of {self.sizes.n_layers}")

    def broken(self, rule: str) -> CompileError:
        """What to raise where ``rule`` does not hold."""
        return CompileError("graph", self.node, rule)


# ---------------------------------------------------------------------- what an author writes


@dataclass(frozen=True, slots=True)
class Embed:
    """A token's embedding plus its position's: → [rows, width]."""

    token_table: str  # constant [n_tokens, width]
    position_table: str  # constant [n_positions, width]

    def width(self, known: Known) -> int:
        """Elements of a row of the result."""
        known.expect(self.token_table, known.sizes.n_tokens, known.sizes.width)
        known.expect(self.position_table, known.sizes.n_positions, known.sizes.width)
        return known.sizes.width


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """[rows, width] → the same, each row with mean 0 and variance 1, times gamma plus beta."""

    x: str
    gamma: str
    beta: str
    epsilon: float = 1e-5

    def width(self, known: Known) -> int:
        """Elements of a row of the result."""
        width = known.width(self.x)
        known.expect(self.gamma, width)
        known.expect(self.beta, width)
        return width


@dataclass(frozen=True, slots=True)
class Linear:
    """[rows, K] → [rows, N]."""

    x: str
    weight: str  # constant [N, K]
    bias: str | None  # constant [N]

    def width(self, known: Known) -> int:
        """Elements of a row of the result."""
        n = known.constants.get(self.weight, (0,))[0]
        known.expect(self.weight, n, known.width(self.x))
        if self.bias is not None:
            known.expect(self.bias, n)
        return n


@dataclass(frozen=True, slots=True)
class Gelu:
    """Exact GELU, elementwise."""

    x: str

    def width(self, known: Known) -> int:
        """Elements of a row of the result."""
        return known.width(self.x)


@dataclass(frozen=True, slots=True)
class Add:
    """x + residual; the residual stream goes on as float32."""

    x: str
    residual: str

    def width(self, known: Known) -> int:
        """Elements of a row of the result."""
        known.expect_width(self.x, known.width(self.residual))
        return known.width(self.x)


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """Queries, keys and values [rows, 3 · width] → [rows, width], over the slot's cache of this layer."""

    qkv: str
    layer: int
    n_heads: int
    block: int = 64  # positions

    def width(self, known: Known) -> int:
        """Elements of a row of the result."""
        width = self.n_heads * known.sizes.head_size
        known.expect_width(self.qkv, 3 * width)
        known.expect_layer(self.layer)
        return width


@dataclass(frozen=True, slots=True)
class CrossAttention:
    """Queries [rows, width] → [rows, width], over keys and values that a stage wrote for the slot."""

    q: str
    layer: int
    n_heads: int
    dumped_heads: tuple[int, ...] = ()  # whose scores are kept, rising
    block: int = 256

    def width(self, known: Known) -> int:
        """Elements of a row of the result."""
        width = self.n_heads * known.sizes.head_size
        known.expect_width(self.q, width)
        known.expect_layer(self.layer)
        if list(self.dumped_heads) != sorted(set(self.dumped_heads) & set(range(self.n_heads))):
            raise known.broken(f"dumped heads {list(self.dumped_heads)} must rise and be among {self.n_heads}")
        return width


@dataclass(frozen=True, slots=True)
class Head:
    """[rows, K] → what SELECT needs of the logits over the tokens."""

    x: str
    weight: str  # constant [n_tokens, K]

    def width(self, known: Known) -> int:
        """Logits of a row."""
        known.expect(self.weight, known.sizes.n_tokens, known.width(self.x))
        return known.sizes.n_tokens


@dataclass(frozen=True, slots=True)
class Select:
    """Next tokens from the head's result."""

    head: str

    def width(self, known: Known) -> int:
        """One token a row."""
        known.expect_width(self.head, known.sizes.n_tokens)
        return 1


@dataclass(frozen=True, slots=True)
class Lookup:
    """The embedding of a slot's last token: → [slots, width]. An LSTM's input, nothing else's."""

    token_table: str  # constant [n_tokens, width]

    def width(self, known: Known) -> int:
        """Elements of a row of the result."""
        known.expect(self.token_table, known.sizes.n_tokens, known.sizes.width)
        return known.sizes.width


@dataclass(frozen=True, slots=True)
class LstmStep:
    """[slots, K] → [slots, N], one step of a layer whose outputs and cells are the slot's. Gates: i, f, g, o."""

    x: str
    layer: int
    weight_input: str  # constant [4 · N, K]
    weight_hidden: str  # constant [4 · N, N]
    bias_input: str  # constant [4 · N]
    bias_hidden: str  # constant [4 · N]

    def width(self, known: Known) -> int:
        """Elements of a row of the result."""
        n = known.constants.get(self.weight_hidden, (0, 0))[1]
        known.expect(self.weight_hidden, 4 * n, n)
        known.expect(self.weight_input, 4 * n, known.width(self.x))
        known.expect(self.bias_input, 4 * n)
        known.expect(self.bias_hidden, 4 * n)
        known.expect_layer(self.layer)
        return n


@dataclass(frozen=True, slots=True)
class Joint:
    """Frames [rows, K] of the slots plus their rows [slots, K] → ReLU → logits of tokens, then of durations."""

    x: str
    weight: str  # constant [n_tokens + durations, K]
    bias: str  # constant [n_tokens + durations]

    def width(self, known: Known) -> int:
        """Logits of a row."""
        if known.sizes.transducer is None:
            raise known.broken("needs sizes of a transducer")
        n = known.sizes.n_tokens + len(known.sizes.transducer.durations)
        known.expect_width(self.x, known.sizes.width)
        known.expect(self.weight, n, known.width(self.x))
        known.expect(self.bias, n)
        return n


@dataclass(frozen=True, slots=True)
class Transduce:
    """How far each slot goes, and its next token, from the joint's result."""

    head: str

    def width(self, known: Known) -> int:
        """One token a slot."""
        known.width(self.head)
        return 1


Op = (
    Embed
    | LayerNorm
    | Linear
    | Gelu
    | Add
    | SelfAttention
    | CrossAttention
    | Head
    | Select
    | Lookup
    | LstmStep
    | Joint
    | Transduce
)

# ---------------------------------------------------------------------- what they fuse to


@dataclass(frozen=True, slots=True)
class Norm:
    """A layer norm that went into the linear behind it."""

    gamma: str
    beta: str
    epsilon: float


@dataclass(frozen=True, slots=True)
class FusedLinear:
    """One LINEAR phase. ``x`` is None where the row is the token's embedding (``embed``)."""

    name: str  # of the value it makes
    x: str | None
    weight: str
    bias: str | None
    n: int
    k: int
    embed: Embed | None = None
    norm: Norm | None = None
    gelu: bool = False
    residual: bool = False  # adds to the stream


@dataclass(frozen=True, slots=True)
class FusedAttention:
    """An ATTEND phase and the COMBINE behind it. ``x`` holds the queries, for self attention keys and values too."""

    name: str
    x: str
    width: int
    n_heads: int
    layer: int
    block: int
    n_blocks: int  # at most
    is_cross: bool
    dumped_heads: tuple[int, ...] = field(default=())
    first_dump: int = 0  # index of the layer's first dumped head among all


@dataclass(frozen=True, slots=True)
class FusedHead:
    """The HEAD phase, and SELECT behind it."""

    name: str
    x: str
    weight: str
    n: int
    k: int
    norm: Norm | None = None


@dataclass(frozen=True, slots=True)
class FusedLstm:
    """The LSTM phase: what comes in front of the cells but the recurrent product. Weight rows lie unit by unit.

    With ``token_table`` the product of each token's embedding is a row of a table; nothing is multiplied.
    """

    name: str
    x: str | None
    layer: int
    weight_input: str
    biases: tuple[str, str]
    n: int  # 4 · units
    k: int
    token_table: str | None = None


@dataclass(frozen=True, slots=True)
class FusedRecurrence:
    """The RECUR phase behind an LSTM: its outputs times the recurrent weight, kept for the next step."""

    name: str
    x: str
    layer: int
    weight: str
    n: int  # 4 · units
    k: int


@dataclass(frozen=True, slots=True)
class FusedJoint:
    """The JOINT phase, and TRANSDUCE behind it. The durations' rows have a granule of their own."""

    name: str
    x: str
    weight: str
    bias: str
    n_tokens: int
    n_durations: int
    k: int

    @property
    def first_duration(self) -> int:
        """Row of the padded weight at which the durations begin."""
        return -(-self.n_tokens // GRANULE_ROWS) * GRANULE_ROWS

    @property
    def n(self) -> int:
        """Rows of the padded weight."""
        return self.first_duration + self.n_durations


WeightOp = FusedLinear | FusedHead | FusedLstm | FusedRecurrence | FusedJoint
FusedOp = WeightOp | FusedAttention
