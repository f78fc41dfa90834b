"""One server in several processes: whatever worker a client comes to, it finds the same server."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect, unix_connect

from gateway.config import Config, ServerConfig, SessionConfig
from gateway.keys import Keys
from gateway.peers import socket_of
from gateway.workers import WorkerParts, Workers, WorkersError
from models.scripted import ScriptedEngine, recite
from streaming.engine import Chunk, EngineStream, SpeechEngine
from streaming.transcript import Hypothesis
from tests.serving import DEADLINE_S, HELLO, finals, finish, hear, speech, tell
from vad.energy import EnergyDetector

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(not sys.platform.startswith("linux"), reason="workers share a port as Linux does"),
]

TEXT = "it was the best of times"


class MoodyEngine(ScriptedEngine):
    """Fails while it is told to."""

    fails = False

    def decode(self, batch: Sequence[tuple[EngineStream, Chunk]]) -> list[Hypothesis]:
        if self.fails:
            raise RuntimeError("the device is gone")
        return super().decode(batch)


def scripted() -> MoodyEngine:
    return MoodyEngine(recite(f"{TEXT} it was the worst of times", start_sample=8_000))


def no_turn_detector() -> None:
    """Crosses to a worker's process, as a lambda can't."""


class Listener(ClientConnection):
    """Hears what came with a close whose answer nobody takes any more; websockets' own drops it."""

    def send_data(self) -> None:
        with suppress(BrokenPipeError):
            super().send_data()


class Fleet:
    """A server of two workers, watched on a thread."""

    def __init__(self, engine: SpeechEngine, *, keys: Sequence[str] = (), **server: object) -> None:
        config = Config(
            models=(engine.card.name,),
            server=ServerConfig(port=0, workers=2, **server),  # type: ignore[arg-type]
            session=SessionConfig(resume_window_s=30),
        )
        parts = WorkerParts(config, Keys(keys), EnergyDetector, no_turn_detector)
        self.workers = Workers(parts, {engine.card.name: engine})
        self.failure: WorkersError | None = None
        self.thread = threading.Thread(target=self._watch)
        self.address = f"127.0.0.1:{self.workers.port}"

    def _watch(self) -> None:
        try:
            self.workers.watch()
        except WorkersError as error:
            self.failure = error

    def at(self, index: int, path: str = "/v1/stream", key: str | None = None) -> ClientConnection:
        """A connection to one worker."""
        headers = None if key is None else {"Authorization": f"Bearer {key}"}
        return unix_connect(
            str(self.socket(index)),
            f"ws://localhost{path}",
            compression=None,
            close_timeout=2,
            additional_headers=headers,
            create_connection=Listener,
        )

    def post(self, index: int, path: str, key: str) -> dict:
        """What one worker answers to a request without a body."""
        head = f"POST {path} HTTP/1.0\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n\r\n"
        with socket.socket(socket.AF_UNIX) as client, client.makefile("rb") as answer:
            client.connect(str(self.socket(index)))
            client.sendall(head.encode())
            return json.loads(answer.read().partition(b"\r\n\r\n")[2])

    def socket(self, index: int) -> Path:
        return socket_of(self.workers._folder, index)

    def pid(self, index: int) -> int:
        pid = self.workers._workers[index].process.pid
        assert pid is not None
        return pid

    def health(self) -> dict:
        return json.load(urllib.request.urlopen(f"http://{self.address}/health", timeout=DEADLINE_S))


@contextmanager
def fleet_of(engine: SpeechEngine, *, keys: Sequence[str] = (), **server: object) -> Iterator[Fleet]:
    fleet = Fleet(engine, keys=keys, **server)
    try:
        fleet.workers.start()
        fleet.thread.start()
        yield fleet
    finally:
        fleet.workers.stop()
        if fleet.thread.is_alive():
            fleet.thread.join(DEADLINE_S)
        fleet.workers.end()


@pytest.fixture(scope="module")
def engine() -> MoodyEngine:
    return scripted()


