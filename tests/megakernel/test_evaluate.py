"""A step in numpy: each row by itself, whatever else the step holds. That it is the right step, a model's tests say."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megakernel import numbers
from megakernel.errors import CompileError
from megakernel.evaluate import Memory, Network, evaluate, network_of, run_requests
from megakernel.fuse import fuse
from megakernel.graph import Graph
from megakernel.isa import RecordKind
from megakernel.pick import Mask, Row
from megakernel.request import Request

Constants = dict[str, NDArray[np.float32]]
ANY = Mask(False, text=True, end=True, mark_begin=80, mark_end=100)
N_TOKENS = 100
BITMAPS = np.zeros((1, 2, 4), np.uint32)


@pytest.fixture(scope="module")
def network(tiny_graph: Callable[..., Graph], random_constants: Callable[[Graph, int], Constants]) -> Network:
    graph = tiny_graph(n_layers=2)
    return network_of(fuse(graph), graph.sizes, random_constants(graph, 0))


def heard(network: Network, seed: int = 0) -> Memory:
    """Slots that all have something to listen to."""
    memory = Memory.empty(network.sizes, network.n_score_heads)
    drawn = np.random.default_rng(seed).standard_normal(memory.cross_cache.shape, dtype=np.float32)
    memory.cross_cache[:] = numbers.round_bf16(drawn)
    return memory


def row_of(slot: int, position: int, token: int, n_positions: int = 300, **fields: float) -> Row:
    request = Request(head=(1,), max_tokens=9, n_positions=n_positions, **fields)  # type: ignore[arg-type]
    return Row(slot, position, token, ANY, request)


def logits_of(network: Network, memory: Memory, rows: Sequence[Row]) -> NDArray[np.float32]:
    return evaluate(network, memory, rows)["head"]


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 99))
def test_how_positions_are_cut_into_steps_changes_no_bit(network: Network, cuts: list[int], seed: int) -> None:
    tokens = np.random.default_rng(seed).integers(0, N_TOKENS, sum(cuts))
    rows = [row_of(1, position, int(token)) for position, token in enumerate(tokens)]
    together, apart = heard(network), heard(network)
    expected = logits_of(network, together, rows)
    found, begin = [], 0
    for n in cuts:
        found.append(logits_of(network, apart, rows[begin : begin + n]))
        begin += n
    assert np.concatenate(found).tobytes() == expected.tobytes()
    for name in ("self_cache", "cross_cache", "scores"):
        assert getattr(apart, name).tobytes() == getattr(together, name).tobytes()


def test_neighbours_in_the_step_change_no_bit(network: Network) -> None:
    mine = [row_of(2, 0, 5), row_of(2, 1, 6)]
    others = [row_of(0, 0, 9, n_positions=30), row_of(1, 0, 7)]
    alone = evaluate(network, heard(network), mine)
    among = evaluate(network, heard(network), [*others, *mine])
    for name, values in alone.items():
        assert values.tobytes() == among[name][2:].tobytes()


def test_rows_past_a_block_of_positions_see_all_of_them(network: Network) -> None:
    tokens = np.random.default_rng(0).integers(0, N_TOKENS, 70)
    memory, other = heard(network), heard(network)
    last = logits_of(network, memory, [row_of(0, i, int(token)) for i, token in enumerate(tokens)])[-1]
    tokens[3] = (tokens[3] + 1) % N_TOKENS
    changed = logits_of(network, other, [row_of(0, i, int(token)) for i, token in enumerate(tokens)])[-1]
    assert (last != changed).all()


def test_a_later_token_changes_no_earlier_row(network: Network) -> None:
    first = logits_of(network, heard(network), [row_of(0, 0, 5), row_of(0, 1, 6)])
    second = logits_of(network, heard(network), [row_of(0, 0, 5), row_of(0, 1, 7)])
    assert first[0].tobytes() == second[0].tobytes()
    assert (first[1] != second[1]).any()


def test_a_tail_weighs_as_much_as_its_positions_many_times(network: Network) -> None:
    few, many = heard(network), heard(network)
    many.cross_cache[:, :, :, :, 30:50] = many.cross_cache[:, :, :, :, 20:30].repeat(2, axis=4)
    biased = logits_of(network, few, [row_of(0, 0, 5, n_positions=30, n_plain=20, tail_bias=float(np.log(3)))])
    repeated = logits_of(network, many, [row_of(0, 0, 5, n_positions=50)])
    np.testing.assert_allclose(biased, repeated, atol=0.05)
    unbiased = logits_of(network, few, [row_of(0, 0, 5, n_positions=30)])
    assert np.abs(unbiased - repeated).max() > 0.1


def test_scores_are_kept_of_the_heads_asked_for_without_the_tails_bias(network: Network) -> None:
    plain, biased = heard(network), heard(network)
    first = evaluate(network, plain, [row_of(3, 0, 5, n_positions=30)])
    evaluate(network, biased, [row_of(3, 0, 5, n_positions=30, n_plain=10, tail_bias=2.0)])
    assert network.n_score_heads == 2  # one a layer
    q = first["0.q"][0, 64:]
    expected = plain.cross_cache[3, 0, 0, 1, :30] @ q / 8
    np.testing.assert_allclose(plain.scores[3, 0, 0, :30], expected, atol=1e-4)
    assert plain.scores[3, 0].tobytes() == biased.scores[3, 0].tobytes()
    assert np.isnan(plain.scores[3, :, 0, 30:]).all()
    assert np.isnan(plain.scores[:3]).all()


def test_what_was_never_written_is_never_read(network: Network) -> None:
    memory = heard(network)
    memory.cross_cache[:, :, :, :, 30:] = np.nan
    assert np.isfinite(logits_of(network, memory, [row_of(0, 0, 5, n_positions=30)])).all()
    assert np.isnan(logits_of(network, memory, [row_of(0, 0, 5, n_positions=31)])).any()


@settings(max_examples=6, deadline=None)
@given(st.integers(1, 16), st.sampled_from([7, 50, 100]), st.integers(0, 9))
def test_a_decode_is_the_same_for_any_rows_and_sms(network: Network, max_rows: int, n_of_sm: int, seed: int) -> None:
    request = Request((1, 2, 3), 8, 300, inverse_temperature=0.5, seed=seed)
    expected = run_requests(network, heard(network), [request], BITMAPS, max_rows=1)
    tokens = [record.token for record in expected if record.kind is RecordKind.TOKEN]
    ranges = [(first, min(n_of_sm, N_TOKENS - first)) for first in range(0, N_TOKENS, n_of_sm)]
    draft = (*tokens[:2], 4, *tokens[3:])
    found = run_requests(
        network, heard(network), [replace(request, draft=draft)], BITMAPS, max_rows=max_rows, ranges=ranges
    )
    assert [record.token for record in found] == [record.token for record in expected]


def test_a_step_that_begins_without_the_embedding_is_refused(network: Network) -> None:
    with pytest.raises(CompileError, match="evaluate: 0.attention: the first op reads the embedding"):
        network_of(network.ops[1:2], network.sizes, {})
