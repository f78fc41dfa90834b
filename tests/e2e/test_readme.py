"""README's client runs as it is pasted."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from gateway.commands.demo import serving
from models.errors import ModelUnavailableError
from models.store import recording

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).parents[2]
README = REPOSITORY / "README.md"


def first_program(url: str) -> str:
    """The first Python block of README, for a server at ``url``."""
    block = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    assert "ws://127.0.0.1:8300/v1/stream" in block[1]
    return block[1].replace("ws://127.0.0.1:8300/v1/stream", url)


@pytest.mark.weights  # a recording, from the same source
def test_the_client_in_the_readme_prints_what_was_said_and_when() -> None:
    try:
        path = recording("beckett")
    except ModelUnavailableError as error:
        pytest.skip(str(error))
    with serving("scripted") as server:
        command = [sys.executable, "-c", first_program(server.url), str(path)]
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(r"( +\d+\.\d\d \S.*\n)+", done.stdout)
