"""Which words of a hypothesis are settled. Two policies, both pure.

They know words and sample positions; they know neither the model nor the client. ``Settle`` is what the utterance asks.
"""

import unicodedata
from collections.abc import Sequence

from streaming.transcript import Word

_UNSPACED_SCRIPTS = frozenset({"THAI", "LAO", "MYANMAR", "KHMER"})


def normalised(text: str) -> str:
    """``text`` without case, white space and punctuation: what two hypotheses are compared by."""
    folded = unicodedata.normalize("NFKC", text).casefold()
    return "".join(char for char in folded if unicodedata.category(char)[0] in "LNMS")


def agree(previous: Sequence[Word], current: Sequence[Word]) -> int:
    """Number of words, from the start, on which both hypotheses agree.

    Compared by normalised text; times are ignored, since decoding again shifts them by a frame or two.
    (LocalAgreement-2, Liu et al. 2020, "Low-latency sequence-to-sequence speech recognition and translation".)
    """
    n = 0
    for before, now in zip(previous, current, strict=False):
        if normalised(before.text) != normalised(now.text):
            break
        n += 1
    return n


def ends_before(words: Sequence[Word], horizon_sample: int) -> int:
    """Number of leading words that the model attended to entirely before ``horizon_sample``.

    A word whose attention ends near the edge of the audio may still change when more is heard. (AlignAtt, Papi et al.
    2023, "AlignAtt: using attention-based audio-translation alignments as a guide for simultaneous speech
    translation".)
    Words without times never count.
    """
    n = 0
    for word in words:
        if word.end_sample is None or word.end_sample > horizon_sample:
            break
        n += 1
    return n


def sure(words: Sequence[Word], least_confidence: float) -> int:
    """Number of leading words that the model is sure of; words of an engine that states no confidence all count."""
    n = 0
    for word in words:
        if word.confidence is not None and word.confidence < least_confidence:
            break
        n += 1
    return n


def without_leading_marks(words: Sequence[Word]) -> tuple[Word, ...]:
    """``words`` from the first one on that holds more than punctuation."""
    first = next((index for index, word in enumerate(words) if normalised(word.text)), len(words))
    return tuple(words[first:])


def whole_words(words: Sequence[Word], n: int) -> int:
    """``n``, lowered until what follows begins a new word: a piece that continues a word settles together with it."""
    while 0 < n < len(words) and continues(words[n]):
        n -= 1
    return n


def continues(word: Word) -> bool:
    """Whether ``word`` is glued to what stands before it, in a script that puts spaces between words."""
    first = word.text[:1]
    return bool(first) and not first.isspace() and not _is_unspaced(first)


def _is_unspaced(char: str) -> bool:
    """Whether ``char`` belongs to a script written without spaces: Chinese, Japanese, Thai, Lao, Burmese, Khmer."""
    return unicodedata.east_asian_width(char) in "WF" or unicodedata.name(char, "").split(" ")[0] in _UNSPACED_SCRIPTS


def after(words: Sequence[Word], sample: int) -> tuple[Word, ...]:
    """The words said after ``sample``: those whose middle lies behind it. Overlaps merge by time, never by string."""
    first = 0
    for word in words:
        if word.start_sample is None or word.end_sample is None or word.start_sample + word.end_sample >= 2 * sample:
            break
        first += 1
    return tuple(words[first:])
