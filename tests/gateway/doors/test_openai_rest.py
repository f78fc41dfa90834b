"""The OpenAI REST door against a session on a virtual clock: fields, bodies and streams."""

import json
from dataclasses import replace

import numpy as np
import pytest

from gateway.doors import openai_rest
from gateway.doors.door import AdmissionError, Say
from gateway.effects import Close
from gateway.errors import ServerError
from streaming.transcript import Word

SCENE = [0.5, 3, 1.5, 2, 1.0]


def door_of(world, *fields, engine=None, path="/v1/audio/transcriptions"):
    house = world.house(engine) if engine else world.house()
    knock = type(world.knock())(path=path, query=(("model", "reader"), *fields))
    return openai_rest.open_door(knock, house)


def answer(world, *fields, scene=None, engine=None, delay_s=0.0):
    """The frames of the answer, and its status."""
    scene = scene or world.make_scene(SCENE)
    engine = engine or world.Engine(scene.words)
    admission = door_of(world, *fields, engine=engine)
    samples = scene.samples.astype("<f4")
    blocks = [samples[at : at + 16_000].tobytes() for at in range(0, len(samples), 16_000)]
    told = world.behind(admission.door, engine, delay_s).run([(0.0, block) for block in [*blocks, b""]])
    assert isinstance(told[-1].frame, Close)
    return [item.frame for item in told[:-1]], told[-1].frame.code


def body(world, *fields, **world_of):
    frames, status = answer(world, *fields, **world_of)
    assert status == 200
    return "".join(frames)


def test_json_has_the_text_and_the_usage(world) -> None:
    got = json.loads(body(world))
    assert got["text"] == "w0 w1 w2 w3 w4"
    assert got["usage"] == {"type": "duration", "seconds": 5.0}
    assert got["languages"] == [{"code": "en"}] and "logprobs" not in got


def test_text_is_the_text(world) -> None:
    assert body(world, ("response_format", "text")) == "w0 w1 w2 w3 w4\n"


@pytest.mark.behaviour("C", door="openai_rest")
@pytest.mark.parametrize("gap_s", [0.0, 0.1, 0.2])
@pytest.mark.parametrize("stream", ["false", "true"])
def test_the_last_word_right_before_the_end_of_the_recording_is_heard(world, gap_s, stream) -> None:
    scene = world.make_scene([0.5, 3, gap_s])
    scene = type(scene)(scene.samples[: len(scene.samples) - 800], scene.words)
    last = body(world, ("stream", stream), scene=scene, delay_s=0.3).strip().splitlines()[-1]
    assert json.loads(last.removeprefix("data: "))["text"] == "w0 w1 w2"


def both(world, *fields):
    """A caller and a callee on a channel each; the frames of the answer."""
    caller, callee = world.make_scene([0.5, 2, 3.0, 1, 1.0]), world.make_scene([2.5, 1, 3.0])
    n = max(len(caller.samples), len(callee.samples))
    samples = np.stack([np.pad(scene.samples, (0, n - len(scene.samples))) for scene in (caller, callee)], axis=1)
    engine = world.Engine((*caller.words[:2], replace(callee.words[0], text=" callee"), caller.words[2]))
    query = (("model", "reader"), ("response_format", "diarized_json"), *fields)
    knock = replace(world.knock(), path="/v1/audio/transcriptions", query=query, n_channels=2)
    admission = openai_rest.open_door(knock, world.house(engine))
    assert admission.takes_channels
    data = samples.astype("<f4").tobytes()
    blocks = [data[at : at + 64_000] for at in range(0, len(data), 64_000)]
    told = world.behind(admission.door, engine).run([(0.0, block) for block in [*blocks, b""]])
    return [item.frame for item in told[:-1]]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ([], ["A", "B", "A"]),
        (["Ann"], ["Ann", "B", "Ann"]),
        (["Ann", "Bob"], ["Ann", "Bob", "Ann"]),
        (["B"], ["B", "C", "B"]),
    ],
)
def test_diarized_json_tells_speakers_apart_by_channel(world, names, expected) -> None:
    [frame] = both(world, *(("known_speaker_names[]", name) for name in names))
    got = json.loads(frame)
    assert [segment["speaker"] for segment in got["segments"]] == expected
    assert [segment["text"].strip() for segment in got["segments"]] == ["w0 w1", "callee", "w2"]
    assert got["text"] == "w0 w1 callee w2" and got["task"] == "transcribe" and got["duration"] == 5.9
    assert all(segment["type"] == "transcript.text.segment" for segment in got["segments"])
    assert len({segment["id"] for segment in got["segments"]}) == 3


