"""The shell around sessions: sockets, timers and threads; carries out effects and decides nothing.

Everything here runs on the event loop; what computes runs on the worker's threads. Knows no model and no protocol
beyond which codec a sub-protocol means.
"""

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Mapping
from functools import partial
from urllib.parse import urlsplit

import numpy as np
from msgspec import UnsetType
from numpy.typing import NDArray
from starlette.responses import JSONResponse
from starlette.websockets import WebSocket, WebSocketDisconnect, WebSocketState

from gateway.batcher import Waiting, next_batch
from gateway.codec import CODECS, Codec, choose_subprotocol
from gateway.config import Config
from gateway.effects import Close, CloseStream, Effect, OpenStream, Resume, Send
from gateway.errors import ClientError, GatewayError, ServerError
from gateway.messages import Ack, Audio, Error, Hello, Partial, ServerMessage
from gateway.session import DecodeJob, ServedModel, Session, State
from gateway.worker import Worker
from vad.audio import seconds
from vad.detector import DetectorState, SpeechDetector

log = logging.getLogger("senseway")

MAX_OUTGOING = 512  # messages waiting for a client that does not read, superseded partials and acks not counted
MAX_GREETING = 16  # connections beyond max_sessions that have not said hello yet
GOODBYE_TIMEOUT_S = 2.0  # for a last message to a client that may no longer read


class Connection:
    """One WebSocket: sends in order from a bounded queue, so that no session ever waits for a slow client."""

    def __init__(self, websocket: WebSocket, codec: Codec) -> None:
        self.websocket = websocket
        self.codec = codec
        self._outgoing: deque[ServerMessage | Close] = deque()
        self._max_outgoing = MAX_OUTGOING
        self._has_news = asyncio.Event()
        self.closing: Close | None = None  # nothing is sent after it
        self.sender = asyncio.create_task(self._send_all())  # done when the connection is over

    def make_room(self, n_messages: int) -> None:
        """Let ``n_messages`` more wait: those that a resume sends all at once, which no client can have read yet."""
        self._max_outgoing += n_messages

    def post(self, message: ServerMessage) -> bool:
        """Queue ``message``; false if the client has not read for so long that there is no room."""
        if self.closing is not None:
            return True
        if isinstance(message, Partial | Ack):
            self._outgoing = deque(old for old in self._outgoing if not _replaces(message, old))
        if len(self._outgoing) >= self._max_outgoing:
            return False
        self._outgoing.append(message)
        self._has_news.set()
        return True

    def close(self, close: Close) -> None:
        """Close once everything queued has been sent."""
        if self.closing is None:
            self.closing = close
            self._outgoing.append(close)
            self._has_news.set()

    def give_up(self, error: GatewayError, code: int) -> None:
        """Drop what is queued and close with ``error``, whether or not the client still reads."""
        asyncio.get_running_loop().call_later(GOODBYE_TIMEOUT_S, self.sender.cancel)
        self._outgoing.clear()
        self.post(Error(None, error.code, str(error), fatal=True))
        self.close(Close(code, error.code))

    async def _send_all(self) -> None:
        """Send what is posted until the connection closes."""
        while True:
            while self._outgoing:
                message = self._outgoing.popleft()
                if isinstance(message, Close):
                    await self.websocket.close(message.code, message.reason)
                    return
                frame = self.codec.encode(message)
                if isinstance(frame, str):
                    await self.websocket.send_text(frame)
                else:
                    await self.websocket.send_bytes(frame)
            self._has_news.clear()
            await self._has_news.wait()

    async def receive(self) -> str | bytes:
        """The next frame. Raises ``WebSocketDisconnect``."""
        message = await self.websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message.get("code", 1005))
        text: str | None = message.get("text")
        data: bytes = message.get("bytes") or b""
        return text if text is not None else data


def _replaces(message: Partial | Ack, old: ServerMessage | Close) -> bool:
    """Whether ``old``, not sent yet, says nothing beside ``message``."""
    if isinstance(message, Partial):
        return isinstance(old, Partial) and old.segment == message.segment
    return isinstance(old, Ack)


