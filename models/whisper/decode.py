"""How Whisper's logits become tokens: the rules, greedy and sampled decoding, verified drafts, and quality control.

The rules are pure functions on logits (definitions of openai-whisper 20250625, ``decoding.py`` and ``transcribe.py``);
``decode`` drives one window through the decoder and keeps the alignment heads' scores on the way. Knows token ids.
Does not know text, audio or streams.
"""

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megakernel.draft import resumed
from vad.audio import SAMPLE_RATE_HZ

from .config import SpecialTokens
from .reference import DecoderCache, Whisper
from .timing import attention_of

MAX_INITIAL_TIMESTAMP_INDEX = 50  # 1.0 s: a window's first words do not begin later
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
MAX_COMPRESSION_RATIO = 2.4  # above: the text repeats itself
MIN_MEAN_LOGPROB = -1.0  # below: the model guesses
MAX_NO_SPEECH_PROBABILITY = 0.6  # above, and guessing too: the window is silent
MAX_SAMPLED_TOKENS = 224  # half of the decoder's positions; the other half is for the prompt
MAX_PROMPT_TOKENS = 223


@dataclass(frozen=True, slots=True, eq=False)
class Rules:
    """What may be written. ``suppressed`` is added to logits: 0 or minus infinity."""

    special: SpecialTokens
    suppressed: Tensor  # [n_vocab] float32
    suppressed_first: tuple[int, ...]
    with_timestamps: bool

    @staticmethod
    def of(
        special: SpecialTokens, n_vocab: int, *, non_speech: Sequence[int], space: int, with_timestamps: bool
    ) -> "Rules":
        """The rules of a vocabulary: ``non_speech`` are its tokens of symbols nobody speaks, ``space`` that of " "."""
        suppressed = torch.zeros(n_vocab)
        suppressed[list(non_speech)] = -torch.inf
        suppressed[special.start_of_transcript : special.timestamp_begin] = -torch.inf  # languages, tasks, markers
        if not with_timestamps:
            suppressed[special.timestamp_begin :] = -torch.inf
        return Rules(special, suppressed, (space, special.end_of_text), with_timestamps)


@dataclass(frozen=True, slots=True, eq=False)
class RuleBook:
    """Both sets of rules of one vocabulary: text alone, and text between timestamps."""

    special: SpecialTokens
    plain: Rules
    timed: Rules

    @staticmethod
    def of(special: SpecialTokens, n_vocab: int, *, non_speech: Sequence[int], space: int) -> "RuleBook":
        """See ``Rules.of``."""
        plain, timed = (
            Rules.of(special, n_vocab, non_speech=non_speech, space=space, with_timestamps=timed)
            for timed in (False, True)
        )
        return RuleBook(special, plain, timed)


def mask_logits(logits: Tensor, written: Sequence[int], rules: Rules) -> Tensor:
    """``logits`` [V] with minus infinity where a token may not follow ``written``, the tokens behind the task."""
    masked = logits + rules.suppressed
    if not written:
        masked[list(rules.suppressed_first)] = -torch.inf
    return _mask_timestamps(masked, written, rules.special) if rules.with_timestamps else masked


def _mask_timestamps(masked: Tensor, written: Sequence[int], special: SpecialTokens) -> Tensor:
    """Timestamps come in pairs around text, never go back, and win when they outweigh every text token together."""
    begin = special.timestamp_begin
    if not written:
        masked[:begin] = -torch.inf
        masked[begin + MAX_INITIAL_TIMESTAMP_INDEX + 1 :] = -torch.inf
        return masked
    ends_in_timestamp = written[-1] >= begin
    is_paired = len(written) < 2 or written[-2] >= begin
    if ends_in_timestamp and is_paired:
        masked[begin:] = -torch.inf  # a segment is open: text
    elif ends_in_timestamp:
        masked[: special.end_of_text] = -torch.inf  # a segment was closed: the next one's start, or the end
    last = next((token for token in reversed(written) if token >= begin), None)
    if last is not None:
        closes_segment = ends_in_timestamp and not is_paired
        masked[begin : last if closes_segment else last + 1] = -torch.inf
    if masked[begin:].logsumexp(0) > masked[:begin].max():
        masked[:begin] = -torch.inf
    return masked


