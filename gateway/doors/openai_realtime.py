"""The door of the OpenAI Realtime protocol, transcription sessions with GA names: JSON events, audio in base64.

Knows events, items and turns. Text is append-only there, so deltas carry a segment's committed words and nothing else.
Does not know what a session object may hold (``openai_session``), nor how speech is found or decoded.

One utterance is one item under ``server_vad``. Where the client commits by itself, the item is all that was said
between two commits; its deltas come as they settle, under the id that the commit confirms.
"""

import binascii
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import msgspec

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
    Say,
    Tell,
    brief,
)
from gateway.doors.openai_common import key_of, logprobs, refusal
from gateway.doors.openai_session import (
    HOSTED_MODELS,
    LOGPROBS,
    WARNINGS,
    BadValueError,
    TranscriptionSession,
    TurnDetection,
    updated,
)
from gateway.doors.settled import SettledText
from gateway.effects import Close, Said, UtteranceOver
from gateway.errors import GatewayError
from gateway.keys import claims_of
from gateway.messages import (
    Audio,
    Error,
    Final,
    Flush,
    Flushed,
    Partial,
    Reformat,
    SpeechEnded,
    SpeechStarted,
    Updated,
    Warning,
)

__all__ = ["NAME", "RESUMES", "client_secret", "key_of", "open_door", "refusal"]

NAME = "openai_realtime"
RESUMES = False
SESSION_LIFE_S = 3_600  # what ``expires_at`` says; nothing ends here at that time
PASS_LIFE_S = 600
MAX_APPEND_BYTES = 15 << 20  # of audio in one event: upstream's own limit
MAX_EVENT_BYTES = 24 << 20  # base64 makes 20 MiB of that; what is somewhat larger is answered, not cut off
MAX_SESSION_BYTES = 1 << 19  # of a session object: the longest prompt and keywords are far shorter
MAX_EVENT_ID_CHARACTERS = 512  # of a client's, which errors name: upstream's own limit
PASS_LIVES_S = range(10, 7_201)
_TRACK = 0
# Close codes that clients of this protocol come back on, where coming back helps.
_CLOSE_CODES = {"server_full": 1013, "shutting_down": 1012, "internal": 1011}


class _ClientEvent(msgspec.Struct):
    """The fields of the client events that are served; others are ignored, as they are upstream."""

    type: str
    event_id: str | None = None
    audio: str | None = None
    session: msgspec.Raw = msgspec.Raw()  # an object; openai_session checks it


class _SecretRequest(msgspec.Struct):
    """The fields of a request for a pass."""

    expires_after: dict[str, Any] = {}
    session: dict[str, Any] = {}


class _Ending(Enum):
    """How a stretch of the input buffer ends."""

    COMMIT = auto()
    CLEAR = auto()


@dataclass(slots=True)
class _Item:
    """A conversation item in the making."""

    item_id: str
    start_s: float
    end_s: float | None = None
    is_committed: bool = False  # the client knows it
    is_cleared: bool = False  # its audio was thrown away: its words are not told
    settled: SettledText = field(default_factory=SettledText)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    language: str | None = None
    failure: str | None = None


@dataclass(slots=True)
class _Buffer:
    """Audio between two barriers of the client's; the last one is open."""

    ending: _Ending | None = None
    item: _Item | None = None  # of what was said in it outside of turns
    n_turns_before: int = 0  # committed when its end was asked for


