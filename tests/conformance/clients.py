"""Environments of other people's clients: each set of packages in a venv of its own, since their pins and ours clash.

A venv is made once and kept beside the checkout's own, in ``.clients``; where it can't be made, the test is skipped
with pip's reason. With ``CLIENTS=newest`` in the environment the pins are left out (`make newest`).
"""

import fcntl
import hashlib
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[2]
HERE = Path(__file__).parent
INSTALL_TIMEOUT_S = 600
RUN_TIMEOUT_S = 120


@cache
def python_of(name: str) -> Path:
    """The interpreter that has the packages of ``requirements/<name>.txt``; skips where they can't be installed."""
    requirements = (HERE / "requirements" / f"{name}.txt").read_text().split()
    if os.environ.get("CLIENTS") == "newest":
        requirements = [requirement.partition("==")[0] for requirement in requirements]
    digest = hashlib.sha256("".join(f"{line}\n" for line in requirements).encode()).hexdigest()[:12]
    folder = REPOSITORY / ".clients" / f"{name}-{digest}"
    python = folder / "bin" / "python"
    folder.parent.mkdir(exist_ok=True)
    with (folder.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / ".done").exists():
            _install(name, folder, python, requirements)
            (folder / ".done").touch()
    return python


def _install(name: str, folder: Path, python: Path, requirements: list[str]) -> None:
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", *requirements]
    try:
        for command in ([sys.executable, "-m", "venv", "--clear", str(folder)], pip):
            done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
            if done.returncode:
                pytest.skip(f"{name} can't be installed: {done.stderr.strip().splitlines()[-1]}")
    except subprocess.TimeoutExpired:
        pytest.skip(f"{name} could not be installed within {INSTALL_TIMEOUT_S} s")


def drive(name: str, *arguments: str, client: str | None = None) -> list[dict[str, Any]]:
    """Run ``drive_<name>.py`` with its ``client``, or the one of that name; the objects that it prints, one a line."""
    script = HERE / f"drive_{name}.py"
    done = subprocess.run(
        [str(python_of(client or name)), str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
