"""The OpenAI Realtime door against a session on a virtual clock: order of events, items, deltas and traps."""

import base64
import itertools
import json
from dataclasses import replace

import numpy as np
import pytest
import soxr
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.doors import native, openai_realtime
from gateway.doors.door import AdmissionError
from gateway.effects import Close
from gateway.errors import ServerError
from gateway.pcm import AudioFormat, decode
from streaming.capability import Capability
from streaming.transcript import Word
from vad.audio import SAMPLE_RATE_HZ

DELTA = "conversation.item.input_audio_transcription.delta"
COMPLETED = "conversation.item.input_audio_transcription.completed"
FAILED = "conversation.item.input_audio_transcription.failed"
VAD = {"type": "server_vad"}
COMMIT = json.dumps({"type": "input_audio_buffer.commit"})
CLEAR = json.dumps({"type": "input_audio_buffer.clear"})
LAYOUTS = st.lists(st.one_of(st.integers(1, 6), st.sampled_from([0.2, 1.0, 2.0])), min_size=1, max_size=6)


def update(turns=VAD, *, format=None, transcription=None, **session):
    """A ``session.update`` with audio at the scene's rate."""
    given = {"format": format or {"type": "audio/pcm", "rate": SAMPLE_RATE_HZ}, "turn_detection": turns}
    if transcription is not None:
        given["transcription"] = transcription
    return json.dumps(
        {"type": "session.update", "session": {"type": "transcription", "audio": {"input": given}} | session}
    )


def append(data: bytes) -> str:
    return json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(data).decode()})


def appends(pcm: bytes, n_bytes=1_600, start_s=0.0, bytes_per_s=2 * SAMPLE_RATE_HZ):
    """``pcm`` in real time."""
    for at in range(0, len(pcm), n_bytes):
        packet = pcm[at : at + n_bytes]
        yield start_s + (at + len(packet)) / bytes_per_s, append(packet)


def door_of(world, engine=None, **query):
    house = world.house(engine) if engine else world.house()
    return openai_realtime.open_door(world.knock(query=tuple(query.items())), house).door


def play(world, scene, frames, *, delay_s=0.0, engine=None, is_cut=False):
    """All events that a client sees."""
    engine = engine or world.Engine(scene.words)
    simulation = world.behind(door_of(world, engine), engine, delay_s)
    return [json.loads(item.frame) for item in simulation.run(frames, is_cut=is_cut)]


def live(scene, turns=VAD, *then, n_bytes=1_600, **session):
    """Settings, the scene in real time, and frames right behind it."""
    end_s = len(scene.samples) / SAMPLE_RATE_HZ
    return [
        (0.0, update(turns, **session)),
        *appends(scene.pcm(), n_bytes),
        *((end_s, frame) for frame in then),
    ]


def kinds(events):
    return [event["type"] for event in events]


def of(events, kind):
    return [event for event in events if event["type"] == kind]


def texts(events):
    return [event["transcript"] for event in of(events, COMPLETED)]


def assert_sound(events):
    """What must hold of every conversation: unique ids, chained items, deltas that add up, one end for each item."""
    assert len({event["event_id"] for event in events}) == len(events)
    committed = of(events, "input_audio_buffer.committed")
    ids = [event["item_id"] for event in committed]
    assert [event["previous_item_id"] for event in committed] == [None, *ids[:-1]][: len(ids)]
    assert [event["item"]["id"] for event in of(events, "conversation.item.done")] == ids
    ended = [event["item_id"] for event in events if event["type"] in (COMPLETED, FAILED)]
    assert len(set(ended)) == len(ended) and set(ids) <= set(ended)
    for event in of(events, COMPLETED):
        deltas = [delta["delta"] for delta in of(events, DELTA) if delta["item_id"] == event["item_id"]]
        if event["transcript"]:
            assert "".join(deltas) == event["transcript"]
        assert event["usage"]["type"] == "duration" and event["usage"]["seconds"] >= 0
    assert of(events, "error") == []


# ---------------------------------------------------------------- one turn


def test_one_turn_has_its_events_in_order(world) -> None:
    scene = world.make_scene([0.5, 6, 1.5])
    events = play(world, scene, live(scene))
    assert_sound(events)
    assert kinds(events)[:3] == ["session.created", "session.updated", "input_audio_buffer.speech_started"]
    rest = [kind for kind in kinds(events)[3:] if kind != DELTA]
    assert rest == [
        "input_audio_buffer.speech_stopped",
        "input_audio_buffer.committed",
        "conversation.item.added",
        "conversation.item.done",
        COMPLETED,
    ]
    assert texts(events) == ["w0 w1 w2 w3 w4 w5"]
    assert len({event["item_id"] for event in events if "item_id" in event}) == 1


