"""The server's messages as a Python client sees them; PROTOCOL.md says what they mean.

Needs nothing but the standard library. Fields that a later server adds are left out, so that an old client goes on
working; a message without a field it must have is a ``ProtocolError``. Times are seconds since the first audio byte.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar


class ProtocolError(Exception):
    """The server sent what the protocol does not have."""


@dataclass(frozen=True, slots=True)
class Word:
    """One word; ``text`` keeps its leading space. ``None`` is what the model does not offer."""

    text: str
    start_s: float | None
    end_s: float | None
    confidence: float | None


@dataclass(frozen=True, slots=True)
class Model:
    """One model that the server offers."""

    name: str
    languages: tuple[str, ...]
    capabilities: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Engine:
    """What computes, and why that."""

    backend: str
    why: str


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds that a client has to keep; ``StreamClient`` does."""

    max_frame_bytes: int
    max_unacked_s: float
    resume_window_s: float


@dataclass(frozen=True, slots=True)
class Chunking:
    """How a model that decodes in chunks takes the audio; words are settled ``latency_ms`` behind it at most.

    Of an utterance nothing is settled before ``first_ms`` of it were heard, or it is over.
    """

    chunk_ms: int
    right_context_ms: int
    latency_ms: int
    first_ms: int
    second_pass: bool


@dataclass(frozen=True, slots=True)
class Ready:
    """The session stands, or stands again. ``taken_samples`` says from where to go on sending."""

    protocol: int
    session_id: str
    resumed: bool
    taken_samples: int
    model: str
    language: str | None
    granted: tuple[str, ...]
    declined: tuple[str, ...]
    engine: Engine
    models: tuple[Model, ...]
    limits: Limits
    chunking: Chunking | None = None  # of a model that decodes in chunks
    turn_model: str | None = None  # what turn_hangover_ms goes by


@dataclass(frozen=True, slots=True)
class Ack:
    """Samples per channel that are safe with the server."""

    samples: int


@dataclass(frozen=True, slots=True)
class SpeechStarted:
    """Someone speaks since ``onset_s``; ``start_s`` lies before it, by the pre-roll."""

    event: int
    start_s: float
    onset_s: float


@dataclass(frozen=True, slots=True)
class SpeechEnded:
    """The utterance is over: the voice at ``speech_end_s``, the padding behind it at ``end_s``."""

    event: int
    speech_end_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Partial:
    """A segment so far: the first ``n_committed`` of ``words`` will not change, the rest may."""

    event: int
    segment: int
    revision: int
    text: str
    start_s: float
    end_s: float
    words: tuple[Word, ...]
    n_committed: int
    language: str | None


@dataclass(frozen=True, slots=True)
class Final:
    """A segment for good."""

    event: int
    segment: int
    revision: int
    text: str
    start_s: float
    end_s: float
    words: tuple[Word, ...]
    n_committed: int
    language: str | None
    reason: str


@dataclass(frozen=True, slots=True)
class Flushed:
    """Everything before the flush of that ``id`` has been sent."""

    event: int
    id: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Updated:
    """The settings of the update of that ``id`` hold from ``at_s`` on."""

    event: int
    id: str
    at_s: float


@dataclass(frozen=True, slots=True)
class WarningEvent:
    """Something is only half as asked for; the session goes on."""

    event: int
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class ErrorEvent:
    """Something was refused or failed; after a ``fatal`` one the server closes.

    ``id`` is that of the refused flush or update; ``event`` is ``None`` where no session's events are counted.
    """

    event: int | None
    code: str
    message: str
    fatal: bool
    id: str | None


@dataclass(frozen=True, slots=True)
class Bye:
    """The session is drained; nothing follows."""

    event: int
    reason: str
    audio_s: float


Event: TypeAlias = SpeechStarted | SpeechEnded | Partial | Final | Flushed | Updated | WarningEvent | ErrorEvent | Bye
ServerMessage: TypeAlias = Ready | Ack | Event

SERVER_MESSAGES: dict[str, type[ServerMessage]] = {
    "ready": Ready,
    "ack": Ack,
    "speech_started": SpeechStarted,
    "speech_ended": SpeechEnded,
    "partial": Partial,
    "final": Final,
    "flushed": Flushed,
    "updated": Updated,
    "warning": WarningEvent,
    "error": ErrorEvent,
    "bye": Bye,
}

_Message = TypeVar("_Message")


def parse(message: object) -> ServerMessage:
    """The typed message of a decoded JSON object or MessagePack map.

    Raises:
        ProtocolError: for an unknown type or a missing field.
    """
    if not isinstance(message, Mapping):
        raise ProtocolError(f"the server sent {type(message).__name__} where a message belongs")
    kind = message.get("type")
    if kind not in SERVER_MESSAGES:
        raise ProtocolError(
            f"the server sent a message of unknown type {kind!r}; known are {', '.join(SERVER_MESSAGES)}"
        )
    return _built(SERVER_MESSAGES[kind], message)


def _built(wanted: type[_Message], fields: Mapping[str, Any]) -> _Message:
    hints = {name: hint for name, hint in typing.get_type_hints(wanted).items() if name in fields}
    missing = [item.name for item in _required(wanted) if item.name not in fields]
    if missing:
        raise ProtocolError(f"the server sent {wanted.__name__} without {', '.join(missing)}")
    return wanted(**{name: _converted(hint, fields[name]) for name, hint in hints.items()})


def _required(wanted: type[Any]) -> list[dataclasses.Field[Any]]:
    return [item for item in dataclasses.fields(wanted) if item.default is dataclasses.MISSING]


def _converted(hint: Any, value: Any) -> Any:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        return _built(hint, value)
    if isinstance(hint, types.UnionType):  # X | None
        return None if value is None else _converted(hint.__args__[0], value)
    if isinstance(hint, types.GenericAlias):  # tuple[X, ...]
        return tuple(_converted(hint.__args__[0], item) for item in value)
    return value
