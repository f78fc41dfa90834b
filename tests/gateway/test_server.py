"""The shell, on loopback, with the scripted engine: sockets, threads, timers."""

import asyncio
import json
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import msgpack
import numpy as np
import pytest
from numpy.typing import NDArray
from starlette.applications import Starlette
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from gateway.app import build_app
from gateway.config import Config
from gateway.server import MAX_OUTGOING, SCORE_INTERVAL_S
from gateway.session import DecodeJob, Session
from models.scripted import ScriptedEngine, recite
from streaming.engine import Chunk, EngineStream
from streaming.transcript import Hypothesis
from tests.serving import DEADLINE_S, HELLO, finals, finish, hear, is_freed, served, sessions_become, speech, tell
from vad.detector import DetectorState
from vad.energy import EnergyDetector

pytestmark = pytest.mark.e2e


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(recite("it was the best of times it was the worst of times", start_sample=8_000))


@pytest.fixture
def address(engine: ScriptedEngine) -> Iterator[str]:
    with served(engine) as found:
        yield found


def open_stream(address: str, subprotocol: str = "senseway.v1.json") -> ClientConnection:
    return connect(f"ws://{address}/v1/stream", subprotocols=[subprotocol], compression=None, close_timeout=2)


@pytest.mark.behaviour("J", door="native")
def test_speech_becomes_text_and_the_session_ends_cleanly(address: str, engine: ScriptedEngine) -> None:
    with open_stream(address) as stream:
        stream.send(json.dumps(HELLO))
        ready = hear(stream, "ready")
        assert ready["model"] == "scripted" and ready["protocol"] == 1 and not ready["resumed"]
        audio = speech(2.0)
        for at in range(0, len(audio), 3_201):  # odd: samples are cut between frames
            stream.send(audio[at : at + 3_201])
        messages = finish(stream)
    assert finals(messages) == "it was the best of times"
    assert [m["event"] for m in messages if "event" in m] == sorted(m["event"] for m in messages if "event" in m)
    assert messages[-1]["type"] == "bye"
    assert is_freed(address, engine)


def test_messagepack_gives_the_same_transcript(address: str) -> None:
    with open_stream(address, "senseway.v1.msgpack") as stream:
        assert stream.subprotocol == "senseway.v1.msgpack"
        stream.send(msgpack.packb(HELLO))
        stream.send(msgpack.packb({"type": "audio", "data": speech(2.0)}))
        stream.send(msgpack.packb({"type": "bye"}))
        messages = []
        with pytest.raises(ConnectionClosed):
            while True:
                messages.append(msgpack.unpackb(stream.recv(timeout=DEADLINE_S)))
    assert finals(messages) == "it was the best of times"


def test_client_without_a_subprotocol_speaks_json(address: str) -> None:
    with connect(f"ws://{address}/v1/stream", compression=None) as stream:
        assert stream.subprotocol is None
        stream.send(json.dumps(HELLO))
        assert hear(stream, "ready")


def test_unknown_subprotocols_are_refused_at_the_handshake(address: str) -> None:
    with pytest.raises(InvalidStatus) as caught:
        open_stream(address, "chat")
    assert caught.value.response.status_code == 400
    assert b"senseway.v1.json" in caught.value.response.body


@pytest.mark.parametrize("origin", ["https://elsewhere.example", "null", "http://127.0.0.1:1"])
def test_pages_of_another_origin_are_refused_at_the_handshake(address: str, origin: str) -> None:
    with pytest.raises(InvalidStatus) as caught:
        connect(f"ws://{address}/v1/stream", origin=origin)
    assert caught.value.response.status_code == 403
    assert b"allowed_origins" in caught.value.response.body


def test_own_page_and_allowed_origins_may_connect(engine: ScriptedEngine) -> None:
    with served(engine, allowed_origins=("https://app.example",)) as address:
        for origin in (f"http://{address}", "https://app.example"):
            with connect(f"ws://{address}/v1/stream", origin=origin) as stream:
                stream.send(json.dumps(HELLO))
                assert hear(stream, "ready")


