"""Recordings by POST, over sockets."""

import io
import json
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import numpy as np
import pytest
import soundfile
import soxr

from models.scripted import ScriptedEngine, recite
from tests.serving import DEADLINE_S, is_freed, served, speech

pytestmark = pytest.mark.e2e

PATH = "/v1/audio/transcriptions"


@pytest.fixture(scope="module")
def engine() -> ScriptedEngine:
    return ScriptedEngine(recite("it was the best of times it was the worst of times", start_sample=8_000))


@pytest.fixture(scope="module")
def address(engine: ScriptedEngine) -> Iterator[str]:
    with served(engine, max_upload_mb=1) as found:
        yield found


def wav(pcm: bytes, rate_hz: int = 16_000, container: str = "WAV") -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.frombuffer(pcm, "<i2"), rate_hz, format=container)
    return file.getvalue()


def post(address: str, file: bytes | None, path: str = PATH, **fields: str) -> httpx2.Response:
    files = None if file is None else {"file": ("speech.wav", file)}
    return httpx2.post(f"http://{address}{path}", data={"model": "scripted", **fields}, files=files, timeout=DEADLINE_S)


@pytest.mark.behaviour("J", door="openai_rest")
@pytest.mark.parametrize("container", ["WAV", "FLAC", "OGG", "MP3"])
def test_a_file_in_any_container_comes_back_as_text(address: str, container: str, engine: ScriptedEngine) -> None:
    answer = post(address, wav(speech(2.0), container=container))
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/json"
    assert answer.json()["text"] == "it was the best of times"
    assert is_freed(address, engine)


def test_a_stream_is_server_sent_events(address: str) -> None:
    answer = post(address, wav(speech(2.0)), stream="true")
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]
    assert "".join(event.get("delta", "") for event in events) == events[-1]["text"] == "it was the best of times"


@pytest.mark.behaviour("J", door="openai_rest")
@pytest.mark.parametrize("rate_hz", [8_000, 11_025, 22_050, 44_100, 48_000])
def test_a_file_of_any_rate_comes_back_as_the_same_text(address: str, rate_hz: int) -> None:
    samples = np.frombuffer(speech(2.0), "<i2").astype(np.float32) / 32_768
    pcm = (soxr.resample(samples, 16_000, rate_hz) * 32_767).clip(-32_768, 32_767).astype("<i2").tobytes()
    assert post(address, wav(pcm, rate_hz)).json()["text"] == "it was the best of times"


def test_a_file_that_is_damaged_in_the_middle_is_transcribed_up_to_there_and_said_so(address: str) -> None:
    flac = bytearray(wav(speech(2.0) + speech(2.0), container="FLAC"))
    flac[-20_000:-10_000] = bytes(10_000)
    answer = post(address, bytes(flac))
    assert answer.json()["text"].startswith("it was the best of times")
    assert "damaged" in answer.headers["X-Senseway-Damage"]
    assert ": the file is damaged" in post(address, bytes(flac), stream="true").text


def test_a_file_without_samples_has_no_text(address: str) -> None:
    assert post(address, wav(b"")).json()["text"] == ""


@pytest.mark.parametrize(
    ("file", "code"),
    [(b"", "invalid_file"), (b"\x00\x00\x00\x18ftypM4A ", "invalid_file"), (None, "missing_required_parameter")],
)
def test_what_is_no_recording_is_refused_with_what_was_seen(address: str, file: bytes | None, code: str) -> None:
    answer = post(address, file)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == code and answer.json()["error"]["param"] == "file"


def test_a_body_that_is_no_form_is_refused(address: str) -> None:
    answer = httpx2.post(f"http://{address}{PATH}", content=b"x", headers={"Content-Type": "multipart/form-data"})
    assert answer.status_code == 400 and answer.json()["error"]["code"] in (
        "invalid_form",
        "missing_required_parameter",
    )


def test_a_request_too_large_is_refused_whether_or_not_it_says_so(address: str) -> None:
    file = wav(speech(40.0))
    assert post(address, file).status_code == 413
    boundary = "x"
    head = b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
    answer = httpx2.post(
        f"http://{address}{PATH}",
        content=iter([head, file]),  # sent in chunks, so without a length
        headers={"Content-Type": f"multipart/form-data; boundary={boundary}"},
        timeout=DEADLINE_S,
    )
    assert answer.status_code == 413 and answer.json()["error"]["code"] == "request_too_large"


