"""Text that only ever grows: which words of a run of segments have settled, each told once, in order.

For protocols that have no way to take text back. Knows that a cut may give words that were settled already to the next
segment. Does not know protocols.
"""

from gateway.messages import Final, Partial, WordItem


class SettledText:
    """What was told so far of the segments of one item: a turn, a commit, a recording."""

    def __init__(self) -> None:
        self.text = ""  # told so far
        self._segment: int | None = None  # the one in work
        self._n_told = 0  # of its words
        self._n_told_ahead = 0  # words of the next segment that were told as part of this one

    def news(self, segment: Partial | Final) -> tuple[WordItem, ...]:
        """The words that have settled since the last call. Segments come in order, a final once for each."""
        if segment.segment != self._segment:
            self._segment, self._n_told, self._n_told_ahead = segment.segment, self._n_told_ahead, 0
        words = segment.words[self._n_told : segment.n_committed]
        self._n_told = max(self._n_told, segment.n_committed)
        if isinstance(segment, Final):
            self._n_told_ahead = max(0, self._n_told - len(segment.words))
        return words

    def delta(self, words: tuple[WordItem, ...]) -> str:
        """What ``words`` add to the text: with their leading space, but for the first."""
        delta = "".join(word.text for word in words)
        delta = delta if self.text else delta.lstrip()
        self.text += delta
        return delta
