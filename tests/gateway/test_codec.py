"""Frames to messages and back: whatever the bytes, a message or a ClientError, nothing else."""

import json
import re
from pathlib import Path

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import messages as m
from gateway.codec import CODECS, JSON_SUBPROTOCOL, MSGPACK_SUBPROTOCOL, choose_subprotocol
from gateway.errors import ERRORS, ClientError

JSON, MSGPACK = CODECS[JSON_SUBPROTOCOL], CODECS[MSGPACK_SUBPROTOCOL]
AUDIO = {"encoding": "s16le", "sample_rate_hz": 16_000}
PROTOCOL = Path(__file__).parents[2] / "gateway" / "PROTOCOL.md"

VECTORS: list[tuple[dict[str, object], m.ClientMessage]] = [
    ({"type": "hello", "audio": AUDIO}, m.Hello(audio=m.AudioSpec("s16le", 16_000))),
    (
        {"type": "hello", "audio": {**AUDIO, "channels": 2, "channel": 1}, "language": None, "vocabulary": ["Zwolle"]},
        m.Hello(audio=m.AudioSpec("s16le", 16_000, 2, 1), language=None, vocabulary=("Zwolle",)),
    ),
    ({"type": "hello", "resume": {"session_id": "x", "last_event": 3}}, m.Hello(resume=m.ResumeSpec("x", 3))),
    ({"type": "flush", "id": "a1"}, m.Flush("a1")),
    ({"type": "update", "id": "u", "hangover_ms": 700}, m.Update(id="u", hangover_ms=700)),
    ({"type": "bye"}, m.Bye()),
]

REFUSED = [
    ("not an object", "[]"),
    ("not JSON", "{"),
    ("NaN is no JSON", '{"type": "flush", "id": NaN}'),
    ("a lone surrogate", '{"type": "flush", "id": "\\ud800"}'),
    ("unknown type", '{"type": "hum"}'),
    ("no type", '{"id": "a"}'),
    ("a missing field", '{"type": "flush"}'),
    ("an unknown field", '{"type": "bye", "why": "tired"}'),
    ("a wrong type", '{"type": "flush", "id": 3}'),
    ("too long an id", json.dumps({"type": "flush", "id": "x" * 65})),
    ("hello without audio", '{"type": "hello"}'),
    ("a rate in words", '{"type": "hello", "audio": {"encoding": "s16le", "sample_rate_hz": "16k"}}'),
    ("a fractional rate", '{"type": "hello", "audio": {"encoding": "s16le", "sample_rate_hz": 16000.5}}'),
    ("a hangover out of range", json.dumps({"type": "hello", "audio": AUDIO, "hangover_ms": 99})),
    ("resume with more", json.dumps({"type": "hello", "audio": AUDIO, "resume": {"session_id": "x", "last_event": 0}})),
    ("audio as text", '{"type": "audio", "data": "AAAA"}'),
    ("nested without end", '{"a":' * 100_000),
]


@pytest.mark.parametrize(("plain", "message"), VECTORS)
def test_both_encodings_carry_every_client_message(plain: dict[str, object], message: m.ClientMessage) -> None:
    assert JSON.decode(json.dumps(plain)) == message
    assert MSGPACK.decode(msgpack.packb(plain)) == message


def test_audio_is_bytes_in_both() -> None:
    assert JSON.decode(b"\x00\x01") == m.Audio(b"\x00\x01")
    assert MSGPACK.decode(msgpack.packb({"type": "audio", "data": b"\x00\x01"})) == m.Audio(b"\x00\x01")


@pytest.mark.parametrize(("what", "frame"), REFUSED, ids=[what for what, _ in REFUSED])
def test_what_is_no_message_is_refused_with_a_reason(what: str, frame: str) -> None:
    with pytest.raises(ClientError) as caught:
        JSON.decode(frame)
    assert caught.value.code == "bad_message" and len(str(caught.value)) > 10


def test_an_error_names_the_field_and_what_is_accepted() -> None:
    with pytest.raises(ClientError, match=r">= 100.*hangover_ms"):
        JSON.decode(json.dumps({"type": "hello", "audio": AUDIO, "hangover_ms": 1}))


def test_text_where_bytes_belong_is_refused_in_messagepack() -> None:
    with pytest.raises(ClientError, match="text frame"):
        MSGPACK.decode("{}")
    with pytest.raises(ClientError, match="where bytes"):
        MSGPACK.decode(msgpack.packb({"type": "audio", "data": "AAAA"}))