def test_compression_is_not_offered(address: str) -> None:
    with connect(f"ws://{address}/v1/stream", compression="deflate") as stream:
        assert "Sec-WebSocket-Extensions" not in stream.response.headers


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        ("{", "bad_message"),
        ('{"type": "hum"}', "bad_message"),
        ('{"type": "flush", "id": 1}', "bad_message"),
        ('{"type": "audio", "data": "AAAA"}', "bad_message"),
        (json.dumps(HELLO), "already_greeted"),
        (b"", "empty_audio"),
        ('{"type": "update", "id": "u", "language": "xx"}', "unsupported_option"),
        ('{"type": "update", "id": "u", "vocabulary": ["Zwolle"]}', "unsupported_option"),
    ],
)
@pytest.mark.behaviour("J", door="native")
def test_a_bad_frame_is_told_and_nothing_is_lost(address: str, frame: str | bytes, code: str) -> None:
    audio = speech(2.0)
    half = len(audio) // 2
    with open_stream(address) as stream:
        stream.send(json.dumps(HELLO))
        stream.send(audio[:half])
        stream.send(frame)
        error = hear(stream, "error")
        stream.send(audio[half:])
        assert finals(finish(stream)) == "it was the best of times"
    assert error["code"] == code and not error["fatal"] and error["message"]


def test_audio_before_hello_is_an_error_and_hello_may_follow(address: str) -> None:
    with open_stream(address) as stream:
        stream.send(b"\0\0")
        assert hear(stream, "error")["code"] == "hello_required"
        stream.send(json.dumps(HELLO))
        assert hear(stream, "ready")


