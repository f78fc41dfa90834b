"""What a door costs: CPU time of the server for a frame of 20 ms, by protocol and by form of the audio.

A server in this process, the clients in another; the engine recites and the detector costs next to nothing, so that
what is left is sockets, doors and sessions. Run from the project's root; prints Markdown:

    python -m benchmarks.doors > benchmarks/results/doors.md
"""

import argparse
import asyncio
import base64
import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from websockets.asyncio.client import connect

from benchmarks.report import heading
from gateway.app import UvicornServer, build_app, uvicorn_config
from gateway.config import Config, ServerConfig
from gateway.pcm import AudioFormat, decode
from models.scripted import ScriptedEngine, recite
from vad.audio import SAMPLE_RATE_HZ
from vad.detector import DetectorState
from vad.framer import WINDOW_SAMPLES

FRAME_S = 0.02
SPEECH_WINDOWS, PAUSE_WINDOWS = 94, 31  # three seconds of speech, one of silence
NATIVE = "native, binary"
LISTEN_PATH = "/v1/listen?model=nova-3&encoding=linear16&sample_rate=16000&interim_results=true&punctuate=true"


class RhythmDetector:
    """Speech and silence by turns, whatever the sound: what it costs is not what is measured here."""

    def initial_state(self) -> DetectorState:
        """No window heard yet."""
        return DetectorState(np.zeros(1, np.float32))

    def score(
        self, batch: Sequence[tuple[DetectorState, NDArray[np.float32]]]
    ) -> list[tuple[NDArray[np.float32], DetectorState]]:
        """By the number of each window."""
        return [self._score(state, len(windows)) for state, windows in batch]

    @staticmethod
    def _score(state: DetectorState, n_windows: int) -> tuple[NDArray[np.float32], DetectorState]:
        numbers = state.memory[0] + np.arange(n_windows)
        is_speech = numbers % (SPEECH_WINDOWS + PAUSE_WINDOWS) < SPEECH_WINDOWS
        return is_speech.astype(np.float32), DetectorState(state.memory + np.float32(n_windows))


@dataclass(frozen=True)
class Recipe:
    """How a client of one protocol sends audio."""

    name: str
    path: str
    first: list[str]
    frame: str | bytes  # 20 ms of audio


def recipes() -> list[Recipe]:
    """The native protocol first, then what is compared with it."""
    return [
        Recipe(NATIVE, "/v1/stream", [hello("s16le", 16_000)], tone("s16le", 16_000)),
        Recipe("native, binary, again", "/v1/stream", [hello("s16le", 16_000)], tone("s16le", 16_000)),
        Recipe("native, μ-law, 8 kHz", "/v1/stream", [hello("mulaw", 8_000)], tone("mulaw", 8_000)),
        Recipe("native, 24 kHz", "/v1/stream", [hello("s16le", 24_000)], tone("s16le", 24_000)),
        Recipe("native, 48 kHz", "/v1/stream", [hello("s16le", 48_000)], tone("s16le", 48_000)),
        Recipe("Deepgram, binary", LISTEN_PATH, [], tone("s16le", 16_000)),
        Recipe("OpenAI, base64, 16 kHz", "/v1/realtime", [update("pcm", 16_000)], append("s16le", 16_000)),
        Recipe("OpenAI, base64, 24 kHz", "/v1/realtime", [update("pcm", 24_000)], append("s16le", 24_000)),
        Recipe("OpenAI, base64, μ-law, 8 kHz", "/v1/realtime", [update("pcmu", 8_000)], append("mulaw", 8_000)),
    ]


def hello(encoding: str, rate_hz: int) -> str:
    """The native protocol's first message."""
    return json.dumps({"type": "hello", "audio": {"encoding": encoding, "sample_rate_hz": rate_hz}})


def update(kind: str, rate_hz: int) -> str:
    """The OpenAI protocol's settings, with the pause after which the native one ends an utterance."""
    given = {
        "format": {"type": f"audio/{kind}", "rate": rate_hz},
        "turn_detection": {"type": "server_vad", "silence_duration_ms": 400},
    }
    return json.dumps({"type": "session.update", "session": {"type": "transcription", "audio": {"input": given}}})


def append(encoding: str, rate_hz: int) -> str:
    """A frame in base64."""
    audio = base64.b64encode(tone(encoding, rate_hz)).decode()
    return json.dumps({"type": "input_audio_buffer.append", "audio": audio})


