"""How far a transcript is from what was said."""

import jiwer
from whisper_normalizer.english import EnglishTextNormalizer

normalised = EnglishTextNormalizer()


def error_rate(reference: str, text: str) -> float:
    """Word errors for each word of ``reference``."""
    return float(jiwer.wer(normalised(reference), normalised(text)))
