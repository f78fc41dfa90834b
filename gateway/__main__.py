"""The one entry of ``senseway`` and ``python -m gateway``: makes sure that our packages are ours, then runs a command.

Knows where the five packages lie. Does not know the commands.
"""

import os
import sys
from collections.abc import MutableMapping, Sequence
from importlib.util import find_spec
from pathlib import Path

SIBLINGS = ("vad", "streaming", "megakernel", "models")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; ``arguments`` are those behind the program's name."""
    if strangers := misplaced_siblings():
        sys.stderr.write("\n".join(strangers) + "\n")
        return 1
    keep_threads_from_spinning(os.environ)
    from gateway.commands.program import run  # imports siblings, which must be ours

    return run(arguments)


def keep_threads_from_spinning(environment: MutableMapping[str, str]) -> None:
    """Let torch's threads sleep soon when they wait for one another; to be called before torch is imported.

    GNU's OpenMP, which torch has on Linux, spins for some 300,000 rounds first. On two cores of its own Whisper's
    encoder is as quick with 1,000; where other programs want the cores, it is 10 to 20 times quicker.
    """
    environment.setdefault("GOMP_SPINCOUNT", "1000")


def misplaced_siblings() -> list[str]:
    """A complaint for each package of ours that Python would take from elsewhere, or not find.

    The names are plain words, and another distribution may install a ``streaming`` of its own.
    """
    home = Path(__file__).resolve().parent.parent
    complaints = []
    for name in SIBLINGS:
        spec = find_spec(name)
        found = Path(spec.origin).resolve().parent if spec is not None and spec.origin is not None else None
        if found != home / name:
            complaints.append(f"package {name} should lie at {home / name}, but Python finds {found or 'none'}")
    if complaints:
        complaints.append("senseway needs an environment of its own: use `make`, or install it into a fresh venv")
    return complaints


if __name__ == "__main__":
    sys.exit(main())
