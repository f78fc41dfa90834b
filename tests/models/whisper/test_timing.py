"""The time warp against the plain recurrence, the filter against numpy's median, and times from made-up attention."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays
from numpy.typing import NDArray

from models.whisper import timing


def plain_cost(cost: NDArray[np.float32]) -> float:
    """Cost of the cheapest path, by the textbook recurrence."""
    n_rows, n_columns = cost.shape
    total = np.full((n_rows + 1, n_columns + 1), np.inf)
    total[0, 0] = 0
    for row in range(n_rows):
        for column in range(n_columns):
            before = min(total[row, column], total[row, column + 1], total[row + 1, column])
            total[row + 1, column + 1] = cost[row, column] + before
    return float(total[-1, -1])


def path_cost(cost: NDArray[np.float32], starts: NDArray[np.int64]) -> float:
    """Cost of the path with these starts: each row runs to just before the next start, or to it if that is cheaper."""
    total = 0.0
    ends = [*starts[1:], cost.shape[1] - 1]
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        is_last = row == len(starts) - 1
        whole = cost[row, start : end + 1].sum()
        total += whole if is_last or start == end else min(whole, cost[row, start:end].sum())
    return total


matrices = st.tuples(st.integers(1, 8), st.integers(1, 12)).flatmap(
    lambda shape: arrays.arrays(np.float32, shape, elements=st.integers(-8, 8).map(float))
)


@settings(max_examples=200, deadline=None)
@given(matrices)
def test_the_warp_finds_a_path_as_cheap_as_the_textbooks(cost: NDArray[np.float32]) -> None:
    starts = timing.warp(cost)
    assert starts[0] == 0
    assert (np.diff(starts) >= 0).all()
    assert path_cost(cost, starts) == plain_cost(cost)


@given(st.integers(2, 9).flatmap(lambda n: arrays.arrays(np.float32, (2, n), elements=st.floats(-4, 4, width=16))))
def test_the_filter_is_numpys_median_of_mirrored_neighbours(values: NDArray[np.float32]) -> None:
    padded = np.pad(values, [(0, 0), (1, 1)], mode="reflect")
    expected = [[np.median(row[i : i + 3]) for i in range(values.shape[1])] for row in padded]
    found = timing.median_of_three(torch.from_numpy(values))
    np.testing.assert_array_equal(found.numpy(), np.array(expected, np.float32))


def test_a_row_of_one_value_stays_as_it_is() -> None:
    assert torch.equal(timing.median_of_three(torch.ones(2, 1)), torch.ones(2, 1))


def attention(spans: list[tuple[int, int]], *, n_frames: int) -> NDArray[np.float32]:
    """Of three heads that look at ``spans``."""
    scores = np.random.default_rng(0).normal(size=(3, len(spans), n_frames)).astype(np.float32)
    for row, (start, end) in enumerate(spans):
        scores[:, row, start:end] += 8
    return timing.attention_of(torch.from_numpy(scores)).numpy()


def test_tokens_lie_where_their_heads_look() -> None:
    looked = attention([(0, 7), (7, 20), (20, 33), (33, 40)], n_frames=40)
    starts, ends = timing.token_spans(looked, n_tokens=3)
    assert np.abs(starts - [0, 7, 20]).max() <= 1
    assert np.abs(ends - [7, 20, 33]).max() <= 1


def test_a_pause_before_a_token_is_not_part_of_it() -> None:
    starts, _ = timing.token_spans(attention([(12, 18), (30, 36), (36, 40)], n_frames=40), n_tokens=2)
    assert np.abs(starts - [12, 30]).max() <= 2


def test_without_a_row_behind_it_the_last_token_ends_with_the_window() -> None:
    _, ends = timing.token_spans(attention([(0, 10), (10, 20)], n_frames=40), n_tokens=2)
    assert ends[-1] == 40
