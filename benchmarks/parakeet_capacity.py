"""The most real-time streams that one GPU serves: simulated callers through the real gateway, chunks of 320 ms.

Run from the project's root, on a machine with an NVIDIA GPU, beside the recordings or with one of speech:

    python -m benchmarks.parakeet_capacity --speech speech.wav

Servers and callers are processes of one machine; each caller speaks a recording from a place of its own on, in
packets, as it would be spoken. Weights are random, of the size of 0.6B v3, with the blank made likely enough for about
as many words as speech has: what is written means nothing, what it costs does; ``--model`` takes a real one. Each
answer ends in a tentative word that names the last sample that was heard, so that a caller knows how late it is: from
the sending of the packet that has a chunk's last sample, one chunk behind what the answer before had heard, to the
arrival of the partial. Waiting for a busy engine counts; the first chunk behind a pause is left out.
"""

import argparse
import asyncio
import json
import logging
import multiprocessing
import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from websockets.asyncio.client import connect

from benchmarks.report import heading
from streaming.engine import Chunk, DecodeOptions, EngineStream, ModelCard, SpeechEngine
from streaming.transcript import Hypothesis, Word
from vad.audio import SAMPLE_RATE_HZ

LIMIT_MS = 100.0  # of the 95th percentile
STEPS = (1, 25, 50, 100, 200, 400, 800)
N_BISECTIONS = 2
SETTLE_S = 3.0  # behind a change of the number of callers
MARK = re.compile(r"@(\d+)(!?)")
MODEL = "parakeet-random"
START_TIMEOUT_S = 240.0


# --- the server ------------------------------------------------------------------------------------------------------


@dataclass
class Spent:
    """What an engine did, in a caller's words: its figures so far."""

    n_calls: int = 0
    n_chunks: int = 0
    busy_s: float = 0.0
    listen_s: float = 0.0
    decode_s: float = 0.0
    thread: int = 0


class TimedBackend:
    """A backend whose time is counted."""

    def __init__(self, backend: Any, spent: Spent) -> None:
        self._backend, self._spent = backend, spent
        self.max_buffers = backend.max_buffers
        self.start, self.decode, self.close = backend.start, backend.decode, backend.close

    def listen(self, buffers: Any) -> Any:
        """See ``Backend``."""
        began_s = time.perf_counter()
        frames = self._backend.listen(buffers)
        self._spent.listen_s += time.perf_counter() - began_s
        return frames

    def decode_ahead(self, batch: Any) -> Any:
        """See ``Backend``."""
        began_s = time.perf_counter()
        said = self._backend.decode_ahead(batch)
        self._spent.decode_s += time.perf_counter() - began_s
        return said


class Marking:
    """An engine whose answers say up to which sample they heard; ``why`` tells its figures."""

    def __init__(self, engine: SpeechEngine, spent: Spent) -> None:
        self._engine, self._spent = engine, spent

    @property
    def card(self) -> ModelCard:
        """See ``SpeechEngine``."""
        return self._engine.card

    @property
    def backend(self) -> str:
        """See ``SpeechEngine``."""
        return self._engine.backend

    @property
    def why(self) -> str:
        """Figures, as JSON."""
        return json.dumps(vars(self._spent) | {"why": self._engine.why})

    def open(self, options: DecodeOptions) -> EngineStream:
        """See ``SpeechEngine``."""
        return self._engine.open(options)

    def close(self, stream: EngineStream) -> None:
        """See ``SpeechEngine``."""
        self._engine.close(stream)

    def decode(self, batch: Sequence[tuple[EngineStream, Chunk]]) -> list[Hypothesis]:
        """See ``SpeechEngine``."""
        began_s = time.perf_counter()
        answers = self._engine.decode(batch)
        spent = self._spent
        spent.busy_s += time.perf_counter() - began_s
        spent.n_calls, spent.n_chunks = spent.n_calls + 1, spent.n_chunks + len(batch)
        spent.thread = threading.get_native_id()
        return [_marked(answer, chunk) for answer, (_, chunk) in zip(answers, batch, strict=True)]


def _marked(answer: Hypothesis, chunk: Chunk) -> Hypothesis:
    end = chunk.span.end_sample
    mark = Word(f" @{end}{'!' * chunk.is_final}", end, end, None)
    return replace(answer, words=(*answer.words, mark))


def no_turn_detector() -> None:
    """Crosses to a worker's process, as a lambda can't."""