def test_times_count_the_audio_and_the_start_has_the_padding(world) -> None:
    scene = world.make_scene([1.0, 4, 1.5])
    for padding_ms in (0, 200, 600):
        events = play(world, scene, live(scene, {**VAD, "prefix_padding_ms": padding_ms}))
        [started] = of(events, "input_audio_buffer.speech_started")
        [stopped] = of(events, "input_audio_buffer.speech_stopped")
        assert abs(started["audio_start_ms"] - (1_000 - padding_ms)) <= 32
        assert 2_500 <= stopped["audio_end_ms"] <= 3_100


@pytest.mark.behaviour("K", door="openai_realtime")
def test_two_turns_chain_and_never_share_text(world) -> None:
    scene = world.make_scene([0.5, 3, 1.5, 2, 1.5])
    for delay_s in (0.0, 0.4, 2.5):
        events = play(world, scene, live(scene), delay_s=delay_s)
        assert_sound(events)
        assert texts(events) == ["w0 w1 w2", "w3 w4"]


@settings(max_examples=30, deadline=None)
@given(
    layout=LAYOUTS,
    n_bytes=st.sampled_from([331, 1_600, 9_600, 64_000]),
    delay_s=st.sampled_from([0.0, 0.3, 1.9]),
    turns=st.sampled_from([VAD, None]),
)
@pytest.mark.behaviour("J", door="openai_realtime")
def test_any_packets_and_delays_give_the_words_once_and_in_order(world, layout, n_bytes, delay_s, turns) -> None:
    scene = world.make_scene(layout)
    events = play(world, scene, live(scene, turns, COMMIT, n_bytes=n_bytes), delay_s=delay_s)
    assert_sound(events)
    assert " ".join(texts(events)).split() == [word.text.strip() for word in scene.words]


def test_a_long_monologue_is_one_item_across_its_cuts(world) -> None:
    """Words that a partial had settled and a cut gave to the next segment are told once."""
    scene = world.make_scene([0.5, 80, 1.5])
    for delay_s in (0.0, 0.7):
        events = play(world, scene, live(scene), delay_s=delay_s)
        assert_sound(events)
        assert texts(events) == [" ".join(f"w{index}" for index in range(80))]


# ---------------------------------------------------------------- settings


def test_the_session_is_created_before_the_client_says_anything(world) -> None:
    [created] = [json.loads(say.frame) for say in door_of(world).opened(0.0)]
    session = created["session"]
    assert session["id"].startswith("sess_") and session["object"] == "realtime.transcription_session"
    assert session["type"] == "transcription"
    given = session["audio"]["input"]
    assert given["format"] == {"type": "audio/pcm", "rate": 24_000}
    vad = {"type": "server_vad", "threshold": 0.5, "prefix_padding_ms": 300, "silence_duration_ms": 500}
    assert vad.items() <= given["turn_detection"].items()


def effective(world, *patches, engine=None):
    door = door_of(world, engine)
    answers = [json.loads(say.frame) for patch in patches for say in door.receive(patch, 0.0)]
    return answers


def test_a_turn_detection_with_only_a_type_takes_the_defaults(world) -> None:
    [updated] = effective(world, update(VAD))
    turns = updated["session"]["audio"]["input"]["turn_detection"]
    assert (turns["threshold"], turns["prefix_padding_ms"], turns["silence_duration_ms"]) == (0.5, 300, 500)


def test_an_update_changes_only_the_keys_it_has_and_null_clears(world) -> None:
    first = update({**VAD, "silence_duration_ms": 700}, transcription={"model": "reader", "language": "de"})
    second = json.dumps({"type": "session.update", "session": {"audio": {"input": {"transcription": {"prompt": "x"}}}}})
    third = json.dumps({"type": "session.update", "session": {"audio": {"input": {"turn_detection": None}}}})
    *_, before, after = effective(world, first, second, third)
    given = before["session"]["audio"]["input"]
    assert given["transcription"]["language"] == "de" and given["transcription"]["prompt"] == "x"
    assert given["turn_detection"]["silence_duration_ms"] == 700 and given["format"]["rate"] == SAMPLE_RATE_HZ
    assert after["session"]["audio"]["input"]["turn_detection"] is None


def test_values_out_of_range_are_reported_as_they_are_in_force(world) -> None:
    [updated] = effective(
        world, update({**VAD, "threshold": 1.0, "prefix_padding_ms": 90_000, "silence_duration_ms": 1})
    )
    turns = updated["session"]["audio"]["input"]["turn_detection"]
    assert (turns["threshold"], turns["prefix_padding_ms"], turns["silence_duration_ms"]) == (0.95, 2_000, 100)


