"""The door of Deepgram's live protocol, /v1/listen: binary audio up, Results down, each channel with its own.

Knows messages, ranges and what is final. Words that have settled become final every few seconds of running speech; the
rest is interim. Does not know queries (``deepgram_options``) nor how speech is found or decoded.
"""

import hashlib
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import msgspec

from gateway.doors.deepgram_options import AudioIn, ListenOptions, LiveAudio, bare, hello_of, listen_options, live_audio
from gateway.doors.door import (
    Admission,
    AdmissionError,
    DoorEffect,
    Drop,
    Frame,
    House,
    Knock,
    LastWords,
    Open,
    Refusal,
    Say,
    Tell,
    brief,
)
from gateway.doors.settled import SettledText
from gateway.effects import Close, Said, UtteranceOver
from gateway.errors import GatewayError
from gateway.live_audio import LiveAudioError
from gateway.messages import (
    Audio,
    Bye,
    Error,
    Farewell,
    Final,
    Flush,
    Flushed,
    Partial,
    SpeechEnded,
    SpeechStarted,
    Update,
    WordItem,
)
from streaming.capability import Capability
from streaming.transcript import EndReason

NAME = "deepgram"
RESUMES = False
IDLE_S = 10.0  # without audio or text, upstream's own limit
GAP_SLACK_S = 0.2  # until the detector has heard the audio that came
MAX_REASON_CHARACTERS = 120  # of a close frame
FINAL_EVERY_S = 3.0  # of running speech whose words have settled
_CLOSE_CODES = {"server_full": 1013, "shutting_down": 1012, "internal": 1011, "idle_timeout": 1011}
_ENDPOINTS = {EndReason.SILENCE, EndReason.STALL, EndReason.END}


class _Control(msgspec.Struct):
    """A text message of the client's."""

    type: str
    channel: int | None = None
    keyterms: list[str] | None = None
    features: dict[str, Any] | None = None


@dataclass(slots=True)
class _Track:
    """One channel's transcript."""

    final_end_s: float = 0.0  # what lies before will not be revised
    settled: SettledText = field(default_factory=SettledText)
    waiting: list[WordItem] = field(default_factory=list)  # settled, not told as final yet
    language: str | None = None
    speech_end_s: float = 0.0
    has_final: bool = False  # of the utterance in work
    flushed: tuple[WordItem, ...] = ()  # a final that belongs to the answer to Finalize
    flushed_end_s: float | None = None
    n_spoken: int = 0  # utterances in work
    last_word_end_s: float | None = None  # the gap behind it is still to be told
    gap_due_s: float | None = None  # when to look whether it has grown long enough
    is_over: bool = False


