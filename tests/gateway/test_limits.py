"""The bucket that bounds a client's messages."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.limits import Allowance


def test_a_burst_passes_and_what_is_more_waits() -> None:
    allowance = Allowance(10.0, 5.0, now_s=0.0)
    assert [allowance.delay_s(0.0) for _ in range(5)] == [0.0] * 5
    assert allowance.delay_s(0.0) == 0.1
    assert allowance.delay_s(0.0) == 0.2


def test_a_pause_fills_the_bucket_and_never_over_its_brim() -> None:
    allowance = Allowance(10.0, 5.0, now_s=0.0)
    assert sum(allowance.delay_s(1_000.0) == 0.0 for _ in range(20)) == 5


@given(st.lists(st.floats(0, 0.3), min_size=20, max_size=200))
def test_whoever_waits_as_told_never_exceeds_rate_and_burst(gaps_s: list[float]) -> None:
    allowance = Allowance(10.0, 5.0, now_s=0.0)
    now_s = 0.0
    for n_sent, gap_s in enumerate(gaps_s):
        assert n_sent <= 5 + 10 * now_s + 1e-6
        now_s += gap_s
        now_s += allowance.delay_s(now_s)
