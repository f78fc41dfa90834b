"""`senseway serve`: load the models and serve until interrupted."""

import argparse
import logging
import os
import socket
from functools import partial
from pathlib import Path
from typing import Any

from gateway.commands.failure import CommandError
from gateway.commands.waiting import waiting
from gateway.config import TWILIO_TOKEN_VARIABLE, Config, ConfigError, ServerConfig, TurnModel, as_toml, load
from gateway.keys import Keys, exposure_problem, load_keys
from streaming.engine import SpeechEngine
from vad.turn import TurnDetector

log = logging.getLogger(__name__)

HELP = "serve transcripts over a WebSocket, and a page with a microphone"

_KEYS = {
    "host": "server.host",
    "port": "server.port",
    "workers": "server.workers",
    "model": "models",
    "threads": "n_threads",
    "allow_anonymous": "server.allow_anonymous",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare flags. None has a default here, so that a flag not given leaves the choice to environment and file."""
    parser.formatter_class = argparse.HelpFormatter
    defaults = Config()
    parser.add_argument("--host", help=f"address to listen on ({defaults.server.host})")
    parser.add_argument("--port", type=int, help=f"port to listen on ({defaults.server.port})")
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="processes with sockets and sessions in front of the one that runs the models (1: everything is one)",
    )
    parser.add_argument(
        "--model",
        action="append",
        metavar="NAME",
        help=f"a model to serve; repeatable, the first is the default ({defaults.models[0]})",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="CPU threads that encode (0: the engine's choice)")
    parser.add_argument(
        "--allow-anonymous",
        action="store_const",
        const=True,
        help="listen where others can reach it without asking for keys",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file with these and more settings")


def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C."""
    config = load(flags_of(arguments), path=arguments.config)
    keys = load_keys(config.server)
    if problem := exposure_problem(config.server, keys):
        raise ConfigError(problem)
    if problem := listening_problem(config.server):
        raise CommandError(f"{problem}; --port picks another")
    print(as_toml(config), end="", flush=True)
    _tell_what_loading_does()
    serve = _serve_alone if config.server.workers == 1 else _serve_in_workers
    serve(config, keys, os.environ.get(TWILIO_TOKEN_VARIABLE, ""))
    return 0


def _serve_alone(config: Config, keys: Keys, twilio_auth_token: str) -> None:
    with waiting("loading speech detector and models"):
        from gateway.app import run as serve_forever  # uvicorn, onnxruntime

        engines = _load_engines(config)
        turn_detector = turn_detector_of(config.turn_model)
    _tell_where(config.server)
    serve_forever(config, engines, keys, twilio_auth_token, turn_detector)


def _serve_in_workers(config: Config, keys: Keys, twilio_auth_token: str) -> None:
    """The models here, the rest in other processes, which load what they need themselves."""
    with waiting("loading models"):
        from gateway.app import default_detector
        from gateway.workers import WorkerParts, WorkersError
        from gateway.workers import run as serve_forever

        engines = _load_engines(config)
    parts = WorkerParts(config, keys, default_detector, partial(turn_detector_of, config.turn_model), twilio_auth_token)
    try:
        serve_forever(parts, engines, partial(_tell_where, config.server))
    except WorkersError as error:
        raise CommandError(str(error)) from error


def _load_engines(config: Config) -> dict[str, SpeechEngine]:
    from models.catalog import load_engine  # torch

    return {name: load_engine(name, n_threads=config.n_threads or None) for name in config.models}


def _tell_where(server: ServerConfig) -> None:
    host = f"[{server.host}]" if ":" in server.host else server.host
    print(f"\nhttp://{host}:{server.port} is the page; the stream is at /v1/stream", flush=True)


def turn_detector_of(choice: TurnModel) -> TurnDetector | None:
    """What the setting names, ``None`` where sessions go by punctuation and silence.

    Raises:
        ModelError, OSError: if the model is wanted by name and can't be had.
    """
    if choice is TurnModel.NONE:
        return None
    from models.errors import ModelError
    from models.smart_turn import SmartTurn  # torch, onnxruntime
    from models.store import turn_model

    try:
        return SmartTurn(turn_model())
    except (ModelError, OSError) as error:  # a cache that can't be written, say
        if choice is TurnModel.SMART_TURN:
            raise
        log.warning("no model of turns, so pauses are judged by punctuation and silence: %s", error)
        return None


def _tell_what_loading_does() -> None:
    """What models compute on, why, and what their start spent its time on; otherwise only warnings are shown."""
    logging.basicConfig(format="%(message)s")
    for name in ("models", "megakernel"):
        logging.getLogger(name).setLevel(logging.INFO)


def listening_problem(server: ServerConfig) -> str | None:
    """Why nobody can listen there now, ``None`` if one can: better known before models are loaded."""
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    try:
        with socket.create_server((server.host, server.port), family=family):
            return None
    except OSError as error:
        reason = str(error.strerror).partition(" (while")[0]  # the address stands in the message already
        return f"can't listen on {server.host} port {server.port}: {reason}"


def flags_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that were given as flags, by their keys."""
    given = {name: getattr(arguments, name) for name in _KEYS}
    return {_KEYS[name]: value for name, value in given.items() if value is not None}
