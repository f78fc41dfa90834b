"""The shell around doors and sessions: sockets, timers and threads; carries out effects and decides nothing.

Everything here runs on the event loop; what computes runs on the worker's threads. Knows no model and no protocol: what
a client sends goes to its door, what a session says goes to the door of its connection.
"""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

import msgspec
import numpy as np
from msgspec import UnsetType
from numpy.typing import NDArray
from starlette.requests import HTTPConnection
from starlette.responses import JSONResponse
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.frames import CloseCode

from gateway.batcher import Waiting, next_batch
from gateway.call_log import CallLog
from gateway.config import Config
from gateway.doors.door import (
    AdmissionError,
    Door,
    DoorEffect,
    DoorKind,
    Drop,
    Follow,
    Frame,
    House,
    Knock,
    Leave,
    Open,
    Publish,
    Refuse,
    Say,
    Tell,
)
from gateway.effects import Close, CloseStream, Effect, OpenStream, Resume, Said, Send, SentencePaused, UtteranceOver
from gateway.errors import ClientError, ServerError
from gateway.keys import Keys
from gateway.limits import Allowance
from gateway.messages import Audio, Error, Hello, Input
from gateway.metrics import Metrics
from gateway.peers import Alone, Peers
from gateway.relay import connect_worker
from gateway.session import DecodeJob, ServedModel, Session, State
from gateway.timing import Timing
from gateway.worker import Worker
from vad.audio import seconds
from vad.detector import DetectorState, SpeechDetector

log = logging.getLogger("senseway")

MAX_OUTGOING = 512  # frames waiting for a client that does not read, superseded ones not counted
MAX_GREETING = 16  # connections beyond max_sessions that have not said hello yet
GOODBYE_TIMEOUT_S = 2.0  # for a last message to a client that may no longer read
RETRY_AFTER_S = 5  # what a client is told that finds no room
BURST_S = 4  # of messages at the highest rate that one client may send at once
CALL_LOG_TYPES = ("call_started", "final", "dtmf", "call_ended")
STUCK_S = 120.0  # no decode takes so long
LAG_INTERVAL_S = 0.25
SCORE_INTERVAL_S = 0.01  # at least so long from one batch for the detector to the next: many small ones cost more
JUDGE_WITHIN_S = 0.5  # how long a pause may wait for the model of turns


class PeerGoneError(Exception):
    """The other side of a transport is gone."""


class Transport(Protocol):
    """Frames from and to one client, however they travel."""

    async def receive(self) -> Frame:
        """The next frame. Raises ``PeerGoneError``."""

    async def send(self, frame: Frame) -> None:
        """Send a frame; waits while the client does not read. Raises ``PeerGoneError``."""

    async def close(self, close: Close) -> None:
        """End the connection from this side."""

    @property
    def is_open(self) -> bool:
        """Whether ``close`` has still to be said."""

    @property
    def may_idle(self) -> bool:
        """Whether a client that sends nothing is only waiting."""


class WebSocketTransport:
    """A WebSocket that was accepted."""

    may_idle = False

    def __init__(self, websocket: WebSocket) -> None:
        self._websocket = websocket

    async def receive(self) -> Frame:
        """See ``Transport``."""
        message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise PeerGoneError
        text: str | None = message.get("text")
        data: bytes = message.get("bytes") or b""
        return text if text is not None else data

    async def send(self, frame: Frame) -> None:
        """See ``Transport``."""
        try:
            if isinstance(frame, str):
                await self._websocket.send_text(frame)
            else:
                await self._websocket.send_bytes(frame)
        except WebSocketDisconnect as error:
            raise PeerGoneError from error

    async def close(self, close: Close) -> None:
        """See ``Transport``."""
        await self._websocket.close(close.code, close.reason)

    @property
    def is_open(self) -> bool:
        """See ``Transport``."""
        return self._websocket.application_state is WebSocketState.CONNECTED


