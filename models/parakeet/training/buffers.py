"""Streams encoded as a session encodes them: in buffers with context on both sides, each normalised by itself.

It knows how buffers of left context, chunk and right context cover a stream, and puts the chunks' frames together
again. It does not know what the frames are decoded to.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from models.parakeet.config import FRAME_SAMPLES, n_frames_of

Encode = Callable[[Tensor, Tensor], Tensor]  # samples [R, N], their numbers [R] → frames [R, T, W]

LEFT_FRAMES = (6, 12, 25, 50, 100, 125)
CHUNK_FRAMES = (2, 4, 6, 8, 12, 16, 25, 50)
RIGHT_FRAMES = (2, 4, 6, 8, 10, 13, 13, 16, 25)  # sessions have 13, which come twice as often
LARGEST_COST = 7.0  # frames encoded for a frame of the stream
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


def encode_in_buffers(encode: Encode, samples: Tensor, n_samples: Sequence[int], contexts: Contexts) -> Tensor:
    """Frames of streams [B, N] → [B, T, W], each from the buffer that has it in its chunk.

    ``n_samples`` are those of the rows; what lies behind a row's own frames means nothing.
    """
    lengths = np.asarray(n_samples)
    frames_of_row = np.array([n_frames_of(n) for n in n_samples])
    starts = np.arange(0, frames_of_row.max(), contexts.chunk)  # of chunks
    begins = np.maximum(0, starts - contexts.left)  # of buffers
    rows, chunks = np.nonzero(frames_of_row[:, None] > starts)
    ends = np.minimum(lengths[rows], (starts[chunks] + contexts.chunk + contexts.right) * FRAME_SAMPLES)
    number = np.zeros((len(lengths), len(starts)), dtype=np.int64)  # of the buffer of each row and chunk
    number[rows, chunks] = np.arange(len(rows))
    frame = np.arange(frames_of_row.max())
    buffer_of = number[:, frame // contexts.chunk]
    frame_of = frame - begins[frame // contexts.chunk]

    def there(values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(samples.device, non_blocking=True)

    width = (contexts.left + contexts.chunk + contexts.right) * FRAME_SAMPLES
    padded = torch.nn.functional.pad(samples, (0, width))
    place = (there(begins[chunks]) * FRAME_SAMPLES)[:, None] + torch.arange(width, device=samples.device)
    buffers = padded[there(rows)[:, None], place]
    frames = encode(buffers, there(ends - begins[chunks] * FRAME_SAMPLES))
    return frames[there(buffer_of), there(frame_of)]
