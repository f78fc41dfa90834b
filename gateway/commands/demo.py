"""`senseway demo`: a real recording through a real server and socket in real time, and a score at the end.

Starts ``senseway serve`` as another process, streams as ``senseway stream`` does, and stops the server again. Knows the
reference text and how to measure; needs no network once model and recording are fetched.
"""

import argparse
import asyncio
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from gateway.client import Final, Hello, Partial, SpeechEnded, SpeechStarted, connect
from gateway.client_events import Event
from gateway.commands.audio_source import open_source
from gateway.commands.captions import Captions
from gateway.commands.failure import CommandError
from gateway.commands.models import table
from gateway.commands.stream import paced, send_all
from gateway.commands.waiting import waiting
from gateway.commands.word_errors import WordErrors, compare, words_of
from gateway.together import run_together

HELP = "stream a real recording through a real server and score the words"

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0
POLL_S = 0.1
MAX_ERROR_RATE = 0.10  # above it the demo fails: the model alone makes no error on this recording


@dataclass(frozen=True, slots=True)
class Arrival:
    """An event, and when it came, in seconds since the first sample."""

    at_s: float
    event: Event


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare flags."""
    parser.add_argument("--model", default="whisper-tiny.en", help="see: senseway models")


def run(arguments: argparse.Namespace) -> int:
    """Fetch, serve, stream, score; 1 if too many words are wrong."""
    from models.store import TWO_CITIES_TEXT, find_model, recording

    with waiting(f"fetching {arguments.model} and a recording"):
        find_model(arguments.model)
        path = recording("two_cities")
    with serving(arguments.model) as server:
        print(f"{path.name} through {arguments.model} at {server.url}, as if spoken now:\n", flush=True)
        cpu_before_s = server.cpu_s()
        arrivals, audio_s = asyncio.run(_stream(server.url, path))
        cpu_after_s = server.cpu_s()
    errors = compare(words_of(TWO_CITIES_TEXT), words_of(transcript(arrivals)))
    cpu_s = None if cpu_before_s is None or cpu_after_s is None else cpu_after_s - cpu_before_s
    print(f"\n{report(arrivals, errors, audio_s=audio_s, cpu_s=cpu_s)}")
    return int(errors.rate > MAX_ERROR_RATE)


# --- the stream ------------------------------------------------------------------------------------------------------


async def _stream(url: str, path: Path) -> tuple[list[Arrival], float]:
    """Every event and when it came; and how much audio was sent."""
    source = open_source(str(path), raw=None)
    arrivals: list[Arrival] = []
    is_terminal = sys.stdout.isatty()
    view = Captions(sys.stdout, is_terminal=is_terminal, columns=shutil.get_terminal_size().columns, with_partials=True)
    async with connect(url, Hello(audio=source.format)) as stream:
        began_s = time.monotonic()

        async def show() -> None:
            async for event in stream:
                arrivals.append(Arrival(time.monotonic() - began_s, event))
                view.show(event, sent_s=stream.sent_s)

        await run_together(send_all(stream, paced(source, 1.0)), show())
    view.close()
    return arrivals, stream.sent_s


# --- the figures -----------------------------------------------------------------------------------------------------


def report(arrivals: Sequence[Arrival], errors: WordErrors, *, audio_s: float, cpu_s: float | None) -> str:
    """The closing table."""
    rows = [
        ("words", f"{errors.n_right} of {errors.n_reference} right"),
        ("", f"{errors.n_wrong} wrong, {errors.n_missing} missing, {errors.n_extra} extra"),
        ("first partial, from speech onset", _median_of(first_partial_delays_s(arrivals))),
        ("final, from the end of speech", _median_of(final_delays_s(arrivals))),
    ]
    if cpu_s is not None:
        rows.append(
            ("server's CPU time", f"{cpu_s:.1f} s for {audio_s:.1f} s of audio: real-time factor {cpu_s / audio_s:.2f}")
        )
    return table(("", ""), rows).lstrip("\n")


def transcript(arrivals: Sequence[Arrival]) -> str:
    """The finals' text."""
    return " ".join(arrival.event.text for arrival in arrivals if isinstance(arrival.event, Final))


def first_partial_delays_s(arrivals: Sequence[Arrival]) -> list[float]:
    """For each utterance, how long after its onset in the audio its first words were shown."""
    delays_s = []
    onset_s: float | None = None
    for arrival in arrivals:
        match arrival.event:
            case SpeechStarted():
                onset_s = arrival.event.onset_s
            case Partial() | Final() if onset_s is not None and arrival.event.text:
                delays_s.append(arrival.at_s - onset_s)
                onset_s = None
    return delays_s


def final_delays_s(arrivals: Sequence[Arrival]) -> list[float]:
    """For each utterance that a pause ended, how long after the end of the voice its final came, hangover included."""
    delays_s = []
    speech_end_s: float | None = None
    for arrival in arrivals:
        match arrival.event:
            case SpeechEnded():
                speech_end_s = arrival.event.speech_end_s
            case Final(reason="silence") if speech_end_s is not None:
                delays_s.append(arrival.at_s - speech_end_s)
                speech_end_s = None
    return delays_s


def _median_of(delays_s: Sequence[float]) -> str:
    if not delays_s:
        return "none"
    return f"{statistics.median(delays_s):.2f} s (median of {len(delays_s)}, longest {max(delays_s):.2f} s)"


# --- the server ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunningServer:
    """A server in another process."""

    url: str
    process: "subprocess.Popen[bytes]"

    def cpu_s(self) -> float | None:
        """CPU time that it has used so far; ``None`` where the system does not tell (there is no /proc)."""
        stat = Path(f"/proc/{self.process.pid}/stat")
        if not stat.is_file():
            return None
        fields = stat.read_text().rpartition(")")[2].split()  # the name before it may hold spaces
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")  # utime, stime of proc(5)


@contextmanager
def serving(model: str) -> Iterator[RunningServer]:
    """A server of ``model`` on a free port of this machine, stopped when the block is left.

    Raises:
        CommandError: if it does not come up; the message has the end of what it said.
    """
    port = free_port()
    command = [sys.executable, "-m", "gateway", "serve", "--host", "127.0.0.1", "--port", str(port), "--model", model]
    home = str(Path(__file__).resolve().parents[2])
    environment = {
        "SENSEWAY_TURN_MODEL": "none",  # not asked here, so not fetched: without network that may take pip minutes
        **os.environ,
        "PYTHONPATH": os.pathsep.join([home, os.environ.get("PYTHONPATH", "")]).strip(os.pathsep),
    }
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, env=environment)
        try:
            with waiting(f"starting a server with {model}"):
                _await_health(f"http://127.0.0.1:{port}/health", process, said)
            yield RunningServer(f"ws://127.0.0.1:{port}/v1/stream", process)
        finally:
            _stop(process)


def free_port() -> int:
    """A port that nobody listens on at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def _await_health(url: str, process: "subprocess.Popen[bytes]", said: IO[bytes]) -> None:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # this machine is never behind a proxy
    give_up_s = time.monotonic() + START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < give_up_s:
        try:
            with opener.open(url, timeout=1.0):
                return
        except OSError:
            time.sleep(POLL_S)
    said.seek(0)
    end = said.read().decode(errors="replace")[-2_000:]
    raise CommandError(f"the server did not come up within {START_TIMEOUT_S:.0f} s; it said:\n{end}")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGINT)
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
