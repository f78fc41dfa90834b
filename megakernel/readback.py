"""The rows that a step left in the exchange area, by name: for finding the phase where numbers begin to differ.

No buffer is used twice in a step, so that after a launch of one step every value still lies where it was published.
Knows a program's words and the layout of exchanged rows. Does not know what a value should be (``evaluate.py`` does).
"""

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from .isa import Op, Phase
from .numbers import unpack_pairs
from .program import Program

TAG_BITS = 32  # of a word's high half: the epoch


def published_rows(
    program: Program,
    exchange: NDArray[np.uint64],  # [exchange_words]
    n_rows: int,
    *,
    replica: int = 0,
) -> dict[str, NDArray[np.float32]]:
    """Name → [n_rows, n] of every LINEAR and attention, in the order of the phases.

    Raises:
        ValueError: naming the first phase of which a word is not that of the last step.
    """
    rows: dict[str, NDArray[np.float32]] = {}
    first_epoch: int | None = None  # the last step's, before the phases'
    for name, words in zip(program.phase_names, program.phases, strict=True):
        if words[Phase.OP] not in (Op.LINEAR, Op.COMBINE):
            continue
        pairs = int(words[Phase.N]) // 2
        begin = int(words[Phase.OUTPUT]) + replica * program.target.max_rows * pairs
        found = exchange[begin : begin + n_rows * pairs].reshape(n_rows, pairs)
        epochs = (found >> np.uint64(TAG_BITS)).astype(np.int64) - int(words[Phase.EPOCH])
        first_epoch = int(epochs[0, 0]) if first_epoch is None else first_epoch
        if (epochs != first_epoch).any():
            row, pair = np.argwhere(epochs != first_epoch)[0]
            raise ValueError(
                f"{name}: elements {2 * pair} and {2 * pair + 1} of row {row} carry epoch {epochs[row, pair]}, "
                f"others {first_epoch} (without the phase's own)"
            )
        rows[name] = unpack_pairs(found.astype(np.uint32))
    return rows


def differences(found: Mapping[str, NDArray[np.float32]], expected: Mapping[str, NDArray[np.float32]]) -> Iterator[str]:
    """One line a value, in ``found``'s order: the largest difference, where it is, and how large values are there."""
    for name, rows in found.items():
        distance = np.nan_to_num(np.abs(rows - expected[name]), nan=np.inf)
        row, element = np.unravel_index(int(distance.argmax()), distance.shape)
        yield (
            f"{name:24} differs by {distance[row, element]:.6f} at row {row}, element {element}: "
            f"{rows[row, element]:.6f}, not {expected[name][row, element]:.6f}; "
            f"mean size {np.abs(expected[name]).mean():.4f}"
        )
