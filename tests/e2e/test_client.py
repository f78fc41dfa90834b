"""The Python client and `senseway stream` against the real app on loopback, also over connections that break."""

import asyncio
import contextlib
import json
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import soundfile

from gateway.client import AudioFormat, Bye, Event, Final, Hello, RefusedError, Settings, Wire, connect, connect_sync
from models.catalog import load_engine
from tests.serving import served

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).parents[2]
RATE_HZ = 16_000
HELLO = Hello(audio=AudioFormat("s16le", RATE_HZ))


def speech_like() -> bytes:
    """Noise and silence by turns, 3.6 s together: ten words of the reciting engine, and none ends inside a hangover."""
    noise = np.random.default_rng(1).normal(0.0, 0.2, (4, round(1.95 * RATE_HZ))).clip(-1, 1)
    bursts = np.concatenate((noise, np.zeros((4, round(1.65 * RATE_HZ)))), axis=1).reshape(-1)
    return (bursts * 32_767).astype("<i2").tobytes()


AUDIO = speech_like()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of the reciting engine."""
    with served(load_engine("scripted")) as address:
        yield f"ws://{address}/v1/stream"


@asynccontextmanager
async def cutting(url: str, cut_after_bytes: list[int]) -> AsyncIterator[str]:
    """A way to ``url`` that breaks after so many bytes upwards, once for each entry."""
    port = int(url.rpartition(":")[2].partition("/")[0])

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, room_bytes: float) -> None:
        while room_bytes > 0 and (data := await reader.read(4_096)):
            writer.write(data)
            room_bytes -= len(data)
            with contextlib.suppress(ConnectionError):
                await writer.drain()
        for side in (writer, *sides[writer]):
            side.transport.abort()

    sides: dict[asyncio.StreamWriter, tuple[asyncio.StreamWriter, ...]] = {}

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", port)
        sides[up_writer], sides[writer] = (writer,), (up_writer,)
        room_bytes = cut_after_bytes.pop(0) if cut_after_bytes else float("inf")
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(pump(reader, up_writer, room_bytes), pump(up_reader, writer, float("inf")))

    async with await asyncio.start_server(carry, "127.0.0.1", 0) as proxy:
        yield f"ws://127.0.0.1:{proxy.sockets[0].getsockname()[1]}/v1/stream"


async def heard(url: str, *, wire: Wire = Wire.MSGPACK, packet_bytes: int = 3_333) -> list[Event]:
    async with connect(url, HELLO, wire=wire) as stream:
        for start in range(0, len(AUDIO), packet_bytes):
            await stream.send_audio(AUDIO[start : start + packet_bytes])
        await stream.flush()
        await stream.bye()
        return [event async for event in stream]


def finals(events: list[Event]) -> list[tuple[str, float, float]]:
    return [(event.text, event.start_s, event.end_s) for event in events if isinstance(event, Final)]


@pytest.mark.parametrize("wire", Wire)
def test_speech_comes_back_as_finals_and_a_bye(url: str, wire: Wire) -> None:
    events = asyncio.run(heard(url, wire=wire))
    assert len(finals(events)) == 4
    last = events[-1]
    assert isinstance(last, Bye)
    assert last.audio_s == 14.4


@pytest.mark.parametrize("cuts", [[20_000], [150_000, 1_000, 200_000], [460_000]])
def test_whatever_breaks_on_the_way_the_transcript_is_the_same(url: str, cuts: list[int]) -> None:
    async def run() -> list[Event]:
        async with cutting(url, list(cuts)) as broken_url:
            return await heard(broken_url)

    events = asyncio.run(run())
    numbers = [event.event for event in events]
    assert finals(events) == finals(asyncio.run(heard(url)))
    assert numbers == sorted(set(numbers))


def test_the_sync_client_hears_the_same(url: str) -> None:
    with connect_sync(url, HELLO) as stream:
        stream.send_audio(AUDIO)
        stream.flush()
        stream.bye()
        events = list(stream)
    assert finals(events) == finals(asyncio.run(heard(url)))


def test_settings_change_in_the_middle(url: str) -> None:
    with connect_sync(url, HELLO) as stream:
        stream.send_audio(AUDIO[:96_000])
        updated = stream.update(Settings(hangover_ms=200))
        assert updated.at_s == 3.0


def test_a_refusal_carries_the_servers_code(url: str) -> None:
    with pytest.raises(RefusedError) as refusal, connect_sync(url, Hello(model="whisper-huge")):
        pass
    assert refusal.value.code == "unknown_model"


def senseway(*arguments: str, given: bytes = b"") -> "subprocess.CompletedProcess[bytes]":
    command = [sys.executable, "-m", "gateway", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, input=given, capture_output=True, check=False)


def test_the_stream_command_writes_json_lines(url: str, tmp_path: Path) -> None:
    soundfile.write(tmp_path / "speech.wav", np.frombuffer(AUDIO, "<i2"), RATE_HZ)
    done = senseway("stream", str(tmp_path / "speech.wav"), "--url", url, "--speed", "max", "--format", "jsonl")
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert done.returncode == 0, done.stderr
    assert [line["type"] for line in lines].count("final") == 4
    assert lines[-1]["type"] == "bye"
    assert all(line["sent_s"] <= 14.4 and line["received_s"] >= 0.0 for line in lines)


def test_the_stream_command_reads_raw_audio_from_a_pipe(url: str) -> None:
    done = senseway("stream", "-", "--encoding", "s16le", "--url", url, "--speed", "max", given=AUDIO)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 4
    assert done.stdout.decode().startswith("[00:0")


def test_the_stream_command_says_why_it_was_refused(url: str) -> None:
    done = senseway("stream", "-", "--encoding", "s16le", "--url", url, "--model", "whisper-huge")
    assert done.returncode == 1
    assert b"senseway: unknown_model:" in done.stderr
