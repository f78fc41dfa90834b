"""Calls as each provider sends them, against sessions on a virtual clock: transcripts, digits, marks and the end."""

import base64
import hashlib
import hmac
import json
import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.doors import telephony
from gateway.doors.door import AdmissionError, House, Knock
from gateway.doors.telephony_dialects import DIALECTS, audio_of
from gateway.effects import Close
from gateway.pcm import AudioFormat, decode
from tests.encoding import packets, voiced
from vad.audio import SAMPLE_RATE_HZ

SCENE = [0.5, 3, 1.5, 2, 1.0]
WORDS = ["w0 w1 w2", "w3 w4"]
FRAME_S = 0.02
_MULAW = decode(bytes(range(256)), AudioFormat("mulaw", 8_000)).samples
_ORDER = np.argsort(_MULAW, kind="stable")
_EDGES = (_MULAW[_ORDER][1:] + _MULAW[_ORDER][:-1]) / 2


def mulaw(samples) -> bytes:
    return _ORDER[np.searchsorted(_EDGES, samples)].astype(np.uint8).tobytes()


def pcm(samples) -> bytes:
    return (samples * 32_767).astype("<i2").tobytes()


def pieces(data: bytes, n_bytes: int) -> list[bytes]:
    return [data[at : at + n_bytes] for at in range(0, len(data), n_bytes)]


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def media_of(data: bytes, **more: str) -> dict:
    return {"event": "media", "media": {**more, "payload": b64(data)}}


@dataclass(frozen=True)
class Call:
    """A provider's messages around its audio frames."""

    path: str
    first: list[str]
    frames: list[str | bytes]
    digit: str | None
    mark: str | None
    last: list[str]


def call_of(provider: str, samples) -> Call:
    at_8k = samples[::2]
    law, narrow, wide = pieces(mulaw(at_8k), 160), pieces(pcm(at_8k), 320), pieces(pcm(samples), 640)
    match provider:
        case "twilio":
            given = {"encoding": "audio/x-mulaw", "sampleRate": 8000, "channels": 1}
            start = {
                "callSid": "C1",
                "tracks": ["inbound"],
                "mediaFormat": given,
                "customParameters": {"language": "de"},
            }
            media = [media_of(d, track="inbound", chunk=str(i + 1), timestamp=str(20 * i)) for i, d in enumerate(law)]
            return Call(
                "twilio",
                ['{"event":"connected","protocol":"Call"}', json.dumps({"event": "start", "start": start})],
                [json.dumps(m) for m in media],
                '{"event":"dtmf","dtmf":{"track":"inbound_track","digit":"7"}}',
                '{"event":"mark","mark":{"name":"m1"}}',
                ['{"event":"stop","stop":{"callSid":"C1"}}'],
            )
        case "telnyx":
            given = {"encoding": "PCMU", "sample_rate": 8000, "channels": 1}
            start = {"call_control_id": "C1", "media_format": given, "custom_parameters": {"language": "de"}}
            media = [media_of(d, track="inbound", chunk=str(i + 2), timestamp=str(20 * i)) for i, d in enumerate(law)]
            return Call(
                "telnyx",
                ['{"event":"connected"}', json.dumps({"event": "start", "stream_id": "S", "start": start})],
                [json.dumps(m) for m in media],
                '{"event":"dtmf","dtmf":{"digit":"7"}}',
                '{"event":"mark","mark":{"name":"m1"}}',
                ['{"event":"stop","stop":{}}'],
            )
        case "plivo":
            start = {"callId": "C1", "streamId": "S", "mediaFormat": {"encoding": "audio/x-l16", "sampleRate": 16000}}
            media = [
                media_of(d, track="inbound", timestamp=str(1_700_000_000_000 + 20 * i)) for i, d in enumerate(wide)
            ]
            return Call(
                "plivo",
                [json.dumps({"event": "start", "start": start, "extra_headers": '{"language":"de"}'})],
                [json.dumps(m) for m in media],
                '{"event":"dtmf","dtmf":{"digit":"7"}}',
                '{"event":"playedStream","name":"m1"}',
                [],
            )
        case "exotel":
            start = {"call_sid": "C1", "media_format": {"sample_rate": "8000"}, "custom_parameters": {"language": "de"}}
            media = [{"event": "media", "media": {"payload": b64(d)}} for d in pieces(pcm(at_8k), 1_600)]
            return Call(
                "exotel",
                ['{"event":"connected"}', json.dumps({"event": "start", "start": start})],
                [json.dumps(m) for m in media],
                '{"event":"dtmf","dtmf":{"digit":"7"}}',
                '{"event":"mark","mark":{"name":"m1"}}',
                ['{"event":"stop"}'],
            )
        case "vonage":
            first = {
                "event": "websocket:connected",
                "content-type": "audio/l16;rate=16000",
                "uuid": "C1",
                "language": "de",
            }
            return Call(
                "vonage",
                [json.dumps(first)],
                [*wide],
                '{"event":"websocket:dtmf","digit":"7","duration":260}',
                '{"event":"websocket:notify","payload":{"id":"m1"}}',
                [],
            )
        case "asterisk":
            return Call(
                "asterisk",
                ["MEDIA_START connection_id:U channel:x channel_id:C1 format:ulaw optimal_frame_size:160 ptime:20"],
                [*law],
                '{"event":"DTMF_END","channel_id":"C1","digit":"7"}',
                "MEDIA_MARK_PROCESSED correlation_id:m1",
                [],
            )
        case "asterisk-json":
            first = {
                "event": "MEDIA_START",
                "channel_id": "C1",
                "format": "slin16",
                "channel_variables": {"language": "de"},
            }
            digit = '{"event":"DTMF_END","digit":"7"}'
            return Call("asterisk", [json.dumps(first)], [*wide], digit, None, [])
        case "freeswitch":
            return Call("freeswitch?rate=8000&call=C1&language=de", ['{"anything": 1}'], [*narrow], None, None, [])
    raise ValueError(provider)


