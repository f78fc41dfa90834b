"""Signs that a decoder has lost the audio: it repeats itself, or writes more than anyone could have said.

Pure functions of a hypothesis's words and the span they were heard in. A phrase that was truly said several times must
pass: repetition alone is no fault, repetition faster than speech is.
"""

from collections.abc import Sequence

from streaming.agreement import normalised
from streaming.transcript import Quality, Word, text_of
from vad.audio import SpeechSpan, seconds

# Fast English conversation runs at 20 characters a second, spaces included; an auctioneer reaches 30.
MAX_CHARACTERS_PER_S = 30.0
ALLOWANCE_CHARACTERS = 12  # a word may begin just before the audio that was cut out for it
MIN_REPEATS = 4
MAX_PHRASE_WORDS = 12
MAX_COMPRESSION_RATIO = 2.4  # the threshold of openai-whisper's fallback
# Of an empty answer to speech whose beginning was given. On real clips those to breath, noise and music were surer
# (-0.01 to -0.34, tiny.en and base), those that left words out less sure (-0.41 to -0.70).
MIN_EMPTY_LOGPROB = -0.37


def is_too_fast(words: Sequence[Word], span: SpeechSpan) -> bool:
    """Whether ``words`` are more text than ``span`` can hold."""
    budget = ALLOWANCE_CHARACTERS + MAX_CHARACTERS_PER_S * seconds(span.n_samples)
    return len(text_of(tuple(words))) > budget


def repeated_tail(words: Sequence[Word]) -> tuple[int, int]:
    """Length in words of the phrase that ``words`` end on, and how often it stands there in a row (the longest run)."""
    texts = [normalised(word.text) for word in words]
    best = (0, 1)
    for length in range(1, min(MAX_PHRASE_WORDS, len(texts) // 2) + 1):
        phrase, repeats = texts[-length:], 1
        while texts[len(texts) - (repeats + 1) * length : len(texts) - repeats * length] == phrase:
            repeats += 1
        if length * (repeats - 1) > best[0] * (best[1] - 1):
            best = (length, repeats)
    return best


def is_looping(words: Sequence[Word], span: SpeechSpan, compression_ratio: float | None) -> bool:
    """Whether the decoder goes round in circles: the same phrase again and again, in text that can't be real."""
    if is_too_fast(words, span):
        return True
    _, repeats = repeated_tail(words)
    return repeats >= MIN_REPEATS and compression_ratio is not None and compression_ratio > MAX_COMPRESSION_RATIO


def gives_up(words: Sequence[Word], quality: Quality | None) -> bool:
    """Whether the decoder writes nothing, without being sure that there is nothing."""
    return not words and quality is not None and (quality.mean_logprob or 0.0) < MIN_EMPTY_LOGPROB


def without_loop(words: Sequence[Word]) -> tuple[Word, ...]:
    """``words`` with the phrase they end on kept once."""
    length, repeats = repeated_tail(words)
    return tuple(words[: len(words) - length * (repeats - 1)])
