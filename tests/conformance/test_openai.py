"""The ``openai`` client, unmodified, with only its base URL changed, against a real server and real speech."""

import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.clients import REPOSITORY, drive, python_of
from tests.words import error_rate

pytestmark = [pytest.mark.e2e, pytest.mark.weights]

KEY = "sk-conformance"
MAX_ERROR_RATE = 0.1
COMPLETED = "conversation.item.input_audio_transcription.completed"
DELTA = "conversation.item.input_audio_transcription.delta"
CLASSES = {
    "session.created": "SessionCreatedEvent",
    "session.updated": "SessionUpdatedEvent",
    "input_audio_buffer.speech_started": "InputAudioBufferSpeechStartedEvent",
    "input_audio_buffer.speech_stopped": "InputAudioBufferSpeechStoppedEvent",
    "input_audio_buffer.committed": "InputAudioBufferCommittedEvent",
    "conversation.item.added": "ConversationItemAdded",
    "conversation.item.done": "ConversationItemDone",
    DELTA: "ConversationItemInputAudioTranscriptionDeltaEvent",
    COMPLETED: "ConversationItemInputAudioTranscriptionCompletedEvent",
}


def realtime(address: str, file: Path, *more: str) -> list[dict[str, Any]]:
    return drive("openai", "realtime", "--url", f"http://{address}/v1", "--key", KEY, "--file", str(file), *more)


@pytest.mark.proves(client="openai", door="OpenAI Realtime", feature="turns by server VAD, semantic VAD or by commits")
@pytest.mark.proves(client="openai", door="OpenAI Realtime", feature="deltas that join to the final")
@pytest.mark.parametrize("turns", ["server_vad", "semantic_vad", "none"])
def test_a_spoken_turn_gives_its_events_each_of_its_own_class(
    server_address: str, speech_file: Path, speech_text: str, turns: str
) -> None:
    events = realtime(server_address, speech_file, "--turns", turns, "--pace", "4")
    assert {event["type"]: event["class"] for event in events}.items() <= CLASSES.items()
    kinds = [event["type"] for event in events]
    assert kinds[:2] == ["session.created", "session.updated"]
    assert kinds.count(DELTA) >= 2, "text comes before the turn is over"
    if turns != "none":
        assert kinds[2] == "input_audio_buffer.speech_started" and kinds[-1] == COMPLETED
    else:
        assert not any("speech" in kind for kind in kinds) and kinds.count(COMPLETED) == 1
    finals = [event for event in events if event["type"] == COMPLETED]
    for final in finals:
        deltas = [e["delta"] for e in events if e["type"] == DELTA and e["item_id"] == final["item_id"]]
        assert "".join(deltas) == final["transcript"]
        assert final["usage"]["type"] == "duration" and final["usage"]["seconds"] > 1
    assert error_rate(speech_text, " ".join(final["transcript"] for final in finals)) <= MAX_ERROR_RATE


@pytest.mark.proves(client="openai", door="OpenAI REST", feature="json, text, srt, vtt, verbose_json with words")
@pytest.mark.proves(client="openai", door="OpenAI REST", feature="streaming by server-sent events")
@pytest.mark.proves(client="openai", door="OpenAI REST", feature="models, errors by class")
def test_requests_come_back_in_every_shape(server_address: str, speech_file: Path, speech_text: str) -> None:
    answers = drive("openai", "rest", "--url", f"http://{server_address}/v1", "--key", KEY, "--file", str(speech_file))
    by_shape: dict[str, list[dict[str, Any]]] = {}
    for answer in answers:
        by_shape.setdefault(answer["shape"], []).append(answer)
    [plain], [text], [srt], [vtt] = (by_shape[name] for name in ("json", "text", "srt", "vtt"))
    assert plain["class"] == "Transcription" and error_rate(speech_text, plain["text"]) <= MAX_ERROR_RATE
    assert error_rate(speech_text, text["value"]) <= MAX_ERROR_RATE
    assert srt["value"].startswith("1\n00:00:0") and vtt["value"].startswith("WEBVTT\n")
    [verbose] = by_shape["verbose_json"]
    assert verbose["class"] == "TranscriptionVerbose" and verbose["segments"]
    starts = [word["start"] for word in verbose["words"]]
    assert starts == sorted(starts) and error_rate(speech_text, verbose["text"]) <= MAX_ERROR_RATE
    *deltas, done = by_shape["stream"]
    assert {event["class"] for event in deltas} == {"TranscriptionTextDeltaEvent"}
    assert done["class"] == "TranscriptionTextDoneEvent" and "".join(e["delta"] for e in deltas) == done["text"]
    assert [model["id"] for model in by_shape["models"]] == ["whisper-tiny.en"]
    [error] = by_shape["error"]
    assert error["class"] == "BadRequestError" and error["code"] == "invalid_file" and error["param"] == "file"


@pytest.mark.proves(client="openai", door="OpenAI REST", feature="diarized_json, a speaker on each channel")
def test_speakers_on_channels_of_their_own_are_told_apart(
    server_address: str, stereo_file: Path, speech_text: str
) -> None:
    answer, *events = drive(
        "openai", "speakers", "--url", f"http://{server_address}/v1", "--key", KEY, "--file", str(stereo_file)
    )
    assert answer["class"] == "TranscriptionDiarized"
    names = [segment["speaker"] for segment in answer["segments"]]
    assert names == sorted(names) and set(names) == {"Ann", "Bob"}
    for name in ("Ann", "Bob"):
        said = " ".join(segment["text"] for segment in answer["segments"] if segment["speaker"] == name)
        assert error_rate(speech_text, said) <= MAX_ERROR_RATE
    assert {event["class"] for event in events} == {"TranscriptionTextSegmentEvent", "TranscriptionTextDoneEvent"}
    assert {event["speaker"] for event in events if "speaker" in event} == {"A", "B"}


@pytest.mark.proves(client="openai", door="OpenAI Realtime", feature="a wrong key is HTTP 401")
def test_a_wrong_key_is_a_status_that_the_client_sees(server_address: str) -> None:
    [seen] = drive("openai", "refused", "--url", f"http://{server_address}/v1", "--key", "wrong")
    assert seen == {"refused": True, "class": seen["class"], "status": 401}


@pytest.mark.proves(client="openai", door="OpenAI Realtime", feature="reconnects to a server that restarts")
@pytest.mark.parametrize(("stop", "codes"), [(signal.SIGTERM, {1012}), (signal.SIGKILL, {1006})])
def test_a_server_that_goes_is_one_that_the_client_comes_back_to(stop: signal.Signals, codes: set[int]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    serve = [sys.executable, "-m", "gateway", "serve", "--model", "scripted", "--port", str(port)]
    server = subprocess.Popen(serve, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        next(line for line in server.stdout if line.startswith("http://"))
        wait_for(port)
        client = subprocess.Popen(
            [
                str(python_of("openai")),
                str(Path(__file__).parent / "drive_openai.py"),
                "reconnect",
                "--url",
                f"http://127.0.0.1:{port}/v1",
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert client.stdout is not None
        assert "session.created" in client.stdout.readline()
        server.send_signal(stop)
        last = client.communicate(timeout=30)[0].splitlines()[-1]
        assert any(f'"close_code": {code}' in last for code in codes), last
    finally:
        server.kill()
        server.communicate()


def wait_for(port: int) -> None:
    """Until somebody listens there."""
    deadline_s = time.monotonic() + 30
    while time.monotonic() < deadline_s:
        with socket.socket() as found:
            if found.connect_ex(("127.0.0.1", port)) == 0:
                return
    raise AssertionError(f"nobody listens on port {port}")