PROVIDERS = [*DIALECTS, "asterisk-json"]


def knock_of(world, path: str, **more) -> Knock:
    name, _, query = path.partition("?")
    pairs = tuple(tuple(pair.split("=")) for pair in query.split("&") if pair)
    return Knock(path=f"/telephony/{name}", query=pairs, connection_id=world.knock().connection_id, **more)


def simulate(world, scene, call: Call, frames=None, *, is_cut=False, engine=None, pace=1.0):
    """The simulation after a call; frames come in real time, or ``pace`` of it; digit and mark in the middle."""
    engine = engine or world.Engine(scene.words)
    door = telephony.open_door(knock_of(world, call.path), world.house(engine)).door
    frames = call.frames if frames is None else frames
    duration_s = pace * len(scene.samples) / SAMPLE_RATE_HZ
    timed = [((index + 1) / len(frames) * duration_s, frame) for index, frame in enumerate(frames)]
    extras = [frame for frame in (call.digit, call.mark) if frame is not None]
    middle = len(timed) // 2
    timed = [*timed[:middle], *((timed[middle][0], frame) for frame in extras), *timed[middle:]]
    simulation = world.behind(door, engine, 0.1)
    simulation.run(
        [*((0.0, frame) for frame in call.first), *timed, *((duration_s, frame) for frame in call.last)], is_cut=is_cut
    )
    return simulation


def finals(simulation, track="inbound"):
    events = [item.event for item in simulation.published]
    return [event["text"] for event in events if event["type"] == "final" and event["track"] == track]


def kinds(simulation):
    return [item.event["type"] for item in simulation.published]


