"""How an optional part of senseway is installed: the command that fits where senseway runs from.

Knows whether this is a checkout, whose Makefile installs with pins, or an installed package. Installs nothing.
"""

import sys
from pathlib import Path

CHECKOUT = Path(__file__).parents[2]


def how_to_install(extra: str) -> str:
    """The command that brings ``extra`` into the environment of this process; in a checkout it is run from there."""
    python = Path(sys.executable)
    if not (CHECKOUT / "pyproject.toml").is_file():
        return f"{python} -m pip install 'senseway[{extra}]'"
    if python.is_relative_to(CHECKOUT):
        python = python.relative_to(CHECKOUT)
    return f"{python} -m pip install --constraint constraints.txt --editable '.[{extra}]'"
