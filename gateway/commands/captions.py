"""A session's events as a person or a program reads them: live captions on a terminal, or one JSON object a line.

Knows events and how a terminal is written. Does not know where the events come from.
"""

import dataclasses
import json
import sys
import time
import unicodedata
from collections.abc import Callable
from typing import Any, Protocol, TextIO

from gateway.client_events import SERVER_MESSAGES, ErrorEvent, Event, Final, Partial, Ready, WarningEvent

_DIM, _PLAIN, _CLEAR_LINE = "\x1b[2m", "\x1b[0m", "\r\x1b[2K"

_TYPE_NAMES = {kind: name for name, kind in SERVER_MESSAGES.items()}


class EventView(Protocol):
    """Shows a session's events."""

    def show(self, event: Event, *, sent_s: float) -> None:
        """Show one event; ``sent_s`` is how much audio had been sent when it came."""

    def close(self) -> None:
        """Nothing follows."""


class JsonLines:
    """One JSON object a line: the event's fields with ``type``, ``sent_s`` and ``received_s``."""

    def __init__(self, out: TextIO, *, now_s: Callable[[], float] = time.monotonic) -> None:
        """``received_s`` counts from here: make it when the first sample is due."""
        self._out = out
        self._now_s = now_s
        self._began_s = now_s()

    def show(self, event: Event, *, sent_s: float) -> None:
        """Write ``event``."""
        received_s = self._now_s() - self._began_s
        line = json_fields(event) | {"sent_s": round(sent_s, 3), "received_s": round(received_s, 3)}
        print(json.dumps(line, ensure_ascii=False), file=self._out, flush=True)

    def close(self) -> None:
        """Every line is complete already."""


class Captions:
    """Finals with their times, one a line; on a terminal the partial below them, settled words plain and others dim."""

    def __init__(self, out: TextIO, *, is_terminal: bool, columns: int, with_partials: bool = False) -> None:
        """Where ``out`` is no terminal, only finals are written, and each partial on its own line ``with_partials``."""
        self._out = out
        self._with_partials = with_partials
        self._shown = ""
        self._is_terminal = is_terminal
        self._columns = columns

    def show(self, event: Event, *, sent_s: float) -> None:
        """Show ``event`` if it has something for a reader."""
        match event:
            case Partial() if self._is_terminal:
                self._write(f"{_CLEAR_LINE}{partial_line(event, self._columns)}")
            case Partial() if self._with_partials and event.text != self._shown:
                self._shown = event.text
                self._write(f"  … {event.text}\n")
            case Final() if event.text:
                self._write(f"{self._cleared}{final_line(event)}\n")
            case Final():  # takes back a partial that turned out to be no words
                self._write(self._cleared)
            case WarningEvent() | ErrorEvent():
                self._write(self._cleared)
                print(f"{_TYPE_NAMES[type(event)]}: {event.code}: {event.message}", file=sys.stderr)

    def close(self) -> None:
        """Leave the cursor at the beginning of an empty line."""
        self._write(self._cleared)

    @property
    def _cleared(self) -> str:
        return _CLEAR_LINE if self._is_terminal else ""

    def _write(self, text: str) -> None:
        self._out.write(text)
        self._out.flush()


def json_fields(event: Event | Ready) -> dict[str, Any]:
    """The event as it was on the wire."""
    return {"type": _TYPE_NAMES[type(event)], **dataclasses.asdict(event)}


def final_line(final: Final) -> str:
    """A final with its times."""
    return f"[{clock(final.start_s)} – {clock(final.end_s)}] {final.text}"


def partial_line(partial: Partial, columns: int) -> str:
    """The end of a partial that fits one line of ``columns``, with tentative words dimmed."""
    committed = "".join(word.text for word in partial.words[: partial.n_committed]).lstrip()
    tentative = "".join(word.text for word in partial.words[partial.n_committed :])
    if not committed:
        tentative = tentative.lstrip()
    n_cut = _n_cut(committed + tentative, columns - 1)
    return f"{committed[n_cut:]}{_DIM}{tentative[max(0, n_cut - len(committed)) :]}{_PLAIN}"


def _n_cut(text: str, columns: int) -> int:
    """How many characters to drop from the left so that the rest fits; East Asian wide ones take two columns."""
    room = columns
    for index in range(len(text) - 1, -1, -1):
        room -= 2 if unicodedata.east_asian_width(text[index]) in "WF" else 1
        if room < 0:
            return index + 1
    return 0


def clock(time_s: float) -> str:
    """Minutes, seconds and tenths."""
    tenths = round(time_s * 10)
    return f"{tenths // 600:02}:{tenths // 10 % 60:02}.{tenths % 10}"
