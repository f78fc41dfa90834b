"""One server in several processes: workers with sockets, sessions and detectors before the one that owns the models.

Knows how workers are started, watched, begun anew and stopped, and passes on what they tell each other. Does not know
sessions; what a worker serves is the app that a server in one process serves.
"""

import asyncio
import logging
import multiprocessing
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from gateway.app import UvicornServer, build_app, prepare_interpreter, uvicorn_config
from gateway.config import Config, ServerConfig
from gateway.engine_host import EngineHost
from gateway.engine_messages import EngineAbout
from gateway.keys import Keys
from gateway.outbox import Outbox
from gateway.peers import READY, WorkerPeers, published, socket_of
from gateway.remote_engine import remote_engines
from streaming.engine import SpeechEngine
from vad.detector import SpeechDetector
from vad.turn import TurnDetector

log = logging.getLogger("senseway")

START_TIMEOUT_S = 120.0  # of a worker
STOP_TIMEOUT_S = 15.0  # to tell clients, and let what runs finish
RETRY_S = 0.02  # of events that a worker had no room for
MAX_DEATHS = 5  # of workers in
DEATHS_WITHIN_S = 60.0  # so long: something is wrong that a new one does not mend
SIGNALS = (signal.SIGINT, signal.SIGTERM)

_spawn = multiprocessing.get_context("spawn")  # a fork would copy a process that has a GPU open


class WorkersError(Exception):
    """The server can't start, or not go on; the message says why."""


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What every worker is made of; crosses to another process, where the rest is made."""

    config: Config
    keys: Keys
    make_detector: Callable[[], SpeechDetector]
    make_turn_detector: Callable[[], TurnDetector | None]
    twilio_auth_token: str = ""


@dataclass(frozen=True, slots=True)
class _Place:
    """A worker's place among the others."""

    index: int
    n_open: Any  # C ints in memory that all share, one a worker: multiprocessing gives such arrays no type
    folder: Path
    about: Sequence[EngineAbout]


@dataclass(slots=True)
class _Worker:
    """A worker as its parent sees it."""

    process: SpawnProcess
    pipe: "Connection[bytes, bytes]"
    outbox: Outbox  # of calls' events
    deadline_s: float  # to be ready
    is_ready: bool = False


