"""Bytes to messages and back, in the two encodings of the native protocol. Pure.

Knows JSON and MessagePack and which kind of WebSocket frame carries what. Does not know what a message means.
"""

from typing import Protocol

import msgpack
import msgspec

from gateway.errors import ClientError
from gateway.messages import Audio, ClientMessage, ServerMessage, parse, plain

JSON_SUBPROTOCOL = "senseway.v1.json"
MSGPACK_SUBPROTOCOL = "senseway.v1.msgpack"


class Codec(Protocol):
    """One encoding: a whole WebSocket frame, text or bytes, against a message."""

    def decode(self, frame: str | bytes) -> ClientMessage:
        """Raises ``ClientError``."""

    def encode(self, message: ServerMessage) -> str | bytes:
        """The frame to send."""


class JsonCodec:
    """Text frames hold one JSON object; binary frames are audio."""

    def decode(self, frame: str | bytes) -> ClientMessage:
        """The message in ``frame``."""
        if isinstance(frame, bytes):
            return Audio(frame)
        try:
            message = msgspec.json.decode(frame)
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise ClientError("bad_message", f"not a JSON object: {error}") from error
        if isinstance(message, dict) and message.get("type") == "audio":
            raise ClientError("bad_message", "audio is a binary frame in the JSON sub-protocol, not text")
        return parse(message)

    def encode(self, message: ServerMessage) -> str:
        """``message`` as a text frame."""
        return msgspec.json.encode(message).decode()


class MsgpackCodec:
    """Binary frames hold one MessagePack map; there are no text frames."""

    def decode(self, frame: str | bytes) -> ClientMessage:
        """The message in ``frame``."""
        if isinstance(frame, str):
            raise ClientError(
                "bad_message", "a text frame in the MessagePack sub-protocol, which has only binary frames"
            )
        try:
            message = msgpack.unpackb(frame, raw=False, strict_map_key=True)
        except (ValueError, msgpack.UnpackException, RecursionError) as error:
            raise ClientError("bad_message", f"not one MessagePack map: {error!r}") from error
        if isinstance(message, dict) and isinstance(message.get("data"), str):
            raise ClientError("bad_message", "audio data is text (str) where bytes (bin) belong")
        return parse(message)

    def encode(self, message: ServerMessage) -> bytes:
        """``message`` as a binary frame."""
        packed: bytes = msgpack.packb(plain(message), use_bin_type=True)
        return packed


CODECS: dict[str, Codec] = {JSON_SUBPROTOCOL: JsonCodec(), MSGPACK_SUBPROTOCOL: MsgpackCodec()}


def choose_subprotocol(offered: list[str]) -> str | None:
    """The first offered sub-protocol that is known; JSON if none is offered; ``None`` if none is known."""
    if not offered:
        return JSON_SUBPROTOCOL
    return next((name for name in offered if name in CODECS), None)