class Seat:
    """A session with what it needs from the shell: its connection of the moment, its timer, its place in the queue."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.connection: Connection | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.has_room = asyncio.Event()  # set while the session wants audio
        self.waiting_since_s: float | None = None  # for its decode


class Server:
    """Every session of this process, and the two loops that feed the engines and the detector."""

    def __init__(
        self, models: Mapping[str, ServedModel], worker: Worker, detector: SpeechDetector, config: Config
    ) -> None:
        self.models = models
        self._worker = worker
        self._detector = detector
        self._config = config
        self._seats: dict[str, Seat] = {}
        self._decode_due = asyncio.Event()
        self._score_due = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._connections: dict[Connection, asyncio.Event] = {}  # open ones; the event is set when one is over
        self._is_stopping = False

    @property
    def n_sessions(self) -> int:
        """Sessions that live, connected or waiting to be resumed."""
        return len(self._seats)

    def start(self) -> None:
        """Start feeding engines and detector. Needs a running event loop."""
        self._spawn(self._decode_forever())
        self._spawn(self._score_forever())

    async def dismiss(self) -> None:
        """Tell every client that the server stops, and wait a moment until they are told. Nobody is let in any more."""
        self._is_stopping = True
        for seat in self._seats.values():
            seat.has_room.set()
        for connection in self._connections:
            if connection.closing is None:
                connection.give_up(ServerError("shutting_down", "the server stops; connect again later"), 1012)
        ended = [asyncio.ensure_future(is_over.wait()) for is_over in self._connections.values()]
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
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._worker.stop()

    # ------------------------------------------------------------------ connections

    async def serve(self, websocket: WebSocket) -> None:
        """One connection at ``/v1/stream``, from handshake to close."""
        if not self._is_welcome(websocket.headers):
            message = "pages of another origin may not connect; server.allowed_origins names those that may"
            await websocket.send_denial_response(JSONResponse({"error": message}, status_code=403))
            return
        subprotocol = choose_subprotocol(list(websocket.scope["subprotocols"]))
        if subprotocol is None:
            message = f"none of the offered sub-protocols is known; there are {', '.join(CODECS)}"
            await websocket.send_denial_response(JSONResponse({"error": message}, status_code=400))
            return
        await websocket.accept(subprotocol if websocket.scope["subprotocols"] else None)
        connection = Connection(websocket, CODECS[subprotocol])
        is_over = self._connections[connection] = asyncio.Event()
        try:
            await self._converse(connection)
        finally:
            await self._end(connection)
            del self._connections[connection]
            is_over.set()

    def _is_welcome(self, headers: Mapping[str, str]) -> bool:
        """Whether the page that a browser connects for, if it is one, is ours or allowed.

        A browser lets any page open a WebSocket anywhere, and only says which page (RFC 6455, section 10.2).
        """
        origin = headers.get("origin")
        allowed = self._config.server.allowed_origins
        return origin is None or "*" in allowed or origin in allowed or urlsplit(origin).netloc == headers.get("host")

    async def _converse(self, connection: Connection) -> None:
        """Feed a session with what the client sends, until either side has enough."""
        seat = self._new_seat()
        if seat is None:
            connection.give_up(ServerError("server_full", "no room for another session; try again later"), 1013)
            return
        self._attach(seat, connection)
        try:
            while connection.closing is None:
                reading = asyncio.ensure_future(connection.receive())
                await asyncio.wait({reading, connection.sender}, return_when=asyncio.FIRST_COMPLETED)
                if not reading.done():  # the sender ended: closed, or the client is gone
                    reading.cancel()
                    return
                frame = reading.result()
                if connection.closing is not None:  # taken over, say: the session is no longer this connection's
                    return
                seat = await self._take_frame(seat, connection, frame)
                await seat.has_room.wait()
        except WebSocketDisconnect:
            return
        finally:
            self._detach(connection)

    async def _take_frame(self, seat: Seat, connection: Connection, frame: str | bytes) -> Seat:
        """Hand one frame to the session; answers with the seat the connection belongs to from then on."""
        try:
            message = connection.codec.decode(frame)
        except ClientError as error:
            refusal = error
            self._feed(seat, lambda now_s: seat.session.refuse(refusal))
            return seat
        if isinstance(message, Hello) and isinstance(message.resume, UnsetType) and self._is_full(seat):
            connection.give_up(ServerError("server_full", "no room for another session; try again later"), 1013)
            return seat
        if isinstance(message, Audio):
            await self._take_audio(seat, connection, message.data)
            return seat
        self._feed(seat, lambda now_s: seat.session.receive(message, now_s))
        # A hello that wants another session back has moved this connection to that one's seat.
        return next((other for other in self._seats.values() if other.connection is connection), seat)

    async def _take_audio(self, seat: Seat, connection: Connection, data: bytes) -> None:
        """Hand over audio piece by piece, with a turn for the others in between: a frame may hold two minutes."""
        piece_bytes = seat.session.piece_bytes
        for start in range(0, max(1, len(data)), piece_bytes):
            if start:
                await asyncio.sleep(0)
                if connection.closing is not None:
                    return
            piece = Audio(data[start : start + piece_bytes])
            n_bytes_to_come = max(0, len(data) - start - piece_bytes)
            self._feed(seat, partial(self._receive_piece, seat.session, piece, n_bytes_to_come))

    @staticmethod
    def _receive_piece(session: Session, piece: Audio, n_bytes_to_come: int, now_s: float) -> list[Effect]:
        return session.receive(piece, now_s, n_bytes_to_come=n_bytes_to_come)

    @staticmethod
    async def _end(connection: Connection) -> None:
        """Give the last messages their chance; a client that does not read loses them."""
        if connection.websocket.application_state is WebSocketState.CONNECTED:
            await asyncio.wait({connection.sender}, timeout=GOODBYE_TIMEOUT_S if connection.closing else 0)
        connection.sender.cancel()
        await asyncio.gather(connection.sender, return_exceptions=True)

    def _is_full(self, greeting: Seat) -> bool:
        """Whether there is no room for the new session that ``greeting`` asks for."""
        others = (seat for seat in self._seats.values() if seat is not greeting)
        n_open = sum(seat.session.state is not State.GREETING for seat in others)
        return greeting.session.state is State.GREETING and n_open >= self._config.server.max_sessions

    def _new_seat(self) -> Seat | None:
        # A few more than may stay: who wants a lost session back must get as far as saying so.
        if self._is_stopping or len(self._seats) >= self._config.server.max_sessions + MAX_GREETING:
            return None
        session = Session(
            secrets.token_urlsafe(16),
            self.models,
            self._detector.initial_state(),
            config=self._config.session,
            gate=self._config.vad,
            now_s=self._now_s(),
        )
        seat = self._seats[session.session_id] = Seat(session)
        return seat

    def _attach(self, seat: Seat, connection: Connection) -> None:
        seat.connection = connection
        self._settle(seat)

    def _detach(self, connection: Connection) -> None:
        """The connection is over: its session waits to be resumed, or ends if nobody can want it."""
        for seat in list(self._seats.values()):
            if seat.connection is connection:
                seat.connection = None
                self._feed(seat, seat.session.peer_gone)

    def _resume(self, fresh: Seat, session_id: str, last_event: int) -> None:
        """Move the connection of ``fresh`` to the session that it wants back."""
        wanted = self._seats.get(session_id)
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
            wanted.connection.give_up(ServerError("taken_over", "the session was resumed on another connection"), 4410)
        wanted.connection, fresh.connection = fresh.connection, None
        if wanted.connection is not None:
            wanted.connection.make_room(len(effects))
        self._forget(fresh)
        self._apply(wanted, effects)

    # ------------------------------------------------------------------ effects

    def _feed(self, seat: Seat, call: Callable[[float], list[Effect]]) -> None:
        """Give a session one input and carry out what follows. A fault in it ends this session and no other.

        One that is over may still be answered, by an engine that was at work for it: nothing comes of that.
        """
        if self._seats.get(seat.session.session_id) is not seat:
            return
        try:
            self._apply(seat, call(self._now_s()))
        except Exception:  # noqa: BLE001  # the outermost shell of a session: it ends, the others go on
            self._fail(seat)

    def _fail(self, seat: Seat) -> None:
        """End a session that can't go on; called while the exception is being handled."""
        log.exception("session %s failed", seat.session.session_id[:6])
        if seat.connection is not None:
            seat.connection.give_up(ServerError("internal", "a fault of the server ended this session"), 1011)
        self._forget(seat)
        self._spawn(self._close_all(seat.session.session_id))
        self._decode_due.set()  # the decode that failed here may have been all that the loop had in hand

    def _apply(self, seat: Seat, effects: Iterable[Effect]) -> None:
        for effect in effects:
            match effect:
                case Send(message):
                    self._send(seat, message)
                case OpenStream():
                    self._spawn(self._open(seat, effect))
                case CloseStream(stream_id):
                    self._spawn(self._close(seat.session.session_id, stream_id))
                case Close():
                    if seat.connection is not None:
                        seat.connection.close(effect)
                case Resume(session_id, last_event):
                    self._resume(seat, session_id, last_event)
                    return
        self._settle(seat)

    def _send(self, seat: Seat, message: ServerMessage) -> None:
        if seat.connection is not None and not seat.connection.post(message):
            seat.connection.give_up(
                ServerError("too_slow", "the client does not read; resume the session to go on"), 4409
            )
            seat.connection = None
            self._feed(seat, seat.session.peer_gone)

    def _settle(self, seat: Seat) -> None:
        """After every change of a session: its timer, its room for audio, its place in the queues."""
        session, now_s = seat.session, self._now_s()
        if session.is_forgettable(now_s):
            self._forget(seat)
            return
        if seat.timer is not None:
            seat.timer.cancel()
        wake_s = session.next_wake_s
        seat.timer = None if wake_s is None else asyncio.get_running_loop().call_at(wake_s, self._wake, seat)
        if session.wants_audio:
            seat.has_room.set()
        else:
            seat.has_room.clear()
        self._score_due.set()
        if session.decode_priority is None:
            seat.waiting_since_s = None
        else:
            seat.waiting_since_s = now_s if seat.waiting_since_s is None else seat.waiting_since_s
            self._decode_due.set()

    def _wake(self, seat: Seat) -> None:
        self._feed(seat, seat.session.wake)

    def _forget(self, seat: Seat) -> None:
        if seat.timer is not None:
            seat.timer.cancel()
        seat.has_room.set()
        self._seats.pop(seat.session.session_id, None)

    async def _open(self, seat: Seat, effect: OpenStream) -> None:
        try:
            warnings = await self._worker.open(
                (seat.session.session_id, effect.stream_id), effect.model, effect.options
            )
        except Exception:  # noqa: BLE001  # an engine may raise anything; the session can't go on without its stream
            self._fail(seat)
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
            Waiting(seat, model, priority, seat.waiting_since_s or 0.0)
            for seat in self._seats.values()
            if (priority := seat.session.decode_priority) is not None and (model := seat.session.model) is not None
        ]

    def _take_job(self, seat: Seat) -> DecodeJob | None:
        seat.waiting_since_s = None
        try:
            return seat.session.next_decode()
        except Exception:  # noqa: BLE001  # as in _feed: this session ends, the loop goes on for the others
            self._fail(seat)
            return None

    async def _decode(self, jobs: list[tuple[Seat, DecodeJob]]) -> None:
        batch = [((seat.session.session_id, job.stream_id), job.chunk) for seat, job in jobs]
        try:
            hypotheses = await self._worker.decode(jobs[0][1].model, batch)
        except Exception:
            log.exception("a batch of %d decodes failed", len(jobs))
            await self._decode_apart(jobs)
            return
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
            due = [(seat, work) for seat in self._seats.values() if (work := seat.session.windows_to_score())]
            if due:
                await self._score(due)

    async def _score(self, due: list[tuple[Seat, tuple[DetectorState, NDArray[np.float32]]]]) -> None:
        try:
            results = await self._worker.score([work for _, work in due])
        except Exception:  # noqa: BLE001  # a detector may raise anything; a session without it can't go on
            if len(due) == 1:
                self._fail(due[0][0])
                return
            for alone in due:  # so that windows it can't take cost nobody else anything
                await self._score([alone])
            return
        for (seat, _), (probabilities, state) in zip(due, results, strict=True):
            self._feed(seat, partial(seat.session.scored, probabilities, state))

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @staticmethod
    def _now_s() -> float:
        return asyncio.get_running_loop().time()
