"""How the most streams are found, and what a caller takes for late."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from benchmarks.parakeet_capacity import HEAD, Callers, Level, _marked, climb
from streaming.engine import Chunk
from streaming.transcript import Hypothesis
from vad.audio import SpeechSpan

NOTHING_SPENT = {"n_calls": 0.0, "n_chunks": 0.0, "busy_s": 0.0, "listen_s": 0.0, "decode_s": 0.0}


class FakeFleet:
    """Late as soon as there are more than it can serve."""

    def __init__(self, n_served: int) -> None:
        self.n_served = n_served

    def measure(self, n_streams: int, seconds: float) -> Level:
        late_ms = np.full(100, 20.0 if n_streams <= self.n_served else 200.0)
        return Level(n_streams, late_ms, 0, seconds, 1, NOTHING_SPENT, [{"loop": 0.0, "engine": 0.0, "other": 0.0}])


@pytest.mark.parametrize("n_served", [0, 24, 60, 170, 1000])
def test_the_most_streams_lie_between_a_step_that_holds_and_one_that_does_not(n_served: int) -> None:
    levels = climb(FakeFleet(n_served), (1, 25, 50, 100, 200), 1.0)  # type: ignore[arg-type]
    most = max((level.n_streams for level in levels if level.holds), default=0)
    assert most <= n_served
    assert all(level.n_streams > n_served for level in levels if not level.holds)
    assert len(levels) <= 7


def test_a_row_has_the_columns_of_the_head_even_if_nothing_came() -> None:
    levels = [FakeFleet(1).measure(1, 1.0), Level(9, np.array([]), 0, 1.0, 1, NOTHING_SPENT, [])]
    n_columns = HEAD.split("\n")[1].count("|")
    assert [level.row().count("|") for level in levels] == [n_columns, n_columns]
    assert not levels[1].holds


def marked(end_sample: int, *, is_final: bool = False) -> str:
    chunk = Chunk(SpeechSpan(0, end_sample), np.zeros(end_sample, np.float32), is_final=is_final)
    words = _marked(Hypothesis((), None, None, 0), chunk).words
    return '{"type":"partial","text":"' + "".join(word.text for word in words) + '"}'


class Socket:
    def __init__(self, messages: list[str]) -> None:
        self.messages = messages

    async def __aiter__(self) -> AsyncIterator[str]:
        for message in self.messages:
            yield message


def test_what_waited_is_late_by_its_wait_and_the_first_of_an_utterance_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 1.5)
    said = [
        marked(8_000),  # the first
        marked(13_120),  # due at 0.82 s, in the packet that ends at 0.84 s
        '{"type":"ack"}',
        marked(20_000),  # due at 1.14 s, in the packet that ends at 1.16 s
        marked(21_000, is_final=True),  # a pause
        marked(30_000),
    ]
    callers = Callers([], b"", 640, 320, 0)
    socket: Any = Socket(said)
    asyncio.run(callers._listen(socket, 0.0))
    assert callers.late_ms == pytest.approx([660.0, 340.0])
