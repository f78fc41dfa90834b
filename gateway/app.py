"""Puts the gateway together: configuration → engines and detector → server → one ASGI app.

The app is the same whether uvicorn serves it, another process mounts it, or a test drives it.
"""

import gc
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.websockets import WebSocket
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from websockets.http11 import Request as Handshake

from gateway.audiosocket import audiosocket_listener
from gateway.config import Config, ConfigError
from gateway.doors import (
    calls,
    deepgram,
    deepgram_file,
    deepgram_turns,
    native,
    openai_realtime,
    openai_rest,
    telephony,
)
from gateway.doors.door import AdmissionError, DoorKind
from gateway.exchange import Upload, body_within, exchange, read_body, read_form
from gateway.keys import Keys
from gateway.messages import MAX_FRAME_BYTES
from gateway.metrics import CONTENT_TYPE, labelled
from gateway.peers import Peers
from gateway.server import Server, knock_of
from gateway.session import ServedModel, model_item
from gateway.worker import Worker
from streaming.engine import SpeechEngine
from streaming.transducer import chunking_of
from vad.audio import samples_from_ms
from vad.detector import SpeechDetector
from vad.levels import TwoLevelDetector
from vad.silero import SileroDetector
from vad.turn import TurnDetector

WEBSOCKET_DOORS: Mapping[str, DoorKind] = {
    "/v1/stream": native,
    "/v1/realtime": openai_realtime,
    "/v1/listen": deepgram,
    "/v2/listen": deepgram_turns,
    "/v1/calls": calls,
    "/v1/calls/{call}": calls,
    "/telephony/{provider}": telephony,
    "/telephony/{provider}/{key}": telephony,
}
MAX_FRAME_BYTES_AT: Mapping[str, int] = {"/v1/realtime": openai_realtime.MAX_EVENT_BYTES}  # elsewhere MAX_FRAME_BYTES
REQUEST_DOORS: Mapping[str, tuple[DoorKind, Callable[[Request], Awaitable[Upload]]]] = {
    "/v1/audio/transcriptions": (openai_rest, read_form),
    "/v1/audio/translations": (openai_rest, read_form),
    "/v1/listen": (deepgram_file, read_body),
}
GRANT_LIFE_S = 30  # upstream's own
OWN_FIGURES = "own"  # of a worker, not of all
PING_INTERVAL_S = 20.0
MAX_WAITING, MAX_WAITING_BYTES = 4, 1 << 14  # messages of one client, and of the last of them, read ahead
SWITCH_INTERVAL_S = 0.001
DEMO_FOLDER = Path(__file__).resolve().parent.parent / "demo_web"


class Page(StaticFiles):
    """The demo page; browsers ask each time, so that an upgrade never leaves them with modules of two versions."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:  # Any: handed on as they come
        """See ``StaticFiles``."""
        response = super().file_response(*args, **kwargs)
        response.headers["Cache-Control"] = "no-cache"
        return response


def build_app(
    config: Config,
    engines: Mapping[str, SpeechEngine],
    detector: SpeechDetector | None = None,
    keys: Keys | None = None,
    twilio_auth_token: str = "",
    turn_detector: TurnDetector | None = None,
    peers: Peers | None = None,
) -> Starlette:
    """The ASGI app that serves ``engines`` (name → engine, the default first) to who shows one of ``keys``, if any.

    With ``twilio_auth_token`` Twilio's media streams must be signed with it. ``turn_detector`` judges the pauses of who
    asks for it. ``peers`` are the other workers of a server that has several.

    Raises:
        ConfigError: if a model lacks a capability that ``config`` requires, or can't take its chunks.
    """
    _check_capabilities(config, engines)
    _check_chunks(config, engines)
    detector = detector or default_detector()
    models = {name: ServedModel(engine.card, engine) for name, engine in engines.items()}
    turn_model = None if turn_detector is None else turn_detector.name
    worker = Worker(engines, detector, turn_detector)
    server = Server(models, worker, detector, config, keys, twilio_auth_token, turn_model, peers)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        server.start()
        async with audiosocket_listener(server, config.server):
            yield
        await server.stop()

    page = [Mount("/", Page(directory=DEMO_FOLDER, html=True))] if DEMO_FOLDER.is_dir() else []
    app = Starlette(routes=[*_doors(server), *_about(server), *page], lifespan=lifespan)
    app.state.server = server
    return app


def default_detector() -> SpeechDetector:
    """What sessions hear speech with."""
    return TwoLevelDetector(SileroDetector())


def _doors(server: Server) -> list[BaseRoute]:
    """Where clients come in."""

    def websocket_route(path: str, kind: DoorKind) -> WebSocketRoute:
        async def serve(websocket: WebSocket) -> None:
            await server.serve(websocket, kind)

        return WebSocketRoute(path, serve)

    def request_route(path: str, kind: DoorKind, read: Callable[[Request], Awaitable[Upload]]) -> Route:
        async def answer(request: Request) -> Response:
            return await exchange(server, kind, request, read)

        return Route(path, answer, methods=["POST"])

    return [
        *(websocket_route(path, kind) for path, kind in WEBSOCKET_DOORS.items()),
        *(request_route(path, kind, read) for path, (kind, read) in REQUEST_DOORS.items()),
        Route("/v1/realtime/client_secrets", _client_secrets(server), methods=["POST"]),
        Route("/v1/auth/grant", _grant(server), methods=["POST"]),
    ]


def _grant(server: Server) -> Callable[[Request], Awaitable[Response]]:
    """Passes in the shape of Deepgram's."""

    async def issue(request: Request) -> Response:
        knock = knock_of(request)
        if not server.keys.is_lasting(deepgram.key_of(knock)):
            error = AdmissionError(401, "invalid_api_key", "no lasting key of this server was shown")
            return server.refusal(deepgram, error, knock)
        token = server.keys.issue({}, int(knock.at_unix_s) + GRANT_LIFE_S)
        return JSONResponse({"access_token": token, "expires_in": GRANT_LIFE_S})

    return issue


