"""The examples with agents of other people's frameworks, against a real server and real speech."""

import subprocess
from pathlib import Path

import pytest

from tests.conformance.clients import REPOSITORY, RUN_TIMEOUT_S, python_of
from tests.words import error_rate

pytestmark = [pytest.mark.e2e, pytest.mark.weights]

KEY = "sk-conformance"


def said(name: str, *arguments: str) -> list[str]:
    """The lines that an example prints, in its own environment."""
    command = [str(python_of(name)), f"examples/{name}_agent.py", *arguments, "--key", KEY]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=RUN_TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def first_words(lines: list[str], speaker: str) -> str:
    return next(line.partition(": ")[2] for line in lines if line.startswith(f"{speaker}: "))


@pytest.mark.proves(client="pipecat-ai", door="OpenAI Realtime", feature="the pipeline of examples/pipecat_agent.py")
def test_a_pipecat_pipeline_hears_and_answers(server_address: str, speech_file_16k: Path, speech_text: str) -> None:
    lines = said("pipecat", str(speech_file_16k), "--url", f"ws://{server_address}/v1/realtime")
    heard = first_words(lines, "user")
    assert first_words(lines, "bot") == f"You said: {heard}"
    assert error_rate(speech_text[: len(heard)], heard) < 0.5 and "spring of hope" in heard.lower()


@pytest.mark.proves(client="livekit-agents", door="OpenAI Realtime", feature="the agent of examples/livekit_agent.py")
def test_a_livekit_agent_without_a_room_hears_and_answers(server_address: str, speech_file: Path) -> None:
    lines = said("livekit", str(speech_file), "--url", f"http://{server_address}/v1")
    assert "spring of hope" in first_words(lines, "user").lower()
    assert first_words(lines, "agent").startswith("You said: ")
