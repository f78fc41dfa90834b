"""The doors of carriers and PBXs: a call's media stream in, a transcript of each leg out to whoever follows the call.

Knows calls, tracks and what is passed on beside audio. What a provider's messages look like is its dialect's to know;
nothing but audio goes back to a carrier, so transcripts are published under the call's name.
"""

import base64
import hashlib
import hmac
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec

from gateway.doors.door import (
    Admission,
    AdmissionError,
    Door,
    DoorEffect,
    Frame,
    House,
    Knock,
    LastWords,
    Open,
    Publish,
    Refusal,
    Say,
    Tell,
    brief,
)
from gateway.doors.jitter import Reorderer
from gateway.doors.telephony_dialects import (
    DIALECTS,
    CallStarted,
    CallStopped,
    Dialect,
    Heard,
    Media,
    Told,
    Unreadable,
    Unsupported,
    audiosocket,
    audiosocket_rate,
    freeswitch_call,
)
from gateway.effects import Close, Said, SentencePaused, UtteranceOver
from gateway.errors import GatewayError
from gateway.live_audio import LiveDecoder, Samples, g722, has_codecs, opus_packets
from gateway.messages import Ack, Audio, AudioSpec, Bye, Farewell, Hello, Ready, plain
from gateway.pcm import AudioFormat
from streaming.engine import DecodeOptions, UnsupportedOptionError
from vad.audio import SAMPLE_RATE_HZ

NAME = "telephony"
RESUMES = False
PATH = "/telephony/"
FREESWITCH_SUBPROTOCOL = "audio.drachtio.org"
MAX_CODED_BYTES = 16_000  # of a frame that is decoded at once: 2 s of G.722, where carriers send 20 ms
MAX_TRACKS = 2  # the caller's and the callee's
_SILENCE = {"mulaw": b"\xff", "alaw": b"\xd5", "s16le": b"\0\0", "s16be": b"\0\0", "f32le": bytes(4)}
CODECS: Mapping[str, Callable[[], LiveDecoder]] = {"g722": g722, "opus": opus_packets}
_CLOSE_CODES = {"server_full": 1013, "shutting_down": 1012, "internal": 1011}


def _decoded(decoder: LiveDecoder, frame: bytes) -> bytes:
    return _as_bytes(decoder.push(frame))


def _as_bytes(samples: Samples) -> bytes:
    return samples.astype("<f4", copy=False).tobytes()


