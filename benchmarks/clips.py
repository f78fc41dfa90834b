"""Recordings as plain 16 kHz WAV files, for machines that have neither the packages nor the formats of the others.

Run from the project's root, where the manifest's recordings are:

    python -m benchmarks.clips FOLDER --limit-mb 30

Afterwards ``read_clips(FOLDER)`` needs numpy alone. Knows files. Does not know references: only what is heard matters.
"""

import argparse
import os
import wave
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from vad.audio import SAMPLE_RATE_HZ

FOLDER_VARIABLE = "SENSEWAY_CLIPS"  # where the tests on a GPU look for more than the two recordings of the cache
_AUDIO_SUFFIXES = tuple(f".{name}" for name in "aiff au flac g722 m4a mp3 mp4 ogg opus raw ulaw wav webm".split())
_BYTES_PER_SAMPLE = 2
_FULL_SCALE = 1 << 15


@dataclass(frozen=True, slots=True, eq=False)
class Clip:
    """A recording, mono at 16 kHz."""

    name: str
    samples: NDArray[np.float32]  # [n_samples]

    @property
    def duration_s(self) -> float:
        """Its length."""
        return len(self.samples) / SAMPLE_RATE_HZ


def read_clips(folder: Path) -> list[Clip]:
    """Every WAV file in ``folder``, by name.

    Raises:
        ValueError: for a file that is not 16-bit mono at 16 kHz.
    """
    return [Clip(path.stem, _read(path)) for path in sorted(folder.glob("*.wav"))]


def known_clips() -> list[Clip]:
    """The clips of the folder that the environment names, else the recordings that the models' cache holds."""
    if folder := os.environ.get(FOLDER_VARIABLE):
        return read_clips(Path(folder))
    from models.store import RECORDINGS, recording

    return [Clip(name, _any_rate(recording(name))) for name in RECORDINGS]


def _read(path: Path) -> NDArray[np.float32]:
    with wave.open(str(path)) as file:
        found = file.getnchannels(), file.getsampwidth(), file.getframerate()
        if found != (1, _BYTES_PER_SAMPLE, SAMPLE_RATE_HZ):
            raise ValueError(f"{path} has {found} channels, bytes and Hz; accepted is (1, 2, {SAMPLE_RATE_HZ})")
        return _floats(file.readframes(file.getnframes()))


def _any_rate(path: Path) -> NDArray[np.float32]:
    """A mono file at a multiple of 16 kHz, by averaging neighbours: crude, but it needs no package."""
    with wave.open(str(path)) as file:
        step, rest = divmod(file.getframerate(), SAMPLE_RATE_HZ)
        assert not rest and file.getnchannels() == 1, f"{path} is no multiple of 16 kHz, or not mono"
        samples = _floats(file.readframes(file.getnframes()))
    averaged: NDArray[np.float32] = (
        samples[: len(samples) // step * step].reshape(-1, step).mean(axis=1, dtype=np.float32)
    )
    return averaged


def _floats(content: bytes) -> NDArray[np.float32]:
    return np.frombuffer(content, "<i2").astype(np.float32) / _FULL_SCALE


def recordings_in(folder: Path) -> tuple[list[Clip], list[str]]:
    """Every recording below ``folder``, by its file's suffix, as the gateway reads it, and the names of the others.

    Not read are files that are no audio and those without a header, whose format nobody says here.
    """
    from gateway.audio_file import AudioFileError, read_audio

    clips, unread = [], []
    for path in sorted(path for path in folder.rglob("*") if path.suffix.lower() in _AUDIO_SUFFIXES):
        name = path.relative_to(folder).as_posix()
        try:
            clips.append(Clip(name, read_audio(path)[0]))
        except AudioFileError:
            unread.append(name)
    return clips, unread


def write_clip(clip: Clip, folder: Path) -> None:
    """As a 16-bit WAV file."""
    with wave.open(str(folder / f"{clip.name}.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(_BYTES_PER_SAMPLE)
        file.setframerate(SAMPLE_RATE_HZ)
        file.writeframes(np.clip(clip.samples * _FULL_SCALE, -_FULL_SCALE, _FULL_SCALE - 1).astype("<i2").tobytes())


def from_manifest(
    manifest: Path, limit_bytes: int, *, languages: list[str] | None = None, min_s: float = 0.0
) -> Iterator[Clip]:
    """Recordings of every kind and language in turn, as many as fit ``limit_bytes``; all ``languages`` without any."""
    from benchmarks.recordings import Recording, read_manifest

    by_kind: dict[tuple[str, str], list[Recording]] = {}
    for recording in read_manifest(manifest, languages=languages):
        by_kind.setdefault((recording.kind, recording.language), []).append(recording)
    in_turn = [one for ones in zip_longest(*by_kind.values()) for one in ones if one is not None]
    for recording in (one for one in in_turn if one.duration_s >= min_s):
        samples = recording.samples()
        limit_bytes -= len(samples) * _BYTES_PER_SAMPLE
        if limit_bytes < 0:
            return
        yield Clip(recording.recording_id.replace("/", "_"), samples)


def main() -> None:
    """Write the clips."""
    from benchmarks.recordings import DEFAULT_MANIFEST

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--manifest", type=Path, default=DEFAULT_MANIFEST)
    parser.add_argument("--limit-mb", type=float, default=30)
    parser.add_argument("--languages", nargs="+", help="all without")
    parser.add_argument("--min-s", type=float, default=0.0, help="leave out shorter ones")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    written = []
    chosen = from_manifest(
        arguments.manifest, int(arguments.limit_mb * 1e6), languages=arguments.languages, min_s=arguments.min_s
    )
    for clip in chosen:
        write_clip(clip, arguments.folder)
        written.append(clip.duration_s)
    print(f"{len(written)} clips, {sum(written) / 60:.0f} minutes in {arguments.folder}")


if __name__ == "__main__":
    main()