class Connection:
    """One client: sends in order from a bounded queue, so that no session ever waits for a slow one."""

    def __init__(self, transport: Transport, door: Door, name: str, knock: Knock | None = None) -> None:
        self.transport = transport
        self.door = door
        self.name = name  # of the door, in figures
        self.knock = knock
        self.home: Path | None = None  # the worker that has the session, if it is not here
        self.has_opened = False  # a session, now or earlier
        self.follows: str | None = None  # a call, or all of them
        self.seats: dict[int, Seat] = {}  # by the door's track
        self.timer: asyncio.TimerHandle | None = None  # of the door
        self._outgoing: deque[Say | Close] = deque()
        self._max_outgoing = MAX_OUTGOING
        self._has_news = asyncio.Event()
        self.closing: Close | None = None  # nothing is sent after it
        self.is_gone = False  # the door knows that nothing reaches the client any more
        self.is_over = asyncio.Event()
        self.reading: asyncio.Timeout | None = None  # of the frame that is waited for
        self.sender = asyncio.create_task(self._send_all())  # done when nothing can be sent any more
        self.sender.add_done_callback(self._stop_reading)

    def _stop_reading(self, _: "asyncio.Task[None]") -> None:
        if self.reading is not None and not self.reading.expired():
            self.reading.reschedule(asyncio.get_running_loop().time())

    def make_room(self, n_frames: int) -> None:
        """Let ``n_frames`` more wait: those that a resume sends all at once, which no client can have read yet."""
        self._max_outgoing += n_frames

    def post(self, say: Say) -> bool:
        """Queue a frame; false if the client has not read for so long that there is no room."""
        if self.closing is not None or self.is_gone:
            return True
        if say.replaces is not None:
            self._forget_replaced(say.replaces)
        if len(self._outgoing) >= self._max_outgoing:
            return False
        self._outgoing.append(say)
        self._has_news.set()
        return True

    def _forget_replaced(self, key: Hashable) -> None:
        if any(isinstance(old, Say) and old.replaces == key for old in self._outgoing):
            self._outgoing = deque(old for old in self._outgoing if isinstance(old, Close) or old.replaces != key)

    def close(self, close: Close) -> None:
        """Close once everything queued has been sent."""
        if self.closing is None:
            self.closing = close
            self._outgoing.append(close)
            self._has_news.set()

    def hurry(self) -> None:
        """Drop what is queued: what follows is a goodbye, to be said whether or not the client still reads."""
        asyncio.get_running_loop().call_later(GOODBYE_TIMEOUT_S, self.sender.cancel)
        self._outgoing.clear()

    async def has_room(self) -> None:
        """Wait until every session wants audio."""
        for seat in list(self.seats.values()):
            await seat.has_room.wait()

    async def _send_all(self) -> None:
        """Send what is posted until the connection closes."""
        while True:
            while self._outgoing:
                item = self._outgoing.popleft()
                if isinstance(item, Close):
                    await self.transport.close(item)
                    return
                await self.transport.send(item.frame)
            self._has_news.clear()
            await self._has_news.wait()


class Seat:
    """A session with what it needs from the shell: its connection of the moment, its timer, its place in the queue."""

    def __init__(self, session: Session, connection: Connection, track: int) -> None:
        self.session = session
        self.connection: Connection | None = connection
        self.track = track
        self.timer: asyncio.TimerHandle | None = None
        self.has_room = asyncio.Event()  # set while the session wants audio
        self.waiting_since_s: float | None = None  # for its decode
        self.door = connection.name
        self.timing = Timing()
        self.counted_s = 0.0  # audio in the figures
        self.is_counted = False  # among the open sessions


