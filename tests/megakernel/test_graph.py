"""A graph is built with the shapes it needs, and what is wrong with one is named."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from megakernel.errors import CompileError
from megakernel.graph import Builder, Graph, Node, dump, verify, widths_of
from megakernel.ops import Add, CrossAttention, Gelu, Linear, SelfAttention
from tests.megakernel.small import ONE_LAYER


@pytest.fixture
def graph(tiny_graph: Callable[..., Graph]) -> Graph:
    return tiny_graph()


def changed(graph: Graph, name: str, **fields: object) -> Graph:
    """The graph with other fields in one node's op."""
    nodes = [
        Node(node.name, replace(node.op, **fields)) if node.name == name else node  # type: ignore[arg-type]
        for node in graph.nodes
    ]
    return replace(graph, nodes=tuple(nodes))


def without(graph: Graph, name: str) -> Graph:
    return replace(graph, nodes=tuple(node for node in graph.nodes if node.name != name))


def test_a_builder_declares_the_constants_that_it_names(graph: Graph) -> None:
    assert graph.constants["tokens"] == (100, 128)
    assert graph.constants["positions"] == (80, 128)
    assert graph.constants["0.qkv.weight"] == (384, 128)
    assert graph.constants["0.narrow.weight"] == (128, 256)
    assert "0.narrow.bias" not in graph.constants


def test_every_value_has_a_width(graph: Graph) -> None:
    widths = widths_of(graph)
    assert {name: widths[name] for name in ("embedding", "0.qkv", "0.attention", "0.gelu", "head", "select")} == {
        "embedding": 128,
        "0.qkv": 384,
        "0.attention": 128,
        "0.gelu": 256,
        "head": 100,
        "select": 1,
    }


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"n_layers": 0}, "n_layers is 0, below 1"),
        ({"end_token": 80}, "end token 80 < first marker 80 <= 100 tokens must hold"),
        ({"mark_begin": 101}, "must hold"),
        ({"max_slots": 9}, "9 slots, at most 8"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(graph: Graph, fields: dict[str, int], rule: str) -> None:
    with pytest.raises(CompileError, match=rule):
        verify(replace(graph, sizes=replace(ONE_LAYER, **fields)))


@pytest.mark.parametrize(
    ("name", "fields", "rule"),
    [
        ("0.norm", {"x": "nothing"}, "graph: 0.norm: reads 'nothing', which no earlier node makes"),
        ("0.norm", {"gamma": "0.qkv.bias"}, r"takes '0.qkv.bias' of shape \[128\], not \[384\]"),
        ("0.qkv", {"weight": "0.mix.weight"}, r"takes '0.qkv.bias' of shape \[128\], not \[384\]"),
        ("0.q", {"bias": None}, "0.q.bias: is a constant that no node reads"),
        ("0.attention", {"n_heads": 3}, "takes rows of 576 elements, and '0.qkv' has 384"),
        ("0.attention", {"layer": 1}, "layer 1 of 1"),
        ("0.cross", {"q": "0.qkv"}, "takes rows of 128 elements, and '0.qkv' has 384"),
        ("0.cross", {"layer": -1}, "layer -1 of 1"),
        ("0.cross", {"dumped_heads": (1, 0)}, "must rise and be among 2"),
        ("0.cross", {"dumped_heads": (2,)}, "must rise and be among 2"),
        ("0.out", {"residual": "0.gelu"}, "takes rows of 256 elements"),
        ("head", {"weight": "0.mix.weight"}, r"of shape \[100, 128\], not \[128, 128\]"),
        ("select", {"head": "norm"}, "takes rows of 100 elements"),
    ],
)
def test_a_broken_rule_is_named_with_its_node(graph: Graph, name: str, fields: dict[str, object], rule: str) -> None:
    with pytest.raises(CompileError, match=rule):
        verify(changed(graph, name, **fields))


def test_a_value_is_made_once_and_read(graph: Graph) -> None:
    with pytest.raises(CompileError, match=r"0\.qkv: each value has a name of its own"):
        verify(replace(graph, nodes=(*graph.nodes[:3], graph.nodes[2], *graph.nodes[3:])))
    with pytest.raises(CompileError, match="spare: is made and never read"):
        verify(replace(graph, nodes=(*graph.nodes[:2], Node("spare", Gelu("0.norm")), *graph.nodes[2:])))


def test_a_step_has_one_embedding_one_head_and_ends_in_its_select(graph: Graph) -> None:
    with pytest.raises(CompileError, match=r"has one Select, not \[\]"):
        verify(without(graph, "select"))
    twice = replace(graph, nodes=(*graph.nodes, Node("again", graph.nodes[-2].op)))
    with pytest.raises(CompileError, match=r"has one Head, not \['head', 'again'\]"):
        verify(twice)
    behind = replace(graph, nodes=(*graph.nodes, Node("behind", Gelu("0.out"))))
    with pytest.raises(CompileError, match="behind: the Select of a Head ends the step"):
        verify(behind)


@pytest.mark.parametrize("op", [SelfAttention("0.qkv", 0, 2), CrossAttention("0.q", 0, 2)])
def test_a_cache_is_attended_once_a_step(graph: Graph, op: SelfAttention | CrossAttention) -> None:
    index = [node.name for node in graph.nodes].index("0.after_cross")
    more = (Node("again", op), Node("more", Add("again", "0.after_attention")))
    nodes = (*graph.nodes[:index], *more, *graph.nodes[index:])
    with pytest.raises(CompileError, match="again: layer 0 has attended already"):
        verify(changed(replace(graph, nodes=nodes), "0.after_cross", residual="more"))


def test_a_constant_has_one_shape() -> None:
    step = Builder("two", ONE_LAYER)
    x = step.embed("embedding", tokens="tokens", positions="positions")
    step.linear("wide", x, 256, weight="weight", bias=None)
    with pytest.raises(CompileError, match=r"weight: has the shape \[256, 128\], and can't have \[128, 128\] too"):
        step.linear("narrow", x, 128, weight="weight", bias=None)


def test_a_builder_refuses_what_does_not_fit_at_once() -> None:
    step = Builder("wrong", ONE_LAYER)
    x = step.embed("embedding", tokens="tokens", positions="positions")
    with pytest.raises(CompileError, match="takes rows of 384 elements, and 'embedding' has 128"):
        step.self_attention("attention", x, layer=0, n_heads=2)
    with pytest.raises(CompileError, match="reads 'later', which no earlier node makes"):
        step.gelu("gelu", "later")


def test_a_dump_has_a_line_for_each_node(graph: Graph) -> None:
    text = dump(graph)
    assert len(text.splitlines()) == 2 + len(graph.nodes)
    assert "0.qkv             [rows,   384] = Linear(0.norm, 0.qkv.weight, 0.qkv.bias)" in text
    assert "= CrossAttention(0.q)  layer 0: 2 heads, blocks of 256, keeps heads 1\n" in text
    assert "= SelfAttention(0.qkv)  layer 0: 2 heads, blocks of 64\n" in text


def test_a_linear_without_its_weight_is_refused(graph: Graph) -> None:
    nodes = (*graph.nodes[:1], Node("odd", Linear("embedding", "missing", None)), *graph.nodes[1:])
    with pytest.raises(CompileError, match=r"odd: takes 'missing' of shape \[0, 128\], not None"):
        verify(replace(graph, nodes=nodes))