def test_diarized_json_streams_its_segments(world) -> None:
    events = [json.loads(frame.removeprefix("data: ")) for frame in both(world, ("stream", "true"))]
    assert [event["type"] for event in events] == ["transcript.text.segment"] * 3 + ["transcript.text.done"]
    assert sorted(event["text"].strip() for event in events[:3]) == ["callee", "w0 w1", "w2"]
    assert events[-1]["text"] == "w0 w1 callee w2"


def test_subtitles_have_a_cue_for_each_segment(world) -> None:
    srt = body(world, ("response_format", "srt"))
    assert srt.startswith("1\n00:00:00,500 --> 00:00:01,") and "\n\n2\n" in srt and "w3 w4" in srt
    vtt = body(world, ("response_format", "vtt"))
    assert vtt.startswith("WEBVTT\n") and "00:00:00.500 --> " in vtt


def test_verbose_json_has_segments_and_words_as_asked(world) -> None:
    verbose = ("response_format", "verbose_json")
    plain = json.loads(body(world, verbose))
    assert plain["task"] == "transcribe" and plain["language"] == "en" and plain["duration"] == 5.0
    assert [segment["text"] for segment in plain["segments"]] == [" w0 w1 w2", " w3 w4"]
    assert "words" not in plain
    words = json.loads(body(world, verbose, ("timestamp_granularities[]", "word")))
    assert [word["word"] for word in words["words"]] == ["w0", "w1", "w2", "w3", "w4"]
    assert words["words"][0]["start"] == 0.5 and "segments" not in words
    both = json.loads(
        body(world, verbose, ("timestamp_granularities[]", "word"), ("timestamp_granularities[]", "segment"))
    )
    assert "words" in both and "segments" in both


def test_what_a_segment_does_not_know_is_null(world) -> None:
    [first, _] = json.loads(body(world, ("response_format", "verbose_json")))["segments"]
    assert first["no_speech_prob"] is None and first["temperature"] is None and first["tokens"] == []
    assert first["avg_logprob"] == pytest.approx(-0.105, abs=0.01)


def test_log_probabilities_come_when_asked_for(world) -> None:
    got = json.loads(body(world, ("include[]", "logprobs")))
    assert [item["token"] for item in got["logprobs"]] == [" w0", " w1", " w2", " w3", " w4"]


@pytest.mark.parametrize("delay_s", [0.0, 0.5])
def test_a_stream_has_deltas_that_join_to_the_text(world, delay_s) -> None:
    frames, status = answer(world, ("stream", "true"), delay_s=delay_s)
    assert status == 200
    events = [json.loads(frame.removeprefix("data: ")) for frame in frames]
    assert all(frame.endswith("\n\n") for frame in frames)
    assert events[-1]["type"] == "transcript.text.done" and events[-1]["usage"]["seconds"] == 5.0
    deltas = [event["delta"] for event in events[:-1]]
    assert {event["type"] for event in events[:-1]} == {"transcript.text.delta"}
    assert "".join(deltas) == events[-1]["text"] == "w0 w1 w2 w3 w4"


@pytest.mark.behaviour("I", door="openai_rest")
def test_a_stream_tells_words_of_every_script_whole(world) -> None:
    said = [" こんにちは", "世界", " नमस्ते", " 👩‍👩‍👧", " ไทย"]
    scene = world.make_scene([0.5, len(said), 1.0])
    words = [Word(text, word.start_sample, word.end_sample, 0.9) for text, word in zip(said, scene.words, strict=True)]
    frames, _ = answer(world, ("stream", "true"), scene=scene, engine=world.Engine(tuple(words)))
    *deltas, done = [json.loads(frame.removeprefix("data: ")) for frame in frames]
    assert "".join(event["delta"] for event in deltas) == done["text"] == "".join(said).strip()


def test_the_kind_of_answer_is_in_the_headers(world) -> None:
    kinds = {
        "json": "application/json",
        "verbose_json": "application/json",
        "text": "text/plain; charset=utf-8",
        "srt": "application/x-subrip; charset=utf-8",
        "vtt": "text/vtt; charset=utf-8",
    }
    for name, kind in kinds.items():
        assert door_of(world, ("response_format", name)).headers["Content-Type"] == kind
    streamed = door_of(world, ("stream", "true"))
    assert streamed.is_streamed and streamed.headers["Content-Type"] == "text/event-stream"


def test_silence_is_an_empty_text(world) -> None:
    scene = world.make_scene([3.0])
    assert json.loads(body(world, scene=scene))["text"] == ""
    assert body(world, ("response_format", "vtt"), scene=scene) == "WEBVTT\n"


