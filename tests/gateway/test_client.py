"""The Python client against a small server on loopback that acknowledges, answers, cuts and stalls as told."""

import asyncio
import json
import subprocess
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack
import pytest
from websockets.asyncio.server import ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from gateway.client import (
    AudioFormat,
    Bye,
    ConnectionFailedError,
    Event,
    Final,
    Hello,
    ProtocolError,
    RefusedError,
    Settings,
    StreamError,
    Wire,
    connect,
    connect_sync,
)

REPOSITORY = Path(__file__).parents[2]
HELLO = Hello(audio=AudioFormat("s16le", 16_000))
AUDIO = bytes(i % 251 for i in range(96_000))  # 3 s

Message = dict[str, Any]


@dataclass
class FakeServer:
    """One session that outlives its connections. A flush is answered with a final that says how much audio came."""

    cut_at_bytes: list[int] = field(default_factory=list)  # cuts the connection when so much audio has come
    refuse: Message | None = None  # answers hello with this error
    fatal_at_bytes: tuple[int, str] | None = None  # an error that ends the connection
    acknowledges: bool = True
    resume_window_s: float = 5.0
    taken: bytearray = field(default_factory=bytearray)
    events: list[Message] = field(default_factory=list)
    hellos: list[Message] = field(default_factory=list)
    updates: list[Message] = field(default_factory=list)
    got_bye: bool = False
    connection: ServerConnection | None = None

    async def handle(self, websocket: ServerConnection) -> None:
        self.connection = websocket
        wire = Wire(websocket.subprotocol)

        async def send(message: Message) -> None:
            await websocket.send(json.dumps(message) if wire is Wire.JSON else msgpack.packb(message))

        try:
            await self.greet(self.decoded(wire, await websocket.recv()), send)
            while not self.got_bye and self.refuse is None:
                await self.take(self.decoded(wire, await websocket.recv()), send, websocket)
        except (ConnectionClosed, ConnectionResetError):
            pass

    def decoded(self, wire: Wire, frame: str | bytes) -> Message:
        if wire is Wire.MSGPACK:
            assert isinstance(frame, bytes)
            return dict(msgpack.unpackb(frame))
        return {"type": "audio", "data": frame} if isinstance(frame, bytes) else dict(json.loads(frame))

    async def greet(self, hello: Message, send: Callable[[Message], Awaitable[None]]) -> None:
        self.hellos.append(hello)
        if self.refuse is not None:
            await send({"type": "error", "event": None, "fatal": False, "id": None, **self.refuse})
            return
        await send(
            {
                "type": "ready",
                "protocol": 1,
                "session_id": "s1",
                "resumed": "resume" in hello,
                "taken_samples": len(self.taken) // 2,
                "model": "m",
                "language": None,
                "granted": [],
                "declined": [],
                "engine": {"backend": "fake", "why": "a test"},
                "models": [{"name": "m", "languages": ["en"], "capabilities": []}],
                "limits": {"max_frame_bytes": 1 << 20, "max_unacked_s": 1.0, "resume_window_s": self.resume_window_s},
            }
        )
        del self.taken[len(self.taken) // 2 * 2 :]
        for event in self.events:
            if event["event"] > hello.get("resume", {"last_event": 0})["last_event"]:
                await send(event)

    async def take(
        self, message: Message, send: Callable[[Message], Awaitable[None]], websocket: ServerConnection
    ) -> None:
        match message["type"]:
            case "audio":
                self.taken += message["data"]
                if self.cut_at_bytes and len(self.taken) >= self.cut_at_bytes[0]:
                    self.cut_at_bytes.pop(0)
                    websocket.transport.abort()
                    raise ConnectionResetError
                elif self.fatal_at_bytes is not None and len(self.taken) >= self.fatal_at_bytes[0]:
                    code, self.fatal_at_bytes = self.fatal_at_bytes[1], None
                    await send(
                        {"type": "error", "event": None, "code": code, "message": "told to", "fatal": True, "id": None}
                    )
                    await websocket.close(4409)
                elif self.acknowledges:
                    await send({"type": "ack", "samples": len(self.taken) // 2})
            case "flush":
                await send(self.final())
                await send(self.event(type="flushed", id=message["id"], at_s=0.0))
            case "update" if message.get("task") == "sing":
                error = {"code": "unsupported_option", "message": "no task 'sing'", "fatal": False}
                await send(self.event(type="error", id=message["id"], **error))
            case "update":
                self.updates.append(message)
                await send(self.event(type="updated", id=message["id"], at_s=0.0))
            case "bye":
                self.got_bye = True
                await send(self.event(type="bye", reason="bye", audio_s=len(self.taken) / 32_000))

    def event(self, **fields: Any) -> Message:
        self.events.append({"event": len(self.events) + 1, **fields})
        return self.events[-1]

    def final(self) -> Message:
        word = {"text": f" {len(self.taken)}", "start_s": 0.0, "end_s": 1.0, "confidence": None}
        return self.event(
            type="final",
            segment=1,
            revision=1,
            text=str(len(self.taken)),
            start_s=0.0,
            end_s=1.0,
            words=[word],
            n_committed=1,
            language="en",
            reason="flush",
        )


@asynccontextmanager
async def serving(fake: FakeServer) -> AsyncIterator[str]:
    async with serve(fake.handle, "127.0.0.1", 0, subprotocols=[wire.value for wire in Wire]) as server:  # type: ignore[misc]  # NewType
        yield f"ws://127.0.0.1:{next(iter(server.sockets)).getsockname()[1]}/v1/stream"


async def streamed(
    fake: FakeServer, *, wire: Wire = Wire.MSGPACK, audio: bytes = AUDIO, cut_bytes: int = 3_333
) -> list[Event]:
    async with serving(fake) as url, connect(url, HELLO, wire=wire) as stream:
        for start in range(0, len(audio), cut_bytes):
            await stream.send_audio(audio[start : start + cut_bytes])
        await stream.flush()
        await stream.bye()
        return [event async for event in stream]


@pytest.mark.parametrize("wire", Wire)
def test_audio_goes_up_and_events_come_down(wire: Wire) -> None:
    fake = FakeServer()
    events = asyncio.run(streamed(fake, wire=wire))
    assert bytes(fake.taken) == AUDIO
    assert [type(event).__name__ for event in events] == ["Final", "Flushed", "Bye"]
    final = events[0]
    assert isinstance(final, Final)
    assert final.words[0].text == f" {len(AUDIO)}"


@pytest.mark.parametrize("cuts", [[1], [50_001], [96_000], [10_000, 10_001, 30_000, 95_999]])
def test_a_lost_connection_is_taken_up_without_loss_or_repetition(cuts: list[int]) -> None:
    fake = FakeServer(cut_at_bytes=list(cuts))
    events = asyncio.run(streamed(fake))
    assert bytes(fake.taken) == AUDIO
    assert len(fake.hellos) == len(cuts) + 1
    assert [event.event for event in events] == [1, 2, 3]


def test_a_client_that_was_too_slow_comes_back() -> None:
    fake = FakeServer(fatal_at_bytes=(50_000, "too_slow"))
    asyncio.run(streamed(fake))
    assert bytes(fake.taken) == AUDIO
    assert len(fake.hellos) == 2


def test_a_fatal_error_reaches_the_caller_with_its_code() -> None:
    with pytest.raises(RefusedError, match="taken_over: told to") as refusal:
        asyncio.run(streamed(FakeServer(fatal_at_bytes=(50_000, "taken_over"))))
    assert refusal.value.code == "taken_over"


def test_a_refused_hello_reaches_the_caller_with_its_code() -> None:
    with pytest.raises(RefusedError, match="unknown_model: no such model"):
        asyncio.run(streamed(FakeServer(refuse={"code": "unknown_model", "message": "no such model"})))


def test_no_server_is_an_error_that_names_the_address() -> None:
    async def run() -> None:
        async with serving(FakeServer()) as url:
            pass
        async with connect(url, HELLO):
            pass

    with pytest.raises(ConnectionFailedError, match=r"no session at ws://127\.0\.0\.1:"):
        asyncio.run(run())


def test_an_address_of_another_kind_is_an_error() -> None:
    async def run() -> None:
        async with connect("http://127.0.0.1/", HELLO):
            pass

    with pytest.raises(ConnectionFailedError, match="http://127.0.0.1/"):
        asyncio.run(run())


def test_a_session_lost_for_longer_than_its_window_is_an_error_behind_the_events_before_it() -> None:
    seen: list[Event] = []

    async def run() -> None:
        fake = FakeServer(resume_window_s=0.0)
        async with serving(fake) as url, connect(url, HELLO) as stream:
            await stream.send_audio(AUDIO[:1_000])
            await stream.flush()
            fake.cut_at_bytes = [1_001]
            await stream.send_audio(AUDIO[:1_000])
            async for event in stream:
                seen.append(event)

    with pytest.raises(ConnectionFailedError, match="lost the session"):
        asyncio.run(run())
    assert [type(event).__name__ for event in seen] == ["Final", "Flushed"]


def test_sending_waits_while_the_server_acknowledges_nothing() -> None:
    async def run() -> None:
        fake = FakeServer(acknowledges=False)
        async with serving(fake) as url, connect(url, HELLO) as stream:
            sending = asyncio.create_task(stream.send_audio(AUDIO))
            while len(fake.taken) < 32_000:
                await asyncio.sleep(0)
            assert stream.sent_s == 1.0
            assert not sending.done()
            fake.acknowledges = True
            assert fake.connection is not None
            await fake.connection.close(1001)  # its next ready acknowledges what has been taken
            await sending
        assert bytes(fake.taken) == AUDIO

    asyncio.run(run())


def test_settings_change_by_update() -> None:
    async def run() -> FakeServer:
        fake = FakeServer()
        async with serving(fake) as url, connect(url, HELLO) as stream:
            await stream.update(Settings(language="fr"))
        return fake

    assert asyncio.run(run()).updates == [{"type": "update", "language": "fr", "id": "update-1"}]


def test_a_refused_update_is_raised_where_it_was_asked_and_the_session_goes_on() -> None:
    async def run() -> list[Event]:
        async with serving(FakeServer()) as url, connect(url, HELLO) as stream:
            with pytest.raises(RefusedError, match="unsupported_option: no task 'sing'"):
                await stream.update(Settings(task="sing"))
            await stream.flush()
            await stream.bye()
            return [event async for event in stream]

    assert [type(event).__name__ for event in asyncio.run(run())] == ["Final", "Flushed", "Bye"]


def test_leaving_the_block_says_bye_and_waits_for_the_end() -> None:
    async def run() -> tuple[FakeServer, Event | None]:
        fake = FakeServer()
        async with serving(fake) as url:
            async with connect(url, HELLO) as stream:
                await stream.send_audio(AUDIO)
            return fake, await stream.next_event()

    fake, last = asyncio.run(run())
    assert fake.got_bye
    assert last == Bye(1, "bye", 3.0)


def test_an_exception_in_the_block_ends_the_session_at_once() -> None:
    fake = FakeServer()

    async def run() -> None:
        async with serving(fake) as url, connect(url, HELLO) as stream:
            await stream.send_audio(AUDIO[:100])
            raise KeyError("the caller's")

    with pytest.raises(KeyError, match="the caller's"):
        asyncio.run(run())
    assert fake.got_bye


def test_nothing_can_be_said_after_bye() -> None:
    async def run() -> None:
        async with serving(FakeServer()) as url, connect(url, HELLO) as stream:
            await stream.bye()
            with pytest.raises(StreamError, match="bye has been said"):
                await stream.send_audio(b"12")

    asyncio.run(run())


def test_a_server_that_speaks_something_else_is_an_error() -> None:
    async def babble(websocket: ServerConnection) -> None:
        await websocket.recv()
        await websocket.send("hi")

    async def run() -> None:
        async with serve(babble, "127.0.0.1", 0) as server:
            port = next(iter(server.sockets)).getsockname()[1]
            async with connect(f"ws://127.0.0.1:{port}", HELLO, wire=Wire.JSON):
                pass

    with pytest.raises(ProtocolError, match="not JSON"):
        asyncio.run(run())


def test_the_sync_client_does_the_same() -> None:
    fake = FakeServer(cut_at_bytes=[50_001])

    async def run() -> list[str]:
        async with serving(fake) as url:
            return await asyncio.to_thread(use, url)

    def use(url: str) -> list[str]:
        with connect_sync(url, HELLO) as stream:
            with pytest.raises(TimeoutError):
                stream.next_event(timeout_s=0)
            stream.send_audio(AUDIO)
            stream.update(Settings(task="translate"))
            stream.flush()
            assert stream.ready.model == "m"
            assert isinstance(stream.next_event(timeout_s=0), Event)
            stream.bye()
            assert stream.sent_s == 3.0
            return [type(event).__name__ for event in stream]

    assert asyncio.run(run()) == ["Final", "Flushed", "Bye"]
    assert bytes(fake.taken) == AUDIO


def test_the_client_needs_websockets_and_msgpack_only() -> None:
    """Every other package is hidden, and so are our own but ``gateway``."""
    program = textwrap.dedent(
        """
        import importlib.abc, sys
        ALLOWED = {"websockets", "msgpack", "gateway"} | set(sys.stdlib_module_names)

        class Hidden(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path=None, target=None):
                if name.partition(".")[0] not in ALLOWED:
                    raise ModuleNotFoundError(f"{name} is hidden")

        sys.meta_path.insert(0, Hidden())
        import gateway.client
        ours = sorted(name for name in sys.modules if name.startswith("gateway."))
        print(*ours)
        """
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [
        "gateway.client",
        "gateway.client_events",
        "gateway.client_session",
        "gateway.together",
    ]