def test_a_frame_too_large_closes_its_connection_and_no_other(address: str) -> None:
    """Only the frame's head is sent: bytes still under way when the server closes could reset the connection first."""
    host, port = address.split(":")
    with open_stream(address) as other, socket.create_connection((host, int(port)), timeout=DEADLINE_S) as raw:
        other.send(json.dumps(HELLO))
        raw.sendall(
            f"GET /v1/stream HTTP/1.1\r\nHost: {address}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        assert raw.recv(4_096).startswith(b"HTTP/1.1 101")
        raw.sendall(b"\x82\xff" + (1 << 21).to_bytes(8, "big") + bytes(4))  # binary, masked with zeros, 2 MiB to come
        answer = b""
        while block := raw.recv(4_096):
            answer += block
        assert answer[:1] == b"\x88" and answer[2:4] == (1009).to_bytes(2, "big")
        other.send(speech(2.0))
        assert finals(finish(other)) == "it was the best of times"


@pytest.mark.behaviour("C", door="native")
def test_flush_is_answered_behind_the_final(address: str) -> None:
    with open_stream(address) as stream:
        stream.send(json.dumps(HELLO))
        stream.send(speech(2.0, after_s=0.0))
        tell(stream, type="flush", id="a1")
        assert hear(stream, "final", "flushed")["type"] == "final"
        assert hear(stream, "flushed")["id"] == "a1"
        tell(stream, type="flush", id="a2")
        assert hear(stream, "flushed")["id"] == "a2"


@pytest.mark.parametrize("share", [0.1, 0.35, 0.5, 0.8, 1.0])
@pytest.mark.behaviour("K", door="native")
def test_a_lost_connection_is_resumed_with_the_same_transcript(address: str, share: float) -> None:
    audio = speech(2.9)
    cut = int(len(audio) * share) // 2 * 2
    seen = []
    with open_stream(address) as stream:
        stream.send(json.dumps(HELLO))
        session_id = hear(stream, "ready")["session_id"]
        for at in range(0, cut, 16_000):
            stream.send(audio[at : min(at + 16_000, cut)])
        if cut > 32_000:
            seen.append(hear(stream, "speech_started"))
        stream.socket.shutdown(socket.SHUT_RDWR)  # no close frame: a cut cable
    last_event = max((message["event"] for message in seen), default=0)
    with open_stream(address) as stream:
        tell(stream, type="hello", resume={"session_id": session_id, "last_event": last_event})
        ready = hear(stream, "ready")
        assert ready["resumed"] and ready["session_id"] == session_id and ready["taken_samples"] * 2 <= cut
        stream.send(audio[ready["taken_samples"] * 2 :])
        seen += [message for message in finish(stream) if "event" in message]
    numbers = [message["event"] for message in seen]
    assert numbers == sorted(set(numbers))
    assert finals(seen) == "it was the best of times it was"


def test_windows_of_many_small_packets_are_scored_together(engine: ScriptedEngine) -> None:
    class Counting(EnergyDetector):
        n_calls = 0

        def score(
            self, batch: Sequence[tuple[DetectorState, NDArray[np.float32]]]
        ) -> list[tuple[NDArray[np.float32], DetectorState]]:
            self.n_calls += 1
            return super().score(batch)

    detector = Counting()
    began_s = time.monotonic()
    with served(engine, detector) as address, open_stream(address) as stream:
        stream.send(json.dumps(HELLO))
        audio = speech(2.0)
        for at in range(0, len(audio), 1_024):  # a window each
            stream.send(audio[at : at + 1_024])
        assert finals(finish(stream)) == "it was the best of times"
        n_at_most = (time.monotonic() - began_s) / SCORE_INTERVAL_S + 2
    assert detector.n_calls <= n_at_most


def test_resuming_takes_over_a_connection_that_still_looks_alive(address: str) -> None:
    with open_stream(address) as old, open_stream(address) as new:
        old.send(json.dumps(HELLO))
        session_id = hear(old, "ready")["session_id"]
        tell(new, type="hello", resume={"session_id": session_id, "last_event": 0})
        assert hear(new, "ready")["resumed"]
        assert hear(old, "error")["code"] == "taken_over"
        new.send(speech(2.0))
        assert finals(finish(new)) == "it was the best of times"


def test_an_unknown_session_can_not_be_resumed_but_a_new_one_begun(address: str) -> None:
    with open_stream(address) as stream:
        tell(stream, type="hello", resume={"session_id": "nobody", "last_event": 0})
        assert hear(stream, "error")["code"] == "unknown_session"
        stream.send(json.dumps(HELLO))
        assert hear(stream, "ready")


def test_one_session_too_many_is_turned_away_politely(engine: ScriptedEngine) -> None:
    with served(engine, max_sessions=1) as address, open_stream(address) as stream:
        stream.send(json.dumps(HELLO))
        hear(stream, "ready")
        with open_stream(address) as other:
            other.send(json.dumps(HELLO))
            assert hear(other, "error")["code"] == "server_full"
            with pytest.raises(ConnectionClosed) as caught:
                other.recv(timeout=DEADLINE_S)
            assert caught.value.rcvd is not None and caught.value.rcvd.code == 1013
        stream.send(speech(2.0))
        assert finals(finish(stream)) == "it was the best of times"


def test_a_full_server_gives_a_lost_session_back(engine: ScriptedEngine) -> None:
    with served(engine, max_sessions=1) as address:
        with open_stream(address) as stream:
            stream.send(json.dumps(HELLO))
            session_id = hear(stream, "ready")["session_id"]
            stream.socket.shutdown(socket.SHUT_RDWR)
        with open_stream(address) as stream:
            tell(stream, type="hello", resume={"session_id": session_id, "last_event": 0})
            assert hear(stream, "ready")["resumed"]
            stream.send(speech(2.0))
            assert finals(finish(stream)) == "it was the best of times"


def test_a_model_that_fails_costs_nobody_else_anything() -> None:
    engine = ScriptedEngine(
        recite("it was the best of times", start_sample=8_000), failing_decodes=frozenset(range(1, 50))
    )
    with served(engine) as address, open_stream(address) as stream:
        stream.send(json.dumps(HELLO))
        stream.send(speech(1.5))
        error = hear(stream, "error")
        assert error["code"] == "decode_failed" and not error["fatal"]
        assert finals(finish(stream)) == ""


def test_a_client_that_never_reads_is_given_up_and_may_resume(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gateway.server.GOODBYE_TIMEOUT_S", 0.1)

    async def scene() -> dict:
        app = build_app(Config(models=("scripted",)), {"scripted": engine}, EnergyDetector())
        async with app.router.lifespan_context(app):
            deaf, again = Peer(app), Peer(app)
            deaf.say(HELLO)
            session_id = (await deaf.hear("ready"))["session_id"]
            deaf.reads.clear()
            for index in range(MAX_OUTGOING + 2):
                deaf.say({"type": "flush", "id": str(index)})
            await deaf.task  # the connection is over, though its client never said so
            again.say({"type": "hello", "resume": {"session_id": session_id, "last_event": 0}})
            assert (await again.hear("ready"))["resumed"]
            again.say({"type": "bye"})
            return await again.hear("bye")

    assert asyncio.run(asyncio.wait_for(scene(), DEADLINE_S))["event"] > MAX_OUTGOING


def test_flushes_sent_ahead_of_a_slow_engine_are_all_answered() -> None:
    held = threading.Event()

    class Slow(ScriptedEngine):
        def decode(self, batch: Sequence[tuple[EngineStream, Chunk]]) -> list[Hypothesis]:
            held.wait(DEADLINE_S)
            return super().decode(batch)

    with served(Slow(recite("it was", start_sample=8_000))) as address, open_stream(address) as stream:
        stream.send(json.dumps(HELLO))
        stream.send(speech(1.5, after_s=0.0))
        for index in range(1_000):
            tell(stream, type="flush", id=str(index))
        hear(stream, "speech_ended")
        held.set()
        assert [hear(stream, "flushed")["id"] for _ in range(1_000)] == [str(index) for index in range(1_000)]


def test_a_client_that_vanishes_in_mid_word_leaves_nothing_behind(engine: ScriptedEngine) -> None:
    with served(engine, max_sessions=2) as address:
        with open_stream(address) as stream:
            stream.send(json.dumps(HELLO))
            stream.send(speech(2.0, after_s=0.0))
            hear(stream, "partial")
            stream.socket.shutdown(socket.SHUT_RDWR)
        with open_stream(address) as stream:
            stream.send(json.dumps(HELLO))
            stream.send(speech(2.0))
            assert finals(finish(stream)) == "it was the best of times"


def test_connections_that_never_say_hello_leave_their_places_free(engine: ScriptedEngine) -> None:
    with served(engine, max_sessions=1) as address:
        for _ in range(40):
            with open_stream(address):
                pass
        assert sessions_become(address, 0)
        with open_stream(address) as stream:
            stream.send(json.dumps(HELLO))
            assert hear(stream, "ready")


def test_a_session_gone_through_many_events_is_resumed_from_the_first(address: str) -> None:
    with open_stream(address) as stream:
        stream.send(json.dumps(HELLO))
        session_id = hear(stream, "ready")["session_id"]
        for index in range(1_000):
            tell(stream, type="flush", id=str(index))
            hear(stream, "flushed")
        stream.socket.shutdown(socket.SHUT_RDWR)
    with open_stream(address) as stream:
        tell(stream, type="hello", resume={"session_id": session_id, "last_event": 0})
        messages = finish(stream)
    assert [m["id"] for m in messages if m["type"] == "flushed"] == [str(index) for index in range(1_000)]


def test_what_an_old_connection_says_late_does_not_reach_the_resumed_session(engine: ScriptedEngine) -> None:
    """The old client does not read, so its goodbye is stuck; then a frame of it arrives."""
    config = Config(models=("scripted",))

    async def scene() -> dict:
        app = build_app(config, {"scripted": engine}, EnergyDetector())
        async with app.router.lifespan_context(app):
            old, new = Peer(app), Peer(app)
            old.say(HELLO)
            session_id = (await old.hear("ready"))["session_id"]
            old.reads.clear()
            new.say({"type": "hello", "resume": {"session_id": session_id, "last_event": 0}})
            assert (await new.hear("ready"))["taken_samples"] == 0
            old.inbox.put_nowait({"type": "websocket.receive", "bytes": bytes(32_000)})
            await old.inbox_is_empty()
            new.say({"type": "bye"})
            bye = await new.hear("bye")
            old.reads.set()
            await asyncio.gather(old.task, new.task)
            return bye

    assert asyncio.run(asyncio.wait_for(scene(), DEADLINE_S))["audio_s"] == 0


class Peer:
    """A client without a socket, for what has to happen in an exact order."""

    def __init__(self, app: Starlette) -> None:
        self.inbox: asyncio.Queue[dict] = asyncio.Queue()
        self.outbox: asyncio.Queue[dict] = asyncio.Queue()
        self.reads = asyncio.Event()
        self.reads.set()
        self.inbox.put_nowait({"type": "websocket.connect"})
        scope = {"type": "websocket", "path": "/v1/stream", "subprotocols": [], "headers": [], "query_string": b""}
        self.task = asyncio.create_task(app(scope, self.inbox.get, self._send))  # type: ignore[arg-type]

    async def _send(self, message: dict) -> None:
        await self.reads.wait()
        self.outbox.put_nowait(message)

    def say(self, message: dict) -> None:
        self.inbox.put_nowait({"type": "websocket.receive", "text": json.dumps(message)})

    async def hear(self, kind: str) -> dict:
        while True:
            message = await self.outbox.get()
            if "text" in message and (said := json.loads(message["text"]))["type"] == kind:
                return said

    async def inbox_is_empty(self) -> None:
        while not self.inbox.empty():
            await asyncio.sleep(0)
        await asyncio.sleep(0)


def test_clients_are_told_when_the_server_stops(engine: ScriptedEngine) -> None:
    with ExitStack() as stack:
        with served(engine) as address:
            stream = stack.enter_context(open_stream(address))
            stream.send(json.dumps(HELLO))
            hear(stream, "ready")
        assert hear(stream, "error")["code"] == "shutting_down"
        with pytest.raises(ConnectionClosed) as caught:
            stream.recv(timeout=DEADLINE_S)
        assert caught.value.rcvd is not None and caught.value.rcvd.code == 1012


def test_a_fault_in_one_session_ends_it_alone_and_frees_its_streams(
    engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    next_decode = Session.next_decode

    def faulty(session: Session) -> DecodeJob | None:
        if session.session_id in faulty_ids:
            raise ValueError("no such audio")
        return next_decode(session)

    faulty_ids: set[str] = set()
    monkeypatch.setattr(Session, "next_decode", faulty)
    with served(engine) as address, open_stream(address) as stream, open_stream(address) as other:
        stream.send(json.dumps(HELLO))
        faulty_ids.add(hear(stream, "ready")["session_id"])
        stream.send(speech(2.0))
        assert hear(stream, "error")["code"] == "internal"
        other.send(json.dumps(HELLO))
        other.send(speech(2.0))
        assert finals(finish(other)) == "it was the best of times"
        assert is_freed(address, engine)


def test_an_engine_that_does_not_answer_for_each_chunk_has_failed() -> None:
    class Mute(ScriptedEngine):
        def decode(self, batch: Sequence[tuple[EngineStream, Chunk]]) -> list[Hypothesis]:
            return []

    with served(Mute(recite("it was", start_sample=8_000))) as address, open_stream(address) as stream:
        stream.send(json.dumps(HELLO))
        stream.send(speech(1.5))
        assert hear(stream, "error")["code"] == "decode_failed"
        assert finals(finish(stream)) == ""


def test_windows_that_the_detector_can_not_take_end_their_own_session_only(engine: ScriptedEngine) -> None:
    class Choosy(EnergyDetector):
        def score(
            self, batch: Sequence[tuple[DetectorState, NDArray[np.float32]]]
        ) -> list[tuple[NDArray[np.float32], DetectorState]]:
            if any(float(np.abs(windows).max()) > 0.999 for _, windows in batch):
                raise ValueError("too loud")
            return super().score(batch)

    with served(engine, Choosy()) as address, open_stream(address) as stream, open_stream(address) as other:
        stream.send(json.dumps(HELLO))
        hear(stream, "ready")
        other.send(json.dumps(HELLO))
        quiet = (np.frombuffer(speech(2.0), "<i2") // 2).astype("<i2").tobytes()
        for at in range(0, len(quiet), 32_000):
            other.send(quiet[at : at + 32_000])
            if at == 32_000:
                stream.send(b"\xff\x7f" * 16_000)
        assert hear(stream, "error")["code"] == "internal"
        assert finals(finish(other)) == "it was the best of times"
        assert is_freed(address, engine)


@pytest.mark.behaviour("K", door="native")
def test_many_sessions_at_once_never_mix() -> None:
    engine = ScriptedEngine(recite("one two three four five six", start_sample=8_000))
    durations = [0.8, 1.1, 1.6, 2.0] * 4

    async def one(address: str, duration_s: float) -> str:
        return await asyncio.to_thread(_transcript, address, duration_s)

    async def everyone(address: str) -> list[str]:
        return list(await asyncio.gather(*(one(address, duration_s) for duration_s in durations)))

    with served(engine) as address:
        texts = asyncio.run(everyone(address))
    assert texts == [" ".join("one two three four five six".split()[: _n_words(d)]) for d in durations]
    assert engine.n_open_streams == 0


def test_health_and_models_answer(address: str) -> None:
    health = json.load(urllib.request.urlopen(f"http://{address}/health", timeout=DEADLINE_S))
    assert health["status"] == "ok" and health["engines"][0]["backend"] == "script"
    models = json.load(urllib.request.urlopen(f"http://{address}/v1/models", timeout=DEADLINE_S))
    assert models["models"][0]["name"] == "scripted" and "word_times" in models["models"][0]["capabilities"]


def test_health_and_ready_tell_what_computes_now() -> None:
    class Moving(ScriptedEngine):
        """Goes on elsewhere when told to."""

        backend, why = "fast", "the fastest there is"

    moving = Moving(recite("it was", start_sample=8_000))
    with served(moving) as address:
        for backend, why in (("fast", "the fastest there is"), ("slow", "fast failed")):
            moving.backend, moving.why = backend, why
            health = json.load(urllib.request.urlopen(f"http://{address}/health", timeout=DEADLINE_S))
            assert health["engines"] == [{"model": "scripted", "backend": backend, "why": why}]
            with open_stream(address) as stream:
                stream.send(json.dumps(HELLO))
                assert json.loads(stream.recv(DEADLINE_S))["engine"] == {"backend": backend, "why": why}


def test_page_is_served_and_never_kept_without_asking(address: str) -> None:
    with urllib.request.urlopen(f"http://{address}/", timeout=DEADLINE_S) as page:
        assert page.headers["Cache-Control"] == "no-cache" and b"<html" in page.read()


def _transcript(address: str, duration_s: float) -> str:
    with open_stream(address) as stream:
        stream.send(json.dumps(HELLO))
        stream.send(speech(duration_s))
        return finals(finish(stream))


def _n_words(duration_s: float) -> int:
    """Words of 280 ms every 360 ms that end within the speech or the 160 ms that the gate adds behind it."""
    return sum(0.360 * i + 0.280 <= duration_s + 0.16 for i in range(6))


# ---------------------------------------------------------------- the model of turns


class Judge:
    """Gives every pause one probability, or fails."""

    name = "judge"

    def __init__(self, probability: float | None) -> None:
        self._probability = probability

    def probability(self, samples: NDArray[np.float32]) -> float:
        if self._probability is None:
            raise RuntimeError("asked to fail")
        return self._probability


@pytest.mark.parametrize(("probability", "n_utterances"), [(0.9, 2), (0.1, 1), (None, 1)])
def test_pauses_are_judged_and_a_judge_that_fails_costs_nobody_the_session(
    engine: ScriptedEngine, probability: float | None, n_utterances: int
) -> None:
    with served(engine, turn_detector=Judge(probability)) as address:
        with open_stream(address) as stream:
            stream.send(json.dumps({**HELLO, "hangover_ms": 3_000, "turn_hangover_ms": 300}))
            assert hear(stream, "ready")["turn_model"] == "judge"
            stream.send(speech(1.5) + speech(1.5))
            messages = finish(stream)
        health = json.load(urllib.request.urlopen(f"http://{address}/health", timeout=DEADLINE_S))
    assert len([m for m in messages if m["type"] == "speech_ended"]) == n_utterances
    assert finals(messages).startswith("it was the best")
    assert health["turn_model"] == "judge"


class HangingJudge:
    """Hangs on its first pause until it is let go; the speaker is done at each later one."""

    name = "judge"

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.n_asked = 0

    def probability(self, samples: NDArray[np.float32]) -> float:
        self.n_asked += 1
        if self.n_asked == 1:
            assert self.let_go.wait(DEADLINE_S)
        return 0.9


def n_spoken(address: str, *, hangover_ms: int) -> int:
    """How many utterances a session with the model of turns makes of two that a second of silence lies between."""
    with open_stream(address) as stream:
        stream.send(json.dumps({**HELLO, "hangover_ms": hangover_ms, "turn_hangover_ms": 300}))
        stream.send(speech(1.5) + speech(1.5))
        messages = finish(stream)
    assert finals(messages).startswith("it was the best")
    return len([message for message in messages if message["type"] == "speech_ended"])


def test_a_judgement_that_hangs_holds_up_neither_its_session_nor_later_ones(engine: ScriptedEngine) -> None:
    judge = HangingJudge()
    with served(engine, turn_detector=judge) as address:
        assert n_spoken(address, hangover_ms=3_000) == 1  # its first pause hangs, its others are not judged
        assert n_spoken(address, hangover_ms=3_000) == 1  # nor are those of this one
        assert judge.n_asked == 1
        judge.let_go.set()
        wait_until(lambda: n_spoken(address, hangover_ms=3_000) == 2)  # and it is asked again once it answers
        figures = urllib.request.urlopen(f"http://{address}/metrics", timeout=DEADLINE_S).read().decode()
    assert "senseway_turns_unjudged_total 0.0" not in figures


def test_a_judgement_that_hangs_does_not_keep_the_server_from_stopping(engine: ScriptedEngine) -> None:
    judge = HangingJudge()
    with served(engine, turn_detector=judge) as address:
        n_spoken(address, hangover_ms=3_000)
    assert not judge.let_go.is_set()
    judge.let_go.set()


def wait_until(is_true: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + DEADLINE_S
    while not is_true():
        assert time.monotonic() < deadline_s
