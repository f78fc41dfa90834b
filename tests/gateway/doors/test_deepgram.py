"""Deepgram's live protocol against sessions on a virtual clock: results, ranges, control messages and traps."""

import json
import struct
from itertools import pairwise

import numpy as np
import pytest
import soxr
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.doors import deepgram
from gateway.doors.door import AdmissionError
from gateway.effects import Close
from gateway.errors import ServerError
from gateway.pcm import AudioFormat, decode
from streaming.transcript import Word
from tests.encoding import FRAGMENTED, encoded, packets, voiced
from vad.audio import SAMPLE_RATE_HZ

RAW = {"model": "nova-3", "encoding": "linear16", "sample_rate": "16000"}
PLAIN = {**RAW, "interim_results": "true", "punctuate": "true", "vad_events": "true"}
FINALIZE, CLOSE = '{"type":"Finalize"}', '{"type":"CloseStream"}'
LAYOUTS = st.lists(st.one_of(st.integers(1, 6), st.sampled_from([0.2, 1.0, 2.0])), min_size=1, max_size=6)
LIVEKIT = (
    "model=nova-3&punctuate=true&smart_format=false&no_delay=true&interim_results=true&encoding=linear16&vad_events=true"
    "&sample_rate=16000&channels=1&endpointing=25&filler_words=true&profanity_filter=false&numerals=false"
    "&mip_opt_out=false&language=en-US"
)
PIPECAT = (
    "channels=1&detect_entities=false&diarize=false&dictation=false&encoding=linear16&interim_results=true&language=en"
    "&model=nova-3-general&multichannel=false&numerals=false&punctuate=true&sample_rate=16000&smart_format=false"
)


def admit(world, query, engine=None, **said):
    house = world.house(engine) if engine else world.house()
    pairs = tuple(item if isinstance(item, tuple) else (item, query[item]) for item in query)
    return deepgram.open_door(world.knock(query=pairs, at_unix_s=1_800_000_000.0, **said), house)


def live(scene, n_bytes=640, start_s=0.0, pcm=None, bytes_per_s=32_000):
    data = scene.pcm() if pcm is None else pcm
    for at in range(0, len(data), n_bytes):
        packet = data[at : at + n_bytes]
        yield start_s + (at + len(packet)) / bytes_per_s, packet


def play(world, scene, *then, query=PLAIN, frames=None, engine=None, delay_s=0.0):
    """All messages, and the close, that a client sees."""
    engine = engine or world.Engine(scene.words)
    frames = list(live(scene)) if frames is None else list(frames)
    end_s = frames[-1][0] if frames else 0.0
    simulation = world.behind(admit(world, query, engine).door, engine, delay_s)
    told = simulation.run([*frames, *((end_s, frame) for frame in then)])
    return [item.frame if isinstance(item.frame, Close) else json.loads(item.frame) for item in told]


def of(messages, kind):
    return [message for message in messages if not isinstance(message, Close) and message["type"] == kind]


def finals(messages, channel=0):
    return [m for m in of(messages, "Results") if m["is_final"] and m["channel_index"][0] == channel]


def text(message):
    return message["channel"]["alternatives"][0]["transcript"]


def said(messages, channel=0):
    return " ".join(text(message) for message in finals(messages, channel) if text(message))


def assert_sound(messages, channel=0):
    """What must hold of every stream: ranges without gap or overlap, words in order, fields that clients index."""
    ranges = [(m["start"], m["start"] + m["duration"]) for m in finals(messages, channel)]
    assert all(abs(before[1] - after[0]) < 2e-3 for before, after in pairwise([(0.0, 0.0), *ranges]))
    words = [word for m in finals(messages, channel) for word in m["channel"]["alternatives"][0]["words"]]
    assert all(before["start"] <= after["start"] for before, after in pairwise(words))
    for message in of(messages, "Results"):
        assert {"speech_final", "is_final", "metadata", "start", "duration"} <= message.keys()
        best = message["channel"]["alternatives"][0]
        assert len(best["words"]) == len(best["transcript"].split()) and 0 < best["confidence"] <= 1
        assert message["metadata"]["request_id"] == "01234567-89ab-cdef-0123-456789abcdef"


# ---------------------------------------------------------------- one utterance


