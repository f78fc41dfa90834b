"""What the next decode is told about the text before it. Pure.

Only confident text is carried over: a doubtful transcript as prompt makes the next one worse, up to endless repeats.
"""

from streaming.transcript import Quality

MIN_MEAN_LOGPROB = -0.6
MAX_TEMPERATURE = 0.0
MAX_PROMPT_CHARACTERS = 200  # about 50 tokens: names and style carry over, cost and the pull towards repeats stay small
MAX_GAP_S = 10.0  # after a longer silence the talk has moved on


def is_confident(quality: Quality | None) -> bool:
    """Whether text of this quality may become a prompt. An engine that states none is not prompted."""
    return (
        quality is not None
        and quality.mean_logprob is not None
        and quality.mean_logprob >= MIN_MEAN_LOGPROB
        and (quality.temperature or 0.0) <= MAX_TEMPERATURE
    )


def prompt_from(text: str) -> str:
    """The last whole words of ``text`` that fit the budget."""
    if len(text) <= MAX_PROMPT_CHARACTERS:
        return text
    tail = text[-MAX_PROMPT_CHARACTERS:]
    _, space, rest = tail.partition(" ")
    return rest if space else tail