def serve(port: int, *, model: str, backend: str, left_ms: int, right_ms: int, workers: int) -> None:
    """A gateway with ``model``, random weights if it is empty, until it is killed."""
    from gateway.app import default_detector, run
    from gateway.config import Config, ServerConfig, SessionConfig
    from gateway.keys import Keys
    from gateway.workers import WorkerParts
    from gateway.workers import run as run_workers
    from models.backends import Backends, Offer
    from models.catalog import load_engine
    from models.parakeet.engine import CONTEXT, ParakeetEngine

    logging.basicConfig(level=logging.INFO)
    spent = Spent()
    context = replace(CONTEXT, right_samples=right_ms * 16)
    if model:
        real = load_engine(model)
        assert isinstance(real, ParakeetEngine), f"{model} is no Parakeet"
        backends, spelt = real._backends, real._pieces
    else:
        backends, spelt = Backends([Offer(backend, lambda: open_backend(backend))], model=MODEL), pieces()
    backends.current = TimedBackend(backends.current, spent)
    engine = ParakeetEngine(backends, spelt, name=model or MODEL, languages=("en",), context=context)
    config = Config(
        models=(engine.card.name,),
        server=ServerConfig(port=port, workers=workers, max_sessions=10_000),
        session=SessionConfig(left_context_ms=left_ms),
    )
    engines = {engine.card.name: Marking(engine, spent)}
    if workers > 1:
        run_workers(WorkerParts(config, Keys(), default_detector, no_turn_detector), engines, lambda: None)
    else:
        run(config, engines, Keys())


def open_backend(name: str) -> Any:
    """The backend of a random model: on the GPU one of the published size, on the CPU a small one to try this with."""
    import torch

    from benchmarks.parakeet_encoder import V3, random_model
    from models.devices import TORCH_CPU
    from models.parakeet.backend import TorchBackend
    from models.parakeet.device_backend import megakernel_on_device, torch_on_device
    from models.parakeet.loading import MAX_FRAMES, USUAL_FRAMES
    from models.timeline import Timeline
    from models.wheels import cache_folder

    if name == TORCH_CPU:
        torch.set_num_threads(1)
        small = random_model(replace(V3, n_layers=2, d_model=64, n_heads=4, d_ffn=128, subsampling_channels=16), "cpu")
        make_talkative(small)
        return TorchBackend(small, max_buffers=4, max_frames=MAX_FRAMES)
    timeline = Timeline()
    with timeline.part("random weights"):
        model = random_model()
        make_talkative(model)
    opened = {"megakernel": megakernel_on_device, "torch-cuda": torch_on_device}[name]
    backend = opened(model, timeline, cache=cache_folder() / "cubins", max_frames=MAX_FRAMES, usual_frames=USUAL_FRAMES)
    print(f"opened: {timeline}", file=sys.stderr, flush=True)
    return backend


def make_talkative(model: Any) -> None:
    """Half of the joint's choices blank, as in speech, and every duration about as likely."""
    import torch

    with torch.inference_mode():
        _make_talkative(model)


