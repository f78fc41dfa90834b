"""Flags, sources and pacing of `senseway stream`, without a server."""

import asyncio
import io
import math
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile

from gateway.client import AudioFormat, Ready
from gateway.client_events import Chunking, Engine, Limits
from gateway.commands import stream
from gateway.commands.audio_source import AudioSource, as_s16le, open_source
from gateway.commands.extras import how_to_install
from gateway.commands.failure import CommandError
from gateway.commands.program import parser, run

FORMAT = AudioFormat("s16le", 16_000)


async def packets_of(*sizes: int) -> AsyncIterator[bytes]:
    for size in sizes:
        yield bytes(size)


async def collected(source: AudioSource) -> bytes:
    return b"".join([packet async for packet in source.packets])


class Clock:
    """Time that passes only where it is slept away."""

    def __init__(self) -> None:
        self.now_s = 0.0

    async def sleep(self, duration_s: float) -> None:
        self.now_s += duration_s


def sending_times(speed: float) -> list[float]:
    clock = Clock()

    async def run() -> list[float]:
        source = AudioSource(FORMAT, packets_of(3_200, 3_200, 6_400), is_live=False)
        return [clock.now_s async for _ in stream.paced(source, speed, now_s=lambda: clock.now_s, sleep=clock.sleep)]

    return asyncio.run(run())


def test_a_packet_goes_out_when_its_last_sample_would_have_been_spoken() -> None:
    assert sending_times(1.0) == pytest.approx([0.1, 0.2, 0.4])


def test_twice_the_speed_takes_half_the_time() -> None:
    assert sending_times(2.0) == pytest.approx([0.05, 0.1, 0.2])


def test_at_full_speed_nothing_waits() -> None:
    assert sending_times(math.inf) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("bad", ["0", "-1", "nan", "fast"])
def test_a_speed_must_be_above_zero(bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["stream", "x.wav", f"--speed={bad}"])
    assert "--speed" in capsys.readouterr().err


def test_flags_become_what_hello_asks_for() -> None:
    flags = ["--translate", "--vocabulary", "Akku", "--vocabulary", "Ah", "--language", "de", "--hangover-ms", "300"]
    hello = stream.hello_from(parser().parse_args(["stream", "x.wav", *flags]), FORMAT)
    assert hello.message() == {
        "type": "hello",
        "audio": {"encoding": "s16le", "sample_rate_hz": 16_000, "channels": 1, "channel": None},
        "language": "de",
        "task": "translate",
        "vocabulary": ["Akku", "Ah"],
        "hangover_ms": 300,
    }


def test_chunks_are_asked_for_only_when_chosen() -> None:
    flags = ["--chunk-ms", "560", "--second-pass"]
    hello = stream.hello_from(parser().parse_args(["stream", "x.wav", *flags]), FORMAT)
    assert (hello.chunk_ms, hello.second_pass) == (560, True)
    assert not {"chunk_ms", "second_pass"} & set(
        stream.hello_from(parser().parse_args(["stream", "x"]), FORMAT).message()
    )


def test_the_greeting_says_how_late_words_are_settled_and_what_is_not_offered() -> None:
    limits = Limits(1 << 20, 10.0, 60.0)
    ready = Ready(1, "s", False, 0, "parakeet", None, (), (), Engine("cpu", ""), (), limits)
    assert stream.greeting(ready) == "parakeet listens"
    chunked = replace(ready, declined=("vocabulary",), chunking=Chunking(320, 800, 1_120, 3_040, False))
    told = "parakeet listens; words are settled 1120 ms behind the audio; not offered: vocabulary"
    assert stream.greeting(chunked) == told


def test_a_file_is_decoded_to_what_models_hear(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "tone.flac", np.full((48_000, 2), 0.25), 48_000)
    source = open_source(str(tmp_path / "tone.flac"), raw=None)
    heard = np.frombuffer(asyncio.run(collected(source)), "<i2")
    assert source.format == FORMAT
    assert len(heard) == 16_000
    assert heard[8_000] == pytest.approx(8_192, abs=2)


def test_a_missing_file_is_refused_with_what_is_accepted() -> None:
    with pytest.raises(CommandError, match=r"no file absent\.wav; give an audio file, - for standard input, or mic"):
        open_source("absent.wav", raw=None)


def test_a_file_that_is_no_audio_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no audio at all")
    with pytest.raises(CommandError, match=r"notes\.txt"):
        asyncio.run(collected(open_source(str(tmp_path / "notes.txt"), raw=None)))


@pytest.mark.parametrize("url", ["ws://127.0.0.1:9/v1/stream", "http://127.0.0.1:9/"])
def test_where_no_server_is_a_way_to_start_one_is_told(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    soundfile.write(tmp_path / "a.wav", np.zeros(1_600), 16_000)
    assert run(["stream", str(tmp_path / "a.wav"), "--url", url]) == 1
    said = capsys.readouterr().err
    assert f"no session at {url}" in said
    assert "`senseway serve` starts one, whose stream is at ws://127.0.0.1:8300/v1/stream" in said


def test_raw_audio_is_only_read_from_a_pipe(tmp_path: Path) -> None:
    with pytest.raises(CommandError, match="--encoding is for standard input"):
        open_source(str(tmp_path), raw=FORMAT)


class Stdin:
    def __init__(self, data: bytes) -> None:
        self.buffer = io.BufferedReader(io.BytesIO(data))  # type: ignore[arg-type]  # BytesIO is raw enough


def test_a_pipe_of_raw_audio_is_passed_on_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes(range(256)) * 41
    monkeypatch.setattr(sys, "stdin", Stdin(data))
    raw = AudioFormat("mulaw", 8_000)
    source = open_source("-", raw=raw)
    assert asyncio.run(collected(source)) == data
    assert source.format == raw


def test_a_pipe_of_a_file_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    soundfile.write(tmp_path / "tone.wav", np.zeros(8_000), 16_000)
    monkeypatch.setattr(sys, "stdin", Stdin((tmp_path / "tone.wav").read_bytes()))
    assert asyncio.run(collected(open_source("-", raw=None))) == bytes(16_000)


def test_samples_beyond_full_scale_are_clipped_not_wrapped() -> None:
    samples = np.array([-2.0, -1.0, 0.0, 1.0, 2.0], dtype=np.float32)
    assert np.frombuffer(as_s16le(samples), "<i2").tolist() == [-32_768, -32_768, 0, 32_767, 32_767]


def test_a_microphone_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    with pytest.raises(CommandError, match=re.escape(how_to_install("mic"))):
        asyncio.run(collected(open_source("mic", raw=None)))