class Server:
    """Every session of this process, and the two loops that feed the engines and the detector."""

    def __init__(
        self,
        models: Mapping[str, ServedModel],
        worker: Worker,
        detector: SpeechDetector,
        config: Config,
        keys: Keys | None = None,
        twilio_auth_token: str = "",
        turn_model: str | None = None,
        peers: Peers | None = None,
    ) -> None:
        self.models = models
        self.peers = peers or Alone()
        self.turn_model = turn_model
        self.house = House(
            cards={name: served.card for name, served in models.items()},
            gate=config.vad,
            session=config.session,
            is_strict=config.server.strict_options,
            twilio_auth_token=twilio_auth_token,
            has_turn_model=turn_model is not None,
            aliases=dict(alias.split("=", 1) for alias in config.model_aliases),
        )
        self.keys = keys or Keys()
        self.metrics = Metrics()
        self._worker = worker
        self._detector = detector
        self._config = config
        self._call_log = CallLog(Path(config.server.calls_file)) if config.server.calls_file else None
        self._decoding_since_s: float | None = None
        self._n_uploads = 0
        self._n_open = 0  # sessions that were greeted
        self._seats: dict[str, Seat] = {}
        self._decode_due = asyncio.Event()
        self._to_score: dict[Seat, None] = {}  # sessions that may have windows for the detector, in order
        self._score_due = asyncio.Event()
        self._judge_due = asyncio.Event()
        self._judging: asyncio.Future[float | None] | None = (
            None  # the pause that the model of turns is at, or was last
        )
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: set[Connection] = set()
        self._is_stopping = False
        self.metrics.watch("decode_queue_depth", "Sessions that wait for a decode", lambda: len(self._waiting()))
        self.metrics.watch("decode_queue_age_seconds", "How long the first of them waits", self._longest_wait_s)
        self.metrics.watch("backlog_seconds", "The most audio that one session holds", self._backlog_s)

    @property
    def n_sessions(self) -> int:
        """Sessions that live, connected or waiting to be resumed, those of other workers included."""
        return len(self._seats) + self.peers.n_sessions_elsewhere

    @property
    def max_upload_bytes(self) -> int:
        """Of a request with a recording."""
        return self._config.server.max_upload_mb << 20

    def readiness(self) -> str:
        """``ready``, or why no new client should be sent here."""
        if self._is_stopping:
            return "stopping"
        if self.is_stuck():
            return "stuck"
        return "full" if self._n_taken() >= self._config.server.max_sessions else "ready"

    def is_stuck(self) -> bool:
        """Whether one decode takes so long that nothing will come of it."""
        return self._decoding_since_s is not None and self._now_s() - self._decoding_since_s > STUCK_S

    def _n_taken(self) -> int:
        """Places taken: open sessions, and connections that may open one any moment."""
        n_to_come = self._n_uploads + sum(not connection.has_opened for connection in self._connections)
        return self._n_open + self.peers.n_sessions_elsewhere + n_to_come

    @contextmanager
    def taking_upload(self) -> Iterator[None]:
        """Keep a place for a request whose body is on its way."""
        self._n_uploads += 1
        try:
            yield
        finally:
            self._n_uploads -= 1

    def _longest_wait_s(self) -> float:
        now_s = self._now_s()
        return max((now_s - entry.since_s for entry in self._waiting()), default=0.0)

    def _backlog_s(self) -> float:
        return max((seat.session.retained_s for seat in self._seats.values()), default=0.0)

    async def _measure_lag(self) -> None:
        """How late timers are, all the time."""
        while True:
            due_s = self._now_s() + LAG_INTERVAL_S
            await asyncio.sleep(LAG_INTERVAL_S)
            self.metrics.loop_lag_seconds.observe(max(0.0, self._now_s() - due_s))

    def start(self) -> None:
        """Start feeding engines and detector. Needs a running event loop."""
        self._spawn(self._measure_lag())
        self._spawn(self._decode_forever())
        self._spawn(self._score_forever())
        self._spawn(self._judge_forever())

    async def dismiss(self) -> None:
        """Tell every client that the server stops, and wait a moment until they are told. Nobody is let in any more."""
        self._is_stopping = True
        for seat in self._seats.values():
            seat.has_room.set()
        for connection in self._connections:
            self._give_up(connection, ServerError("shutting_down", "the server stops; connect again later"))
        ended = [asyncio.ensure_future(connection.is_over.wait()) for connection in self._connections]
        if ended:
            _, late = await asyncio.wait(ended, timeout=GOODBYE_TIMEOUT_S)
            for waiting in late:
                waiting.cancel()

    async def stop(self) -> None:
        """Tell every client, and end what runs."""
        await self.dismiss()
        for seat in self._seats.values():
            if seat.timer is not None:
                seat.timer.cancel()
        if self._judging is not None:
            self._judging.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._worker.stop()
        if self._call_log is not None:
            self._call_log.close()

    # ------------------------------------------------------------------ connections

    async def serve(self, websocket: WebSocket, kind: DoorKind) -> None:
        """One WebSocket at a door of this kind, from handshake to close."""
        knock = knock_of(websocket)
        try:
            self.check(kind, knock)
            admission = kind.open_door(knock, self.house)
        except AdmissionError as error:
            await websocket.send_denial_response(self.refusal(kind, error, knock))
            return
        headers = [(name.encode(), value.encode()) for name, value in admission.headers.items()]
        await websocket.accept(admission.subprotocol, headers)
        await self.converse(WebSocketTransport(websocket), admission.door, kind.NAME, knock)

    def check(self, kind: DoorKind, knock: Knock) -> None:
        """Whether a client may come in at all, whatever it wants.

        Raises:
            AdmissionError: for a page of another origin, a wrong key, or because there is no room.
        """
        if not self._is_welcome(knock.headers):
            raise AdmissionError(
                403,
                "origin_not_allowed",
                "pages of another origin may not connect; server.allowed_origins names those that may",
            )
        if not self.keys.admit(kind.key_of(knock), knock.at_unix_s):
            raise AdmissionError(401, "invalid_api_key", "no key of this server was shown")
        if self._is_stopping:
            raise AdmissionError(503, "shutting_down", "the server stops", retry_after_s=RETRY_AFTER_S)
        n_more = MAX_GREETING if kind.RESUMES else 0
        if self._n_taken() >= self._config.server.max_sessions + n_more:
            raise AdmissionError(503, "server_full", "no room for another session", retry_after_s=RETRY_AFTER_S)

    def refusal(self, kind: DoorKind, error: AdmissionError, knock: Knock) -> JSONResponse:
        """The HTTP answer to one who is refused."""
        self.metrics.refusals.labels(kind.NAME, error.code).inc()
        refusal = kind.refusal(error, knock)
        retry = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
        return JSONResponse(refusal.body, status_code=error.status, headers={**retry, **refusal.headers})

    def _is_welcome(self, headers: Mapping[str, str]) -> bool:
        """Whether the page that a browser connects for, if it is one, is ours or allowed.

        A browser lets any page open a WebSocket anywhere, and only says which page (RFC 6455, section 10.2).
        """
        origin = headers.get("origin")
        allowed = self._config.server.allowed_origins
        return origin is None or "*" in allowed or origin in allowed or _host_of(origin) == headers.get("host")

    async def converse(self, transport: Transport, door: Door, name: str, knock: Knock | None = None) -> None:
        """Let a door and its client talk until either side has enough; ``name`` is the door's in figures.

        ``knock`` is the handshake of a WebSocket, with which another worker's door can be opened as well.
        """
        connection = Connection(transport, door, name, knock)
        self._connections.add(connection)
        self.metrics.connections.labels(name).inc()
        try:
            await self._converse(connection)
        finally:
            self.metrics.connections.labels(name).dec()
            await self._end(connection)
            self._connections.discard(connection)
            connection.is_over.set()

    async def _converse(self, connection: Connection) -> None:
        """Feed the door with what the client sends."""
        settings = self._config.server
        rate_per_s = settings.max_messages_per_s
        allowance = Allowance(rate_per_s, BURST_S * rate_per_s, now_s=self._now_s())
        self._ask(connection, connection.door.opened)
        try:
            while connection.closing is None:
                frame = await self._next_frame(connection, settings.idle_timeout_s)
                if frame is None or connection.closing is not None:  # taken over, say: the session is another's now
                    return
                await self._take_frame(connection, frame)
                if connection.home is not None and await self._relay(connection, connection.home, frame):
                    return
                await connection.has_room()
                await asyncio.sleep(allowance.delay_s(self._now_s()))  # 0 gives the others a turn, too
        except PeerGoneError:
            return
        finally:
            self._detach(connection)

    async def _relay(self, connection: Connection, home: Path, hello: Frame) -> bool:
        """Let the worker that has the session talk to this client, to the end; false if that can't be."""
        assert connection.knock is not None, "only WebSockets come for a session that is there already"
        try:
            worker = await connect_worker(home, connection.knock)
        except (OSError, InvalidHandshake):
            connection.home = None
            self._ask(connection, connection.door.opened)
            gone = ClientError("unknown_session", "the worker that had this session is gone; say hello anew")
            for track in list(connection.seats):
                self._carry_out(connection, Refuse(track, gone))
            return False
        async with worker:
            answering = asyncio.create_task(self._pass_answers(connection, worker))
            try:
                await self._pass_frames(connection, worker, hello)
                if connection.closing is None:
                    await answering
            finally:
                answering.cancel()
        return True

    async def _pass_frames(self, connection: Connection, worker: ClientConnection, hello: Frame) -> None:
        frame: Frame | None = hello
        with suppress(ConnectionClosed):  # what the worker said before is passed on
            while frame is not None:
                await worker.send(frame)
                frame = await self._next_frame(connection, self._config.server.idle_timeout_s)

    async def _pass_answers(self, connection: Connection, worker: ClientConnection) -> None:
        async for frame in worker:
            self._say(connection, Say(frame))
        if worker.close_code is None or worker.close_code == CloseCode.ABNORMAL_CLOSURE:
            self._give_up(
                connection, ServerError("internal", "the worker that had this session is gone; say hello anew")
            )
        else:
            connection.close(Close(worker.close_code, worker.close_reason or ""))

    async def _next_frame(self, connection: Connection, idle_timeout_s: float) -> Frame | None:
        """What the client sends next; ``None`` when the connection ends from this side."""
        if connection.sender.done():
            return None
        try:
            async with asyncio.timeout(None if connection.transport.may_idle else idle_timeout_s) as reading:
                connection.reading = reading
                return await connection.transport.receive()
        except TimeoutError:
            if not reading.expired():  # the network's
                raise
        finally:
            connection.reading = None
        if not connection.sender.done():
            self._give_up(connection, ServerError("idle_timeout", f"nothing was sent for {idle_timeout_s:g} s"))
        return None

    async def _take_frame(self, connection: Connection, frame: Frame) -> None:
        """Hand one frame to the door and carry out its answer, with a turn for the others inside long audio."""
        try:
            for effect in connection.door.receive(frame, self._now_s()):
                if not (isinstance(effect, Tell) and isinstance(effect.message, Audio)):
                    self._carry_out(connection, effect)
                    continue
                await self._tell_audio(connection, effect.track, effect.message.data)
                if connection.closing is not None:
                    return
            self._set_timer(connection)
        except Exception:  # noqa: BLE001  # the outermost shell of a connection: it ends, the others go on
            self._fail(connection)

    async def _tell_audio(self, connection: Connection, track: int, data: bytes) -> None:
        """Hand over audio piece by piece, with a turn for the others in between: a frame may hold minutes."""
        seat = connection.seats.get(track)
        if seat is None:
            return
        piece_bytes = seat.session.piece_bytes
        for start in range(0, max(1, len(data)), piece_bytes):
            if start:
                await asyncio.sleep(0)
                await seat.has_room.wait()  # an append of OpenAI's protocol may hold half an hour
                if connection.closing is not None:
                    return
            piece = Audio(data[start : start + piece_bytes])
            n_bytes_to_come = max(0, len(data) - start - piece_bytes)
            self._feed(seat, partial(self._receive_piece, seat.session, piece, n_bytes_to_come))
            self._count_audio(connection, seat)

    @staticmethod
    def _receive_piece(session: Session, piece: Audio, n_bytes_to_come: int, now_s: float) -> list[Effect]:
        return session.receive(piece, now_s, n_bytes_to_come=n_bytes_to_come)

    def _count_audio(self, connection: Connection, seat: Seat) -> None:
        audio_s = seat.session.audio_s
        self.metrics.audio_seconds.labels(connection.name).inc(audio_s - seat.counted_s)
        seat.counted_s = audio_s
        seat.timing.took(audio_s, self._now_s())

    def _detach(self, connection: Connection) -> None:
        """The connection is over: the door says what becomes of its sessions."""
        if connection.is_gone:
            return
        connection.is_gone = True
        self._ask(connection, connection.door.peer_gone)

    async def _end(self, connection: Connection) -> None:
        """Give the last messages their chance; a client that does not read loses them."""
        if connection.timer is not None:
            connection.timer.cancel()
        if connection.transport.is_open:
            await asyncio.wait({connection.sender}, timeout=GOODBYE_TIMEOUT_S if connection.closing else 0)
        connection.sender.cancel()
        await asyncio.gather(connection.sender, return_exceptions=True)

    def _give_up(self, connection: Connection, error: ServerError) -> None:
        """Say goodbye with ``error``, whether or not the client still reads."""
        if connection.closing is None:
            self.metrics.errors.labels(error.code).inc()
            connection.hurry()
            for effect in connection.door.failed(error):
                self._carry_out(connection, effect)

    # ------------------------------------------------------------------ what doors want

    def _ask(self, connection: Connection, call: Callable[[float], Iterable[DoorEffect]]) -> None:
        """Give a door one input and carry out its answer. A fault in it ends this connection and no other."""
        try:
            for effect in call(self._now_s()):
                self._carry_out(connection, effect)
            self._set_timer(connection)
        except Exception:  # noqa: BLE001  # the outermost shell of a connection: it ends, the others go on
            self._fail(connection)

    def _carry_out(self, connection: Connection, effect: DoorEffect) -> None:
        match effect:
            case Say():
                self._say(connection, effect)
            case Tell(track, message):
                self._tell(connection, track, message)
            case Open(track):
                self._open_seat(connection, track)
            case Refuse(track, error):
                if (seat := connection.seats.get(track)) is not None:
                    self._feed(seat, partial(self._refuse, seat.session, error))
            case Leave(track):
                if (seat := connection.seats.pop(track, None)) is not None:
                    seat.connection = None
                    self._feed(seat, seat.session.peer_gone)
            case Drop(track):
                if (seat := connection.seats.get(track)) is not None:
                    self._end_seat(seat)
            case Publish(call_id, event):
                self._publish(call_id, event)
            case Follow(call_id):
                connection.follows, connection.has_opened = call_id, True
            case Close():
                connection.close(effect)

    def _publish(self, call_id: str, event: Mapping[str, Any]) -> None:
        """Send an event to every follower of its call, and write down what is final."""
        text = msgspec.json.encode(event).decode()
        self.tell_followers(call_id, text)
        self.peers.publish(call_id, text)
        if self._call_log is not None and event["type"] in CALL_LOG_TYPES:
            self._call_log.write(text)

    def tell_followers(self, call_id: str, event: str) -> None:
        """Send an event of a call, here or at another worker, to those who follow it here."""
        for follower in list(self._connections):
            if follower.follows in ("", call_id):
                self._say(follower, Say(event))

    @staticmethod
    def _refuse(session: Session, error: ClientError, now_s: float) -> list[Effect]:
        return session.refuse(error)

    def _say(self, connection: Connection, say: Say) -> None:
        if not connection.post(say):
            self._give_up(connection, ServerError("too_slow", "the client does not read; resume the session to go on"))
            self._detach(connection)

    def _tell(self, connection: Connection, track: int, message: Input) -> None:
        seat = connection.seats.get(track)
        if seat is None:
            return
        if isinstance(message, Hello) and isinstance(message.resume, UnsetType) and self._is_full(seat):
            self._give_up(connection, ServerError("server_full", "no room for another session; try again later"))
            return
        self._feed(seat, lambda now_s: seat.session.receive(message, now_s))

    def _set_timer(self, connection: Connection) -> None:
        wake_s = connection.door.next_wake_s
        if connection.timer is not None and connection.timer.when() != wake_s:
            connection.timer.cancel()
            connection.timer = None
        if connection.timer is None and wake_s is not None and not connection.is_over.is_set():
            connection.timer = asyncio.get_running_loop().call_at(wake_s, self._wake_door, connection)

    def _wake_door(self, connection: Connection) -> None:
        connection.timer = None
        self._ask(connection, connection.door.wake)

    def _fail(self, connection: Connection) -> None:
        """End a connection that can't go on; called while the exception is being handled."""
        log.exception("a connection failed")
        self._give_up(connection, ServerError("internal", "a fault of the server ended this session"))
        for seat in list(connection.seats.values()):
            self._end_seat(seat)

    # ------------------------------------------------------------------ sessions

    def _is_full(self, greeting: Seat) -> bool:
        """Whether there is no room for the new session that ``greeting`` asks for."""
        n_open = self._n_open + self.peers.n_sessions_elsewhere
        return greeting.session.state is State.GREETING and n_open >= self._config.server.max_sessions

    def _open_seat(self, connection: Connection, track: int) -> None:
        # A few more than may stay: who wants a lost session back must get as far as saying so.
        if self._is_stopping or len(self._seats) >= self._config.server.max_sessions + MAX_GREETING:
            self._give_up(connection, ServerError("server_full", "no room for another session; try again later"))
            return
        session = Session(
            self.peers.new_session_id(),
            self.models,
            self._detector.initial_state(),
            config=self._config.session,
            gate=self._config.vad,
            now_s=self._now_s(),
            turn_model=self.turn_model,
        )
        seat = self._seats[session.session_id] = connection.seats[track] = Seat(session, connection, track)
        connection.has_opened = True
        self.metrics.sessions.labels(seat.door).inc()
        self._settle(seat)

    def _resume(self, fresh: Seat, session_id: str, last_event: int) -> None:
        """Move the connection of ``fresh`` to the session that it wants back."""
        wanted = self._seats.get(session_id)
        if fresh.connection is not None and (home := self.peers.home_of(session_id)) is not None:
            fresh.connection.home = home
            self._forget(fresh)
            return
        try:
            if wanted is None or wanted is fresh:
                raise ClientError(
                    "unknown_session", "no such session to resume, or its window has passed; say hello anew"
                )
            effects = wanted.session.resume(last_event, self._now_s())
        except ClientError as error:
            self._apply(fresh, fresh.session.refuse(error))
            return
        if wanted.connection is not None:
            del wanted.connection.seats[wanted.track]
            self._give_up(wanted.connection, ServerError("taken_over", "the session was resumed on another connection"))
        wanted.connection, fresh.connection = fresh.connection, None
        if wanted.connection is not None:
            wanted.track = fresh.track
            wanted.connection.seats[fresh.track] = wanted
            wanted.connection.make_room(len(effects))
        self._forget(fresh)
        self._apply(wanted, effects)

    def _feed(self, seat: Seat, call: Callable[[float], list[Effect]]) -> None:
        """Give a session one input and carry out what follows. A fault in it ends its connection and no other.

        One that is over may still be answered, by an engine that was at work for it: nothing comes of that.
        """
        if self._seats.get(seat.session.session_id) is not seat:
            return
        try:
            self._apply(seat, call(self._now_s()))
        except Exception:  # noqa: BLE001  # the outermost shell of a session: it ends, the others go on
            self._fail_seat(seat)

    def _fail_seat(self, seat: Seat) -> None:
        """End a session that can't go on, and the connection that it is part of."""
        if seat.connection is not None:
            self._fail(seat.connection)
        else:
            log.exception("a session without a connection failed")
        self._end_seat(seat)

    def _end_seat(self, seat: Seat) -> None:
        """End a session at once, whatever it has still to say."""
        if self._seats.get(seat.session.session_id) is seat:
            self._forget(seat)
            self._spawn(self._close_all(seat.session.session_id))
            self._decode_due.set()  # the decode that failed here may have been all that the loop had in hand

    def _apply(self, seat: Seat, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(message):
                    self._hear(seat, message)
                case Close() | UtteranceOver() | SentencePaused():
                    self._hear(seat, effect)
                case OpenStream():
                    self._spawn(self._open(seat, effect))
                case CloseStream(stream_id):
                    self._spawn(self._close(seat.session.session_id, stream_id))
                case Resume(session_id, last_event):
                    self._resume(seat, session_id, last_event)
                    return
        self._settle(seat)

    def _hear(self, seat: Seat, said: Said) -> None:
        """Let the door of a session's connection, if there is one, hear what the session says."""
        self.metrics.observe(seat.door, seat.timing.heard(said, self._now_s()))
        if isinstance(said, Error):
            self.metrics.errors.labels(said.code).inc()
        connection = seat.connection
        if connection is None:
            return
        for effect in connection.door.heard(seat.track, said, self._now_s()):
            if isinstance(effect, Tell):  # the session has not finished speaking
                asyncio.get_running_loop().call_soon(self._tell, connection, effect.track, effect.message)
            else:
                self._carry_out(connection, effect)
        self._set_timer(connection)

    def _settle(self, seat: Seat) -> None:
        """After every change of a session: its timer, its room for audio, its place in the queues."""
        session, now_s = seat.session, self._now_s()
        if session.is_forgettable(now_s):
            self._forget(seat)
            return
        if not seat.is_counted and session.state is not State.GREETING:
            self._count_open(seat, 1)
        self._set_wake(seat, session.next_wake_s)
        if session.wants_audio:
            seat.has_room.set()
        else:
            seat.has_room.clear()
        self._to_score[seat] = None
        self._score_due.set()
        if session.wants_judgement:
            self._judge_due.set()
        if session.decode_priority is None:
            seat.waiting_since_s = None
        else:
            seat.waiting_since_s = now_s if seat.waiting_since_s is None else seat.waiting_since_s
            self._decode_due.set()

    def _set_wake(self, seat: Seat, wake_s: float | None) -> None:
        """Have the session woken at ``wake_s``. A timer that comes earlier stays, and is set anew then: a stall's moves
        with every packet.
        """
        timer = seat.timer
        if timer is not None and wake_s is not None and timer.when() <= wake_s:
            return
        if timer is not None:
            timer.cancel()
        seat.timer = None if wake_s is None else asyncio.get_running_loop().call_at(wake_s, self._wake, seat)

    def _wake(self, seat: Seat) -> None:
        seat.timer = None
        self._feed(seat, seat.session.wake)

    def _forget(self, seat: Seat) -> None:
        if seat.timer is not None:
            seat.timer.cancel()
        seat.has_room.set()
        if self._seats.pop(seat.session.session_id, None) is not None:
            self.metrics.sessions.labels(seat.door).dec()
        if seat.is_counted:
            self._count_open(seat, -1)
        if seat.connection is not None:
            seat.connection.seats.pop(seat.track, None)

    def _count_open(self, seat: Seat, change: int) -> None:
        seat.is_counted = change > 0
        self._n_open += change
        self.peers.tell_sessions(self._n_open)

    async def _open(self, seat: Seat, effect: OpenStream) -> None:
        try:
            warnings = await self._worker.open(
                (seat.session.session_id, effect.stream_id), effect.model, effect.options
            )
        except Exception:  # noqa: BLE001  # an engine may raise anything; the session can't go on without its stream
            self._fail_seat(seat)
            return
        self._feed(seat, lambda now_s: seat.session.opened(warnings))

    async def _close(self, session_id: str, stream_id: int) -> None:
        try:
            await self._worker.close((session_id, stream_id))
        except Exception:
            log.exception("an engine stream could not be closed")

    async def _close_all(self, session_id: str) -> None:
        try:
            await self._worker.close_all(session_id)
        except Exception:
            log.exception("the engine streams of a session could not be closed")

    # ------------------------------------------------------------------ engines and detector

    async def _decode_forever(self) -> None:
        """Keep the engine busy with the most urgent decodes."""
        max_batch = {name: served.card.max_batch for name, served in self.models.items()}
        while True:
            await self._decode_due.wait()
            self._decode_due.clear()
            while jobs := [
                (entry.key, job)
                for entry in next_batch(self._waiting(), max_batch)
                if (job := self._take_job(entry.key))
            ]:
                await self._decode(jobs)

    def _waiting(self) -> list[Waiting[Seat]]:
        return [
            Waiting(seat, model, priority, seat.waiting_since_s)
            for seat in self._seats.values()
            if seat.waiting_since_s is not None
            and (priority := seat.session.decode_priority) is not None
            and (model := seat.session.model) is not None
        ]

    def _take_job(self, seat: Seat) -> DecodeJob | None:
        seat.waiting_since_s = None
        try:
            return seat.session.next_decode()
        except Exception:  # noqa: BLE001  # as in _feed: this session ends, the loop goes on for the others
            self._fail_seat(seat)
            return None

    async def _decode(self, jobs: list[tuple[Seat, DecodeJob]]) -> None:
        batch = [((seat.session.session_id, job.stream_id), job.chunk) for seat, job in jobs]
        self._decoding_since_s = self._now_s()
        try:
            hypotheses = await self._worker.decode(jobs[0][1].model, batch)
        except Exception:
            log.exception("a batch of %d decodes failed", len(jobs))
            await self._decode_apart(jobs)
            return
        finally:
            self.metrics.decode_seconds.observe(self._now_s() - (self._decoding_since_s or self._now_s()))
            self._decoding_since_s = None
        for (seat, _), hypothesis in zip(jobs, hypotheses, strict=True):
            self._feed(seat, partial(seat.session.decoded, hypothesis))

    async def _decode_apart(self, jobs: list[tuple[Seat, DecodeJob]]) -> None:
        """After a batch failed: each alone, so that one bad chunk costs nobody else theirs."""
        if len(jobs) > 1:
            for alone in jobs:
                await self._decode([alone])
            return
        [(seat, job)] = jobs
        span = job.chunk.span
        message = f"the model failed on {seconds(span.start_sample):.2f}..{seconds(span.end_sample):.2f} s"
        self._feed(seat, partial(seat.session.decode_failed, message))

    async def _score_forever(self) -> None:
        """Score the windows of all sessions that have some, together."""
        while True:
            await self._score_due.wait()
            self._score_due.clear()
            began_s = self._now_s()
            due = [(seat, work) for seat in self._taken_to_score() if (work := self._take_windows(seat))]
            if due:
                await self._score(due)
                await asyncio.sleep(began_s + SCORE_INTERVAL_S - self._now_s())

    def _taken_to_score(self) -> list[Seat]:
        seats = [seat for seat in self._to_score if self._seats.get(seat.session.session_id) is seat]
        self._to_score.clear()
        return seats

    def _take_windows(self, seat: Seat) -> tuple[DetectorState, NDArray[np.float32]] | None:
        try:
            return seat.session.windows_to_score()
        except Exception:  # noqa: BLE001  # as in _feed: this session ends, the loop goes on for the others
            self._fail_seat(seat)
            return None

    async def _score(self, due: list[tuple[Seat, tuple[DetectorState, NDArray[np.float32]]]]) -> None:
        try:
            results = await self._worker.score([work for _, work in due])
        except Exception:  # noqa: BLE001  # a detector may raise anything; a session without it can't go on
            if len(due) == 1:
                self._fail_seat(due[0][0])
                return
            for alone in due:  # so that windows it can't take cost nobody else anything
                await self._score([alone])
            return
        for (seat, _), (probabilities, state) in zip(due, results, strict=True):
            self._feed(seat, partial(seat.session.scored, probabilities, state))

    async def _judge_forever(self) -> None:
        """Judge the pauses of all sessions that ask for it, one after another, the first that came first.

        Who waits too long goes on without: the silence that a judgement would have saved is over by then.
        """
        waiting: deque[tuple[Seat, NDArray[np.float32], float]] = deque()
        while True:
            for seat in list(self._seats.values()):
                if (samples := self._take_pause(seat)) is not None:
                    waiting.append((seat, samples, self._now_s()))
            if waiting:
                await self._judge(*waiting.popleft())
            else:
                await self._judge_due.wait()
                self._judge_due.clear()

    def _take_pause(self, seat: Seat) -> NDArray[np.float32] | None:
        try:
            return seat.session.pause_to_judge()
        except Exception:  # noqa: BLE001  # as in _feed: this session ends, the loop goes on for the others
            self._fail_seat(seat)
            return None

    async def _judge(self, seat: Seat, samples: NDArray[np.float32], since_s: float) -> None:
        """One pause; without an answer in time, or while an earlier pause is still being judged, it goes unjudged."""
        left_s = since_s + JUDGE_WITHIN_S - self._now_s()
        probability = None
        if left_s > 0 and (self._judging is None or self._judging.done()):
            self._judging = asyncio.ensure_future(self._judged(samples))
            await asyncio.wait({self._judging}, timeout=left_s)
            if self._judging.done():
                probability = self._judging.result()
            else:
                log.warning("the model of turns takes more than %g s for a pause: pauses go by text", JUDGE_WITHIN_S)
        if probability is None:
            self.metrics.turns_unjudged.inc()
        self._feed(seat, partial(seat.session.judged, probability))

    async def _judged(self, samples: NDArray[np.float32]) -> float | None:
        began_s = self._now_s()
        try:
            return await self._worker.judge(samples)
        except Exception:
            log.exception("the model of turns failed on a pause")
            return None
        finally:
            self.metrics.turn_seconds.observe(self._now_s() - began_s)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    def _now_s() -> float:
        return time.monotonic()  # which event loops go by, too


def _host_of(origin: str) -> str | None:
    """Of a page, ``None`` if the header can't be read."""
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return None


def knock_of(connection: HTTPConnection) -> Knock:
    """What a client's handshake or request says."""
    return Knock(
        path=connection.scope["path"],  # the URL's own parser stumbles over some Host headers
        query=tuple(connection.query_params.multi_items()),
        headers={name.lower(): value for name, value in connection.headers.items()},
        subprotocols=tuple(connection.scope.get("subprotocols", ())),
        url=str(connection.url),
        connection_id=secrets.token_hex(16),
        at_unix_s=time.time(),
    )
