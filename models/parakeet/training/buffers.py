"""Streams encoded as a session encodes them: in buffers with context on both sides, each normalised by itself.

It knows how buffers of left context, chunk and right context cover a stream, and puts the chunks' frames together
again. It does not know what the frames are decoded to.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from models.parakeet.config import FRAME_SAMPLES, HOP_SAMPLES, SUBSAMPLING

Encode = Callable[[Tensor, Tensor], Tensor]  # samples [R, N], their numbers [R] → frames [R, T, W]

LEFT_FRAMES = (6, 12, 25, 50, 100, 125)
CHUNK_FRAMES = (2, 4, 6, 8, 12, 16, 25, 50)
RIGHT_FRAMES = (1, 2, 4, 6, 8, 12, 25)
LARGEST_COST = 6.0  # frames encoded for a frame of the stream
LEAST_BUFFER_FRAMES = 4  # the first buffer of a stream has no left context, and needs a deviation worth the name


@dataclass(frozen=True, slots=True)
class Contexts:
    """Sizes of a buffer's parts, in encoder frames."""

    left: int
    chunk: int
    right: int

    @property
    def cost(self) -> float:
        """Frames encoded for each frame of the stream."""
        return (self.left + self.chunk + self.right) / self.chunk


def draw_contexts(rng: random.Random) -> Contexts:
    """Sizes as sessions choose them, as long as they are not too costly."""
    while True:
        contexts = Contexts(rng.choice(LEFT_FRAMES), rng.choice(CHUNK_FRAMES), rng.choice(RIGHT_FRAMES))
        if contexts.cost <= LARGEST_COST and contexts.chunk + contexts.right >= LEAST_BUFFER_FRAMES:
            return contexts


def n_frames(n_samples: int) -> int:
    """Encoder frames of so many samples."""
    return -(-(n_samples // HOP_SAMPLES) // SUBSAMPLING)


def encode_in_buffers(encode: Encode, samples: Tensor, n_samples: Sequence[int], contexts: Contexts) -> Tensor:
    """Frames of streams [B, N] → [B, T, W], each from the buffer that has it in its chunk.

    ``n_samples`` are those of the rows; what lies behind a row's own frames means nothing.
    """
    n_rows, longest = len(n_samples), max(map(n_frames, n_samples))
    width = (contexts.left + contexts.chunk + contexts.right) * FRAME_SAMPLES
    buffers: list[Tensor] = []
    lengths: list[int] = []
    buffer_of = torch.zeros((n_rows, longest), dtype=torch.int64)
    frame_of = torch.zeros((n_rows, longest), dtype=torch.int64)
    for start in range(0, longest, contexts.chunk):
        begin = max(0, start - contexts.left)
        rows = [row for row in range(n_rows) if n_frames(n_samples[row]) > start]
        stop = min(start + contexts.chunk, longest)
        buffer_of[rows, start:stop] = torch.arange(len(lengths), len(lengths) + len(rows))[:, None]
        frame_of[:, start:stop] = torch.arange(start - begin, stop - begin)
        end = (start + contexts.chunk + contexts.right) * FRAME_SAMPLES
        part = samples[rows, begin * FRAME_SAMPLES : end]
        buffers.append(torch.nn.functional.pad(part, (0, width - part.shape[1])))
        lengths += [min(n_samples[row], end) - begin * FRAME_SAMPLES for row in rows]
    counts = torch.tensor(lengths).to(samples.device, non_blocking=True)
    frames = encode(torch.cat(buffers), counts)
    return frames[buffer_of.to(samples.device), frame_of.to(samples.device)]
