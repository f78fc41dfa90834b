"""One caller's side of a session, without a socket: what to say next, what is safe with the server, what to say again.

Knows the order of messages and every byte that the server has not acknowledged. Does not know sockets, encodings of
messages, clocks or tasks; ``client.py`` has those.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeAlias

from .client_events import Ack, ErrorEvent, Event, Flushed, ProtocolError, Ready, ServerMessage, Updated

PROTOCOL_VERSION = 1
FRAME_S = 0.25  # longer audio is cut, so that acknowledgements come at least this often
_FRAME_MARGIN_BYTES = 64  # what MessagePack may add around the audio

BYTES_PER_SAMPLE = {"s16le": 2, "s24le": 3, "s32le": 4, "f32le": 4, "mulaw": 1, "alaw": 1, "s16be": 2}


class Unchanged(Enum):
    """A setting that an update leaves as it is (``None`` is a language: the one that the model hears)."""

    UNCHANGED = "unchanged"


@dataclass(frozen=True, slots=True)
class AudioFormat:
    """The format of the bytes. ``channel`` picks one of the interleaved channels; ``None`` mixes them down."""

    encoding: str = "s16le"  # one of BYTES_PER_SAMPLE
    sample_rate_hz: int = 16_000  # 8000..48000
    channels: int = 1  # 1..8
    channel: int | None = None

    def __post_init__(self) -> None:
        """Raises ``ValueError`` for an encoding whose size is unknown or a rate or count below 1."""
        if self.encoding not in BYTES_PER_SAMPLE:
            raise ValueError(f"unknown encoding {self.encoding!r}; known are {', '.join(BYTES_PER_SAMPLE)}")
        if self.sample_rate_hz < 1 or self.channels < 1:
            raise ValueError(f"{self.sample_rate_hz} Hz, {self.channels} channels: both must be at least 1")

    @property
    def frame_bytes(self) -> int:
        """Size of one sample of every channel."""
        return BYTES_PER_SAMPLE[self.encoding] * self.channels

    @property
    def bytes_per_s(self) -> int:
        """Size of one second."""
        return self.frame_bytes * self.sample_rate_hz


@dataclass(frozen=True, slots=True)
class Hello:
    """What a session asks for; what is left at its default is the server's choice."""

    audio: AudioFormat = field(default_factory=AudioFormat)
    model: str | None = None
    language: str | None = None  # ISO 639-1; None lets the model detect it
    task: str | None = None  # "transcribe" or "translate"
    vocabulary: tuple[str, ...] = ()
    context: str = ""
    require: tuple[str, ...] = ()
    prefer: tuple[str, ...] = ()
    hangover_ms: int | None = None  # 100..10000
    sentence_hangover_ms: int | None = None  # 100..10000; of what reads as a finished sentence
    turn_hangover_ms: int | None = None  # 100..10000; where the server's model of turns takes the speaker to be done
    turn_threshold: float | None = None  # 0.05..1; its probability from which that is so
    speech_threshold: float | None = None  # 0.05..0.95
    pre_roll_ms: int | None = None  # 300..2000
    partial_interval_ms: int | None = None  # 100..10000
    chunk_ms: int | None = None  # 160..2000, whole frames; of models that decode in chunks
    second_pass: bool | None = None  # finals decoded once more in one piece; of the same models

    def message(self) -> dict[str, Any]:
        """The message of a new session."""
        chosen = {
            name: list(value) if isinstance(value, tuple) else value
            for name in [item.name for item in dataclasses.fields(self) if item.name != "audio"]
            if (value := getattr(self, name)) not in (None, (), "")
        }
        return {"type": "hello", "audio": dataclasses.asdict(self.audio), **chosen}


