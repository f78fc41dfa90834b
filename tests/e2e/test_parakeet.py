"""`senseway stream --model` with a Parakeet: an archive on disk, the real server, the real client.

Weights are random, so what is written means nothing; that it comes, when, and what is refused does.
"""

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import uvicorn

from gateway.app import build_app, uvicorn_config
from gateway.config import load
from models.catalog import load_engine
from tests.models.parakeet.files import nemo_members, write_tar
from tests.models.parakeet.small import noise
from vad.energy import EnergyDetector

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).parents[2]
RATE_HZ = 16_000
START_TIMEOUT_S = 30.0


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the model ``small``, in a thread of its own."""
    archive = write_tar(tmp_path_factory.mktemp("models") / "small.nemo", nemo_members())
    config = load({"server.port": 0, "models": [str(archive)]}, environ={})
    app = build_app(config, {"small": load_engine(str(archive), n_threads=1)}, EnergyDetector())
    server = uvicorn.Server(uvicorn_config(config, app))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    give_up_s = time.monotonic() + START_TIMEOUT_S
    while not server.started and time.monotonic() < give_up_s:
        thread.join(0.01)
    yield f"ws://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1/stream"
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two utterances of 3 s and 2 s with a second of silence behind each."""
    silence = np.zeros(RATE_HZ, np.float32)
    samples = noise(5 * RATE_HZ).numpy()
    path = tmp_path_factory.mktemp("audio") / "speech.wav"
    soundfile.write(path, np.concatenate([samples[: 3 * RATE_HZ], silence, samples[3 * RATE_HZ :], silence]), RATE_HZ)
    return path


def senseway(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "gateway", *arguments]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)


def events_of(recording: Path, url: str, *flags: str) -> list[dict[str, Any]]:
    done = senseway("stream", str(recording), "--url", url, "--speed", "max", "--format", "jsonl", *flags)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("flags", [["--chunk-ms", "160"], ["--chunk-ms", "2000"], ["--second-pass"]])
def test_a_recording_is_streamed_to_finals_with_words_and_times(url: str, recording: Path, flags: list[str]) -> None:
    events = events_of(recording, url, "--model", "small", *flags)
    finals = [event for event in events if event["type"] == "final"]
    assert any(final["words"] for final in finals)
    for final in finals:
        assert "".join(word["text"] for word in final["words"]).strip() == final["text"]
        for word in final["words"]:
            assert final["start_s"] <= word["start_s"] <= word["end_s"] <= final["end_s"]
            assert 0 < word["confidence"] <= 1
    assert events[-1]["type"] == "bye"


def test_a_client_that_requires_vocabulary_is_refused_with_a_reason(url: str, recording: Path) -> None:
    done = senseway("stream", str(recording), "--url", url, "--model", "small", "--require", "vocabulary")
    assert done.returncode != 0
    assert "vocabulary" in done.stderr and "small" in done.stderr


def test_a_chunk_that_is_not_whole_frames_is_refused_with_what_is_accepted(url: str, recording: Path) -> None:
    done = senseway("stream", str(recording), "--url", url, "--model", "small", "--chunk-ms", "200")
    assert done.returncode != 0
    assert "160 or 240" in done.stderr
