"""What a session wants done: values that the server carries out in the order given.

Know nothing of how. Work for the detector and the engine is not here: the server asks the session for it when there is
room (``windows_to_score``, ``next_decode``), so that what is computed is always the newest.
"""

from dataclasses import dataclass

from gateway.messages import ServerMessage
from streaming.engine import DecodeOptions


@dataclass(frozen=True, slots=True)
class Send:
    """Send ``message`` to the client, if one is there."""

    message: ServerMessage


@dataclass(frozen=True, slots=True)
class OpenStream:
    """Open an engine stream; every later decode that names ``stream_id`` uses it."""

    stream_id: int
    model: str
    options: DecodeOptions


@dataclass(frozen=True, slots=True)
class CloseStream:
    """Free an engine stream; no decode will name it again."""

    stream_id: int


@dataclass(frozen=True, slots=True)
class UtteranceOver:
    """The oldest utterance still in work is over: its finals have been sent, or it had none.

    Said once for each ``speech_started``, in order, for protocols that answer each turn, words or not. Where a model of
    turns judged the pause that it ended in, with the ``turn_probability`` that the speaker was done.
    """

    turn_probability: float | None = None


@dataclass(frozen=True, slots=True)
class SentencePaused:
    """The speaker pauses, and may well be done: the words read as a finished sentence, and have been sent.

    Of a session that asked a model of turns its ``probability`` that the speaker is done, however low and however the
    words read.
    """

    probability: float | None = None


@dataclass(frozen=True, slots=True)
class Resume:
    """The client wants another session back: attach this connection to it, or refuse with ``unknown_session``."""

    session_id: str
    last_event: int


@dataclass(frozen=True, slots=True)
class Close:
    """Close the connection with a WebSocket close code, once everything before it has been sent."""

    code: int
    reason: str


Effect = Send | OpenStream | CloseStream | UtteranceOver | SentencePaused | Resume | Close
Said = ServerMessage | UtteranceOver | SentencePaused | Close  # what a door hears of it
