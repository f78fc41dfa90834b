"""HTTP requests that carry a recording: the shell that makes one a conversation with a door.

Knows forms, bodies and their limits, and that a file is decoded on a thread. Does not know what a protocol asks or
answers; that is the door's.
"""

import asyncio
import io
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message

from gateway.audio_file import AudioFileError, DamagedAudioError, has_header, n_channels_of, stream_audio
from gateway.doors.deepgram_options import raw_format
from gateway.doors.door import AdmissionError, DoorKind, Frame
from gateway.effects import Close
from gateway.pcm import AudioFormat
from gateway.server import PeerGoneError, Server, knock_of

BLOCK_S = 1.0  # of audio decoded and handed to the door at once, so that long recordings need no memory
BODY_IDLE_S = 30.0  # without a byte of a request's body
BODY_S = 600.0  # for all of it
MAX_FIELD_BYTES = 1 << 20  # of a form's field that is not the file


@dataclass(frozen=True, slots=True)
class Upload:
    """A request's audio file, and its form fields where it has some."""

    data: bytes
    fields: tuple[tuple[str, str], ...] = ()
    raw: AudioFormat | None = None  # of audio without a header


class RequestTransport:
    """A request as a transport: what comes is its audio and an empty frame, what is sent is its answer."""

    may_idle = True

    def __init__(self, blocks: Iterator[NDArray[np.float32]]) -> None:
        """``blocks`` [n] each are mono at 16 kHz, decoded when they are asked for."""
        self._blocks = blocks
        self._is_ended = False
        self.damage: str | None = None  # why the audio ended early
        # Without a bound: a transcript is small, and a client that does not read it must not hold up its session.
        self._answer: asyncio.Queue[Frame | Close | None] = asyncio.Queue()
        self.is_gone = asyncio.Event()  # the client is not there any more
        self.is_open = True

    async def receive(self) -> Frame:
        """The next block. Behind the last one there is nothing but the client's going away."""
        if self.is_gone.is_set():
            raise PeerGoneError
        if self._is_ended:
            await self.is_gone.wait()
            raise PeerGoneError
        frame = await asyncio.to_thread(self._next_frame)
        self._is_ended = not frame
        return frame

    def _next_frame(self) -> bytes:
        try:
            return next((block.astype("<f4", copy=False).tobytes() for block in self._blocks if len(block)), b"")
        except DamagedAudioError as error:
            self.damage = str(error)
            return b""

    async def send(self, frame: Frame) -> None:
        """A piece of the body."""
        self._answer.put_nowait(frame)

    async def close(self, close: Close) -> None:
        """The body is whole; the close code is the status."""
        self.is_open = False
        self._answer.put_nowait(close)

    def end(self) -> None:
        """Nothing more will be sent."""
        self._answer.put_nowait(None)

    async def answer(self) -> AsyncIterator[Frame | Close]:
        """What the door says, up to its end."""
        while (item := await self._answer.get()) is not None:
            yield item


async def exchange(
    server: Server, kind: DoorKind, request: Request, read: Callable[[Request], Awaitable[Upload]]
) -> Response:
    """Answer a request that carries a recording; ``read`` takes its body apart."""
    knock = knock_of(request)
    try:
        server.check(kind, knock)
        with server.taking_upload():
            upload = await _read_within(request, read, server.max_upload_bytes)
        n_channels = await _n_channels_of(upload)
        knock = replace(knock, query=knock.query + upload.fields, n_channels=n_channels)
        admission = kind.open_door(knock, server.house)
        blocks = await _decoded(upload, n_channels if admission.takes_channels else None)
    except AdmissionError as error:
        return server.refusal(kind, error, knock)
    transport = RequestTransport(blocks)

    async def talk() -> None:
        try:
            await server.converse(transport, admission.door, kind.NAME)
        finally:
            transport.end()

    talking = asyncio.create_task(talk())
    if admission.is_streamed:
        return StreamingResponse(_streamed(transport, talking), headers=dict(admission.headers))
    return await _whole(transport, talking, request, admission.headers)


async def _streamed(transport: RequestTransport, talking: "asyncio.Task[None]") -> AsyncIterator[str | bytes]:
    try:
        async for item in transport.answer():
            if not isinstance(item, Close):
                yield item
        if transport.damage is not None:
            yield f": {transport.damage}\n\n"  # a comment, as server-sent events have it
    finally:
        transport.is_gone.set()
        await talking