@pytest.mark.behaviour("C", door="telephony")
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_call_is_transcribed_with_its_digits_and_marks_passed_on(world, provider) -> None:
    scene = world.make_scene(SCENE)
    call = call_of(provider, scene.samples)
    simulation = simulate(world, scene, call, is_cut=not call.last)
    assert finals(simulation) == WORDS
    assert kinds(simulation)[0] == "call_started" and kinds(simulation)[-1] == "call_ended"
    assert {item.event["call"] for item in simulation.published} == {"C1"}
    values = [item.event["value"] for item in simulation.published if item.event["type"] in ("dtmf", "mark")]
    assert values == [value for value, frame in (("7", call.digit), ("m1", call.mark)) if frame]
    assert "warning" not in kinds(simulation)


@pytest.mark.behaviour("J", door="telephony")
@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_call_replayed_at_once_has_the_same_words_at_the_same_times(world, provider) -> None:
    scene = world.make_scene([0.5, 3, 1.5, 2, 1.0])
    call = call_of(provider, scene.samples)
    live, at_once = (words_of(simulate(world, scene, call, is_cut=not call.last, pace=pace)) for pace in (1.0, 0.0))
    assert [word["text"] for word in at_once] == [word["text"] for word in live] != []
    for word, same in zip(at_once, live, strict=True):
        assert word["start_s"] == pytest.approx(same["start_s"], abs=0.02)


def words_of(simulation):
    events = [item.event for item in simulation.published if item.event["type"] == "final"]
    return [word for event in events for word in event["words"]]


@pytest.mark.parametrize("provider", PROVIDERS)
def test_words_have_the_times_of_the_call_whatever_the_provider(world, provider) -> None:
    scene = world.make_scene(SCENE)
    call = call_of(provider, scene.samples)
    simulation = simulate(world, scene, call, is_cut=not call.last)
    starts = [w["start_s"] for e in simulation.published if e.event["type"] == "final" for w in e.event["words"]]
    assert np.abs(np.subtract(starts, [word.start_sample / SAMPLE_RATE_HZ for word in scene.words])).max() <= 0.02


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_caller_who_hangs_up_inside_a_word_is_heard_to_the_end(world, provider) -> None:
    scene = world.make_scene([0.5, 3])
    scene = type(scene)(scene.samples[: len(scene.samples) - 800], scene.words)
    call = call_of(provider, scene.samples)
    for is_cut in (True, not call.last):
        frames = Call(call.path, call.first, call.frames, None, None, [] if is_cut else call.last)
        assert finals(simulate(world, scene, frames, is_cut=is_cut)) == ["w0 w1 w2"]


@pytest.mark.behaviour("K", door="telephony")
def test_two_tracks_in_one_socket_are_two_transcripts(world) -> None:
    """Both legs of a Twilio stream, frame by frame in turn: each is heard by itself."""
    scene = world.make_scene([0.5, 3, 1.5])
    call = call_of("twilio", scene.samples)
    quiet = [json.dumps(media_of(b"\xff" * 160, track="outbound"))] * len(call.frames)
    both = [frame for pair in zip(call.frames, quiet, strict=True) for frame in pair]
    simulation = simulate(world, scene, call, both)
    assert finals(simulation) == ["w0 w1 w2"] and finals(simulation, "outbound") == []
    assert len(simulation.sessions) == 2 and kinds(simulation).count("call_ended") == 1


def test_a_third_leg_is_left_out_and_told(world) -> None:
    scene = world.make_scene([0.5])
    frames = [json.dumps(media_of(b"\xff" * 160, track=f"leg {index}")) for index in range(3)]
    call = call_of("twilio", scene.samples)
    simulation = simulate(world, scene, Call(call.path, call.first, frames, None, None, call.last))
    assert len(simulation.sessions) == 2 and kinds(simulation).count("warning") == 1


