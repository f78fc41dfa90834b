"""Messages for a reader that may be slow, sent over a pipe without ever waiting for it.

Two processes that wait for each other to read would wait for ever; so one of them never does. Linux only, as workers
are. Does not know what is sent.
"""

import select
from collections import deque
from multiprocessing.connection import Connection

MAX_WAITING = 10_000  # messages; of more the oldest are lost


class Outbox:
    """Messages in order, for one pipe."""

    def __init__(self, pipe: "Connection[bytes, bytes]") -> None:
        self._pipe = pipe
        self._poll = select.poll()
        self._poll.register(pipe.fileno(), select.POLLOUT)
        self._waiting: deque[bytes] = deque(maxlen=MAX_WAITING)

    @property
    def is_waiting(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._waiting)

    def put(self, data: bytes) -> None:
        """Send it, behind what waits already, now or in a later ``flush``."""
        self._waiting.append(data)
        self.flush()

    def flush(self) -> None:
        """Send what there is room for. A reader that is gone gets nothing more."""
        # A socket counts as writable while three quarters of its buffer are free: some 150 KB, more than any event has.
        try:
            while self._waiting and self._poll.poll(0):
                self._pipe.send_bytes(self._waiting[0])
                self._waiting.popleft()
        except OSError:
            self._waiting.clear()