class RealtimeDoor:
    """One transcription session."""

    next_wake_s = None

    def __init__(self, knock: Knock, house: House, session: TranscriptionSession) -> None:
        self._house = house
        self._session = session
        self._connection_id = knock.connection_id
        self._expires_at = int(knock.at_unix_s) + SESSION_LIFE_S
        self._n_events = 0
        self._n_items = 0
        self._n_barriers = 0
        self._n_updates = 0
        self._is_open = False  # the session behind the door
        self._appended_s = 0.0
        self._has_audio = False  # since the last commit or clear
        self._cleared_until_s = 0.0
        self._turns = self._session.turn_detection  # in force for the audio that is being heard
        self._turns_of_update: dict[str, TurnDetection | None] = {}
        self._spoken: deque[_Item | None] = deque()  # utterances in work; None where the client commits by itself
        self._buffers = deque([_Buffer()])
        self._n_committed_turns = 0
        self._last_item_id: str | None = None
        self._last_end_ms = 0

    # ------------------------------------------------------------------ the connection

    def opened(self, now_s: float) -> list[DoorEffect]:
        """The session is there before the client has said anything."""
        return [self._session_event("session.created")]

    def wake(self, now_s: float) -> list[DoorEffect]:
        """Never asked for."""
        return []

    def peer_gone(self, now_s: float) -> list[DoorEffect]:
        """The protocol has no way back to a session, and nobody hears the rest."""
        return [Drop(_TRACK)]

    def failed(self, error: GatewayError) -> list[LastWords]:
        """A close code alone: to clients of this protocol an ``error`` event means that coming back is no use."""
        return [Close(_CLOSE_CODES.get(error.code, 1008), error.code)]

    # ------------------------------------------------------------------ from the client

    def receive(self, frame: Frame, now_s: float) -> Sequence[DoorEffect]:
        """One event in a text frame."""
        if isinstance(frame, bytes):
            return [self._error("audio goes base64 into input_audio_buffer.append; binary frames are not read")]
        try:
            event = msgspec.json.decode(frame, type=_ClientEvent)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            return [self._error(brief(f"not an event: {error}"), code="invalid_event")]
        try:
            return self._receive(event)
        except BadValueError as error:
            event_id = event.event_id and event.event_id[:MAX_EVENT_ID_CHARACTERS]
            return [self._error(str(error), code=error.code, param=error.param, event_id=event_id)]

    def _receive(self, event: _ClientEvent) -> list[DoorEffect]:
        match event.type:
            case "input_audio_buffer.append":
                return self._append(event.audio)
            case "input_audio_buffer.commit":
                return self._commit()
            case "input_audio_buffer.clear":
                return self._clear()
            case "session.update":
                return self._update(event.session)
            case _:
                raise BadValueError("type", f"{event.type!r} is not served in a transcription session")

    def _append(self, encoded: str | None) -> list[DoorEffect]:
        if encoded is None:
            raise BadValueError("audio", "input_audio_buffer.append needs audio, in base64")
        try:
            data = binascii.a2b_base64(encoded, strict_mode=True)
        except (binascii.Error, ValueError) as error:
            raise BadValueError("audio", f"audio is not base64: {error}") from error
        if len(data) > MAX_APPEND_BYTES:
            said = f"an append has {len(data)} bytes of audio; at most {MAX_APPEND_BYTES} are taken at once"
            raise BadValueError("audio", said, code="input_audio_buffer_append_too_large")
        if not data:
            return []
        effects: list[DoorEffect] = []
        if not self._is_open:
            self._is_open = True
            effects = [Open(_TRACK), Tell(_TRACK, self._session.hello(self._house))]
        self._appended_s += len(data) / self._session.bytes_per_s
        self._has_audio = True
        return [*effects, Tell(_TRACK, Audio(data))]

    def _commit(self) -> list[DoorEffect]:
        if not self._has_audio:
            raise BadValueError(
                "type", "nothing was appended since the last commit", code="input_audio_buffer_commit_empty"
            )
        effects: list[DoorEffect] = []
        if self._session.turn_detection is None:
            item = self._buffers[-1].item = self._buffers[-1].item or self._new_item(self._buffer_start_s())
            item.end_s = self._appended_s
            effects += self._tell_committed(item)
        return [*effects, self._barrier(_Ending.COMMIT)]

    def _clear(self) -> list[DoorEffect]:
        cleared = self._event("input_audio_buffer.cleared")
        if not self._is_open:
            return [cleared]
        self._cleared_until_s = self._appended_s
        for item in (*self._spoken, self._buffers[-1].item):
            if item is not None and not item.is_committed:
                item.is_cleared = True
        return [cleared, self._barrier(_Ending.CLEAR)]

    def _barrier(self, ending: _Ending) -> DoorEffect:
        """End the open stretch of the buffer behind the audio so far."""
        self._has_audio = False
        self._buffers[-1].ending = ending
        self._buffers[-1].n_turns_before = self._n_committed_turns
        self._buffers.append(_Buffer())
        self._n_barriers += 1
        return Tell(_TRACK, Flush(str(self._n_barriers)))

    def _buffer_start_s(self) -> float:
        """Where the open stretch began: at the end of the last item."""
        return self._last_end_ms / 1_000

    def _update(self, encoded: msgspec.Raw) -> list[DoorEffect]:
        written = bytes(encoded)
        if len(written) > MAX_SESSION_BYTES:
            raise BadValueError("session", f"session has {len(written)} bytes; at most {MAX_SESSION_BYTES} are read")
        patch = msgspec.json.decode(written) if written else None
        before, after = self._session, updated(self._session, patch, self._house)
        if self._is_open and after.model != before.model:
            raise BadValueError(
                "session.audio.input.transcription.model",
                "the model can't change once audio was appended; open another connection for it",
            )
        self._session = after
        return [*self._apply(before, after), self._session_event("session.updated")]

    def _apply(self, before: TranscriptionSession, after: TranscriptionSession) -> list[DoorEffect]:
        if not self._is_open:
            self._turns = after.turn_detection
            return []
        effects: list[DoorEffect] = []
        if after.audio_spec != before.audio_spec:
            effects.append(Tell(_TRACK, Reformat(after.audio_spec)))
        self._n_updates += 1
        update_id = str(self._n_updates)
        change = after.update(update_id, self._house)
        if change != before.update(update_id, self._house) or after.turn_detection != before.turn_detection:
            self._turns_of_update[update_id] = after.turn_detection
            effects.append(Tell(_TRACK, change))
        return effects

    # ------------------------------------------------------------------ from the session

    def heard(self, track: int, said: Said, now_s: float) -> Sequence[DoorEffect]:
        """What the session says, as events of items."""
        match said:
            case Partial() | Final():
                return self._transcribed(said)
            case SpeechStarted():
                return self._speech_started(said)
            case SpeechEnded():
                return self._speech_ended(said)
            case UtteranceOver():
                return self._utterance_over()
            case Flushed():
                return self._flushed()
            case Updated(id=update_id):
                self._turns = self._turns_of_update.pop(update_id)
                return self._commit_orphan()
            case Error(code="decode_failed"):
                self._item_in_work().failure = said.message
                return []
            case Error():
                return [self._error(said.message, kind="server_error", code=said.code)]
            case Warning() if WARNINGS in self._session.include:
                return [self._event("senseway.warning", code=said.code, message=said.message)]
            case _:
                return []

    def _speech_started(self, said: SpeechStarted) -> list[DoorEffect]:
        if self._turns is None:
            self._spoken.append(None)
            return []
        start_ms = max(self._last_end_ms, round(said.onset_s * 1_000) - self._turns.prefix_padding_ms)
        item = self._new_item(start_ms / 1_000)
        self._spoken.append(item)
        if said.onset_s < self._cleared_until_s:
            item.is_cleared = True
            return []
        return [self._event("input_audio_buffer.speech_started", audio_start_ms=start_ms, item_id=item.item_id)]

    def _speech_ended(self, said: SpeechEnded) -> list[DoorEffect]:
        item = self._spoken[-1]
        if item is None:
            return []
        item.end_s = said.end_s
        end_ms = self._last_end_ms = round(said.end_s * 1_000)
        stopped = self._event("input_audio_buffer.speech_stopped", audio_end_ms=end_ms, item_id=item.item_id)
        if item.is_cleared:
            return [stopped]
        self._n_committed_turns += 1
        return [stopped, *self._tell_committed(item)]

    def _transcribed(self, segment: Partial | Final) -> list[DoorEffect]:
        item = self._item_in_work()
        words = item.settled.news(segment)
        item.language = segment.language or item.language
        delta = "" if item.is_cleared else item.settled.delta(words)
        if not delta:
            return []
        fields: dict[str, Any] = {"item_id": item.item_id, "content_index": 0, "delta": delta}
        if LOGPROBS in self._session.include:
            fields["logprobs"] = logprobs(words)
            item.logprobs += fields["logprobs"]
        return [self._event("conversation.item.input_audio_transcription.delta", **fields)]

    def _utterance_over(self) -> list[DoorEffect]:
        item = self._spoken.popleft()
        return self._complete(item) if item is not None else self._commit_orphan()

    def _commit_orphan(self) -> list[DoorEffect]:
        """Commit what the client would have committed, had it not asked for turns meanwhile."""
        buffer = self._buffers[0]
        orphan = buffer.item
        if self._turns is None or orphan is None or buffer.ending is not None or None in self._spoken:
            return []
        buffer.item = None
        return [*self._tell_committed(orphan), *self._complete(orphan)]

    def _flushed(self) -> list[DoorEffect]:
        buffer = self._buffers.popleft()
        item = buffer.item
        if item is None:
            if buffer.ending is _Ending.CLEAR or self._n_committed_turns > buffer.n_turns_before:
                return []
            item = self._new_item(self._buffer_start_s())  # a commit that ended no turn: silence, which is no error
        is_news = not item.is_committed and not item.is_cleared
        return [*(self._tell_committed(item) if is_news else []), *self._complete(item)]

    # ------------------------------------------------------------------ items

    def _new_item(self, start_s: float) -> _Item:
        self._n_items += 1
        return _Item(f"item_{self._connection_id[:12]}_{self._n_items}", start_s)

    def _item_in_work(self) -> _Item:
        """The item that the words of the oldest utterance belong to."""
        turn = self._spoken[0] if self._spoken else None
        if turn is not None:
            return turn
        buffer = self._buffers[0]
        if buffer.item is None:
            buffer.item = self._new_item(self._buffer_start_s())
            buffer.item.is_cleared = buffer.ending is _Ending.CLEAR
        return buffer.item

    def _tell_committed(self, item: _Item) -> list[DoorEffect]:
        item.is_committed = True
        previous, self._last_item_id = self._last_item_id, item.item_id
        self._last_end_ms = max(self._last_end_ms, round((item.end_s or item.start_s) * 1_000))
        shown = {
            "id": item.item_id,
            "object": "realtime.item",
            "type": "message",
            "status": "completed",
            "role": "user",
            "content": [{"type": "input_audio", "transcript": None}],
        }
        return [
            self._event("input_audio_buffer.committed", previous_item_id=previous, item_id=item.item_id),
            self._event("conversation.item.added", previous_item_id=previous, item=shown),
            self._event("conversation.item.done", previous_item_id=previous, item=shown),
        ]

    def _complete(self, item: _Item) -> list[DoorEffect]:
        """The last event of an item: exactly one for each that the client has heard of."""
        event = "conversation.item.input_audio_transcription"
        place = {"item_id": item.item_id, "content_index": 0}
        if item.is_cleared and not item.settled.text:
            return []
        if item.failure is not None and not item.settled.text:
            error = {"type": "server_error", "code": "decode_failed", "message": item.failure, "param": None}
            return [self._event(f"{event}.failed", **place, error=error)]
        usage_s = max(0.0, (item.end_s if item.end_s is not None else item.start_s) - item.start_s)
        fields: dict[str, Any] = {
            **place,
            "transcript": "" if item.is_cleared else item.settled.text,
            "usage": {"type": "duration", "seconds": round(usage_s, 3)},
        }
        if LOGPROBS in self._session.include:
            fields["logprobs"] = item.logprobs
        if item.language is not None:
            fields["languages"] = [{"code": item.language}]
        return [self._event(f"{event}.completed", **fields)]

    # ------------------------------------------------------------------ events

    def _event(self, kind: str, **fields: Any) -> Say:  # Any: JSON
        self._n_events += 1
        event_id = f"event_{self._connection_id[:12]}_{self._n_events}"
        return Say(msgspec.json.encode({"type": kind, "event_id": event_id, **fields}).decode())

    def _session_event(self, kind: str) -> Say:
        shown = {
            **self._session.plain(),
            "id": f"sess_{self._connection_id}",
            "object": "realtime.transcription_session",
            "expires_at": self._expires_at,
        }
        return self._event(kind, session=shown)

    def _error(
        self,
        message: str,
        *,
        kind: str = "invalid_request_error",
        code: str = "invalid_value",
        param: str | None = None,
        event_id: str | None = None,
    ) -> Say:
        error = {"type": kind, "code": code, "message": message, "param": param, "event_id": event_id}
        return self._event("error", error=error)


