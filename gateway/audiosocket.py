"""Asterisk's AudioSocket over TCP: the shell that makes packets of a byte stream. What they mean is the door's part."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from gateway.config import ServerConfig
from gateway.doors.door import Frame, Knock
from gateway.doors.telephony import NAME, audiosocket_door
from gateway.effects import Close
from gateway.server import PeerGoneError, Server

HEADER_BYTES = 3  # a type, and the length of what follows


class PacketTransport:
    """One TCP connection. A frame is a packet without its length; nothing is sent back."""

    may_idle = False
    is_open = True

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    async def receive(self) -> Frame:
        """The next packet, however the network cut it."""
        try:
            header = await self._reader.readexactly(HEADER_BYTES)
            return header[:1] + await self._reader.readexactly(int.from_bytes(header[1:], "big"))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise PeerGoneError from error

    async def send(self, frame: Frame) -> None:
        """Asterisk wants steady audio or none at all, so nothing goes back."""

    async def close(self, close: Close) -> None:
        """End the connection."""
        self.is_open = False
        self._writer.close()


@asynccontextmanager
async def audiosocket_listener(server: Server, settings: ServerConfig) -> AsyncIterator[int | None]:
    """Listen while the block lasts, if a port is set; gives the port."""
    if not settings.audiosocket_port:
        yield None
        return

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        knock = Knock(path="", connection_id=secrets.token_hex(16), at_unix_s=time.time())
        try:
            await server.converse(PacketTransport(reader, writer), audiosocket_door(knock, server.house), NAME)
        finally:
            writer.close()

    reuse_port = True if settings.workers > 1 else None
    async with await asyncio.start_server(
        talk, settings.host, settings.audiosocket_port, reuse_port=reuse_port
    ) as listener:
        yield listener.sockets[0].getsockname()[1]
