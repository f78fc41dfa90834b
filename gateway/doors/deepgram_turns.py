"""The door of Deepgram's turn-based protocol, /v2/listen: each message tells the whole turn so far.

Knows turns and their events. Whether a turn is over is the session's to say: by a model of turns and silence where the
server has one, else by whether the text reads complete, a heuristic whose confidences are few and coarse.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from gateway.doors.deepgram import MAX_REASON_CHARACTERS, key_of, refusal, request_id_of
from gateway.doors.deepgram_options import HOSTED_MODELS, AudioIn, LiveAudio, live_audio
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
from gateway.effects import Close, Said, SentencePaused, UtteranceOver
from gateway.errors import GatewayError
from gateway.live_audio import LiveAudioError
from gateway.messages import Audio, Bye, Error, Farewell, Final, Flush, Hello, Partial, Update, WordItem
from streaming.capability import Capability
from streaming.endpoint import reads_complete
from streaming.transcript import EndReason, Word

__all__ = ["NAME", "RESUMES", "key_of", "open_door", "refusal"]

NAME = "deepgram_turns"
RESUMES = False
MIN_SENTENCE_MS, MS_FOR_EACH_THRESHOLD = 300, 1_250  # 0.5 → 300 ms of silence behind a finished sentence, 0.9 → 800 ms
DONE_MS = 500  # of silence that ends a turn which the model of turns takes to be over
DOUBTED_MS = 1_500  # and one that reads complete, though the model does not take it to be over
MAX_TIMEOUT_MS = 10_000  # the longest silence that a session takes
UNPUNCTUATED_MS = 1_000  # the silence that ends a turn of a model whose text says nothing about sentences
_CONFIDENCES = {"Update": 0.1, "StartOfTurn": 0.1, "TurnResumed": 0.1, "EagerEndOfTurn": 0.6, "EndOfTurn": 0.95}
_CLOSE_CODES = {"server_full": 1013, "shutting_down": 1012, "internal": 1011, "idle_timeout": 1011}
_TRACK = 0


class _Control(msgspec.Struct):
    """A text message of the client's."""

    type: str
    thresholds: dict[str, Any] | None = None
    keyterms: list[str] | None = None


@dataclass(frozen=True, slots=True)
class Thresholds:
    """When a turn is over, within the protocol's ranges."""

    eot_threshold: float = 0.7  # 0.5..1.0
    eager_eot_threshold: float | None = None  # 0.3..0.9; turns the eager events on
    eot_timeout_ms: int = 5_000  # 500..60000

    def __post_init__(self) -> None:
        """Raises ``ValueError`` that names the field, its value and its range."""
        _check("eot_threshold", self.eot_threshold, 0.5, 1.0)
        if self.eager_eot_threshold is not None:
            _check("eager_eot_threshold", self.eager_eot_threshold, 0.3, 0.9)
        _check("eot_timeout_ms", self.eot_timeout_ms, 500, 60_000)
        if not isinstance(self.eot_timeout_ms, int):
            raise ValueError(f"eot_timeout_ms is {self.eot_timeout_ms!r}; whole milliseconds are needed")

    def pauses_ms(self, *, is_punctuated: bool, has_turn_model: bool) -> tuple[int, int | None, int | None]:
        """Silence that ends any turn, one whose text reads complete, and one that the model takes to be over."""
        timeout_ms = min(self.eot_timeout_ms, MAX_TIMEOUT_MS)
        if has_turn_model:
            return timeout_ms, DOUBTED_MS if is_punctuated else None, DONE_MS
        if not is_punctuated:
            return min(timeout_ms, UNPUNCTUATED_MS), None, None
        return timeout_ms, round(MIN_SENTENCE_MS + (self.eot_threshold - 0.5) * MS_FOR_EACH_THRESHOLD), None

    def plain(self) -> dict[str, Any]:
        """As messages show them."""
        eager = {} if self.eager_eot_threshold is None else {"eager_eot_threshold": self.eager_eot_threshold}
        return {"eot_threshold": self.eot_threshold, **eager, "eot_timeout_ms": self.eot_timeout_ms}


