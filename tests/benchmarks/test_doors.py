"""The doors' costs: what the intervals say, and that both sides' clients reach the server."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.doors import FRAME_S, NATIVE, TURN_FRAMES, compare, median_and_interval, recipes
from gateway.session import STALL_S

N_SESSIONS = 2


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=100))
def test_the_median_lies_inside_its_interval(values: list[float]) -> None:
    median, low, high = median_and_interval(np.array(values))
    assert min(values) <= low <= median <= high <= max(values)


def test_the_interval_holds_the_true_median_as_often_as_it_says() -> None:
    random = np.random.default_rng(0)
    n_held = 0
    for _ in range(400):
        _, low, high = median_and_interval(random.lognormal(0.0, 0.1, 48))
        n_held += low <= 1.0 <= high
    assert n_held >= 0.93 * 400


@pytest.mark.e2e
@pytest.mark.parametrize("name", ["Deepgram, binary", "OpenAI, base64, 24 kHz"])
def test_clients_of_both_sides_take_turns(name: str) -> None:
    [recipe] = [recipe for recipe in recipes() if recipe.name == name]
    found = compare(recipe, N_SESSIONS, 2)
    assert found.native_us.shape == found.other_us.shape == (2,)
    assert (found.native_us > 0).all() and (found.other_us > 0).all()


def test_who_waits_for_two_turns_of_the_other_side_has_not_stalled() -> None:
    assert 2 * TURN_FRAMES * FRAME_S < 0.7 * STALL_S


def test_the_native_protocol_is_compared_with_itself_first() -> None:
    assert recipes()[0].name == NATIVE
