"""Which piece is said in which frame, and the one path through a transducer's lattice that says so.

Knows words with their times and the pieces of each. A network shown this path by plain cross-entropy hears something
within hundreds of steps; without it, it first spends thousands on what the texts alone tell. Knows no audio.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.parakeet.config import FRAME_SAMPLES
from models.parakeet.training.data import SAMPLE_RATE_HZ

FRAME_S = FRAME_SAMPLES / SAMPLE_RATE_HZ

Numbers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TimedPieces:
    """A word's pieces and when it is said, in seconds from the start of its stream."""

    ids: tuple[int, ...]
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Path:
    """States of the lattice in order, and what leaves each; each [K]."""

    frames: Numbers
    n_before: Numbers  # labels emitted before
    tokens: Numbers
    durations: Numbers


@dataclass(frozen=True, slots=True, eq=False)
class Aligned:
    """The paths of a batch: rows of equal length, padded with steps that do not count."""

    pieces: Tensor  # int64 [B, T], the piece said in each frame, or the blank
    frames: Tensor  # int64 [B, K]
    n_before: Tensor  # int64 [B, K]
    tokens: Tensor  # int64 [B, K]
    durations: Tensor  # int64 [B, K]
    counts: Tensor  # bool [B, K]

    def to(self, device: torch.device) -> "Aligned":
        """The same on another device."""
        return Aligned(*(getattr(self, field.name).to(device, non_blocking=True) for field in fields(self)))


def piece_frames(words: Sequence[TimedPieces], n_frames: int, blank: int) -> tuple[Numbers, Numbers]:
    """What is said in each frame [n_frames], and the frame of each piece's middle (never decreasing)."""
    n_pieces = np.array([len(word.ids) for word in words], dtype=np.int64)
    ids = np.array([piece for word in words for piece in word.ids], dtype=np.int64)
    word_start = np.array([word.start_s for word in words]) / FRAME_S
    length = np.repeat((np.array([word.end_s for word in words]) / FRAME_S - word_start) / n_pieces, n_pieces)
    start = np.repeat(word_start, n_pieces) + _within(n_pieces) * length
    first = np.minimum(n_frames - 1, np.rint(start).astype(np.int64))
    n_said = np.minimum(n_frames, np.maximum(first + 1, np.rint(start + length).astype(np.int64))) - first
    said = np.full(n_frames, blank, dtype=np.int64)
    said[np.repeat(first, n_said) + _within(n_said)] = np.repeat(ids, n_said)
    middles = np.minimum(n_frames - 1, (start + length / 2).astype(np.int64))
    return said, np.maximum.accumulate(middles) if len(middles) else middles


def path(tokens: Sequence[int], frames: Numbers, n_frames: int, blank: int, longest: int) -> Path:
    """The steps that emit each token at its frame, and go on by at most ``longest`` frames at a time."""
    starts, ends = np.append(0, frames), np.append(frames, n_frames)  # of what is before the first token, and of each
    n_steps = -(-(ends - starts) // longest)
    n_steps[1:] = np.maximum(n_steps[1:], 1)  # a token is a step, even if the next is said in the same frame
    index = np.repeat(np.arange(len(starts)), n_steps)
    step = _within(n_steps)
    is_token = (step == 0) & (index > 0)
    at = starts[index] + step * longest
    all_tokens = np.append(blank, np.asarray(tokens, dtype=np.int64))
    return Path(
        frames=at,
        n_before=index - is_token,
        tokens=np.where(is_token, all_tokens[index], blank),
        durations=np.minimum(longest, ends[index] - at),
    )


def _within(counts: Numbers) -> Numbers:
    """0 … n - 1 for each n, one after the other."""
    ends = np.cumsum(counts)
    return np.arange(ends[-1] if len(ends) else 0) - np.repeat(ends - counts, counts)


def align(rows: Sequence[Sequence[TimedPieces]], n_frames: Sequence[int], *, blank: int, longest: int) -> Aligned:
    """The paths of a batch of streams, on the CPU."""
    said, paths = list[Numbers](), list[Path]()
    for words, n in zip(rows, n_frames, strict=True):
        row_said, middles = piece_frames(words, n, blank)
        said.append(row_said)
        paths.append(path([piece for word in words for piece in word.ids], middles, n, blank, longest))
    lengths = torch.tensor([len(row.frames) for row in paths])
    return Aligned(
        pieces=padded(said, blank),
        frames=padded([row.frames for row in paths], 0),
        n_before=padded([row.n_before for row in paths], 0),
        tokens=padded([row.tokens for row in paths], blank),
        durations=padded([row.durations for row in paths], 1),
        counts=torch.arange(int(lengths.max())) < lengths[:, None],
    )


def padded(rows: Sequence[Numbers], value: int) -> Tensor:
    """int64 [B, longest row], with ``value`` behind each."""
    together = np.full((len(rows), max(map(len, rows))), value, dtype=np.int64)
    for index, row in enumerate(rows):
        together[index, : len(row)] = row
    return torch.from_numpy(together)
