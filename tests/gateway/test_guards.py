"""What the server lets in, how much of it, and what it tells of itself; over sockets."""

import base64
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx2
import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from gateway.app import WebSocketProtocol
from gateway.client import ConnectionFailedError, Hello, connect_sync
from gateway.doors.deepgram import ListenDoor
from gateway.doors.openai_realtime import MAX_APPEND_BYTES, MAX_EVENT_BYTES
from models.scripted import ScriptedEngine, recite
from tests.serving import DEADLINE_S, served, speech

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).parents[2]
KEY = "sk-very-secret"
HELLO = json.dumps({"type": "hello", "audio": {"encoding": "s16le", "sample_rate_hz": 16_000}})
CLIENT_LOGGERS = ("websockets.client", "httpx2", "httpcore2")  # of the tests' own side
DOORS = {"/v1/stream": "senseway.v1.json", "/v1/realtime": "realtime"}


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(recite("it was the best of times it was the worst of times", start_sample=8_000))


def hear(stream, kind):
    while True:
        message = json.loads(stream.recv(timeout=DEADLINE_S))
        if message["type"] == kind:
            return message


# ---------------------------------------------------------------- keys


@pytest.mark.parametrize("path", DOORS)
@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Token {KEY}"}])
def test_a_wrong_key_is_a_401_before_the_upgrade(engine, path, headers) -> None:
    with served(engine, keys=[KEY]) as address, pytest.raises(InvalidStatus) as caught:
        connect(f"ws://{address}{path}", additional_headers=headers)
    assert caught.value.response.status_code == 401
    body = json.loads(caught.value.response.body)
    code = body["error"]["code"] if isinstance(body["error"], dict) else body["code"]
    assert code == "invalid_api_key"


@pytest.mark.parametrize(("path", "subprotocol"), DOORS.items())
def test_the_right_key_opens_in_a_header_or_a_browsers_subprotocol(engine, path, subprotocol) -> None:
    prefix = "senseway.key." if path == "/v1/stream" else "openai-insecure-api-key."
    with served(engine, keys=["other", KEY]) as address:
        url = f"ws://{address}{path}"
        with connect(url, additional_headers={"Authorization": f"Bearer {KEY}"}):
            pass
        with connect(url, subprotocols=[subprotocol, prefix + KEY]) as stream:
            assert stream.subprotocol == subprotocol


def test_our_own_client_and_command_show_their_key(engine, tmp_path) -> None:
    command = [sys.executable, "-m", "gateway", "stream", "-", "--encoding", "s16le", "--speed", "max"]
    with served(engine, keys=[KEY]) as address:
        url = f"ws://{address}/v1/stream"
        with pytest.raises(ConnectionFailedError, match="401"), connect_sync(url, Hello()):
            pass
        with connect_sync(url, Hello(), api_key=KEY) as stream:
            assert stream.ready.model == "scripted"
        environment = {**os.environ, "SENSEWAY_API_KEY": KEY}
        done = subprocess.run(
            [*command, "--url", url],
            cwd=REPOSITORY,
            env=environment,
            input=speech(1.0),
            capture_output=True,
            check=True,
        )
    assert b"it was the" in done.stdout


def test_requests_need_the_key_as_well_and_health_does_not(engine) -> None:
    with served(engine, keys=[KEY]) as address:
        for path in ("/v1/models", "/metrics", "/v1/models/scripted"):
            assert httpx2.get(f"http://{address}{path}").status_code == 401
            headers = {"Authorization": f"Bearer {KEY}"}
            assert httpx2.get(f"http://{address}{path}", headers=headers).status_code == 200
        assert httpx2.post(f"http://{address}/v1/audio/transcriptions").status_code == 401
        for path in ("/health", "/health/live", "/health/ready"):
            assert httpx2.get(f"http://{address}{path}").status_code == 200