class ListenDoor:
    """One live stream."""

    def __init__(self, knock: Knock, house: House, options: ListenOptions, audio: LiveAudio) -> None:
        self._house = house
        self._options = options
        self._audio = audio
        self._tracks = [_Track() for _ in range(audio.n_tracks)]
        self._request_id = request_id_of(knock)
        self._created = datetime.fromtimestamp(knock.at_unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        self._sha256 = hashlib.sha256()
        self._in = AudioIn(audio)
        self._n_flushes = 0
        self._last_message_s = 0.0
        self._idle_due_s = IDLE_S  # looked at then, not moved by each frame: a timer costs more than a frame
        self._is_closing = False

    # ------------------------------------------------------------------ the connection

    @property
    def next_wake_s(self) -> float | None:
        """A client that says nothing at all is gone; silence behind a word is told."""
        if self._is_closing:
            return None
        gaps = [state.gap_due_s for state in self._tracks if state.gap_due_s is not None]
        return min([self._idle_due_s, *gaps])

    def opened(self, now_s: float) -> list[DoorEffect]:
        """A session for each channel."""
        self._last_message_s = now_s
        self._idle_due_s = now_s + IDLE_S
        effects: list[DoorEffect] = []
        for track in range(len(self._tracks)):
            effects += [Open(track), Tell(track, hello_of(self._options, self._audio.spec(track)))]
        return effects

    def wake(self, now_s: float) -> list[DoorEffect]:
        """A gap behind a word may be long enough; or there was neither audio nor KeepAlive for ten seconds."""
        if self._is_closing:
            return []
        effects = [effect for track in range(len(self._tracks)) for effect in self._look_at_gap(track, now_s)]
        if now_s >= self._last_message_s + IDLE_S:
            self._is_closing = True
            effects.append(Close(1011, f"NET-0001: no audio and no KeepAlive for {IDLE_S:g} s"))
        self._idle_due_s = self._last_message_s + IDLE_S
        return effects

    def _look_at_gap(self, track: int, now_s: float) -> list[DoorEffect]:
        state = self._tracks[track]
        if state.gap_due_s is None or now_s < state.gap_due_s:
            return []
        state.gap_due_s = None
        effects = self._utterance_end(track, self._appended_s)
        if not effects:
            self._await_gap(state, now_s)  # the audio came more slowly than the clock ran
        return effects

    def _await_gap(self, state: _Track, now_s: float) -> None:
        """Look again when the gap behind the last word can be long enough, if the audio is live."""
        gap_s = self._options.utterance_end_s
        if gap_s is not None and state.last_word_end_s is not None and not state.n_spoken:
            missing_s = max(0.0, gap_s - (self._appended_s - state.last_word_end_s))
            state.gap_due_s = now_s + missing_s + GAP_SLACK_S

    @property
    def _appended_s(self) -> float:
        return self._in.appended_s

    def peer_gone(self, now_s: float) -> list[DoorEffect]:
        """The protocol has no way back to a stream, and nobody hears the rest."""
        return [Drop(track) for track in range(len(self._tracks))]

    def failed(self, error: GatewayError) -> list[LastWords]:
        """A close code; clients come back on all but 1008."""
        self._is_closing = True
        return [Close(_CLOSE_CODES.get(error.code, 1008), error.code)]

    # ------------------------------------------------------------------ from the client

    def receive(self, frame: Frame, now_s: float) -> Sequence[DoorEffect]:
        """Binary frames are audio, whatever they hold; text frames are control."""
        self._last_message_s = now_s
        if self._is_closing:
            return []
        if isinstance(frame, bytes):
            return self._append(frame) if frame else self._close_stream()
        try:
            control = msgspec.json.decode(frame, type=_Control)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            return [self._schema_error(str(error), frame)]
        match control.type:
            case "KeepAlive":
                return []
            case "Finalize":
                return self._finalize(control.channel)
            case "CloseStream":
                return self._close_stream()
            case "Configure":
                return self._configure(control)
            case _:
                return [self._schema_error(f"{control.type!r} is no message of this protocol", frame)]

    def _append(self, data: bytes) -> list[DoorEffect]:
        self._sha256.update(data)
        try:
            return self._tell_audio(self._in.push(data))
        except LiveAudioError as error:
            self._is_closing = True
            told = self._say("Error", variant="DataError", description=str(error), message="")
            return [told, Close(1008, f"DATA-0000: {error}"[:MAX_REASON_CHARACTERS])]

    def _tell_audio(self, data: bytes) -> list[DoorEffect]:
        return [Tell(track, Audio(data)) for track in range(len(self._tracks))] if data else []

    def _finalize(self, channel: int | None) -> list[DoorEffect]:
        self._n_flushes += 1
        every = range(len(self._tracks))
        tracks = every if channel is None or channel not in every else [channel]
        rest = self._tell_audio(self._in.flush())
        return [*rest, *(Tell(track, Flush(str(self._n_flushes))) for track in tracks)]

    def _close_stream(self) -> list[DoorEffect]:
        self._is_closing = True
        rest = self._tell_audio(self._in.flush())
        return [*rest, *(Tell(track, Bye()) for track in range(len(self._tracks)))]

    def _configure(self, control: _Control) -> list[DoorEffect]:
        given = [name for name, value in (control.features or {}).items() if value not in (None, False)]
        can_keyterms = Capability.VOCABULARY in self._house.cards[self._options.model].capabilities
        if given or (control.keyterms and not can_keyterms):
            what = ", ".join([*given, *(["keyterms"] if control.keyterms and not can_keyterms else [])])
            answer = {"code": "UNSUPPORTED", "description": brief(f"{self._options.model} does not offer {what}")}
            return [self._say("ConfigureFailure", request_id=self._request_id, **answer)]
        terms = tuple(term for term in control.keyterms or () if 0 < len(term) <= 100)[:1_000]
        changes: list[DoorEffect] = [
            Tell(track, Update("configure", vocabulary=terms)) for track in range(len(self._tracks))
        ]
        return [*changes, self._say("ConfigureSuccess", request_id=self._request_id, keyterms=list(terms))]

    # ------------------------------------------------------------------ from the sessions

    def heard(self, track: int, said: Said, now_s: float) -> Sequence[DoorEffect]:
        """What a channel's session says, as results of that channel."""
        state = self._tracks[track]
        match said:
            case Partial():
                return self._partial(track, said)
            case Final():
                return self._final(track, said)
            case SpeechStarted():
                return self._speech_started(track, said)
            case SpeechEnded():
                state.speech_end_s = said.end_s
                return []
            case UtteranceOver():
                return self._utterance_over(track, now_s)
            case Flushed():
                return self._flushed(track, said.at_s)
            case Error(code="decode_failed"):
                return [self._say("Error", variant="DecodeFailed", description=said.message, message="")]
            case Farewell():
                return [*self._utterance_end(track, said.audio_s), *self._farewell(track, said.audio_s)]
            case _:
                return []

    def _speech_started(self, track: int, said: SpeechStarted) -> list[DoorEffect]:
        state = self._tracks[track]
        state.n_spoken += 1
        state.gap_due_s = None
        effects = self._utterance_end(track, said.onset_s)
        if self._options.has_vad_events:
            channel = [track, len(self._tracks)]
            effects.append(self._say("SpeechStarted", channel=channel, timestamp=said.start_s))
        return effects

    def _partial(self, track: int, segment: Partial) -> list[DoorEffect]:
        state = self._tracks[track]
        self._settle(state, segment)
        effects: list[DoorEffect] = []
        if state.waiting and _end_s(state.waiting) - (state.waiting[0].start_s or 0.0) >= FINAL_EVERY_S:
            effects += self._told_final(track, _end_s(state.waiting), is_endpoint=False)
        words = (*state.waiting, *segment.words[segment.n_committed :])
        self._note_last_word(state, words)
        if self._options.has_interims and words:
            effects.append(self._results(track, words, segment.end_s, is_final=False, replaces=("interim", track)))
        return [*effects, *self._utterance_end(track, segment.end_s)]

    def _settle(self, state: _Track, segment: Partial | Final) -> None:
        state.language = segment.language or state.language
        state.waiting += state.settled.news(segment)

    def _final(self, track: int, segment: Final) -> list[DoorEffect]:
        state = self._tracks[track]
        self._settle(state, segment)
        self._note_last_word(state, state.waiting)
        if segment.reason == EndReason.FLUSH:  # its words are the answer to Finalize
            state.has_final = True
            state.flushed, state.flushed_end_s = tuple(state.waiting), segment.end_s
            state.waiting = []
            return []
        is_endpoint = segment.reason in _ENDPOINTS
        state.has_final = state.has_final or is_endpoint
        end_s = segment.end_s if is_endpoint else max(segment.end_s, _end_s(state.waiting))
        return self._told_final(track, end_s, is_endpoint=is_endpoint)

    def _utterance_over(self, track: int, now_s: float) -> list[DoorEffect]:
        state = self._tracks[track]
        state.n_spoken -= 1
        had_final, state.has_final = state.has_final, False
        self._await_gap(state, now_s)
        # Speech without words still has an end, that a client which was told of its start waits for.
        return [] if had_final else self._told_final(track, state.speech_end_s, is_endpoint=True)

    def _told_final(self, track: int, end_s: float, *, is_endpoint: bool) -> list[DoorEffect]:
        """What has settled, up to ``end_s``."""
        state = self._tracks[track]
        words, state.waiting = tuple(state.waiting), []
        is_endpoint = is_endpoint and self._options.has_endpoints
        return [self._results(track, words, end_s, is_final=True, is_endpoint=is_endpoint)]

    def _flushed(self, track: int, at_s: float) -> list[DoorEffect]:
        state = self._tracks[track]
        words, state.flushed = state.flushed, ()
        return [self._results(track, words, at_s, is_final=True, is_finalize=True)]

    def _farewell(self, track: int, audio_s: float) -> list[DoorEffect]:
        self._tracks[track].is_over = True
        if not all(state.is_over for state in self._tracks):
            return []
        metadata = self._say(
            "Metadata",
            transaction_key="deprecated",
            request_id=self._request_id,
            sha256=self._sha256.hexdigest(),
            created=self._created,
            duration=audio_s,
            channels=len(self._tracks),
        )
        return [metadata, Close(1000, "")]

    def _note_last_word(self, state: _Track, words: Sequence[WordItem]) -> None:
        ends = [word.end_s for word in words if word.end_s is not None]
        if ends and ends[-1] > state.final_end_s:
            state.last_word_end_s = ends[-1]

    def _utterance_end(self, track: int, heard_s: float) -> list[DoorEffect]:
        """Once for each gap behind a last word, on the audio's clock."""
        state, gap_s = self._tracks[track], self._options.utterance_end_s
        if gap_s is None or state.last_word_end_s is None or heard_s - state.last_word_end_s < gap_s:
            return []
        last_word_end_s, state.last_word_end_s = state.last_word_end_s, None
        return [self._say("UtteranceEnd", channel=[track, len(self._tracks)], last_word_end=last_word_end_s)]

    # ------------------------------------------------------------------ messages

    def _results(
        self,
        track: int,
        words: Sequence[WordItem],
        end_s: float,
        *,
        is_final: bool,
        is_endpoint: bool = False,
        is_finalize: bool = False,
        replaces: object = None,
    ) -> Say:
        """A range from the end of the last final one, and what was said in it."""
        state = self._tracks[track]
        start_s = state.final_end_s
        end_s = max(end_s, start_s, _end_s(words))
        if is_final:
            state.final_end_s = end_s
        message: dict[str, Any] = {
            "type": "Results",
            "channel_index": [track, len(self._tracks)],
            "start": round(start_s, 3),
            "duration": round(end_s - start_s, 3),
            "is_final": is_final,
            "speech_final": is_endpoint,
            "channel": {"alternatives": [alternative(words, self._options, state.language, (start_s, end_s))]},
            "metadata": metadata_of(self._request_id, self._options.model),
        }
        if is_finalize:
            message["from_finalize"] = True
        return Say(msgspec.json.encode(message).decode(), replaces)

    def _say(self, kind: str, **fields: Any) -> Say:  # Any: JSON
        return Say(msgspec.json.encode({"type": kind, **fields}).decode())

    def _schema_error(self, description: str, frame: str) -> Say:
        return self._say("Error", variant="SchemaError", description=brief(description), message=frame[:1_000])


def _end_s(words: Sequence[WordItem]) -> float:
    return max((word.end_s for word in words if word.end_s is not None), default=0.0)


def alternative(
    words: Sequence[WordItem], options: ListenOptions, language: str | None, span_s: tuple[float, float]
) -> dict[str, Any]:
    """The one alternative: text, confidence and words. ``span_s`` stands in where a model gives no times."""
    scores = [word.confidence for word in words if word.confidence is not None]
    texts = [word.text if options.is_punctuated else f" {bare(word.text)}" for word in words]
    body: dict[str, Any] = {
        "transcript": "".join(texts).strip(),
        "confidence": _confidence(scores),
        "words": [_word(word, options, language, span_s) for word in words],
    }
    if options.names_language and language is not None:
        body["languages"] = [language]
    return body


def _word(word: WordItem, options: ListenOptions, language: str | None, span_s: tuple[float, float]) -> dict[str, Any]:
    body: dict[str, Any] = {
        "word": bare(word.text),
        "start": span_s[0] if word.start_s is None else word.start_s,
        "end": span_s[1] if word.end_s is None else word.end_s,
        "confidence": _confidence([] if word.confidence is None else [word.confidence]),
    }
    if options.is_punctuated:
        body["punctuated_word"] = word.text.strip()
    if options.names_language and language is not None:
        body["language"] = language
    return body


def _confidence(scores: Sequence[float]) -> float:
    """The mean. The protocol needs a number: without any score it is 1, since clients drop what has a low one."""
    return round(sum(scores) / len(scores), 4) if scores else 1.0


def request_id_of(knock: Knock) -> str:
    """The connection's identifier as the protocol writes it."""
    return str(uuid.UUID(knock.connection_id))


def metadata_of(request_id: str, model: str) -> dict[str, Any]:
    """What every result says of the request and its model."""
    info = {"name": model, "version": "1", "arch": model}
    return {"request_id": request_id, "model_uuid": model_uuid(model), "model_info": info}


def model_uuid(model: str) -> str:
    """The same for the same name."""
    return str(uuid.uuid5(uuid.NAMESPACE_URL, f"senseway:{model}"))


# ---------------------------------------------------------------- the handshake


def key_of(knock: Knock) -> str | None:
    """``Authorization: Token KEY`` or ``Bearer TOKEN``, or a browser's sub-protocols ``token, KEY``."""
    scheme, _, key = knock.headers.get("authorization", "").partition(" ")
    if scheme.lower() in ("token", "bearer"):
        return key.strip()
    if len(knock.subprotocols) > 1 and knock.subprotocols[0].lower() in ("token", "bearer"):
        return knock.subprotocols[1]
    return None


def open_door(knock: Knock, house: House) -> Admission:
    """A live stream."""
    options = listen_options(knock, house)
    door = ListenDoor(knock, house, options, live_audio(knock))
    return Admission(door, knock.subprotocols[0] if knock.subprotocols else None, headers_of(knock, options))


def headers_of(knock: Knock, options: ListenOptions) -> dict[str, str]:
    """What every answer carries: the request's identifier, and what was asked for without effect."""
    ignored = {"dg-ignored": ", ".join(options.ignored)} if options.ignored else {}
    return {"dg-request-id": request_id_of(knock), **ignored}


def refusal(error: AdmissionError, knock: Knock) -> Refusal:
    """The body and headers of a refused upgrade or request."""
    request_id = request_id_of(knock)
    code = {"invalid_api_key": "INVALID_AUTH", "server_full": "TOO_BUSY"}.get(error.code, error.code)
    told = "".join(letter if letter.isprintable() else " " for letter in str(error).encode("ascii", "replace").decode())
    return Refusal(
        {"err_code": code, "err_msg": str(error), "request_id": request_id},
        {"dg-error": told, "dg-request-id": request_id},
    )