def test_what_is_not_served_is_reported_as_off_and_is_no_error(world) -> None:
    patch = {
        "type": "transcription",
        "include": ["item.input_audio_transcription.logprobs", "something.else"],
        "audio": {
            "input": {
                "noise_reduction": {"type": "near_field"},
                "turn_detection": {
                    **VAD,
                    "create_response": True,
                    "interrupt_response": True,
                    "idle_timeout_ms": 9_000,
                },
            }
        },
        "tracing": None,
    }
    [updated] = effective(world, json.dumps({"type": "session.update", "session": patch}))
    assert updated["type"] == "session.updated"
    assert updated["session"]["audio"]["input"]["noise_reduction"] is None
    assert updated["session"]["audio"]["input"]["turn_detection"]["idle_timeout_ms"] is None
    assert updated["session"]["include"] == ["item.input_audio_transcription.logprobs"]


@pytest.mark.parametrize(
    ("patch", "param", "code"),
    [
        ({"type": "realtime"}, "session.type", "invalid_value"),
        ({"audio": {"input": {"format": {"type": "audio/mp3"}}}}, "session.audio.input.format.type", "invalid_value"),
        ({"audio": {"input": {"format": {"rate": 7}}}}, "session.audio.input.format.rate", "invalid_value"),
        (
            {"audio": {"input": {"turn_detection": {"type": "telepathic_vad"}}}},
            "session.audio.input.turn_detection.type",
            "invalid_value",
        ),
        (
            {"audio": {"input": {"transcription": {"model": "parakeet"}}}},
            "session.audio.input.transcription.model",
            "model_not_found",
        ),
        (
            {"audio": {"input": {"transcription": {"language": "xx"}}}},
            "session.audio.input.transcription.language",
            "invalid_value",
        ),
        (
            {"audio": {"input": {"turn_detection": {"type": "server_vad", "threshold": "high"}}}},
            "session.audio.input.turn_detection.threshold",
            "invalid_value",
        ),
        ({"audio": {"input": {"transcription": {"delay": "soon"}}}}, "session.audio.input.transcription.delay", None),
        (
            {"audio": {"input": {"transcription": {"keywords": "x"}}}},
            "session.audio.input.transcription.keywords",
            None,
        ),
        (
            {"audio": {"input": {"turn_detection": {"type": "semantic_vad", "eagerness": "keen"}}}},
            "session.audio.input.turn_detection.eagerness",
            "invalid_value",
        ),
        ({"audio": []}, "session.audio", "invalid_value"),
    ],
)
def test_a_wrong_field_is_refused_with_its_path_and_nothing_changes(world, patch, param, code) -> None:
    door = door_of(world)
    bad = json.dumps({"type": "session.update", "event_id": "mine", "session": patch})
    [before] = [json.loads(say.frame) for say in door.receive(update(VAD), 0.0)]
    [error] = [json.loads(say.frame) for say in door.receive(bad, 0.0)]
    [after] = [json.loads(say.frame) for say in door.receive(update(VAD), 0.0)]
    assert error["type"] == "error" and error["error"]["param"] == param and error["error"]["event_id"] == "mine"
    assert error["error"]["code"] == (code or "invalid_value") and error["error"]["type"] == "invalid_request_error"
    assert before["session"] == after["session"]


def test_names_of_the_hosted_service_mean_the_default_model(world) -> None:
    for name in ("gpt-4o-transcribe", "gpt-realtime-whisper", "whisper-1", "reader"):
        [updated] = effective(world, update(VAD, transcription={"model": name}))
        assert updated["session"]["audio"]["input"]["transcription"]["model"] == "reader"


def test_the_model_can_not_change_behind_audio(world) -> None:
    engines = [world.Engine(()), world.Engine(())]
    cards = {"reader": engines[0].card, "other": engines[1].card}
    house = world.house()
    door = openai_realtime.open_door(world.knock(), type(house)(cards, house.gate, house.session)).door
    change = update(VAD, transcription={"model": "other"})
    door.receive(append(b"\0\0"), 0.0)
    [error] = [json.loads(say.frame) for say in door.receive(change, 0.0)]
    assert error["error"]["param"].endswith("transcription.model")


def test_the_language_of_the_client_reaches_the_engine_without_its_region(world) -> None:
    scene = world.make_scene([0.5, 2, 1.5])
    simulation = world.behind(door_of(world, engine := world.Engine(scene.words)), engine)
    simulation.run(live(scene, VAD, transcription={"language": "de-DE", "keywords": ["Akku"], "prompt": "Guten Tag"}))
    [stream] = simulation.sessions[0]._streams.values()
    assert (stream.options.language, stream.options.vocabulary, stream.options.context) == (
        "de",
        ("Akku",),
        "Guten Tag",
    )


