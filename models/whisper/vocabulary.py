"""A tokenizer's ids as decoding wants them: the special tokens by name, and the rules of what may be written.

Knows the tokenizer. Does not know logits or how rules are applied (``decode.py`` does).
"""

from ..tokenizer import WhisperTokenizer
from .config import SpecialTokens
from .decode import RuleBook


def rule_book(tokenizer: WhisperTokenizer, n_vocab: int) -> RuleBook:
    """The rules of this vocabulary; ``n_vocab`` counts the logits."""
    space = tokenizer.encode(" ")[0]
    return RuleBook.of(_special_tokens(tokenizer), n_vocab, non_speech=tokenizer.non_speech_ids, space=space)


def _special_tokens(tokenizer: WhisperTokenizer) -> SpecialTokens:
    return SpecialTokens(
        end_of_text=tokenizer.eot,
        start_of_transcript=tokenizer.sot,
        languages=tuple(tokenizer.language_ids.values()),
        translate=tokenizer.translate,
        transcribe=tokenizer.transcribe,
        start_of_lm=tokenizer.startoflm,
        start_of_previous=tokenizer.startofprev,
        no_speech=tokenizer.nospeech,
        no_timestamps=tokenizer.notimestamps,
        timestamp_begin=tokenizer.timestamp_begin,
    )