def test_a_failed_decode_is_an_error_and_not_a_shorter_text(world) -> None:
    scene = world.make_scene(SCENE)
    engine = world.Engine(scene.words, fail_on=frozenset({1, 2}))
    frames, status = answer(world, scene=scene, engine=engine)
    assert status == 500 and json.loads(frames[0])["error"]["code"] == "decode_failed"
    engine = world.Engine(scene.words, fail_on=frozenset({1, 2}))
    frames, _ = answer(world, ("stream", "true"), scene=scene, engine=engine)
    assert json.loads(frames[-1].removeprefix("data: "))["type"] == "error"


def options_of(world, *fields):
    scene = world.make_scene([0.5, 1, 1.0])
    engine = world.Engine(scene.words)
    admission = door_of(world, *fields, engine=engine)
    simulation = world.behind(admission.door, engine)
    simulation.run([(0.0, scene.samples.astype("<f4").tobytes())])
    [stream] = simulation.sessions[0]._streams.values()
    return stream.options, simulation.sessions[0].session, admission


def test_language_prompt_and_keywords_reach_the_engine(world) -> None:
    options, _, _ = options_of(
        world, ("language", "de-DE"), ("prompt", "Guten Tag"), ("keywords[]", "Akku"), ("keywords[]", "Zwolle")
    )
    assert (options.language, options.context, options.vocabulary) == ("de", "Guten Tag", ("Akku", "Zwolle"))


@pytest.mark.parametrize(
    "fields",
    [
        [("chunking_strategy", '{"type":"server_vad","silence_duration_ms":700,"threshold":0.6}')],
        [
            ("chunking_strategy[type]", "server_vad"),
            ("chunking_strategy[silence_duration_ms]", "700"),
            ("chunking_strategy[threshold]", "0.6"),
        ],
    ],
)
def test_a_chunking_strategy_sets_the_turns_in_either_spelling(world, fields) -> None:
    _, session, _ = options_of(world, *fields)
    assert (session._settings.gate.hangover_ms, session._settings.gate.threshold) == (700, 0.6)


def test_without_a_chunking_strategy_turns_end_as_the_server_is_set_up(world) -> None:
    for fields in ([], [("chunking_strategy", "auto")]):
        _, session, _ = options_of(world, *fields)
        assert session._settings.gate == world.house().gate


def test_a_temperature_is_said_to_be_without_effect(world) -> None:
    assert options_of(world, ("temperature", "0.4"))[2].headers["X-Senseway-Ignored"] == "temperature"
    assert "X-Senseway-Ignored" not in options_of(world, ("temperature", "0"))[2].headers


def test_a_strict_server_refuses_a_temperature(world) -> None:
    house = replace(world.house(), is_strict=True)
    knock = world.knock(query=(("model", "reader"), ("temperature", "0.4")))
    with pytest.raises(AdmissionError, match="temperature"):
        openai_rest.open_door(knock, house)


def test_translations_ask_for_english(world) -> None:
    admission = door_of(world, path=openai_rest.TRANSLATIONS_PATH)
    assert admission.door.opened(0.0)[1].message.task == "translate"


@pytest.mark.parametrize(
    ("fields", "param", "status"),
    [
        ([("model", "parakeet")], "model", 404),
        ([("model", "")], "model", 400),
        ([("response_format", "docx")], "response_format", 400),
        ([("response_format", "diarized_json")], "response_format", 400),
        ([("language", "xx")], "language", 400),
        ([("stream", "perhaps")], "stream", 400),
        ([("stream", "true"), ("response_format", "srt")], "stream", 400),
        ([("timestamp_granularities[]", "word")], "timestamp_granularities", 400),
        (
            [("timestamp_granularities[]", "phone"), ("response_format", "verbose_json")],
            "timestamp_granularities",
            400,
        ),
        ([("known_speaker_names[]", "Ann")], "known_speaker_names", 400),
        ([("known_speaker_references[]", "data:")], "known_speaker_references", 400),
        ([("chunking_strategy", "sometimes")], "chunking_strategy", 400),
        ([("chunking_strategy", '{"type":"semantic_vad"}')], "chunking_strategy.type", 400),
    ],
)
def test_what_can_not_be_honoured_is_refused_with_its_field(world, fields, param, status) -> None:
    with pytest.raises(AdmissionError) as caught:
        door_of(world, *fields)
    assert (caught.value.param, caught.value.status) == (param, status)
    error = openai_rest.refusal(caught.value, world.knock()).body["error"]
    assert error["param"] == param and error["message"] and error["type"] == "invalid_request_error"


def test_a_server_that_gives_up_answers_with_a_status(world) -> None:
    for code, status in (("server_full", 503), ("shutting_down", 503), ("internal", 500)):
        say, close = door_of(world).door.failed(ServerError(code, "x"))
        assert isinstance(say, Say) and json.loads(say.frame)["error"]["type"] == "server_error"
        assert close.code == status
