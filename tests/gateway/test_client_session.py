"""The client's side of a session without sockets: order, limits, and what is said again after a lost connection."""

import dataclasses
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import pcm
from gateway.client_events import (
    SERVER_MESSAGES,
    Ack,
    Chunking,
    ErrorEvent,
    Final,
    Flushed,
    Limits,
    ProtocolError,
    Ready,
    Updated,
    parse,
)
from gateway.client_events import Engine as EngineInfo
from gateway.client_session import BYTES_PER_SAMPLE, FRAME_S, AudioFormat, ClientSession, Hello, Settings
from gateway.messages import ChunkingItem, ServerMessage

S16 = AudioFormat("s16le", 16_000)


def ready(
    *, taken_samples: int = 0, max_unacked_s: float = 10.0, max_frame_bytes: int = 1 << 20, protocol: int = 1
) -> Ready:
    limits = Limits(max_frame_bytes, max_unacked_s, 60.0)
    return Ready(protocol, "s1", taken_samples > 0, taken_samples, "m", None, (), (), EngineInfo("cpu", ""), (), limits)


def begun(audio: AudioFormat = S16, **limits: Any) -> ClientSession:
    session = ClientSession(Hello(audio=audio))
    session.hello()
    session.receive(ready(**limits))
    return session


def sent(session: ClientSession) -> list[Any]:
    messages = []
    while (message := session.next_message()) is not None:
        messages.append(message)
    return messages


def audio_of(messages: list[Any]) -> bytes:
    return b"".join(message for message in messages if isinstance(message, bytes))


def test_hello_names_only_what_was_chosen() -> None:
    audio = {"encoding": "s16le", "sample_rate_hz": 16_000, "channels": 1, "channel": None}
    assert ClientSession(Hello()).hello() == {"type": "hello", "audio": audio}
    chosen = ClientSession(Hello(language="de", vocabulary=("Akku",), hangover_ms=200)).hello()
    assert chosen == {"type": "hello", "audio": audio, "language": "de", "vocabulary": ["Akku"], "hangover_ms": 200}


def test_an_update_can_set_the_language_back_to_detection() -> None:
    assert Settings(language=None, vocabulary=()).message() == {"type": "update", "language": None, "vocabulary": []}


def test_chunks_are_chosen_in_hello_and_update_and_left_to_the_model_again() -> None:
    chosen = ClientSession(Hello(chunk_ms=560, second_pass=True)).hello()
    assert (chosen["chunk_ms"], chosen["second_pass"]) == (560, True)
    assert Settings(chunk_ms=None, second_pass=False).message() == {
        "type": "update",
        "chunk_ms": None,
        "second_pass": False,
    }


def test_ready_of_a_model_with_chunks_says_how_late_words_are_settled() -> None:
    message = {"type": "ready", **dataclasses.asdict(ready())}
    item = msgspec.to_builtins(ChunkingItem(320, 800, 1_120, 3_040, second_pass=False))
    assert parse({**message, "chunking": item}) == dataclasses.replace(
        ready(), chunking=Chunking(320, 800, 1_120, 3_040, False)
    )
    assert parse({**message, "chunking": None}) == ready()
    del message["chunking"]
    assert parse(message) == ready(), "a server that knows no chunks"


@pytest.mark.parametrize("bad", [{"encoding": "s12le"}, {"sample_rate_hz": 0}, {"channels": 0}])
def test_a_format_that_has_no_size_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="unknown encoding|at least 1"):
        AudioFormat(**bad)


def test_long_audio_is_cut_at_whole_samples() -> None:
    session = begun(AudioFormat("s24le", 8_000, channels=3))
    data = bytes(range(256)) * 300
    session.add_audio(data)
    frames = sent(session)
    assert audio_of(frames) == data
    assert max(map(len, frames)) <= FRAME_S * 8_000 * 9
    assert all(len(frame) % 9 == 0 for frame in frames[:-1])


def test_a_frame_never_exceeds_the_servers_limit() -> None:
    session = begun(max_frame_bytes=1_000)
    session.add_audio(bytes(5_000))
    assert max(map(len, sent(session))) <= 1_000


def test_sending_stops_at_the_limit_and_goes_on_with_the_acknowledgement() -> None:
    session = begun(max_unacked_s=1.0)
    session.add_audio(bytes(96_000))  # 3 s
    assert len(audio_of(sent(session))) == 32_000
    assert session.sent_s == 1.0
    assert not session.has_room
    session.receive(Ack(8_000))
    assert len(audio_of(sent(session))) == 16_000
    assert session.unacked_s == 2.5


def test_a_flush_waits_behind_the_audio_before_it() -> None:
    session = begun(max_unacked_s=1.0)
    session.add_audio(bytes(64_000))
    session.add_flush()
    assert all(isinstance(message, bytes) for message in sent(session))
    session.receive(Ack(16_000))
    assert sent(session)[-1] == {"type": "flush", "id": "flush-1"}


def test_after_a_lost_connection_only_what_the_server_lacks_is_sent_again() -> None:
    session = begun()
    session.add_audio(b"ab" * 4_000)
    session.add_audio(b"cd" * 4_000)
    sent(session)
    session.receive(Ack(4_000))
    assert session.hello() == {"type": "hello", "resume": {"session_id": "s1", "last_event": 0}}
    session.receive(ready(taken_samples=6_000))
    assert audio_of(sent(session)) == b"cd" * 2_000


def test_a_flush_is_said_again_unless_audio_behind_it_arrived() -> None:
    session = begun()
    session.add_audio(bytes(2_000))
    session.add_flush()
    session.add_audio(bytes(2_000))
    sent(session)
    session.receive(ready(taken_samples=1_000))
    assert sent(session)[0] == {"type": "flush", "id": "flush-1"}
    session.receive(ready(taken_samples=1_001))
    assert sent(session) == [bytes(1_998)]


