"""`senseway stream --model` with a Parakeet: an archive on disk, the real server, the real client.

Weights are random, so what is written means nothing; that it comes, when, and what is refused does.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile

from models.catalog import load_engine
from tests.models.parakeet.files import nemo_members, write_tar
from tests.models.parakeet.small import noise
from tests.serving import served

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).parents[2]
RATE_HZ = 16_000


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of the model ``small``."""
    archive = write_tar(tmp_path_factory.mktemp("models") / "small.nemo", nemo_members())
    with served(load_engine(str(archive), n_threads=1)) as address:
        yield f"ws://{address}/v1/stream"


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
