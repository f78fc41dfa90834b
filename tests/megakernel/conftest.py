"""Decoders small enough to run word by word, for several tests."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from megakernel.graph import Builder, Graph, Sizes

Constants = dict[str, NDArray[np.float32]]


def tiny_graph(
    *,
    n_layers: int = 1,
    width: int = 128,
    wide: int = 256,
    n_positions: int = 80,
    n_cross_positions: int = 300,
    n_tokens: int = 100,
    mark_begin: int = 80,
    dumped_heads: tuple[int, ...] = (1,),
) -> Graph:
    """A decoder of transformer layers; more than one block of positions in both kinds of attention by default."""
    sizes = Sizes(
        width=width,
        head_size=64,
        n_layers=n_layers,
        n_positions=n_positions,
        n_cross_positions=n_cross_positions,
        n_tokens=n_tokens,
        end_token=mark_begin - 1,
        mark_begin=mark_begin,
    )
    n_heads = width // sizes.head_size
    step = Builder("tiny", sizes)
    x = step.embed("embedding", tokens="tokens", positions="positions")
    for i in range(n_layers):
        y = step.layer_norm(f"{i}.norm", x, gamma=f"{i}.norm.gamma", beta=f"{i}.norm.beta")
        y = step.linear(f"{i}.qkv", y, 3 * width, weight=f"{i}.qkv.weight", bias=f"{i}.qkv.bias")
        y = step.self_attention(f"{i}.attention", y, layer=i, n_heads=n_heads)
        y = step.linear(f"{i}.mix", y, width, weight=f"{i}.mix.weight", bias=f"{i}.mix.bias")
        x = step.add(f"{i}.after_attention", y, x)
        y = step.layer_norm(f"{i}.cross_norm", x, gamma=f"{i}.cross_norm.gamma", beta=f"{i}.cross_norm.beta")
        y = step.linear(f"{i}.q", y, width, weight=f"{i}.q.weight", bias=f"{i}.q.bias")
        y = step.cross_attention(f"{i}.cross", y, layer=i, n_heads=n_heads, dumped_heads=dumped_heads)
        y = step.linear(f"{i}.cross_mix", y, width, weight=f"{i}.cross_mix.weight", bias=f"{i}.cross_mix.bias")
        x = step.add(f"{i}.after_cross", y, x)
        y = step.layer_norm(f"{i}.wide_norm", x, gamma=f"{i}.wide_norm.gamma", beta=f"{i}.wide_norm.beta")
        y = step.linear(f"{i}.wide", y, wide, weight=f"{i}.wide.weight", bias=f"{i}.wide.bias")
        y = step.gelu(f"{i}.gelu", y)
        y = step.linear(f"{i}.narrow", y, width, weight=f"{i}.narrow.weight", bias=None)
        x = step.add(f"{i}.out", y, x)
    y = step.layer_norm("norm", x, gamma="norm.gamma", beta="norm.beta")
    step.select("select", step.head("head", y, weight="tokens"))
    return step.build()


def random_constants(graph: Graph, seed: int) -> Constants:
    """Weights of a size that keeps activations and logits near 1."""
    rng = np.random.default_rng(seed)
    return {name: _random(name, shape, rng) for name, shape in graph.constants.items()}


def _random(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.float32]:
    values = rng.standard_normal(shape, dtype=np.float32)
    if name.endswith("gamma"):
        return 1 + values * np.float32(0.1)
    if name.endswith(".weight"):
        return values * np.float32(shape[-1] ** -0.5)
    return values * np.float32(0.3)


@pytest.fixture(scope="session", name="tiny_graph")
def tiny_graph_fixture() -> Callable[..., Graph]:
    return tiny_graph


def large_graph() -> Graph:
    """As large as Whisper large-v3-turbo's decoder."""
    return tiny_graph(
        n_layers=4,
        width=1280,
        wide=5120,
        n_positions=448,
        n_cross_positions=1500,
        n_tokens=51_866,
        mark_begin=50_365,
        dumped_heads=(),
    )


@pytest.fixture(scope="session", name="large_graph")
def large_graph_fixture() -> Callable[[], Graph]:
    return large_graph


@pytest.fixture(scope="session", name="random_constants")
def random_constants_fixture() -> Callable[[Graph, int], Constants]:
    return random_constants
