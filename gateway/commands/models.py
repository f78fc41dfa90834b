"""`senseway models`: which models there are, what each can do, and which are on this machine."""

import argparse
from collections.abc import Sequence

from models.catalog import list_models
from models.errors import ModelError
from models.store import find_model
from streaming.capability import Capability

HELP = "list the models, what each can do and which are on this machine"

_HEADINGS = ("name", "MB", "from", "licence", "here", "what")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No flags."""


def run(arguments: argparse.Namespace) -> int:
    """Print two tables: the models, and their capabilities."""
    rows = [
        (name, str(entry.size_mb), entry.source, entry.licence, here(name, entry.size_mb), entry.description)
        for name, entry in list_models().items()
    ]
    print(table(_HEADINGS, rows))
    print()
    print(table(("", *list_models()), [_capability_row(capability) for capability in Capability]))
    return 0


def here(name: str, size_mb: int) -> str:
    """Whether the model's files are on this machine."""
    if size_mb == 0:
        return "yes"
    try:
        find_model(name, fetch_missing=False)
    except ModelError:
        return "no"
    return "yes"


def table(headings: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Columns as wide as their widest cell, two spaces between them."""
    lines = [headings, *rows]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headings))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _capability_row(capability: Capability) -> tuple[str, ...]:
    return (capability, *("yes" if capability in entry.capabilities else "-" for entry in list_models().values()))
