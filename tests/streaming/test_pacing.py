"""When a partial is due."""

from hypothesis import given
from hypothesis import strategies as st

from streaming.pacing import Pacing, partial_is_due

PACING = Pacing(first_partial_samples=8_000, partial_interval_samples=16_000)


def test_the_first_partial_comes_early_and_later_ones_at_the_interval() -> None:
    assert not partial_is_due(7_999, 0, PACING)
    assert partial_is_due(8_000, 0, PACING)
    assert not partial_is_due(23_999, 8_000, PACING)
    assert partial_is_due(24_000, 8_000, PACING)


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_a_span_that_was_just_decoded_is_not_due(heard: int, more: int) -> None:
    if heard:
        assert not partial_is_due(heard, heard, PACING)
        assert partial_is_due(heard + more, heard, PACING) == (more >= 16_000)