class Workers:
    """After ``start``, ``watch`` until it returns, then ``end``."""

    def __init__(self, parts: WorkerParts, engines: Mapping[str, SpeechEngine]) -> None:
        """``engines``: name → engine, the default first."""
        self._host = EngineHost(engines)
        self._engine_thread = threading.Thread(target=self._host_engines, name="engine")
        self._is_hosted = True
        self._reserved = listening_sockets(parts.config.server)
        self._folder = Path(tempfile.mkdtemp(prefix="senseway-"))  # which nobody else may enter
        self.port: int = self._reserved[0].getsockname()[1]
        server = replace(parts.config.server, port=self.port)
        self._parts = replace(parts, config=replace(parts.config, server=server))
        self._n_open = _spawn.RawArray("i", server.workers)
        self._workers: dict[int, _Worker] = {}
        self._deaths_s: deque[float] = deque(maxlen=MAX_DEATHS)
        self._news, self._tell = multiprocessing.Pipe(duplex=False)
        self._is_stopping = False

    def stop(self) -> None:
        """Have ``watch`` return soon. From any thread, or a signal's handler."""
        self._is_stopping = True
        self._tell.send_bytes(b"\0")

    def kill(self) -> None:
        """End every worker at once, whatever its clients have still to hear. From any thread, or a signal's handler."""
        for worker in list(self._workers.values()):
            worker.process.kill()

    def start(self) -> None:
        """Start engines and workers, and wait until all of them serve.

        Raises:
            WorkersError: if one does not.
        """
        prepare_interpreter()
        self._engine_thread.start()
        for index in range(self._parts.config.server.workers):
            self._begin(index)
        while not self._is_stopping and not all(worker.is_ready for worker in self._workers.values()):
            self._attend()

    def watch(self) -> None:
        """Begin workers anew that end, and pass on their news, until ``stop``.

        Raises:
            WorkersError: if the engines' thread ended, or workers end again and again.
        """
        while not self._is_stopping:
            self._attend()

    def end(self) -> None:
        """Let every worker take leave of its clients, and end what runs."""
        for worker in self._workers.values():
            worker.process.terminate()
        deadline_s = time.monotonic() + STOP_TIMEOUT_S
        for worker in self._workers.values():
            worker.process.join(max(0.0, deadline_s - time.monotonic()))
            if worker.process.exitcode is None:
                log.warning("a worker did not end in %g s and was killed", STOP_TIMEOUT_S)
                worker.process.kill()
                worker.process.join()
        if self._engine_thread.is_alive():
            self._host.stop()
            self._engine_thread.join()
        for reserved in self._reserved:
            reserved.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _host_engines(self) -> None:
        try:
            self._host.run()
        finally:
            self._is_hosted = False
            self._tell.send_bytes(b"\0")

    def _begin(self, index: int) -> None:
        self._n_open[index] = 0
        ours, theirs = multiprocessing.Pipe()
        questions = self._host.connect()
        place = _Place(index, self._n_open, self._folder, self._host.about)
        process = _spawn.Process(
            target=work, args=(self._parts, place, questions, theirs), name=f"senseway-worker-{index}", daemon=True
        )
        process.start()
        theirs.close()  # so that the worker's end is the only one
        questions.close()
        self._workers[index] = _Worker(process, ours, Outbox(ours), time.monotonic() + START_TIMEOUT_S)

    def _attend(self) -> None:
        """Wait for the next news and see to it."""
        by_pipe = {worker.pipe: index for index, worker in self._workers.items()}
        by_sentinel = {worker.process.sentinel: index for index, worker in self._workers.items()}
        found = wait([*by_pipe, *by_sentinel, self._news], timeout=self._patience_s())
        for index in [index for pipe, index in by_pipe.items() if pipe in found]:
            self._hear(index)
        for index in [index for sentinel, index in by_sentinel.items() if sentinel in found]:
            self._replace(index)
        for worker in self._workers.values():
            worker.outbox.flush()
        if self._news in found:
            self._news.recv_bytes()
        if not self._is_hosted:
            raise WorkersError("the thread that runs the models ended; see the log")
        if any(not worker.is_ready and time.monotonic() > worker.deadline_s for worker in self._workers.values()):
            raise WorkersError(f"a worker was not ready in {START_TIMEOUT_S:g} s")

    def _patience_s(self) -> float | None:
        """How long to wait for news: until a worker should be ready, or an outbox may have room."""
        limits_s = [worker.deadline_s - time.monotonic() for worker in self._workers.values() if not worker.is_ready]
        limits_s += [RETRY_S for worker in self._workers.values() if worker.outbox.is_waiting]
        return max(0.0, min(limits_s)) if limits_s else None

    def _hear(self, index: int) -> None:
        worker = self._workers[index]
        try:
            data = worker.pipe.recv_bytes()
        except (EOFError, OSError):
            return  # it ended, which its sentinel tells as well
        if data == READY:
            worker.is_ready = True
            return
        for other in self._workers.values():
            if other is not worker and other.is_ready:
                other.outbox.put(data)

    def _replace(self, index: int) -> None:
        worker = self._workers[index]
        worker.process.join()
        worker.pipe.close()
        code = worker.process.exitcode
        if self._is_stopping:
            del self._workers[index]
            return
        if not worker.is_ready:
            raise WorkersError(f"worker {index} could not start (exit code {code}); see the log")
        now_s = time.monotonic()
        if len(self._deaths_s) == MAX_DEATHS and now_s - self._deaths_s[0] < DEATHS_WITHIN_S:
            raise WorkersError(f"worker {index} ended (exit code {code}), as {MAX_DEATHS} have in the last minute")
        self._deaths_s.append(now_s)
        log.error("worker %d ended (exit code %s), and its sessions with it; it is begun anew", index, code)
        self._begin(index)


