"""How fast one client may send messages: a bucket that fills at a steady rate. Pure; the time is passed in."""


class Allowance:
    """Lets ``burst`` messages through at once and ``rate_per_s`` on average.

    Who sends more is read from later, which the client's own network slows it down by; nothing is lost.
    """

    def __init__(self, rate_per_s: float, burst: float, *, now_s: float) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._left = burst
        self._then_s = now_s

    def delay_s(self, now_s: float) -> float:
        """Take one message; how long to wait before the next is read."""
        self._left = min(self._burst, self._left + (now_s - self._then_s) * self._rate_per_s) - 1
        self._then_s = now_s
        return max(0.0, -self._left / self._rate_per_s)
