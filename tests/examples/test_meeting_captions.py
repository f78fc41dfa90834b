"""The captions example against a local server: cues appear while it listens."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from models.scripted import ScriptedEngine, recite
from tests.serving import DEADLINE_S, served, speech

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).parents[2]


def test_cues_are_written_while_it_listens(tmp_path: Path) -> None:
    path = tmp_path / "meeting.srt"
    engine = ScriptedEngine(recite("it was the best of times it was the worst of times", start_sample=8_000))
    with served(engine) as address:
        command = [sys.executable, "examples/meeting_captions.py", str(path), "--url", f"ws://{address}/v1/stream"]
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        captions = subprocess.Popen(
            command, cwd=REPOSITORY, env=environment, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        assert captions.stdin is not None
        captions.stdin.write(speech(1.0))
        captions.stdin.flush()
        deadline_s = time.monotonic() + DEADLINE_S
        while not (path.exists() and path.read_text()) and time.monotonic() < deadline_s:
            captions.stdin.write(bytes(3_200))
            captions.stdin.flush()
        assert captions.poll() is None, "the first cue is there before the end"
        captions.communicate(speech(0.0), timeout=DEADLINE_S)
    assert captions.returncode == 0
    cues = re.findall(r"(\d+)\n(\d\d:\d\d:\d\d,\d{3}) --> (\d\d:\d\d:\d\d,\d{3})\n(.+)\n\n", path.read_text())
    assert cues[0][0] == "1" and cues[0][1].startswith("00:00:00,") and cues[0][3] == "it was the"