def test_stereo_of_freeswitch_is_caller_and_callee(world) -> None:
    scene = world.make_scene([0.5, 3, 1.5])
    stereo = np.stack([scene.samples[::2], np.zeros_like(scene.samples[::2])], axis=1)
    call = Call("freeswitch?rate=8000&channels=2&call=C1", [], [*pieces(pcm(stereo), 640)], None, None, [])
    simulation = simulate(world, scene, call, is_cut=True)
    assert finals(simulation) == ["w0 w1 w2"] and finals(simulation, "outbound") == []
    assert any("transcription" in item.frame for item in simulation.told if isinstance(item.frame, str))


def test_frames_shuffled_lost_and_doubled_leave_the_clock_exact(world) -> None:
    """Telnyx promises no order: within 100 ms, 2 % lost, 1 % doubled."""
    scene = world.make_scene(SCENE)
    call = call_of("telnyx", scene.samples)
    chance = random.Random(3)
    order = sorted(range(len(call.frames)), key=lambda n: (n > 0) * (n + chance.uniform(0, 5)))
    kept = [n for n in order if n == 0 or chance.random() > 0.02]
    frames = [call.frames[n] for n in kept for _ in range(1 + (chance.random() < 0.01))]
    simulation = simulate(world, scene, call, frames)
    assert " ".join(finals(simulation)) == " ".join(WORDS)
    starts = [w["start_s"] for e in simulation.published if e.event["type"] == "final" for w in e.event["words"]]
    assert np.abs(np.subtract(starts, [word.start_sample / SAMPLE_RATE_HZ for word in scene.words])).max() <= 0.02


def test_silence_that_was_not_sent_still_counts(world) -> None:
    scene = world.make_scene([0.5, 3, 4.0, 2, 1.0])
    call = call_of("twilio", scene.samples)
    pause = range(round(2.2 / FRAME_S), round(5.5 / FRAME_S))
    frames = [frame for index, frame in enumerate(call.frames) if index not in pause]
    simulation = simulate(world, scene, call, frames)
    words = [w for e in simulation.published if e.event["type"] == "final" for w in e.event["words"]]
    assert [w["text"] for w in words] == [f" w{index}" for index in range(5)]
    assert words[3]["start_s"] == pytest.approx(5.7, abs=0.02)


@pytest.mark.parametrize(
    "bad", ["{", "[]", '{"event":"hum"}', '{"event":"media","media":{"payload":"???"}}', '{"event":"media"}']
)
def test_a_bad_frame_is_told_and_the_call_goes_on(world, bad) -> None:
    scene = world.make_scene(SCENE)
    call = call_of("twilio", scene.samples)
    simulation = simulate(world, scene, call, [*call.frames[:50], bad, *call.frames[50:]])
    assert " ".join(finals(simulation)) == " ".join(WORDS)


def test_base64_with_line_breaks_or_without_padding_is_read() -> None:
    data = bytes(range(100))
    text = b64(data)
    assert audio_of(text) == audio_of(text.rstrip("=")) == audio_of(text[:40] + "\r\n" + text[40:]) == data
    assert audio_of("no base64!") is None


@pytest.mark.parametrize("codec", ["G722", "OPUS"])
def test_telnyx_in_a_codec_is_decoded_also_out_of_order(world, codec) -> None:
    scene = world.make_scene([0.5, 3, 1.5])
    rate_hz, name = (16_000, "g722") if codec == "G722" else (48_000, "libopus")
    media = [
        json.dumps(media_of(data, track="inbound", chunk=str(index + 1), timestamp=str(20 * index)))
        for index, data in enumerate(packets(voiced(scene.samples, rate_hz), name, rate_hz))
    ]
    media[40:44] = [media[41], media[40], media[43], media[42]]
    start = {"call_control_id": "C1", "media_format": {"encoding": codec, "sample_rate": 16000}}
    call = Call(
        "telnyx", [json.dumps({"event": "start", "start": start})], media, None, None, ['{"event":"stop","stop":{}}']
    )
    simulation = simulate(world, scene, call)
    assert finals(simulation) == ["w0 w1 w2"]
    assert "warning" not in kinds(simulation)


