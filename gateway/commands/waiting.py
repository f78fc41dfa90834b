"""A sign of life on the terminal while something takes its time and can't say how far it is."""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

_TICK_S = 0.2
_CLEAR_LINE = "\r\x1b[2K"


@contextmanager
def waiting(what: str, *, out: TextIO = sys.stderr) -> Iterator[None]:
    """Show ``what`` and the seconds it has taken, as long as the block runs; nothing unless ``out`` is a terminal."""
    if not out.isatty():
        yield
        return
    is_over = threading.Event()
    ticker = threading.Thread(target=_tick, args=(what, out, is_over), daemon=True)
    ticker.start()
    try:
        yield
    finally:
        is_over.set()
        ticker.join()
        out.write(_CLEAR_LINE)
        out.flush()


def _tick(what: str, out: TextIO, is_over: threading.Event) -> None:
    began_s = time.monotonic()
    while not is_over.wait(_TICK_S):
        out.write(f"{_CLEAR_LINE}{what} … {time.monotonic() - began_s:.0f} s")
        out.flush()
