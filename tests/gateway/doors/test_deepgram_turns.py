"""Deepgram's turn-based protocol against a session on a virtual clock."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.doors import deepgram_turns
from gateway.doors.door import AdmissionError
from gateway.effects import Close
from gateway.errors import ServerError
from streaming.transcript import Word
from tests.encoding import FRAGMENTED, encoded, voiced
from vad.audio import SAMPLE_RATE_HZ

RAW = {"model": "flux-general-en", "encoding": "linear16", "sample_rate": "16000"}
CLOSE, FORCE = '{"type":"CloseStream"}', '{"type":"ForceEndTurn"}'


def admit(world, engine=None, *, has_turn_model=False, **query):
    house = world.house(*([engine] if engine else []), has_turn_model=has_turn_model)
    return deepgram_turns.open_door(world.knock(query=tuple({**RAW, **query}.items())), house)


def marked(world, *marks, pause_s=1.0, last_s=7.0):
    """Two words, a mark and a pause for each of ``marks``."""
    scene = world.make_scene([0.5, *(item for _ in marks for item in (2, pause_s)), last_s])
    texts = [f" w{index}{marks[index // 2] if index % 2 else ''}" for index in range(len(scene.words))]
    words = [replace(word, text=text) for word, text in zip(scene.words, texts, strict=True)]
    return type(scene)(scene.samples, tuple(words))


def play(world, scene, *then, n_bytes=640, delay_s=0.0, engine=None, frames=None, judge=None, **query):
    engine = engine or world.Engine(scene.words)
    audio = frames or [(at_s, message.data) for at_s, message in world.packets(scene.pcm(), n_bytes)]
    door = admit(world, engine, has_turn_model=judge is not None, **query).door
    told = world.behind(door, engine, delay_s, judge).run(
        [*audio, *((audio[-1][0], frame) for frame in (*then, CLOSE))]
    )
    return [item.frame if isinstance(item.frame, Close) else json.loads(item.frame) for item in told]


def turns(messages, event=None):
    found = [m for m in messages if not isinstance(m, Close) and m["type"] == "TurnInfo"]
    return [m for m in found if event is None or m["event"] == event]


def assert_sound(messages):
    """Numbers count every message; each turn starts once and ends once; no transcript is without words."""
    plain = [m for m in messages if not isinstance(m, Close)]
    assert [m["sequence_id"] for m in plain] == list(range(len(plain)))
    assert plain[0]["type"] == "Connected" and messages[-1] == Close(1000, "")
    starts, ends = turns(messages, "StartOfTurn"), turns(messages, "EndOfTurn")
    assert [m["turn_index"] for m in starts] == [m["turn_index"] for m in ends] == list(range(len(ends)))
    assert all(bool(m["words"]) == bool(m["transcript"]) for m in turns(messages))
    assert all(0 <= m["end_of_turn_confidence"] <= 1 for m in turns(messages))


def test_a_finished_sentence_ends_its_turn_and_another_waits_for_the_timeout(world) -> None:
    scene = marked(world, ",", ".", "")
    messages = play(world, scene)
    assert_sound(messages)
    ends = turns(messages, "EndOfTurn")
    assert [(m["transcript"], m["trigger"]) for m in ends] == [("w0 w1, w2 w3.", "model"), ("w4 w5", "timeout")]
    assert turns(messages, "Update")


@pytest.mark.behaviour("C", door="deepgram_turns")
@pytest.mark.parametrize("end", [(FORCE,), ()])
def test_the_last_word_right_before_the_end_is_heard(world, end) -> None:
    scene = world.make_scene([0.5, 3])
    scene = type(scene)(scene.samples[: len(scene.samples) - 800], scene.words)
    messages = play(world, scene, *end, delay_s=0.2)
    assert_sound(messages)
    [last] = turns(messages, "EndOfTurn")
    assert last["transcript"] == "w0 w1 w2" and last["trigger"] == ("manual" if end else "timeout")


@pytest.mark.behaviour("J", door="deepgram_turns")
@settings(max_examples=20, deadline=None)
@given(
    layout=st.lists(st.one_of(st.integers(1, 6), st.sampled_from([0.2, 2.0])), min_size=1, max_size=6),
    n_bytes=st.sampled_from([333, 9_601]),
    delay_s=st.sampled_from([0.0, 0.4]),
)
def test_any_packets_and_delays_give_the_words_once_and_in_order(world, layout, n_bytes, delay_s) -> None:
    scene = world.make_scene(layout)
    messages = play(world, scene, n_bytes=n_bytes, delay_s=delay_s)
    assert_sound(messages)
    texts = [m["transcript"] for m in turns(messages, "EndOfTurn")]
    assert " ".join(texts).split() == [word.text.strip() for word in scene.words]


def test_a_long_turn_is_one_across_the_cuts_of_its_segments(world) -> None:
    messages = play(world, world.make_scene([0.5, 80, 1.5]))
    [last] = turns(messages, "EndOfTurn")
    assert last["transcript"] == " ".join(f"w{index}" for index in range(80))


def test_a_likely_end_is_told_early_and_taken_back(world) -> None:
    scene = marked(world, ".", ".", pause_s=0.4, last_s=3.0)
    assert turns(play(world, scene), "EagerEndOfTurn") == []
    messages = play(world, scene, eager_eot_threshold="0.4")
    assert_sound(messages)
    events = [m["event"] for m in turns(messages) if m["event"] != "Update"]
    assert events == ["StartOfTurn", "EagerEndOfTurn", "TurnResumed", "EagerEndOfTurn", "EndOfTurn"]


def test_a_higher_threshold_waits_longer(world) -> None:
    scene = marked(world, ".", ".", pause_s=0.7, last_s=3.0)
    assert len(turns(play(world, scene, eot_threshold="0.5"), "EndOfTurn")) == 2
    assert len(turns(play(world, scene, eot_threshold="1.0"), "EndOfTurn")) == 1


@pytest.mark.parametrize("delay_s", [0.0, 0.3])
def test_the_model_of_turns_ends_turns_from_its_threshold_on(world, delay_s) -> None:
    scene = marked(world, ",", ",", ",", last_s=7.0)
    messages = play(world, scene, judge=world.TurnJudge([0.65, 0.75, 0.1]), delay_s=delay_s)
    assert_sound(messages)
    ends = turns(messages, "EndOfTurn")
    assert [(m["transcript"], m["trigger"]) for m in ends] == [("w0 w1, w2 w3,", "model"), ("w4 w5,", "timeout")]
    assert [m["end_of_turn_confidence"] for m in ends] == [0.75, 0.1]


def test_the_eager_threshold_is_the_probability_of_an_eager_end(world) -> None:
    scene = marked(world, ",", ",", ",", pause_s=0.6, last_s=3.0)
    messages = play(world, scene, judge=world.TurnJudge([0.35, 0.45, 0.9]), eager_eot_threshold="0.4")
    assert_sound(messages)
    told = [(m["event"], m["end_of_turn_confidence"]) for m in turns(messages) if m["event"] != "Update"]
    assert [event for event, _ in told] == [
        "StartOfTurn",
        "EagerEndOfTurn",
        "TurnResumed",
        "EagerEndOfTurn",
        "EndOfTurn",
    ]
    assert [confidence for event, confidence in told if event.endswith("EndOfTurn")] == [0.45, 0.9, 0.9]
    assert turns(messages, "EagerEndOfTurn")[0]["transcript"] == "w0 w1, w2 w3,"


def test_a_turn_that_reads_complete_ends_though_the_model_doubts_it(world) -> None:
    scene = marked(world, ".", last_s=4.0)
    [end] = turns(play(world, scene, judge=world.TurnJudge([0.1])), "EndOfTurn")
    assert (end["transcript"], end["trigger"]) == ("w0 w1.", "timeout")


def test_speech_without_words_is_no_turn(world) -> None:
    messages = play(world, world.make_scene([0.5, 3, 1.5]), engine=world.Engine(()))
    assert_sound(messages)
    assert turns(messages) == []


@pytest.mark.behaviour("K", door="deepgram_turns")
def test_thresholds_and_keyterms_change_in_the_middle_without_losing_audio(world) -> None:
    scene = world.make_scene([0.5, 3, 1.5, 3, 1.5])
    frames = [(at_s, message.data) for at_s, message in world.packets(scene.pcm(), 640)]
    configure = '{"type":"Configure","thresholds":{"eot_timeout_ms":600},"keyterms":["Zwolle"]}'
    for at in range(1, len(frames), 53):
        messages = play(world, scene, frames=[*frames[:at], (frames[at][0], configure), *frames[at:]])
        assert_sound(messages)
        texts = [m["transcript"] for m in turns(messages, "EndOfTurn")]
        assert " ".join(texts) == "w0 w1 w2 w3 w4 w5"
        [done] = [m for m in messages if not isinstance(m, Close) and m["type"] == "ConfigureSuccess"]
        assert done["thresholds"]["eot_timeout_ms"] == 600 and done["keyterms"] == ["Zwolle"]


@pytest.mark.parametrize("thresholds", ['{"eot_threshold":2}', '{"eot_threshold":"high"}', '{"hum":1}'])
def test_thresholds_out_of_range_are_refused_and_change_nothing(world, thresholds) -> None:
    messages = play(world, world.make_scene([0.5, 1, 1.5]), f'{{"type":"Configure","thresholds":{thresholds}}}')
    assert [m["type"] for m in messages if not isinstance(m, Close)].count("ConfigureFailure") == 1


@pytest.mark.behaviour("I", door="deepgram_turns")
def test_words_in_every_script_are_told_whole(world) -> None:
    told = [" こんにちは", " 世界", " नमस्ते", " 👩‍👩‍👧", " ไทย"]
    scene = world.make_scene([0.5, len(told), 1.0])
    words = [Word(part, word.start_sample, word.end_sample, 0.9) for part, word in zip(told, scene.words, strict=True)]
    [last] = turns(play(world, scene, engine=world.Engine(tuple(words))), "EndOfTurn")
    assert last["transcript"] == "".join(told).strip()


@settings(max_examples=100, deadline=None)
@given(st.one_of(st.binary(max_size=60), st.text(max_size=60)))
def test_whatever_the_frame_the_door_answers_with_effects(world, frame) -> None:
    admit(world).door.receive(frame, 0.0)


@pytest.mark.parametrize(("kind", "codec", "options"), [("webm", "libopus", None), ("mp4", "aac", FRAGMENTED)])
def test_a_browsers_recording_is_heard_live(world, kind, codec, options) -> None:
    scene = marked(world, ".", last_s=2.0)
    data = encoded(voiced(scene.samples, 48_000)[:, None], kind, codec, 48_000, options)
    duration_s = len(scene.samples) / SAMPLE_RATE_HZ
    starts = range(0, len(data), 400)
    frames = [((index + 1) / len(starts) * duration_s, data[at : at + 400]) for index, at in enumerate(starts)]
    messages = play(world, scene, frames=frames, encoding="", sample_rate="")
    assert_sound(messages)
    assert [m["transcript"] for m in turns(messages, "EndOfTurn")] == ["w0 w1."]


def test_what_is_no_container_is_an_error_and_a_close(world) -> None:
    messages = play(world, world.make_scene([0.5]), frames=[(0.1, b"no audio")], encoding="", sample_rate="")
    assert [m["code"] for m in messages if not isinstance(m, Close) and m["type"] == "Error"] == ["UNREADABLE_AUDIO"]
    assert next(item for item in messages if isinstance(item, Close)).code == 1008


@pytest.mark.parametrize(
    "change", [{"model": "parakeet"}, {"encoding": "speex"}, {"eot_threshold": "0.2"}, {"eot_timeout_ms": "soon"}]
)
def test_a_wrong_query_is_refused_before_the_upgrade(world, change) -> None:
    with pytest.raises(AdmissionError) as caught:
        admit(world, **change)
    assert caught.value.status == 400


def test_a_server_that_gives_up_says_so_and_closes(world) -> None:
    say, close = admit(world).door.failed(ServerError("internal", "x"))
    assert json.loads(say.frame)["type"] == "Error" and close.code == 1011