def test_asterisk_in_g722_is_decoded(world) -> None:
    scene = world.make_scene([0.5, 3, 1.5])
    first = ["MEDIA_START connection_id:U channel:x channel_id:C1 format:g722 optimal_frame_size:160 ptime:20"]
    call = Call("asterisk", first, [*packets(voiced(scene.samples, 16_000), "g722", 16_000)], None, None, [])
    assert finals(simulate(world, scene, call, is_cut=True)) == ["w0 w1 w2"]


def test_without_their_decoder_codecs_are_refused(world, monkeypatch) -> None:
    monkeypatch.setattr("gateway.doors.telephony.has_codecs", lambda: False)
    start = {"call_control_id": "C1", "media_format": {"encoding": "OPUS", "sample_rate": 16000}}
    call = Call("telnyx", [json.dumps({"event": "start", "start": start})], ["{}"], None, None, [])
    simulation = simulate(world, world.make_scene([0.5]), call, is_cut=True)
    assert any("senseway[media]" in item.event.get("message", "") for item in simulation.published)
    assert Close(1003, "unsupported audio") in [item.frame for item in simulation.told]


def test_a_codec_that_is_not_decoded_is_told(world) -> None:
    start = {"call_control_id": "C1", "media_format": {"encoding": "AMR-WB", "sample_rate": 16000}}
    call = Call("telnyx", [json.dumps({"event": "start", "start": start})], ["{}"], None, None, [])
    simulation = simulate(world, world.make_scene([0.5]), call, is_cut=True)
    assert any("AMR-WB" in item.event.get("message", "") for item in simulation.published)
    assert Close(1003, "unsupported audio") in [item.frame for item in simulation.told]


def test_audio_without_a_call_is_told_once(world) -> None:
    media = json.dumps(media_of(bytes(160), track="inbound"))
    simulation = simulate(world, world.make_scene([0.5]), Call("twilio", [], [media] * 50, None, None, []), is_cut=True)
    assert kinds(simulation).count("warning") == 1


