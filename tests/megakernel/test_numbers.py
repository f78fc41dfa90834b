"""bfloat16's rounding, and that a number's bits do not depend on what else a call computes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.typing import NDArray

from megakernel import numbers

FLOATS = arrays(np.float32, st.integers(1, 40), elements=st.floats(width=32))


def bf16(*shape: int, seed: int = 0, scale: float = 1.0) -> NDArray[np.float32]:
    drawn = np.random.default_rng(seed).normal(scale=scale, size=shape)
    return numbers.round_bf16(drawn.astype(np.float32))


def same_bits(a: NDArray[np.float32], b: NDArray[np.float32]) -> bool:
    return a.shape == b.shape and bool((np.ascontiguousarray(a).view(np.uint32) == b.view(np.uint32)).all())


@given(FLOATS)
def test_rounding_is_torchs(x: NDArray[np.float32]) -> None:
    expected = torch.from_numpy(x).bfloat16().float().numpy()
    np.testing.assert_array_equal(numbers.round_bf16(x), expected)


@given(arrays(np.float32, st.tuples(st.integers(1, 3), st.integers(1, 300)), elements=st.floats(-1e6, 1e6, width=32)))
def test_a_sum_in_order_is_rounded_behind_each_element(x: NDArray[np.float32]) -> None:
    expected = numbers.add_in_order(np.ascontiguousarray(x.T))
    assert same_bits(numbers.sum_in_order(x), expected)


@given(FLOATS)
def test_bits_and_pairs_come_back(x: NDArray[np.float32]) -> None:
    rounded = numbers.round_bf16(np.concatenate([x, x[::-1]]))
    np.testing.assert_array_equal(numbers.from_bits(numbers.to_bits(rounded)), rounded)
    np.testing.assert_array_equal(numbers.unpack_pairs(numbers.pack_pairs(rounded)), rounded)


def test_the_first_of_a_pair_lies_in_the_low_half() -> None:
    assert numbers.pack_pairs(np.array([1.0, -2.0], np.float32)).tolist() == [0xC0003F80]


def test_a_float_is_its_word() -> None:
    assert numbers.float_word(1.0) == 0x3F800000
    assert numbers.word_float(0xFF800000) == -math.inf


@pytest.mark.parametrize(("k", "n"), [(64, 2), (128, 4), (384, 4), (512, 8), (640, 4), (1280, 8), (5120, 8)])
def test_warps_share_k_in_whole_tiles(k: int, n: int) -> None:
    assert numbers.k_warps(k, 8) == n


@settings(deadline=None, max_examples=20)
@given(st.sampled_from([64, 128, 384]), st.integers(0, 4), st.integers(0, 2), st.integers(0, 99))
def test_a_linears_bits_do_not_depend_on_its_neighbours(k: int, row: int, granule: int, seed: int) -> None:
    x, weight = bf16(5, k, seed=seed), bf16(24, k, seed=seed + 1)
    own = slice(8 * granule, 8 * granule + 8)
    alone = numbers.linear_sums(x[row : row + 1], weight[own], 16)
    assert same_bits(alone, np.ascontiguousarray(numbers.linear_sums(x, weight, 16)[row : row + 1, own]))


def test_sums_go_on_from_where_they_were() -> None:
    x, weight = bf16(3, 96), bf16(8, 96, seed=1)
    first = numbers.accumulate(x[:, :32], weight[:, :32])
    assert same_bits(numbers.accumulate(x[:, 32:], weight[:, 32:], first), numbers.accumulate(x, weight))


def test_a_linear_is_close_to_the_exact_one() -> None:
    x, weight = bf16(3, 640), bf16(16, 640, seed=1)
    exact = x.astype(np.float64) @ weight.T.astype(np.float64)
    np.testing.assert_allclose(numbers.linear_sums(x, weight, 16), exact, atol=1e-4)


def test_statistics_are_those_of_a_layer_norm_and_a_rows_own() -> None:
    x = bf16(4, 384, scale=3.0) + np.float32(1)
    mean, rstd = numbers.row_stats(x, 1e-5)
    np.testing.assert_allclose(mean, x.mean(axis=1), rtol=1e-4)
    np.testing.assert_allclose(rstd, 1 / np.sqrt(x.var(axis=1) + 1e-5), rtol=1e-4)
    alone, _ = numbers.row_stats(x[2:3], 1e-5)
    assert same_bits(alone, mean[2:3])


def test_a_constant_row_has_no_negative_variance() -> None:
    _, rstd = numbers.row_stats(numbers.round_bf16(np.full((1, 128), 1e3, np.float32)), 1e-5)
    np.testing.assert_allclose(rstd, 1e5**0.5, rtol=1e-3)


def test_gelu_is_torchs() -> None:
    x = np.linspace(-9, 9, 1001, dtype=np.float32)
    expected = torch.nn.functional.gelu(torch.from_numpy(x).double()).numpy()
    np.testing.assert_allclose(numbers.gelu(x), expected, rtol=1e-6, atol=1e-30)


@pytest.mark.parametrize("n_positions", [1, 9, 16, 23])
def test_blocks_together_are_the_softmax(n_positions: int) -> None:
    q, keys, values = bf16(1, 64), bf16(n_positions, 64, seed=1), bf16(n_positions, 64, seed=2)
    blocks = []
    for begin in range(0, n_positions, 8):
        scores = numbers.block_scores(q, keys[begin : begin + 8])
        blocks.append(numbers.attend_block(scores, values[begin : begin + 8], np.array([scores.shape[1]])))
    largest, totals, mixed = (np.concatenate(parts) for parts in zip(*blocks, strict=True))
    weights = np.exp(q @ keys.T / 8)
    np.testing.assert_allclose(
        numbers.combine_blocks(largest, totals, mixed), (weights / weights.sum() @ values)[0], atol=0.02
    )


def test_a_row_sees_only_its_own_positions_whatever_lies_behind() -> None:
    q, keys, values = bf16(2, 64), bf16(12, 64, seed=1), bf16(12, 64, seed=2)
    together = numbers.attend_block(numbers.block_scores(q, keys), values, np.array([5, 12]))
    alone = numbers.attend_block(numbers.block_scores(q[:1], keys[:5]), values[:5], np.array([5]))
    assert all(same_bits(a, np.ascontiguousarray(b[:1])) for a, b in zip(alone, together, strict=True))
