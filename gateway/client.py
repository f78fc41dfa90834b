"""The Python client, async and sync: stream audio to a server, iterate over what it hears.

Needs ``websockets`` and ``msgpack`` only. A lost connection is taken up again where it broke; what is said and heard
is decided in ``client_session.py``, this module has the sockets, tasks and clocks.

    async with connect("ws://127.0.0.1:8300/v1/stream", Hello(audio=AudioFormat("s16le", 48_000))) as stream:
        await stream.send_audio(data)
        await stream.bye()
        async for event in stream:
            ...

``connect_sync`` is the same without ``async`` and ``await``.

    StreamError
    ├── ConnectionFailedError   no server there, or a lost one did not come back in time
    └── RefusedError            the server refused a hello or an update, or ended the session; ``code`` says why
"""

import asyncio
import json
import threading
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from enum import Enum
from typing import Any, TypeVar

import msgpack
import websockets.asyncio.client
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI
from websockets.typing import Subprotocol

from .client_events import (
    Bye,
    ErrorEvent,
    Event,
    Final,
    Flushed,
    Partial,
    ProtocolError,
    Ready,
    ServerMessage,
    SpeechEnded,
    SpeechStarted,
    Updated,
    WarningEvent,
    Word,
    parse,
)
from .client_session import AudioFormat, ClientSession, Hello, Outgoing, Settings
from .together import run_together

__all__ = [
    "AudioFormat",
    "Bye",
    "ConnectionFailedError",
    "ErrorEvent",
    "Event",
    "Final",
    "Flushed",
    "Hello",
    "Partial",
    "ProtocolError",
    "Ready",
    "RefusedError",
    "Settings",
    "SpeechEnded",
    "SpeechStarted",
    "StreamClient",
    "StreamError",
    "SyncStreamClient",
    "Updated",
    "WarningEvent",
    "Wire",
    "Word",
    "connect",
    "connect_sync",
]

DEFAULT_URL = "ws://127.0.0.1:8300/v1/stream"
_FIRST_RETRY_S, _LONGEST_RETRY_S = 0.05, 2.0
_LEAVE_TIMEOUT_S = 2.0

_RESUMABLE = ("too_slow",)  # the fatal errors after which the session goes on, on another connection

_Result = TypeVar("_Result")
_Answer = TypeVar("_Answer", Flushed, Updated)


class StreamError(Exception):
    """The stream can't go on."""


class ConnectionFailedError(StreamError):
    """There is no server at the address, or a lost session could not be taken up again within the server's window."""


class RefusedError(StreamError):
    """The server refused a hello or an update, or ended the session; ``code`` is one of PROTOCOL.md's."""

    def __init__(self, code: str, message: str) -> None:
        self.code = code
        super().__init__(f"{code}: {message}")


class Wire(Enum):
    """How messages are written; the value is the sub-protocol."""

    JSON = "senseway.v1.json"
    MSGPACK = "senseway.v1.msgpack"

    def encode(self, message: Outgoing) -> str | bytes:
        """The frame of ``message``."""
        if self is Wire.JSON:
            return message if isinstance(message, bytes) else json.dumps(message)
        packed: bytes = msgpack.packb({"type": "audio", "data": message} if isinstance(message, bytes) else message)
        return packed

    def decode(self, frame: str | bytes) -> object:
        """The message of ``frame``.

        Raises:
            ProtocolError: if it is not one.
        """
        try:
            return json.loads(frame) if self is Wire.JSON else msgpack.unpackb(frame)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise ProtocolError(f"the server sent a frame that is not {self.name}: {error}") from error


