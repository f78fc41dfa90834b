"""What a start spent its time on, part by part.

Knows a clock and names. Does not know what is loaded.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Timeline:
    """Seconds by part, in the order of their beginning; a part that comes again adds to its first time."""

    def __init__(self, clock_s: Callable[[], float] = time.perf_counter) -> None:
        self._clock_s = clock_s
        self.seconds: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what is inside, also if it raises."""
        began_s = self._clock_s()
        self.seconds.setdefault(name, 0.0)
        try:
            yield
        finally:
            self.seconds[name] += self._clock_s() - began_s

    def __str__(self) -> str:
        return ", ".join(f"{name} {spent_s:.2f} s" for name, spent_s in self.seconds.items())