def test_one_utterance_has_its_messages_in_order(world) -> None:
    scene = world.make_scene([0.5, 6, 1.5])
    messages = play(world, scene, CLOSE)
    assert_sound(messages)
    kinds = [m["type"] for m in messages if not isinstance(m, Close)]
    assert kinds[0] == "SpeechStarted" and kinds[-1] == "Metadata" and messages[-1] == Close(1000, "")
    assert [m["speech_final"] for m in finals(messages)][-1] is True
    assert said(messages) == "w0 w1 w2 w3 w4 w5"
    assert any(not m["is_final"] for m in of(messages, "Results"))
    [metadata] = of(messages, "Metadata")
    assert (
        metadata["duration"] == 4.4 and len(metadata["sha256"]) == 64 and metadata["created"].startswith("2027-01-15T")
    )


@settings(max_examples=30, deadline=None)
@given(layout=LAYOUTS, n_bytes=st.sampled_from([333, 640, 9_601]), delay_s=st.sampled_from([0.0, 0.3, 1.9]))
@pytest.mark.behaviour("J", door="deepgram")
def test_any_packets_and_delays_give_the_words_once_and_in_order(world, layout, n_bytes, delay_s) -> None:
    scene = world.make_scene(layout)
    messages = play(world, scene, CLOSE, frames=live(scene, n_bytes), delay_s=delay_s)
    assert_sound(messages)
    assert said(messages).split() == [word.text.strip() for word in scene.words]


def test_running_speech_becomes_final_every_few_seconds(world) -> None:
    scene = world.make_scene([0.5, 60, 1.5])
    messages = play(world, scene, CLOSE)
    assert_sound(messages)
    assert said(messages) == " ".join(f"w{index}" for index in range(60))
    assert max(m["duration"] for m in finals(messages)) <= 8
    assert [m["speech_final"] for m in finals(messages)].count(True) == 1


def test_without_interim_results_only_finals_are_sent(world) -> None:
    scene = world.make_scene([0.5, 6, 1.5])
    messages = play(world, scene, CLOSE, query=RAW)
    assert all(m["is_final"] for m in of(messages, "Results")) and of(messages, "SpeechStarted") == []
    assert said(messages) == "w0 w1 w2 w3 w4 w5"


def test_words_are_bare_and_punctuated_only_when_asked_for(world) -> None:
    scene = world.make_scene([0.5, 2, 1.0])
    engine = world.Engine(tuple(Word(f" W{i},", w.start_sample, w.end_sample, 0.9) for i, w in enumerate(scene.words)))
    plain, marked = (finals(play(world, scene, CLOSE, query=query, engine=engine))[0] for query in (RAW, PLAIN))
    assert text(plain) == "w0 w1" and text(marked) == "W0, W1,"
    assert "punctuated_word" not in plain["channel"]["alternatives"][0]["words"][0]
    word = marked["channel"]["alternatives"][0]["words"][0]
    assert (word["word"], word["punctuated_word"], word["confidence"]) == ("w0", "W0,", 0.9)


def test_endpointing_false_never_says_that_speech_is_final(world) -> None:
    scene = world.make_scene([0.5, 2, 1.5, 2, 1.5])
    messages = play(world, scene, CLOSE, query={**PLAIN, "endpointing": "false"})
    assert not any(m["speech_final"] for m in of(messages, "Results")) and said(messages) == "w0 w1 w2 w3"


def test_endpointing_is_the_silence_that_ends_an_utterance(world) -> None:
    scene = world.make_scene([0.5, 2, 0.7, 2, 1.5])
    assert len(finals(play(world, scene, CLOSE, query={**PLAIN, "endpointing": "300"}))) == 2
    assert len(finals(play(world, scene, CLOSE, query={**PLAIN, "endpointing": "1000"}))) == 1


def test_speech_without_words_has_an_end_too(world) -> None:
    scene = world.make_scene([0.5, 3, 1.5])
    messages = play(world, scene, CLOSE, engine=world.Engine(()))
    assert len(of(messages, "SpeechStarted")) == 1
    [final] = finals(messages)
    assert text(final) == "" and final["speech_final"]


# ---------------------------------------------------------------- utterance end


@pytest.mark.parametrize("delay_s", [0.0, 0.4])
def test_the_end_of_an_utterance_is_told_once_for_each_gap(world, delay_s) -> None:
    scene = world.make_scene([0.5, 2, 3.0, 2, 0.7, 1, 3.0])
    messages = play(world, scene, CLOSE, query={**PLAIN, "utterance_end_ms": "1000"}, delay_s=delay_s)
    assert_sound(messages)
    ends = of(messages, "UtteranceEnd")
    assert [end["last_word_end"] for end in ends] == [1.25, 6.15]
    assert all(end["channel"] == [0, 1] for end in ends)


# ---------------------------------------------------------------- control