@pytest.fixture(scope="module")
def fleet(engine: MoodyEngine) -> Iterator[Fleet]:
    with fleet_of(engine, max_sessions=3) as found:
        yield found


def comes_true(condition: Callable[[], bool]) -> bool:
    """Whether it does in time: what another process does is seen when it is done."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not condition() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    return condition()


def begin(stream: ClientConnection) -> dict:
    stream.send(json.dumps(HELLO))
    return hear(stream, "ready")


@pytest.mark.parametrize("index", [0, 1])
def test_every_worker_transcribes_with_the_one_engine(fleet: Fleet, engine: ScriptedEngine, index: int) -> None:
    n_decodes = engine.n_decodes
    with fleet.at(index) as stream:
        ready = begin(stream)
        assert ready["engine"] == {"backend": "script", "why": engine.why}
        stream.send(speech(2.0))
        assert finals(finish(stream)) == TEXT
    assert engine.n_decodes > n_decodes
    assert comes_true(lambda: engine.n_open_streams == 0)


def test_clients_at_the_port_get_one_of_the_workers(fleet: Fleet) -> None:
    with connect(f"ws://{fleet.address}/v1/stream", compression=None) as stream:
        begin(stream)
        stream.send(speech(2.0))
        assert finals(finish(stream)) == TEXT


def test_an_option_that_the_model_lacks_is_refused_by_name(fleet: Fleet) -> None:
    with fleet.at(0) as stream:
        tell(stream, **HELLO, vocabulary=["Senseway"])
        error = hear(stream, "error")
        assert error["code"] == "unsupported_option" and "vocabulary" in error["message"]


@pytest.mark.parametrize("cuts_cable", [True, False], ids=["lost", "still looks alive"])
def test_a_session_is_resumed_at_a_worker_that_does_not_have_it(fleet: Fleet, cuts_cable: bool) -> None:
    audio = speech(2.0)
    with fleet.at(0) as stream:
        session_id = begin(stream)["session_id"]
        stream.send(audio[:40_000])
        seen = [hear(stream, "speech_started")]
        if cuts_cable:
            stream.socket.shutdown(socket.SHUT_RDWR)
        with fleet.at(1) as other:
            tell(other, type="hello", resume={"session_id": session_id, "last_event": seen[0]["event"]})
            ready = hear(other, "ready")
            assert ready["resumed"] and ready["session_id"] == session_id
            other.send(audio[ready["taken_samples"] * 2 :])
            seen += [message for message in finish(other) if "event" in message]
        if not cuts_cable:
            assert hear(stream, "error")["code"] == "taken_over"
    numbers = [message["event"] for message in seen]
    assert numbers == sorted(set(numbers))
    assert finals(seen) == TEXT


def test_a_client_that_is_lost_again_behind_a_relay_can_come_back(fleet: Fleet) -> None:
    with fleet.at(0) as stream:
        session_id = begin(stream)["session_id"]
        stream.send(speech(2.0))
        stream.socket.shutdown(socket.SHUT_RDWR)
    resume = {"type": "hello", "resume": {"session_id": session_id, "last_event": 0}}
    with fleet.at(1) as stream:
        stream.send(json.dumps(resume))
        assert hear(stream, "ready")["resumed"]
        stream.socket.shutdown(socket.SHUT_RDWR)
    with fleet.at(0) as stream:
        stream.send(json.dumps(resume))
        ready = hear(stream, "ready")
        stream.send(speech(2.0)[ready["taken_samples"] * 2 :])
        assert finals(finish(stream)) == TEXT


@pytest.mark.parametrize("session_id", ["nobody", "nobody.0", "nobody.1", "nobody.7", "nobody.²", "..."])
def test_a_session_that_no_worker_has_is_unknown_and_a_new_one_can_be_begun(fleet: Fleet, session_id: str) -> None:
    with fleet.at(1) as stream:
        tell(stream, type="hello", resume={"session_id": session_id, "last_event": 0})
        assert hear(stream, "error")["code"] == "unknown_session"
        begin(stream)
        stream.send(speech(2.0))
        assert finals(finish(stream)) == TEXT


def test_sessions_are_counted_over_all_workers(fleet: Fleet) -> None:
    with fleet.at(0) as first, fleet.at(1) as second, fleet.at(1) as third:
        for stream in (first, second, third):
            begin(stream)
        assert fleet.health()["sessions"] == 3
        for index in (0, 1):
            with fleet.at(index) as late:
                late.send(json.dumps(HELLO))
                assert hear(late, "error")["code"] == "server_full"
        for stream in (first, second, third):
            finish(stream)
    assert comes_true(lambda: fleet.health()["sessions"] == 0)
    with fleet.at(0) as stream:
        begin(stream)
        finish(stream)


def test_figures_are_those_of_all_workers(fleet: Fleet) -> None:
    for index in (0, 1):
        with fleet.at(index) as stream:
            begin(stream)
            finish(stream)
    text = urllib.request.urlopen(f"http://{fleet.address}/metrics", timeout=DEADLINE_S).read().decode()
    assert text.count("# TYPE senseway_sessions gauge") == 1
    for index in (0, 1):
        assert f'senseway_sessions{{door="native",worker="{index}"}} 0.0' in text
        assert f'senseway_loop_lag_seconds_bucket{{le="+Inf",worker="{index}"}}' in text


def test_a_follower_hears_a_call_of_another_worker(fleet: Fleet) -> None:
    with fleet.at(1, "/v1/calls/C1") as follower, fleet.at(1, "/v1/calls/C2") as other:
        with fleet.at(0, "/telephony/vonage") as call:
            call.send(
                json.dumps({"event": "websocket:connected", "content-type": "audio/l16;rate=16000", "uuid": "C1"})
            )
            assert hear(follower, "call_started")["call"] == "C1"
            audio = speech(2.0)
            for at in range(0, len(audio), 640):
                call.send(audio[at : at + 640])
            assert hear(follower, "final")["text"] == TEXT
        assert hear(follower, "call_ended")["call"] == "C1"
        with pytest.raises(TimeoutError):
            other.recv(timeout=0)


def test_keys_and_passes_of_one_worker_open_every_other() -> None:
    with fleet_of(scripted(), keys=["sk-secret"]) as fleet:
        with pytest.raises(InvalidStatus), fleet.at(0, key="sk-wrong"):
            pass
        token = fleet.post(0, "/v1/auth/grant", "sk-secret")["access_token"]
        with fleet.at(1, key=token) as stream:
            session_id = begin(stream)["session_id"]
            stream.socket.shutdown(socket.SHUT_RDWR)
        with fleet.at(0, key=token) as stream:  # which shows it to the other, too
            tell(stream, type="hello", resume={"session_id": session_id, "last_event": 0})
            assert hear(stream, "ready")["resumed"]
        request = urllib.request.Request(
            f"http://{fleet.address}/metrics", headers={"Authorization": "Bearer sk-secret"}
        )
        text = urllib.request.urlopen(request, timeout=DEADLINE_S).read().decode()
        assert 'worker="0"' in text and 'worker="1"' in text


def test_a_worker_that_dies_costs_others_nothing_and_is_begun_anew() -> None:
    engine = scripted()
    with fleet_of(engine) as fleet:
        with fleet.at(0) as dying, fleet.at(1) as living:
            session_id = begin(dying)["session_id"]
            begin(living)
            dying.send(speech(2.0))
            living.send(speech(2.0))
            hear(dying, "final")
            pid = fleet.pid(0)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(ConnectionClosed):
                while True:
                    dying.recv(timeout=DEADLINE_S)
            assert finals(finish(living)) == TEXT
        assert comes_true(lambda: engine.n_open_streams == 0 and fleet.pid(0) != pid)
        assert comes_true(lambda: fleet.workers._workers[0].is_ready)
        assert fleet.health()["sessions"] == 0
        with fleet.at(1) as stream:
            tell(stream, type="hello", resume={"session_id": session_id, "last_event": 1})
            assert hear(stream, "error")["code"] == "unknown_session"
        with fleet.at(0) as stream:
            begin(stream)
            stream.send(speech(2.0))
            assert finals(finish(stream)) == TEXT


def test_a_resume_while_its_worker_is_gone_is_answered_by_the_one_asked(fleet: Fleet) -> None:
    with fleet.at(0) as stream:
        session_id = begin(stream)["session_id"]
        finish(stream)
    away = fleet.socket(0).with_suffix(".away")
    fleet.socket(0).rename(away)
    try:
        with fleet.at(1) as stream:
            tell(stream, type="hello", resume={"session_id": session_id, "last_event": 0})
            assert hear(stream, "error")["code"] == "unknown_session"
            begin(stream)
            stream.send(speech(2.0))
            assert finals(finish(stream)) == TEXT
    finally:
        away.rename(fleet.socket(0))


def test_an_engine_that_fails_is_named_and_ends_no_session(fleet: Fleet, engine: MoodyEngine) -> None:
    with fleet.at(0) as stream, fleet.at(1) as other:
        begin(stream)
        begin(other)
        engine.fails = True
        stream.send(speech(2.0))
        assert hear(stream, "error")["code"] == "decode_failed"
        engine.fails = False
        other.send(speech(2.0))
        assert finals(finish(other)) == TEXT
        finish(stream)


def test_clients_of_every_worker_are_told_that_the_server_stops() -> None:
    engine = scripted()
    with fleet_of(engine) as fleet:
        with fleet.at(0) as one, fleet.at(1) as other:
            begin(one)
            begin(other)
            fleet.workers.stop()
            fleet.thread.join(DEADLINE_S)
            fleet.workers.end()
            for stream in (one, other):
                assert hear(stream, "error")["code"] == "shutting_down"
                with pytest.raises(ConnectionClosed) as closed:
                    stream.recv(timeout=DEADLINE_S)
                assert closed.value.rcvd is not None and closed.value.rcvd.code == 1012
    assert engine.n_open_streams == 0
    assert not fleet.workers._folder.exists()


def test_without_its_engines_the_server_ends_and_says_why() -> None:
    with fleet_of(scripted()) as fleet:
        fleet.workers._host.stop()  # as if the thread had failed
        fleet.thread.join(DEADLINE_S)
        assert fleet.failure is not None and "models" in str(fleet.failure)


SERVE = """
import sys
from gateway.config import Config, ServerConfig
from gateway.keys import Keys
from gateway.workers import WorkerParts, run
from tests.gateway.test_workers import no_turn_detector, scripted
from vad.energy import EnergyDetector

