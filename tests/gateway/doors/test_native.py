"""The native protocol as a door: the simulation and the shell see the same."""

import json

import pytest

from gateway.codec import MSGPACK_SUBPROTOCOL
from gateway.doors import native
from gateway.doors.door import AdmissionError
from gateway.effects import Close
from gateway.errors import ServerError
from gateway.messages import Ack

HELLO = json.dumps({"type": "hello", "audio": {"encoding": "s16le", "sample_rate_hz": 16_000}})
BYE = json.dumps({"type": "bye"})


def test_a_conversation_through_the_door(world) -> None:
    scene = world.make_scene([0.5, 4, 1.0])
    door = native.open_door(world.knock(), world.house()).door
    frames = [(0.0, HELLO), *((at_s, audio.data) for at_s, audio in world.packets(scene.pcm())), (4.0, BYE)]
    told = world.behind(door, world.Engine(scene.words)).run(frames)
    assert told[-1].frame == Close(1000, "bye")
    messages = [json.loads(item.frame) for item in told[:-1]]
    assert [message["text"] for message in messages if message["type"] == "final"] == ["w0 w1 w2 w3"]
    assert messages[-1]["type"] == "bye"


def test_only_partials_of_a_segment_and_acks_replace_older_ones(world) -> None:
    door = native.open_door(world.knock(), world.house()).door
    [first], [second] = door.heard(0, Ack(1), 0.0), door.heard(0, Ack(2), 0.0)
    assert first.replaces == second.replaces is not None
    assert door.failed(ServerError("internal", "x"))[0].replaces is None


def test_the_key_is_a_bearer_token(world) -> None:
    assert native.key_of(world.knock(headers={"authorization": "bearer abc"})) == "abc"
    assert native.key_of(world.knock(headers={"authorization": "Basic abc"})) is None
    assert native.key_of(world.knock()) is None


def test_an_offer_of_unknown_subprotocols_is_refused_and_a_known_one_answered(world) -> None:
    assert native.open_door(world.knock(subprotocols=("x", MSGPACK_SUBPROTOCOL)), world.house()).subprotocol == (
        MSGPACK_SUBPROTOCOL
    )
    with pytest.raises(AdmissionError) as caught:
        native.open_door(world.knock(subprotocols=("chat",)), world.house())
    assert "senseway.v1.json" in native.refusal(caught.value, world.knock()).body["error"]
