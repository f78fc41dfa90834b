"""The command line: which commands there are, and what a failure looks like to the shell.

A command is a module with ``HELP``, ``add_arguments(parser)`` and ``run(arguments) -> exit code``; what is heavy it
imports when it runs, so that ``--help`` is quick. Exit codes: 0 done, 1 failed, 2 wrong usage or configuration, 130
interrupted. Failures that a user can act on are one line; anything else is a bug
and keeps its traceback.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

from gateway.client import ProtocolError, StreamError
from gateway.commands import demo, doctor, models, pull, serve, stream, transcribe
from gateway.commands.failure import CommandError
from gateway.config import ConfigError
from models.errors import ModelError

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


class Command(Protocol):
    """What a module of this folder offers."""

    HELP: str

    @property
    def add_arguments(self) -> Callable[[argparse.ArgumentParser], None]:
        """Declares flags and positions."""

    @property
    def run(self) -> Callable[[argparse.Namespace], int]:
        """Does the work; answers with the exit code."""


COMMANDS: dict[str, Command] = {
    "serve": serve,
    "stream": stream,
    "transcribe": transcribe,
    "pull": pull,
    "models": models,
    "doctor": doctor,
    "demo": demo,
}


def run(arguments: Sequence[str] | None) -> int:
    """Run one command and answer with the exit code."""
    parsed = parser().parse_args(arguments)
    try:
        return COMMANDS[parsed.command].run(parsed)
    except ConfigError as error:
        return _failed(error, EXIT_USAGE)
    except (CommandError, StreamError, ProtocolError, ModelError, OSError) as error:
        if isinstance(error, BrokenPipeError):
            return _reader_left()
        return _failed(error, EXIT_FAILED)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    top = argparse.ArgumentParser(
        prog="senseway",
        description="Turns streamed audio into transcripts in real time.",
        epilog="Each command explains itself: senseway stream --help",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        command.add_arguments(
            commands.add_parser(
                name,
                help=command.HELP,
                description=f"{command.HELP[0].upper()}{command.HELP[1:]}.",
                formatter_class=argparse.ArgumentDefaultsHelpFormatter,
            )
        )
    return top


def _failed(error: Exception, code: int) -> int:
    print(f"senseway: {error}", file=sys.stderr)
    return code


def _reader_left() -> int:
    """`senseway … | head` is no failure; what is still buffered must not be written at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
