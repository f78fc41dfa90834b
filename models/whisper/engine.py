"""Whisper as a ``SpeechEngine`` on the CPU: chunks to hypotheses, and whole recordings to segments.

Knows how a window becomes features, a prompt, a prefix and a draft, and how tokens become words on the session's axis.
Does not know when to decode or which words are settled, and leaves logits, times and number formats to the modules
beside it. Not thread-safe: one thread owns an engine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from streaming.capability import Capability
from streaming.engine import Chunk, DecodeOptions, EngineStream, ModelCard, StreamWarning, Task
from streaming.transcript import Hypothesis, Quality, Word
from vad.audio import SpeechSpan, samples_from_ms

from ..mel import HOP_SAMPLES, WINDOW_FRAMES, log_mel
from ..store import ModelFiles, read_config
from ..tokenizer import WhisperTokenizer, group_words
from ..weights import read_weights
from .config import SpecialTokens, WhisperConfig
from .cpu import pack
from .decode import (
    MAX_PROMPT_TOKENS,
    MAX_SAMPLED_TOKENS,
    Decoded,
    Request,
    Rules,
    TimedTokens,
    compression_ratio,
    decode,
    is_silent,
    language_probabilities,
    max_sampled_tokens,
    split_at_timestamps,
    with_fallback,
)
from .reference import DecoderCache, Whisper
from .timing import token_spans

FRAMES_PER_POSITION = 2
POSITION_SAMPLES = HOP_SAMPLES * FRAMES_PER_POSITION  # 20 ms
WINDOW_SAMPLES = WINDOW_FRAMES * HOP_SAMPLES

# What follows the speech in a short window (figures: benchmarks/results/whisper_padding.md).
PADDING_SAMPLES = samples_from_ms(500)  # real silence, so that the last word ends before the encoder does
TAIL_STRIDE = 4  # of the remembered silence behind it; at 8 one clip in 300 looped
LOUDEST_FEATURE = (1.5 + 4) / 4  # every window is brought to this level, so that one remembered silence fits all
QUIETEST_FEATURE = LOUDEST_FEATURE - 8 / 4  # features span eight decades of power, divided by four
_DIGITAL_SILENCE = (-10 + 4) / 4  # the feature of no power at all

MIN_WINDOW_SAMPLES = samples_from_ms(100)  # less holds no word
LANGUAGE_MIN_SAMPLES = samples_from_ms(1_000)  # less is a guess that is made again
LANGUAGE_SURE_SAMPLES = samples_from_ms(3_000)
LANGUAGE_SURE_PROBABILITY = 0.8
MAX_VOCABULARY_TOKENS = 120  # of the prompt's 223; the rest is for context


@dataclass(slots=True, eq=False)
class WhisperStream:
    """One caller's state: options, the language once known, and the last hypothesis as draft for the next."""

    options: DecodeOptions
    warnings: tuple[StreamWarning, ...]
    vocabulary_tokens: tuple[int, ...]
    language: str | None
    is_language_sure: bool
    last_tokens: list[int] = field(default_factory=list)  # prefix included
    last_starts: list[int] = field(default_factory=list)  # start_sample of each


@dataclass(frozen=True, slots=True)
class TranscribedSegment:
    """A stretch of a recording; times are samples since its start."""

    span: SpeechSpan
    words: tuple[Word, ...]
    language: str
    quality: Quality


