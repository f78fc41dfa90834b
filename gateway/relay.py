"""A WebSocket from one worker of a server to another, in the name of a client whose session lives there."""

from pathlib import Path
from urllib.parse import urlencode

from websockets.asyncio.client import connect, unix_connect
from websockets.typing import Origin, Subprotocol

from gateway.doors.door import Knock

OPEN_TIMEOUT_S = 5.0


def connect_worker(home: Path, knock: Knock) -> connect:
    """A connection to the worker that listens at ``home``, which is told what the client said in its handshake."""
    query = f"?{urlencode(knock.query)}" if knock.query else ""
    key = knock.headers.get("authorization")
    origin = knock.headers.get("origin")
    return unix_connect(
        str(home),
        f"ws://{knock.headers.get('host', 'worker')}{knock.path}{query}",
        subprotocols=[Subprotocol(name) for name in knock.subprotocols] or None,
        additional_headers=None if key is None else {"Authorization": key},
        origin=None if origin is None else Origin(origin),
        compression=None,
        max_size=None,
        max_queue=None,
        ping_interval=None,
        open_timeout=OPEN_TIMEOUT_S,
    )
