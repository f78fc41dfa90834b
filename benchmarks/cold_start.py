"""What a cold start of the engine on a GPU takes, by part, with the compiled kernel in the cache and without.

Run from the project's root, on a machine with an NVIDIA GPU:

    python -m benchmarks.cold_start

Each start is a process of its own. Whisper large-v3-turbo at true shapes; its weights are random and lie in the
device's memory before the clock goes on, so that no disk is measured. The first answer, to a second of noise, is part
of the start.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.report import heading

_CHILD = "--in-this-process"


def start(cache: Path, began_s: float) -> dict[str, float]:
    """Seconds by part of a start in this process, which began at ``began_s`` of the system's clock."""
    import torch

    from benchmarks.shapes import endless_book, head, random_model
    from models.timeline import Timeline
    from models.whisper.backend import Writing
    from models.whisper.decode import Request
    from models.whisper.loading import on_device

    imported_s = time.time() - began_s
    timeline = Timeline()
    with timeline.part("CUDA context"):
        torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
    model = random_model()
    torch.cuda.synchronize()
    rules = endless_book()
    backend = on_device(model, rules, timeline, cache=cache)
    with timeline.part("first answer"):
        noise = np.random.default_rng(0).normal(scale=0.1, size=16_000).astype(np.float32)
        (audio,) = backend.listen([noise])
        backend.write([Writing(audio, Request(head(), 0, (), (), 16), rules.plain)])
    backend.close()
    return {"python and imports": imported_s} | timeline.seconds


def start_elsewhere(cache: Path) -> dict[str, float]:
    """The same in a new process."""
    command = [sys.executable, "-m", "benchmarks.cold_start", _CHILD, str(cache), str(time.time())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"the start failed:\n{done.stderr[-4000:]}")
    parts: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return parts


def table(empty: list[dict[str, float]], warm: list[dict[str, float]]) -> str:
    """Medians by part."""
    lines = ["| | empty cache, s | warm cache, s |", "|---|---:|---:|"]
    for part in empty[0]:
        cells = [float(np.median([start[part] for start in starts])) for starts in (empty, warm)]
        lines.append(f"| {part} | {cells[0]:.2f} | {cells[1]:.2f} |")
    totals = [float(np.median([sum(start.values()) for start in starts])) for starts in (empty, warm)]
    lines.append(f"| **all** | **{totals[0]:.2f}** | **{totals[1]:.2f}** |")
    return "\n".join(lines)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(_CHILD, nargs=2, metavar=("CACHE", "BEGAN_S"), help="one start, its parts as JSON")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    if arguments.in_this_process:
        cache, began_s = arguments.in_this_process
        print(json.dumps(start(Path(cache), float(began_s))))
        return
    empty, warm = [], []
    for _ in range(arguments.repeats):
        with tempfile.TemporaryDirectory() as folder:
            empty.append(start_elsewhere(Path(folder)))
            warm.append(start_elsewhere(Path(folder)))
    print(heading("Cold start, Whisper large-v3-turbo"))
    print(f"Medians of {arguments.repeats} starts.\n")
    print(table(empty, warm))


if __name__ == "__main__":
    main()