async def _whole(
    transport: RequestTransport, talking: "asyncio.Task[None]", request: Request, headers: Mapping[str, str]
) -> Response:
    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        transport.is_gone.set()

    watching = asyncio.create_task(watch())
    body, status = b"", 500
    try:
        async for item in transport.answer():
            if isinstance(item, Close):
                status = item.code
            else:
                body += item.encode() if isinstance(item, str) else item
        await talking
    finally:
        watching.cancel()
    if status >= 400:
        return Response(body, status_code=status, headers={"Content-Type": "application/json"})
    damage = {} if transport.damage is None else {"X-Senseway-Damage": transport.damage}
    return Response(body, status_code=status, headers={**headers, **damage})


async def _read_within(request: Request, read: Callable[[Request], Awaitable[Upload]], max_bytes: int) -> Upload:
    """The upload, refused as soon as more than ``max_bytes`` are announced or have come, or when it comes too slowly.

    A body that trickles keeps a session's place from others.
    """
    too_large = AdmissionError(413, "request_too_large", f"a request may have {max_bytes >> 20} MiB at most")
    if int(request.headers.get("content-length", "0")) > max_bytes:
        raise too_large
    n_bytes = 0

    async def receive() -> Message:
        nonlocal n_bytes
        async with asyncio.timeout(BODY_IDLE_S):
            message = await request.receive()
        n_bytes += len(message.get("body", b""))
        if n_bytes > max_bytes:
            raise too_large
        return message

    try:
        async with asyncio.timeout(BODY_S):
            return await read(Request(request.scope, receive))
    except TimeoutError as error:
        raise AdmissionError(408, "request_timeout", "the request's body came too slowly") from error
    except ClientDisconnect as error:
        raise AdmissionError(400, "incomplete_request", "the request broke off") from error


async def body_within(request: Request, max_bytes: int) -> bytes:
    """The body of a request that carries no recording. Raises ``AdmissionError`` as soon as it is too long or slow."""
    upload = await _read_within(request, _as_it_is, max_bytes)
    return upload.data


async def _as_it_is(request: Request) -> Upload:
    return Upload(await request.body())


async def read_body(request: Request) -> Upload:
    """A request whose body is the recording."""
    if request.headers.get("content-type", "").startswith("application/json"):
        raise AdmissionError(400, "unsupported_source", "recordings are not fetched from a url here: send their bytes")
    data = await request.body()
    return Upload(data, raw=None if has_header(data) else raw_format(knock_of(request)))


async def read_form(request: Request) -> Upload:
    """A multipart form with a field ``file``."""
    try:
        async with request.form(max_files=1, max_part_size=MAX_FIELD_BYTES) as form:
            file = form.get("file")
            if not isinstance(file, UploadFile):
                raise AdmissionError(
                    400, "missing_required_parameter", "a multipart form with a field `file` is needed", param="file"
                )
            fields = tuple((name, value) for name, value in form.multi_items() if isinstance(value, str))
            return Upload(await file.read(), fields)
    except HTTPException as error:  # what an app makes of a MultiPartException
        raise AdmissionError(400, "invalid_form", f"not a form that can be read: {error.detail}") from error


async def _n_channels_of(upload: Upload) -> int:
    if upload.raw is not None:
        return upload.raw.n_channels
    try:
        return await asyncio.to_thread(n_channels_of, io.BytesIO(upload.data))
    except AudioFileError as error:
        raise AdmissionError(400, "invalid_file", str(error), param="file") from error


async def _decoded(upload: Upload, n_channels: int | None) -> Iterator[NDArray[np.float32]]:
    """The file's samples at 16 kHz in blocks, mono, or ``n_channels`` interleaved; the first one decoded already."""
    blocks = _channel(upload, None) if n_channels is None else _interleaved(upload, n_channels)
    try:
        first = await asyncio.to_thread(next, blocks)
    except AudioFileError as error:
        raise AdmissionError(400, "invalid_file", str(error), param="file") from error
    return itertools.chain([first], blocks)


def _channel(upload: Upload, channel: int | None) -> Iterator[NDArray[np.float32]]:
    return stream_audio(io.BytesIO(upload.data), block_s=BLOCK_S, raw=upload.raw, channel=channel)


def _interleaved(upload: Upload, n_channels: int) -> Iterator[NDArray[np.float32]]:
    """All channels, each decoded by itself."""
    channels = [_channel(upload, index) for index in range(n_channels)]
    for blocks in zip(*channels, strict=True):
        yield np.stack(blocks, axis=1).ravel()