@pytest.mark.behaviour("K", door="openai_realtime")
def test_settings_change_in_the_middle_without_losing_audio(world) -> None:
    scene = world.make_scene([0.5, 3, 1.5, 3, 1.5])
    frames = list(live(scene))
    for at in range(2, len(frames), 17):
        change = (frames[at][0], update({**VAD, "silence_duration_ms": 300}, transcription={"language": "de"}))
        events = play(world, scene, [*frames[:at], change, *frames[at:]])
        assert_sound(events)
        assert " ".join(texts(events)) == "w0 w1 w2 w3 w4 w5"


@pytest.mark.behaviour("J", door="openai_realtime")
def test_the_format_can_change_in_the_middle(world) -> None:
    """First half at 16 kHz, second at 8: the same words, on one clock."""
    scene = world.make_scene([0.5, 3, 1.5, 3, 1.5])
    cut = int(2.6 * SAMPLE_RATE_HZ)
    head, tail = scene.pcm()[: 2 * cut], (scene.samples[cut::2] * 32_767).astype("<i2").tobytes()
    frames = [
        (0.0, update(VAD)),
        *appends(head),
        (2.6, update(VAD, format={"type": "audio/pcm", "rate": 8_000})),
        *appends(tail, start_s=2.6, bytes_per_s=16_000),
    ]
    events = play(world, scene, frames)
    assert_sound(events)
    assert texts(events) == ["w0 w1 w2", "w3 w4 w5"]
    second = of(events, "input_audio_buffer.speech_started")[1]
    assert abs(second["audio_start_ms"] - (3_200 - 300)) <= 40


# ---------------------------------------------------------------- turns by the words


def with_marks(world, marks):
    """Words with pauses of a second between them; ``marks`` stand behind the words."""
    scene = world.make_scene([0.5, *(item for _ in marks for item in (1, 1.0)), 9.0])
    words = [replace(word, text=word.text + mark) for word, mark in zip(scene.words, marks, strict=True)]
    return type(scene)(scene.samples, tuple(words))


@pytest.mark.parametrize("delay_s", [0.0, 0.2])
def test_semantic_vad_waits_for_a_sentence_that_reads_complete(world, delay_s) -> None:
    scene = with_marks(world, [",", "", ".", "", "?"])
    events = play(world, scene, live(scene, {"type": "semantic_vad"}), delay_s=delay_s)
    assert_sound(events)
    assert texts(events) == ["w0, w1 w2.", "w3 w4?"]


def test_semantic_vad_waits_no_longer_than_its_eagerness_says(world) -> None:
    scene = with_marks(world, [","])
    ends_ms = []
    for eagerness in ("low", "medium", "high"):
        frames = live(scene, {"type": "semantic_vad", "eagerness": eagerness})
        engine = world.Engine(scene.words)
        told = world.behind(door_of(world, engine), engine).run(frames)
        [at_s] = [item.at_s for item in told if "speech_stopped" in item.frame]
        ends_ms.append(round((at_s - 0.85) * 1_000))
    assert ends_ms == pytest.approx([8_000, 4_000, 2_000], abs=120)


JUDGED_AS_OVER_S = {
    "low": (0.7, 0.8),
    "medium": (0.6, 0.5),
    "high": (0.5, 0.3),
}  # from which probability, after how long


@pytest.mark.parametrize("eagerness", JUDGED_AS_OVER_S)
def test_semantic_vad_goes_by_the_model_of_turns_where_there_is_one(world, eagerness) -> None:
    threshold, done_s = JUDGED_AS_OVER_S[eagerness]
    for mark, probability, expected_s in (
        (",", threshold, done_s),
        (".", threshold - 0.01, {"low": 2.5, "medium": 1.5, "high": 1.0}[eagerness]),
        (",", threshold - 0.01, {"low": 8.0, "medium": 4.0, "high": 2.0}[eagerness]),
    ):
        scene = with_marks(world, [mark])
        engine, judge = world.Engine(scene.words), world.TurnJudge([probability])
        door = openai_realtime.open_door(world.knock(), world.house(engine, has_turn_model=True)).door
        told = world.behind(door, engine, judge=judge).run(
            live(scene, {"type": "semantic_vad", "eagerness": eagerness})
        )
        [at_s] = [item.at_s for item in told if "speech_stopped" in item.frame]
        assert at_s - 0.85 == pytest.approx(expected_s, abs=0.12)


def test_with_a_model_of_turns_punctuation_is_not_needed(world) -> None:
    engine = world.Engine(world.make_scene([0.5, 2, 1.5]).words)
    engine.card = replace(engine.card, capabilities=engine.card.capabilities - {Capability.PUNCTUATION})
    scene = world.make_scene([0.5, 2, 1.5])
    door = openai_realtime.open_door(world.knock(), world.house(engine, has_turn_model=True)).door
    told = world.behind(door, engine, judge=world.TurnJudge([0.9])).run(live(scene, {"type": "semantic_vad"}))
    assert [item for item in told if "speech_stopped" in item.frame]


