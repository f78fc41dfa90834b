"""What can go wrong on the wire, and whose fault it is.

GatewayError
    ClientError     the peer broke the protocol; safe to explain to it
    ServerError     ours; the client gets a code, the log gets the story

Each kind is a row of ``ERRORS`` (PROTOCOL.md prints the same table): whether it ends the connection, and with which
WebSocket close code.
"""

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class ErrorKind:
    """One row of the error table. ``close_code`` is ``None`` for an error after which the session goes on."""

    close_code: int | None

    @property
    def is_fatal(self) -> bool:
        """Whether the connection ends with it."""
        return self.close_code is not None


ERRORS: Final[dict[str, ErrorKind]] = {
    "bad_message": ErrorKind(None),
    "empty_audio": ErrorKind(None),
    "hello_required": ErrorKind(None),
    "already_greeted": ErrorKind(None),
    "unsupported_audio": ErrorKind(None),
    "unknown_model": ErrorKind(None),
    "missing_capability": ErrorKind(None),
    "unsupported_option": ErrorKind(None),
    "decode_failed": ErrorKind(None),
    "unknown_session": ErrorKind(None),
    "hello_timeout": ErrorKind(4408),
    "too_slow": ErrorKind(4409),
    "idle_timeout": ErrorKind(4411),
    "taken_over": ErrorKind(4410),
    "server_full": ErrorKind(1013),
    "internal": ErrorKind(1011),
    "shutting_down": ErrorKind(1012),
}


class GatewayError(Exception):
    """An error with a stable ``code`` of ``ERRORS``."""

    def __init__(self, code: str, message: str) -> None:
        assert code in ERRORS, f"undocumented error code {code}"
        self.code = code
        super().__init__(message)


class ClientError(GatewayError):
    """The peer broke the protocol or asked for what is not offered."""


class ServerError(GatewayError):
    """A fault of ours."""