if __name__ == "__main__":
    config = Config(models=("scripted",), server=ServerConfig(port=int(sys.argv[1]), workers=2))
    parts = WorkerParts(config, Keys(), EnergyDetector, no_turn_detector)
    run(parts, {"scripted": scripted()}, lambda: print("ready", flush=True))
"""


@contextmanager
def program(tmp_path: Path) -> Iterator[tuple["subprocess.Popen[str]", str]]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    script = tmp_path / "serve.py"
    script.write_text(SERVE)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, str(script), str(port)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process, f"127.0.0.1:{port}"
        finally:
            process.kill()


@pytest.fixture
def as_from_a_terminal() -> Iterator[None]:
    """What a script starts in the background ignores Ctrl-C, and so does all that it starts; not under this."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("as_from_a_terminal")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL], ids=lambda number: number.name)
def test_whatever_ends_the_program_its_workers_tell_their_clients_and_end(
    number: signal.Signals, tmp_path: Path
) -> None:
    with program(tmp_path) as (process, address):
        with connect(f"ws://{address}/v1/stream", compression=None) as stream:
            begin(stream)
            stream.send(speech(2.0))
            assert hear(stream, "final")["text"] == TEXT
            process.send_signal(number)
            assert hear(stream, "error")["code"] == "shutting_down"
        assert process.wait(DEADLINE_S) == -number
        host, port = address.split(":")
        assert comes_true(lambda: not is_served(host, int(port)))


def is_served(host: str, port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((host, port)) == 0
