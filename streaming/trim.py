"""Where to cut speech that goes on past the maximum span. Pure.

A cut closes a segment, so it falls behind a settled word: at the end of a sentence if there is one in the latter half,
else in the longest pause there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from streaming.agreement import continues
from streaming.transcript import Word
from vad.audio import SpeechSpan

SENTENCE_ENDS = (".", "?", "!", "。", "？", "！", "।")


@dataclass(frozen=True, slots=True)
class Cut:
    """The first ``n_words`` belong to the segment that ends at ``sample``; the next one begins there."""

    n_words: int
    sample: int


def choose_cut(words: Sequence[Word], span: SpeechSpan, n_settled: int) -> Cut | None:
    """The best place behind one of the first ``n_settled`` words, ``None`` if there is none.

    Words without times offer no place. The earlier half of the span is avoided, so that segments keep some length.
    """
    middle = (span.start_sample + span.end_sample) // 2
    places = [place for n in range(1, n_settled + 1) if (place := _place_behind(words, n, span)) is not None]
    late = [place for place in places if place.sample >= middle] or places[-1:]
    if not late:
        return None
    sentences = [place for place in late if words[place.n_words - 1].text.rstrip("\"')]}»”’").endswith(SENTENCE_ENDS)]
    return max(sentences or late, key=lambda place: (_pause_behind(words, place.n_words, span), place.n_words))


def _place_behind(words: Sequence[Word], n_words: int, span: SpeechSpan) -> Cut | None:
    end_sample = words[n_words - 1].end_sample
    if end_sample is None or (n_words < len(words) and continues(words[n_words])):
        return None
    sample = end_sample + _pause_behind(words, n_words, span) // 2
    # An engine's times may lie anywhere; a cut that takes nothing off the span would be made for ever.
    return Cut(n_words, sample) if span.start_sample < sample <= span.end_sample else None


def _pause_behind(words: Sequence[Word], n_words: int, span: SpeechSpan) -> int:
    end_sample = words[n_words - 1].end_sample or span.start_sample
    following = words[n_words].start_sample if n_words < len(words) else span.end_sample
    return max(0, (following if following is not None else end_sample) - end_sample)