def test_from_semantic_vad_back_to_server_vad_nothing_is_judged(world) -> None:
    scene = world.make_scene([0.5, 1, 1.0, 1, 1.0])
    engine, judge = world.Engine(scene.words), world.TurnJudge([0.9])
    door = openai_realtime.open_door(world.knock(), world.house(engine, has_turn_model=True)).door
    frames = live(scene, {"type": "semantic_vad"})
    middle = next(index for index, (at_s, _) in enumerate(frames) if at_s > 0.6)
    frames[middle:middle] = [(frames[middle][0], update({"type": "server_vad"}))]
    world.behind(door, engine, judge=judge).run(frames)
    assert len(judge.heard) == 1  # in the turn that had begun before


def test_semantic_vad_is_reported_as_it_is_in_force(world) -> None:
    for eagerness, shown in ((None, "medium"), ("auto", "medium"), ("high", "high")):
        [updated] = effective(world, update({"type": "semantic_vad", "eagerness": eagerness}))
        turns = updated["session"]["audio"]["input"]["turn_detection"]
        assert turns == {"type": "semantic_vad", "eagerness": shown}


def test_a_model_without_punctuation_can_not_go_by_sentences(world) -> None:
    card = replace(world.Engine(()).card, capabilities=frozenset())
    house = world.house()
    door = openai_realtime.open_door(world.knock(), type(house)({"reader": card}, house.gate, house.session)).door
    [error] = [json.loads(say.frame) for say in door.receive(update({"type": "semantic_vad"}), 0.0)]
    assert error["error"]["param"] == "session.audio.input.turn_detection.type"


# ---------------------------------------------------------------- the client commits


def test_a_client_that_commits_gets_one_item_each_and_no_speech_events(world) -> None:
    scene = world.make_scene([0.3, 2, 1.0, 2, 0.3])
    events = play(world, scene, live(scene, None, COMMIT, CLEAR))
    assert_sound(events)
    assert texts(events) == ["w0 w1 w2 w3"]
    assert not any("speech" in kind for kind in kinds(events))
    assert kinds(events)[-1] in (COMPLETED, "input_audio_buffer.cleared")


def test_deltas_before_the_commit_have_the_id_that_it_confirms(world) -> None:
    scene = world.make_scene([0.3, 12, 1.0])
    events = play(world, scene, live(scene, None, COMMIT))
    committed = of(events, "input_audio_buffer.committed")[0]
    before = [event for event in of(events, DELTA) if events.index(event) < events.index(committed)]
    assert before and {event["item_id"] for event in before} == {committed["item_id"]}


def test_several_commits_share_the_words_between_them(world) -> None:
    scene = world.make_scene([0.3, 2, 0.3, 3, 0.3])
    pcm = scene.pcm()
    cut = 2 * int(1.2 * SAMPLE_RATE_HZ)
    for delay_s in (0.0, 0.8):
        frames = [
            (0.0, update(None)),
            *appends(pcm[:cut]),
            (1.2, COMMIT),
            *appends(pcm[cut:], start_s=1.2),
            (3.0, COMMIT),
        ]
        events = play(world, scene, frames, delay_s=delay_s)
        assert_sound(events)
        assert texts(events) == ["w0 w1", "w2 w3 w4"]


@pytest.mark.parametrize("turns", [None, VAD])
def test_a_commit_of_silence_is_committed_and_completed_with_empty_text(world, turns) -> None:
    scene = world.make_scene([0.5])
    events = play(world, scene, live(scene, turns, COMMIT))
    assert_sound(events)
    assert texts(events) == [""]
    assert len(of(events, "input_audio_buffer.committed")) == 1


def test_a_commit_of_silence_behind_a_turn_is_an_item_of_its_own(world) -> None:
    scene = world.make_scene([0.3, 2, 2.0])
    events = play(world, scene, live(scene, VAD, COMMIT))
    assert_sound(events)
    assert texts(events) == ["w0 w1", ""]


def test_a_commit_in_mid_turn_ends_it(world) -> None:
    scene = world.make_scene([0.3, 3])
    events = play(world, scene, live(scene, VAD, COMMIT))
    assert_sound(events)
    assert texts(events) == ["w0 w1 w2"]


def test_a_commit_of_nothing_is_an_error_and_the_session_goes_on(world) -> None:
    scene = world.make_scene([0.3, 2, 0.3])
    events = play(world, scene, [(0.0, COMMIT), *live(scene, None, COMMIT, COMMIT)])
    assert [event["error"]["code"] for event in of(events, "error")] == ["input_audio_buffer_commit_empty"] * 2
    assert texts(events) == ["w0 w1"]