def run(parts: WorkerParts, engines: Mapping[str, SpeechEngine], on_ready: Callable[[], None]) -> None:
    """Serve until interrupted, as ``gateway.app.run`` does with one process; ``on_ready`` is called once all serve.

    Raises:
        WorkersError: if the server can't start, or not go on.
    """
    workers = Workers(parts, engines)
    caught: list[int] = []
    with _caught_signals(workers, caught):
        try:
            workers.start()
            if not caught:
                on_ready()
            workers.watch()
        finally:
            workers.end()
    for number in caught[:1]:
        signal.raise_signal(number)  # as uvicorn does: what ended the server ends the program


@contextmanager
def _caught_signals(workers: Workers, caught: list[int]) -> Iterator[None]:
    def catch(number: int, _: object) -> None:
        if caught:
            workers.kill()
        caught.append(number)
        workers.stop()

    before = {number: signal.signal(number, catch) for number in SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def listening_sockets(server: ServerConfig, port: int | None = None) -> list[socket.socket]:
    """Bound sockets, one for each address of the host, at a port that other sockets of ours may share.

    Raises:
        WorkersError: if that can't be.
    """
    if not sys.platform.startswith("linux"):
        raise WorkersError("server.workers needs Linux, whose kernel shares connections out among sockets of one port")
    port = server.port if port is None else port
    sockets: list[socket.socket] = []
    for family, kind, protocol, _, address in socket.getaddrinfo(server.host, port, type=socket.SOCK_STREAM):
        listener = socket.socket(family, kind, protocol)
        sockets.append(listener)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            listener.bind((address[0], port, *address[2:]))
        except OSError as error:
            raise WorkersError(f"can't listen on {address[0]} port {port}: {error.strerror}") from error
        port = listener.getsockname()[1]  # the same of every address, if the system chose it
    return sockets


# --- in the worker ---------------------------------------------------------------------------------------------------


class _WorkerServer(UvicornServer):
    """uvicorn, but that the parent hears when it serves, and that it ends when the parent has."""

    def __init__(
        self, config: Any, pipe: "Connection[bytes, bytes]", tell_followers: Callable[[str, str], None]
    ) -> None:
        super().__init__(config)
        self._pipe = pipe
        self._tell_followers = tell_followers

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start, and say so."""
        await super().startup(sockets)
        asyncio.get_running_loop().add_reader(self._pipe.fileno(), self._hear)
        self._pipe.send_bytes(READY)

    def _hear(self) -> None:
        try:
            data = self._pipe.recv_bytes()
        except (EOFError, OSError):
            asyncio.get_running_loop().remove_reader(self._pipe.fileno())
            self.should_exit = True
            log.error("the process that runs the models is gone, so this worker ends")
            return
        self._tell_followers(*published(data))


def work(
    parts: WorkerParts, place: _Place, questions: "Connection[bytes, bytes]", news: "Connection[bytes, bytes]"
) -> None:
    """A worker's process, until it is told to end or its parent is gone."""
    os.setpgid(0, 0)  # Ctrl-C is for the parent, which tells its workers
    logging.basicConfig(format="%(message)s")
    peers = WorkerPeers(place.index, place.n_open, place.folder, news)
    app = build_app(
        parts.config,
        remote_engines(place.about, questions),
        parts.make_detector(),
        parts.keys,
        parts.twilio_auth_token,
        parts.make_turn_detector(),
        peers,
    )
    sockets = [*listening_sockets(parts.config.server), _private_socket(socket_of(place.folder, place.index))]
    server = _WorkerServer(uvicorn_config(parts.config, app), news, app.state.server.tell_followers)
    prepare_interpreter()
    with suppress(KeyboardInterrupt):
        server.run(sockets)


def _private_socket(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)  # of the worker that was here before
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    return listener
