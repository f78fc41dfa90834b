"""Deepgram's SDK, unmodified, with only its addresses changed, against a real server and real speech."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.clients import drive
from tests.words import error_rate

pytestmark = [pytest.mark.e2e, pytest.mark.weights]

KEY = "sk-conformance"
MAX_ERROR_RATE = 0.15
CLASSES = {
    "Results": "ListenV1Results",
    "Metadata": "ListenV1Metadata",
    "SpeechStarted": "ListenV1SpeechStarted",
    "UtteranceEnd": "ListenV1UtteranceEnd",
}


def messages(address: str, file: Path, what: str, *more: str) -> list[dict[str, Any]]:
    return drive("deepgram", what, "--address", address, "--file", str(file), "--key", KEY, *more)


@pytest.mark.proves(client="deepgram-sdk", door="Deepgram live", feature="every message parsed to its own class")
@pytest.mark.proves(client="deepgram-sdk", door="Deepgram live", feature="interim and final text, contiguous ranges")
@pytest.mark.proves(client="deepgram-sdk", door="Deepgram live", feature="Finalize, CloseStream, UtteranceEnd")
def test_a_live_stream_gives_start_interim_final_and_end(
    server_address: str, speech_file_16k: Path, speech_text: str
) -> None:
    seen = messages(server_address, speech_file_16k, "live")
    assert {message["type"]: message["class"] for message in seen} == CLASSES
    kinds = [message["type"] for message in seen]
    assert kinds[0] == "SpeechStarted" and kinds[-1] == "Metadata"
    results = [message for message in seen if message["type"] == "Results"]
    finals = [result for result in results if result["is_final"]]
    assert len(finals) < len(results) and any(final["speech_final"] for final in finals)
    assert [final.get("from_finalize") for final in finals].count(True) == 1
    assert all(abs(a["start"] + a["duration"] - b["start"]) < 2e-3 for a, b in pairwise(finals))
    said = " ".join(final["channel"]["alternatives"][0]["transcript"] for final in finals)
    assert error_rate(speech_text, said) <= MAX_ERROR_RATE


@pytest.mark.proves(client="deepgram-sdk", door="Deepgram turns", feature="every message parsed to its own class")
def test_a_stream_of_turns_starts_and_ends_each(server_address: str, speech_file_16k: Path, speech_text: str) -> None:
    seen = messages(server_address, speech_file_16k, "turns")
    assert {message["type"]: message["class"] for message in seen} == {
        "Connected": "ListenV2Connected",
        "TurnInfo": "ListenV2TurnInfo",
    }
    assert [message["sequence_id"] for message in seen] == list(range(len(seen)))
    events = [message["event"] for message in seen if message["type"] == "TurnInfo"]
    assert events[0] == "StartOfTurn" and events[-1] == "EndOfTurn" and "Update" in events
    said = " ".join(message["transcript"] for message in seen if message.get("event") == "EndOfTurn")
    assert error_rate(speech_text, said) <= MAX_ERROR_RATE


@pytest.mark.proves(client="deepgram-sdk", door="Deepgram prerecorded", feature="words, utterances, paragraphs")
def test_a_recording_comes_back_as_text(server_address: str, speech_file: Path, speech_text: str) -> None:
    [answer] = messages(server_address, speech_file, "recording")
    assert answer["class"] == "ListenV1Response"
    best = answer["results"]["channels"][0]["alternatives"][0]
    assert error_rate(speech_text, best["transcript"]) <= MAX_ERROR_RATE
    starts = [word["start"] for word in best["words"]]
    assert starts == sorted(starts) and best["paragraphs"]["paragraphs"]
    assert answer["results"]["utterances"] and answer["metadata"]["duration"] == pytest.approx(9.7, abs=0.05)


@pytest.mark.proves(client="deepgram-sdk", door="Deepgram prerecorded", feature="a transcript of each channel")
def test_each_channel_of_a_recording_has_its_transcript(
    server_address: str, stereo_file: Path, speech_text: str
) -> None:
    [answer] = messages(server_address, stereo_file, "recording", "--multichannel")
    texts = [channel["alternatives"][0]["transcript"] for channel in answer["results"]["channels"]]
    assert len(texts) == 2 and max(error_rate(speech_text, text) for text in texts) <= MAX_ERROR_RATE
    channels = [utterance["channel"] for utterance in answer["results"]["utterances"]]
    assert channels == sorted(channels) and set(channels) == {0, 1}
