"""What carriers and PBXs send on their media streams, as the same few values for all of them. Pure.

Knows each provider's messages: Twilio, Telnyx, Plivo, Exotel, Vonage, Asterisk (WebSocket and AudioSocket) and
FreeSWITCH. Does not know sessions, order or lost frames.
"""

import binascii
import itertools
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import msgspec

from gateway.doors.door import Frame, Knock, brief
from gateway.messages import AudioSpec
from gateway.pcm import MAX_RATE_HZ


@dataclass(frozen=True, slots=True)
class CallStarted:
    """A call, its audio, and what its owner said of it."""

    call_id: str
    audio: AudioSpec
    parameters: Mapping[str, str] = field(default_factory=dict)
    tracks: tuple[str, ...] = ("inbound",)  # with several channels, the name of each


@dataclass(frozen=True, slots=True)
class Media:
    """Audio of a track; with several channels it holds all of them, interleaved."""

    data: bytes
    track: str = "inbound"
    number: int | None = None
    timestamp_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Told:
    """Something beside audio that is passed on: a digit, a mark."""

    kind: str
    value: str


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A call whose audio is not decoded here: nothing would come of it."""

    why: str


@dataclass(frozen=True, slots=True)
class CallStopped:
    """The call is over."""


@dataclass(frozen=True, slots=True)
class Unreadable:
    """A message that can't be read, or audio that can't be decoded; the call goes on without it."""

    why: str


MAX_NUMBER = 1 << 53  # of a carrier's
MAX_PARAMETERS = 64  # of a call
Heard: TypeAlias = CallStarted | Media | Told | CallStopped | Unreadable | Unsupported
Dialect: TypeAlias = Callable[[Frame, Knock], Sequence[Heard]]

_ENCODINGS = {
    "audio/x-mulaw": "mulaw",
    "pcmu": "mulaw",
    "pcma": "alaw",
    "l16": "s16le",
    "audio/x-l16": "s16le",
    "g722": "g722",
    "opus": "opus",
}
_ASTERISK = {"ulaw": ("mulaw", 8_000), "alaw": ("alaw", 8_000), "slin": ("s16le", 8_000), "g722": ("g722", 16_000)}
_AUDIOSOCKET_TOO_FAST = {0x17: 96_000, 0x18: 192_000}
_AUDIOSOCKET_HZ = {0x10: 8_000, 0x11: 12_000, 0x12: 16_000, 0x13: 24_000, 0x14: 32_000, 0x15: 44_100, 0x16: 48_000}


def audio_of(payload: str) -> bytes | None:
    """The bytes of base64, also with line breaks or without padding; ``None`` if it is none."""
    bare = re.sub(r"[\s=]", "", payload)
    for text in (payload, bare + "=" * (-len(bare) % 4)):
        try:
            return binascii.a2b_base64(text, strict_mode=True)
        except (binascii.Error, ValueError):
            continue
    return None


def _object(frame: Frame) -> dict[str, Any]:
    try:
        message = msgspec.json.decode(frame)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return {}
    return message if isinstance(message, dict) else {}


def _part(message: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = message.get(name)
    return part if isinstance(part, Mapping) else {}


def _number(value: Any) -> int | None:
    """Carriers write numbers as strings. What no clock and no counter reaches is none."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) <= MAX_NUMBER else None


def _text(value: Any) -> str:
    return brief(str(value))


def _strings(value: Any) -> dict[str, str]:
    """The first of a call's parameters; more are no call's."""
    if not isinstance(value, Mapping):
        return {}
    return {_text(key): _text(value[key]) for key in itertools.islice(value, MAX_PARAMETERS)}


def _media(message: Mapping[str, Any], *, has_order: bool) -> Heard:
    media = _part(message, "media")
    data = audio_of(str(media.get("payload", "")))
    if data is None:
        return Unreadable("a media payload is no base64")
    track = _text(media.get("track", "inbound")).removesuffix("_track")
    number = _number(media.get("chunk")) if has_order else None
    return Media(data, track, number, _number(media.get("timestamp")))