class StreamClient:
    """One session. Made by ``connect``; its methods may be called from any task of one event loop.

    Events wait in order until they are read, however long that takes; reading is not needed for sending to go on.
    """

    def __init__(self, url: str, hello: Hello, wire: Wire, api_key: str | None) -> None:
        self._url = url
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._wire = wire
        self._session = ClientSession(hello)
        self._events: deque[Event] = deque()
        self._answers: dict[str, Flushed | Updated | ErrorEvent] = {}
        self._bye: Bye | None = None
        self._has_said_bye = False
        self._failure: Exception | None = None
        self._changed = asyncio.Event()
        self._websocket: ClientConnection | None = None
        self._is_connected = False  # whether the latest connection got as far as ready
        self._task = asyncio.create_task(self._run())

    @property
    def ready(self) -> Ready:
        """What the server granted, its models and its limits."""
        assert self._session.ready is not None, "connect() waits for ready"
        return self._session.ready

    @property
    def sent_s(self) -> float:
        """Seconds of audio sent so far; less than was given while the connection is lost or the server is behind."""
        return self._session.sent_s

    async def send_audio(self, data: bytes) -> None:
        """Send audio in the declared format, cut anywhere.

        Waits while more than ``ready.limits.max_unacked_s`` of audio is not yet safe with the server.
        """
        self._check_open()
        self._session.add_audio(data)
        self._notify()
        await self._until(lambda: self._session.has_room)

    async def flush(self) -> Flushed:
        """Wait until everything said so far is decoded and its finals are among the events."""
        self._check_open()
        return await self._answer(self._session.add_flush(), Flushed)

    async def update(self, settings: Settings) -> Updated:
        """Change settings from the next utterance on.

        Raises:
            RefusedError: if the model can't honour them; the session goes on with the old ones.
        """
        self._check_open()
        return await self._answer(self._session.add_update(settings), Updated)

    async def bye(self) -> Bye:
        """End the session: waits until all is decoded. The events can still be read."""
        if not self._has_said_bye:
            self._check_open()
            self._has_said_bye = True
            self._session.add_bye()
            self._notify()
        await self._until(lambda: self._bye is not None)
        assert self._bye is not None, "just waited for"
        return self._bye

    async def next_event(self) -> Event | None:
        """The next event; ``None`` after ``Bye``.

        Raises:
            StreamError: if the stream broke, after the events that came before that.
        """
        while not self._events:
            if self._failure is not None:
                raise self._failure
            if self._bye is not None:
                return None
            await self._changed.wait()
        return self._events.popleft()

    async def __aiter__(self) -> AsyncIterator[Event]:
        """Every event up to and with ``Bye``."""
        while (event := await self.next_event()) is not None:
            yield event

    async def until_ready(self) -> None:
        """Wait for the server's answer to `hello`; ``connect`` has done so."""
        await self._until(lambda: self._session.ready is not None)

    async def leave(self) -> None:
        """End the connection, with a bye if there was none but without waiting for what is still due."""
        if self._bye is None:
            with suppress(ConnectionClosed, TimeoutError):
                await asyncio.wait_for(self._say_bye_now(), _LEAVE_TIMEOUT_S)
            self._task.cancel()
        await asyncio.wait([self._task])

    async def _say_bye_now(self) -> None:
        if self._websocket is not None and not self._has_said_bye:
            await self._websocket.send(self._wire.encode({"type": "bye"}))

    async def _answer(self, message_id: str, kind: type[_Answer]) -> _Answer:
        self._notify()
        await self._until(lambda: message_id in self._answers)
        answer = self._answers.pop(message_id)
        if isinstance(answer, ErrorEvent):
            raise RefusedError(answer.code, answer.message)
        assert isinstance(answer, kind), "ids name the kind of their message"
        return answer

    def _check_open(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._has_said_bye or self._bye is not None:
            raise StreamError("the session is over: bye has been said")

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            if self._failure is not None:
                raise self._failure
            if self._bye is not None:
                raise StreamError(f"the server ended the session: {self._bye.reason}")
            await self._changed.wait()

    def _notify(self) -> None:
        """Wake everyone who waits for a condition, to look again."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _run(self) -> None:
        """Hold the session over as many connections as it takes; keep what ended it for those who wait."""
        try:
            await self._keep_connected()
        except Exception as failure:  # noqa: BLE001 - whatever it is, the caller waits for it, and nobody for this task
            self._failure = failure
        finally:
            if self._bye is None and self._failure is None:  # cancelled
                self._failure = StreamError("the session is over: it was left")
            self._notify()

    async def _keep_connected(self) -> None:
        clock = asyncio.get_running_loop().time
        retry_until_s, delay_s = 0.0, _FIRST_RETRY_S
        while self._bye is None:
            self._is_connected = False
            try:
                await self._converse()
            except (OSError, InvalidURI, InvalidHandshake, ConnectionClosed) as error:
                if self._session.ready is None:
                    raise ConnectionFailedError(f"no session at {self._url}: {error}") from error
                if self._is_connected:
                    retry_until_s, delay_s = clock() + self.ready.limits.resume_window_s, _FIRST_RETRY_S
                if clock() + delay_s > retry_until_s:
                    raise ConnectionFailedError(f"lost the session at {self._url}: {error}") from error
                await asyncio.sleep(delay_s)
                delay_s = min(2 * delay_s, _LONGEST_RETRY_S)

    async def _converse(self) -> None:
        """One connection, until ``Bye`` has come. Raises what ends it before."""
        async with websockets.asyncio.client.connect(
            self._url,
            subprotocols=[Subprotocol(self._wire.value)],
            additional_headers=self._headers,
            compression=None,
            close_timeout=_LEAVE_TIMEOUT_S,
        ) as websocket:
            await websocket.send(self._wire.encode(self._session.hello()))
            self._greeted(await websocket.recv())
            self._websocket = websocket
            try:
                await run_together(self._read(websocket), self._write(websocket))
            finally:
                self._websocket = None

    def _greeted(self, frame: str | bytes) -> None:
        message = parse(self._wire.decode(frame))
        if isinstance(message, ErrorEvent):
            raise RefusedError(message.code, message.message)
        if not isinstance(message, Ready):
            raise ProtocolError(f"the server answered hello with {message!r}")
        self._session.receive(message)
        self._is_connected = True
        self._notify()

    async def _read(self, websocket: ClientConnection) -> None:
        while self._bye is None:
            self._take(parse(self._wire.decode(await websocket.recv())))

    def _take(self, message: ServerMessage) -> None:
        if isinstance(message, ErrorEvent) and message.fatal:  # it is about the connection, which closes now
            if message.code in _RESUMABLE:
                return
            raise RefusedError(message.code, message.message)
        match event := self._session.receive(message):
            case ErrorEvent(id=str() as message_id):
                self._answers[message_id] = event  # raised where that message was sent, so it is no event
                event = None
            case Flushed() | Updated():
                self._answers[event.id] = event
            case Bye():
                self._bye = event
        if event is not None:
            self._events.append(event)
        self._notify()

    async def _write(self, websocket: ClientConnection) -> None:
        with suppress(ConnectionClosed):  # the reader tells, once it has read what came before the end
            while self._bye is None:
                message = self._session.next_message()
                if message is None:
                    await self._changed.wait()
                else:
                    await websocket.send(self._wire.encode(message))


@asynccontextmanager
async def connect(
    url: str, hello: Hello, *, wire: Wire = Wire.MSGPACK, api_key: str | None = None
) -> AsyncIterator[StreamClient]:
    """Begin a session; leaving the block ends it, and waits until all is decoded unless an exception leaves it.

    ``api_key`` is for a server that asks for one.

    Raises:
        ConnectionFailedError: if there is no server at ``url``, or it turns this client away.
        RefusedError: if the server refuses what ``hello`` asks for.
    """
    client = StreamClient(url, hello, wire, api_key)
    try:
        await client.until_ready()
        yield client
        await client.bye()
    finally:
        await client.leave()


class SyncStreamClient:
    """``StreamClient`` for code without an event loop: the same methods, each of which waits. Made by ``connect_sync``.

    The session lives in a thread of its own, so audio is sent and events arrive while the caller does something else.
    """

    def __init__(self, client: StreamClient, loop: asyncio.AbstractEventLoop) -> None:
        self._client = client
        self._loop = loop

    @property
    def ready(self) -> Ready:
        """What the server granted, its models and its limits."""
        return self._client.ready

    @property
    def sent_s(self) -> float:
        """Seconds of audio sent so far."""
        return self._client.sent_s

    def send_audio(self, data: bytes) -> None:
        """Send audio in the declared format, cut anywhere. Waits while too much is not yet safe with the server."""
        _wait_for(self._client.send_audio(data), self._loop)

    def flush(self) -> Flushed:
        """Wait until everything said so far is decoded and its finals are among the events."""
        return _wait_for(self._client.flush(), self._loop)

    def update(self, settings: Settings) -> Updated:
        """Change settings from the next utterance on. Raises ``RefusedError``; the session goes on."""
        return _wait_for(self._client.update(settings), self._loop)

    def bye(self) -> Bye:
        """End the session: waits until all is decoded. The events can still be read."""
        return _wait_for(self._client.bye(), self._loop)

    def next_event(self, timeout_s: float | None = None) -> Event | None:
        """The next event; ``None`` after ``Bye``.

        Raises:
            TimeoutError: if none came within ``timeout_s``; 0 asks only for what is there already.
            StreamError: if the stream broke, after the events that came before that.
        """
        return _wait_for(_within(timeout_s, self._client.next_event()), self._loop)

    def __iter__(self) -> Iterator[Event]:
        """Every event up to and with ``Bye``."""
        while (event := self.next_event()) is not None:
            yield event


@contextmanager
def connect_sync(
    url: str, hello: Hello, *, wire: Wire = Wire.MSGPACK, api_key: str | None = None
) -> Iterator[SyncStreamClient]:
    """``connect`` for code without an event loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="senseway-client", daemon=True)
    thread.start()
    try:
        client = _wait_for(_made(url, hello, wire, api_key), loop)
        try:
            _wait_for(client.until_ready(), loop)
            yield SyncStreamClient(client, loop)
            _wait_for(client.bye(), loop)
        finally:
            _wait_for(client.leave(), loop)
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _made(url: str, hello: Hello, wire: Wire, api_key: str | None) -> StreamClient:
    """A client whose task belongs to the running loop."""
    return StreamClient(url, hello, wire, api_key)


async def _within(timeout_s: float | None, awaitable: Awaitable[_Result]) -> _Result:
    async with asyncio.timeout(timeout_s):
        return await awaitable


def _wait_for(coroutine: Coroutine[Any, Any, _Result], loop: asyncio.AbstractEventLoop) -> _Result:
    return asyncio.run_coroutine_threadsafe(coroutine, loop).result()
