"""The messages of the native protocol as typed values; PROTOCOL.md says what they mean.

msgspec holds the schema: an unknown field, a missing one or one out of range is refused with its path. Knows no
sockets, no JSON and no MessagePack.
"""

from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from gateway.errors import ClientError

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 1 << 20
MIN_CHUNK_MS, MAX_CHUNK_MS = 160, 2_000

Encoding: TypeAlias = str  # the accepted ones are ingest's to list: its error says more than a schema's
HangoverMs = Annotated[int, Meta(ge=100, le=10_000)]
PartialIntervalMs = Annotated[int, Meta(ge=100, le=10_000)]
ChunkMs = Annotated[int, Meta(ge=MIN_CHUNK_MS, le=MAX_CHUNK_MS)]
TurnThreshold = Annotated[float, Meta(ge=0.05, le=1.0)]
SpeechThreshold = Annotated[float, Meta(ge=0.05, le=0.95)]
PreRollMs = Annotated[int, Meta(ge=300, le=2_000)]
Id = Annotated[str, Meta(max_length=64)]
Vocabulary = Annotated[tuple[Annotated[str, Meta(min_length=1, max_length=100)], ...], Meta(max_length=1_000)]
Context = Annotated[str, Meta(max_length=4_000)]

DEFAULT_HANGOVER_MS = 400
DEFAULT_PARTIAL_INTERVAL_MS = 500
DEFAULT_TURN_THRESHOLD = 0.5


# ---------------------------------------------------------------- from the client


class AudioSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """The declared format of the audio bytes."""

    encoding: Encoding
    sample_rate_hz: int
    channels: int = 1
    channel: int | None = None


class ResumeSpec(Struct, frozen=True, forbid_unknown_fields=True):
    """Which session to take up, and the highest event number seen of it."""

    session_id: Id
    last_event: Annotated[int, Meta(ge=0)]


class Hello(Struct, frozen=True, forbid_unknown_fields=True, tag="hello"):
    """The first message of a client."""

    audio: AudioSpec | UnsetType = UNSET
    model: str | UnsetType = UNSET
    language: str | None | UnsetType = UNSET
    task: str | UnsetType = UNSET
    vocabulary: Vocabulary | UnsetType = UNSET
    context: Context | UnsetType = UNSET
    require: tuple[str, ...] | UnsetType = UNSET
    prefer: tuple[str, ...] | UnsetType = UNSET
    hangover_ms: HangoverMs | UnsetType = UNSET
    sentence_hangover_ms: HangoverMs | None | UnsetType = UNSET
    turn_hangover_ms: HangoverMs | None | UnsetType = UNSET
    turn_threshold: TurnThreshold | UnsetType = UNSET
    speech_threshold: SpeechThreshold | UnsetType = UNSET
    pre_roll_ms: PreRollMs | UnsetType = UNSET
    partial_interval_ms: PartialIntervalMs | UnsetType = UNSET
    chunk_ms: ChunkMs | None | UnsetType = UNSET
    second_pass: bool | UnsetType = UNSET
    resume: ResumeSpec | UnsetType = UNSET

    def __post_init__(self) -> None:
        others = [name for name in self.__struct_fields__ if name != "resume" and getattr(self, name) is not UNSET]
        if self.resume is UNSET and self.audio is UNSET:
            raise ValueError("hello needs `audio` (encoding, sample_rate_hz), or `resume`")
        if self.resume is not UNSET and others:
            raise ValueError(f"hello with `resume` takes no other field, got {', '.join(others)}")


class Audio(Struct, frozen=True, forbid_unknown_fields=True, tag="audio"):
    """Bytes in the declared format."""

    data: bytes


class Flush(Struct, frozen=True, forbid_unknown_fields=True, tag="flush"):
    """A barrier behind the audio so far."""

    id: Id


class Update(Struct, frozen=True, forbid_unknown_fields=True, tag="update"):
    """Settings from the next utterance on."""

    id: Id
    language: str | None | UnsetType = UNSET
    task: str | UnsetType = UNSET
    vocabulary: Vocabulary | UnsetType = UNSET
    context: Context | UnsetType = UNSET
    hangover_ms: HangoverMs | UnsetType = UNSET
    sentence_hangover_ms: HangoverMs | None | UnsetType = UNSET
    turn_hangover_ms: HangoverMs | None | UnsetType = UNSET
    turn_threshold: TurnThreshold | UnsetType = UNSET
    speech_threshold: SpeechThreshold | UnsetType = UNSET
    pre_roll_ms: PreRollMs | UnsetType = UNSET
    partial_interval_ms: PartialIntervalMs | UnsetType = UNSET
    chunk_ms: ChunkMs | None | UnsetType = UNSET
    second_pass: bool | UnsetType = UNSET