def _format(given: Mapping[str, Any], encoding: str, rate: str) -> AudioSpec | None:
    name = _ENCODINGS.get(str(given.get(encoding, "audio/x-mulaw")).lower())
    rate_hz = _number(given.get(rate, 8_000))
    return None if name is None or rate_hz is None else AudioSpec(name, rate_hz)


def _started(call_id: Any, audio: AudioSpec | None, given: Any, parameters: Any) -> Heard:
    if audio is None:
        return Unsupported(f"audio in a format that is not decoded here: {_strings(given)}")
    return CallStarted(_text(call_id or "unnamed"), audio, _strings(parameters))


def twilio(frame: Frame, knock: Knock) -> Sequence[Heard]:
    """Media Streams: μ-law at 8 kHz; both tracks of a one-way stream come interleaved."""
    message = _object(frame)
    start = _part(message, "start")
    match message.get("event"):
        case "start":
            given = _part(start, "mediaFormat")
            audio = _format(given, "encoding", "sampleRate")
            return [_started(start.get("callSid"), audio, given, start.get("customParameters"))]
        case "media":
            return [_media(message, has_order=False)]
        case "dtmf":
            return [Told("dtmf", _text(_part(message, "dtmf").get("digit", "")))]
        case "mark":
            return [Told("mark", _text(_part(message, "mark").get("name", "")))]
        case "stop":
            return [CallStopped()]
        case "connected":
            return []
        case other:
            return [Unreadable(f"an unknown event {other!r}")]


def telnyx(frame: Frame, knock: Knock) -> Sequence[Heard]:
    """Frames may come in any order; ``chunk`` has theirs."""
    message = _object(frame)
    start = _part(message, "start")
    match message.get("event"):
        case "start":
            given = _part(start, "media_format")
            audio = _format(given, "encoding", "sample_rate")
            return [_started(start.get("call_control_id"), audio, given, start.get("custom_parameters"))]
        case "media":
            return [_media(message, has_order=True)]
        case "dtmf" | "mark" | "stop" | "connected":
            return twilio(frame, knock)
        case "error":
            return [Unreadable(f"the carrier reports {_part(message, 'payload').get('title')}")]
        case other:
            return [Unreadable(f"an unknown event {other!r}")]


def plivo(frame: Frame, knock: Knock) -> Sequence[Heard]:
    """No end but the socket's; timestamps are of the wall clock."""
    message = _object(frame)
    start = _part(message, "start")
    match message.get("event"):
        case "start":
            given = _part(start, "mediaFormat")
            audio = _format(given, "encoding", "sampleRate")
            return [_started(start.get("callId"), audio, given, _object(str(message.get("extra_headers", ""))))]
        case "media":
            return [_media(message, has_order=False)]
        case "dtmf":
            return [Told("dtmf", _text(_part(message, "dtmf").get("digit", "")))]
        case "playedStream":
            return [Told("mark", _text(message.get("name", "")))]
        case "clearedAudio":
            return []
        case other:
            return [Unreadable(f"an unknown event {other!r}")]


def exotel(frame: Frame, knock: Knock) -> Sequence[Heard]:
    """Twilio's shapes in other letters, with 16-bit samples."""
    message = _object(frame)
    start = _part(message, "start")
    match message.get("event"):
        case "start":
            rate_hz = _number(_part(start, "media_format").get("sample_rate", 8_000)) or 8_000
            parameters = start.get("custom_parameters")
            return [_started(start.get("call_sid"), AudioSpec("s16le", rate_hz), {}, parameters)]
        case "media":
            return [_media(message, has_order=False)]
        case _:
            return twilio(frame, knock)


def vonage(frame: Frame, knock: Knock) -> Sequence[Heard]:
    """Binary 16-bit samples; the rate stands in the first message, parameters beside it."""
    if isinstance(frame, bytes):
        return [Media(frame)]
    message = _object(frame)
    match message.get("event"):
        case "websocket:connected":
            rate = re.search(r"rate=(\d+)", str(message.get("content-type", "")))
            others = {key: value for key, value in message.items() if key not in ("event", "content-type")}
            call_id = others.get("uuid") or others.get("conversation_uuid") or knock.connection_id
            rate_hz = _number(rate[1]) if rate else None
            audio = None if rate_hz is None else AudioSpec("s16le", rate_hz)
            return [_started(call_id, audio, message, others)]
        case "websocket:dtmf":
            return [Told("dtmf", _text(message.get("digit", "")))]
        case "websocket:notify":
            return [Told("mark", _text(_part(message, "payload").get("id", "")))]
        case "websocket:cleared":
            return []
        case other:
            return [Unreadable(f"an unknown event {other!r}")]