@given(st.one_of(st.binary(max_size=200), st.text(max_size=200)))
def test_whatever_the_frame_it_is_a_message_or_a_client_error(frame: str | bytes) -> None:
    for codec in CODECS.values():
        try:
            assert isinstance(codec.decode(frame), m.ClientMessage)
        except ClientError:
            pass


PLAIN_VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**40), 2**40), st.floats(allow_nan=False), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)),
    max_leaves=6,
)
FIELDS = st.sampled_from(["type", "id", "audio", "model", "resume", "vocabulary", "hangover_ms", "data", "language"])


@given(st.dictionaries(FIELDS, PLAIN_VALUES), st.sampled_from(["hello", "audio", "flush", "update", "bye"]))
def test_whatever_the_fields_it_is_a_message_or_a_client_error(fields: dict[str, object], kind: str) -> None:
    plain = {**fields, "type": kind}
    for codec, frame in ((JSON, json.dumps(plain)), (MSGPACK, msgpack.packb(plain))):
        try:
            assert isinstance(codec.decode(frame), m.ClientMessage)
        except ClientError:
            pass


@pytest.mark.behaviour("I", door="native")
def test_server_messages_read_the_same_in_both_encodings() -> None:
    word = m.WordItem(" naïve", 0.1, None, 0.5)
    final = m.Final(3, 1, 2, "naïve", 0.0, 1.0, (word,), 1, "en", "silence")
    expected = {
        "type": "final",
        "event": 3,
        "segment": 1,
        "revision": 2,
        "text": "naïve",
        "start_s": 0.0,
        "end_s": 1.0,
        "words": [{"text": " naïve", "start_s": 0.1, "end_s": None, "confidence": 0.5}],
        "n_committed": 1,
        "language": "en",
        "reason": "silence",
    }
    assert json.loads(JSON.encode(final)) == expected
    assert msgpack.unpackb(MSGPACK.encode(final)) == expected


def test_subprotocol_is_the_first_known_one_and_json_without_an_offer() -> None:
    assert choose_subprotocol([]) == JSON_SUBPROTOCOL
    assert choose_subprotocol(["chat", MSGPACK_SUBPROTOCOL, JSON_SUBPROTOCOL]) == MSGPACK_SUBPROTOCOL
    assert choose_subprotocol(["chat"]) is None


# ---------------------------------------------------------------- the page and the code say the same


def table_rows(heading: str) -> dict[str, list[str]]:
    """Rows of the first table behind a heading of PROTOCOL.md, by their first cell."""
    section = PROTOCOL.read_text(encoding="utf-8").split(heading, 1)[1].split("\n#", 1)[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")][2:]
    return {cells[0].strip().strip("`"): [cell.strip() for cell in cells[1:]] for cells in rows}


def test_protocol_page_lists_every_error_with_its_close_code() -> None:
    rows = table_rows("### Errors")
    assert {code: cells[0] == "yes" for code, cells in rows.items()} == {c: k.is_fatal for c, k in ERRORS.items()}
    assert {code: cells[1] for code, cells in rows.items()} == {c: str(k.close_code or "") for c, k in ERRORS.items()}


def test_protocol_page_lists_every_field_of_hello() -> None:
    assert set(table_rows("### `hello`")) == {"type", *m.Hello.__struct_fields__}


def test_protocol_page_lists_every_server_message_with_its_fields() -> None:
    rows = table_rows("## From the server")
    kinds = {kind.__struct_config__.tag: kind for kind in (*m.Event.__args__, m.Ready, m.Ack)}
    assert set(rows) == set(kinds)
    for name, kind in kinds.items():
        if name == "final":
            continue  # "the same, with reason"
        for field in kind.__struct_fields__:
            assert field == "event" or f"`{field}`" in rows[name][0], f"{name}.{field} is not on the page"


def test_protocol_page_lists_every_warning_in_the_source() -> None:
    source = (PROTOCOL.parent / "session.py").read_text(encoding="utf-8")
    used = set(re.findall(r'(?:Warning\(\s*0,\s*|_warn_once\(\s*)"(\w+)"', source)) | {
        "vocabulary_truncated",
        "context_truncated",
    }  # engines give these
    assert used == set(table_rows("### Warnings"))
