"""What the processes of one server know of each other: how many sessions there are, whose a session is, figures, calls.

A server in one process is alone; ``WorkerPeers`` is one of several workers. Does not know how workers are started.
"""

import asyncio
import secrets
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import msgspec

FETCH_TIMEOUT_S = 2.0
READY = b"\0"  # what a worker says first; all else are calls' events


class Peers(Protocol):
    """The other processes, as a server sees them."""

    @property
    def n_sessions_elsewhere(self) -> int:
        """Open sessions of the others."""

    def tell_sessions(self, n_open: int) -> None:
        """So many are open here."""

    def new_session_id(self) -> str:
        """One that nobody has, or can guess."""

    def home_of(self, session_id: str) -> Path | None:
        """The socket of the other process whose session it is, if it is another's."""

    def publish(self, call_id: str, event: str) -> None:
        """Have the others tell their followers of a call."""

    async def fetch(self, path: str, headers: Mapping[str, str]) -> dict[str, bytes]:
        """What the others answer to an HTTP request, by their names; who does not answer is left out."""

    @property
    def name(self) -> str:
        """This process's, among them."""


class Alone:
    """There are no others."""

    name = ""
    n_sessions_elsewhere = 0

    def tell_sessions(self, n_open: int) -> None:
        """Nobody asks."""

    def new_session_id(self) -> str:
        """See ``Peers``."""
        return secrets.token_urlsafe(16)

    def home_of(self, session_id: str) -> Path | None:
        """Every session is here."""
        return None

    def publish(self, call_id: str, event: str) -> None:
        """All followers are here."""

    async def fetch(self, path: str, headers: Mapping[str, str]) -> dict[str, bytes]:
        """Nobody answers."""
        return {}


class WorkerPeers:
    """The other workers of a server. Sessions' identifiers end in the number of the worker that has them."""

    def __init__(self, index: int, n_open: Any, folder: Path, pipe: "Connection[bytes, bytes]") -> None:
        """``n_open``: C ints in memory that all share, one a worker, which has no type of its own; ``folder``: of the
        workers' sockets; ``pipe``: to the parent.
        """
        self.name = str(index)
        self._index = index
        self._n_open = n_open
        self._folder = folder
        self._pipe = pipe

    @property
    def n_sessions_elsewhere(self) -> int:
        """See ``Peers``."""
        return sum(n for index, n in enumerate(self._n_open) if index != self._index)

    def tell_sessions(self, n_open: int) -> None:
        """See ``Peers``."""
        self._n_open[self._index] = n_open

    def new_session_id(self) -> str:
        """See ``Peers``."""
        return f"{secrets.token_urlsafe(16)}.{self._index}"

    def home_of(self, session_id: str) -> Path | None:
        """See ``Peers``."""
        index = session_id.rpartition(".")[2]
        is_other = index.isascii() and index.isdigit() and int(index) < len(self._n_open) and int(index) != self._index
        return socket_of(self._folder, int(index)) if is_other else None

    def publish(self, call_id: str, event: str) -> None:
        """See ``Peers``."""
        self._pipe.send_bytes(msgspec.msgpack.encode((call_id, event)))

    async def fetch(self, path: str, headers: Mapping[str, str]) -> dict[str, bytes]:
        """See ``Peers``."""
        others = [index for index in range(len(self._n_open)) if index != self._index]
        answers = await asyncio.gather(*(_fetch(socket_of(self._folder, index), path, headers) for index in others))
        return {str(index): answer for index, answer in zip(others, answers, strict=True) if answer is not None}


def published(data: bytes) -> tuple[str, str]:
    """The call and the event that another worker tells of."""
    return msgspec.msgpack.decode(data, type=tuple[str, str])


def socket_of(folder: Path, index: int) -> Path:
    """Where a worker listens for the others."""
    return folder / f"worker-{index}"


async def _fetch(socket: Path, path: str, headers: Mapping[str, str]) -> bytes | None:
    """The body that the worker at ``socket`` answers with; ``None`` if it does not answer well, or in time."""
    lines = [f"GET {path} HTTP/1.0", "Host: worker", *(f"{name}: {value}" for name, value in headers.items())]
    try:
        async with asyncio.timeout(FETCH_TIMEOUT_S):
            reader, writer = await asyncio.open_unix_connection(socket)
            try:
                writer.write("\r\n".join([*lines, "", ""]).encode("latin-1"))
                head, _, body = (await reader.read()).partition(b"\r\n\r\n")
            finally:
                writer.close()
    except OSError:  # TimeoutError is one
        return None
    return body if head.split(b" ", 2)[1:2] == [b"200"] else None
