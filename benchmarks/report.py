"""How a result is headed: what, when, on what hardware, by which command."""

import os
import platform
import subprocess
import sys
from datetime import date
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def heading(title: str) -> str:
    """The first lines of a result."""
    command = " ".join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *sys.argv[1:]])
    machine = " · ".join(part for part in (gpu(), cpu()) if part)
    return f"# {title}\n\n{date.today().isoformat()} · {machine} · `{command}`\n"


def gpu() -> str:
    """The GPU, its driver and its clocks now, empty where there is none."""
    asked = "name,driver_version,clocks.sm,clocks.mem,clocks.max.sm"
    try:
        command = ["nvidia-smi", f"--query-gpu={asked}", "--format=csv,noheader"]
        answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""
    name, driver, sm_clock, memory_clock, max_clock = answer.splitlines()[0].split(", ")
    return f"{name}, driver {driver}, SMs at {sm_clock} of {max_clock}, memory at {memory_clock}"


def cpu() -> str:
    """Model and cores of this machine."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        model = next(line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name"))
    except (OSError, StopIteration):
        model = platform.processor()
    return f"{model}, {len(os.sched_getaffinity(0))} cores"