def _make_talkative(model: Any) -> None:
    import torch

    from models.parakeet.features import log_mel
    from models.parakeet.greedy import start

    config, head = model.config, model.joint.head
    samples = torch.randn(1, 20 * SAMPLE_RATE_HZ, device=head.weight.device) * 0.1
    n_samples = torch.tensor([samples.shape[1]], device=samples.device)
    frames = model.encode(log_mel(samples, n_samples, config.n_mels), n_samples // 160)[0]
    head.weight.mul_(4.0)
    logits = model.joint(frames, start(model).projected)
    durations = logits[:, config.vocabulary_size :]
    head.bias[config.vocabulary_size :] -= durations.mean(dim=0)
    others = logits[:, : config.blank_id].amax(dim=1)
    head.bias[config.blank_id] += (others - logits[:, config.blank_id]).median()


def pieces() -> Any:
    """Of 8192 tokens a third begin words."""
    from models.parakeet.tokens import Pieces

    texts = tuple((" w" if i % 3 == 0 else "a") + format(i, "x") for i in range(8192))
    return Pieces((*texts, None))


# --- callers ---------------------------------------------------------------------------------------------------------


@dataclass
class Callers:
    """The callers of one process."""

    addresses: list[str]
    speech: bytes  # s16le
    packet_samples: int
    chunk_ms: int
    seed: int
    late_ms: list[float] = field(default_factory=list)
    tasks: list["asyncio.Task[None]"] = field(default_factory=list)
    n_lost: int = 0

    def set(self, n_callers: int) -> None:
        """So many from now on."""
        while len(self.tasks) > n_callers:
            self.tasks.pop().cancel()
        while len(self.tasks) < n_callers:
            self.tasks.append(asyncio.create_task(self._call(len(self.tasks))))

    async def _call(self, index: int) -> None:
        rng = np.random.default_rng([self.seed, index])
        address = self.addresses[(index + self.seed) % len(self.addresses)]
        await asyncio.sleep(float(rng.uniform(0, 2.0)))
        hello = {
            "type": "hello",
            "audio": {"encoding": "s16le", "sample_rate_hz": SAMPLE_RATE_HZ},
            "chunk_ms": self.chunk_ms,
        }
        try:
            async with connect(f"ws://{address}/v1/stream", compression=None, max_queue=None) as socket:
                await socket.send(json.dumps(hello))
                await socket.recv()  # ready
                began_s = time.monotonic()
                listening = asyncio.create_task(self._listen(socket, began_s))
                try:
                    await self._speak(socket, began_s, int(rng.integers(len(self.speech) // 2)) * 2)
                finally:
                    listening.cancel()
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001  # a caller that is cut off is counted, whatever the reason
            self.n_lost += 1
            print(f"a caller was lost: {type(error).__name__}: {error}", file=sys.stderr, flush=True)

    async def _speak(self, socket: Any, began_s: float, at: int) -> None:
        n_sent, n_bytes = 0, self.packet_samples * 2
        while True:
            packet = self.speech[at : at + n_bytes]
            at = (at + n_bytes) % len(self.speech)
            packet += self.speech[: n_bytes - len(packet)]
            n_sent += self.packet_samples
            await asyncio.sleep(max(0.0, began_s + n_sent / SAMPLE_RATE_HZ - time.monotonic()))
            await socket.send(packet)

    async def _listen(self, socket: Any, began_s: float) -> None:
        chunk_samples = self.chunk_ms * SAMPLE_RATE_HZ // 1000
        before: int | None = None
        async for message in socket:
            if not isinstance(message, str) or '"ack"' in message:
                continue
            marks = MARK.findall(message) if '"partial"' in message else []
            heard = int(marks[-1][0]) if marks and not marks[-1][1] else None
            if heard is not None and before is not None and heard >= before + chunk_samples:
                n_packets = -(-(before + chunk_samples) // self.packet_samples)
                due_s = began_s + n_packets * self.packet_samples / SAMPLE_RATE_HZ
                self.late_ms.append((time.monotonic() - due_s) * 1e3)
            before = heard


def call(pipe: Connection, callers: Callers) -> None:
    """One process of callers: takes numbers of callers, and answers ``None`` with what was measured since."""

    async def obey() -> None:
        while True:
            while not pipe.poll():
                await asyncio.sleep(0.02)
            wanted = pipe.recv()
            if isinstance(wanted, int):
                callers.set(wanted)
            else:
                pipe.send((callers.late_ms, callers.n_lost))
                callers.late_ms = []

    with suppress(EOFError, KeyboardInterrupt):
        asyncio.run(obey())


# --- measuring -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Level:
    """What so many streams did."""

    n_streams: int
    late_ms: NDArray[np.float64]
    n_lost: int
    seconds: float
    n_engines: int
    spent: dict[str, float]  # of all of them
    thread_s: list[dict[str, float]]  # of each process: CPU seconds of the event loop, the engine and the busiest other

    @property
    def p95_ms(self) -> float:
        """Infinite if nothing came."""
        return float(np.quantile(self.late_ms, 0.95)) if len(self.late_ms) else float("inf")

    @property
    def holds(self) -> bool:
        """Whether so many can be served."""
        return self.p95_ms < LIMIT_MS and not self.n_lost

    def row(self) -> str:
        """Of the table."""
        if not len(self.late_ms):
            return f"| {self.n_streams} | none | | | | | | | | | |"
        p50, p95, p99 = np.quantile(self.late_ms, [0.5, 0.95, 0.99])
        spent, per_s = self.spent, 1 / self.seconds / self.n_engines
        threads = " / ".join(
            f"{sum(process[name] for process in self.thread_s) / self.seconds:.2f}"
            for name in ("loop", "engine", "other")
        )
        batch = spent["n_chunks"] / max(spent["n_calls"], 1)
        busy, listen, decode = (spent[name] * per_s for name in ("busy_s", "listen_s", "decode_s"))
        return (
            f"| {self.n_streams} | {p50:.0f} | {p95:.0f} | {p99:.0f} | {len(self.late_ms) / self.seconds:.0f} "
            f"| {batch:.1f} | {busy:.0%} | {listen:.0%} | {decode:.0%} | {threads} | {self.n_lost} |"
        )


HEAD = (
    "| streams | p50 ms | p95 | p99 | partials a second | chunks a batch | engine busy | encoder | decoder "
    "| cores: event loops / engines / detectors | lost |\n|" + "---:|" * 11
)


class Fleet:
    """Servers and callers."""

    def __init__(self, arguments: argparse.Namespace, speech: bytes) -> None:
        ports = [arguments.port + index for index in range(arguments.servers)]
        options = ["--model", arguments.model, "--backend", arguments.backend, "--left-ms", str(arguments.left_ms)]
        options += ["--right-ms", str(arguments.right_ms), "--workers", str(arguments.workers)]
        command = [sys.executable, "-m", "benchmarks.parakeet_capacity", *options, "--serve"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        self._servers = [subprocess.Popen([*command, str(port)], env=environment) for port in ports]
        self.addresses = [f"127.0.0.1:{port}" for port in ports]
        self._n_workers = arguments.workers
        self._pipes: list[Connection] = []
        self._processes = []
        for seed in range(arguments.caller_processes):
            here, there = multiprocessing.Pipe()
            callers = Callers(self.addresses, speech, arguments.packet_ms * 16, arguments.chunk_ms, seed)
            process = multiprocessing.Process(target=call, args=(there, callers), daemon=True)
            process.start()
            self._pipes.append(here)
            self._processes.append(process)

    def wait(self) -> None:
        """Until all servers answer."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        for address, server in zip(self.addresses, self._servers, strict=True):
            while True:
                with suppress(OSError):
                    self._health(address)
                    break
                if server.poll() is not None or time.monotonic() > deadline_s:
                    raise RuntimeError(f"the server at {address} did not start")
                time.sleep(0.2)

    def measure(self, n_streams: int, seconds: float) -> Level:
        """So many streams for ``seconds``, once they have settled."""
        n_processes = len(self._pipes)
        for index, pipe in enumerate(self._pipes):
            pipe.send(n_streams // n_processes + (index < n_streams % n_processes))
        time.sleep(SETTLE_S)
        self._collect()
        before, cpu_before, began_s = self._spent(), self._cpu_s(), time.monotonic()
        time.sleep(seconds)
        late_ms, n_lost = self._collect()
        taken_s = time.monotonic() - began_s
        after, cpu_after = self._spent(), self._cpu_s()
        spent = {
            name: sum(b[name] - a[name] for a, b in zip(before, after, strict=True))
            for name in ("n_calls", "n_chunks", "busy_s", "listen_s", "decode_s")
        }
        engines = {int(figures["thread"]) for figures in after}
        threads = [_by_thread(pid, engines, cpu_before.get(pid, {}), cpu_after[pid]) for pid in cpu_after]
        return Level(n_streams, np.array(late_ms), n_lost, taken_s, len(after), spent, threads)

    def _collect(self) -> tuple[list[float], int]:
        late_ms: list[float] = []
        n_lost = 0
        for pipe in self._pipes:
            pipe.send(None)
        for pipe in self._pipes:
            late, lost = pipe.recv()
            late_ms += late
            n_lost += lost
        return late_ms, n_lost

    def _spent(self) -> list[dict[str, float]]:
        return [self._spent_at(address) for address in self.addresses]

    def _spent_at(self, address: str) -> dict[str, float]:
        """The newest figures; a worker knows those of its last answer."""
        found = [
            json.loads(self._health(address)["engines"][0]["why"])
            for _ in range(1 if self._n_workers == 1 else 8 + self._n_workers)
        ]
        return max(found, key=lambda figures: float(figures["n_calls"]))

    def backend(self) -> str:
        """What computes."""
        return str(self._health(self.addresses[0])["engines"][0]["backend"])

    @staticmethod
    def _health(address: str) -> Any:
        return json.loads(urllib.request.urlopen(f"http://{address}/health", timeout=30).read())

    def _cpu_s(self) -> dict[int, dict[int, float]]:
        """Of every server and its workers."""
        servers = [server.pid for server in self._servers]
        return {pid: _thread_cpu_s(pid) for server in servers for pid in (server, *_children(server))}

    def stop(self) -> None:
        """End everything."""
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.terminate()
        for server in self._servers:
            server.kill()
            server.wait()


def _thread_cpu_s(pid: int) -> dict[int, float]:
    """Thread → CPU seconds so far."""
    spent: dict[int, float] = {}
    for folder in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            spent[int(folder.name)] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return spent


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        found += [int(child) for child in (task / "children").read_text().split()]
    return found


def _by_thread(pid: int, engines: set[int], before: dict[int, float], after: dict[int, float]) -> dict[str, float]:
    spent = {thread: seconds - before.get(thread, 0.0) for thread, seconds in after.items()}
    others = [seconds for thread, seconds in spent.items() if thread != pid and thread not in engines]
    engine_s = sum(seconds for thread, seconds in spent.items() if thread in engines)
    return {"loop": spent.get(pid, 0.0), "engine": engine_s, "other": max(others, default=0.0)}


def climb(fleet: Fleet, steps: Sequence[int], seconds: float) -> list[Level]:
    """Up the steps until one is too many, then between."""
    levels: list[Level] = []

    def holds(n_streams: int) -> bool:
        levels.append(fleet.measure(n_streams, seconds))
        print(levels[-1].row(), flush=True)
        return levels[-1].holds

    held = 0
    for n_streams in steps:
        if not holds(n_streams):
            low, high = held, n_streams
            for _ in range(N_BISECTIONS):
                middle = (low + high) // 2
                if middle in (low, high):
                    break
                low, high = (middle, high) if holds(middle) else (low, middle)
            break
        held = n_streams
    return levels


def read_speech(path: Path | None) -> bytes:
    """s16le at 16 kHz: a recording, or English clips of the manifest in a row."""
    import soundfile

    if path is not None:
        audio, rate_hz = soundfile.read(path, dtype="int16", always_2d=True)
        if rate_hz != SAMPLE_RATE_HZ:
            raise SystemExit(f"{path} has {rate_hz} Hz; {SAMPLE_RATE_HZ} are needed")
        return np.ascontiguousarray(audio[:, 0]).astype("<i2").tobytes()
    from benchmarks.recordings import DEFAULT_MANIFEST, read_manifest

    clips = read_manifest(DEFAULT_MANIFEST, languages=["en"], every=10)[:12]
    samples = np.concatenate([clip.samples() for clip in clips])
    return (np.clip(samples, -1, 1) * 32_767).astype("<i2").tobytes()


def main() -> None:
    """Climb and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--speech", type=Path, help="a recording of speech at 16 kHz; else clips of the manifest")
    parser.add_argument("--model", default="", help="one of the catalogue; else random weights")
    parser.add_argument("--backend", choices=["megakernel", "torch-cuda", "torch-cpu"], default="megakernel")
    parser.add_argument("--servers", type=int, default=1, help="server processes, on ports that follow each other")
    parser.add_argument("--workers", type=int, default=1, help="processes in front of each server's engine; 1: none")
    parser.add_argument("--port", type=int, default=8400)
    parser.add_argument("--caller-processes", type=int, default=6)
    parser.add_argument("--steps", type=int, nargs="+", default=list(STEPS))
    parser.add_argument("--seconds", type=float, default=8.0, help="of each step")
    parser.add_argument("--packet-ms", type=int, default=80)
    parser.add_argument("--chunk-ms", type=int, default=320)
    parser.add_argument("--left-ms", type=int, default=10_000)
    parser.add_argument("--right-ms", type=int, default=1_040)
    parser.add_argument("--serve", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(
            arguments.serve,
            model=arguments.model,
            backend=arguments.backend,
            left_ms=arguments.left_ms,
            right_ms=arguments.right_ms,
            workers=arguments.workers,
        )
        return
    speech = read_speech(arguments.speech)
    fleet = Fleet(arguments, speech)
    try:
        fleet.wait()
        print(heading("Parakeet's streams in real time on one GPU"))
        print(
            f"{arguments.model or 'Random weights'} on {fleet.backend()}; servers: {arguments.servers}, workers of "
            f"each: {arguments.workers}, processes of callers: {arguments.caller_processes}. "
            f"{len(speech) / 2 / SAMPLE_RATE_HZ:.0f} s of speech in packets "
            f"of {arguments.packet_ms} ms; left context {arguments.left_ms} ms, chunks {arguments.chunk_ms} ms, right "
            f"context {arguments.right_ms} ms. {arguments.seconds:g} s a row. How late: from the sending of the packet "
            "with a chunk's last sample, right context included, to the caller's having its partial.\n"
        )
        print(HEAD, flush=True)
        levels = climb(fleet, arguments.steps, arguments.seconds)
    finally:
        fleet.stop()
    most = max((level.n_streams for level in levels if level.holds), default=0)
    print(f"\nMost streams with p95 below {LIMIT_MS:.0f} ms and nobody lost: {most}.")


if __name__ == "__main__":
    main()