def _check(name: str, value: float, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise ValueError(f"{name} is {value!r}; it must lie in {low}..{high}")


@dataclass(slots=True)
class _Turn:
    """The turn in progress."""

    start_s: float
    done: list[WordItem] = field(default_factory=list)  # of segments that are final
    words: tuple[WordItem, ...] = ()  # all, as told last
    end_s: float = 0.0
    is_eager: bool = False
    reason: str = ""
    probability: float | None = None  # of the model of turns, that this is the end


class TurnsDoor:
    """One stream."""

    next_wake_s = None

    def __init__(self, knock: Knock, house: House, model: str, audio: LiveAudio, thresholds: Thresholds) -> None:
        self._model = model
        self._capabilities = house.cards[model].capabilities
        self._has_turn_model = house.has_turn_model
        self._audio = audio
        self._in = AudioIn(audio)
        self._thresholds = thresholds
        self._vocabulary = _terms(knock.params("keyterm")) if Capability.VOCABULARY in self._capabilities else ()
        self._request_id = request_id_of(knock)
        self._n_said = 0
        self._n_turns = 0
        self._turn: _Turn | None = None

    # ------------------------------------------------------------------ the connection

    def opened(self, now_s: float) -> list[DoorEffect]:
        """Connected is the first message; clients wait for it."""
        hangover_ms, sentence_ms, turn_ms = self._pauses_ms()
        hello = Hello(
            audio=self._audio.spec(_TRACK),
            model=self._model,
            vocabulary=self._vocabulary,
            hangover_ms=hangover_ms,
            sentence_hangover_ms=sentence_ms,
            turn_hangover_ms=turn_ms,
            turn_threshold=self._thresholds.eot_threshold,
        )
        return [self._say("Connected", request_id=self._request_id), Open(_TRACK), Tell(_TRACK, hello)]

    def wake(self, now_s: float) -> list[DoorEffect]:
        """Never asked for."""
        return []

    def peer_gone(self, now_s: float) -> list[DoorEffect]:
        """The protocol has no way back to a stream, and nobody hears the rest."""
        return [Drop(_TRACK)]

    def failed(self, error: GatewayError) -> list[LastWords]:
        """A fatal error and a close."""
        told = self._say("Error", code=error.code.upper(), description=str(error))
        return [told, Close(_CLOSE_CODES.get(error.code, 1008), error.code)]

    # ------------------------------------------------------------------ from the client

    def receive(self, frame: Frame, now_s: float) -> Sequence[DoorEffect]:
        """Binary frames are audio; text frames are control."""
        if isinstance(frame, bytes):
            return self._append(frame)
        try:
            control = msgspec.json.decode(frame, type=_Control)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            return [self._warning("INVALID_MESSAGE", f"not a message: {error}")]
        match control.type:
            case "CloseStream":
                return [*self._tell_audio(self._in.flush()), Tell(_TRACK, Bye())]
            case "ForceEndTurn":
                return [*self._tell_audio(self._in.flush()), Tell(_TRACK, Flush("turn"))]
            case "Configure":
                return self._configure(control)
            case _:
                return [self._warning("UNKNOWN_MESSAGE", f"{control.type!r} is no message of this protocol")]

    def _append(self, data: bytes) -> list[DoorEffect]:
        try:
            return self._tell_audio(self._in.push(data))
        except LiveAudioError as error:
            told = self._say("Error", code="UNREADABLE_AUDIO", description=str(error))
            return [told, Close(1008, str(error)[:MAX_REASON_CHARACTERS])]

    @staticmethod
    def _tell_audio(data: bytes) -> list[DoorEffect]:
        return [Tell(_TRACK, Audio(data))] if data else []

    def _configure(self, control: _Control) -> list[DoorEffect]:
        try:
            thresholds = Thresholds(**{**self._thresholds.plain(), **(control.thresholds or {})})
        except (TypeError, ValueError) as error:
            return [self._failure("INVALID_THRESHOLDS", str(error))]
        if control.keyterms and Capability.VOCABULARY not in self._capabilities:
            return [self._failure("UNSUPPORTED", f"{self._model} does not offer keyterms")]
        self._thresholds = thresholds
        if control.keyterms is not None:
            self._vocabulary = _terms(control.keyterms)
        hangover_ms, sentence_ms, turn_ms = self._pauses_ms()
        change = Update(
            "configure",
            hangover_ms=hangover_ms,
            sentence_hangover_ms=sentence_ms,
            turn_hangover_ms=turn_ms,
            turn_threshold=thresholds.eot_threshold,
            vocabulary=self._vocabulary,
        )
        shown = {"thresholds": thresholds.plain(), "keyterms": list(self._vocabulary)}
        return [Tell(_TRACK, change), self._say("ConfigureSuccess", request_id=self._request_id, **shown)]

    def _pauses_ms(self) -> tuple[int, int | None, int | None]:
        is_punctuated = Capability.PUNCTUATION in self._capabilities
        return self._thresholds.pauses_ms(is_punctuated=is_punctuated, has_turn_model=self._has_turn_model)

    # ------------------------------------------------------------------ from the session

    def heard(self, track: int, said: Said, now_s: float) -> Sequence[DoorEffect]:
        """What the session says, as the events of turns."""
        match said:
            case Partial():
                return self._told(said)
            case Final():
                effects = self._told(said)
                if self._turn is not None:
                    self._turn.done += said.words
                    self._turn.reason = said.reason
                return effects
            case SentencePaused(probability):
                return self._paused(probability)
            case UtteranceOver(probability):
                return self._over(probability)
            case Error(code="decode_failed"):
                return [self._warning("DECODE_FAILED", said.message)]
            case Farewell():
                return [Close(1000, "")]
            case _:
                return []

    def _told(self, segment: Partial | Final) -> list[DoorEffect]:
        """A turn begins with its first words, and each change of it is told."""
        turn = self._turn
        words = (*(turn.done if turn else ()), *segment.words)
        if turn is None:
            if not words:
                return []
            turn = self._turn = _Turn(segment.start_s)
            event = "StartOfTurn"
        else:
            event = "TurnResumed" if turn.is_eager and words != turn.words else "Update"
        is_same = words == turn.words
        turn.words, turn.end_s = words, segment.end_s
        turn.is_eager = turn.is_eager and is_same
        turn.probability = turn.probability if is_same else None
        return [] if is_same else [self._turn_info(event, turn)]

    def _paused(self, probability: float | None) -> list[DoorEffect]:
        turn, threshold = self._turn, self._thresholds.eager_eot_threshold
        if turn is None or turn.is_eager or threshold is None:
            return []
        if probability is not None and probability < threshold:
            return []
        turn.is_eager, turn.probability = True, probability
        return [self._turn_info("EagerEndOfTurn", turn)]

    def _over(self, probability: float | None) -> list[DoorEffect]:
        turn, self._turn = self._turn, None
        if turn is None:
            return []
        turn.probability = probability
        is_done = _reads_complete(turn.words) if probability is None else probability >= self._thresholds.eot_threshold
        trigger = "manual" if turn.reason == EndReason.FLUSH else "model" if is_done else "timeout"
        told = self._turn_info("EndOfTurn", turn, trigger=trigger)
        self._n_turns += 1
        return [told]

    # ------------------------------------------------------------------ messages

    def _turn_info(self, event: str, turn: _Turn, **more: Any) -> Say:  # Any: JSON
        return self._say(
            "TurnInfo",
            request_id=self._request_id,
            event=event,
            turn_index=self._n_turns,
            audio_window_start=turn.start_s,
            audio_window_end=turn.end_s,
            transcript="".join(word.text for word in turn.words).strip(),
            words=[_word(word, turn) for word in turn.words],
            end_of_turn_confidence=_CONFIDENCES[event] if turn.probability is None else round(turn.probability, 3),
            **more,
        )

    def _warning(self, code: str, description: str) -> Say:
        return self._say("Warning", request_id=self._request_id, code=code, description=brief(description))

    def _failure(self, code: str, description: str) -> Say:
        return self._say("ConfigureFailure", request_id=self._request_id, code=code, description=brief(description))

    def _say(self, kind: str, **fields: Any) -> Say:
        """Every message counts, so none may be left out for a newer one."""
        number, self._n_said = self._n_said, self._n_said + 1
        return Say(msgspec.json.encode({"type": kind, "sequence_id": number, **fields}).decode())


def _word(word: WordItem, turn: _Turn) -> dict[str, Any]:
    return {
        "word": word.text.strip(),
        "confidence": 1.0 if word.confidence is None else word.confidence,
        "start": turn.start_s if word.start_s is None else word.start_s,
        "end": turn.end_s if word.end_s is None else word.end_s,
    }


def _reads_complete(words: Sequence[WordItem]) -> bool:
    return reads_complete([Word(word.text, None, None, None) for word in words])


def _terms(terms: Sequence[str]) -> tuple[str, ...]:
    return tuple(term for term in terms if 0 < len(term) <= 100)[:1_000]


def open_door(knock: Knock, house: House) -> Admission:
    """A stream of turns."""
    name = knock.param("model")
    model = house.default_model if not name else house.model_named(name, foreign=HOSTED_MODELS)
    if model is None:
        raise AdmissionError(400, "Bad Request", f"no model {name!r} here; there are {', '.join(house.cards)}")
    door = TurnsDoor(knock, house, model, live_audio(knock), _thresholds(knock))
    subprotocol = knock.subprotocols[0] if knock.subprotocols else None
    return Admission(door, subprotocol, {"dg-request-id": request_id_of(knock)})


def _thresholds(knock: Knock) -> Thresholds:
    kinds = {"eot_threshold": float, "eager_eot_threshold": float, "eot_timeout_ms": int}
    try:
        given = {name: kind(text) for name, kind in kinds.items() if (text := knock.param(name))}
        return Thresholds(**given)
    except ValueError as error:
        raise AdmissionError(400, "Bad Request", str(error)) from error
