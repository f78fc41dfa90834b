"""What a mask allows, what SMs find and pick together, and that draws follow the softmax."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megakernel import pick
from megakernel.isa import FaultKind
from megakernel.pick import (
    HeadPartial,
    Mask,
    Row,
    SelectError,
    allowed_tokens,
    gumbel,
    merge,
    partial_of,
    pick_of,
)
from tests.megakernel.small import BITMAPS, FEW_TOKENS, MARKED, PLAIN

END, MARK = FEW_TOKENS.end_token, FEW_TOKENS.mark_begin


def drawn(seed: int) -> NDArray[np.float32]:
    """Logits of all tokens."""
    return np.random.default_rng(seed).normal(scale=2, size=FEW_TOKENS.n_tokens).astype(np.float32)


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (Mask(True, text=True, end=True, mark_begin=45, mark_end=45), set(range(30)) - {3, 7}),
        (Mask(False, text=True, end=True, mark_begin=45, mark_end=45), set(range(31)) - {3}),
        (Mask(False, text=False, end=True, mark_begin=40, mark_end=45), {END, *range(40, 45)}),
        (Mask(True, text=False, end=False, mark_begin=31, mark_end=33), {31, 32}),
    ],
)
def test_bitmaps_lie_over_the_mask(mask: Mask, expected: set[int]) -> None:
    allowed = allowed_tokens(Row(0, 0, 0, mask, PLAIN), BITMAPS, FEW_TOKENS)
    assert set(np.flatnonzero(allowed)) == expected


# ---------------------------------------------------------------------- picks

ROW = Row(0, 5, 0, Mask(False, text=True, end=True, mark_begin=MARK, mark_end=45), MARKED)
ALL = np.ones(45, np.bool_)


def picked(logits: NDArray[np.float32], row: Row = ROW, allowed: NDArray[np.bool_] = ALL) -> pick.Pick:
    return pick_of(partial_of(logits, 0, row, allowed, FEW_TOKENS), row.request)


def test_markers_win_when_together_they_outweigh_the_best_text() -> None:
    logits = np.full(45, -10, np.float32)
    logits[8], logits[MARK:] = 0, -2.7
    assert picked(logits).token == 8
    logits[MARK:] = -2.6  # fourteen of them: log 14 - 2.6 > 0
    assert picked(logits).token == MARK
    assert picked(logits).logprob == pytest.approx(-math.log(14), abs=1e-6)


def test_a_log_probability_is_among_all_that_is_allowed() -> None:
    logits = drawn(1)
    logits[8] = 9
    allowed = ALL.copy()
    allowed[10:20] = False
    expected = 9 - math.log(np.exp(logits[allowed].astype(np.float64)).sum())
    assert picked(logits, allowed=allowed).logprob == pytest.approx(expected, abs=1e-5)


def test_of_equal_scores_the_lower_token_wins_and_text_before_a_marker() -> None:
    logits = np.zeros(45, np.float32)
    unmarked = replace(ROW, request=PLAIN)
    assert picked(logits, unmarked).token == 0
    halves = [partial_of(logits[first:][:15], first, unmarked, ALL, FEW_TOKENS) for first in (30, 0, 15)]
    assert pick_of(merge(halves), PLAIN).token == 0


@settings(deadline=None)
@given(st.integers(0, 999), st.lists(st.integers(0, 45), min_size=3, max_size=150).map(sorted))
def test_any_sharing_out_of_tokens_gives_the_same_pick(seed: int, cuts: list[int]) -> None:
    logits = drawn(seed)
    row = replace(ROW, request=replace(MARKED, watch_row=5, watch_token=9))
    whole = partial_of(logits, 0, row, ALL, FEW_TOKENS)
    bounds = [0, *cuts, 45]
    parts = [partial_of(logits[a:b], a, row, ALL, FEW_TOKENS) for a, b in zip(bounds, bounds[1:], strict=False)]
    merged = merge(parts)
    for name in ("text_score", "text_token", "text_logit", "text_max", "mark_score", "mark_token", "watched"):
        assert getattr(merged, name) == getattr(whole, name)
    for name in ("text_lse", "mark_lse", "all_lse"):
        assert getattr(merged, name) == pytest.approx(getattr(whole, name), abs=1e-5)


def test_an_sm_without_tokens_says_nothing() -> None:
    logits = drawn(0)
    whole = partial_of(logits, 0, ROW, ALL, FEW_TOKENS)
    assert partial_of(logits[:0], 45, ROW, ALL, FEW_TOKENS) == HeadPartial()
    assert merge([HeadPartial(), whole, HeadPartial()]) == whole


def test_a_partial_is_its_words() -> None:
    partial = partial_of(drawn(0), 0, ROW, ALL, FEW_TOKENS)
    assert HeadPartial.of_words(partial.words()) == partial
    assert HeadPartial.of_words(HeadPartial().words()) == HeadPartial()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_a_fault(bad: float) -> None:
    logits = np.zeros(45, np.float32)
    logits[12] = bad
    with pytest.raises(SelectError) as caught:
        picked(logits, replace(ROW, request=PLAIN))
    assert caught.value.kind is FaultKind.NOT_FINITE


def test_nothing_allowed_is_a_fault() -> None:
    with pytest.raises(SelectError, match="best score -inf"):
        picked(np.zeros(45, np.float32), allowed=~ALL)


def test_log_add_exp_is_exact_and_does_not_mind_the_order() -> None:
    for a, b in [(0.0, 0.0), (-3.5, 12.0), (80.0, -200.0)]:
        assert pick.log_add_exp(a, b) == pick.log_add_exp(b, a) == pytest.approx(np.logaddexp(a, b), abs=1e-6)
    assert pick.log_add_exp(-math.inf, -math.inf) == -math.inf
    assert pick.log_add_exp(-math.inf, 2.0) == 2.0


# ---------------------------------------------------------------------- sampling


def test_noise_is_gumbels_and_finite() -> None:
    noise = np.concatenate([gumbel(seed, 3, np.arange(50_000, dtype=np.uint32)) for seed in range(4)])
    assert np.isfinite(noise).all()
    assert noise.mean() == pytest.approx(0.5772, abs=0.015)
    assert noise.var() == pytest.approx(math.pi**2 / 6, abs=0.03)


def test_noise_hangs_on_seed_position_and_token() -> None:
    tokens = np.arange(1000, dtype=np.uint32)
    one = gumbel(1, 1, tokens)
    assert (one == gumbel(1, 1, tokens)).all()
    for other in (gumbel(2, 1, tokens), gumbel(1, 2, tokens), gumbel(1, 1, tokens + np.uint32(1))):
        assert abs(np.corrcoef(one, other)[0, 1]) < 0.1
    assert (one[5:] == gumbel(1, 1, tokens[5:])).all()  # an SM draws for its own tokens only


def test_the_hash_is_that_of_whole_numbers_modulo_two_to_the_32() -> None:
    hashed = pick._mix(np.array([0, 1, 0xFFFFFFFF], np.uint32))
    assert [int(x) for x in hashed] == [_mix_by_hand(x) for x in (0, 1, 0xFFFFFFFF)]


def _mix_by_hand(x: int) -> int:
    x = (x ^ x >> 16) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ x >> 15) * 0x846CA68B & 0xFFFFFFFF
    return x ^ x >> 16


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_tokens_are_drawn_from_the_softmax(temperature: float) -> None:
    n_draws = 4000
    logits = np.full(45, -30, np.float32)
    logits[10:14] = [0.0, -0.5, -1.0, -2.0]
    request = replace(PLAIN, inverse_temperature=1 / temperature, seed=11)
    counts = np.zeros(4)
    for position in range(n_draws):
        counts[picked(logits, replace(ROW, position=position, request=request)).token - 10] += 1
    weights = np.exp(logits[10:14] / temperature)
    expected = n_draws * weights / weights.sum()
    assert ((counts - expected) ** 2 / expected).sum() < 16.3  # chi square, 3 degrees of freedom, 1 in 1000
