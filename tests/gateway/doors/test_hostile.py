"""Whatever a client sends, a door answers in its protocol or closes: no exception, nothing that can't be encoded.

Messages of each protocol, one value in each replaced by what carriers, browsers and attackers send: numbers beyond any
range, halves of surrogate pairs, other types, nesting, emptiness, length.
"""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gateway.doors import (
    deepgram,
    deepgram_turns,
    native,
    openai_realtime,
    openai_rest,
    telephony,
)
from gateway.doors.door import AdmissionError, Door, Frame
from gateway.effects import Close

MAX_ANSWER_BYTES = 20_000  # of one frame that answers a message of any length
AUDIO = base64.b64encode(bytes(640)).decode()
LONG = "x" * 70_000

HOSTILE: Sequence[Any] = (
    None,
    True,
    -1,
    0,
    10**30,
    -(10**400),
    0.5,
    float("inf"),
    float("-inf"),
    float("nan"),
    "",
    "\ud800",
    "\0",
    "1" * 5_000,
    LONG,
    "é\u0301👩\u200d🚀",
    [],
    {},
    [[[[]]]],
    {"a": {"b": None}},
    ["x"] * 2_000,
    {LONG: LONG},
    {"\ud800": 1},
)

Protocol = tuple[Callable[[Any], Door], Sequence[Mapping[str, Any] | bytes]]


def call(provider: str, **query: str) -> Callable[[Any], Door]:
    def open_door(world: Any) -> Door:
        knock = replace(world.knock(query=tuple(query.items())), path=f"/telephony/{provider}")
        return telephony.open_door(knock, world.house()).door

    return open_door


def start(**given: Any) -> dict[str, Any]:
    return {"event": "start", "start": given}


def media(chunk: str) -> dict[str, Any]:
    return {"event": "media", "media": {"track": "inbound", "chunk": chunk, "timestamp": "20", "payload": AUDIO}}


DTMF = {"event": "dtmf", "dtmf": {"track": "inbound_track", "digit": "1"}}
MARK = {"event": "mark", "mark": {"name": "m1"}}
MU_LAW = {"encoding": "audio/x-mulaw", "sampleRate": 8_000, "channels": 1}