def _client_secrets(server: Server) -> Callable[[Request], Awaitable[Response]]:
    """Passes for browsers, which should never see a lasting key."""

    async def issue(request: Request) -> Response:
        knock = knock_of(request)
        try:
            if not server.keys.is_lasting(openai_realtime.key_of(knock)):
                raise AdmissionError(401, "invalid_api_key", "no lasting key of this server was shown")
            wanted = openai_realtime.client_secret(await body_within(request, MAX_FRAME_BYTES), server.house)
        except AdmissionError as error:
            return server.refusal(openai_realtime, error, knock)
        expires_at = int(knock.at_unix_s) + wanted.life_s
        value = server.keys.issue({"session": wanted.patch}, expires_at)
        return JSONResponse({"value": value, "expires_at": expires_at, "session": wanted.session.plain()})

    return issue


def _about(server: Server) -> list[BaseRoute]:
    """What tells of the server itself."""

    async def health(_: Request) -> JSONResponse:
        running = [
            {"model": name, "backend": served.engine.backend, "why": served.engine.why}
            for name, served in server.models.items()
        ]
        about = {"engines": running, "turn_model": server.turn_model}
        return JSONResponse({"status": "ok", "sessions": server.n_sessions, **about})

    async def live(_: Request) -> JSONResponse:
        is_stuck = server.is_stuck()
        return JSONResponse({"status": "stuck" if is_stuck else "alive"}, status_code=503 if is_stuck else 200)

    async def ready(_: Request) -> JSONResponse:
        status = server.readiness()
        return JSONResponse({"status": status}, status_code=200 if status == "ready" else 503)

    def with_key(answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def checked(request: Request) -> Response:
            knock = knock_of(request)
            if server.keys.admit(openai_rest.key_of(knock), knock.at_unix_s):
                return await answer(request)
            error = AdmissionError(401, "invalid_api_key", "no key of this server was shown")
            return server.refusal(openai_rest, error, knock)

        return checked

    async def metrics(request: Request) -> Response:
        return Response(await _figures(server, request), headers={"Content-Type": CONTENT_TYPE})

    async def list_models(_: Request) -> Response:
        listed = [_model(served) for served in server.models.values()]
        return JSONResponse({"object": "list", "data": listed, "models": listed})

    async def one_model(request: Request) -> Response:
        name = request.path_params["name"]
        if name in server.models:
            return JSONResponse(_model(server.models[name]))
        error = AdmissionError(404, "model_not_found", f"no model {name!r} here", param="model")
        return server.refusal(openai_rest, error, knock_of(request))

    return [
        Route("/health", health),
        Route("/health/live", live),
        Route("/health/ready", ready),
        Route("/metrics", with_key(metrics)),
        Route("/v1/models", with_key(list_models)),
        Route("/v1/models/{name:path}", with_key(one_model)),
    ]


async def _figures(server: Server, request: Request) -> bytes:
    """Of this server, and of all its workers where it is one of several."""
    own = server.metrics.text()
    if not server.peers.name or OWN_FIGURES in request.query_params:
        return own
    key = {name: value for name, value in request.headers.items() if name == "authorization"}
    return labelled({server.peers.name: own, **await server.peers.fetch(f"/metrics?{OWN_FIGURES}", key)})


def _model(served: ServedModel) -> dict[str, Any]:
    """A model as ``/v1/models`` lists it: our fields and those of OpenAI's list."""
    item = model_item(served.card)
    ours = {"name": item.name, "languages": item.languages, "capabilities": item.capabilities}
    return {"id": item.name, "object": "model", "created": 0, "owned_by": "senseway", **ours}


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """uvicorn's, but with a largest frame of each door's own: a longer one is refused before it has been read.

    Nor is a client given up for a pong that lies behind audio which has not been read yet: as long as something came,
    or the server itself does not read, it is there.

    Reading goes on while a few short messages wait: to pause it behind each and resume it takes system calls, which are
    a tenth of what a frame costs.
    """

    _heard_s = 0.0  # when something came last

    def send_receive_event_to_app(self) -> None:
        """See ``WebSocketsSansIOProtocol``, which pauses unless it has done so already."""
        n_bytes = sum(map(len, self.frames))
        was_paused, self.read_paused = self.read_paused, True
        super().send_receive_event_to_app()
        self.read_paused = was_paused
        is_enough = n_bytes > MAX_WAITING_BYTES or self.queue.qsize() >= MAX_WAITING
        if is_enough and not was_paused and not self.close_sent:
            self.read_paused = True
            self.transport.pause_reading()

    def data_received(self, data: bytes) -> None:
        """See ``WebSocketsSansIOProtocol``."""
        self._heard_s = self.loop.time()
        super().data_received(data)

    def keepalive_timeout(self) -> None:
        """See ``WebSocketsSansIOProtocol``."""
        if self.read_paused or self.loop.time() < self._heard_s + (self.ping_timeout or 0.0):
            self.pong_timer = self.pending_ping_payload = None
            self.schedule_ping()
        else:
            super().keepalive_timeout()

    def handle_connect(self, event: Handshake) -> None:
        """See ``WebSocketsSansIOProtocol``."""
        path = event.path.partition("?")[0]
        name = "max_message_size" if hasattr(self.conn, "max_message_size") else "max_size"  # in websockets 15
        setattr(self.conn, name, MAX_FRAME_BYTES_AT.get(path, MAX_FRAME_BYTES))
        super().handle_connect(event)


class UvicornServer(uvicorn.Server):
    """uvicorn, but that clients hear from us that the server stops: it closes connections before the app may speak."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Say goodbye, then shut down."""
        assert isinstance(self.config.app, Starlette)
        await self.config.app.state.server.dismiss()
        await super().shutdown(sockets)


def run(
    config: Config,
    engines: Mapping[str, SpeechEngine],
    keys: Keys,
    twilio_auth_token: str = "",
    turn_detector: TurnDetector | None = None,
) -> None:
    """Serve until interrupted."""
    app = build_app(config, engines, keys=keys, twilio_auth_token=twilio_auth_token, turn_detector=turn_detector)
    prepare_interpreter()
    UvicornServer(uvicorn_config(config, app)).run()


def prepare_interpreter() -> None:
    """Once everything is loaded: let nobody wait long for the collector, or for a thread that holds the interpreter.

    What is loaded stays, so the collector need not look through it again. The engine's and the detector's threads let
    go of the interpreter many times a decode, and each time would wait up to 5 ms for it, as long as others want it.
    """
    gc.collect()
    gc.freeze()
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def uvicorn_config(config: Config, app: Starlette) -> uvicorn.Config:
    """How uvicorn serves ``app``: audio is not compressed, frames are bounded, dead peers are noticed."""
    return uvicorn.Config(
        app,
        host=config.server.host,
        port=config.server.port,
        ws=WebSocketProtocol,
        ws_max_size=MAX_FRAME_BYTES,
        ws_per_message_deflate=False,
        ws_ping_interval=PING_INTERVAL_S,
        ws_ping_timeout=PING_INTERVAL_S,
        timeout_graceful_shutdown=5,
        access_log=False,
        log_level="warning",
    )


def _check_chunks(config: Config, engines: Mapping[str, SpeechEngine]) -> None:
    for name, engine in engines.items():
        if engine.card.transducer is None:
            continue
        try:
            chunking_of(
                engine.card.transducer,
                engine.card.max_window_samples,
                chunk_samples=samples_from_ms(config.session.chunk_ms) or None,
                left_samples=samples_from_ms(config.session.left_context_ms) or None,
            )
        except ValueError as error:
            raise ConfigError(f"session.chunk_ms or left_context_ms with model {name}: {error}") from error


def _check_capabilities(config: Config, engines: Mapping[str, SpeechEngine]) -> None:
    for name, engine in engines.items():
        missing = set(config.required_capabilities) - engine.card.capabilities
        if missing:
            raise ConfigError(f"model {name} lacks {', '.join(sorted(missing))}, which required_capabilities demands")
