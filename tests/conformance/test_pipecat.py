"""Pipecat's services for OpenAI, unmodified, with only their URL changed, against a real server and real speech."""

from pathlib import Path
from typing import Any

import pytest

from tests.conformance.clients import drive
from tests.words import error_rate

pytestmark = [pytest.mark.e2e, pytest.mark.weights]

KEY = "sk-conformance"
MAX_ERROR_RATE = 0.15


def frames(address: str, file: Path, what: str) -> list[dict[str, Any]]:
    return drive("pipecat", what, "--address", address, "--file", str(file), "--key", KEY)


def finals(seen: list[dict[str, Any]]) -> str:
    return " ".join(frame["text"] for frame in seen if frame["frame"] == "TranscriptionFrame")


@pytest.mark.proves(
    client="pipecat-ai", door="OpenAI Realtime", feature="turns by server VAD, proposed to the pipeline"
)
@pytest.mark.proves(client="pipecat-ai", door="OpenAI Realtime", feature="interim frames")
def test_server_vad_proposes_turns_and_gives_interim_and_final_text(
    server_address: str, speech_file_16k: Path, speech_text: str
) -> None:
    seen = frames(server_address, speech_file_16k, "realtime-server-vad")
    kinds = [frame["frame"] for frame in seen]
    assert kinds[0] == "ProposedUserStartedSpeakingFrame"
    assert kinds.count("ProposedUserStartedSpeakingFrame") == kinds.count("ProposedUserStoppedSpeakingFrame")
    assert "InterimTranscriptionFrame" in kinds and "ErrorFrame" not in kinds
    assert error_rate(speech_text, finals(seen)) <= MAX_ERROR_RATE


@pytest.mark.proves(client="pipecat-ai", door="OpenAI Realtime", feature="commits by Pipecat's own VAD")
def test_a_local_vad_commits_and_each_commit_gives_a_final(
    server_address: str, speech_file_16k: Path, speech_text: str
) -> None:
    seen = frames(server_address, speech_file_16k, "realtime-local-vad")
    kinds = [frame["frame"] for frame in seen]
    assert "ErrorFrame" not in kinds
    assert kinds.index("VADUserStoppedSpeakingFrame") < kinds.index("TranscriptionFrame")
    assert error_rate(speech_text, finals(seen)) <= MAX_ERROR_RATE


@pytest.mark.proves(client="pipecat-ai", door="Deepgram live", feature="interim frames")
@pytest.mark.proves(client="pipecat-ai", door="Deepgram live", feature="Finalize by Pipecat's own VAD")
def test_deepgrams_service_finalizes_at_the_end_of_each_turn(
    server_address: str, speech_file_16k: Path, speech_text: str
) -> None:
    seen = frames(server_address, speech_file_16k, "deepgram")
    kinds = [frame["frame"] for frame in seen]
    assert "InterimTranscriptionFrame" in kinds and "ErrorFrame" not in kinds
    assert error_rate(speech_text, finals(seen)) <= MAX_ERROR_RATE


@pytest.mark.proves(client="pipecat-ai", door="Deepgram turns", feature="start and end of turns, final text")
def test_deepgrams_turn_service_gives_turns_and_their_text(
    server_address: str, speech_file_16k: Path, speech_text: str
) -> None:
    seen = frames(server_address, speech_file_16k, "deepgram-flux")
    kinds = [frame["frame"] for frame in seen]
    assert "ErrorFrame" not in kinds and kinds[0] == "ProposedUserStartedSpeakingFrame"
    assert kinds.count("ProposedUserStartedSpeakingFrame") == kinds.count("ProposedUserStoppedSpeakingFrame")
    assert error_rate(speech_text, finals(seen)) <= MAX_ERROR_RATE


@pytest.mark.proves(client="pipecat-ai", door="OpenAI REST", feature="a turn as a recording")
def test_a_turn_sent_as_a_recording_comes_back_as_text(
    server_address: str, speech_file_16k: Path, speech_text: str
) -> None:
    seen = frames(server_address, speech_file_16k, "rest")
    assert "ErrorFrame" not in [frame["frame"] for frame in seen]
    assert error_rate(speech_text, finals(seen)) <= 2 * MAX_ERROR_RATE  # cut where Pipecat heard pauses
