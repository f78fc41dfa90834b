"""Time by part: order, sums and parts that raise."""

from collections.abc import Callable

import pytest

from models.timeline import Timeline


def clock(*readings_s: float) -> Callable[[], float]:
    return iter(readings_s).__next__


def test_parts_stand_in_order_and_one_that_comes_again_adds_up() -> None:
    timeline = Timeline(clock(0.0, 1.0, 1.0, 1.5, 2.0, 4.0))
    for name in ("import", "weights", "import"):
        with timeline.part(name):
            pass
    assert str(timeline) == "import 3.00 s, weights 0.50 s"


def test_a_part_that_raises_has_taken_its_time_all_the_same() -> None:
    timeline = Timeline(clock(1.0, 3.0))
    with pytest.raises(ZeroDivisionError), timeline.part("division"):
        1 / 0  # noqa: B018  # its error is the point
    assert timeline.seconds == {"division": 2.0}
