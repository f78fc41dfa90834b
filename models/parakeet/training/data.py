"""The recordings and transcripts that the small model learns from, and how they become batches.

It knows the list's layout, the spelling that is learnt, which speakers are kept apart for the error rate, and how
utterances are joined into longer streams. It knows neither the network nor the loss; randomness is an argument.
"""

import json
import random
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import soundfile
import torch
from numpy.typing import NDArray
from torch import Tensor

SAMPLE_RATE_HZ = 16_000
FFT_SAMPLES = 1800  # lengths are rounded up to its multiples, which have few prime factors
SPLIT_SEED = 4  # draws the held-out speakers


@dataclass(frozen=True, slots=True)
class Utterance:
    """One line of a list: a recording and what is said in it."""

    utterance_id: str
    path: Path
    text: str  # as in the list; `spoken` has the spelling that is learnt
    speaker: str
    duration_s: float


@dataclass(frozen=True, slots=True)
class Word:
    """A word and when it is said, in seconds."""

    text: str
    start_s: float
    end_s: float


def read_words(path: Path) -> dict[str, tuple[Word, ...]]:
    """Words with their times by recording: lines of `[id, [[word, start, end], ...]]`; null where they are unknown."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {utterance_id: tuple(Word(*word) for word in words) for utterance_id, words in rows if words}


def read_list(path: Path) -> list[Utterance]:
    """Reads a list of recordings, one JSON object a line, with the fields id, file, text, speaker and duration_s.

    Files are relative to the list's folder. Raises ValueError with the line's number where a field is missing.
    """
    utterances = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        row = json.loads(line)
        missing = {"id", "file", "text", "speaker", "duration_s"} - row.keys()
        if missing:
            raise ValueError(f"{path}, line {number}: no {', '.join(sorted(missing))}")
        utterances.append(
            Utterance(row["id"], path.parent / row["file"], row["text"], row["speaker"], float(row["duration_s"]))
        )
    return utterances


def spoken(text: str) -> str:
    """The spelling that is learnt: lower case, letters and apostrophes, single spaces."""
    text = text.lower().replace("’", "'")
    return " ".join(re.sub(r"[^a-z' ]", " ", text).split())


def held_out_speakers(utterances: Iterable[Utterance], *, seed: int) -> frozenset[str]:
    """Speakers that are never trained on: of each corpus with three or more, a tenth (at least one), drawn by seed.

    A corpus is what speakers' names share before their number or hyphen (`ls1089`, `fsdd-theo`).
    """
    corpora: dict[str, set[str]] = {}
    for utterance in utterances:
        corpora.setdefault(re.split(r"[-0-9]", utterance.speaker)[0], set()).add(utterance.speaker)
    rng = random.Random(seed)
    chosen: list[str] = []
    for _, speakers in sorted(corpora.items()):
        if len(speakers) >= 3:
            chosen += rng.sample(sorted(speakers), max(1, len(speakers) // 10))
    return frozenset(chosen)


def decode(path: Path) -> NDArray[np.float32]:
    """A recording's samples [n], 16 kHz mono in [-1, 1]. Raises ValueError for any other rate or channels."""
    samples, rate = soundfile.read(path, dtype="float32")
    if rate != SAMPLE_RATE_HZ or samples.ndim != 1:
        raise ValueError(f"{path}: {rate} Hz, shape {samples.shape}; 16 kHz mono is needed")
    return np.asarray(samples, dtype=np.float32)


def faster(samples: Tensor, factor: float) -> Tensor:
    """The samples [n] played ``factor`` times as fast (pitch goes with it), by cutting or padding their spectrum."""
    if factor == 1.0:
        return samples
    n_in = -(-len(samples) // FFT_SAMPLES) * FFT_SAMPLES  # few prime factors
    n_out = round(n_in / factor)
    stretched: Tensor = torch.fft.irfft(torch.fft.rfft(samples, n_in), n_out) * (n_out / n_in)
    return stretched[: int(len(samples) / factor)].clone()