PROTOCOLS: Mapping[str, Protocol] = {
    "native": (
        lambda world: native.open_door(world.knock(), world.house()).door,
        [
            {
                "type": "hello",
                "audio": {"encoding": "s16le", "sample_rate_hz": 16_000, "channels": 1, "channel": 0},
                "language": "en",
                "vocabulary": ["a"],
                "context": "b",
                "hangover_ms": 400,
                "speech_threshold": 0.5,
                "pre_roll_ms": 300,
                "partial_interval_ms": 500,
            },
            {"type": "update", "id": "1", "hangover_ms": 500, "speech_threshold": 0.4, "vocabulary": ["c"]},
            {"type": "flush", "id": "2"},
            bytes(3_200),
            {"type": "bye"},
        ],
    ),
    "deepgram": (
        lambda world: (
            deepgram.open_door(
                world.knock(
                    query=(
                        ("model", "nova-3"),
                        ("encoding", "linear16"),
                        ("sample_rate", "16000"),
                        ("interim_results", "true"),
                        ("utterance_end_ms", "1000"),
                    )
                ),
                world.house(),
            ).door
        ),
        [
            {"type": "Configure", "keyterms": ["a"], "features": {"numerals": False}},
            {"type": "Finalize", "channel": 0},
            {"type": "KeepAlive"},
            bytes(3_200),
            {"type": "CloseStream"},
        ],
    ),
    "deepgram_turns": (
        lambda world: (
            deepgram_turns.open_door(
                world.knock(query=(("model", "flux"), ("encoding", "linear16"), ("sample_rate", "16000"))),
                world.house(),
            ).door
        ),
        [
            {
                "type": "Configure",
                "thresholds": {"eot_threshold": 0.6, "eager_eot_threshold": 0.4, "eot_timeout_ms": 700},
                "keyterms": ["a"],
            },
            {"type": "ForceEndTurn"},
            bytes(3_200),
            {"type": "CloseStream"},
        ],
    ),
    "openai_realtime": (
        lambda world: openai_realtime.open_door(world.knock(), world.house()).door,
        [
            {
                "type": "session.update",
                "event_id": "1",
                "session": {
                    "type": "transcription",
                    "audio": {
                        "input": {
                            "format": {"type": "audio/pcm", "rate": 16_000},
                            "transcription": {
                                "model": "whisper-1",
                                "language": "en",
                                "prompt": "p",
                                "keywords": ["k"],
                                "delay": "low",
                            },
                            "noise_reduction": None,
                            "turn_detection": {
                                "type": "server_vad",
                                "threshold": 0.5,
                                "prefix_padding_ms": 300,
                                "silence_duration_ms": 500,
                            },
                        }
                    },
                    "include": ["item.input_audio_transcription.logprobs"],
                },
            },
            {"type": "input_audio_buffer.append", "audio": AUDIO},
            {"type": "input_audio_buffer.commit", "event_id": "2"},
            {"type": "input_audio_buffer.clear"},
            {"type": "conversation.item.retrieve", "item_id": "3"},
        ],
    ),
    "twilio": (
        call("twilio"),
        [
            {"event": "connected", "protocol": "Call", "version": "1.0.0"},
            start(callSid="CA1", mediaFormat=MU_LAW, customParameters={"language": "en"}),
            media("1"),
            DTMF,
            MARK,
            {"event": "stop", "stop": {"callSid": "CA1"}},
        ],
    ),
    "telnyx": (
        call("telnyx"),
        [
            start(
                call_control_id="v2:1",
                custom_parameters={"a": "b"},
                media_format={"encoding": "PCMU", "sample_rate": 8_000, "channels": 1},
            ),
            media("1"),
            media("3"),
            media("2"),
            DTMF,
            {"event": "error", "payload": {"code": 100_002, "title": "t", "detail": "d"}},
        ],
    ),
    "plivo": (
        call("plivo"),
        [
            {**start(callId="1", mediaFormat=MU_LAW), "extra_headers": '{"a": "b"}'},
            media("1"),
            {"event": "playedStream", "streamId": "1", "name": "c1"},
            {"event": "clearedAudio", "streamId": "1"},
        ],
    ),
    "exotel": (
        call("exotel"),
        [start(call_sid="1", media_format={"sample_rate": "8000"}, custom_parameters={"a": "b"}), media("1"), MARK],
    ),
    "vonage": (
        call("vonage"),
        [
            {"event": "websocket:connected", "content-type": "audio/l16;rate=16000", "uuid": "1", "language": "en"},
            bytes(640),
            {"event": "websocket:dtmf", "digit": "5", "duration": 260},
            {"event": "websocket:notify", "payload": {"id": "m1"}},
        ],
    ),
    "asterisk": (
        call("asterisk"),
        [
            {"event": "MEDIA_START", "channel_id": "1", "format": "slin16", "channel_variables": {"LANG": "nl"}},
            bytes(640),
            {"event": "DTMF_END", "channel_id": "1", "digit": "5"},
            {"event": "MEDIA_MARK_PROCESSED", "correlation_id": "1"},
        ],
    ),
    "freeswitch": (call("freeswitch", rate="8000"), [{"caller": "anybody", "language": "en"}, bytes(320)]),
}


def places(message: Any) -> list[tuple[Any, ...]]:
    """The path of every value in a message."""
    if not isinstance(message, dict):
        return []
    return [path for key, value in message.items() for path in [(key,), *((key, *rest) for rest in places(value))]]


def replaced(message: Mapping[str, Any], path: Sequence[Any], value: Any) -> dict[str, Any]:
    key, *rest = path
    return {**message, key: replaced(message[key], rest, value) if rest else value}


@st.composite
def conversations(draw: st.DrawFn, messages: Sequence[Mapping[str, Any] | bytes]) -> list[Frame]:
    """Messages of a protocol in any order, most of them with one value replaced."""
    frames: list[Frame] = []
    for message in draw(st.lists(st.sampled_from(messages), min_size=1, max_size=6)):
        if isinstance(message, bytes):
            frames.append(message[: draw(st.sampled_from([0, 1, 7, len(message)]))])
            continue
        if draw(st.integers(0, 4)):
            message = replaced(message, draw(st.sampled_from(places(message))), draw(st.sampled_from(HOSTILE)))
        frames.append(written(message))
    return frames


def written(message: Mapping[str, Any]) -> str:
    """As a client writes it: numbers of any length, halves of surrogates as escapes, Infinity and NaN by name."""
    return json.dumps(message)


def assert_can_be_sent(told: Sequence[Any], published: Sequence[Any]) -> None:
    for item in told:
        if isinstance(item.frame, Close):
            assert 1000 <= item.frame.code < 5000 and len(item.frame.reason.encode()) <= 123
            continue
        assert isinstance(item.frame, str)
        json.loads(item.frame.encode())
        assert len(item.frame) <= MAX_ANSWER_BYTES
    for event in published:
        assert len(msgspec.json.encode(event.event)) <= MAX_ANSWER_BYTES


