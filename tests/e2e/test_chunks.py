"""A model that decodes in chunks, behind a real server: our client, its options, and a client of another service."""

import json
from collections.abc import Iterator

import pytest
from websockets.sync.client import connect as connect_websocket

from gateway.client import AudioFormat, Final, Hello, Partial, RefusedError, Settings, connect_sync
from models.scripted_transducer import ScriptedToken, ScriptedTransducer
from tests.serving import served, speech

pytestmark = pytest.mark.e2e

WORDS = [f"w{n}" for n in range(12)]
TEXT = " ".join(WORDS)
S16 = AudioFormat("s16le", 16_000)
SPEECH_S = 5.0


def script() -> list[ScriptedToken]:
    """A word every 0.4 s from the beginning of the noise on."""
    return [ScriptedToken(f" {word}", 8_100 + 6_400 * n, 3) for n, word in enumerate(WORDS)]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with served(ScriptedTransducer(script())) as address:
        yield address


def test_our_client_chooses_a_chunk_and_hears_how_late_words_are_settled(address: str) -> None:
    with connect_sync(f"ws://{address}/v1/stream", Hello(audio=S16, chunk_ms=560, second_pass=False)) as stream:
        assert stream.ready.chunking is not None and stream.ready.chunking.latency_ms == 1_360
        stream.update(Settings(chunk_ms=None))
        with pytest.raises(RefusedError, match="take 480 or 560"):
            stream.update(Settings(chunk_ms=500))
        audio = speech(SPEECH_S)
        for at in range(0, len(audio), 6_400):
            stream.send_audio(audio[at : at + 6_400])
        stream.bye()
        events = list(stream)
    assert [event.text for event in events if isinstance(event, Final)] == [TEXT]
    assert any(event.n_committed for event in events if isinstance(event, Partial))


def test_a_client_of_deepgrams_gets_the_models_own_chunk(address: str) -> None:
    url = f"ws://{address}/v1/listen?encoding=linear16&sample_rate=16000&interim_results=true"
    with connect_websocket(url) as websocket:
        audio = speech(SPEECH_S)
        for at in range(0, len(audio), 6_400):
            websocket.send(audio[at : at + 6_400])
        websocket.send(json.dumps({"type": "CloseStream"}))
        results = [json.loads(frame) for frame in websocket]
    finals = [item for item in results if item["type"] == "Results" and item["is_final"]]
    heard = [item["channel"]["alternatives"][0]["transcript"] for item in finals]
    assert " ".join(text for text in heard if text) == TEXT
