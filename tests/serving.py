"""A real server with the scripted engine, on a thread of its own, and sound that its detector takes for speech."""

import json
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection

from gateway.app import UvicornServer, build_app, uvicorn_config
from gateway.config import Config, ServerConfig, SessionConfig
from gateway.keys import Keys
from models.scripted import ScriptedEngine
from streaming.engine import SpeechEngine
from vad.detector import SpeechDetector
from vad.energy import EnergyDetector
from vad.turn import TurnDetector

DEADLINE_S = 60  # on a machine with other things to do
HELLO = {"type": "hello", "audio": {"encoding": "s16le", "sample_rate_hz": 16_000}}


def speech(duration_s: float, before_s: float = 0.5, after_s: float = 1.0) -> bytes:
    """Noise loud enough for the energy detector between two silences, as s16le."""
    loud = np.random.default_rng(0).normal(0, 0.2, int(duration_s * 16_000))
    samples = np.concatenate([np.zeros(int(before_s * 16_000)), loud, np.zeros(int(after_s * 16_000))])
    return (np.clip(samples, -1, 1) * 32_767).astype("<i2").tobytes()


@contextmanager
def served(
    engine: SpeechEngine,
    detector: SpeechDetector | None = None,
    *,
    keys: Sequence[str] = (),
    turn_detector: TurnDetector | None = None,
    **server: object,
) -> Iterator[str]:
    """A server on a free port, on a thread of its own; gives its address."""
    config = Config(
        models=(engine.card.name,),
        server=ServerConfig(port=0, **server),
        session=SessionConfig(resume_window_s=30),
    )
    ready = threading.Event()

    class Server(UvicornServer):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            ready.set()

    engines = {engine.card.name: engine}
    app = build_app(config, engines, detector or EnergyDetector(), Keys(keys), turn_detector=turn_detector)
    uvicorn_server = Server(uvicorn_config(config, app))
    thread = threading.Thread(target=uvicorn_server.run, daemon=True)
    thread.start()
    assert ready.wait(DEADLINE_S)
    port = uvicorn_server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"127.0.0.1:{port}"
    finally:
        uvicorn_server.should_exit = True
        thread.join(DEADLINE_S)
        assert not thread.is_alive()


def is_freed(address: str, engine: ScriptedEngine) -> bool:
    """Whether every engine stream comes to be closed; a closed session's may still wait for the engine's thread."""
    deadline_s = time.monotonic() + DEADLINE_S
    while engine.n_open_streams and time.monotonic() < deadline_s:
        urllib.request.urlopen(f"http://{address}/health", timeout=DEADLINE_S).read()
    return not engine.n_open_streams


def tell(stream: ClientConnection, **message: object) -> None:
    stream.send(json.dumps(message))


def hear(stream: ClientConnection, *kinds: str) -> dict:
    """The next message of one of ``kinds``."""
    while True:
        message = json.loads(stream.recv(timeout=DEADLINE_S))
        if message["type"] in kinds:
            return message


def finish(stream: ClientConnection) -> list[dict]:
    """Say bye; everything that still comes, until the server closes."""
    tell(stream, type="bye")
    messages = []
    try:
        while True:
            messages.append(json.loads(stream.recv(timeout=DEADLINE_S)))
    except ConnectionClosed as closed:
        assert closed.rcvd is not None and closed.rcvd.code == 1000
    return messages


def finals(messages: list[dict]) -> str:
    return " ".join(message["text"] for message in messages if message["type"] == "final")


def sessions_become(address: str, n_sessions: int) -> bool:
    """Whether the server comes to count so many sessions."""
    deadline_s = time.monotonic() + DEADLINE_S
    while time.monotonic() < deadline_s:
        if json.load(urllib.request.urlopen(f"http://{address}/health", timeout=DEADLINE_S))["sessions"] == n_sessions:
            return True
    return False