def tone(encoding: str, rate_hz: int) -> bytes:
    """20 ms of a tone."""
    samples = 0.3 * np.sin(2 * np.pi * 200 * np.arange(round(FRAME_S * rate_hz)) / rate_hz)
    if encoding == "mulaw":
        table = decode(bytes(range(256)), AudioFormat("mulaw", 8_000)).samples
        return bytes(int(np.argmin(np.abs(table - sample))) for sample in samples)
    return (samples * 32_767).astype("<i2").tobytes()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=8.0, help="of audio in real time, for each session")
    parser.add_argument("--rounds", type=int, default=3, help="the protocols take turns, so that drift hits all")
    parser.add_argument("--client", nargs=2, metavar=("ADDRESS", "NAME"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        address, name = arguments.client
        [recipe] = [recipe for recipe in recipes() if recipe.name == name]
        asyncio.run(send_all(address, recipe, arguments.sessions, arguments.seconds))
        return
    print(heading("What a door costs"))
    print(f"{arguments.sessions} sessions in real time, {arguments.seconds:g} s each, frames of 20 ms; three seconds")
    print("of speech and one of silence by turns, text from a script. CPU time of the server, all threads, for each")
    print(f"frame: median of {arguments.rounds} rounds, and their range.\n")
    print("| protocol and audio | CPU µs a frame | range | against native binary |")
    print("|---|---|---|---|")
    costs: dict[str, list[float]] = {recipe.name: [] for recipe in recipes()}
    for _ in range(arguments.rounds):
        for recipe in recipes():
            costs[recipe.name].append(cost_us(recipe, arguments.sessions, arguments.seconds))
    base = float(np.median(costs[NATIVE]))
    for name, found in costs.items():
        median = float(np.median(found))
        print(f"| {name} | {median:.0f} | {min(found):.0f}–{max(found):.0f} | {median / base - 1:+.0%} |")


def cost_us(recipe: Recipe, n_sessions: int, audio_s: float) -> float:
    """CPU time of the server for a frame, in µs."""
    with served() as address:
        command = [sys.executable, "-m", "benchmarks.doors", "--client", address, recipe.name]
        amount = ["--sessions", str(n_sessions), "--seconds", str(audio_s)]
        client = subprocess.Popen([*command, *amount], stdout=subprocess.PIPE, text=True)
        assert client.stdout is not None
        assert client.stdout.readline() == "connected\n"
        began_s = time.process_time()
        assert client.stdout.readline() == "sent\n"
        spent_s = time.process_time() - began_s
        assert client.wait() == 0, recipe.name
    return spent_s / (n_sessions * audio_s / FRAME_S) * 1e6


async def send_all(address: str, recipe: Recipe, n_sessions: int, audio_s: float) -> None:
    """Every session of one client process, in step with the clock."""
    sockets = [
        await connect(f"ws://{address}{recipe.path}", compression=None, max_queue=None) for _ in range(n_sessions)
    ]
    reading = [asyncio.create_task(read(socket)) for socket in sockets]
    for connection in sockets:
        for message in recipe.first:
            await connection.send(message)
    print("connected", flush=True)
    began_s = time.monotonic()
    for index in range(round(audio_s / FRAME_S)):
        await asyncio.sleep(max(0.0, began_s + index * FRAME_S - time.monotonic()))
        for connection in sockets:
            await connection.send(recipe.frame)
    print("sent", flush=True)
    for task in reading:
        task.cancel()
    await asyncio.gather(*(connection.close() for connection in sockets))


async def read(connection: object) -> None:
    """Take what comes, as a client would."""
    async for _ in connection:  # type: ignore[attr-defined]
        pass


@contextmanager
def served() -> Iterator[str]:
    """A server on a thread of this process; gives its address."""
    script = recite("it was the best of times " * 200, start_sample=SAMPLE_RATE_HZ // 4)
    config = Config(models=("scripted",), server=ServerConfig(port=0, max_sessions=10_000))
    app = build_app(config, {"scripted": ScriptedEngine(script)}, RhythmDetector())
    ready = threading.Event()

    class Server(UvicornServer):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            ready.set()

    server = Server(uvicorn_config(config, app))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    ready.wait()
    try:
        yield f"127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


assert WINDOW_SAMPLES == 512, "the rhythm is counted in windows of 32 ms"

if __name__ == "__main__":
    main()