def test_samples_with_the_high_byte_first_are_heard_where_the_url_says_so(world) -> None:
    scene = world.make_scene([0.5, 2, 1.5])
    data = (scene.samples * 32_767).astype(">i2").tobytes()
    start = {"call_control_id": "C1", "media_format": {"encoding": "L16", "sample_rate": 16_000}}
    first = [json.dumps({"event": "start", "start": start})]
    media = [
        json.dumps(media_of(data[at : at + 640], track="inbound", chunk=str(at // 640 + 1), timestamp=str(at // 32)))
        for at in range(0, len(data), 640)
    ]
    call = Call("telnyx?byte_order=big", first, media, None, None, ['{"event":"stop","stop":{}}'])
    assert finals(simulate(world, scene, call)) == ["w0 w1"]


def test_an_audiosocket_too_fast_to_be_read_is_told_once_and_closed(world) -> None:
    frames = [b"\x18" + bytes(7_680)] * 50
    door = telephony.audiosocket_door(world.knock(), world.house())
    simulation = world.behind(door, world.Engine(()))
    told = simulation.run([(0.02 * index, frame) for index, frame in enumerate(frames)], is_cut=True)
    assert told[0].frame == Close(1003, "unsupported audio")
    assert "192000 Hz" in simulation.published[0].event["message"]


def test_a_frame_of_a_codec_that_unpacks_to_minutes_is_left_out_and_the_call_goes_on(world) -> None:
    scene = world.make_scene([0.5, 2, 1.5])
    first = ["MEDIA_START connection_id:U channel:x channel_id:C1 format:g722 optimal_frame_size:160 ptime:20"]
    frames = [bytes(500_000), *packets(voiced(scene.samples, 16_000), "g722", 16_000)]
    simulation = simulate(world, scene, Call("asterisk", first, frames, None, None, []), is_cut=True)
    assert finals(simulation) == ["w0 w1"]
    assert any("500000 bytes" in item.event.get("message", "") for item in simulation.published)


def test_the_language_of_the_call_reaches_the_engine(world) -> None:
    scene = world.make_scene([0.5, 1, 0.5])
    call = call_of("twilio", scene.samples)
    simulation = simulate(world, scene, Call(call.path, call.first, call.frames, None, None, []))
    [stream] = simulation.sessions[0]._streams.values()
    assert stream.options.language == "de"


@pytest.mark.behaviour("J", door="telephony")
@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(DIALECTS)), st.one_of(st.binary(max_size=40), st.text(max_size=60)))
def test_whatever_the_frame_the_door_answers_with_effects(world, provider, frame) -> None:
    path = f"{provider}?rate=8000" if provider == "freeswitch" else provider
    telephony.open_door(knock_of(world, path), world.house()).door.receive(frame, 0.0)


@pytest.mark.behaviour("I", door="telephony")
def test_words_of_every_script_are_published_whole(world) -> None:
    told = [" こんにちは", " नमस्ते", " 👩‍👩‍👧", " ไทย"]
    scene = world.make_scene([0.5, len(told), 1.0])
    words = [replace(word, text=text) for word, text in zip(scene.words, told, strict=True)]
    call = call_of("vonage", scene.samples)
    simulation = simulate(world, scene, call, is_cut=True, engine=world.Engine(tuple(words)))
    assert finals(simulation) == ["".join(told).strip()]


# ---------------------------------------------------------------- the handshake


def test_twilios_signature_is_looked_at_where_its_token_is_known(world) -> None:
    url, token = "wss://gateway.example/telephony/twilio", "token"
    signature = base64.b64encode(hmac.new(token.encode(), url.encode(), hashlib.sha1).digest()).decode()
    house = world.house()
    strict = House(house.cards, house.gate, house.session, twilio_auth_token=token)
    good = knock_of(world, "twilio", url=url.replace("wss", "ws"), headers={"x-twilio-signature": signature})
    assert telephony.open_door(good, strict)
    for headers in ({}, {"x-twilio-signature": "AAAA"}):
        with pytest.raises(AdmissionError) as caught:
            telephony.open_door(knock_of(world, "twilio", url=url, headers=headers), strict)
        assert caught.value.status == 403
    assert token not in repr(strict)


def test_the_key_stands_in_the_path_or_in_telnyxs_header(world) -> None:
    assert telephony.key_of(knock_of(world, "plivo/abc")) == "abc"
    assert telephony.key_of(knock_of(world, "telnyx", headers={"x-telnyx-streaming-auth-token": "abc"})) == "abc"
    assert telephony.key_of(knock_of(world, "twilio")) is None


@pytest.mark.parametrize(
    ("path", "status"), [("nobody", 404), ("freeswitch", 400), ("freeswitch?rate=8000&channels=3", 400)]
)
def test_a_stream_that_can_not_be_read_is_refused_before_the_upgrade(world, path, status) -> None:
    with pytest.raises(AdmissionError) as caught:
        telephony.open_door(knock_of(world, path), world.house())
    assert caught.value.status == status and telephony.refusal(caught.value, world.knock()).body["error"]


def test_freeswitchs_subprotocol_is_echoed(world) -> None:
    knock = knock_of(world, "freeswitch?rate=8000", subprotocols=("audio.drachtio.org",))
    assert telephony.open_door(knock, world.house()).subprotocol == "audio.drachtio.org"


def test_a_call_that_never_begins_ends_quietly(world) -> None:
    call = Call("twilio", ['{"event":"connected"}'], ["{}"], None, None, ['{"event":"stop"}'])
    simulation = simulate(world, world.make_scene([0.5]), call)
    assert simulation.told[-1].frame == Close(1000, "") and simulation.sessions == {}
