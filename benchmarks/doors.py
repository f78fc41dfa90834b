"""What a door costs: CPU time of the server for a frame of 20 ms, by protocol and by form of the audio.

A server in this process, the clients in another; the engine recites and the detector costs next to nothing, so that
what is left is sockets, doors and sessions. Clients of the native protocol and of the other are connected at once and
send by turns, a third of a second each; a turn is compared with the one beside it, in which the other side said the
same, so that neither the machine's drift nor the speech's rhythm tells the two apart. Run from the project's root on a
machine that does nothing else (about five minutes); prints Markdown:

    python -m benchmarks.doors > benchmarks/results/doors.md
"""

import argparse
import asyncio
import base64
import gc
import json
import math
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from websockets.asyncio.client import ClientConnection, connect

from benchmarks.report import heading
from gateway.app import UvicornServer, build_app, uvicorn_config
from gateway.config import Config, ServerConfig
from gateway.metrics import Metrics
from gateway.pcm import AudioFormat, decode
from models.scripted import ScriptedEngine, recite
from vad.audio import SAMPLE_RATE_HZ
from vad.detector import DetectorState
from vad.framer import WINDOW_SAMPLES

FRAME_S = 0.02
SPEECH_WINDOWS, PAUSE_WINDOWS = 94, 31  # three seconds of speech, one of silence
NATIVE = "native, binary"
LISTEN_PATH = "/v1/listen?model=nova-3&encoding=linear16&sample_rate=16000&interim_results=true&punctuate=true"
TURNS_PATH = "/v2/listen?model=flux-general-en&encoding=linear16&sample_rate=16000"
VONAGE_START = '{"event": "websocket:connected", "content-type": "audio/l16;rate=16000"}'

TURN_FRAMES = 16  # 0.32 s: who waits for two turns of the other side is not yet taken to have stalled
WARM_UP_TURNS = 8
HELD_BACK_S = 0.016  # of each session's audio: what a resampler keeps for the next frame
QUIET_S = 0.01  # of the server, after which nothing of a turn is left to do
QUIET_SHARE = 0.1  # of that time on the CPU: the least that a thread which looks costs
CONFIDENCE = 1.96  # standard deviations: 95 %


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
    is_held_to_target: bool = False  # a door that takes binary audio at 16 kHz

    def pairs_of(self, n_pairs: int) -> int:
        """How often a turn of its clients is compared with one of the native ones."""
        return n_pairs if self.is_held_to_target else n_pairs // 3