@dataclass(frozen=True, slots=True)
class Request:
    """What one window's decoder is given. ``head`` ends with the task tokens; ``prefix`` is taken as already written.

    ``draft`` is a guess of what follows the prefix. It changes the speed, never the outcome.
    """

    head: tuple[int, ...]  # [start of previous, prompt…,] start of transcript [, language, task] [, no timestamps]
    start_index: int  # of "start of transcript" in the head
    prefix: tuple[int, ...]
    draft: tuple[int, ...]
    max_tokens: int  # sampled behind the prefix
    n_frames: int | None = None  # encoder positions of the audio itself, which tokens can lie in; None: all there are

    def without_prompt(self) -> "Request":
        """The same without the text before it, which may be what misleads the model."""
        return replace(self, head=self.head[self.start_index :], start_index=0)

    def room(self, n_text_positions: int) -> int:
        """How many tokens may be written: ``max_tokens``, or fewer where the decoder's positions end before."""
        return min(self.max_tokens, n_text_positions - len(self.head) - len(self.prefix))


@dataclass(frozen=True, slots=True, eq=False)
class Decoded:
    """What the decoder wrote for one window, the prefix excluded.

    Row ``i`` of ``attention`` is that of the alignment heads (``timing.py``) at the position that predicts token ``i``
    behind the task tokens, prefix included; if the text has ended, there is one row more than tokens.
    """

    tokens: tuple[int, ...]  # without the end of text
    logprobs: tuple[float, ...]  # of each token
    mean_logprob: float  # the end of text counts as a token
    no_speech_probability: float
    temperature: float
    has_ended: bool  # false: cut off at max_tokens
    attention: Tensor  # [n_rows, n_frames] float32, on the host
    n_verified: int  # draft tokens that held
    n_steps: int  # passes through the decoder


def decode(model: Whisper, cache: DecoderCache, request: Request, rules: Rules, *, temperature: float = 0.0) -> Decoded:
    """Write one window's tokens until the end of text or ``max_tokens``.

    At temperature 0 each token is the likeliest one. The draft's tokens are put through the decoder in one pass; those
    that the model would have written itself are kept, and at the first other one the model's own replaces it. So the
    outcome is that of an empty draft. Above 0 tokens are drawn from a generator seeded by the temperature, the draft is
    not used, and two runs give the same. The cache must belong to the window; tokens in it are forgotten.
    """
    special, end = rules.special, rules.special.end_of_text
    generator = torch.Generator(device=rules.suppressed.device).manual_seed(round(1000 * temperature))
    max_tokens = request.room(model.config.n_text_positions)
    start = (*request.head, *request.prefix)
    whole_draft = request.draft[: max_tokens - 1] if temperature == 0 else ()
    draft, cursor = whole_draft, 0  # what is tried of it, from where
    tokens: list[int] = []
    logprobs: list[float] = []
    scores: list[Tensor] = []

    cache.n_tokens = 0
    hidden = _advance(model, cache, [*start, *draft])
    no_speech = model.logits(hidden[request.start_index :][:1])[0].softmax(0)[special.no_speech].item()
    scores.append(_scores(cache, slice(len(request.head) - 1, len(start) - 1), request.n_frames))
    hidden = hidden[len(start) - 1 :]
    first_row = len(start) - 1  # of this pass, the row that predicts the next token
    n_verified, n_steps, has_ended = 0, 1, False
    while True:
        logits = model.logits(hidden).to(rules.suppressed.device)
        picks = _pick(logits, [*request.prefix, *tokens], draft, rules, temperature, generator)
        n_taken = 0
        for token, logprob in picks:
            n_taken += 1
            logprobs.append(logprob)
            if token == end:
                has_ended = True
                break
            tokens.append(token)
            if n_taken > len(draft) or token != draft[n_taken - 1]:
                break
            n_verified += 1
        scores.append(_scores(cache, slice(first_row, first_row + n_taken), request.n_frames))
        if has_ended or len(tokens) >= max_tokens:
            break
        cache.n_tokens = len(start) + len(tokens) - 1
        cursor += n_taken - 1
        if cursor < len(whole_draft):
            cursor = resumed(whole_draft, cursor, tokens[-1])
        draft = whole_draft[cursor:][: max_tokens - 1 - len(tokens)]
        hidden = _advance(model, cache, [tokens[-1], *draft])
        n_steps += 1
        first_row = 0
    return Decoded(
        tokens=tuple(tokens),
        logprobs=tuple(logprobs[: len(tokens)]),
        mean_logprob=sum(logprobs) / (len(tokens) + 1),
        no_speech_probability=no_speech,
        temperature=temperature,
        has_ended=has_ended,
        attention=attention_of(torch.cat(scores, dim=1)).cpu(),
        n_verified=n_verified,
        n_steps=n_steps,
    )