def asterisk(frame: Frame, knock: Knock) -> Sequence[Heard]:
    """chan_websocket: binary frames in the channel's codec, control as plain text or JSON."""
    if isinstance(frame, bytes):
        return [Media(frame)]
    message = _object(frame)
    if not message:
        name, *pairs = frame.split() or [""]
        message = {"event": name, **dict(pair.split(":", 1) for pair in pairs if ":" in pair)}
    match message.get("event"):
        case "MEDIA_START":
            given = str(message.get("format", ""))
            audio = _ASTERISK.get(given) or _slin(given)
            call_id = message.get("channel_id") or message.get("connection_id")
            spec = AudioSpec(*audio) if audio else None
            return [_started(call_id, spec, message, message.get("channel_variables"))]
        case "DTMF_END":
            return [Told("dtmf", _text(message.get("digit", "")))]
        case "MEDIA_MARK_PROCESSED":
            return [Told("mark", _text(message.get("correlation_id") or message.get("id") or ""))]
        case _:
            return []  # flow control of what is played back, and answers to commands


def _slin(name: str) -> tuple[str, int] | None:
    rate = re.fullmatch(r"slin(12|16|24|32|44|48)", name)
    return ("s16le", {"44": 44_100}.get(rate[1], int(rate[1]) * 1_000)) if rate else None


def freeswitch(frame: Frame, knock: Knock) -> Sequence[Heard]:
    """Binary 16-bit samples; nothing on the wire tells rate and channels, so the URL must. Stereo is caller, callee."""
    if isinstance(frame, bytes):
        return [Media(frame)]
    message = _object(frame)
    return [Told("metadata", brief(msgspec.json.encode(message).decode() if message else frame))]


def freeswitch_call(knock: Knock) -> CallStarted | None:
    """The call that the URL of a FreeSWITCH stream describes: ``rate`` and, for both sides, ``channels=2``."""
    rate_hz, n_channels = _number(knock.param("rate")), _number(knock.param("channels") or 1)
    if rate_hz is None or n_channels not in (1, 2):
        return None
    tracks = ("inbound", "outbound")[:n_channels]
    call_id = knock.param("call") or knock.connection_id
    return CallStarted(call_id, AudioSpec("s16le", rate_hz, n_channels), dict(knock.query), tracks)


def audiosocket(frame: Frame, knock: Knock) -> Sequence[Heard]:
    """One packet of Asterisk's AudioSocket, its length left out: a type and a payload."""
    assert isinstance(frame, bytes) and frame, "a TCP door has whole packets"
    kind, payload = frame[0], frame[1:]
    if kind == 0x00:
        return [CallStopped()]
    if kind == 0x01:
        name = str(uuid.UUID(bytes=payload)) if len(payload) == 16 else payload.hex()
        return [Told("uuid", name)]
    if kind == 0x03:
        return [Told("dtmf", _text(payload.decode("ascii", "replace")))]
    if kind in _AUDIOSOCKET_HZ:
        return [Media(payload, number=None)]
    if kind in _AUDIOSOCKET_TOO_FAST:
        return [Unsupported(f"audio at {_AUDIOSOCKET_TOO_FAST[kind]} Hz; at most {MAX_RATE_HZ} Hz are read")]
    return [Unreadable(f"a packet of type {kind:#04x}")]


def audiosocket_rate(frame: Frame) -> int | None:
    """The rate of an audio packet, ``None`` for others."""
    return _AUDIOSOCKET_HZ.get(frame[0]) if isinstance(frame, bytes) and frame else None


DIALECTS: Mapping[str, Dialect] = {
    "twilio": twilio,
    "telnyx": telnyx,
    "plivo": plivo,
    "exotel": exotel,
    "vonage": vonage,
    "asterisk": asterisk,
    "freeswitch": freeswitch,
}
