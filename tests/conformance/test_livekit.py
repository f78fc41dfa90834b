"""LiveKit's plugin for OpenAI, unmodified, with only its URL changed, against a real server and real speech."""

from pathlib import Path
from typing import Any

import pytest

from tests.conformance.clients import drive
from tests.words import error_rate

pytestmark = [pytest.mark.e2e, pytest.mark.weights]

KEY = "sk-conformance"
MAX_ERROR_RATE = 0.15


def events(address: str, file: Path, what: str) -> list[dict[str, Any]]:
    return drive("livekit", what, "--address", address, "--file", str(file), "--key", KEY)


@pytest.mark.proves(client="livekit-agents", door="OpenAI Realtime", feature="turns by server VAD")
@pytest.mark.proves(
    client="livekit-agents", door="OpenAI Realtime", feature="interim text that grows; usage in seconds"
)
def test_a_stream_gives_start_interim_final_usage_and_end(
    server_address: str, speech_file: Path, speech_text: str
) -> None:
    seen = events(server_address, speech_file, "realtime-server-vad")
    kinds = [event["event"] for event in seen]
    assert kinds[0] == "start_of_speech"
    assert kinds.count("start_of_speech") == kinds.count("end_of_speech")
    assert "interim_transcript" in kinds
    finals = [event["text"] for event in seen if event["event"] == "final_transcript"]
    assert error_rate(speech_text, " ".join(finals)) <= MAX_ERROR_RATE
    usage_s = [event["audio_s"] for event in seen if event["event"] == "recognition_usage"]
    assert len(usage_s) >= len(finals) and 6 < sum(usage_s) < 11


@pytest.mark.proves(client="livekit-agents", door="OpenAI Realtime", feature="commits by LiveKit's own VAD")
def test_a_local_vad_commits_and_each_commit_gives_a_final(
    server_address: str, speech_file: Path, speech_text: str
) -> None:
    seen = events(server_address, speech_file, "realtime-local-vad")
    kinds = [event["event"] for event in seen]
    assert kinds.index("end_of_speech") < kinds.index("final_transcript")
    finals = [event["text"] for event in seen if event["event"] == "final_transcript"]
    assert error_rate(speech_text, " ".join(finals)) <= MAX_ERROR_RATE


@pytest.mark.proves(client="livekit-agents", door="Deepgram live", feature="start, interim, final and end of speech")
def test_deepgrams_plugin_gives_start_interim_final_and_end(
    server_address: str, speech_file: Path, speech_text: str
) -> None:
    seen = events(server_address, speech_file, "deepgram")
    kinds = [event["event"] for event in seen]
    assert kinds[0] == "start_of_speech" and "interim_transcript" in kinds
    assert kinds.count("start_of_speech") == kinds.count("end_of_speech")
    finals = [event for event in seen if event["event"] == "final_transcript"]
    assert error_rate(speech_text, " ".join(final["text"] for final in finals)) <= MAX_ERROR_RATE
    assert all(final["n_words"] and final["start_s"] < final["end_s"] for final in finals)


@pytest.mark.proves(client="livekit-agents", door="Deepgram turns", feature="start, interim, final and end of speech")
def test_deepgrams_turn_plugin_gives_start_interim_final_and_end(
    server_address: str, speech_file_16k: Path, speech_text: str
) -> None:
    seen = events(server_address, speech_file_16k, "deepgram-flux")
    kinds = [event["event"] for event in seen]
    assert kinds[0] == "start_of_speech" and "interim_transcript" in kinds
    assert kinds.count("start_of_speech") == kinds.count("end_of_speech")
    finals = [event["text"] for event in seen if event["event"] == "final_transcript"]
    assert error_rate(speech_text, " ".join(finals)) <= MAX_ERROR_RATE


@pytest.mark.proves(client="livekit-agents", door="OpenAI REST", feature="a turn as a recording")
def test_a_recording_comes_back_as_text(server_address: str, speech_file: Path, speech_text: str) -> None:
    [event] = events(server_address, speech_file, "rest")
    assert event["event"] == "final_transcript"
    assert error_rate(speech_text, event["text"]) <= MAX_ERROR_RATE
