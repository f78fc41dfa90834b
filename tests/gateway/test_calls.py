"""Telephone calls over sockets: carriers' WebSockets, AudioSocket over TCP, followers and the file of what was said."""

import base64
import json
import socket
import struct
import uuid
from pathlib import Path

import numpy as np
import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

from models.scripted import ScriptedEngine, recite
from tests.serving import DEADLINE_S, served, speech

pytestmark = pytest.mark.e2e

KEY = "sk-very-secret"
TEXT = "it was the best of times"


@pytest.fixture
def engine() -> ScriptedEngine:
    return ScriptedEngine(recite("it was the best of times it was the worst of times", start_sample=8_000))


def follow(stream, kind):
    while True:
        event = json.loads(stream.recv(timeout=DEADLINE_S))
        if event["type"] == kind:
            return event


def until_its_end(stream):
    """Every event up to the end of a call."""
    events = []
    while not events or events[-1]["type"] != "call_ended":
        events.append(json.loads(stream.recv(timeout=DEADLINE_S)))
    return events


def twilio_call(stream, call_id="C1"):
    start = {"callSid": call_id, "mediaFormat": {"encoding": "audio/x-mulaw", "sampleRate": 8000}}
    stream.send(json.dumps({"event": "start", "start": start}))


def test_a_follower_hears_a_call_that_hangs_up_in_the_middle(engine, tmp_path: Path) -> None:
    log = tmp_path / "calls.jsonl"
    with served(engine, calls_file=str(log)) as address:
        with connect(f"ws://{address}/v1/calls") as all_calls, connect(f"ws://{address}/v1/calls/C2") as other:
            with connect(f"ws://{address}/telephony/vonage") as call:
                first = {"event": "websocket:connected", "content-type": "audio/l16;rate=16000", "uuid": "C1"}
                call.send(json.dumps(first))
                assert follow(all_calls, "call_started")["call"] == "C1"
                audio = speech(2.1, after_s=0.0)
                for at in range(0, len(audio), 640):
                    call.send(audio[at : at + 640])
                call.send('{"event":"websocket:dtmf","digit":"5"}')
                assert follow(all_calls, "dtmf")["value"] == "5"
                call.socket.shutdown(socket.SHUT_RDWR)
            final = follow(all_calls, "final")
            assert final["text"] == TEXT and final["track"] == "inbound"
            assert follow(all_calls, "call_ended")["call"] == "C1"
            with pytest.raises(TimeoutError):
                other.recv(timeout=0)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["type"] for line in lines] == ["call_started", "dtmf", "final", "call_ended"]


def test_carriers_show_their_key_in_the_path(engine) -> None:
    with served(engine, keys=[KEY]) as address:
        for path in ("/telephony/twilio", "/telephony/twilio/wrong", "/v1/calls"):
            with pytest.raises(InvalidStatus) as caught:
                connect(f"ws://{address}{path}")
            assert caught.value.response.status_code == 401
        headers = {"Authorization": f"Bearer {KEY}"}
        with connect(f"ws://{address}/v1/calls/C1", additional_headers=headers) as follower:
            with connect(f"ws://{address}/telephony/twilio/{KEY}") as call:
                twilio_call(call)
                assert follow(follower, "call_started")["provider"] == "twilio"
                payload = base64.b64encode(b"\xff" * 160).decode()
                call.send(json.dumps({"event": "media", "media": {"track": "inbound", "payload": payload}}))
                call.send('{"event":"stop"}')
                assert follow(follower, "call_ended")


def test_audiosocket_packets_cut_anywhere_are_a_call(engine) -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    call_id = uuid.uuid4()
    at_8k = np.frombuffer(speech(2.0), "<i2")[::2].tobytes()
    packets = [(0x01, call_id.bytes), *((0x10, at_8k[at : at + 320]) for at in range(0, len(at_8k), 320)), (0x03, b"7")]
    data = b"".join(struct.pack(">BH", kind, len(payload)) + payload for kind, payload in [*packets, (0x00, b"")])
    with served(engine, audiosocket_port=port) as address, connect(f"ws://{address}/v1/calls") as follower:
        with socket.create_connection(("127.0.0.1", port), timeout=DEADLINE_S) as call:
            for at in range(0, len(data), 333):
                call.sendall(data[at : at + 333])
            events = until_its_end(follower)
            assert {event["call"] for event in events} == {str(call_id)}
            assert [event["value"] for event in events if event["type"] == "dtmf"] == ["7"]
            assert [event["text"] for event in events if event["type"] == "final"] == [TEXT]
            assert call.recv(1) == b"", "the server hangs up as well"