@pytest.mark.behaviour("C", door="deepgram")
@pytest.mark.parametrize("gap_s", [0.0, 0.1, 0.2])
@pytest.mark.parametrize("end", [FINALIZE, CLOSE, b""])
def test_the_last_word_right_before_the_end_is_heard(world, end, gap_s) -> None:
    scene = world.make_scene([0.5, 3, gap_s])
    scene = type(scene)(scene.samples[: len(scene.samples) - 800], scene.words)
    messages = play(world, scene, end, delay_s=0.3)
    assert said(messages) == "w0 w1 w2"
    if end != FINALIZE:
        assert messages[-1] == Close(1000, "") and messages[-2]["type"] == "Metadata"


def test_every_finalize_is_answered_once_whatever_was_said(world) -> None:
    scene = world.make_scene([0.5, 3, 2.0, 2])
    frames = list(live(scene))
    middle = next(index for index, (at_s, _) in enumerate(frames) if at_s > 1.1)
    asked = [(0.0, FINALIZE), *frames[:middle], (1.1, FINALIZE), (1.1, FINALIZE), *frames[middle:]]
    messages = play(world, scene, FINALIZE, CLOSE, frames=asked)
    assert_sound(messages)
    answers = [m for m in of(messages, "Results") if m.get("from_finalize")]
    assert len(answers) == 4 and text(answers[2]) == "" and text(answers[3]) == "w3 w4"
    assert said(messages).split()[-2:] == ["w3", "w4"]


def test_keepalive_is_silent_and_keeps_the_stream_without_moving_its_time(world) -> None:
    scene = world.make_scene([0.5, 2, 0.5])
    waits = [(5.0 * index, '{"type":"KeepAlive"}') for index in range(13)]
    frames = [*waits, *live(scene, start_s=61.0)]
    messages = play(world, scene, CLOSE, frames=frames)
    assert said(messages) == "w0 w1" and finals(messages)[0]["channel"]["alternatives"][0]["words"][0]["start"] == 0.5


def test_ten_seconds_of_nothing_end_the_stream(world) -> None:
    scene = world.make_scene([0.5])
    messages = play(world, scene, frames=live(scene))
    assert isinstance(messages[-1], Close)
    assert messages[-1].code == 1011 and messages[-1].reason.startswith("NET-0001")


@pytest.mark.behaviour("K", door="deepgram")
def test_keyterms_change_in_the_middle_without_losing_audio(world) -> None:
    scene = world.make_scene([0.5, 3, 1.5, 3, 1.5])
    frames = list(live(scene))
    configure = '{"type":"Configure","keyterms":["Zwolle"]}'
    for at in range(1, len(frames), 37):
        messages = play(world, scene, CLOSE, frames=[*frames[:at], (frames[at][0], configure), *frames[at:]])
        assert_sound(messages)
        assert said(messages) == "w0 w1 w2 w3 w4 w5" and len(of(messages, "ConfigureSuccess")) == 1
    [refused] = of(play(world, scene, '{"type":"Configure","features":{"numerals":true}}', CLOSE), "ConfigureFailure")
    assert "numerals" in refused["description"]


@pytest.mark.behaviour("J", door="deepgram")
@pytest.mark.parametrize("frame", ["{", "[]", '{"type":"Hum"}', '{"type":7}'])
def test_a_text_that_is_no_message_is_told_and_nothing_is_lost(world, frame) -> None:
    scene = world.make_scene([0.5, 2, 1.0])
    frames = list(live(scene))
    messages = play(world, scene, CLOSE, frames=[*frames[:30], (frames[30][0], frame), *frames[30:]])
    [error] = of(messages, "Error")
    assert error["variant"] == "SchemaError" and error["message"] == frame
    assert said(messages) == "w0 w1"


def test_control_text_in_a_binary_frame_is_audio_and_does_not_crash(world) -> None:
    scene = world.make_scene([0.5, 2, 1.0])
    frames = list(live(scene))
    odd = [*frames[:10], (frames[10][0], b'{"type":"KeepAlive"}'), *frames[10:]]
    assert said(play(world, scene, CLOSE, frames=odd)) == "w0 w1"


@settings(max_examples=100, deadline=None)
@given(st.one_of(st.binary(max_size=60), st.text(max_size=60)))
def test_whatever_the_frame_the_door_answers_with_effects(world, frame) -> None:
    admit(world, PLAIN).door.receive(frame, 0.0)


# ---------------------------------------------------------------- formats and channels