def test_a_pass_for_a_browser_opens_one_door_with_its_session_and_makes_no_other(engine) -> None:
    headers = {"Authorization": f"Bearer {KEY}"}
    session = {"type": "transcription", "audio": {"input": {"turn_detection": None}}}
    with served(engine, keys=[KEY]) as address:
        url = f"http://{address}/v1/realtime/client_secrets"
        assert httpx2.post(url, json={}).status_code == 401
        made = httpx2.post(url, json={"session": session, "expires_after": {"seconds": 60}}, headers=headers).json()
        assert made["session"]["audio"]["input"]["turn_detection"] is None and made["expires_at"] > time.time()
        offered = ["realtime", f"openai-insecure-api-key.{made['value']}"]
        with connect(f"ws://{address}/v1/realtime", subprotocols=offered) as stream:
            created = hear(stream, "session.created")
            assert created["session"]["audio"]["input"]["turn_detection"] is None
        again = httpx2.post(url, json={}, headers={"Authorization": f"Bearer {made['value']}"})
        assert again.status_code == 401
        for wrong in ({"session": {"type": "realtime"}}, {"expires_after": {"seconds": 5}}, {"session": 7}):
            assert httpx2.post(url, json=wrong, headers=headers).status_code == 400


def test_a_grant_of_deepgrams_shape_opens_its_door(engine) -> None:
    query = "model=nova-3&encoding=linear16&sample_rate=16000"
    with served(engine, keys=[KEY]) as address:
        grant = f"http://{address}/v1/auth/grant"
        assert httpx2.post(grant).status_code == 401
        made = httpx2.post(grant, headers={"Authorization": f"Token {KEY}"}).json()
        assert made["expires_in"] == 30
        with pytest.raises(InvalidStatus) as caught:
            connect(f"ws://{address}/v1/listen?{query}", subprotocols=["token", "wrong"])
        assert caught.value.response.status_code == 401 and caught.value.response.headers["dg-error"]
        with connect(f"ws://{address}/v1/listen?{query}", subprotocols=["bearer", made["access_token"]]) as stream:
            assert stream.subprotocol == "bearer" and stream.response.headers["dg-request-id"]
            stream.send('{"type":"CloseStream"}')
            assert hear(stream, "Metadata")["channels"] == 1


@pytest.mark.behaviour("K", door="native")
@pytest.mark.behaviour("K", door="openai_realtime")
def test_a_key_never_reaches_the_log(engine, caplog, monkeypatch) -> None:
    """Not even that of a session which ends with a fault."""
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr("gateway.session.Session.windows_to_score", lambda self: 1 / 0)
    with served(engine, keys=[KEY]) as address:
        for path, subprotocol in DOORS.items():
            prefix = "senseway.key." if path == "/v1/stream" else "openai-insecure-api-key."
            with connect(
                f"ws://{address}{path}",
                subprotocols=[subprotocol, prefix + KEY],
                additional_headers={"Authorization": f"Bearer {KEY}"},
            ) as stream:
                if path != "/v1/stream":  # there the fault comes with the session
                    stream.send("{")
                assert hear(stream, "error")
        httpx2.get(f"http://{address}/v1/models", headers={"Authorization": f"Bearer {KEY}"})
    of_the_server = [record for record in caplog.records if not record.name.startswith(CLIENT_LOGGERS)]
    assert any("failed" in record.message for record in of_the_server)
    assert all(KEY not in record.getMessage() + str(record.exc_text) for record in of_the_server)


LISTEN = "model=nova-3&encoding=linear16&sample_rate=16000"


@pytest.mark.behaviour("K", door="deepgram")
@pytest.mark.behaviour("K", door="deepgram_turns")
@pytest.mark.behaviour("K", door="telephony")
@pytest.mark.parametrize("key", [KEY, "sk-another"])
@pytest.mark.parametrize(
    ("path", "headers", "subprotocols"),
    [
        (f"/v1/listen?{LISTEN}", {"Authorization": "Token {key}"}, None),
        (f"/v1/listen?{LISTEN}", {}, ["token", "{key}"]),
        (f"/v2/listen?{LISTEN}", {"Authorization": "bearer {key}"}, None),
        ("/telephony/twilio/{key}", {}, None),
        ("/telephony/freeswitch/{key}?rate=8000", {}, None),
        ("/telephony/telnyx", {"x-telnyx-streaming-auth-token": "{key}"}, None),
        ("/v1/calls", {"Authorization": "Bearer {key}"}, None),
    ],
)
def test_neither_a_right_nor_a_wrong_key_reaches_log_figures_or_followers(
    engine, caplog, tmp_path, key, path, headers, subprotocols
) -> None:
    caplog.set_level(logging.DEBUG)
    said: list[str] = []
    with served(engine, keys=[KEY], calls_file=str(tmp_path / "calls.jsonl")) as address:
        ours = {"Authorization": f"Bearer {KEY}"}
        with connect(f"ws://{address}/v1/calls", additional_headers=ours) as follower:
            given = {name: value.format(key=key) for name, value in headers.items()}
            offered = subprotocols and [name.format(key=key) for name in subprotocols]
            url = f"ws://{address}{path.format(key=key)}"
            try:
                with connect(url, additional_headers=given, subprotocols=offered) as stream:
                    assert key == KEY
                    stream.send("{")
            except InvalidStatus as refused:
                assert key != KEY and refused.response.status_code == 401
                said.append(str(refused.response.body) + str(refused.response.headers))
            if "/telephony/" in path and key == KEY:
                while '"call_ended"' not in (event := follower.recv(timeout=DEADLINE_S)):
                    said.append(event)
        said.append(httpx2.get(f"http://{address}/metrics", headers=ours).text)
    of_the_server = [record for record in caplog.records if not record.name.startswith(CLIENT_LOGGERS)]
    said += [record.getMessage() + str(record.exc_text) for record in of_the_server]
    said += [file.read_text() for file in tmp_path.iterdir()]
    assert not [text for text in said if key in text]


