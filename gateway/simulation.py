"""One session against an engine on a virtual clock: what a client would see, and when, without sockets or waiting.

For tests (any packet cuts, any engine delay) and for measuring policies: an hour of speech "in real time" takes only
what its decodes take. Does not model the network, nor other sessions.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from gateway.effects import Close, CloseStream, Effect, OpenStream, Resume, Send
from gateway.messages import ClientMessage, ServerMessage
from gateway.session import DecodeJob, Session
from streaming.engine import EngineStream, SpeechEngine
from streaming.transcript import Hypothesis
from vad.detector import SpeechDetector


@dataclass(frozen=True, slots=True)
class Seen:
    """A message or close, and when the client saw it."""

    at_s: float
    message: ServerMessage | Close


@dataclass(frozen=True, slots=True)
class Decoded:
    """One decode: when it began, how long it took."""

    at_s: float
    job: DecodeJob
    cost_s: float


class Simulation:
    """Feeds ``session`` and keeps what comes of it in ``seen`` and ``decodes``."""

    def __init__(
        self,
        session: Session,
        engine: SpeechEngine,
        detector: SpeechDetector,
        cost_s: Callable[[DecodeJob], float] | None = None,
    ) -> None:
        """``cost_s`` says how long a decode takes; without it a decode takes no time."""
        self.session = session
        self.seen: list[Seen] = []
        self.decodes: list[Decoded] = []
        self._engine = engine
        self._detector = detector
        self._cost_s = cost_s or (lambda job: 0.0)
        self._streams: dict[int, EngineStream] = {}
        self._due: list[tuple[float, int, Callable[[float], list[Effect]]]] = []
        self._order = itertools.count()
        self._is_decoding = False

    def run(self, inputs: Iterable[tuple[float, ClientMessage]]) -> list[Seen]:
        """Play ``inputs`` (time, message), in order of time, until nothing more happens."""
        for at_s, message in inputs:
            self._run_until(at_s)
            self._carry_out(self.session.receive(message, at_s), at_s)
        self._run_until(float("inf"))
        return self.seen

    def _run_until(self, limit_s: float) -> None:
        while True:
            wake_s = self.session.next_wake_s
            next_s = min(self._due[0][0] if self._due else float("inf"), wake_s if wake_s is not None else float("inf"))
            if next_s > limit_s or next_s == float("inf"):
                return
            if self._due and self._due[0][0] <= next_s:
                at_s, _, happen = heapq.heappop(self._due)
                self._carry_out(happen(at_s), at_s)
            else:
                self._carry_out(self.session.wake(next_s), next_s)

    def _carry_out(self, effects: list[Effect], now_s: float) -> None:
        for effect in effects:
            match effect:
                case Send(message):
                    self.seen.append(Seen(now_s, message))
                case Close():
                    self.seen.append(Seen(now_s, effect))
                case OpenStream(stream_id, _, options):
                    self._streams[stream_id] = self._engine.open(options)
                case CloseStream(stream_id):
                    self._engine.close(self._streams.pop(stream_id))
                case Resume():
                    raise ValueError("a simulation has one session, so nothing to resume")
        while (work := self.session.windows_to_score()) is not None:
            [(probabilities, state)] = self._detector.score([work])
            self._carry_out(self.session.scored(probabilities, state, now_s), now_s)
        self._decode_if_due(now_s)

    def _decode_if_due(self, now_s: float) -> None:
        if self._is_decoding or (job := self.session.next_decode()) is None:
            return
        self._is_decoding = True
        finish = self._finisher(job)
        cost_s = self._cost_s(job)
        self.decodes.append(Decoded(now_s, job, cost_s))
        heapq.heappush(self._due, (now_s + cost_s, next(self._order), finish))

    def _finisher(self, job: DecodeJob) -> Callable[[float], list[Effect]]:
        try:
            [hypothesis] = self._engine.decode([(self._streams[job.stream_id], job.chunk)])
        except Exception as error:  # noqa: BLE001  # whatever an engine raises, a session must survive
            return self._answer(None, repr(error))
        return self._answer(hypothesis, "")

    def _answer(self, hypothesis: Hypothesis | None, failure: str) -> Callable[[float], list[Effect]]:
        def happen(now_s: float) -> list[Effect]:
            self._is_decoding = False
            if hypothesis is None:
                return self.session.decode_failed(failure, now_s)
            return self.session.decoded(hypothesis, now_s)

        return happen
