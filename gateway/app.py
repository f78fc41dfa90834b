"""Puts the gateway together: configuration → engines and detector → server → one ASGI app.

The app is the same whether uvicorn serves it, another process mounts it, or a test drives it.
"""

import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.websockets import WebSocket

from gateway.config import Config, ConfigError
from gateway.doors import native, openai_realtime
from gateway.doors.door import DoorKind
from gateway.messages import MAX_FRAME_BYTES, EngineItem
from gateway.server import Server
from gateway.session import ServedModel, model_item
from gateway.worker import Worker
from streaming.engine import SpeechEngine
from vad.detector import SpeechDetector
from vad.silero import SileroDetector

WEBSOCKET_DOORS: Mapping[str, DoorKind] = {
    "/v1/stream": native,
    "/v1/realtime": openai_realtime,
}
PING_INTERVAL_S = 20.0
DEMO_FOLDER = Path(__file__).resolve().parent.parent / "demo_web"


class Page(StaticFiles):
    """The demo page; browsers ask each time, so that an upgrade never leaves them with modules of two versions."""

    def file_response(self, *args: Any, **kwargs: Any) -> Response:  # Any: handed on as they come
        """See ``StaticFiles``."""
        response = super().file_response(*args, **kwargs)
        response.headers["Cache-Control"] = "no-cache"
        return response


def build_app(config: Config, engines: Mapping[str, SpeechEngine], detector: SpeechDetector | None = None) -> Starlette:
    """The ASGI app that serves ``engines`` (name → engine, the default first).

    Raises:
        ConfigError: if a model lacks a capability that ``config`` requires.
    """
    _check_capabilities(config, engines)
    detector = detector or SileroDetector()
    models = {
        name: ServedModel(engine.card, EngineItem(engine.backend, engine.why)) for name, engine in engines.items()
    }
    server = Server(models, Worker(engines, detector), detector, config)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        server.start()
        yield
        await server.stop()

    def websocket_route(path: str, kind: DoorKind) -> WebSocketRoute:
        async def serve(websocket: WebSocket) -> None:
            await server.serve(websocket, kind)

        return WebSocketRoute(path, serve)

    async def health(_: Request) -> JSONResponse:
        running = [
            {"model": name, "backend": served.engine.backend, "why": served.engine.why}
            for name, served in models.items()
        ]
        return JSONResponse({"status": "ok", "sessions": server.n_sessions, "engines": running})

    async def list_models(_: Request) -> JSONResponse:
        items = [model_item(served.card) for served in models.values()]
        listed = [{"name": i.name, "languages": i.languages, "capabilities": i.capabilities} for i in items]
        return JSONResponse({"models": listed})

    routes = [
        *(websocket_route(path, kind) for path, kind in WEBSOCKET_DOORS.items()),
        Route("/v1/models", list_models),
        Route("/health", health),
    ]
    page = [Mount("/", Page(directory=DEMO_FOLDER, html=True))] if DEMO_FOLDER.is_dir() else []
    app = Starlette(routes=[*routes, *page], lifespan=lifespan)
    app.state.server = server
    return app


class UvicornServer(uvicorn.Server):
    """uvicorn, but that clients hear from us that the server stops: it closes connections before the app may speak."""

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Say goodbye, then shut down."""
        assert isinstance(self.config.app, Starlette)
        await self.config.app.state.server.dismiss()
        await super().shutdown(sockets)


def run(config: Config, engines: Mapping[str, SpeechEngine]) -> None:
    """Serve until interrupted."""
    UvicornServer(uvicorn_config(config, build_app(config, engines))).run()


def uvicorn_config(config: Config, app: Starlette) -> uvicorn.Config:
    """How uvicorn serves ``app``: audio is not compressed, frames are bounded, dead peers are noticed."""
    return uvicorn.Config(
        app,
        host=config.server.host,
        port=config.server.port,
        ws="websockets-sansio",
        ws_max_size=MAX_FRAME_BYTES,
        ws_per_message_deflate=False,
        ws_ping_interval=PING_INTERVAL_S,
        ws_ping_timeout=PING_INTERVAL_S,
        timeout_graceful_shutdown=5,
        access_log=False,
        log_level="warning",
    )


def _check_capabilities(config: Config, engines: Mapping[str, SpeechEngine]) -> None:
    for name, engine in engines.items():
        missing = set(config.required_capabilities) - engine.card.capabilities
        if missing:
            raise ConfigError(f"model {name} lacks {', '.join(sorted(missing))}, which required_capabilities demands")
