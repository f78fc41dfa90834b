"""Whisper as a ``SpeechEngine``: chunks to hypotheses, and whole recordings to segments.

Knows how a window gets a prompt, a prefix and a draft, and how tokens become words on the session's axis. Does not know
when to decode or which words are settled, nor what computes: backends do (``backend.py``). Not thread-safe: one thread
owns an engine.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from streaming.capability import Capability
from streaming.engine import Chunk, DecodeOptions, EngineStream, ModelCard, StreamWarning, Task
from streaming.transcript import Hypothesis, Quality, Word
from vad.audio import SpeechSpan, samples_from_ms

from ..backends import BackendError, Backends
from ..store import ModelFiles
from ..timeline import Timeline
from ..tokenizer import WhisperTokenizer, group_words
from .backend import Audio, Backend, Writing
from .config import WhisperConfig
from .decode import (
    MAX_PROMPT_TOKENS,
    MAX_SAMPLED_TOKENS,
    Decoded,
    Request,
    Rules,
    TimedTokens,
    compression_ratio,
    is_silent,
    max_sampled_tokens,
    split_at_timestamps,
    with_fallback,
)
from .timing import token_spans
from .vocabulary import rule_book
from .window import POSITION_SAMPLES, WINDOW_SAMPLES

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

    def take_guess(self, language: str, probability: float, n_samples: int) -> str:
        """The language that a window of ``n_samples`` is taken to be in, given the one detected in it."""
        if n_samples >= LANGUAGE_MIN_SAMPLES or self.language is None:
            self.language = language if n_samples >= LANGUAGE_MIN_SAMPLES else None
            self.is_language_sure = n_samples >= LANGUAGE_SURE_SAMPLES and probability >= LANGUAGE_SURE_PROBABILITY
        return self.language or language


@dataclass(frozen=True, slots=True, eq=False)
class Window:
    """Audio to be written down for a stream. ``request_in`` a language; ``with_care``: doubtful text is tried again."""

    samples: NDArray[np.float32]  # [n_samples]
    stream: WhisperStream
    request_in: Callable[[str], Request]
    with_care: bool


@dataclass(frozen=True, slots=True, eq=False)
class Heard:
    """What a window says."""

    language: str
    request: Request
    decoded: Decoded


@dataclass(frozen=True, slots=True)
class TranscribedSegment:
    """A stretch of a recording; times are samples since its start."""

    span: SpeechSpan
    words: tuple[Word, ...]
    language: str
    quality: Quality


class WhisperEngine:
    """Shared weights of one Whisper checkpoint. Fulfils ``streaming.engine.SpeechEngine``."""

    def __init__(
        self, backends: Backends[Backend], config: WhisperConfig, tokenizer: WhisperTokenizer, *, name: str
    ) -> None:
        """``backends`` compute the checkpoint that ``config`` and ``tokenizer`` describe."""
        self._backends = backends
        self._config = config
        self._tokenizer = tokenizer
        self._rules = rule_book(tokenizer, config.n_vocab)
        self._special = self._rules.special
        self._card = ModelCard(
            name=name,
            languages=tokenizer.languages,
            max_window_samples=WINDOW_SAMPLES,
            capabilities=_MULTILINGUAL_CAPABILITIES if tokenizer.is_multilingual else _CAPABILITIES,
            max_batch=backends.current.max_windows,
        )

    @classmethod
    def load(cls, files: ModelFiles, *, name: str, n_threads: int | None = None) -> "WhisperEngine":
        """Read weights and tokenizer, and open the fastest backend of this machine that works.

        ``n_threads`` sets torch's CPU threads for the whole process.

        Raises:
            ModelFilesError: if the files are not those of a Whisper.
        """
        timeline = Timeline()
        with timeline.part("import"):
            from .loading import load  # the backends, of which some need a device

        backends, config, tokenizer = load(files, timeline, name=name, n_threads=n_threads)
        return cls(backends, config, tokenizer, name=name)

    @property
    def card(self) -> ModelCard:
        """What the model offers."""
        return self._card

    @property
    def backend(self) -> str:
        """What computes now."""
        return self._backends.name

    @property
    def why(self) -> str:
        """Why that backend."""
        return self._backends.why

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
        for _, chunk in batch:
            if len(chunk.samples) > WINDOW_SAMPLES:
                raise ValueError(
                    f"{self._card.name} takes chunks up to {WINDOW_SAMPLES} samples, not {len(chunk.samples)}"
                )
        hypotheses: list[Hypothesis] = []
        while len(hypotheses) < len(batch):
            together = batch[len(hypotheses) :][: self._backends.current.max_windows]
            hypotheses += self._decode_together([(_own(stream), chunk) for stream, chunk in together])
        return hypotheses

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
            window = samples[position:][:WINDOW_SAMPLES]
            segments, advance_samples = self._transcribe_window(stream, window, position)
            yield from segments
            position += advance_samples

    # ------------------------------------------------------------------ windows

    def _hear(self, windows: Sequence[Window], rules: Rules) -> list[Heard | None]:
        """What each window says, ``None`` for digital silence. Should the backend fail, the next one begins anew."""
        while True:
            try:
                return self._hear_on_backend(windows, rules)
            except BackendError as error:
                self._backends.replace(error)

    def _hear_on_backend(self, windows: Sequence[Window], rules: Rules) -> list[Heard | None]:
        backend = self._backends.current
        audios = backend.listen([window.samples for window in windows])
        audible = [(window, audio) for window, audio in zip(windows, audios, strict=True) if audio is not None]
        try:
            heard = iter(self._write(audible, self._identify(audible), rules))
        finally:
            backend.forget([audio for _, audio in audible])
        return [None if audio is None else next(heard) for audio in audios]

    def _write(self, audible: Sequence[tuple[Window, Audio]], languages: Sequence[str], rules: Rules) -> list[Heard]:
        """Write every window once; again those with care, at higher temperatures, until they are acceptable."""
        backend = self._backends.current
        requests = [window.request_in(language) for (window, _), language in zip(audible, languages, strict=True)]
        writings = [Writing(audio, request, rules) for (_, audio), request in zip(audible, requests, strict=True)]
        decoded = backend.write(writings)
        careful = [index for index, (window, _) in enumerate(audible) if window.with_care]

        def again(chosen: Sequence[int], temperature: float) -> list[Decoded]:
            """Without the prompt, which may be what misled the model."""
            asked = [writings[careful[index]] for index in chosen]
            return backend.write(
                [replace(one, request=one.request.without_prompt(), temperature=temperature) for one in asked]
            )

        better = with_fallback([decoded[index] for index in careful], again, self._tokenizer.decode)
        for index, one in zip(careful, better, strict=True):
            decoded[index] = one
        return [Heard(*parts) for parts in zip(languages, requests, decoded, strict=True)]

    def _identify(self, audible: Sequence[tuple[Window, Audio]]) -> list[str]:
        """Each window's language: its stream's if that is sure, else detected."""
        unsure = [index for index, (window, _) in enumerate(audible) if not window.stream.is_language_sure]
        guesses = self._backends.current.guess_languages([audible[index][1] for index in unsure]) if unsure else []
        languages = [window.stream.language or "" for window, _ in audible]
        for index, guess in zip(unsure, guesses, strict=True):
            window, _ = audible[index]
            language = self._card.languages[guess.index]
            languages[index] = window.stream.take_guess(language, guess.probability, len(window.samples))
        return languages

    def _task(self, stream: WhisperStream, language: str) -> list[int]:
        special = self._special
        if not self._tokenizer.is_multilingual:
            return [special.start_of_transcript]
        task = special.translate if stream.options.task is Task.TRANSLATE else special.transcribe
        return [special.start_of_transcript, self._tokenizer.language_ids[language], task]

    # ------------------------------------------------------------------ chunks

    def _decode_together(self, batch: Sequence[tuple[WhisperStream, Chunk]]) -> list[Hypothesis]:
        """As many chunks as the backend takes at a time."""
        windows = [
            Window(chunk.samples, stream, partial(self._request, stream, chunk), with_care=chunk.is_final)
            for stream, chunk in batch
            if len(chunk.samples) >= MIN_WINDOW_SAMPLES
        ]
        heard = iter(self._hear(windows, self._rules.plain) if windows else [])
        return [
            self._hypothesis(stream, chunk, next(heard) if len(chunk.samples) >= MIN_WINDOW_SAMPLES else None)
            for stream, chunk in batch
        ]

    def _hypothesis(self, stream: WhisperStream, chunk: Chunk, heard: Heard | None) -> Hypothesis:
        if heard is None:
            return Hypothesis((), stream.language, None)
        decoded, language, prefix = heard.decoded, heard.language, heard.request.prefix
        quality = _quality(decoded, self._tokenizer.decode(decoded.tokens))
        if is_silent(decoded):
            return Hypothesis((), language, quality)
        times = self._times(decoded, len(prefix), len(chunk.samples)) + chunk.span.start_sample
        stream.last_tokens = [*prefix, *decoded.tokens]
        stream.last_starts = times[0].tolist()
        words = self._words(decoded.tokens, decoded.logprobs, times[:, len(prefix) :], language)
        return Hypothesis(words, language, quality)

    def _request(self, stream: WhisperStream, chunk: Chunk, language: str) -> Request:
        prefix = self._tokenizer.encode("".join(word.text for word in chunk.prefix))
        task = [*self._task(stream, language), self._special.no_timestamps]
        room = self._config.n_text_positions - MAX_SAMPLED_TOKENS - len(task) - len(prefix) - 1
        prompt = self._prompt(stream, chunk.prompt, min(room, MAX_PROMPT_TOKENS))
        head = [self._special.start_of_previous, *prompt, *task] if prompt else task
        return Request(
            head=tuple(head),
            start_index=len(head) - len(task),
            prefix=tuple(prefix),
            draft=tuple(_draft(stream, chunk, prefix)),
            max_tokens=max_sampled_tokens(len(chunk.samples)),
            n_frames=_own_frames(len(chunk.samples)),
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
        window = Window(samples, stream, partial(self._recording_request, stream, len(samples)), with_care=True)
        (heard,) = self._hear([window], self._rules.timed)
        if heard is None or is_silent(heard.decoded):
            return [], len(samples)
        decoded, language = heard.decoded, heard.language
        parts, n_positions = split_at_timestamps(decoded.tokens, self._special.timestamp_begin)
        advance_samples = len(samples) if n_positions is None else n_positions * POSITION_SAMPLES
        times = self._times(decoded, 0, len(samples)) + position
        segments = [self._segment(decoded, part, times, language, position, len(samples)) for part in parts]
        return [segment for segment in segments if segment.words], max(advance_samples, MIN_WINDOW_SAMPLES)

    def _recording_request(self, stream: WhisperStream, n_samples: int, language: str) -> Request:
        task = self._task(stream, language)
        prompt = self._prompt(stream, "", MAX_PROMPT_TOKENS)
        head = [self._special.start_of_previous, *prompt, *task] if prompt else task
        start_index, max_tokens = len(head) - len(task), max_sampled_tokens(n_samples)
        return Request(tuple(head), start_index, (), (), max_tokens, _own_frames(n_samples))

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
        spans = token_spans(decoded.attention.numpy(), n_prefix + len(decoded.tokens))
        lags_samples = [[samples_from_ms(lag_ms)] for lag_ms in self._config.attention_lags_ms]
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


def _own_frames(n_samples: int) -> int:
    """Encoder positions that a window's samples fill; behind them is silence, in which nothing was said."""
    return max(n_samples // POSITION_SAMPLES, 1)


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
