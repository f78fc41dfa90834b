"""The door of the native protocol: what PROTOCOL.md says is what a session says, so it only encodes.

Knows which codec a sub-protocol means and which messages a newer one replaces. Does not know what a message means.
"""

from gateway.codec import CODECS, Codec, choose_subprotocol
from gateway.doors.door import (
    Admission,
    AdmissionError,
    DoorEffect,
    Frame,
    House,
    Knock,
    LastWords,
    Leave,
    Open,
    Refusal,
    Refuse,
    Say,
    Tell,
)
from gateway.effects import Close, Said, SentencePaused, UtteranceOver
from gateway.errors import ERRORS, ClientError, GatewayError
from gateway.messages import Ack, Error, Partial, ServerMessage

NAME = "native"
RESUMES = True
KEY_SUBPROTOCOL = "senseway.key."
_TRACK = 0


class NativeDoor:
    """One connection, one session at a time: a resumed one takes the place of the one that asked for it."""

    next_wake_s = None

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def opened(self, now_s: float) -> list[DoorEffect]:
        """A session that waits for its hello."""
        return [Open(_TRACK)]

    def receive(self, frame: Frame, now_s: float) -> list[DoorEffect]:
        """Every frame is one message."""
        try:
            return [Tell(_TRACK, self._codec.decode(frame))]
        except ClientError as error:
            return [Refuse(_TRACK, error)]

    def heard(self, track: int, said: Said, now_s: float) -> list[DoorEffect]:
        """Everything the protocol has a message for."""
        match said:
            case UtteranceOver() | SentencePaused():
                return []
            case Close():
                return [said]
            case Partial(segment=segment):
                return [self._say(said, ("partial", segment))]
            case Ack():
                return [self._say(said, "ack")]
            case _:
                return [self._say(said)]

    def _say(self, message: ServerMessage, replaces: object = None) -> Say:
        return Say(self._codec.encode(message), replaces)

    def wake(self, now_s: float) -> list[DoorEffect]:
        """Never asked for."""
        return []

    def peer_gone(self, now_s: float) -> list[DoorEffect]:
        """The session can be resumed."""
        return [Leave(_TRACK)]

    def failed(self, error: GatewayError) -> list[LastWords]:
        """An error that belongs to no session, and a close."""
        code = ERRORS[error.code].close_code
        assert code is not None, f"{error.code} ends no connection"
        return [self._say(Error(None, error.code, str(error), fatal=True)), Close(code, error.code)]


def key_of(knock: Knock) -> str | None:
    """``Authorization: Bearer KEY``, or a browser's sub-protocol ``senseway.key.KEY``."""
    scheme, _, key = knock.headers.get("authorization", "").partition(" ")
    if scheme.lower() == "bearer":
        return key.strip()
    offered = (name.removeprefix(KEY_SUBPROTOCOL) for name in knock.subprotocols if name.startswith(KEY_SUBPROTOCOL))
    return next(offered, None)


def open_door(knock: Knock, house: House) -> Admission:
    """A door that speaks the first known sub-protocol of those offered."""
    subprotocol = choose_subprotocol(list(knock.subprotocols))
    if subprotocol is None:
        known = ", ".join(CODECS)
        raise AdmissionError(400, "bad_subprotocol", f"none of the offered sub-protocols is known; there are {known}")
    return Admission(NativeDoor(CODECS[subprotocol]), subprotocol if knock.subprotocols else None)


def refusal(error: AdmissionError, knock: Knock) -> Refusal:
    """``{"error": ..., "code": ...}``."""
    return Refusal({"error": str(error), "code": error.code})
