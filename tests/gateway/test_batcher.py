"""Which decodes go next."""

from hypothesis import given
from hypothesis import strategies as st

from gateway.batcher import Waiting, next_batch
from gateway.session import Priority

ENTRIES = st.lists(
    st.builds(
        Waiting,
        key=st.integers(),
        model=st.sampled_from(["a", "b"]),
        priority=st.sampled_from(Priority),
        since_s=st.floats(0, 100),
    ),
    max_size=12,
)
MAX_BATCH = {"a": 1, "b": 3}


def test_nothing_waits() -> None:
    assert next_batch([], MAX_BATCH) == []


def test_finals_go_before_partials_that_wait_longer() -> None:
    partial = Waiting("p", "a", Priority.PARTIAL, 0.0)
    final = Waiting("f", "a", Priority.FINAL, 9.0)
    assert next_batch([partial, final], MAX_BATCH) == [final]


@given(ENTRIES)
def test_a_batch_is_of_one_model_within_its_bound_and_led_by_the_most_urgent(waiting: list[Waiting[int]]) -> None:
    batch = next_batch(waiting, MAX_BATCH)
    if not waiting:
        return
    first = batch[0]
    assert all((first.priority, first.since_s) <= (other.priority, other.since_s) for other in waiting)
    assert {entry.model for entry in batch} == {first.model}
    of_model = [entry for entry in waiting if entry.model == first.model]
    assert len(batch) == min(len(of_model), MAX_BATCH[first.model])


@given(ENTRIES)
def test_nobody_is_passed_over_for_one_who_came_later(waiting: list[Waiting[int]]) -> None:
    batch = next_batch(waiting, MAX_BATCH)
    for entry in batch:
        for other in waiting:
            if other.model == entry.model and other not in batch:
                assert (entry.priority, entry.since_s) <= (other.priority, other.since_s)
