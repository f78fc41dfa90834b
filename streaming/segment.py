"""The segment that an utterance is writing: its settled and its tentative words, and what a client is shown of it.

Knows words, sample positions and how often the segment was shown. Does not know decodes, models or when a segment ends.
"""

from collections.abc import Iterator
from dataclasses import replace

from streaming.transcript import EndReason, Segment, Word
from vad.audio import SpeechSpan


class SegmentWriter:
    """One segment after another of an utterance; ``committed`` and ``tentative`` are its words so far."""

    def __init__(self, segment_ids: Iterator[int], start_sample: int) -> None:
        self._segment_ids = segment_ids
        self.begin(start_sample)

    def begin(self, start_sample: int, *, committed: tuple[Word, ...] = (), tentative: tuple[Word, ...] = ()) -> None:
        """Go on with a new segment, some words of which are known already."""
        self._segment_id = next(self._segment_ids)
        self._revision = 0
        self.start_sample = start_sample
        self.committed = committed
        self.tentative = tentative
        self.language: str | None = None

    @property
    def words(self) -> tuple[Word, ...]:
        """All words, settled or not."""
        return self.committed + self.tentative

    @property
    def committed_end_sample(self) -> int:
        """Where the last settled word ends."""
        return max((word.end_sample or self.start_sample for word in self.committed), default=self.start_sample)

    def commit_all(self) -> None:
        """Settle every word."""
        self.committed, self.tentative = self.words, ()

    def partial(self, heard_sample: int) -> Segment:
        """The segment as far as it is known."""
        return self._segment(heard_sample, end_reason=None)

    def final(self, reason: EndReason, end_sample: int) -> list[Segment]:
        """The segment for good. One without words is told only to those who were shown a partial of it."""
        was_shown = self._revision > 0
        return [self._segment(end_sample, end_reason=reason)] if self.committed or was_shown else []

    def _segment(self, end_sample: int, *, end_reason: EndReason | None) -> Segment:
        self._revision += 1
        span = SpeechSpan(self.start_sample, max(end_sample, self.start_sample))
        return Segment(
            segment_id=self._segment_id,
            revision=self._revision,
            words=in_order(self.words, span),
            n_committed=len(self.committed),
            span=span,
            language=self.language,
            end_reason=end_reason,
        )


def in_order(words: tuple[Word, ...], span: SpeechSpan) -> tuple[Word, ...]:
    """``words`` with times inside their segment that neither run back nor overlap: decoding again may shift them."""
    ordered: list[Word] = []
    earliest, latest = span.start_sample, span.end_sample
    for word in words:
        if word.start_sample is not None and word.end_sample is not None:
            earliest = min(max(word.start_sample, earliest), latest)
            word = replace(word, start_sample=earliest, end_sample=min(max(word.end_sample, earliest), latest))
        ordered.append(word)
    for index in range(len(ordered) - 1, -1, -1):
        word = ordered[index]
        if word.start_sample is not None and word.end_sample is not None:
            ordered[index] = replace(word, end_sample=min(word.end_sample, latest))
            latest = word.start_sample
    return tuple(ordered)