class WhisperEngine:
    """Shared weights of one Whisper checkpoint. Fulfils ``streaming.engine.SpeechEngine``."""

    def __init__(self, model: Whisper, tokenizer: WhisperTokenizer, *, name: str) -> None:
        """``model`` is loaded and, if wanted, packed for the CPU."""
        special = _special_tokens(tokenizer)
        n_vocab = model.config.n_vocab
        space = tokenizer.encode(" ")[0]
        self._model = model.eval()
        self._tokenizer = tokenizer
        self._special = special
        self._plain_rules, self._timed_rules = (
            Rules.of(special, n_vocab, non_speech=tokenizer.non_speech_ids, space=space, with_timestamps=timed)
            for timed in (False, True)
        )
        self._n_mels = model.config.n_mels
        with torch.inference_mode():
            silence = torch.full(
                (1, self._n_mels, FRAMES_PER_POSITION * model.config.n_audio_positions), QUIETEST_FEATURE
            )
            self._tail = model.silent_tail(silence, stride=TAIL_STRIDE)
        self._card = ModelCard(
            name=name,
            languages=tokenizer.languages,
            max_window_samples=WINDOW_SAMPLES,
            capabilities=_MULTILINGUAL_CAPABILITIES if tokenizer.is_multilingual else _CAPABILITIES,
        )

    @classmethod
    def load(cls, files: ModelFiles, *, name: str, n_threads: int | None = None) -> "WhisperEngine":
        """Read weights and tokenizer. ``n_threads`` sets torch's threads for the whole process.

        Raises:
            ModelFilesError: if the files are not those of a Whisper.
        """
        if n_threads is not None:
            torch.set_num_threads(n_threads)
        tensors = read_weights(files.weights, files.weights_kind)
        config = WhisperConfig.of({key: tuple(tensor.shape) for key, tensor in tensors.items()}, read_config(files))
        model = Whisper(config)
        model.load(tensors)
        pack(model)
        return cls(model, WhisperTokenizer.load(files.tokenizer), name=name)

    @property
    def card(self) -> ModelCard:
        """What the model offers."""
        return self._card

    @property
    def backend(self) -> str:
        """What computes."""
        return "torch-cpu"

    @property
    def why(self) -> str:
        """Why that backend."""
        return "the weights were loaded for the CPU, int8 and bfloat16"

    def open(self, options: DecodeOptions) -> WhisperStream:
        """Begin a stream.

        Raises:
            UnsupportedOptionError: for an option that this model can't honour.
        """
        self._card.check(options)
        tokens, left_out = self._vocabulary(options.vocabulary)
        warnings = []
        if left_out:
            warnings.append(StreamWarning("vocabulary_truncated", f"terms that did not fit: {', '.join(left_out)}"))
        room = MAX_PROMPT_TOKENS - len(tokens)
        if (n_lost := len(self._tokenizer.encode(f" {options.context.strip()}")) - room) > 0:
            message = f"the first {n_lost} tokens of the context did not fit; the last {room} are used"
            warnings.append(StreamWarning("context_truncated", message))
        language = options.language or (None if self._tokenizer.is_multilingual else self._card.languages[0])
        return WhisperStream(options, tuple(warnings), tokens, language, is_language_sure=language is not None)

    def close(self, stream: EngineStream) -> None:
        """Nothing to free: a stream's state is its own."""

    def decode(self, batch: Sequence[tuple[EngineStream, Chunk]]) -> list[Hypothesis]:
        """One hypothesis for each pair, in order: the words that follow the chunk's prefix.

        Raises:
            ValueError: for a chunk longer than the card allows.
        """
        with torch.inference_mode():
            return [self._decode_chunk(_own(stream), chunk) for stream, chunk in batch]

    def transcribe(self, samples: NDArray[np.float32], options: DecodeOptions) -> Iterator[TranscribedSegment]:
        """Segments of a recording [n_samples] of any length, each yielded as soon as its 30 s window is decoded.

        Whisper's long form: a window ends where the model closed its last whole segment, and the next begins there.
        Nothing is carried over from window to window but the language.

        Raises:
            UnsupportedOptionError: for an option that this model can't honour.
        """
        stream = self.open(options)
        position = 0
        while len(samples) - position >= MIN_WINDOW_SAMPLES:
            with torch.inference_mode():
                segments, advance_samples = self._transcribe_window(
                    stream, samples[position:][:WINDOW_SAMPLES], position
                )
            yield from segments
            position += advance_samples

    # ------------------------------------------------------------------ one window

    def _listen(self, samples: NDArray[np.float32]) -> DecoderCache | None:
        """The audio as the decoder sees it, ``None`` for digital silence."""
        n_positions = min(
            -(-(len(samples) + PADDING_SAMPLES) // POSITION_SAMPLES), self._model.config.n_audio_positions
        )
        features = log_mel(samples, self._n_mels, FRAMES_PER_POSITION * n_positions)
        loudest = features.max()
        if loudest <= _DIGITAL_SILENCE:
            return None
        audio = self._model.encoder((features + (LOUDEST_FEATURE - loudest))[None], self._tail)
        return self._model.decoder.open_cache(audio, self._tail)

    def _write(self, cache: DecoderCache, request: Request, rules: Rules, *, with_care: bool) -> Decoded:
        """Decode once, or with care: again at higher temperatures, without the prompt, until it is acceptable."""

        def decode_at(temperature: float) -> Decoded:
            asked = request if temperature == 0 else request.without_prompt()
            return decode(self._model, cache, asked, rules, temperature=temperature)

        return with_fallback(decode_at, self._tokenizer.decode) if with_care else decode_at(0.0)

    def _identify(self, stream: WhisperStream, cache: DecoderCache, n_samples: int) -> str:
        """The stream's language, detected in this window unless it is sure."""
        if stream.is_language_sure and stream.language is not None:
            return stream.language
        probabilities = language_probabilities(self._model, cache, self._special)
        best = int(probabilities.argmax())
        language = self._card.languages[best]
        if n_samples >= LANGUAGE_MIN_SAMPLES or stream.language is None:
            stream.language = language if n_samples >= LANGUAGE_MIN_SAMPLES else None
            is_long = n_samples >= LANGUAGE_SURE_SAMPLES
            stream.is_language_sure = is_long and float(probabilities[best]) >= LANGUAGE_SURE_PROBABILITY
        return stream.language or language

    def _task(self, stream: WhisperStream, language: str) -> list[int]:
        special = self._special
        if not self._tokenizer.is_multilingual:
            return [special.start_of_transcript]
        task = special.translate if stream.options.task is Task.TRANSLATE else special.transcribe
        return [special.start_of_transcript, self._tokenizer.language_ids[language], task]

    # ------------------------------------------------------------------ chunks

    def _decode_chunk(self, stream: WhisperStream, chunk: Chunk) -> Hypothesis:
        n_samples = len(chunk.samples)
        if n_samples > WINDOW_SAMPLES:
            raise ValueError(f"{self._card.name} takes chunks up to {WINDOW_SAMPLES} samples, not {n_samples}")
        cache = self._listen(chunk.samples) if n_samples >= MIN_WINDOW_SAMPLES else None
        if cache is None:
            return Hypothesis((), stream.language, None)
        language = self._identify(stream, cache, n_samples)
        request = self._request(stream, chunk, language)
        decoded = self._write(cache, request, self._plain_rules, with_care=chunk.is_final)
        quality = _quality(decoded, self._tokenizer.decode(decoded.tokens))
        if is_silent(decoded):
            return Hypothesis((), language, quality)
        n_prefix = len(request.prefix)
        times = self._times(decoded, n_prefix, n_samples) + chunk.span.start_sample
        stream.last_tokens = [*request.prefix, *decoded.tokens]
        stream.last_starts = times[0].tolist()
        return Hypothesis(
            self._words(decoded.tokens, decoded.logprobs, times[:, n_prefix:], language), language, quality
        )

    def _request(self, stream: WhisperStream, chunk: Chunk, language: str) -> Request:
        prefix = self._tokenizer.encode("".join(word.text for word in chunk.prefix))
        task = [*self._task(stream, language), self._special.no_timestamps]
        room = self._model.config.n_text_positions - MAX_SAMPLED_TOKENS - len(task) - len(prefix) - 1
        prompt = self._prompt(stream, chunk.prompt, min(room, MAX_PROMPT_TOKENS))
        head = [self._special.start_of_previous, *prompt, *task] if prompt else task
        return Request(
            head=tuple(head),
            start_index=len(head) - len(task),
            prefix=tuple(prefix),
            draft=tuple(_draft(stream, chunk, prefix)),
            max_tokens=max_sampled_tokens(len(chunk.samples)),
        )

    def _prompt(self, stream: WhisperStream, before: str, n_tokens: int) -> list[int]:
        """Vocabulary, then as much of the latest text as fits behind it."""
        vocabulary = list(stream.vocabulary_tokens[: max(n_tokens, 0)])
        text = " ".join(part.strip() for part in (stream.options.context, before) if part.strip())
        room = n_tokens - len(vocabulary)
        return vocabulary + (self._tokenizer.encode(f" {text}")[-room:] if text and room > 0 else [])

    def _vocabulary(self, terms: Sequence[str]) -> tuple[tuple[int, ...], list[str]]:
        """Tokens of a list of the terms, and the terms that did not fit."""
        tokens: list[int] = []
        left_out: list[str] = []
        for term in terms:
            added = self._tokenizer.encode(f", {term.strip()}" if tokens else f" {term.strip()}")
            if len(tokens) + len(added) < MAX_VOCABULARY_TOKENS:
                tokens += added
            else:
                left_out.append(term)
        return tuple(tokens + self._tokenizer.encode(".")) if tokens else (), left_out

    # ------------------------------------------------------------------ recordings

    def _transcribe_window(
        self, stream: WhisperStream, samples: NDArray[np.float32], position: int
    ) -> tuple[list[TranscribedSegment], int]:
        """The segments of the window that begins at ``position``, and by how many samples to go on."""
        cache = self._listen(samples)
        if cache is None:
            return [], len(samples)
        language = self._identify(stream, cache, len(samples))
        task = self._task(stream, language)
        prompt = self._prompt(stream, "", MAX_PROMPT_TOKENS)
        head = [self._special.start_of_previous, *prompt, *task] if prompt else task
        request = Request(tuple(head), len(head) - len(task), (), (), max_sampled_tokens(len(samples)))
        decoded = self._write(cache, request, self._timed_rules, with_care=True)
        if is_silent(decoded):
            return [], len(samples)
        parts, n_positions = split_at_timestamps(decoded.tokens, self._special.timestamp_begin)
        advance_samples = len(samples) if n_positions is None else n_positions * POSITION_SAMPLES
        times = self._times(decoded, 0, len(samples)) + position
        segments = [self._segment(decoded, part, times, language, position, len(samples)) for part in parts]
        return [segment for segment in segments if segment.words], max(advance_samples, MIN_WINDOW_SAMPLES)

    def _segment(
        self,
        decoded: Decoded,
        part: TimedTokens,
        times: NDArray[np.int64],
        language: str,
        position: int,
        n_samples: int,
    ) -> TranscribedSegment:
        end_position = part.end_position if part.end_position is not None else n_samples // POSITION_SAMPLES
        span = SpeechSpan(
            position + min(part.start_position * POSITION_SAMPLES, n_samples),
            position + min(end_position * POSITION_SAMPLES, n_samples),
        )
        own = slice(part.begin, part.end)
        words = self._words(decoded.tokens[own], decoded.logprobs[own], times[:, own], language)
        return TranscribedSegment(span, words, language, _quality(decoded, self._tokenizer.decode(decoded.tokens)))

    # ------------------------------------------------------------------ words

    def _times(self, decoded: Decoded, n_prefix: int, n_samples: int) -> NDArray[np.int64]:
        """Samples at which each token starts and ends, prefix first; [2, n_tokens]."""
        n_frames = max(n_samples // POSITION_SAMPLES, 1)
        n_tokens = n_prefix + len(decoded.tokens)
        spans = token_spans(decoded.alignment_scores.numpy(), decoded.n_head_rows, n_frames, n_tokens)
        lags_samples = [[samples_from_ms(lag_ms)] for lag_ms in self._model.config.attention_lags_ms]
        times: NDArray[np.int64] = np.clip(np.stack(spans) * POSITION_SAMPLES - lags_samples, 0, n_samples)
        return times

    def _words(
        self, tokens: Sequence[int], logprobs: Sequence[float], times: NDArray[np.int64], language: str
    ) -> tuple[Word, ...]:
        """Words with their marks; ``times`` [2, n_tokens] are samples. A word's times are those of its letters."""
        pieces = self._tokenizer.split_words(tokens, language)
        edges = np.cumsum([0, *(len(ids) for _, ids in pieces)])
        words = []
        for group in group_words([text for text, _ in pieces], language):
            text = "".join(text for text, _ in pieces[group.start : group.stop])
            probabilities = np.exp(logprobs[edges[group.start] : edges[group.stop]])
            start = int(times[0, edges[group.spoken_start]])
            end = max(start, int(times[1, edges[group.spoken_stop] - 1]))
            words.append(Word(text, start, end, float(probabilities.mean())))
        return tuple(word for word in words if word.text.strip())


_CAPABILITIES = frozenset(
    {
        Capability.WORD_TIMES,
        Capability.CONFIDENCE,
        Capability.PUNCTUATION,
        Capability.VOCABULARY,
        Capability.CONTEXT,
    }
)
_MULTILINGUAL_CAPABILITIES = _CAPABILITIES | {
    Capability.LANGUAGE_CHOICE,
    Capability.LANGUAGE_ID,
    Capability.TRANSLATION,
}


def _own(stream: EngineStream) -> WhisperStream:
    if not isinstance(stream, WhisperStream):
        raise TypeError(f"a stream of another engine: {type(stream).__name__}")
    return stream


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


def _draft(stream: WhisperStream, chunk: Chunk, prefix: Sequence[int]) -> list[int]:
    """What the last hypothesis says behind the prefix: by tokens, or by time where the span has moved on."""
    last = stream.last_tokens
    if last[: len(prefix)] == list(prefix):
        return last[len(prefix) :]
    ends = [word.end_sample for word in chunk.prefix if word.end_sample is not None]
    behind = max(ends, default=chunk.span.start_sample)
    return [token for token, start in zip(last, stream.last_starts, strict=True) if start >= behind]


def _quality(decoded: Decoded, text: str) -> Quality:
    return Quality(
        mean_logprob=decoded.mean_logprob,
        no_speech_probability=decoded.no_speech_probability,
        compression_ratio=compression_ratio(text),
        temperature=decoded.temperature,
    )