def _advance(model: Whisper, cache: DecoderCache, tokens: Sequence[int]) -> Tensor:
    """Hidden states [n_tokens, W] of one window's next tokens."""
    hidden: Tensor = model.decoder(torch.tensor([tokens], device=cache.self_keys[0].device), cache)
    return hidden[0]


def _scores(cache: DecoderCache, rows: slice, n_frames: int | None) -> Tensor:
    """[n_alignment_heads, n_rows, n_frames] float32 of the last pass."""
    return torch.stack([scores[0, rows, :n_frames] for scores in cache.alignment_scores]).float()


def _pick(
    logits: Tensor,  # [n_rows, V]; row i follows the first i tokens of the draft
    written: Sequence[int],
    draft: Sequence[int],
    rules: Rules,
    temperature: float,
    generator: torch.Generator,
) -> Iterator[tuple[int, float]]:
    """The token for each row and its log-probability, computed as far as the caller asks."""
    for index, row in enumerate(logits):
        masked = mask_logits(row, [*written, *draft[:index]], rules)
        if temperature == 0:
            token = int(masked.argmax())
        else:
            token = int(torch.multinomial((masked / temperature).softmax(0), 1, generator=generator))
        yield token, float(masked[token] - masked.logsumexp(0))


def max_sampled_tokens(n_samples: int) -> int:
    """How many tokens the audio can hold: a guard against loops, not a limit that speech should meet."""
    return min(MAX_SAMPLED_TOKENS, _TOKENS_TO_BEGIN + n_samples * _MAX_TOKENS_PER_S // SAMPLE_RATE_HZ)


_TOKENS_TO_BEGIN = 12  # a timestamp, a short answer and its punctuation in very little audio
_MAX_TOKENS_PER_S = 10  # of 310 recordings in ten languages none needs more than 4.3 besides those to begin with


def language_probabilities(model: Whisper, cache: DecoderCache, special: SpecialTokens) -> Tensor:
    """[n_languages], in the order of ``special.languages``: the decoder's first step, everything else masked."""
    cache.n_tokens = 0
    logits = model.logits(_advance(model, cache, [special.start_of_transcript]))[0]
    return logits[list(special.languages)].softmax(0)


def compression_ratio(text: str) -> float:
    """Bytes of the text for each byte of its zlib compression; repeated text has a high one."""
    encoded = text.encode()
    return len(encoded) / len(zlib.compress(encoded))


def is_silent(decoded: Decoded) -> bool:
    """The model hears no speech, and is not sure of what it wrote either.

    Not sure: below openai-whisper's threshold, whose mean counts the end of text; or a text of a word or two less
    likely, token for token, than that nobody speaks. The former alone lets a lone doubtful word through: in a text of
    one token the end of text is half of the mean, and music came out as "you" (tiny.en, probability 0.43 against 0.81
    for no speech). Longer texts are spared: spoken digits have 0.6 to 0.76 for no speech (base).
    """
    if decoded.no_speech_probability <= MAX_NO_SPEECH_PROBABILITY:
        return False
    if decoded.mean_logprob < MIN_MEAN_LOGPROB or not decoded.tokens:
        return True
    is_short = len(decoded.tokens) <= _LONE_WORD_TOKENS
    mean_text_logprob = sum(decoded.logprobs) / len(decoded.logprobs)
    return is_short and math.exp(mean_text_logprob) < decoded.no_speech_probability


_LONE_WORD_TOKENS = 5  # two of them timestamps, where there are any


def is_acceptable(decoded: Decoded, text: str) -> bool:
    """Whether no higher temperature needs to be tried: neither repeated nor guessed, or silence."""
    return is_silent(decoded) or (not _repeats(decoded, text) and decoded.mean_logprob >= MIN_MEAN_LOGPROB)


def _repeats(decoded: Decoded, text: str) -> bool:
    return not decoded.has_ended or compression_ratio(text) > MAX_COMPRESSION_RATIO


def with_fallback(
    first: Sequence[Decoded],
    again: Callable[[Sequence[int], float], Sequence[Decoded]],
    text_of: Callable[[Sequence[int]], str],
) -> list[Decoded]:
    """For each window its first acceptable decoding over rising temperatures, or the likeliest that does not repeat.

    ``first`` are those at temperature 0; ``again`` decodes the windows of the given indices at another temperature.
    openai-whisper keeps the last one, drawn at temperature 1. Of a short word that the model doubts at any temperature
    that makes a sentence about something else: tiny.en heard "nine" as a dozen words.
    """
    kept = list(first)
    tried: list[list[Decoded]] = [[] for _ in first]
    doubtful = list(range(len(first)))
    for temperature in TEMPERATURES:
        if temperature > 0:
            for index, decoded in zip(doubtful, again(doubtful, temperature), strict=True):
                kept[index] = decoded
        for index in doubtful:
            tried[index].append(kept[index])
        doubtful = [index for index in doubtful if not is_acceptable(kept[index], text_of(kept[index].tokens))]
        if not doubtful:
            break
    for index in doubtful:
        kept[index] = max(tried[index], key=lambda one: (not _repeats(one, text_of(one.tokens)), one.mean_logprob))
    return kept


@dataclass(frozen=True, slots=True)
class TimedTokens:
    """Text tokens ``begin`` to ``end`` (half-open) between two timestamps, in encoder positions of the window."""

    begin: int
    end: int
    start_position: int
    end_position: int | None  # None: the model left the segment open


def split_at_timestamps(tokens: Sequence[int], timestamp_begin: int) -> tuple[list[TimedTokens], int | None]:
    """Segments of one window, and the position at which the next window begins (``None``: behind this one).

    Text behind the last pair of timestamps is not whole; if there was a pair, it is left to the next window. A text
    that ends with a single timestamp was written to the window's end.
    """
    is_time = [token >= timestamp_begin for token in tokens]
    pairs = [index for index in range(1, len(tokens)) if is_time[index - 1] and is_time[index] and index > 1]
    ends_whole = len(tokens) > 1 and is_time[-1] and not is_time[-2]
    bounds = [0, *pairs, len(tokens)] if ends_whole or not pairs else [0, *pairs]
    segments = [
        _timed(tokens, begin, end, timestamp_begin)
        for begin, end in zip(bounds, bounds[1:], strict=False)
        if end > begin
    ]
    resume = tokens[pairs[-1] - 1] - timestamp_begin if pairs and not ends_whole else None
    return segments, resume


def _timed(tokens: Sequence[int], begin: int, end: int, timestamp_begin: int) -> TimedTokens:
    opens, closes = tokens[begin] >= timestamp_begin, end - begin > 1 and tokens[end - 1] >= timestamp_begin
    return TimedTokens(
        begin=begin + opens,
        end=end - closes,
        start_position=tokens[begin] - timestamp_begin if opens else 0,
        end_position=tokens[end - 1] - timestamp_begin if closes else None,
    )
