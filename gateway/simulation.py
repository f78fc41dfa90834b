"""Sessions against an engine on a virtual clock: what a client would see, and when, without sockets or waiting.

For tests (any packet cuts, any engine delay) and for measuring policies: an hour of speech "in real time" takes only
what its decodes take. ``Simulation`` is one session, ``DoorSimulation`` a door with the sessions it opens. Does not
model the network, nor that sessions wait for each other.
"""

import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.doors.door import Door, DoorEffect, Drop, Follow, Frame, Leave, Open, Publish, Refuse, Say, Tell
from gateway.effects import Close, CloseStream, Effect, OpenStream, Resume, Said, Send, SentencePaused, UtteranceOver
from gateway.messages import Input, ServerMessage
from gateway.session import DecodeJob, Session
from streaming.engine import EngineStream, SpeechEngine
from streaming.transcript import Hypothesis
from vad.detector import SpeechDetector
from vad.turn import TurnDetector


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
        *,
        hear: Callable[[Said, float], None] = lambda said, now_s: None,
        turn_detector: TurnDetector | None = None,
    ) -> None:
        """``cost_s`` says how long a decode takes; without it a decode takes no time. ``hear`` is told all at once.

        ``turn_detector`` judges the pauses of a session that has a model of turns.
        """
        self.session = session
        self.seen: list[Seen] = []
        self.decodes: list[Decoded] = []
        self._engine = engine
        self._detector = detector
        self._cost_s = cost_s or (lambda job: 0.0)
        self._hear = hear
        self._turn_detector = turn_detector
        self._streams: dict[int, EngineStream] = {}
        self._due: list[tuple[float, int, Callable[[float], list[Effect]]]] = []
        self._order = itertools.count()
        self._is_decoding = False

    def run(self, inputs: Iterable[tuple[float, Input]]) -> list[Seen]:
        """Play ``inputs`` (time, message), in order of time, until nothing more happens."""
        for at_s, message in inputs:
            self._run_until(at_s)
            self.tell(message, at_s)
        self._run_until(float("inf"))
        return self.seen

    def tell(self, message: Input, now_s: float) -> None:
        """Give the session a message now."""
        self.carry_out(self.session.receive(message, now_s), now_s)

    @property
    def next_s(self) -> float:
        """When something happens next by itself; infinity for never."""
        wake_s = self.session.next_wake_s
        return min(self._due[0][0] if self._due else float("inf"), wake_s if wake_s is not None else float("inf"))

    def step(self) -> None:
        """Let what is due at ``next_s`` happen."""
        now_s = self.next_s
        if self._due and self._due[0][0] <= now_s:
            _, _, happen = heapq.heappop(self._due)
            self.carry_out(happen(now_s), now_s)
        else:
            self.carry_out(self.session.wake(now_s), now_s)

    def _run_until(self, limit_s: float) -> None:
        while (next_s := self.next_s) <= limit_s and next_s != float("inf"):
            self.step()

    def carry_out(self, effects: list[Effect], now_s: float) -> None:
        """Do what the session wants done, and offer its work."""
        for effect in effects:
            match effect:
                case Send(message):
                    self.seen.append(Seen(now_s, message))
                    self._hear(message, now_s)
                case Close():
                    self.seen.append(Seen(now_s, effect))
                    self._hear(effect, now_s)
                case UtteranceOver() | SentencePaused():
                    self._hear(effect, now_s)
                case OpenStream(stream_id, _, options):
                    self._streams[stream_id] = self._engine.open(options)
                case CloseStream(stream_id):
                    self._engine.close(self._streams.pop(stream_id))
                case Resume():
                    raise ValueError("a simulation has one session, so nothing to resume")
        while (work := self.session.windows_to_score()) is not None:
            [(probabilities, state)] = self._detector.score([work])
            self.carry_out(self.session.scored(probabilities, state, now_s), now_s)
        if (samples := self.session.pause_to_judge()) is not None:
            probability = None if self._turn_detector is None else self._turn_detector.probability(samples)
            self.carry_out(self.session.judged(probability, now_s), now_s)
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


@dataclass(frozen=True, slots=True)
class Told:
    """A frame that a door sends, or its close, and when."""

    at_s: float
    frame: Frame | Close


@dataclass(frozen=True, slots=True)
class Published:
    """What a door has published, and when."""

    at_s: float
    event: Mapping[str, Any]  # Any: JSON


class DoorSimulation:
    """Feeds ``door`` and keeps what comes of it in ``told``; ``sessions`` are those it opened, by track."""

    def __init__(self, door: Door, open_session: Callable[[float, Callable[[Said, float], None]], Simulation]) -> None:
        """``open_session`` makes the simulation of a session that begins at a time, for one who hears it."""
        self.told: list[Told] = []
        self.published: list[Published] = []
        self.sessions: dict[int, Simulation] = {}
        self._door = door
        self._open_session = open_session
        self._wants: list[tuple[float, DoorEffect]] = []

    def run(self, frames: Iterable[tuple[float, Frame]], *, is_cut: bool = False) -> list[Told]:
        """Play ``frames`` (time, frame), in order of time; at the end the client waits, or ``is_cut`` off."""
        last_s = 0.0
        self._carry_out(self._door.opened(0.0), 0.0)
        for at_s, frame in frames:
            self._run_until(at_s)
            last_s = at_s
            self._carry_out(self._door.receive(frame, at_s), at_s)
        if is_cut:
            self._carry_out(self._door.peer_gone(last_s), last_s)
        self._run_until(float("inf"))
        return self.told

    def _run_until(self, limit_s: float) -> None:
        while not self._is_closed:
            wake_s = self._door.next_wake_s
            first = min(self.sessions.values(), key=lambda session: session.next_s, default=None)
            session_s = first.next_s if first is not None else float("inf")
            next_s = min(session_s, wake_s if wake_s is not None else float("inf"))
            if next_s > limit_s or next_s == float("inf"):
                return
            if first is not None and session_s <= next_s:
                first.step()
                self._carry_out([], next_s)
            else:
                self._carry_out(self._door.wake(next_s), next_s)

    @property
    def _is_closed(self) -> bool:
        return bool(self.told) and isinstance(self.told[-1].frame, Close)

    def _carry_out(self, effects: Sequence[DoorEffect], now_s: float) -> None:
        self._wants += [(now_s, effect) for effect in effects]
        while self._wants:
            at_s, effect = self._wants.pop(0)
            self._carry_out_one(effect, at_s)

    def _carry_out_one(self, effect: DoorEffect, now_s: float) -> None:
        match effect:
            case Say(frame):
                self.told.append(Told(now_s, frame))
            case Close():
                self.told.append(Told(now_s, effect))
            case Open(track):
                self.sessions[track] = self._open_session(now_s, self._ear(track))
            case Tell(track, message):
                if track in self.sessions:
                    self.sessions[track].tell(message, now_s)
            case Refuse(track, error):
                session = self.sessions[track]
                session.carry_out(session.session.refuse(error), now_s)
            case Publish(_, event):
                self.published.append(Published(now_s, event))
            case Follow():
                raise ValueError("a simulation has one connection, so nobody to follow")
            case Leave(track) | Drop(track):
                self.sessions.pop(track, None)

    def _ear(self, track: int) -> Callable[[Said, float], None]:
        def hear(said: Said, now_s: float) -> None:
            self._wants += [(now_s, effect) for effect in self._door.heard(track, said, now_s)]

        return hear
