"""What runs as one phase, what fits no pattern, and that folding a norm changes the result by rounding alone."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from megakernel import numbers
from megakernel.errors import CompileError
from megakernel.fuse import dump, fold, fold_constants, fuse
from megakernel.graph import Builder, Graph
from megakernel.ops import Embed, FusedAttention, FusedHead, FusedLinear, Norm
from tests.megakernel.small import ONE_LAYER

TABLE = """\
  0.qkv             = linear(norm(embedding))  128 → 384  0.qkv.weight
  0.attention       = self attention(0.qkv)  layer 0: 2 heads, 2 blocks of 64
  0.after_attention = linear(0.attention)  128 → 128  0.mix.weight  + residual
  0.q               = linear(norm(0.after_attention))  128 → 128  0.q.weight
  0.cross           = cross attention(0.q)  layer 0: 2 heads, 2 blocks of 256
  0.after_cross     = linear(0.cross)  128 → 128  0.cross_mix.weight  + residual
  0.gelu            = linear(norm(0.after_cross))  128 → 256  0.wide.weight  gelu
  0.out             = linear(0.gelu)  256 → 128  0.narrow.weight  + residual
  head              = head(norm(0.out))  128 → 100  tokens
"""


def test_a_layer_becomes_eight_phases(tiny_graph: Callable[..., Graph]) -> None:
    assert dump(fuse(tiny_graph())) == TABLE


def test_the_first_linear_takes_the_embedding_and_the_norm(tiny_graph: Callable[..., Graph]) -> None:
    assert fuse(tiny_graph())[0] == FusedLinear(
        name="0.qkv",
        x=None,
        weight="0.qkv.weight",
        bias="0.qkv.bias",
        n=384,
        k=128,
        embed=Embed("tokens", "positions"),
        norm=Norm("0.norm.gamma", "0.norm.beta", 1e-5),
    )


def test_kept_heads_are_counted_over_the_layers(tiny_graph: Callable[..., Graph]) -> None:
    ops = fuse(tiny_graph(n_layers=3, dumped_heads=(0, 1)))
    crossed = [op for op in ops if isinstance(op, FusedAttention) and op.is_cross]
    assert [(op.layer, op.first_dump, op.dumped_heads) for op in crossed] == [
        (0, 0, (0, 1)),
        (1, 2, (0, 1)),
        (2, 4, (0, 1)),
    ]


Author = Callable[[Builder, str], str]  # adds to a step behind the embedding; returns what the head reads


def built(author: Author) -> Graph:
    step = Builder("odd", ONE_LAYER)
    x = author(step, step.embed("embedding", tokens="tokens", positions="positions"))
    step.select("select", step.head("head", x, weight="tokens"))
    return step.build()


def linear(step: Builder, name: str, x: str, n: int = 128) -> str:
    return step.linear(name, x, n, weight=f"{name}.weight", bias=None)


def norm(step: Builder, name: str, x: str) -> str:
    return step.layer_norm(name, x, gamma=f"{name}.gamma", beta=f"{name}.beta")


def no_linear(step: Builder, x: str) -> str:
    return norm(step, "norm", x)


def gelu_of_two(step: Builder, x: str) -> str:
    y = linear(step, "both", x)
    return step.add("sum", step.gelu("gelu", y), step.add("other", y, x))


def second_gelu(step: Builder, x: str) -> str:
    return step.gelu("again", step.gelu("gelu", linear(step, "linear", x)))


def old_residual(step: Builder, x: str) -> str:
    first = step.add("first", linear(step, "one", x), x)
    return step.add("second", linear(step, "two", first), x)


def embedding_twice(step: Builder, x: str) -> str:
    first = step.add("first", linear(step, "one", x), x)
    return step.add("second", linear(step, "two", norm(step, "norm", x)), first)


def norm_of_norm(step: Builder, x: str) -> str:
    return linear(step, "linear", norm(step, "outer", norm(step, "inner", linear(step, "first", x))))


def norm_into_gelu(step: Builder, x: str) -> str:
    return step.gelu("gelu", norm(step, "norm", linear(step, "linear", x)))


def attention_to_embedding(step: Builder, x: str) -> str:
    return step.cross_attention("attention", x, layer=0, n_heads=2)


@pytest.mark.parametrize(
    ("author", "message"),
    [
        (no_linear, "fuse: head: there is no linear between the embedding and the head"),
        (gelu_of_two, "fuse: gelu: follows no linear whose result only this Gelu reads"),
        (second_gelu, "fuse: again: follows no linear whose result only this Gelu reads"),
        (old_residual, "fuse: second: adds to 'embedding'; the residual stream is at 'first'"),
        (embedding_twice, "fuse: two: reads the embedding, which only the first linear does"),
        (norm_of_norm, "fuse: outer: reads the norm 'inner'; linears and heads may"),
        (norm_into_gelu, "fuse: gelu: reads the norm 'norm'; linears and heads may"),
        (attention_to_embedding, "fuse: attention: reads the embedding, which only the first linear does"),
    ],
)
def test_what_fits_no_pattern_is_named(author: Author, message: str) -> None:
    with pytest.raises(CompileError, match=message):
        fuse(built(author))


def test_a_gelu_may_stand_before_the_residual() -> None:
    ops = fuse(built(lambda step, x: step.add("sum", step.gelu("gelu", linear(step, "linear", x)), x)))
    assert isinstance(ops[0], FusedLinear)
    assert (ops[0].name, ops[0].gelu, ops[0].residual) == ("sum", True, True)
    assert isinstance(ops[1], FusedHead)
    assert ops[1].x == "sum"


# ---------------------------------------------------------------------- constants


def random(*shape: int, seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def test_a_folded_norm_is_the_norm_but_for_the_rounding_of_the_weight() -> None:
    weight, bias, beta = random(24, 256, seed=0), random(24, seed=1), random(256, seed=2)
    gamma, x = random(256, seed=3), numbers.round_bf16(3 * random(5, 256, seed=4) + 2)
    folded = fold(weight, bias, gamma, beta)
    sums = numbers.linear_sums(x, numbers.from_bits(folded.weight), 16)
    found = numbers.apply_norm(sums, numbers.row_stats(x, 1e-5), folded.row_sums) + folded.bias
    normed = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(found, normed @ (weight * gamma).T + weight @ beta + bias, atol=0.15)
    exact = normed @ numbers.from_bits(folded.weight).T + weight @ beta + bias
    np.testing.assert_allclose(found, exact, atol=2e-4)


def test_without_a_norm_a_weight_is_rounded_and_has_no_row_sums() -> None:
    weight = random(8, 64, seed=0)
    folded = fold(weight, None)
    np.testing.assert_array_equal(numbers.from_bits(folded.weight), numbers.round_bf16(weight))
    assert not folded.row_sums.any()
    assert not folded.bias.any()


def test_constants_are_folded_in_the_order_of_the_ops(
    tiny_graph: Callable[..., Graph], random_constants: Callable[[Graph, int], dict[str, NDArray[np.float32]]]
) -> None:
    graph = tiny_graph()
    ops, constants = fuse(graph), random_constants(graph, 0)
    shapes = [folded.weight.shape for folded in fold_constants(ops, constants)]
    assert shapes == [(op.n, op.k) for op in ops if not isinstance(op, FusedAttention)]


@pytest.mark.parametrize("name", ["0.qkv.bias", "norm.gamma", "tokens"])
def test_a_missing_or_misshapen_constant_is_named(
    name: str,
    tiny_graph: Callable[..., Graph],
    random_constants: Callable[[Graph, int], dict[str, NDArray[np.float32]]],
) -> None:
    graph = tiny_graph()
    constants = random_constants(graph, 0)
    wrong = constants | {name: constants[name][:-1]}
    del constants[name]
    for each in (wrong, constants):
        with pytest.raises(CompileError, match=f"takes '{name}' of shape"):
            fold_constants(fuse(graph), each)