# ---------------------------------------------------------------- room


def test_a_full_server_is_a_503_before_the_upgrade_with_a_time_to_come_back(engine) -> None:
    with served(engine, max_sessions=1) as address, connect(f"ws://{address}/v1/realtime") as stream:
        hear(stream, "session.created")
        with pytest.raises(InvalidStatus) as caught:
            connect(f"ws://{address}/v1/realtime")
        assert caught.value.response.status_code == 503
        assert int(caught.value.response.headers["Retry-After"]) > 0
        assert json.loads(caught.value.response.body)["error"]["code"] == "server_full"
        assert httpx2.get(f"http://{address}/health/ready").json() == {"status": "full"}


def test_a_place_taken_meanwhile_is_a_1013(engine) -> None:
    with served(engine, max_sessions=2) as address, connect(f"ws://{address}/v1/realtime") as late:
        hear(late, "session.created")
        with connect(f"ws://{address}/v1/stream") as first, connect(f"ws://{address}/v1/stream") as second:
            for stream in (first, second):
                stream.send(HELLO)
                hear(stream, "ready")
            late.send(json.dumps({"type": "input_audio_buffer.append", "audio": "AAAA"}))
            with pytest.raises(ConnectionClosed) as caught:
                late.recv(timeout=DEADLINE_S)
            assert caught.value.rcvd is not None and caught.value.rcvd.code == 1013


# ---------------------------------------------------------------- size, rate, idle time


@pytest.mark.parametrize("path", [path for path in DOORS if path != "/v1/realtime"])
def test_a_message_too_large_closes_with_1009_and_says_how_large_it_may_be(engine, path) -> None:
    with served(engine) as address, connect(f"ws://{address}{path}", compression=None) as stream:
        with pytest.raises(ConnectionClosed) as caught:
            stream.send("x" * (3 << 20))
            while True:
                stream.recv(timeout=DEADLINE_S)
        if caught.value.rcvd is not None:  # else the reset was quicker than the close
            assert caught.value.rcvd.code == 1009 and "1048576" in caught.value.rcvd.reason


def test_an_event_of_openais_protocol_far_too_large_closes_with_1009(engine) -> None:
    with served(engine) as address, connect(f"ws://{address}/v1/realtime", compression=None) as stream:
        with pytest.raises(ConnectionClosed) as caught:
            stream.send("x" * (MAX_EVENT_BYTES + 1))
            while True:
                stream.recv(timeout=DEADLINE_S)
        if caught.value.rcvd is not None:
            assert caught.value.rcvd.code == 1009 and str(MAX_EVENT_BYTES) in caught.value.rcvd.reason


def test_an_append_over_the_limit_is_refused_and_the_session_lives(engine) -> None:
    with served(engine) as address, connect(f"ws://{address}/v1/realtime", compression=None) as stream:
        given = {"format": {"type": "audio/pcm", "rate": 16_000}, "turn_detection": None}
        stream.send(json.dumps({"type": "session.update", "session": {"audio": {"input": given}}}))
        for audio in (speech(2.0), bytes(MAX_APPEND_BYTES + 1)):
            encoded = base64.b64encode(audio).decode()
            stream.send(json.dumps({"type": "input_audio_buffer.append", "audio": encoded}))
        error = hear(stream, "error")["error"]
        assert (error["param"], error["code"]) == ("audio", "input_audio_buffer_append_too_large")
        stream.send('{"type": "input_audio_buffer.commit"}')
        done = hear(stream, "conversation.item.input_audio_transcription.completed")
        assert done["transcript"] == "it was the best of times"


