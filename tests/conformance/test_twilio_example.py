"""The Twilio example against a real server: a call as Twilio streams it, with real speech on one of its legs."""

import base64
import json
import subprocess
import sys
import wave
from pathlib import Path

import numpy as np
import pytest
import soxr
from websockets.sync.client import connect

from gateway.pcm import AudioFormat, decode
from tests.conformance.clients import REPOSITORY, RUN_TIMEOUT_S
from tests.words import error_rate

pytestmark = [pytest.mark.e2e, pytest.mark.weights]

KEY = "sk-conformance"
FRAME_BYTES = 160  # 20 ms


def as_mulaw(path: Path) -> bytes:
    """A recording as the telephone network carries it."""
    with wave.open(str(path)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32) / 32_768
        narrow = soxr.resample(samples, file.getframerate(), 8_000)
    table = decode(bytes(range(256)), AudioFormat("mulaw", 8_000)).samples
    order = np.argsort(table, kind="stable")
    edges = (table[order][1:] + table[order][:-1]) / 2
    return bytes(order[np.searchsorted(edges, narrow)].astype(np.uint8).tobytes())


def test_a_recorded_call_is_printed_with_its_leg(server_address: str, speech_file_16k: Path, speech_text: str) -> None:
    command = [sys.executable, "examples/twilio_calls.py", "--once", "--key", KEY]
    follower = subprocess.Popen(
        [*command, "--url", f"ws://{server_address}/v1/calls"], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True
    )
    assert follower.stdout is not None and follower.stdout.readline() == "following\n"
    audio = as_mulaw(speech_file_16k)
    with connect(f"ws://{server_address}/telephony/twilio/{KEY}") as call:
        given = {"encoding": "audio/x-mulaw", "sampleRate": 8000, "channels": 1}
        start = {"callSid": "CA00000001", "tracks": ["inbound", "outbound"], "mediaFormat": given}
        call.send(json.dumps({"event": "connected", "protocol": "Call", "version": "1.0.0"}))
        call.send(json.dumps({"event": "start", "start": start}))
        for at in range(0, len(audio), FRAME_BYTES):
            for track, data in (("inbound", b"\xff" * FRAME_BYTES), ("outbound", audio[at : at + FRAME_BYTES])):
                media = {"track": track, "timestamp": str(at // 8), "payload": base64.b64encode(data).decode()}
                call.send(json.dumps({"event": "media", "media": media}))
        call.send('{"event":"dtmf","dtmf":{"track":"inbound_track","digit":"1"}}')
        call.send('{"event":"stop","stop":{}}')
        printed, _ = follower.communicate(timeout=RUN_TIMEOUT_S)
    lines = printed.splitlines()
    assert lines[0].endswith("call started") and lines[-1].endswith("call ended")
    assert any(line.endswith("pressed 1") for line in lines)
    said = " ".join(line.partition("callee: ")[2] for line in lines if "callee: " in line)
    assert "caller: " not in printed
    assert error_rate(speech_text, said) <= 0.2  # through a telephone
