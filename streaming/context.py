"""What a decode is told of what was said just before. Pure.

A sentence broken by a pause is understood as one if the engine hears its beginning again: the *lead*, a few seconds of
audio whose words are given. What lies before the lead, or too far back to be heard again, goes along as a text prompt.
Only confident text is carried over: a doubtful transcript makes the next one worse, up to endless repeats. Nor is text
of somebody who repeats a phrase: told of it, a model hears it once more, or takes the next one for told already.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from streaming.agreement import continues
from streaming.guards import repeated_tail
from streaming.transcript import Quality, Word, text_of
from vad.audio import SpeechSpan, samples_from_ms

MIN_MEAN_LOGPROB = -0.6
MAX_TEMPERATURE = 0.0
MAX_PROMPT_CHARACTERS = 200  # about 50 tokens: names and style carry over, cost and the pull towards repeats stay small
MIN_REPEATED_WORDS = 3  # said again at the end of what was said: no prompt
MAX_LEAD_SAMPLES = samples_from_ms(8_000)
MAX_LEAD_GAP_SAMPLES = samples_from_ms(1_500)  # silence that is worth hearing again
MAX_PROMPT_GAP_SAMPLES = samples_from_ms(10_000)  # after a longer silence the talk has moved on


@dataclass(frozen=True, slots=True)
class Context:
    """The words before a segment: ``prompt`` as text, then ``lead`` with its audio from ``lead_start_sample`` on.

    ``end_sample`` is where the last of it was said.
    """

    prompt: str = ""
    lead: tuple[Word, ...] = ()
    lead_start_sample: int = 0
    end_sample: int = 0

    def leads_to(self, start_sample: int) -> bool:
        """Whether speech that begins at ``start_sample`` is to be heard with the lead."""
        return bool(self.lead) and start_sample - self.end_sample <= MAX_LEAD_GAP_SAMPLES

    def for_speech_at(self, start_sample: int) -> "Context":
        """What still matters to speech that begins at ``start_sample``."""
        gap_samples = start_sample - self.end_sample
        if gap_samples > MAX_PROMPT_GAP_SAMPLES:
            return Context()
        if gap_samples > MAX_LEAD_GAP_SAMPLES:
            return Context(_prompt(self.prompt, self.lead), (), 0, self.end_sample)
        return self

    def followed_by(self, words: Sequence[Word], quality: Quality | None, span: SpeechSpan) -> "Context":
        """The context behind a segment of ``words`` said in ``span``."""
        if not words:
            return self
        if not is_confident(quality):
            return Context()
        everything = (*self.lead, *words)
        first = _without_repeats(everything, _lead_index(everything, span.end_sample))
        heard_from_sample = self.lead_start_sample if self.lead else span.start_sample
        return Context(
            prompt=_prompt(self.prompt, everything[:first], lead=everything[first:]),
            lead=everything[first:],
            lead_start_sample=_lead_start(everything, first, heard_from_sample, span.end_sample),
            end_sample=span.end_sample,
        )


def is_confident(quality: Quality | None) -> bool:
    """Whether text of this quality may be carried over. Of an engine that states none, nothing is."""
    return (
        quality is not None
        and quality.mean_logprob is not None
        and quality.mean_logprob >= MIN_MEAN_LOGPROB
        and (quality.temperature or 0.0) <= MAX_TEMPERATURE
    )


def _prompt(before: str, words: Sequence[Word], lead: Sequence[Word] = ()) -> str:
    """``words`` behind the prompt before, unless what was said, up to the end of ``lead``, repeats itself."""
    text = _joined(before, words)
    told = (Word(f" {word}", None, None, None) for word in text.split())
    n_words, n_times = repeated_tail((*told, *lead))
    return "" if n_words * (n_times - 1) >= MIN_REPEATED_WORDS else text


def _joined(prompt: str, words: Sequence[Word]) -> str:
    """The last whole words of both that fit the budget."""
    text = " ".join(part for part in (prompt, text_of(tuple(words))) if part)
    if len(text) <= MAX_PROMPT_CHARACTERS:
        return text
    tail = text[-MAX_PROMPT_CHARACTERS:]
    _, space, rest = tail.partition(" ")
    return rest if space else tail


def _lead_index(words: Sequence[Word], end_sample: int) -> int:
    """The first word of the lead; there is none if words have no times."""
    first = len(words)
    for index in range(len(words) - 1, -1, -1):
        start_sample = words[index].start_sample
        if start_sample is None or start_sample < end_sample - MAX_LEAD_SAMPLES:
            break
        if not continues(words[index]):
            first = index
    return first


def _without_repeats(words: Sequence[Word], first: int) -> int:
    """``first``, or where a lead begins in which the phrase that it ends on stands once."""
    n_words, n_times = repeated_tail(words[first:])
    last_time = len(words) - n_words
    repeats = n_words * (n_times - 1) >= MIN_REPEATED_WORDS
    return last_time if repeats and not continues(words[last_time]) else first


def _lead_start(words: Sequence[Word], first: int, heard_from_sample: int, end_sample: int) -> int:
    """Where to hear a lead that begins with word ``first`` again: from the middle of the pause before it.

    Inside what was heard, and no longer than a lead may be, wherever the words' times lie.
    """
    earliest = max(heard_from_sample, end_sample - MAX_LEAD_SAMPLES)
    before = words[first - 1].end_sample if first else heard_from_sample
    start_sample = words[first].start_sample if first < len(words) else end_sample
    if before is None or start_sample is None:
        return earliest
    middle = (start_sample + before) // 2 if first else before
    return min(max(earliest, middle), max(earliest, end_sample))
