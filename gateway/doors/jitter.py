"""Telephone frames put back in order: late, doubled and missing ones, and the holes that silence suppression leaves.

Knows numbers, timestamps and how long a frame lasts. A hole becomes silence of the same length, so that the clock of
the audio stays the clock of the call. Does not know carriers, nor of codecs more than the byte that is silence.
"""

from collections.abc import Callable

WINDOW_S = 0.16  # how long a missing frame is waited for
USUAL_FRAME_S = 0.02
MAX_WAITING = 64  # frames: empty ones fill no window
MAX_HOLE_S = 30.0  # a longer hole is a clock that jumped, not silence
HOLE_TOLERANCE_S = 0.1  # by which timestamps may run ahead of the audio before it counts as a hole


class Reorderer:
    """One track's frames."""

    def __init__(self, bytes_per_s: int, silence: bytes, decode: Callable[[bytes], bytes] | None = None) -> None:
        """``silence`` is one sample of it. ``decode`` is given the frames of a codec in order, each once."""
        self._bytes_per_s = bytes_per_s
        self._silence = silence
        self._decode = decode
        self._decoded_bytes = round(USUAL_FRAME_S * bytes_per_s)  # of the frame decoded last
        self._next: int | None = None  # number of the frame that follows
        self._waiting: dict[int, bytes] = {}
        self._first_ms: int | None = None  # timestamp at which the audio began
        self._n_bytes = 0

    def push(self, data: bytes, number: int | None, timestamp_ms: int | None) -> bytes:
        """Take a frame; the audio that is in order now. Without a number frames come as they come."""
        if number is None:
            return self._in_time(self._decoded(data), timestamp_ms)
        if self._next is None:
            self._next = number
        if number < self._next or number in self._waiting:
            return b""  # doubled, or too late
        self._waiting[number] = data
        return self._in_order(timestamp_ms if number == self._next else None)

    def flush(self) -> bytes:
        """What still waits, for nothing comes any more."""
        return self._in_order(None, window_s=0.0)

    def _in_order(self, timestamp_ms: int | None, window_s: float = WINDOW_S) -> bytes:
        out = b""
        while self._waiting and self._next is not None:
            if self._next in self._waiting:
                out += self._in_time(self._decoded(self._waiting.pop(self._next)), timestamp_ms)
                timestamp_ms = None
                self._next += 1
            elif self._waiting_s() > window_s or len(self._waiting) > MAX_WAITING:
                n_missing = min(self._waiting) - self._next
                n_bytes = self._n_bytes_of(next(iter(self._waiting.values())))
                out += self._count(self._silent(min(n_missing * n_bytes, int(MAX_HOLE_S * self._bytes_per_s))))
                self._next += n_missing
            else:
                break
        return out

    def _waiting_s(self) -> float:
        return sum(map(self._n_bytes_of, self._waiting.values())) / self._bytes_per_s

    def _n_bytes_of(self, frame: bytes) -> int:
        """Of a frame that waits: those of a codec are as long as the last one."""
        return len(frame) if self._decode is None else self._decoded_bytes

    def _decoded(self, frame: bytes) -> bytes:
        if self._decode is None:
            return frame
        data = self._decode(frame)
        self._decoded_bytes = len(data) or self._decoded_bytes
        return data

    def _in_time(self, data: bytes, timestamp_ms: int | None) -> bytes:
        """``data`` behind as much silence as its timestamp says that there was."""
        if timestamp_ms is None:
            return self._count(data)
        heard_s = self._n_bytes / self._bytes_per_s
        hole_s = 0.0 if self._first_ms is None else (timestamp_ms - self._first_ms) / 1_000 - heard_s
        if self._first_ms is None or abs(hole_s) >= MAX_HOLE_S:  # or a clock that jumped: it counts from here on
            self._first_ms, hole_s = timestamp_ms - round(heard_s * 1_000), 0.0
        if hole_s <= HOLE_TOLERANCE_S:
            return self._count(data)
        return self._count(self._silent(int(hole_s * self._bytes_per_s)) + data)

    def _silent(self, n_bytes: int) -> bytes:
        return self._silence * (n_bytes // len(self._silence))

    def _count(self, data: bytes) -> bytes:
        self._n_bytes += len(data)
        return data