@pytest.mark.parametrize("gap_s", [0.0, 0.1, 0.2])
@pytest.mark.parametrize("turns", [None, VAD])
@pytest.mark.behaviour("C", door="openai_realtime")
def test_the_last_word_right_before_a_commit_is_heard(world, turns, gap_s) -> None:
    scene = world.make_scene([0.5, 3, gap_s])
    scene = type(scene)(scene.samples[: len(scene.samples) - 800], scene.words)
    events = play(world, scene, live(scene, turns, COMMIT), delay_s=0.2)
    assert texts(events) == ["w0 w1 w2"]


# ---------------------------------------------------------------- clear, and changes of who commits


@pytest.mark.parametrize("turns", [None, VAD])
@pytest.mark.parametrize("delay_s", [0.0, 0.6])
def test_cleared_audio_gives_no_text_and_what_follows_does(world, turns, delay_s) -> None:
    scene = world.make_scene([0.3, 3, 0.5, 2, 1.5])
    pcm = scene.pcm()
    cut = 2 * int(1.4 * SAMPLE_RATE_HZ)
    frames = [
        (0.0, update(turns)),
        *appends(pcm[:cut]),
        (1.4, CLEAR),
        *appends(pcm[cut:], start_s=1.4),
        (5.0, COMMIT),
    ]
    events = play(world, scene, frames, delay_s=delay_s)
    assert len(of(events, "input_audio_buffer.cleared")) == 1
    spoken = [text for text in texts(events) if text]
    assert spoken == ["w3 w4"] or spoken == [
        "w2 w3 w4"
    ]  # a word cut in two by the clear belongs to neither or the rest
    ends = [event["item_id"] for event in events if event["type"] == COMPLETED]
    assert len(set(ends)) == len(ends)
    assert {event["item_id"] for event in of(events, DELTA)} <= set(ends)


def test_a_client_may_go_from_commits_to_turns_and_back(world) -> None:
    scene = world.make_scene([0.3, 2, 1.0, 2, 1.0, 2, 1.0])
    frames = list(live(scene, None))
    for first, second in itertools.product(range(5, len(frames), 31), range(20, len(frames), 37)):
        if first < second:
            changed = [
                *frames[:first],
                (frames[first][0], update(VAD)),
                *frames[first:second],
                (frames[second][0], update(None)),
                *frames[second:],
                (frames[-1][0], COMMIT),
            ]
            events = play(world, scene, changed)
            assert_sound(events)
            assert " ".join(" ".join(texts(events)).split()) == "w0 w1 w2 w3 w4 w5"


# ---------------------------------------------------------------- odd input


@pytest.mark.behaviour("J", door="openai_realtime")
def test_appends_of_one_byte_of_odd_length_and_of_nothing_join_to_the_same(world) -> None:
    scene = world.make_scene([0.5, 2, 1.0])
    whole = play(world, scene, live(scene))
    pcm = scene.pcm()
    sizes = itertools.cycle([1, 0, 333, 1, 3_001, 0, 4_444])
    frames, at = [(0.0, update(VAD))], 0
    while at < len(pcm):
        packet = pcm[at : at + next(sizes)]
        at += len(packet)
        frames.append((at / 32_000, append(packet)))
    assert texts(play(world, scene, frames)) == texts(whole) == ["w0 w1"]


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        ("{", "invalid_event"),
        ("[]", "invalid_event"),
        ('{"type": 7}', "invalid_event"),
        ('{"type": "input_audio_buffer.append"}', "invalid_value"),
        ('{"type": "input_audio_buffer.append", "audio": "not base64!"}', "invalid_value"),
        ('{"type": "input_audio_buffer.append", "audio": 7}', "invalid_event"),
        ('{"type": "response.create"}', "invalid_value"),
        ('{"type": "conversation.item.delete", "item_id": "x"}', "invalid_value"),
        ('{"type": "transcription_session.update", "session": {}}', "invalid_value"),
        ('{"type": "session.update"}', "invalid_value"),
        (b"\0\1", "invalid_value"),
    ],
)
@pytest.mark.behaviour("J", door="openai_realtime")
def test_a_bad_frame_is_an_error_event_and_nothing_is_lost(world, frame, code) -> None:
    scene = world.make_scene([0.5, 2, 1.0])
    frames = list(live(scene))
    events = play(world, scene, [*frames[:12], (frames[12][0], frame), *frames[12:]])
    [error] = of(events, "error")
    assert error["error"]["code"] == code and error["error"]["message"]
    assert texts(events) == ["w0 w1"]


@settings(max_examples=200, deadline=None)
@given(st.one_of(st.binary(max_size=60), st.text(max_size=60)))
def test_whatever_the_frame_the_door_answers_with_effects(world, frame) -> None:
    door_of(world).receive(frame, 0.0)


