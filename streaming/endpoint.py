"""Is the utterance over: what the words say about it, beside the silence that the gate measures. Pure.

A heuristic on text, no model of turns: a sentence that reads finished ends sooner than one that breaks off. Knows
punctuation. Does not know audio, silence or settings.
"""

from collections.abc import Sequence

from streaming.transcript import Word

_ENDS = frozenset(".!?。！？؟।॥")
_CLOSERS = "\"'”’»)]}」』）"  # may stand behind the mark that ends a sentence
_TRAILS_OFF = ("...", "…")


def reads_complete(words: Sequence[Word]) -> bool:
    """Whether ``words`` end with a mark that ends a sentence; three dots are how models write what trails off."""
    text = "".join(word.text for word in words).rstrip().rstrip(_CLOSERS)
    return bool(text) and text[-1] in _ENDS and not text.endswith(_TRAILS_OFF)