@pytest.mark.behaviour("J", door="deepgram")
@pytest.mark.parametrize("rate_hz", [8_000, 16_000, 24_000, 44_100, 48_000])
def test_every_rate_gives_the_same_words_at_the_same_times(world, rate_hz) -> None:
    scene = world.make_scene([0.5, 3, 1.5, 2, 1.5])
    pcm = (soxr.resample(scene.samples, SAMPLE_RATE_HZ, rate_hz) * 32_767).astype("<i2").tobytes()
    frames = live(scene, 1_001, pcm=pcm, bytes_per_s=2 * rate_hz)
    messages = play(world, scene, CLOSE, query={**PLAIN, "sample_rate": str(rate_hz)}, frames=frames)
    assert_same(messages, play(world, scene, CLOSE))


@pytest.mark.behaviour("J", door="deepgram")
@pytest.mark.parametrize("encoding", ["mulaw", "alaw"])
def test_telephone_encodings_give_the_same_words_at_the_same_times(world, encoding) -> None:
    scene = world.make_scene([0.5, 3, 1.5, 2, 1.5])
    table = decode(bytes(range(256)), AudioFormat(encoding, 8_000)).samples
    data = bytes(int(np.argmin(np.abs(table - sample))) for sample in scene.samples[::2])
    query = {**PLAIN, "encoding": encoding, "sample_rate": "8000"}
    messages = play(world, scene, CLOSE, query=query, frames=live(scene, 160, pcm=data, bytes_per_s=8_000))
    assert_same(messages, play(world, scene, CLOSE))


def assert_same(messages, expected) -> None:
    assert_sound(messages)
    assert said(messages) == said(expected)
    starts = [
        [word["start"] for m in finals(stream) for word in m["channel"]["alternatives"][0]["words"]]
        for stream in (messages, expected)
    ]
    assert np.abs(np.subtract(*starts)).max() <= 0.08


@pytest.mark.behaviour("K", door="deepgram")
def test_each_channel_has_results_of_its_own_and_they_never_mix(world) -> None:
    """One channel speaks, then the other; the engine reads what the time axis says, so the quiet one hears nothing."""
    scene = world.make_scene([0.5, 3, 1.5])
    stereo = np.stack([scene.samples, np.zeros_like(scene.samples)], axis=1)
    pcm = (stereo * 32_767).astype("<i2").tobytes()
    query = {**PLAIN, "channels": "2", "multichannel": "true"}
    frames = live(scene, 1_280, pcm=pcm, bytes_per_s=64_000)
    messages = play(world, scene, FINALIZE, CLOSE, query=query, frames=frames)
    assert said(messages, 0) == "w0 w1 w2" and said(messages, 1) == ""
    assert {tuple(m["channel_index"]) for m in of(messages, "Results")} == {(0, 2), (1, 2)}
    assert len([m for m in of(messages, "Results") if m.get("from_finalize")]) == 2
    assert of(messages, "Metadata")[0]["channels"] == 2


@pytest.mark.behaviour("I", door="deepgram")
def test_words_in_every_script_are_told_whole(world) -> None:
    told = [" こんにちは", " 世界", " नमस्ते", " 👩‍👩‍👧", " ไทย"]
    scene = world.make_scene([0.5, len(told), 1.0])
    words = [Word(part, word.start_sample, word.end_sample, 0.9) for part, word in zip(told, scene.words, strict=True)]
    messages = play(world, scene, CLOSE, engine=world.Engine(tuple(words)))
    assert said(messages) == "".join(told).strip()


# ---------------------------------------------------------------- the handshake


@pytest.mark.parametrize("query", [LIVEKIT, PIPECAT])
def test_what_clients_really_ask_for_is_let_in(world, query) -> None:
    admission = admit(world, [tuple(pair.split("=")) for pair in query.split("&")])
    assert admission.headers["dg-request-id"] == "01234567-89ab-cdef-0123-456789abcdef"
    assert admission.headers.get("dg-ignored", "") in ("", "filler_words")


def container_of(scene, kind: str) -> bytes:
    match kind:
        case "wav":
            pcm = scene.pcm()  # with the sizes of one who does not know yet how much will come
            head = struct.pack("<4sI4s4sIHHIIHH", b"RIFF", 2**32 - 1, b"WAVE", b"fmt ", 16, 1, 1, 16_000, 32_000, 2, 16)
            return head + struct.pack("<4sI", b"data", 2**32 - 1) + pcm
        case "mp4":
            return encoded(voiced(scene.samples, 48_000)[:, None], kind, "aac", 48_000, FRAGMENTED)
        case _:
            return encoded(voiced(scene.samples, 48_000)[:, None], kind, "libopus", 48_000)


