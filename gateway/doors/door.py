"""What a door is: one connection's translation between a wire protocol and the sessions behind it. Pure types.

A door is told what the client sends (``receive``) and what its sessions say (``heard``), and answers with effects that
the server carries out in the order given. It has no socket, thread or clock; README.md beside this file is the guide.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

from gateway.config import SessionConfig
from gateway.effects import Close, Said
from gateway.errors import ClientError, GatewayError
from gateway.messages import Input
from streaming.engine import ModelCard
from vad.gate import GateSettings

Frame: TypeAlias = str | bytes  # a text or a binary frame of a WebSocket; a TCP door has bytes only

# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Open:
    """Begin a session; its ``track`` is the door's own number for it. The session waits for a ``Hello``."""

    track: int


@dataclass(frozen=True, slots=True)
class Tell:
    """Give a session a message. Audio may be of any length: the server hands it over in pieces."""

    track: int
    message: Input


@dataclass(frozen=True, slots=True)
class Refuse:
    """Let a session say what was wrong with a message that never became one, as an event of its own."""

    track: int
    error: ClientError


@dataclass(frozen=True, slots=True)
class Say:
    """Send a frame to the client.

    One that waits behind a slow client is left out for a newer one with the same ``replaces``, since it says nothing
    beside that one. ``None``: it must be sent.
    """

    frame: Frame
    replaces: Hashable = None


@dataclass(frozen=True, slots=True)
class Leave:
    """The client is gone; the session waits to be resumed."""

    track: int


@dataclass(frozen=True, slots=True)
class Drop:
    """Nobody wants what the session has still to say: end it now."""

    track: int


@dataclass(frozen=True, slots=True)
class Publish:
    """Tell those who follow a call, for on its own connection nobody listens."""

    call_id: str
    event: Mapping[str, Any]  # Any: JSON


@dataclass(frozen=True, slots=True)
class Follow:
    """Send this connection what is published of a call; of all where ``call_id`` is empty."""

    call_id: str


DoorEffect: TypeAlias = Open | Tell | Refuse | Say | Leave | Drop | Publish | Follow | Close
LastWords: TypeAlias = Say | Close


class Door(Protocol):
    """One connection. Every time is monotonic seconds; audio positions come from the sessions' own clock."""

    @property
    def next_wake_s(self) -> float | None:
        """When ``wake`` wants to be called, ``None`` for never."""

    def opened(self, now_s: float) -> Sequence[DoorEffect]:
        """The connection stands. Called once, first."""

    def receive(self, frame: Frame, now_s: float) -> Sequence[DoorEffect]:
        """A frame came. Bad ones are answered in the protocol's own way; this never raises for what a peer sends."""

    def heard(self, track: int, said: Said, now_s: float) -> Sequence[DoorEffect]:
        """A session said something. ``Tell`` in the answer is carried out once all that it said has been heard."""

    def wake(self, now_s: float) -> Sequence[DoorEffect]:
        """``next_wake_s`` has come."""

    def peer_gone(self, now_s: float) -> Sequence[DoorEffect]:
        """The connection is gone, whoever closed it. Nothing said from now on reaches anybody.

        Answer for each open track: ``Leave``, ``Drop``, or a last ``Bye`` whose events are still worth hearing.
        """

    def failed(self, error: GatewayError) -> Sequence[LastWords]:
        """The server gives this connection up; say so and close. ``error.code`` is a fatal one of ``ERRORS``."""


# ---------------------------------------------------------------- the handshake


@dataclass(frozen=True, slots=True)
class Knock:
    """What a client's handshake, or its HTTP request, says before anything is accepted."""

    path: str
    query: tuple[tuple[str, str], ...] = ()  # in order, repeated keys as they come
    headers: Mapping[str, str] = field(default_factory=dict)  # names in lower case
    subprotocols: tuple[str, ...] = ()
    url: str = ""  # whole, as the server sees it: behind a proxy scheme and host come from its forwarding headers
    connection_id: str = "0" * 32  # 32 hex digits, random: ids of whatever belongs to the connection are made from it
    at_unix_s: float = 0.0  # the wall clock, for protocols that print dates
    n_channels: int = 1  # of the recording that a request carries

    def param(self, name: str) -> str | None:
        """The last value of a query parameter, ``None`` if it is absent."""
        return dict(self.query).get(name)

    def params(self, name: str) -> tuple[str, ...]:
        """Every value of a repeated query parameter."""
        return tuple(value for key, value in self.query if key == name)


MAX_QUOTED_CHARACTERS = 500


def brief(text: str) -> str:
    """``text`` that quotes a client, cut: what it sent may be as long as a frame."""
    return text if len(text) <= MAX_QUOTED_CHARACTERS else f"{text[: MAX_QUOTED_CHARACTERS - 1]}…"


class AdmissionError(Exception):
    """The client may not come in; ``code`` is a word of ours that a door translates, ``param`` what it is about."""

    def __init__(
        self, status: int, code: str, message: str, *, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        self.status = status  # of HTTP
        self.code = code
        self.param = param
        self.retry_after_s = retry_after_s
        super().__init__(brief(message))


@dataclass(frozen=True, slots=True)
class Refusal:
    """The HTTP answer to one who is refused: a JSON body in the protocol's own shape."""

    body: Mapping[str, Any]  # Any: JSON
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Admission:
    """The answer to a handshake, or to an HTTP request, that is accepted.

    A request's door gets the audio of its file as frames, and an empty one behind them. What it says is the body, and
    the code of its ``Close`` the status, unless it ``is_streamed``: then the answer begins with the first frame. The
    audio is mixed down to one channel, unless the door ``takes_channels``: then all of them come, interleaved.
    """

    door: Door
    subprotocol: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    is_streamed: bool = False
    takes_channels: bool = False


@dataclass(frozen=True, slots=True)
class House:
    """What doors may know of the server."""

    cards: Mapping[str, ModelCard]  # the default first
    gate: GateSettings
    session: SessionConfig
    aliases: Mapping[str, str] = field(default_factory=dict)  # a name that clients use → the model that is meant
    has_turn_model: bool = False  # a session may ask for ``turn_hangover_ms``
    is_strict: bool = False  # options without effect are refused, not only named
    twilio_auth_token: str = field(default="", repr=False)  # signs Twilio's streams; empty: not looked at

    @property
    def default_model(self) -> str:
        """The model of who names none."""
        return next(iter(self.cards))

    def model_named(self, name: str, *, foreign: Sequence[str] = ()) -> str | None:
        """The model that ``name`` means here, ``None`` if nobody knows.

        ``foreign`` are the beginnings of names that belong to the hosted service whose protocol a door speaks: they
        mean the default, so that a client need not know what runs here.
        """
        wanted = self.aliases.get(name, name)
        if wanted in self.cards:
            return wanted
        return self.default_model if name.startswith(tuple(foreign)) else None


class DoorKind(Protocol):
    """What the module of a door offers; the server has one for each path."""

    @property
    def NAME(self) -> str:  # noqa: N802  # a module's constant
        """The door's name in metrics and logs."""

    @property
    def RESUMES(self) -> bool:  # noqa: N802
        """Whether a client may come for a session that the server holds already, so that being full keeps none out."""

    def key_of(self, knock: Knock) -> str | None:
        """The key that the client shows, wherever this protocol has it."""

    def open_door(self, knock: Knock, house: House) -> Admission:
        """A door for this connection. Raises ``AdmissionError``."""

    def refusal(self, error: AdmissionError, knock: Knock) -> Refusal:
        """What to answer to one who is refused, by this door or before it."""
