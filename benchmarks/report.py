"""How a result is headed: what, when, on what hardware, by which command."""

import os
import platform
import sys
from datetime import date
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def heading(title: str) -> str:
    """The first lines of a result."""
    command = " ".join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
    return f"# {title}\n\n{date.today().isoformat()} · {cpu()} · `{command}`\n"


def cpu() -> str:
    """Model and cores of this machine."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        model = next(line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor()
    return f"{model}, {len(os.sched_getaffinity(0))} cores"
