"""A model's step as a list of ops over named values, with the sizes that all of them share.

Knows names, shapes and order. Does not know what ops compute, fuse to or run on.
"""

from dataclasses import dataclass

from .ops import Op


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