@pytest.mark.behaviour("J", door="deepgram")
@pytest.mark.parametrize("kind", ["wav", "webm", "ogg", "mp4"])
@pytest.mark.parametrize("n_bytes", [97, 4_000])
def test_a_container_is_told_by_its_first_bytes(world, kind, n_bytes) -> None:
    scene = world.make_scene([0.5, 3, 1.5, 2, 1.0])
    data = container_of(scene, kind)
    duration_s = len(scene.samples) / SAMPLE_RATE_HZ
    frames = live(scene, n_bytes=n_bytes, pcm=data, bytes_per_s=len(data) / duration_s)
    query = {"model": "nova-3", "punctuate": "true"}
    messages = play(world, scene, CLOSE, query=query, frames=frames)
    assert said(messages) == "w0 w1 w2 w3 w4"
    assert of(messages, "Metadata")[0]["duration"] == pytest.approx(duration_s, abs=0.1)
    starts = [word["start"] for final in finals(messages) for word in final["channel"]["alternatives"][0]["words"]]
    expected = [scene.words[index].start_sample / SAMPLE_RATE_HZ for index in (0, 3)]
    assert np.abs(np.subtract([starts[0], starts[3]], expected)).max() <= 0.03


@pytest.mark.parametrize("encoding", ["opus", "ogg-opus"])
def test_opus_is_decoded_bare_and_in_ogg(world, encoding) -> None:
    scene = world.make_scene([0.5, 3, 1.5])
    tone = voiced(scene.samples, 48_000)
    if encoding == "opus":
        frames = [(0.02 * (index + 1), packet) for index, packet in enumerate(packets(tone, "libopus", 48_000))]
    else:
        data = encoded(tone[:, None], "ogg", "libopus", 48_000)
        frames = list(live(scene, n_bytes=300, pcm=data, bytes_per_s=len(data) / (len(scene.samples) / SAMPLE_RATE_HZ)))
    query = {"model": "nova-3", "encoding": encoding, "sample_rate": "48000", "punctuate": "true"}
    assert said(play(world, scene, FINALIZE, CLOSE, query=query, frames=frames)) == "w0 w1 w2"


@pytest.mark.parametrize("data", [b"this is no audio", b"fLaC" + bytes(99), bytes(70_000)])
def test_what_is_no_container_closes_with_data_0000(world, data) -> None:
    messages = play(world, world.make_scene([0.5]), query={"model": "nova-3"}, frames=[(0.1, data)])
    assert of(messages, "Error")[0]["variant"] == "DataError"
    assert messages[-1].code == 1008 and messages[-1].reason.startswith("DATA-0000: ")


def test_without_its_decoder_opus_is_refused_before_the_upgrade(world, monkeypatch) -> None:
    monkeypatch.setattr("gateway.doors.deepgram_options.has_codecs", lambda: False)
    with pytest.raises(AdmissionError, match=r"senseway\[media\]"):
        admit(world, {"model": "nova-3", "encoding": "opus"})


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"model": "parakeet"}, "parakeet"),
        ({"encoding": "speex"}, "speex"),
        ({"encoding": "opus", "multichannel": "true"}, "told apart"),
        ({"sample_rate": ""}, "sample_rate"),
        ({"sample_rate": "7"}, "7"),
        ({"channels": "99"}, "99"),
        ({"language": "xx"}, "xx"),
        ({"endpointing": "soon"}, "soon"),
        ({"utterance_end_ms": "1000", "interim_results": "false"}, "interim_results"),
        ({"utterance_end_ms": "10"}, "1000"),
    ],
)
def test_a_wrong_query_is_refused_before_the_upgrade(world, change, word) -> None:
    with pytest.raises(AdmissionError) as caught:
        admit(world, {**PLAIN, **change})
    refusal = deepgram.refusal(caught.value, world.knock())
    assert caught.value.status == 400 and word in refusal.headers["dg-error"]
    assert refusal.body["err_msg"] and refusal.body["request_id"] == refusal.headers["dg-request-id"]


def test_the_key_is_read_from_the_header_or_the_browsers_subprotocols(world) -> None:
    for header in ("Token abc", "token abc", "bearer abc"):
        assert deepgram.key_of(world.knock(headers={"authorization": header})) == "abc"
    assert deepgram.key_of(world.knock(subprotocols=("token", "abc"))) == "abc"
    assert deepgram.key_of(world.knock()) is None
    assert admit(world, PLAIN, subprotocols=("token", "abc")).subprotocol == "token"


@pytest.mark.parametrize(("code", "close_code"), [("server_full", 1013), ("shutting_down", 1012), ("too_slow", 1008)])
def test_the_server_ends_a_stream_with_a_close_code(world, code, close_code) -> None:
    assert admit(world, PLAIN).door.failed(ServerError(code, "x")) == [Close(close_code, code)]
