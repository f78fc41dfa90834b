"""Deepgram's prerecorded protocol against a session on a virtual clock."""

import json
from dataclasses import replace

import pytest

from gateway.doors import deepgram_file
from gateway.doors.door import AdmissionError
from gateway.effects import Close
from gateway.errors import ServerError

SCENE = [0.5, 3, 1.5, 2, 1.0]


def admit(world, engine=None, **query):
    house = world.house(engine) if engine else world.house()
    return deepgram_file.open_door(world.knock(query=tuple({"model": "nova-3", **query}.items())), house)


def answer(world, *, engine=None, scene=None, **query):
    """The body and the status."""
    scene = scene or world.make_scene(SCENE)
    engine = engine or world.Engine(scene.words)
    samples = scene.samples.astype("<f4")
    blocks = [samples[at : at + 16_000].tobytes() for at in range(0, len(samples), 16_000)]
    told = world.behind(admit(world, engine, **query).door, engine).run([(0.0, block) for block in [*blocks, b""]])
    assert isinstance(told[-1].frame, Close)
    return json.loads(told[-2].frame), told[-1].frame.code


def test_the_answer_has_text_words_and_metadata(world) -> None:
    body, status = answer(world, punctuate="true")
    [channel] = body["results"]["channels"]
    [best] = channel["alternatives"]
    assert status == 200 and best["transcript"] == "w0 w1 w2 w3 w4" and channel["detected_language"] == "en"
    assert [word["punctuated_word"] for word in best["words"]] == ["w0", "w1", "w2", "w3", "w4"]
    assert best["words"][0]["start"] == 0.5 and best["confidence"] == 0.9
    metadata = body["metadata"]
    assert metadata["duration"] == 5.0 and len(metadata["sha256"]) == 64 and metadata["channels"] == 1
    assert set(metadata["model_info"]) == set(metadata["models"])
    assert "utterances" not in body["results"] and "paragraphs" not in best


def test_utterances_and_paragraphs_come_when_asked_for(world) -> None:
    body, _ = answer(world, utterances="true", paragraphs="true")
    assert [item["transcript"] for item in body["results"]["utterances"]] == ["w0 w1 w2", "w3 w4"]
    paragraphs = body["results"]["channels"][0]["alternatives"][0]["paragraphs"]
    assert paragraphs["transcript"] == "w0 w1 w2\n\nw3 w4" and paragraphs["paragraphs"][1]["num_words"] == 2


def test_silence_is_an_empty_text(world) -> None:
    body, status = answer(world, scene=world.make_scene([2.0]))
    assert status == 200 and body["results"]["channels"][0]["alternatives"][0]["transcript"] == ""


def test_a_failed_decode_is_an_error_and_not_a_shorter_text(world) -> None:
    scene = world.make_scene(SCENE)
    body, status = answer(world, scene=scene, engine=world.Engine(scene.words, fail_on=frozenset({1, 2})))
    assert status == 500 and body["err_code"] == "decode_failed"


def test_what_is_without_effect_is_named_and_what_is_not_here_refused(world) -> None:
    headers = admit(world, diarize="true", redact="pci", numerals="false").headers
    assert headers["dg-ignored"] == "diarize, redact" and headers["dg-request-id"]
    with pytest.raises(AdmissionError, match="parakeet"):
        admit(world, model="parakeet")


def test_a_strict_server_refuses_what_is_without_effect(world) -> None:
    house = replace(world.house(), is_strict=True)
    query = (("model", "nova-3"), ("diarize", "true"))
    with pytest.raises(AdmissionError, match="diarize"):
        deepgram_file.open_door(world.knock(query=query), house)


def test_a_server_that_gives_up_answers_with_a_status(world) -> None:
    _, close = admit(world).door.failed(ServerError("shutting_down", "x"))
    assert close.code == 503