@settings(max_examples=200, deadline=None)
@given(
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(-9, 99_999), st.text(max_size=6)),
        lambda inner: st.one_of(
            st.lists(inner, max_size=3),
            st.dictionaries(
                st.sampled_from(
                    ["type", "audio", "input", "format", "rate", "transcription", "turn_detection", "include", "model"]
                    + ["language", "languages", "keywords", "prompt", "delay", "threshold", "silence_duration_ms"]
                ),
                inner,
                max_size=4,
            ),
        ),
        max_leaves=12,
    )
)
def test_whatever_the_session_object_it_is_taken_or_refused(world, session) -> None:
    [say] = door_of(world).receive(json.dumps({"type": "session.update", "session": session}), 0.0)
    assert json.loads(say.frame)["type"] in ("session.updated", "error")


@pytest.mark.behaviour("I", door="openai_realtime")
def test_words_in_every_script_are_told_whole(world) -> None:
    """Deltas end only between words, so never inside a character or a joined emoji."""
    said = [" こんにちは", "世界", " नमस्ते", " 👩‍👩‍👧", " e\u0301t\u0065\u0301", " ไทย"]
    scene = world.make_scene([0.5, len(said), 1.0])
    words = [Word(text, word.start_sample, word.end_sample, 0.9) for text, word in zip(said, scene.words, strict=True)]
    events = play(world, scene, live(scene), engine=world.Engine(tuple(words)))
    assert_sound(events)
    assert texts(events) == ["".join(said).strip()]
    starts = {"".join(said).strip().find(part.strip()) for part in said}
    position = 0
    for event in of(events, DELTA):
        assert position in {max(0, start - 1) for start in starts} | starts
        position += len(event["delta"])


@pytest.mark.behaviour("J", door="openai_realtime")
@pytest.mark.parametrize("rate_hz", [8_000, 11_025, 16_000, 22_050, 24_000, 44_100, 48_000])
def test_every_rate_gives_the_same_words_at_the_same_times(world, rate_hz) -> None:
    scene = world.make_scene([0.5, 3, 1.5, 2, 1.5])
    pcm = (soxr.resample(scene.samples, SAMPLE_RATE_HZ, rate_hz) * 32_767).astype("<i2").tobytes()
    frames = [
        (0.0, update(VAD, format={"type": "audio/pcm", "rate": rate_hz})),
        *appends(pcm, n_bytes=1_001, bytes_per_s=2 * rate_hz),
    ]
    assert_same_conversation(play(world, scene, frames), play(world, scene, live(scene)))


@pytest.mark.behaviour("J", door="openai_realtime")
@pytest.mark.parametrize(("name", "encoding"), [("audio/pcmu", "mulaw"), ("audio/pcma", "alaw")])
def test_telephone_encodings_give_the_same_words_at_the_same_times(world, name, encoding) -> None:
    scene = world.make_scene([0.5, 3, 1.5, 2, 1.5])
    table = decode(bytes(range(256)), AudioFormat(encoding, 8_000)).samples
    data = bytes(int(np.argmin(np.abs(table - sample))) for sample in scene.samples[::2])
    frames = [(0.0, update(VAD, format={"type": name})), *appends(data, n_bytes=160, bytes_per_s=8_000)]
    assert_same_conversation(play(world, scene, frames), play(world, scene, live(scene)))


def assert_same_conversation(events, expected) -> None:
    assert_sound(events)
    assert texts(events) == texts(expected) == ["w0 w1 w2", "w3 w4"]
    for kind, field in (("speech_started", "audio_start_ms"), ("speech_stopped", "audio_end_ms")):
        times = [
            [event[field] for event in of(conversation, f"input_audio_buffer.{kind}")]
            for conversation in (events, expected)
        ]
        assert np.abs(np.subtract(*times)).max() <= 80


@settings(max_examples=20, deadline=None)
@given(layout=LAYOUTS, delay_s=st.sampled_from([0.0, 0.4]), turns=st.sampled_from([True, False]))
def test_the_text_is_that_of_the_native_protocol_under_the_same_settings(world, layout, delay_s, turns) -> None:
    scene = world.make_scene(layout)
    gate = world.house().gate
    same = {"threshold": gate.threshold, "prefix_padding_ms": gate.pre_roll_ms, "silence_duration_ms": gate.hangover_ms}
    here = play(world, scene, live(scene, {**VAD, **same} if turns else None, COMMIT), delay_s=delay_s)
    door = native.open_door(world.knock(), world.house()).door
    hello = json.dumps({"type": "hello", "audio": {"encoding": "s16le", "sample_rate_hz": SAMPLE_RATE_HZ}})
    end_s = len(scene.samples) / SAMPLE_RATE_HZ
    audio = [(at_s, message.data) for at_s, message in world.packets(scene.pcm(), 1_600)]
    told = world.behind(door, world.Engine(scene.words), delay_s).run(
        [(0.0, hello), *audio, (end_s, json.dumps({"type": "bye"}))]
    )
    there = [json.loads(item.frame) for item in told[:-1]]
    finals = [message["text"] for message in there if message["type"] == "final" and message["text"]]
    assert " ".join(text for text in texts(here) if text) == " ".join(finals)