def test_a_full_server_says_when_to_come_again(engine: ScriptedEngine) -> None:
    from tests.gateway.test_server import HELLO, hear, open_stream

    with served(engine, max_sessions=1) as address, open_stream(address) as stream:
        stream.send(json.dumps(HELLO))
        hear(stream, "ready")
        answer = post(address, wav(speech(1.0)))
        assert answer.status_code == 503 and int(answer.headers["Retry-After"]) > 0
        assert answer.json()["error"]["code"] == "server_full"


def test_an_engine_that_fails_is_an_error(engine: ScriptedEngine) -> None:
    failing = ScriptedEngine(recite("it was", start_sample=8_000), failing_decodes=frozenset(range(1, 50)))
    with served(failing) as address:
        answer = post(address, wav(speech(1.5)))
    assert answer.status_code == 500 and answer.json()["error"]["code"] == "decode_failed"


def test_deepgrams_requests_have_the_recording_as_their_body(address: str) -> None:
    url = f"http://{address}/v1/listen?model=nova-3"
    answer = httpx2.post(url, content=wav(speech(2.0)), headers={"Content-Type": "audio/wav"}, timeout=DEADLINE_S)
    assert answer.headers["dg-request-id"]
    assert answer.json()["results"]["channels"][0]["alternatives"][0]["transcript"] == "it was the best of times"
    refused = httpx2.post(url, json={"url": "http://127.0.0.1/x.wav"})
    assert refused.status_code == 400 and "bytes" in refused.json()["err_msg"] and refused.headers["dg-error"]


def deepgram_text(address: str, file: bytes, **headers: str) -> str:
    answer = httpx2.post(f"http://{address}/v1/listen?model=nova-3", content=file, headers=headers, timeout=DEADLINE_S)
    assert answer.status_code == 200
    return str(answer.json()["results"]["channels"][0]["alternatives"][0]["transcript"])


@pytest.mark.behaviour("J", door="deepgram_file")
@pytest.mark.parametrize("rate_hz", [8_000, 11_025, 44_100])
@pytest.mark.parametrize("container", ["WAV", "FLAC"])
def test_deepgrams_recordings_come_in_any_container_and_rate(address: str, container: str, rate_hz: int) -> None:
    samples = np.frombuffer(speech(2.0), "<i2").astype(np.float32) / 32_768
    pcm = (soxr.resample(samples, 16_000, rate_hz) * 32_767).clip(-32_768, 32_767).astype("<i2").tobytes()
    assert deepgram_text(address, wav(pcm, rate_hz, container)) == "it was the best of times"


@pytest.mark.behaviour("J", door="deepgram_file")
@pytest.mark.parametrize("file", [b"", b"no audio at all", b"\x00\x00\x00\x18ftypM4A "])
def test_what_is_no_recording_is_refused_in_deepgrams_words(address: str, file: bytes) -> None:
    answer = httpx2.post(f"http://{address}/v1/listen?model=nova-3", content=file, timeout=DEADLINE_S)
    assert answer.status_code == 400 and answer.headers["dg-error"]
    assert answer.json()["err_code"] and answer.json()["err_msg"] and answer.json()["request_id"]


@pytest.mark.behaviour("K", door="deepgram_file")
def test_deepgrams_recordings_at_the_same_time_never_share_text() -> None:
    """The engine recites by the clock of a session: a longer recording has more words, whoever else is there."""
    engine = ScriptedEngine(recite("it was the best of times it was the worst of times", start_sample=8_000))
    lengths = {1.0: "it was the", 2.0: "it was the best of times"}
    with served(engine) as address, ThreadPoolExecutor(6) as pool:
        texts = list(pool.map(lambda length: deepgram_text(address, wav(speech(length))), [*lengths] * 3))
        assert is_freed(address, engine)
    assert texts == [*lengths.values()] * 3


