"""The exchange area as a model: tagged words, who has read them, and what each SM has heard of the others.

Finds races that the interleaving at hand got away with: a word may be written again only by an SM that has heard from
every SM that read it. Knows words, epochs and clocks. Does not know phases or what the words mean.
"""

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import OutOfBoundsError, RaceError, UninitialisedError

Words = NDArray[np.int64]  # indices of words
_NEWER = np.uint32(1 << 31)


@dataclass(frozen=True, slots=True, eq=False)
class Wait:
    """An SM goes on once all these words carry the epoch."""

    words: Words
    epoch: int
    what: str  # for who reads the error


class Exchange:
    """Words {payload, epoch} and the clocks of ``n_sms`` SMs.

    A clock counts an SM's reads and writes; ``_heard[i, j]`` is the last of SM j's that SM i knows to be over, since
    what came with a word or with a word before it said so.
    """

    def __init__(self, n_words: int, n_sms: int) -> None:
        self._n_words = n_words
        self._payload = np.zeros(n_words, np.uint32)
        self._epoch = np.zeros(n_words, np.uint32)
        self._is_written = np.zeros(n_words, np.bool_)
        self._n_sms = n_sms
        self.version = 0  # counts writes
        self.launch()

    def launch(self) -> None:
        """All that was before is over; the words stay."""
        self._heard = np.zeros((self._n_sms, self._n_sms), np.int64)
        self._said = [np.zeros(self._n_sms, np.int64)]  # clocks that came with writes
        self._with = np.zeros(self._n_words, np.int64)  # index of what came with a word
        self._read = np.zeros((self._n_sms, self._n_words), np.int64)  # when an SM last read a word
        self._plain: dict[Hashable, tuple[int, int, NDArray[np.int64]]] = {}  # writer, when, and when each SM read

    # --- tagged words ---

    def is_ready(self, wait: Wait) -> bool:
        """Whether every word has come.

        Raises:
            RaceError: if one was overwritten before it was read.
            UninitialisedError: if one that was never written happens to carry the epoch.
        """
        self._within(wait.words, wait.what)
        ahead = self._epoch[wait.words] - np.uint32(wait.epoch)
        is_written = self._is_written[wait.words]
        over = (ahead != 0) & (ahead < _NEWER) & is_written
        if over.any():
            word = int(wait.words[np.argmax(over)])
            rule = f"word {word} carries epoch {self._epoch[word]} before its epoch {wait.epoch} was read"
            raise RaceError(f"{wait.what}: {rule}")
        if ((ahead == 0) & ~is_written).any():
            raise UninitialisedError(f"{wait.what}: reads words that nobody has written")
        return not ahead.any()

    def missing(self, wait: Wait) -> int:
        """The first word that has not come."""
        return int(wait.words[np.argmax(self._epoch[wait.words] != np.uint32(wait.epoch))])

    def take(self, sm: int, wait: Wait) -> NDArray[np.uint32]:
        """The payloads of words that are ready."""
        for index in np.unique(self._with[wait.words]):
            np.maximum(self._heard[sm], self._said[index], out=self._heard[sm])
        self._read[sm, wait.words] = self._tick(sm)
        return self._payload[wait.words]

    def publish(self, sm: int, words: Words, payload: NDArray[np.uint32], epoch: int, what: str) -> None:
        """Write words. Raises RaceError if a reader may not be done with what they held."""
        self._within(words, what)
        if (self._is_written[words] & (self._epoch[words] == np.uint32(epoch))).any():
            raise RaceError(f"{what}: writes a word twice in epoch {epoch}")
        late = self._read[:, words] > self._heard[sm][:, None]
        late[sm] = False
        if late.any():
            reader, at = np.argwhere(late)[0]
            raise RaceError(f"{what}: writes word {words[at]} without having heard that SM {reader} read it")
        self._tick(sm)
        self._with[words] = len(self._said)
        self._said.append(self._heard[sm].copy())
        self._payload[words] = payload
        self._epoch[words] = np.uint32(epoch)
        self._is_written[words] = True
        self.version += 1

    # --- plain memory, ordered by the words alone ---

    def write_plain(self, sm: int, name: Hashable) -> None:
        """Note that ``sm`` writes memory that others read without waiting for it."""
        if name in self._plain:
            late = self._plain[name][2] > self._heard[sm]
            late[sm] = False
            if late.any():
                raise RaceError(f"SM {sm} writes {name} without having heard that SM {np.argmax(late)} read it")
        self._plain[name] = (sm, self._tick(sm), np.zeros(self._n_sms, np.int64))

    def read_plain(self, sm: int, name: Hashable) -> None:
        """Note that ``sm`` reads it: it must have heard of the last write in this launch, if there was one."""
        writer, when, read = self._plain.setdefault(name, (sm, 0, np.zeros(self._n_sms, np.int64)))
        if self._heard[sm, writer] < when:
            raise RaceError(f"SM {sm} reads {name} without having heard that SM {writer} wrote it")
        read[sm] = self._tick(sm)

    def _tick(self, sm: int) -> int:
        self._heard[sm, sm] += 1
        return int(self._heard[sm, sm])

    def _within(self, words: Words, what: str) -> None:
        if words.size and not (0 <= words.min() and words.max() < self._n_words):
            raise OutOfBoundsError(f"{what}: word {words.max()} of {self._n_words}")
