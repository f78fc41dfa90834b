"""The threads that compute, so that the event loop never does: one owns the engines, one each detector.

Knows threads and engines. Does not know sessions or sockets; what to compute, and in which order, is decided elsewhere.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from streaming.engine import Chunk, DecodeOptions, EngineStream, SpeechEngine, StreamWarning
from streaming.transcript import Hypothesis
from vad.detector import DetectorState, SpeechDetector
from vad.turn import TurnDetector

Result = TypeVar("Result")
StreamKey = tuple[str, int]  # session id, stream id


class Worker:
    """Runs engines, the detector and the model of turns, if there is one, each on a thread of their own.

    Calls of a kind are carried out in the order made.
    """

    def __init__(
        self,
        engines: Mapping[str, SpeechEngine],
        detector: SpeechDetector,
        turn_detector: TurnDetector | None = None,
    ) -> None:
        self._engines = engines
        self._detector = detector
        self._turn_detector = turn_detector
        self._streams: dict[StreamKey, tuple[SpeechEngine, EngineStream]] = {}  # touched by the engine thread only
        self._engine_thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._detector_thread = ThreadPoolExecutor(1, thread_name_prefix="detector")
        self._turn_thread = ThreadPoolExecutor(1, thread_name_prefix="turns")

    def stop(self) -> None:
        """Let what runs finish and end every thread; but for a pause that is judged nobody waits any more."""
        self._engine_thread.shutdown(cancel_futures=True)
        self._detector_thread.shutdown(cancel_futures=True)
        self._turn_thread.shutdown(wait=False, cancel_futures=True)

    async def open(self, key: StreamKey, model: str, options: DecodeOptions) -> tuple[StreamWarning, ...]:
        """Open an engine stream; answers with its warnings."""
        return await _on(self._engine_thread, lambda: self._open(key, model, options))

    async def close(self, key: StreamKey) -> None:
        """Close an engine stream. One that was never opened is no error."""
        await _on(self._engine_thread, lambda: self._close(key))

    async def close_all(self, session_id: str) -> None:
        """Close every engine stream of a session."""
        await _on(self._engine_thread, lambda: self._close_all(session_id))

    async def decode(self, model: str, batch: Sequence[tuple[StreamKey, Chunk]]) -> list[Hypothesis]:
        """One hypothesis for each chunk. All chunks are of streams of ``model``.

        Raises:
            Exception: whatever the engine raises, and ``ValueError`` if it does not answer for each chunk.
        """
        return await _on(self._engine_thread, lambda: self._decode(model, batch))

    async def score(
        self, batch: Sequence[tuple[DetectorState, NDArray[np.float32]]]
    ) -> list[tuple[NDArray[np.float32], DetectorState]]:
        """Probabilities and new state for each session's windows. Raises as ``decode`` does."""
        return await _on(self._detector_thread, lambda: _one_each(self._detector.score(batch), len(batch)))

    async def judge(self, samples: NDArray[np.float32]) -> float:
        """How likely the speaker is done whose turn ends in ``samples`` [n]. Raises what the model raises."""
        detector = self._turn_detector
        assert detector is not None, "no session asks where there is no model of turns"
        return await _on(self._turn_thread, lambda: detector.probability(samples))

    def _open(self, key: StreamKey, model: str, options: DecodeOptions) -> tuple[StreamWarning, ...]:
        engine = self._engines[model]
        stream = engine.open(options)
        self._streams[key] = (engine, stream)
        return stream.warnings

    def _close(self, key: StreamKey) -> None:
        entry = self._streams.pop(key, None)
        if entry is not None:
            engine, stream = entry
            engine.close(stream)

    def _close_all(self, session_id: str) -> None:
        for key in [key for key in self._streams if key[0] == session_id]:
            self._close(key)

    def _decode(self, model: str, batch: Sequence[tuple[StreamKey, Chunk]]) -> list[Hypothesis]:
        answers = self._engines[model].decode([(self._streams[key][1], chunk) for key, chunk in batch])
        return _one_each(answers, len(batch))


def _one_each(answers: list[Result], n_asked: int) -> list[Result]:
    if len(answers) != n_asked:
        raise ValueError(f"{len(answers)} answers where {n_asked} were asked for")
    return answers


async def _on(thread: ThreadPoolExecutor, call: Callable[[], Result]) -> Result:
    return await asyncio.get_running_loop().run_in_executor(thread, call)