@pytest.mark.behaviour("K", door="deepgram_file")
def test_a_wrong_key_of_deepgrams_is_refused_and_written_nowhere(
    engine: ScriptedEngine, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    right, wrong = "the-right-key-of-this-server", "a-wrong-key-of-this-server"
    with served(engine, keys=[right]) as address:
        url = f"http://{address}/v1/listen?model=nova-3"
        answer = httpx2.post(url, content=wav(speech(1.0)), headers={"Authorization": f"Token {wrong}"})
        assert answer.status_code == 401 and answer.json()["err_msg"] and wrong not in answer.text
        assert deepgram_text(address, wav(speech(2.0)), Authorization=f"Token {right}") == "it was the best of times"
    logged = "".join([*capfd.readouterr(), caplog.text])
    assert right not in logged and wrong not in logged


def test_models_are_listed_as_openai_has_it_and_one_by_one(address: str) -> None:
    listed = httpx2.get(f"http://{address}/v1/models").json()
    assert listed["object"] == "list" and listed["data"][0]["id"] == "scripted"
    assert listed["data"][0]["object"] == "model" and listed["models"][0]["name"] == "scripted"
    assert httpx2.get(f"http://{address}/v1/models/scripted").json()["id"] == "scripted"
    missing = httpx2.get(f"http://{address}/v1/models/other")
    assert missing.status_code == 404 and missing.json()["error"]["code"] == "model_not_found"


def test_each_channel_of_a_recording_has_its_own_transcript_where_that_is_asked_for(address: str) -> None:
    said = np.frombuffer(speech(2.0), "<i2")
    file = io.BytesIO()
    soundfile.write(file, np.stack([said, np.zeros_like(said)], axis=1), 16_000, format="WAV")
    for multichannel, expected in (("true", ["it was the best of times", ""]), ("false", ["it was the best of times"])):
        url = f"http://{address}/v1/listen?model=nova-3&multichannel={multichannel}"
        body = httpx2.post(url, content=file.getvalue(), timeout=DEADLINE_S).json()
        texts = [channel["alternatives"][0]["transcript"] for channel in body["results"]["channels"]]
        assert texts == expected and body["metadata"]["channels"] == len(expected)


@pytest.mark.parametrize("encoding", ["linear16", "mulaw"])
def test_a_recording_without_a_header_is_read_in_the_format_of_its_query(address: str, encoding: str) -> None:
    data = speech(2.0)
    if encoding == "mulaw":
        file = io.BytesIO()
        soundfile.write(file, np.frombuffer(data, "<i2"), 16_000, format="RAW", subtype="ULAW")
        data = file.getvalue()
    url = f"http://{address}/v1/listen?model=nova-3&encoding={encoding}&sample_rate=16000"
    for content in (data, wav(speech(2.0))):  # one with a header says itself what it is
        body = httpx2.post(url, content=content, timeout=DEADLINE_S).json()
        assert body["results"]["channels"][0]["alternatives"][0]["transcript"] == "it was the best of times"


def test_channels_of_a_recording_without_a_header_are_told_apart(address: str) -> None:
    said = np.frombuffer(speech(2.0), "<i2")
    url = f"http://{address}/v1/listen?model=nova-3&encoding=linear16&sample_rate=16000&channels=2&multichannel=true"
    content = np.stack([np.zeros_like(said), said], axis=1).tobytes()
    body = httpx2.post(url, content=content, timeout=DEADLINE_S).json()
    texts = [channel["alternatives"][0]["transcript"] for channel in body["results"]["channels"]]
    assert texts == ["", "it was the best of times"]
    refused = httpx2.post(url.replace("16000", "7"), content=content, timeout=DEADLINE_S)
    assert refused.status_code == 400 and "7" in refused.json()["err_msg"]


def trickled(address: str, path: str, *, n_bytes: int = 1_000, says: int = 100_000) -> bytes:
    """The answer to a request that announces more than it sends, and waits."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), timeout=DEADLINE_S) as connection:
        head = f"POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: audio/wav\r\nContent-Length: {says}\r\n\r\n"
        connection.sendall(head.encode() + bytes(n_bytes))
        return connection.recv(65_536)


@pytest.mark.parametrize("limit", ["BODY_IDLE_S", "BODY_S"])
def test_a_body_that_trickles_keeps_no_place(address: str, monkeypatch: pytest.MonkeyPatch, limit: str) -> None:
    monkeypatch.setattr(f"gateway.exchange.{limit}", 0.2)
    assert b" 408 " in trickled(address, "/v1/listen").splitlines()[0]


def test_a_request_for_a_pass_is_bounded_too(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    answer = httpx2.post(f"http://{address}/v1/realtime/client_secrets", content=bytes(2 << 20), timeout=DEADLINE_S)
    assert answer.status_code == 413
    monkeypatch.setattr("gateway.exchange.BODY_IDLE_S", 0.2)
    assert b" 408 " in trickled(address, "/v1/realtime/client_secrets").splitlines()[0]