def open_door(knock: Knock, house: House) -> Admission:
    """A transcription session, whether or not the query says so."""
    intent = knock.param("intent")
    if intent not in (None, "", "transcription"):
        raise AdmissionError(400, "invalid_value", f"intent is {intent!r}; transcription is served", param="intent")
    named = knock.param("model")
    model = house.model_named(named, foreign=HOSTED_MODELS) if named else house.default_model
    if model is None:
        known = ", ".join(house.cards)
        raise AdmissionError(404, "model_not_found", f"no model {named!r} here; there are {known}", param="model")
    session = _session_of_pass(knock, TranscriptionSession(model), house)
    return Admission(RealtimeDoor(knock, house, session), "realtime" if "realtime" in knock.subprotocols else None)


def _session_of_pass(knock: Knock, session: TranscriptionSession, house: House) -> TranscriptionSession:
    """What was said when the client's pass was issued, if it has one."""
    try:
        return updated(session, claims_of(key_of(knock)).get("session", {}), house)
    except BadValueError as error:
        raise AdmissionError(400, error.code, str(error), param=error.param) from error


@dataclass(frozen=True, slots=True)
class ClientSecret:
    """What a request for a pass asks for."""

    life_s: int
    patch: dict[str, Any]  # Any: JSON
    session: TranscriptionSession  # what the patch makes of the defaults


def client_secret(body: bytes, house: House) -> ClientSecret:
    """Read a request for a pass. Raises ``AdmissionError``."""
    try:
        asked = msgspec.json.decode(body or b"{}", type=_SecretRequest)
        life_s = asked.expires_after.get("seconds", PASS_LIFE_S)
        if type(life_s) is not int or life_s not in PASS_LIVES_S:
            low, high = PASS_LIVES_S[0], PASS_LIVES_S[-1]
            raise BadValueError("expires_after.seconds", f"seconds is {life_s!r}; it must lie in {low}..{high}")
        session = updated(TranscriptionSession(house.default_model), asked.session, house)
    except msgspec.DecodeError as error:
        raise AdmissionError(400, "invalid_value", f"not a request for a client secret: {error}") from error
    except BadValueError as error:
        raise AdmissionError(400, error.code, str(error), param=error.param) from error
    return ClientSecret(life_s, asked.session, session)