def test_the_largest_append_is_heard_to_its_last_word(engine) -> None:
    """Five and a half minutes at once: the session reads on as fast as it decodes."""
    with served(engine) as address, connect(f"ws://{address}/v1/realtime", compression=None) as stream:
        whole = np.zeros(MAX_APPEND_BYTES // 2, "<i2")
        said = np.frombuffer(speech(2.0, before_s=0), "<i2")
        whole[-len(said) :] = said
        stream.send(json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(whole).decode()}))
        started = hear(stream, "input_audio_buffer.speech_started")
        assert abs(started["audio_start_ms"] - (len(whole) - len(said)) / 24) < 500


def test_an_append_of_a_megabyte_is_taken(engine) -> None:
    with served(engine) as address, connect(f"ws://{address}/v1/realtime", compression=None) as stream:
        audio = base64.b64encode(bytes(1 << 20)).decode()
        stream.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))
        stream.send(json.dumps({"type": "input_audio_buffer.append", "audio": "no base64"}))
        assert hear(stream, "error")["error"]["param"] == "audio"  # of the second one only, on a connection that lives
        stream.send('{"type": "input_audio_buffer.clear"}')
        hear(stream, "input_audio_buffer.cleared")


def test_a_flood_of_messages_is_read_slowly_and_loses_nothing(engine) -> None:
    with served(engine, max_messages_per_s=50) as address, connect(f"ws://{address}/v1/stream") as stream:
        stream.send(HELLO)
        began_s = time.monotonic()
        for index in range(260):  # 200 pass at once
            stream.send(json.dumps({"type": "flush", "id": str(index)}))
        assert [hear(stream, "flushed")["id"] for _ in range(260)] == [str(index) for index in range(260)]
        assert time.monotonic() - began_s >= 1.0


@pytest.mark.parametrize(("path", "close_code"), [("/v1/stream", 4411), ("/v1/realtime", 1008)])
def test_a_client_that_sends_nothing_is_let_go(engine, path, close_code) -> None:
    with served(engine, idle_timeout_s=1.0) as address, connect(f"ws://{address}{path}") as stream:
        stream.send(HELLO)
        with pytest.raises(ConnectionClosed) as caught:
            while True:
                stream.recv(timeout=DEADLINE_S)
        assert caught.value.rcvd is not None and caught.value.rcvd.code == close_code


# ---------------------------------------------------------------- health and figures


def test_live_and_ready_answer(engine) -> None:
    with served(engine) as address:
        assert httpx2.get(f"http://{address}/health/live").json() == {"status": "alive"}
        assert httpx2.get(f"http://{address}/health/ready").json() == {"status": "ready"}


def test_a_stuck_engine_is_neither_live_nor_ready(engine, monkeypatch) -> None:
    monkeypatch.setattr("gateway.server.Server.is_stuck", lambda self: True)
    with served(engine) as address:
        assert httpx2.get(f"http://{address}/health/live").status_code == 503
        assert httpx2.get(f"http://{address}/health/ready").json() == {"status": "stuck"}


