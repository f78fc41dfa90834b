"""Deepgram's prerecorded protocol against a session on a virtual clock."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.doors import deepgram_file
from gateway.doors.door import AdmissionError
from gateway.effects import Close
from gateway.errors import ServerError
from streaming.transcript import Word

SCENE = [0.5, 3, 1.5, 2, 1.0]


def admit(world, engine=None, **query):
    house = world.house(engine) if engine else world.house()
    return deepgram_file.open_door(world.knock(query=tuple({"model": "nova-3", **query}.items())), house)


def answer(world, *, engine=None, scene=None, n_bytes=64_000, delay_s=0.0, **query):
    """The body and the status."""
    scene = scene or world.make_scene(SCENE)
    engine = engine or world.Engine(scene.words)
    data = scene.samples.astype("<f4").tobytes()
    blocks = [data[at : at + n_bytes] for at in range(0, len(data), n_bytes)]
    door = admit(world, engine, **query).door
    told = world.behind(door, engine, delay_s).run([(0.0, block) for block in [*blocks, b""]])
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


def text_of(body):
    return body["results"]["channels"][0]["alternatives"][0]["transcript"]


@pytest.mark.behaviour("C", door="deepgram_file")
@pytest.mark.parametrize("gap_s", [0.0, 0.1, 0.2])
@pytest.mark.parametrize("delay_s", [0.0, 0.3])
def test_the_last_word_right_before_the_end_of_the_recording_is_heard(world, gap_s, delay_s) -> None:
    scene = world.make_scene([0.5, 3, gap_s])
    scene = type(scene)(scene.samples[: len(scene.samples) - 800], scene.words)
    body, status = answer(world, scene=scene, delay_s=delay_s)
    assert status == 200 and text_of(body) == "w0 w1 w2"


@pytest.mark.behaviour("I", door="deepgram_file")
def test_words_in_every_script_are_told_whole(world) -> None:
    told = [" こんにちは", " 世界", " नमस्ते", " 👩‍👩‍👧", " e\u0301te\u0301", " ไทย"]
    scene = world.make_scene([0.5, len(told), 1.0])
    words = [Word(part, word.start_sample, word.end_sample, 0.9) for part, word in zip(told, scene.words, strict=True)]
    body, _ = answer(world, scene=scene, engine=world.Engine(tuple(words)), punctuate="true")
    assert text_of(body) == "".join(told).strip()
    [best] = body["results"]["channels"][0]["alternatives"]
    assert [word["punctuated_word"] for word in best["words"]] == [part.strip() for part in told]


@pytest.mark.behaviour("J", door="deepgram_file")
@settings(max_examples=20, deadline=None)
@given(
    layout=st.lists(st.one_of(st.integers(1, 6), st.sampled_from([0.2, 2.0])), min_size=1, max_size=6),
    n_bytes=st.sampled_from([3_333, 64_000, 1_000_001]),
    delay_s=st.sampled_from([0.0, 0.4]),
)
def test_any_blocks_and_delays_give_the_words_once_and_in_order(world, layout, n_bytes, delay_s) -> None:
    scene = world.make_scene(layout)
    body, status = answer(world, scene=scene, n_bytes=n_bytes, delay_s=delay_s)
    assert status == 200 and text_of(body).split() == [word.text.strip() for word in scene.words]


def both_channels(world, scenes, **query):
    """Two scenes as the channels of one recording."""
    n = max(len(scene.samples) for scene in scenes)
    samples = np.stack([np.pad(scene.samples, (0, n - len(scene.samples))) for scene in scenes], axis=1)
    house = world.house()
    knock = replace(world.knock(query=tuple({"model": "nova-3", **query}.items())), n_channels=len(scenes))
    admission = deepgram_file.open_door(knock, house)
    engine = world.Engine(scenes[0].words)
    data = samples.astype("<f4").tobytes()
    blocks = [data[at : at + 64_000] for at in range(0, len(data), 64_000)]
    told = world.behind(admission.door, engine).run([(0.0, block) for block in [*blocks, b""]])
    return admission, json.loads(told[-2].frame)


def test_with_multichannel_every_channel_has_its_own_transcript(world) -> None:
    caller, callee = world.make_scene([0.5, 3, 5.0]), world.make_scene([5.0, 2, 1.0])
    words = [*caller.words, *(replace(word, text=f" callee{index}") for index, word in enumerate(callee.words))]
    scenes = [type(caller)(caller.samples, tuple(words)), callee]
    admission, body = both_channels(world, scenes, multichannel="true", utterances="true")
    assert admission.takes_channels and body["metadata"]["channels"] == 2
    texts = [channel["alternatives"][0]["transcript"] for channel in body["results"]["channels"]]
    assert texts == ["w0 w1 w2", "callee0 callee1"]
    told = [(item["channel"], item["transcript"]) for item in body["results"]["utterances"]]
    assert told == [(0, "w0 w1 w2"), (1, "callee0 callee1")]


def test_without_multichannel_channels_are_mixed_down(world) -> None:
    knock = replace(world.knock(query=(("model", "nova-3"),)), n_channels=2)
    assert not deepgram_file.open_door(knock, world.house()).takes_channels


def test_more_channels_than_are_heard_are_refused(world) -> None:
    knock = replace(world.knock(query=(("model", "nova-3"), ("multichannel", "true"))), n_channels=9)
    with pytest.raises(AdmissionError, match="9 channels; 8 are"):
        deepgram_file.open_door(knock, world.house())


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