class Bye(Struct, frozen=True, forbid_unknown_fields=True, tag="bye"):
    """Drain and close."""


ClientMessage: TypeAlias = Hello | Audio | Flush | Update | Bye


class Reformat(Struct, frozen=True):
    """The audio behind it is in another format. Doors may say so; it is not on the native wire, where the clock that a
    client resumes by counts samples of one rate.
    """

    audio: AudioSpec


Input: TypeAlias = ClientMessage | Reformat  # all that a session can be told


def parse(message: object) -> ClientMessage:
    """The typed message of a decoded JSON object or MessagePack map.

    Raises:
        ClientError: ``bad_message``, naming the field and what is accepted.
    """
    try:
        parsed: ClientMessage = msgspec.convert(message, ClientMessage)
    except (msgspec.ValidationError, UnicodeError) as error:
        raise ClientError("bad_message", str(error)) from error
    return parsed


# ---------------------------------------------------------------- from the server


class WordItem(Struct, frozen=True):
    """One word; its text keeps the leading space."""

    text: str
    start_s: float | None
    end_s: float | None
    confidence: float | None


class ModelItem(Struct, frozen=True):
    """One model of this server."""

    name: str
    languages: tuple[str, ...]
    capabilities: tuple[str, ...]


class EngineItem(Struct, frozen=True):
    """What computes, and why that."""

    backend: str
    why: str


class ChunkingItem(Struct, frozen=True):
    """How a model that decodes in chunks takes the audio; words are settled ``latency_ms`` behind it at most.

    Of an utterance nothing is settled before ``first_ms`` of it were heard, or it is over.
    """

    chunk_ms: int
    right_context_ms: int
    latency_ms: int
    first_ms: int
    second_pass: bool


class Limits(Struct, frozen=True):
    """Bounds a client has to keep."""

    max_frame_bytes: int
    max_unacked_s: float
    resume_window_s: float


class Ready(Struct, frozen=True, tag="ready"):
    """The session stands, or stands again."""

    protocol: int
    session_id: str
    resumed: bool
    taken_samples: int
    model: str
    language: str | None
    granted: tuple[str, ...]
    declined: tuple[str, ...]
    engine: EngineItem
    models: tuple[ModelItem, ...]
    limits: Limits
    chunking: ChunkingItem | None = None
    turn_model: str | None = None


class Ack(Struct, frozen=True, tag="ack"):
    """Samples per channel, at the client's rate, that are safe with the server."""

    samples: int


class SpeechStarted(Struct, frozen=True, tag="speech_started"):
    """Someone speaks."""

    event: int
    start_s: float
    onset_s: float


class SpeechEnded(Struct, frozen=True, tag="speech_ended"):
    """The utterance is over; ``end_s`` includes the padding behind the voice."""

    event: int
    speech_end_s: float
    end_s: float


class Partial(Struct, frozen=True, tag="partial"):
    """A segment so far."""

    event: int
    segment: int
    revision: int
    text: str
    start_s: float
    end_s: float
    words: tuple[WordItem, ...]
    n_committed: int
    language: str | None


class Final(Struct, frozen=True, tag="final"):
    """A segment for good."""

    event: int
    segment: int
    revision: int
    text: str
    start_s: float
    end_s: float
    words: tuple[WordItem, ...]
    n_committed: int
    language: str | None
    reason: str


class Flushed(Struct, frozen=True, tag="flushed"):
    """Everything before the barrier has been sent."""

    event: int
    id: str
    at_s: float


class Updated(Struct, frozen=True, tag="updated"):
    """Settings hold from here on."""

    event: int
    id: str
    at_s: float


class Warning(Struct, frozen=True, tag="warning"):
    """Something is only half as asked for; the session goes on."""

    event: int
    code: str
    message: str


class Error(Struct, frozen=True, tag="error"):
    """Something was refused or failed; ``id`` is that of the refused flush or update."""

    event: int | None  # None before ready, where there is no session to resume yet
    code: str
    message: str
    fatal: bool
    id: str | None = None


class Farewell(Struct, frozen=True, tag="bye"):
    """The last message of a drained session."""

    event: int
    reason: str
    audio_s: float


Event: TypeAlias = SpeechStarted | SpeechEnded | Partial | Final | Flushed | Updated | Warning | Error | Farewell
ServerMessage: TypeAlias = Ready | Ack | Event


def plain(message: ServerMessage) -> dict[str, Any]:
    """The message as plain dicts, lists and scalars, its ``type`` included."""
    built: dict[str, Any] = msgspec.to_builtins(message)
    return built