# ---------------------------------------------------------------- extras, failures, the end


def test_log_probabilities_come_when_asked_for(world) -> None:
    scene = world.make_scene([0.5, 2, 1.0])
    events = play(world, scene, live(scene, include=["item.input_audio_transcription.logprobs"]))
    [completed] = of(events, COMPLETED)
    assert "".join(item["token"] for item in completed["logprobs"]).strip() == completed["transcript"]
    assert all(item["logprob"] <= 0 for item in completed["logprobs"])
    assert "logprobs" not in of(play(world, scene, live(scene)), COMPLETED)[0]


def test_the_language_heard_is_named(world) -> None:
    scene = world.make_scene([0.5, 2, 1.0])
    assert of(play(world, scene, live(scene)), COMPLETED)[0]["languages"] == [{"code": "en"}]


def test_a_turn_that_the_model_fails_on_is_failed_and_is_no_error_event(world) -> None:
    scene = world.make_scene([0.5, 2, 1.5, 2, 1.5])
    engine = world.Engine(scene.words, fail_on=frozenset(range(1, 5)))
    events = play(world, scene, live(scene), engine=engine)
    assert_sound(events)
    assert kinds(events).count(FAILED) >= 1
    assert of(events, FAILED)[0]["error"]["code"] == "decode_failed"
    assert texts(events)[-1:] == ["w2 w3"]


def test_warnings_come_only_to_those_who_ask(world) -> None:
    door = door_of(world)
    from gateway.messages import Warning

    assert door.heard(0, Warning(0, "vocabulary_truncated", "x"), 0.0) == []
    door.receive(update(VAD, include=["senseway.warning"]), 0.0)
    [say] = door.heard(0, Warning(0, "vocabulary_truncated", "x"), 0.0)
    assert json.loads(say.frame)["code"] == "vocabulary_truncated"


@pytest.mark.behaviour("K", door="openai_realtime")
def test_a_client_that_vanishes_leaves_no_session(world) -> None:
    scene = world.make_scene([0.5, 3])
    simulation = world.behind(door_of(world, engine := world.Engine(scene.words)), engine)
    simulation.run(live(scene), is_cut=True)
    assert simulation.sessions == {}


@pytest.mark.parametrize(
    ("code", "close_code"), [("server_full", 1013), ("shutting_down", 1012), ("internal", 1011), ("too_slow", 1008)]
)
def test_the_server_ends_a_connection_with_a_close_code_and_no_error_event(world, code, close_code) -> None:
    assert door_of(world).failed(ServerError(code, "x")) == [Close(close_code, code)]


# ---------------------------------------------------------------- the handshake


@pytest.mark.parametrize(
    "query",
    [{}, {"intent": "transcription"}, {"model": "reader"}, {"intent": "transcription", "model": "gpt-4o-transcribe"}],
)
def test_every_way_to_ask_for_a_transcription_session_is_let_in(world, query) -> None:
    assert door_of(world, **query)


@pytest.mark.parametrize(
    ("query", "status", "code"),
    [({"intent": "conversation"}, 400, "invalid_value"), ({"model": "parakeet"}, 404, "model_not_found")],
)
def test_a_wrong_query_is_refused_before_the_upgrade(world, query, status, code) -> None:
    with pytest.raises(AdmissionError) as caught:
        door_of(world, **query)
    assert caught.value.status == status
    body = openai_realtime.refusal(caught.value, world.knock()).body["error"]
    assert body["code"] == code and body["type"] == "invalid_request_error" and body["message"]


def test_the_key_is_read_from_the_header_or_the_browsers_subprotocol(world) -> None:
    key_of = openai_realtime.key_of
    assert key_of(world.knock(headers={"authorization": "Bearer abc"})) == "abc"
    assert key_of(world.knock(subprotocols=("realtime", "openai-insecure-api-key.abc"))) == "abc"
    assert key_of(world.knock(subprotocols=("realtime",))) is None


def test_a_browser_is_answered_with_the_subprotocol_realtime_only(world) -> None:
    offered = ("realtime", "openai-insecure-api-key.abc")
    assert openai_realtime.open_door(world.knock(subprotocols=offered), world.house()).subprotocol == "realtime"
    assert openai_realtime.open_door(world.knock(), world.house()).subprotocol is None