@pytest.mark.parametrize("name", PROTOCOLS)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_whatever_stands_in_a_message_it_is_answered_or_told(world, name: str, data: st.DataObject) -> None:
    open_door, messages = PROTOCOLS[name]
    frames = data.draw(conversations(messages))
    simulation = world.behind(open_door(world), world.Engine(()))
    told = simulation.run([(0.1 * index, frame) for index, frame in enumerate(frames)], is_cut=True)
    assert_can_be_sent(told, simulation.published)


@pytest.mark.behaviour("J", door="native")
@pytest.mark.behaviour("J", door="deepgram")
@pytest.mark.behaviour("J", door="deepgram_turns")
@pytest.mark.behaviour("J", door="openai_realtime")
@pytest.mark.behaviour("J", door="telephony")
@pytest.mark.parametrize("name", PROTOCOLS)
@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: repr(value)[:20])
def test_each_value_of_each_message_may_be_anything(world, name: str, value: Any) -> None:
    open_door, messages = PROTOCOLS[name]
    for index, message in enumerate(messages):
        if isinstance(message, bytes):
            continue
        for path in places(message):
            sent = [written(m) if isinstance(m, Mapping) else m for m in messages]
            sent[index] = written(replaced(message, path, value))
            simulation = world.behind(open_door(world), world.Engine(()))
            told = simulation.run([(0.1 * at, frame) for at, frame in enumerate(sent)], is_cut=True)
            assert_can_be_sent(told, simulation.published)


FORM = {
    "model": "whisper-1",
    "language": "en",
    "prompt": "p",
    "keywords[]": "k",
    "temperature": "0.2",
    "response_format": "json",
    "timestamp_granularities[]": "word",
    "stream": "true",
    "include[]": "logprobs",
    "chunking_strategy": '{"type": "server_vad", "threshold": 0.5, "silence_duration_ms": 500}',
    "chunking_strategy[threshold]": "0.5",
    "chunking_strategy[silence_duration_ms]": "500",
    "known_speaker_names[]": "Ann",
}
FORM_VALUES = ("", "\0", "nan", "inf", "-1", "1e999", "[1]", "7", '"x"', "[" * 5_000, "é👩\u200d🚀", "x" * 100_000)


@pytest.mark.behaviour("J", door="openai_rest")
@pytest.mark.parametrize("field", FORM)
@pytest.mark.parametrize("value", FORM_VALUES, ids=lambda value: value[:8])
def test_each_field_of_a_form_may_be_anything(world, field: str, value: str) -> None:
    knock = world.knock(query=(("model", "whisper-1"), (field, value)))
    try:
        door = openai_rest.open_door(knock, world.house()).door
    except AdmissionError as error:
        assert 400 <= error.status < 500 and len(str(error)) <= MAX_ANSWER_BYTES
        return
    told = world.behind(door, world.Engine(())).run([(0.0, bytes(6_400)), (0.0, b"")])
    assert isinstance(told[-1].frame, Close) and told[-1].frame.code == 200


LISTEN = {
    "model": "nova-3",
    "language": "en",
    "encoding": "linear16",
    "sample_rate": "16000",
    "channels": "1",
    "multichannel": "true",
    "endpointing": "300",
    "utterance_end_ms": "1000",
    "keyterm": "a",
    "eot_threshold": "0.6",
    "eager_eot_threshold": "0.4",
    "eot_timeout_ms": "700",
    "intent": "transcription",
}
QUERY_VALUES = ("", "\0", "\r\nx: y", "nan", "inf", "-1", "1e999", "9" * 5_000, "é👩\u200d🚀", "x" * 5_000)


@pytest.mark.parametrize("kind", [deepgram, deepgram_turns, openai_realtime], ids=lambda kind: kind.NAME)
@pytest.mark.parametrize("value", QUERY_VALUES, ids=lambda value: repr(value)[:12])
def test_each_parameter_of_a_query_may_be_anything(world, kind: Any, value: str) -> None:
    for name in LISTEN:
        knock = world.knock(query=tuple({**LISTEN, name: value, "interim_results": "true"}.items()))
        try:
            admission = kind.open_door(knock, world.house())
        except AdmissionError as error:
            refusal = kind.refusal(error, knock)
            assert 400 <= error.status < 500 and len(msgspec.json.encode(refusal.body)) <= MAX_ANSWER_BYTES
            for said in refusal.headers.values():
                assert said.isascii() and said.isprintable() and len(said) <= 2_000
            continue
        for said in admission.headers.values():
            assert said.isascii() and said.isprintable()
        simulation = world.behind(admission.door, world.Engine(()))
        assert_can_be_sent(simulation.run([(0.0, bytes(3_200))], is_cut=True), simulation.published)
