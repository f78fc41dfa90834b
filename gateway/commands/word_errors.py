"""How many words of a transcript are right. Pure; meant for one short English text, not for publishing error rates."""

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WordErrors:
    """A count for each kind of error of the cheapest alignment."""

    n_reference: int
    n_wrong: int  # another word in its place
    n_missing: int
    n_extra: int

    @property
    def n_right(self) -> int:
        """Words of the reference that are there."""
        return self.n_reference - self.n_wrong - self.n_missing

    @property
    def rate(self) -> float:
        """The word error rate, 0 for none; above 1 is possible."""
        return (self.n_wrong + self.n_missing + self.n_extra) / max(1, self.n_reference)


def words_of(text: str) -> list[str]:
    """The words without case and punctuation; an apostrophe inside a word belongs to it."""
    return re.findall(r"\w+(?:['’]\w+)*", text.lower())


def compare(reference: Sequence[str], heard: Sequence[str]) -> WordErrors:
    """Align both by the fewest errors (Levenshtein) and count them."""
    # One row for each heard word so far: column i holds the cheapest (errors, wrong, missing, extra) for reference[:i].
    row = [(i, 0, i, 0) for i in range(len(reference) + 1)]
    for n_heard, heard_word in enumerate(heard, start=1):
        above, row = row, [(n_heard, 0, 0, n_heard)]
        for i, reference_word in enumerate(reference, start=1):
            is_wrong = int(reference_word != heard_word)
            row.append(
                min(
                    _plus(above[i - 1], wrong=is_wrong),
                    _plus(row[i - 1], missing=1),
                    _plus(above[i], extra=1),
                )
            )
    _, n_wrong, n_missing, n_extra = row[-1]
    return WordErrors(len(reference), n_wrong, n_missing, n_extra)


def _plus(
    counts: tuple[int, int, int, int], *, wrong: int = 0, missing: int = 0, extra: int = 0
) -> tuple[int, int, int, int]:
    errors, n_wrong, n_missing, n_extra = counts
    return errors + wrong + missing + extra, n_wrong + wrong, n_missing + missing, n_extra + extra