@dataclass(frozen=True, slots=True)
class Settings:
    """What an update changes from the next utterance on; the rest stays as it is."""

    language: str | None | Unchanged = Unchanged.UNCHANGED
    task: str | Unchanged = Unchanged.UNCHANGED
    vocabulary: tuple[str, ...] | Unchanged = Unchanged.UNCHANGED
    context: str | Unchanged = Unchanged.UNCHANGED
    hangover_ms: int | Unchanged = Unchanged.UNCHANGED
    sentence_hangover_ms: int | None | Unchanged = Unchanged.UNCHANGED
    turn_hangover_ms: int | None | Unchanged = Unchanged.UNCHANGED
    turn_threshold: float | Unchanged = Unchanged.UNCHANGED
    speech_threshold: float | Unchanged = Unchanged.UNCHANGED
    pre_roll_ms: int | Unchanged = Unchanged.UNCHANGED
    partial_interval_ms: int | Unchanged = Unchanged.UNCHANGED
    chunk_ms: int | None | Unchanged = Unchanged.UNCHANGED  # None: what the model recommends
    second_pass: bool | Unchanged = Unchanged.UNCHANGED

    def message(self) -> dict[str, Any]:
        """The fields of the update's message, without its id."""
        changed = {
            name: list(value) if isinstance(value, tuple) else value
            for name in [item.name for item in dataclasses.fields(self)]
            if (value := getattr(self, name)) is not Unchanged.UNCHANGED
        }
        return {"type": "update", **changed}


@dataclass(frozen=True, slots=True)
class _Entry:
    """One message of ours at its place in the audio: ``data`` is bytes of audio, or a message between two of them."""

    start_byte: int
    data: bytes | dict[str, Any]

    @property
    def end_byte(self) -> int:
        return self.start_byte + (len(self.data) if isinstance(self.data, bytes) else 0)


Outgoing: TypeAlias = bytes | Mapping[str, Any]