def recipes() -> list[Recipe]:
    """What is compared with the native protocol; itself first, which shows how far the figures can be trusted."""
    return [
        Recipe(NATIVE, "/v1/stream", [hello("s16le", 16_000)], tone("s16le", 16_000), is_held_to_target=True),
        Recipe("Deepgram, binary", LISTEN_PATH, [], tone("s16le", 16_000), is_held_to_target=True),
        Recipe("Deepgram's turns, binary", TURNS_PATH, [], tone("s16le", 16_000), is_held_to_target=True),
        Recipe("Vonage, binary", "/telephony/vonage", [VONAGE_START], tone("s16le", 16_000), is_held_to_target=True),
        Recipe("OpenAI, base64, 16 kHz", "/v1/realtime", [update("pcm", 16_000)], append("s16le", 16_000)),
        Recipe("OpenAI, base64, 24 kHz", "/v1/realtime", [update("pcm", 24_000)], append("s16le", 24_000)),
        Recipe("OpenAI, base64, μ-law, 8 kHz", "/v1/realtime", [update("pcmu", 8_000)], append("mulaw", 8_000)),
        Recipe("native, μ-law, 8 kHz", "/v1/stream", [hello("mulaw", 8_000)], tone("mulaw", 8_000)),
        Recipe("native, 24 kHz", "/v1/stream", [hello("s16le", 24_000)], tone("s16le", 24_000)),
        Recipe("native, 48 kHz", "/v1/stream", [hello("s16le", 48_000)], tone("s16le", 48_000)),
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


@dataclass(frozen=True)
class Comparison:
    """CPU time of the server for a frame, in µs, of turns beside each other."""

    native_us: NDArray[np.float64]  # [n_pairs]
    other_us: NDArray[np.float64]  # [n_pairs]

    @property
    def added(self) -> NDArray[np.float64]:
        """The other side's cost beyond the native one's, as a share of it [n_pairs]."""
        return self.other_us / self.native_us - 1


def median_and_interval(values: NDArray[np.float64]) -> tuple[float, float, float]:
    """The median of ``values`` [n], and between which values the true one lies at 95 % whatever their distribution."""
    ordered = np.sort(values)
    reach = CONFIDENCE * math.sqrt(len(ordered)) / 2  # ranks, by the binomial distribution
    low = max(0, math.floor(len(ordered) / 2 - reach))
    high = min(len(ordered) - 1, math.ceil(len(ordered) / 2 + reach) - 1)
    return float(np.median(ordered)), float(ordered[low]), float(ordered[high])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sessions", type=int, default=100)
    parser.add_argument("--pairs", type=int, default=48, help="of turns; a third as many where there is no target")
    parser.add_argument("--client", nargs=2, metavar=("ADDRESS", "NAME"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.client:
        address, name = arguments.client
        [other] = [recipe for recipe in recipes() if recipe.name == name]
        asyncio.run(send_by_turns(address, [recipes()[0], other], arguments.sessions))
        return
    print(heading("What a door costs"))
    print(f"{arguments.sessions} sessions in real time, frames of 20 ms; three seconds of speech and one of silence by")
    print("turns, text from a script. CPU time of the server (user and system, all threads) for each frame. A turn of")
    print(f"{TURN_FRAMES} frames of each session is compared with the native protocol's turn beside it: median of the")
    print("pairs, and where the true median lies at 95 %. The first row compares the native protocol with itself.\n")
    print("| protocol and audio | pairs | CPU µs a frame | native beside it | added | at 95 % |")
    print("|---|---|---|---|---|---|")
    for recipe in recipes():
        found = compare(recipe, arguments.sessions, recipe.pairs_of(arguments.pairs))
        added, low, high = median_and_interval(found.added)
        costs = f"{np.median(found.other_us):.0f} | {np.median(found.native_us):.0f}"
        interval = f"{low:+.1%} to {high:+.1%}"
        print(f"| {recipe.name} | {len(found.added)} | {costs} | {added:+.1%} | {interval} |", flush=True)


def compare(recipe: Recipe, n_sessions: int, n_pairs: int) -> Comparison:
    """Let clients of both sides send by turns: native, other, other, native and so on."""
    sides = [side for _ in range(math.ceil(n_pairs / 2)) for side in (0, 1, 1, 0)]
    costs: tuple[list[float], list[float]] = ([], [])
    with served() as (address, metrics), clients(address, metrics, recipe.name, n_sessions) as take_turn:
        for index in range(WARM_UP_TURNS):
            take_turn(index % 2)
        gc.collect()
        for side in sides:
            costs[side].append(take_turn(side) / (n_sessions * TURN_FRAMES) * 1e6)
    return Comparison(np.array(costs[0]), np.array(costs[1]))


@contextmanager
def clients(address: str, metrics: Metrics, name: str, n_sessions: int) -> Iterator[Callable[[int], float]]:
    """Connected clients of both sides; gives what lets one side send a turn, and says the CPU time that it cost."""
    command = [sys.executable, "-m", "benchmarks.doors", "--client", address, name, "--sessions", str(n_sessions)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdin is not None and client.stdout is not None
        to_client, from_client = client.stdin, client.stdout

        def take_turn(side: int) -> float:
            due_s = audio_taken_s(metrics) + n_sessions * TURN_FRAMES * FRAME_S
            began_s = time.process_time()
            print(side, file=to_client, flush=True)
            assert from_client.readline() == "sent\n"
            while audio_taken_s(metrics) < due_s - n_sessions * HELD_BACK_S:
                time.sleep(QUIET_S)
            return quiet_at_s() - began_s

        assert from_client.readline() == "connected\n"
        yield take_turn
    assert client.returncode == 0, name


def quiet_at_s() -> float:
    """CPU time of this process once it has nothing more to do."""
    before_s = time.process_time()
    while True:
        time.sleep(QUIET_S)
        now_s = time.process_time()
        if now_s - before_s < QUIET_SHARE * QUIET_S:
            return before_s
        before_s = now_s


def audio_taken_s(metrics: Metrics) -> float:
    """Of all sessions, as the server counts it."""
    samples = [sample for metric in metrics.audio_seconds.collect() for sample in metric.samples]
    return sum(sample.value for sample in samples if sample.name.endswith("_total"))


async def send_by_turns(address: str, sides: Sequence[Recipe], n_sessions: int) -> None:
    """Clients of both sides in one process: each line of its input says which sends next, in step with the clock."""
    reading: list[asyncio.Task[None]] = []
    connected: list[list[ClientConnection]] = []
    for recipe in sides:
        url = f"ws://{address}{recipe.path}"
        connected.append([await connect(url, compression=None, max_queue=None) for _ in range(n_sessions)])
        for connection in connected[-1]:
            reading.append(asyncio.create_task(read(connection)))
            for message in recipe.first:
                await connection.send(message)
    print("connected", flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        await send_turn(connected[int(line)], sides[int(line)].frame)
        print("sent", flush=True)
    for task in reading:
        task.cancel()
    await asyncio.gather(*(connection.close() for side in connected for connection in side))


async def send_turn(connections: Sequence[ClientConnection], frame: str | bytes) -> None:
    """Every session's frames of one turn, in real time."""
    began_s = time.monotonic()
    for index in range(TURN_FRAMES):
        await asyncio.sleep(max(0.0, began_s + index * FRAME_S - time.monotonic()))
        for connection in connections:
            await connection.send(frame)


async def read(connection: ClientConnection) -> None:
    """Take what comes, as a client would."""
    async for _ in connection:
        pass


@contextmanager
def served() -> Iterator[tuple[str, Metrics]]:
    """A server on a thread of this process; gives its address and its figures."""
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
        yield f"127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", app.state.server.metrics
    finally:
        server.should_exit = True
        thread.join()


assert WINDOW_SAMPLES == 512, "the rhythm is counted in windows of 32 ms"

if __name__ == "__main__":
    main()
