"""`senseway serve`: load the models and serve until interrupted."""

import argparse
import logging
import os
import socket
from pathlib import Path
from typing import Any

from gateway.commands.failure import CommandError
from gateway.commands.waiting import waiting
from gateway.config import TWILIO_TOKEN_VARIABLE, Config, ConfigError, ServerConfig, TurnModel, as_toml, load
from gateway.keys import exposure_problem, load_keys
from vad.turn import TurnDetector

log = logging.getLogger(__name__)

HELP = "serve transcripts over a WebSocket, and a page with a microphone"

_KEYS = {
    "host": "server.host",
    "port": "server.port",
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
    with waiting("loading speech detector and models"):
        from gateway.app import run as serve_forever  # uvicorn, onnxruntime
        from models.catalog import load_engine  # torch

        engines = {name: load_engine(name, n_threads=config.n_threads or None) for name in config.models}
        turn_detector = turn_detector_of(config.turn_model)
    host = f"[{config.server.host}]" if ":" in config.server.host else config.server.host
    print(f"\nhttp://{host}:{config.server.port} is the page; the stream is at /v1/stream", flush=True)
    serve_forever(config, engines, keys, os.environ.get(TWILIO_TOKEN_VARIABLE, ""), turn_detector)
    return 0


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