class ClientSession:
    """What one session has said and heard, across any number of connections.

    On each connection: send ``hello()``, give every message that comes to ``receive``; once that was a ``Ready``, send
    what ``next_message`` returns until it returns ``None``, and ask again after each ``receive`` and each ``add_…``.
    """

    def __init__(self, hello: Hello) -> None:
        self._hello = hello
        self._log: deque[_Entry] = deque()  # what the server may not have yet, in the order said
        self._n_sent = 0  # entries of the log sent on this connection
        self._added_bytes = 0
        self._sent_bytes = 0
        self._acked_bytes = 0
        self._open_ids: set[str] = set()  # flushes and updates that wait for their answer
        self._last_event = 0
        self._n_ids = 0
        self.ready: Ready | None = None

    @property
    def sent_s(self) -> float:
        """Audio sent so far."""
        return self._sent_bytes / self._hello.audio.bytes_per_s

    @property
    def unacked_s(self) -> float:
        """Audio added that is not yet safe with the server, sent or not."""
        return (self._added_bytes - self._acked_bytes) / self._hello.audio.bytes_per_s

    @property
    def has_room(self) -> bool:
        """Whether more audio may be added without holding more than the server's limit. Needs ``ready``."""
        assert self.ready is not None, "no limits before ready"
        return self.unacked_s <= self.ready.limits.max_unacked_s

    def hello(self) -> dict[str, Any]:
        """The first message of a connection: a new session's, or the one that takes this session up again."""
        if self.ready is None:
            return self._hello.message()
        return {"type": "hello", "resume": {"session_id": self.ready.session_id, "last_event": self._last_event}}

    def add_audio(self, data: bytes) -> None:
        """Say ``data``, of any length; nothing if it is empty. Needs ``ready``."""
        size = self._frame_size_bytes()
        for start in range(0, len(data), size):
            self._add(bytes(data[start : start + size]))

    def add_flush(self) -> str:
        """Say flush; returns the id that the answer will have."""
        return self._add_with_id({"type": "flush"})

    def add_update(self, settings: Settings) -> str:
        """Say update; returns the id that the answer will have."""
        return self._add_with_id(settings.message())

    def add_bye(self) -> None:
        """Say bye."""
        self._add({"type": "bye"})

    def next_message(self) -> Outgoing | None:
        """What to send next: audio as bytes, or a message. ``None``: all is sent, or too much is unacknowledged."""
        while self._n_sent < len(self._log):
            entry = self._log[self._n_sent]
            if isinstance(entry.data, bytes):
                return self._next_audio(entry, entry.data)
            self._n_sent += 1
            if not self._is_answered(entry.data):  # it can be, after a resume
                return entry.data
        return None

    def receive(self, message: ServerMessage) -> Event | None:
        """Take a message of the server; returns what the caller should see of it: each event once, and no answer twice.

        Raises:
            ProtocolError: if the server speaks another version, or has forgotten audio that it acknowledged.
        """
        match message:
            case Ready():
                self._begin(message)
                return None
            case Ack():
                self._acknowledge(message.samples * self._hello.audio.frame_bytes)
                return None
        if message.event is not None:
            if message.event <= self._last_event:
                return None
            self._last_event = message.event
        answered_id = message.id if isinstance(message, Flushed | Updated | ErrorEvent) else None
        if answered_id is not None:
            if answered_id not in self._open_ids:
                return None  # said twice because a connection was lost in between
            self._open_ids.remove(answered_id)
            self._forget()
        return message

    def _frame_size_bytes(self) -> int:
        assert self.ready is not None, "no limits before ready"
        limits = self.ready.limits
        frame_s = min(FRAME_S, limits.max_unacked_s / 4)  # so that there is always room for one
        limit_bytes = min(frame_s * self._hello.audio.bytes_per_s, limits.max_frame_bytes - _FRAME_MARGIN_BYTES)
        return max(1, math.floor(limit_bytes / self._hello.audio.frame_bytes)) * self._hello.audio.frame_bytes

    def _add(self, data: bytes | dict[str, Any]) -> None:
        entry = _Entry(self._added_bytes, data)
        self._log.append(entry)
        self._added_bytes = entry.end_byte

    def _add_with_id(self, message: dict[str, Any]) -> str:
        self._n_ids += 1
        message_id = f"{message['type']}-{self._n_ids}"
        self._open_ids.add(message_id)
        self._add({**message, "id": message_id})
        return message_id

    def _next_audio(self, entry: _Entry, data: bytes) -> bytes | None:
        assert self.ready is not None, "no limits before ready"
        unacked_bytes = entry.end_byte - self._acked_bytes
        if unacked_bytes > self.ready.limits.max_unacked_s * self._hello.audio.bytes_per_s:
            return None
        rest = data[self._sent_bytes - entry.start_byte :]  # after a resume the server may have its beginning
        self._sent_bytes = entry.end_byte
        self._n_sent += 1
        return rest

    def _is_answered(self, message: Mapping[str, Any]) -> bool:
        return "id" in message and message["id"] not in self._open_ids

    def _begin(self, ready: Ready) -> None:
        if ready.protocol != PROTOCOL_VERSION:
            raise ProtocolError(f"the server speaks protocol {ready.protocol}, this client {PROTOCOL_VERSION}")
        taken_bytes = ready.taken_samples * self._hello.audio.frame_bytes
        if not self._acked_bytes <= taken_bytes <= self._added_bytes:
            raise ProtocolError(
                f"the server goes on from byte {taken_bytes}; it has acknowledged {self._acked_bytes}"
                f" and was given {self._added_bytes}"
            )
        self.ready = ready
        self._n_sent = 0
        self._sent_bytes = taken_bytes
        self._acknowledge(taken_bytes)

    def _acknowledge(self, acked_bytes: int) -> None:
        self._acked_bytes = max(self._acked_bytes, acked_bytes)
        self._forget()

    def _forget(self) -> None:
        """Drop from the log's beginning what the server surely has.

        Audio is acknowledged. A message between audio was received if audio behind it was, as the bytes of a
        connection keep their order; else its answer tells.
        """
        while self._log and self._is_done(self._log[0]):
            self._log.popleft()
            self._n_sent = max(0, self._n_sent - 1)

    def _is_done(self, entry: _Entry) -> bool:
        if isinstance(entry.data, bytes):
            return entry.end_byte <= self._acked_bytes
        return self._is_answered(entry.data) or entry.start_byte < self._acked_bytes