def figures(address: str) -> dict[str, float]:
    text = httpx2.get(f"http://{address}/metrics").text
    lines = [line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#")]
    return {name: float(value) for name, value in lines}


def test_figures_tell_what_happened(engine) -> None:
    with served(engine) as address:
        with connect(f"ws://{address}/v1/stream") as stream:
            stream.send(HELLO)
            hear(stream, "ready")
            stream.send(speech(2.0))
            hear(stream, "final")
            stream.send("{")
            hear(stream, "error")
            during = figures(address)
            stream.send(json.dumps({"type": "bye"}))
            hear(stream, "bye")
        with pytest.raises(InvalidStatus):
            connect(f"ws://{address}/v1/realtime?model=other")
        after = figures(address)
    native = '{door="native"}'
    assert during[f"senseway_sessions{native}"] == 1 and after[f"senseway_sessions{native}"] == 0
    assert during[f"senseway_connections{native}"] == 1
    assert after[f"senseway_audio_seconds_total{native}"] == 3.5
    assert during['senseway_errors_total{code="bad_message"}'] == 1
    assert after['senseway_refusals_total{code="model_not_found",door="openai_realtime"}'] == 1
    for delay in ("first_partial", "time_to_final"):
        assert after[f"senseway_{delay}_seconds_count{native}"] == 1
    assert after[f"senseway_word_shown_seconds_count{native}"] == 6
    assert after[f"senseway_word_settled_seconds_count{native}"] == 6
    assert after["senseway_decode_seconds_count"] >= 1 and after["senseway_loop_lag_seconds_count"] >= 0
    assert after["senseway_decode_queue_depth"] == 0 and after["senseway_decode_queue_age_seconds"] == 0
    assert during["senseway_backlog_seconds"] >= 0


@pytest.mark.parametrize("is_lazy", [False, True])
def test_a_door_that_fails_ends_its_connection_and_no_other(engine, monkeypatch, is_lazy) -> None:
    def fails(door, frame, now_s):
        raise RuntimeError("asked to fail")

    def fails_later(door, frame, now_s):
        yield from ()
        raise RuntimeError("asked to fail")

    monkeypatch.setattr(ListenDoor, "receive", fails_later if is_lazy else fails)
    query = "model=nova-3&encoding=linear16&sample_rate=16000"
    with served(engine) as address, connect(f"ws://{address}/v1/stream") as other:
        other.send(HELLO)
        hear(other, "ready")
        with connect(f"ws://{address}/v1/listen?{query}") as stream:
            stream.send(speech(0.1))
            with pytest.raises(ConnectionClosed) as closed:
                stream.recv(timeout=DEADLINE_S)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == 1011
        other.send(json.dumps({"type": "flush", "id": "1"}))
        assert hear(other, "flushed")["id"] == "1"


# ---------------------------------------------------------------- pings


class HeldEngine(ScriptedEngine):
    """Decodes nothing until it is let go."""

    def __init__(self, script) -> None:
        super().__init__(script)
        self.let_go = threading.Event()

    def decode(self, batch):
        assert self.let_go.wait(DEADLINE_S)
        return super().decode(batch)


def test_a_client_whose_pong_lies_behind_unread_audio_stays(monkeypatch) -> None:
    monkeypatch.setattr("gateway.app.PING_INTERVAL_S", 0.2)
    engine = HeldEngine(recite("it was the best of times", start_sample=8_000))
    missed: list[None] = []
    give_up = WebSocketProtocol.keepalive_timeout

    def counted(protocol: WebSocketProtocol) -> None:
        missed.append(None)
        give_up(protocol)
        if len(missed) == 3:
            engine.let_go.set()

    monkeypatch.setattr(WebSocketProtocol, "keepalive_timeout", counted)
    with served(engine) as address, connect(f"ws://{address}/v1/stream", ping_interval=None) as stream:
        stream.send(HELLO)
        hear(stream, "ready")
        for _ in range(24):  # seconds: more than the server holds of one client
            stream.send(speech(3.0, 0.0, 1.0))
        stream.send(json.dumps({"type": "bye"}))
        assert hear(stream, "bye")["audio_s"] == 96.0
    assert len(missed) >= 3


def test_a_client_that_is_not_there_any_more_is_given_up(engine, monkeypatch) -> None:
    monkeypatch.setattr("gateway.app.PING_INTERVAL_S", 0.2)
    with served(engine) as address:
        host, port = address.split(":")
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
            head = f"GET /v1/stream HTTP/1.1\r\nHost: {address}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
            key = "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
            connection.sendall((head + key).encode())
            while connection.recv(65_536):
                pass


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://["}, 403),
        ({"Origin": "null"}, 403),
        ({"Host": "["}, 101),
        ({"Host": "a" * 300}, 101),
        ({"Authorization": "\xff"}, 101),
        ({"X-Forwarded-Proto": "]://["}, 101),
    ],
)
def test_whatever_stands_in_the_headers_of_a_handshake_it_is_answered(engine, headers, status) -> None:
    usual = {
        "Host": "localhost",
        "Connection": "Upgrade",
        "Upgrade": "websocket",
        "Sec-WebSocket-Version": "13",
        "Sec-WebSocket-Key": "AAAAAAAAAAAAAAAAAAAAAA==",
    }
    lines = [f"{name}: {value}" for name, value in {**usual, **headers}.items()]
    with served(engine) as address:
        host, port = address.split(":")
        with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
            connection.sendall("\r\n".join(["GET /v1/stream HTTP/1.1", *lines, "", ""]).encode("latin-1"))
            answer = connection.recv(65_536).split(b"\r\n")[0]
    assert int(answer.split()[1]) == status