class TelephonyDoor:
    """One media stream of one call."""

    next_wake_s = None

    def __init__(self, knock: Knock, house: House, provider: str, dialect: Dialect) -> None:
        self._knock = knock
        self._house = house
        self._provider = provider
        self._dialect = dialect
        self._call: CallStarted | None = None
        self._call_id = knock.connection_id
        self._tracks: dict[str, int] = {}
        self._orders: dict[str, Reorderer] = {}
        self._decoders: dict[str, LiveDecoder] = {}  # of tracks in a codec
        self._codec: Callable[[], LiveDecoder] | None = None
        self._n_over = 0
        self._is_early_told = False  # that audio comes before its call has begun
        self._is_ending = False

    # ------------------------------------------------------------------ the connection

    def opened(self, now_s: float) -> Sequence[DoorEffect]:
        """Most calls say what they are in their first message; FreeSWITCH's URL does."""
        call = freeswitch_call(self._knock) if self._provider == "freeswitch" else None
        return self._begin(call) if call else []

    def wake(self, now_s: float) -> list[DoorEffect]:
        """Never asked for."""
        return []

    def peer_gone(self, now_s: float) -> Sequence[DoorEffect]:
        """The caller hung up, perhaps inside a word: what was said is still worth hearing."""
        return self._end()

    def failed(self, error: GatewayError) -> list[LastWords]:
        """A close code; carriers have no messages for errors."""
        return [Close(_CLOSE_CODES.get(error.code, 1008), error.code)]

    # ------------------------------------------------------------------ from the carrier

    def receive(self, frame: Frame, now_s: float) -> Sequence[DoorEffect]:
        """Whatever the dialect makes of a frame. A bad one is told and skipped: the call goes on."""
        if self._is_ending:
            return []
        effects: list[DoorEffect] = []
        if self._call is None and (rate_hz := self._audiosocket_hz(frame)) is not None:
            effects += self._begin(CallStarted(self._call_id, AudioSpec("s16le", rate_hz)))
        for heard in self._dialect(frame, self._knock):
            effects += self._take(heard)
        return effects

    def _audiosocket_hz(self, frame: Frame) -> int | None:
        return audiosocket_rate(frame) if self._dialect is audiosocket else None

    def _take(self, heard: Heard) -> Sequence[DoorEffect]:
        match heard:
            case CallStarted():
                return self._begin(heard)
            case Media():
                return self._media(heard)
            case Told("uuid", call_id):
                self._call_id = call_id
                return []
            case Told(kind, value):
                return [self._publish(kind, value=value)]
            case Unreadable(why):
                return [self._publish("warning", message=why)]
            case Unsupported(why):
                return self._unsupported(why)
            case CallStopped():
                return self._end()

    def _begin(self, call: CallStarted) -> Sequence[DoorEffect]:
        if self._call is not None:
            return [self._publish("warning", message="the call was begun twice; the first beginning holds")]
        if call.audio.encoding in CODECS and not has_codecs():
            return self._unsupported(
                f"{call.audio.encoding} is not decoded here, where senseway[media] is not installed"
            )
        self._codec = CODECS.get(call.audio.encoding)
        if self._codec is not None:
            call = replace(call, audio=AudioSpec("f32le", SAMPLE_RATE_HZ))
        elif call.audio.encoding == "s16le" and self._knock.param("byte_order") == "big":
            call = replace(call, audio=msgspec.structs.replace(call.audio, encoding="s16be"))
        try:
            AudioFormat(call.audio.encoding, call.audio.sample_rate_hz, call.audio.channels)
        except ValueError as error:
            return self._unsupported(str(error))
        self._call, self._call_id = call, call.call_id
        effects: list[DoorEffect] = [
            self._publish("call_started", provider=self._provider, parameters=dict(call.parameters))
        ]
        if call.audio.channels > 1:
            for track in call.tracks:
                effects += self._open(track)
        return effects

    def _unsupported(self, why: str) -> list[DoorEffect]:
        return [self._publish("warning", message=why), Close(1003, "unsupported audio")]

    def _open(self, track: str) -> Sequence[DoorEffect]:
        assert self._call is not None
        audio = self._call.audio
        index = self._tracks[track] = len(self._tracks)
        audio_format = AudioFormat(audio.encoding, audio.sample_rate_hz, audio.channels)
        bytes_per_s = audio_format.frame_bytes * audio.sample_rate_hz
        decode = None
        if self._codec is not None:
            self._decoders[track] = self._codec()
            decode = partial(_decoded, self._decoders[track])
        self._orders[track] = Reorderer(bytes_per_s, _SILENCE[audio.encoding] * audio.channels, decode)
        channel = index if audio.channels > 1 else None
        spec = AudioSpec(audio.encoding, audio.sample_rate_hz, audio.channels, channel)
        language, complaint = self._language()
        return [*complaint, Open(index), Tell(index, Hello(audio=spec, language=language))]

    def _language(self) -> tuple[str | None, list[DoorEffect]]:
        """What the call's parameters say, where the model knows it."""
        assert self._call is not None
        asked = self._call.parameters.get("language", "").partition("-")[0].lower() or None
        try:
            self._house.cards[self._house.default_model].check(DecodeOptions(language=asked))
        except UnsupportedOptionError as error:
            return None, [self._publish("warning", message=str(error))]
        return asked, []

    def _media(self, media: Media) -> Sequence[DoorEffect]:
        if self._call is None:
            was_told, self._is_early_told = self._is_early_told, True
            return [] if was_told else [self._publish("warning", message="audio before the call was begun")]
        if self._call.audio.channels > 1:  # every track hears its own channel of the same frames
            return [Tell(index, Audio(media.data)) for index in self._tracks.values() if media.data]
        if media.track not in self._tracks and len(self._tracks) >= MAX_TRACKS:
            return [
                self._publish("warning", message=f"a call has {MAX_TRACKS} legs at most; {media.track!r} is left out")
            ]
        if self._codec is not None and len(media.data) > MAX_CODED_BYTES:
            said = f"a frame of {len(media.data)} bytes is left out; those of a codec have {MAX_CODED_BYTES} at most"
            return [self._publish("warning", message=said)]
        effects = [] if media.track in self._tracks else [*self._open(media.track)]
        data = self._orders[media.track].push(media.data, media.number, media.timestamp_ms)
        return [*effects, *([Tell(self._tracks[media.track], Audio(data))] if data else [])]

    def _end(self) -> Sequence[DoorEffect]:
        """Say goodbye to every track, behind the last of its audio."""
        if self._is_ending:
            return []
        self._is_ending = True
        effects: list[DoorEffect] = []
        for track, index in self._tracks.items():
            rest = self._orders[track].flush()
            if (decoder := self._decoders.get(track)) is not None:
                rest += _as_bytes(decoder.flush())
            if rest:
                effects.append(Tell(index, Audio(rest)))
            effects.append(Tell(index, Bye()))
        return effects if self._tracks else [self._publish("call_ended"), Close(1000, "")]

    # ------------------------------------------------------------------ from the sessions

    def heard(self, track: int, said: Said, now_s: float) -> Sequence[DoorEffect]:
        """Everything that is said of a track is published under its name."""
        match said:
            case Ready() | Ack() | Close() | UtteranceOver() | SentencePaused():
                return []
            case Farewell():
                self._n_over += 1
                return [self._publish("call_ended"), Close(1000, "")] if self._n_over == len(self._tracks) else []
            case _:
                event = {"track": next(name for name, index in self._tracks.items() if index == track), **plain(said)}
                told = [Publish(self._call_id, {"call": self._call_id, **event})]
                return [*told, *self._answer(event)]

    def _answer(self, event: Mapping[str, Any]) -> list[DoorEffect]:
        """FreeSWITCH raises what it is told as an event of its own; the others take no text."""
        if self._provider != "freeswitch" or event["type"] != "final":
            return []
        return [Say(json.dumps({"type": "transcription", "data": event}, ensure_ascii=False))]

    def _publish(self, kind: str, **fields: Any) -> Publish:  # Any: JSON
        fields = {name: brief(value) if isinstance(value, str) else value for name, value in fields.items()}
        return Publish(self._call_id, {"call": self._call_id, "type": kind, **fields})


