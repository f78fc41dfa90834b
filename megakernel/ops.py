"""The ops of a step: what an author writes, and what they fuse to.

An author's graph holds the first group; ``fuse.py`` turns it into the second, of which each is one phase of the kernel.
Knows tensors of rows, in elements. Does not know models, SMs or numbers' bits (``numbers.py`` does).
"""

from dataclasses import dataclass, field

# ---------------------------------------------------------------------- what an author writes


@dataclass(frozen=True, slots=True)
class Embed:
    """A token's embedding plus its position's: → [rows, width]."""

    token_table: str  # constant [n_tokens, width]
    position_table: str  # constant [n_positions, width]


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """[rows, width] → the same, each row with mean 0 and variance 1, times gamma plus beta."""

    x: str
    gamma: str
    beta: str
    epsilon: float = 1e-5


@dataclass(frozen=True, slots=True)
class Linear:
    """[rows, K] → [rows, N]."""

    x: str
    weight: str  # constant [N, K]
    bias: str | None  # constant [N]


@dataclass(frozen=True, slots=True)
class Gelu:
    """Exact GELU, elementwise."""

    x: str


@dataclass(frozen=True, slots=True)
class Add:
    """x + residual; the residual stream goes on as float32."""

    x: str
    residual: str


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """Queries, keys and values [rows, 3 · width] → [rows, width], over the slot's cache of this layer."""

    qkv: str
    layer: int
    n_heads: int
    block: int = 64  # positions


@dataclass(frozen=True, slots=True)
class CrossAttention:
    """Queries [rows, width] → [rows, width], over keys and values that a stage wrote for the slot."""

    q: str
    layer: int
    n_heads: int
    dumped_heads: tuple[int, ...] = ()  # whose scores are kept
    block: int = 256


@dataclass(frozen=True, slots=True)
class Head:
    """[rows, K] → what SELECT needs of the logits over the tokens."""

    x: str
    weight: str  # constant [n_tokens, K]


@dataclass(frozen=True, slots=True)
class Select:
    """Next tokens from the head's result."""

    head: str


Op = Embed | LayerNorm | Linear | Gelu | Add | SelfAttention | CrossAttention | Head | Select

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


FusedOp = FusedLinear | FusedAttention | FusedHead
