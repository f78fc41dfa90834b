"""`senseway doctor`: what this machine can run, and why not the rest.

Every finding is one line with a verdict; only what keeps `senseway serve` from working is a failure.
"""

import argparse
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from re import match

from gateway.commands.extras import how_to_install
from gateway.commands.models import here
from gateway.commands.serve import listening_problem
from gateway.config import Config, ConfigError, load
from models.catalog import list_models
from models.errors import ModelError, ModelUnavailableError
from models.store import TURN_MODEL, turn_model

HELP = "say what this machine can run, and why not the rest"


class Verdict(Enum):
    """How much a finding matters."""

    GOOD = "ok  "
    LESS = "less"  # works without it
    FAILS = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    verdict: Verdict
    what: str
    detail: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """No flags."""


def run(arguments: argparse.Namespace) -> int:
    """Print every finding; 1 if the server could not start."""
    findings = [*python(), *packages(), *processor(), *gpu(), *weights(), *configuration(), *microphone()]
    width = max(len(finding.what) for finding in findings)
    for finding in findings:
        print(f"{finding.verdict.value}  {finding.what.ljust(width)}  {finding.detail}")
    return int(any(finding.verdict is Verdict.FAILS for finding in findings))


def python() -> Iterator[Finding]:
    """The interpreter and where it is."""
    yield Finding(Verdict.GOOD, "python", f"{platform.python_version()} on {platform.platform()}, {sys.prefix}")


def packages() -> Iterator[Finding]:
    """Every package that senseway asks for, and its version."""
    try:
        needed = requires("senseway") or []
    except PackageNotFoundError:
        yield Finding(Verdict.LESS, "senseway", "runs from a checkout that is not installed; `make` installs it")
        return
    yield Finding(Verdict.GOOD, "senseway", version("senseway"))
    for requirement in needed:
        name = match(r"[\w.-]+", requirement)
        extra = match(r".*extra == [\"'](\w+)", requirement)
        if name is not None and (extra is None or extra[1] in ("hub", "media", "mic", "gpu")):
            yield _package(name[0], extra[1] if extra else None)


def _package(name: str, extra: str | None) -> Finding:
    try:
        return Finding(Verdict.GOOD, name, version(name))
    except PackageNotFoundError:
        if extra is None:
            return Finding(Verdict.FAILS, name, "not installed")
        return Finding(Verdict.LESS, name, f"not installed; {how_to_install(extra)}")


def processor() -> Iterator[Finding]:
    """Cores that this process may use, memory, and the instructions that make products fast."""
    n_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding(Verdict.GOOD, "cores", f"{n_cores} of {os.cpu_count()} may be used")
    flags = _cpu_flags()
    if flags:
        wanted = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16")
        found = [flag for flag in wanted if flag in flags]
        yield Finding(Verdict.GOOD if found else Verdict.LESS, "vector units", ", ".join(found) or "none that help")


def _cpu_flags() -> set[str]:
    """Empty where the system does not list them in /proc/cpuinfo."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return {flag for line in lines if line.lower().startswith(("flags", "features")) for flag in line.split()[2:]}


def gpu() -> Iterator[Finding]:
    """Whether there is a CUDA device, what is missing to use it, and what Whisper would compute with."""
    import torch

    from models.backends import explain
    from models.devices import reasons

    known = reasons()
    backend = next(name for name, reason in known.items() if reason is None)
    missing = "; ".join(explain({name: reason for name, reason in known.items() if reason}))
    verdict = Verdict.LESS if missing else Verdict.GOOD
    yield Finding(verdict, "whisper", f"computes on {backend}; {missing}" if missing else f"computes on {backend}")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            detail = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
            yield Finding(Verdict.GOOD, f"gpu {index}", detail)
        return
    if shutil.which("nvidia-smi") is None:
        why = "no NVIDIA driver on this machine"
    elif torch.version.cuda is None:
        why = f"there is a driver, but torch {torch.__version__} is built without CUDA"
    else:
        why = f"there is a driver, but torch {torch.__version__} finds no device"
    yield Finding(Verdict.LESS, "gpu", f"{why}; models run on the CPU")


def weights() -> Iterator[Finding]:
    """Which models can be loaded without network."""
    for name, entry in list_models().items():
        if here(name, entry.size_mb) == "yes":
            yield Finding(Verdict.GOOD, name, "on this machine")
        else:
            detail = f"not on this machine; senseway pull {name} fetches {entry.size_mb} MB from {entry.source}"
            yield Finding(Verdict.LESS, name, detail)
    try:
        turn_model(fetch_missing=False)
    except ModelUnavailableError:
        detail = f"not on this machine; senseway pull {TURN_MODEL} fetches 12 MB; without it pauses go by punctuation"
        yield Finding(Verdict.LESS, TURN_MODEL, detail)
    except ModelError as error:
        yield Finding(Verdict.LESS, TURN_MODEL, f"{error}; until then pauses go by punctuation")
    else:
        yield Finding(Verdict.GOOD, TURN_MODEL, "on this machine: pauses are judged by how they sound")


def configuration() -> Iterator[Finding]:
    """What environment and file say, and whether the port is free."""
    try:
        config = load({})
    except ConfigError as error:
        yield Finding(Verdict.FAILS, "configuration", str(error))
        return
    yield Finding(
        Verdict.GOOD, "configuration", "as is by default" if config == Config() else "changed; serve prints it"
    )
    if problem := listening_problem(config.server):
        yield Finding(Verdict.FAILS, "port", problem)
    else:
        yield Finding(Verdict.GOOD, "port", f"{config.server.host}:{config.server.port} is free")


def microphone() -> Iterator[Finding]:
    """Whether `senseway stream mic` would find one. The page's microphone is the browser's."""
    try:
        import sounddevice  # an optional extra
    except ImportError:
        yield Finding(Verdict.LESS, "microphone", f"needs sounddevice; {how_to_install('mic')}")
        return
    except OSError as error:
        yield Finding(Verdict.LESS, "microphone", f"{error}; on Debian and Ubuntu: apt-get install libportaudio2")
        return
    try:
        yield Finding(Verdict.GOOD, "microphone", str(sounddevice.query_devices(kind="input")["name"]))
    except (sounddevice.PortAudioError, ValueError) as error:
        yield Finding(Verdict.LESS, "microphone", f"none: {error}")