def test_an_answered_flush_is_not_said_again() -> None:
    session = begun()
    session.add_audio(bytes(2_000))
    session.add_flush()
    sent(session)
    session.receive(Flushed(1, "flush-1", 0.1))
    session.receive(ready(taken_samples=500))
    assert sent(session) == [bytes(1_000)]


def test_an_answer_to_a_repeated_flush_is_seen_once() -> None:
    session = begun()
    session.add_flush()
    assert session.receive(Flushed(1, "flush-1", 0.1)) is not None
    assert session.receive(Flushed(2, "flush-1", 0.1)) is None


def test_a_refused_update_is_not_said_again() -> None:
    session = begun()
    session.add_update(Settings(task="sing"))
    sent(session)
    assert session.receive(ErrorEvent(1, "unsupported_option", "no", False, "update-1")) is not None
    session.receive(ready())
    assert sent(session) == []


def test_an_event_sent_again_is_seen_once() -> None:
    session = begun()
    final = Final(3, 1, 1, "a", 0.0, 1.0, (), 0, None, "silence")
    assert session.receive(final) is final
    assert session.receive(final) is None
    assert session.hello()["resume"]["last_event"] == 3


def test_a_server_that_forgot_acknowledged_audio_is_an_error() -> None:
    session = begun()
    session.add_audio(bytes(2_000))
    sent(session)
    session.receive(Ack(1_000))
    with pytest.raises(ProtocolError, match="goes on from byte 1000; it has acknowledged 2000"):
        session.receive(ready(taken_samples=500))


def test_another_protocol_version_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="protocol 2, this client 1"):
        begun(protocol=2)


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ([], "list where a message belongs"),
        ({"type": "song"}, "unknown type 'song'; known are ready, ack"),
        ({"type": "ack"}, "Ack without samples"),
    ],
)
def test_a_message_that_the_protocol_does_not_have_is_an_error(message: object, complaint: str) -> None:
    with pytest.raises(ProtocolError, match=complaint):
        parse(message)


def test_a_field_that_a_later_server_adds_is_left_out() -> None:
    assert parse({"type": "ack", "samples": 5, "mood": "good"}) == Ack(5)


@pytest.mark.parametrize("kind", SERVER_MESSAGES)
def test_every_message_has_the_fields_that_the_server_gives_it(kind: str) -> None:
    structs = {struct_info.tag: struct_info for struct_info in map(msgspec.inspect.type_info, get_args(ServerMessage))}
    server_fields = [field.name for field in structs[kind].fields]
    assert [field.name for field in dataclasses.fields(SERVER_MESSAGES[kind])] == server_fields


def test_the_client_knows_the_size_of_every_encoding_that_the_server_takes() -> None:
    sizes = {encoding: pcm.AudioFormat(encoding, 16_000).frame_bytes for encoding in pcm.ENCODINGS}
    assert sizes == BYTES_PER_SAMPLE


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("audio"), st.integers(1, 30_000)),
        st.tuples(st.just("flush"), st.just(0)),
        st.tuples(st.just("update"), st.just(0)),
        st.tuples(st.just("deliver"), st.integers(1, 12)),
        st.tuples(st.just("cut"), st.integers(0, 12)),
    ),
    max_size=40,
)


class Peer:
    """A server that takes what reaches it and answers at once; a cut loses what is on its way in both directions."""

    def __init__(self, session: ClientSession) -> None:
        self.session = session
        self.taken = bytearray()
        self.controls: list[tuple[str, int]] = []  # id and the audio before it
        self.events: list[Flushed | Updated] = []
        self.connect()

    def connect(self) -> None:
        hello = self.session.hello()
        self.session.receive(ready(taken_samples=len(self.taken) // 2, max_unacked_s=1.0))
        del self.taken[len(self.taken) // 2 * 2 :]
        for event in self.events:
            if event.event > hello.get("resume", {"last_event": 0})["last_event"]:
                self.session.receive(event)

    def deliver(self, n_messages: int, *, answers_arrive: bool) -> None:
        for _ in range(n_messages):
            message = self.session.next_message()
            if message is None:
                return
            for answer in self.take(message):
                if answers_arrive:
                    self.session.receive(answer)

    def take(self, message: Any) -> list[Any]:
        if isinstance(message, bytes):
            self.taken += message
            return [Ack(len(self.taken) // 2)]
        self.controls.append((message["id"], len(self.taken)))
        n_event, message_id = len(self.events) + 1, message["id"]
        is_flush = message["type"] == "flush"
        event = Flushed(n_event, message_id, 0.0) if is_flush else Updated(n_event, message_id, 0.0)
        self.events.append(event)
        return [event]


@given(STEPS)
def test_wherever_connections_break_the_server_gets_every_byte_once_and_every_message_in_its_place(steps: Any) -> None:
    session = ClientSession(Hello(audio=S16))
    peer = Peer(session)
    said = bytearray()
    places: dict[str, int] = {}
    for step, n in steps:
        match step:
            case "audio":
                data = bytes(i % 251 for i in range(len(said), len(said) + n))
                said += data
                session.add_audio(data)
            case "flush":
                places[session.add_flush()] = len(said)
            case "update":
                places[session.add_update(Settings(task="translate"))] = len(said)
            case "deliver":
                peer.deliver(n, answers_arrive=True)
            case "cut":
                peer.deliver(n, answers_arrive=False)
                peer.connect()
    peer.deliver(10_000, answers_arrive=True)
    assert bytes(peer.taken) == bytes(said)
    assert {message_id for message_id, _ in peer.controls} == set(places)
    for message_id, place in peer.controls:
        assert place == places[message_id]
