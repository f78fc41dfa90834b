"""What was said: words, an engine's hypothesis for one chunk, and the segment that a client sees.

Knows text and sample positions. Does not know models, sockets or wire formats.
"""

from dataclasses import dataclass
from enum import StrEnum

from vad.audio import SpeechSpan


@dataclass(frozen=True, slots=True)
class Word:
    """One word with its punctuation.

    ``text`` keeps the white space that the model wrote before it, so that ``"".join(word.text ...)`` is the transcript
    in every script, with or without spaces. Times are samples since the session began, ``None`` where the engine
    gives none; ``confidence`` is the mean probability of the word's tokens.
    """

    text: str
    start_sample: int | None
    end_sample: int | None
    confidence: float | None


@dataclass(frozen=True, slots=True)
class Quality:
    """How sure the engine is of one hypothesis (definitions of openai-whisper's ``DecodingResult``)."""

    mean_logprob: float | None
    no_speech_probability: float | None
    compression_ratio: float | None
    temperature: float | None


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """One engine answer for one chunk: the words that follow the chunk's ``prefix``.

    Of an engine that carries its state from chunk to chunk: the words not yet given as settled. The first ``n_settled``
    of them no later chunk will change or give again; the others are tentative: the last word while it may go on, and
    what was heard in the right context. A word is settled once the next one has begun, or all was said. ``None``: the
    engine does not say.
    """

    words: tuple[Word, ...]
    language: str | None
    quality: Quality | None
    n_settled: int | None = None


class EndReason(StrEnum):
    """Why a segment became final."""

    SILENCE = "silence"  # the speaker paused for the hangover
    MAX_SPAN = "max_span"  # speech went on past the maximum span: a soft cut at a settled word
    FLUSH = "flush"  # the client asked for everything so far
    STALL = "stall"  # no audio came any more
    END = "end"  # the client said bye, or left for good


@dataclass(frozen=True, slots=True)
class Segment:
    """The transcript of one stretch of speech as far as it is known.

    Words up to ``n_committed`` will not change; those behind it may. ``revision`` rises with every update until the
    segment has an ``end_reason``; then it is final and every word is committed.
    """

    segment_id: int
    revision: int
    words: tuple[Word, ...]
    n_committed: int
    span: SpeechSpan
    language: str | None
    end_reason: EndReason | None


def text_of(words: tuple[Word, ...]) -> str:
    """The transcript of ``words``, without white space at its ends."""
    return "".join(word.text for word in words).strip()