# ---------------------------------------------------------------- the handshake


def key_of(knock: Knock) -> str | None:
    """The path's part behind the provider's name, for carriers send no headers of ours; or Telnyx's own header."""
    _, _, key = knock.path.removeprefix(PATH).partition("/")
    scheme, _, bearer = knock.headers.get("authorization", "").partition(" ")
    return key or knock.headers.get("x-telnyx-streaming-auth-token") or (bearer if scheme.lower() == "bearer" else None)


def open_door(knock: Knock, house: House) -> Admission:
    """A media stream of the provider that the path names."""
    provider = knock.path.removeprefix(PATH).partition("/")[0]
    dialect = DIALECTS.get(provider)
    if dialect is None:
        raise AdmissionError(404, "unknown_provider", f"no provider {provider!r}; there are {', '.join(DIALECTS)}")
    if provider == "twilio" and house.twilio_auth_token and not is_signed(knock, house.twilio_auth_token):
        raise AdmissionError(403, "bad_signature", "X-Twilio-Signature is not that of this address")
    if provider == "freeswitch" and freeswitch_call(knock) is None:
        raise AdmissionError(400, "unsupported_audio", "the URL must say rate=8000, say, and channels=2 for stereo")
    offered = FREESWITCH_SUBPROTOCOL if FREESWITCH_SUBPROTOCOL in knock.subprotocols else None
    return Admission(TelephonyDoor(knock, house, provider, dialect), offered)


def is_signed(knock: Knock, auth_token: str) -> bool:
    """Whether ``X-Twilio-Signature`` is the HMAC-SHA1 of the stream's address with the account's token."""
    shown = knock.headers.get("x-twilio-signature", "")
    address = knock.url.partition("://")[2]
    signed = [_signature(f"{scheme}://{address}", auth_token) for scheme in ("wss", "https", "ws", "http")]
    return any([hmac.compare_digest(shown.encode(), expected) for expected in signed])


def _signature(address: str, auth_token: str) -> bytes:
    return base64.b64encode(hmac.new(auth_token.encode(), address.encode(), hashlib.sha1).digest())


def refusal(error: AdmissionError, knock: Knock) -> Refusal:
    """``{"error": ..., "code": ...}``."""
    return Refusal({"error": str(error), "code": error.code})


def audiosocket_door(knock: Knock, house: House) -> Door:
    """A door for one TCP connection of Asterisk's AudioSocket; its frames are packets without their length."""
    return TelephonyDoor(knock, house, "audiosocket", audiosocket)
