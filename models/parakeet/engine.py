"""Parakeet as a ``SpeechEngine``: chunks of a stream to words with times, some of them settled.

Knows how a chunk becomes frames and tokens, what is carried from chunk to chunk, and when a word can't change any more.
Does not know when to decode or how audio is cut, which streaming does, nor what computes: backends do. Not thread-safe:
one thread owns an engine.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from streaming.capability import Capability
from streaming.engine import Chunk, DecodeOptions, EngineStream, ModelCard, StreamWarning, TransducerContext
from streaming.transcript import Hypothesis, Quality, Word
from vad.audio import exact_div

from ..backends import BackendError, Backends
from ..store import ModelFiles
from ..timeline import Timeline
from .backend import Backend
from .config import FRAME_SAMPLES, ParakeetConfig
from .features import MIN_SAMPLES
from .greedy import Decoded, Emission, Piece, TransducerState
from .recording import TranscribedPart, parts_of, recording_chunks
from .tokens import Pieces, TimedToken, n_words_of, split_words, words_of

# Digital silence added behind what may be the end: none. It shifts the features of the speech, which are normalised
# over the whole buffer, and keeps no more last words at a flush (benchmarks/results/parakeet_streaming.md).
PADDING_SAMPLES = 0

MAX_WINDOW_FRAMES = 500  # 40 s; attention over all of it takes memory with the square

# NeMo's streaming script hears 10 s before a chunk and 2 s behind it; with half of the latter words are settled 0.8 s
# sooner, and a third more of them differ from those of one piece, though no more are wrong. Before 3 s of an utterance
# were heard nothing of it is decoded for good: features are normalised over the buffer, and one of 1.2 s tells little
# of the voice. That leaves a third of what chunks mishear more than one piece does, and settles the first words
# up to 1.8 s later (benchmarks/results/parakeet_streaming.md).
CONTEXT = TransducerContext(
    frame_samples=FRAME_SAMPLES,
    left_samples=125 * FRAME_SAMPLES,
    chunk_samples=8 * FRAME_SAMPLES,
    right_samples=13 * FRAME_SAMPLES,
    min_chunk_samples=2 * FRAME_SAMPLES,
    max_chunk_samples=25 * FRAME_SAMPLES,
    first_samples=38 * FRAME_SAMPLES,
)


@dataclass(slots=True, eq=False)
class ParakeetStream:
    """One caller's state. ``backend`` is the one whose state this is; ``open_word`` may go on in the next chunk."""

    options: DecodeOptions
    warnings: tuple[StreamWarning, ...]
    backend: Backend | None = None
    state: TransducerState | None = None  # None: nothing was heard yet
    decoded_sample: int | None = None  # up to where
    open_word: tuple[TimedToken, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Heard:
    """A chunk's frames [n, P]: those decoded for good, and those behind, of which the first begins at a sample."""

    chunk: Chunk
    region: Tensor
    behind: Tensor
    region_start_sample: int
    behind_start_sample: int


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a chunk says, and what its stream carries on once the whole batch has been decoded."""

    hypothesis: Hypothesis
    state: TransducerState
    open_word: tuple[TimedToken, ...]
    decoded_sample: int


class ParakeetEngine:
    """Shared weights of one checkpoint. Fulfils ``streaming.engine.SpeechEngine``."""

    def __init__(
        self,
        backends: Backends[Backend],
        pieces: Pieces,
        *,
        name: str,
        languages: tuple[str, ...],
        context: TransducerContext = CONTEXT,
    ) -> None:
        """``backends`` compute the checkpoint whose tokens ``pieces`` spell."""
        self._backends = backends
        self._pieces = pieces
        self._card = ModelCard(
            name=name,
            languages=languages,
            max_window_samples=MAX_WINDOW_FRAMES * FRAME_SAMPLES,
            capabilities=_CAPABILITIES | ({Capability.PUNCTUATION} if pieces.has_punctuation else set()),
            max_batch=backends.current.max_buffers,
            transducer=context,
        )

    @classmethod
    def load(cls, files: ModelFiles, *, name: str, n_threads: int | None = None) -> "ParakeetEngine":
        """Read weights and tokenizer, and open the fastest backend of this machine that works.

        ``n_threads`` sets torch's CPU threads for the whole process.

        Raises:
            ModelFilesError: if the files are not those of a Parakeet TDT.
        """
        timeline = Timeline()
        with timeline.part("import"):
            from .loading import load  # the backends, of which some need a device

        backends, config, pieces = load(files, timeline, name=name, n_threads=n_threads)
        return cls(backends, pieces, name=name, languages=languages_of(config))

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

    def open(self, options: DecodeOptions) -> ParakeetStream:
        """Begin a stream.

        Raises:
            UnsupportedOptionError: for an option that this model can't honour.
        """
        self._card.check(options)
        return ParakeetStream(options, ())

    def close(self, stream: EngineStream) -> None:
        """Nothing to free: a stream's state is its own."""

    def decode(self, batch: Sequence[tuple[EngineStream, Chunk]]) -> list[Hypothesis]:
        """One hypothesis for each pair, in order; streams move on once all of them are there.

        Raises:
            ValueError: for a chunk longer than the card allows, with contexts that are not whole frames, or that does
                not go on where the stream is. No stream moves.
        """
        own = [(_own(stream), chunk) for stream, chunk in batch]
        for stream, chunk in own:
            _check(stream, chunk, self._card)
        outcomes: list[Outcome] = []
        while len(outcomes) < len(own):
            together = own[len(outcomes) :][: self._backends.current.max_buffers]
            try:
                outcomes += self._decode_together(together)
            except BackendError as error:
                self._backends.replace(error)
                outcomes = []  # what the failed one has begun is not the next one's to go on with
        for (stream, _), outcome in zip(own, outcomes, strict=True):
            stream.backend = self._backends.current
            stream.state, stream.open_word = outcome.state, outcome.open_word
            stream.decoded_sample = outcome.decoded_sample
        return [outcome.hypothesis for outcome in outcomes]

    def transcribe(self, samples: NDArray[np.float32], options: DecodeOptions) -> Iterator[TranscribedPart]:
        """Sentences of a recording [n_samples] of any length, each as soon as it is decoded.

        Raises:
            UnsupportedOptionError: for an option that this model can't honour.
        """
        return parts_of(self._recorded_words(samples, self.open(options)), self._language)

    def _recorded_words(self, samples: NDArray[np.float32], stream: ParakeetStream) -> Iterator[Word]:
        for chunk in recording_chunks(samples):
            [hypothesis] = self.decode([(stream, chunk)])
            yield from hypothesis.words[: hypothesis.n_settled]

    def _decode_together(self, batch: Sequence[tuple[ParakeetStream, Chunk]]) -> list[Outcome]:
        """As many chunks as the backend takes at a time: one encoder pass, and what comes of it."""
        backend = self._backends.current
        states = [self._state(stream, chunk) for stream, chunk in batch]
        heard = self._hear([chunk for _, chunk in batch])
        pieces = [Piece(each.region, state, each.behind) for each, state in zip(heard, states, strict=True)]
        decoded = _decoded(backend, pieces)
        return [
            self._outcome(stream, each, said) for (stream, _), each, said in zip(batch, heard, decoded, strict=True)
        ]

    def _state(self, stream: ParakeetStream, chunk: Chunk) -> TransducerState:
        """What the stream carries, unless it begins anew: as it is told to, or as its state was in a failed backend.

        In the latter case the network forgets what was said, but frames passed over already belong to the last word and
        would say it again. The words are settled all the same.
        """
        backend = self._backends.current
        if stream.state is None or chunk.is_first:
            return backend.start()
        if stream.backend is not backend:
            return replace(backend.start(), time_jump=stream.state.time_jump)
        return stream.state

    def _hear(self, chunks: Sequence[Chunk]) -> list[Heard]:
        """Every chunk's frames, from one pass; a chunk too short for features has none."""
        backend = self._backends.current
        buffers = [_buffer(chunk) for chunk in chunks]
        audible = [buffer for buffer in buffers if len(buffer) >= MIN_SAMPLES]
        frames = iter(backend.listen(audible) if audible else [])
        return [
            _cut(chunk, next(frames) if len(buffer) >= MIN_SAMPLES else torch.empty(0, 0))
            for chunk, buffer in zip(chunks, buffers, strict=True)
        ]

    def _outcome(self, stream: ParakeetStream, heard: Heard, decoded: Decoded) -> Outcome:
        chunk = heard.chunk
        carried = () if chunk.is_first else stream.open_word
        spoken = [*carried, *_timed(decoded.emissions, heard.region_start_sample)]
        maybe = _timed(decoded.ahead, heard.behind_start_sample)
        groups = split_words([*spoken, *maybe], self._pieces)
        stays = groups if _is_last(chunk) else split_words(spoken, self._pieces)
        # Behind the last word that stays more may come that belongs to it, so it is not settled while speech goes on.
        n_settled = len(stays) if _is_last(chunk) else max(0, len(stays) - 1)
        return Outcome(
            Hypothesis(
                # A last duration may reach beyond the audio, and a token lie in the padding.
                words_of(groups, self._pieces, ends_at=chunk.span.end_sample),
                self._language,
                _quality([token.logprob for group in groups for token in group]),
                n_settled=n_words_of(groups[:n_settled], self._pieces),
            ),
            decoded.state,
            open_word=() if n_settled == len(stays) else tuple(stays[-1]),
            decoded_sample=heard.behind_start_sample,
        )

    @property
    def _language(self) -> str | None:
        """A model of several languages does not say which one it heard."""
        return self._card.languages[0] if len(self._card.languages) == 1 else None


_CAPABILITIES = frozenset({Capability.WORD_TIMES, Capability.CONFIDENCE})

# The checkpoint with 8192 pieces; the other published one is English (model cards of parakeet-tdt-0.6b-v3 and -v2).
_MULTILINGUAL_VOCABULARY = 8193
_ENGLISH = ("en",)
_EUROPEAN = tuple("bg cs da de el en es et fi fr hr hu it lt lv mt nl pl pt ro ru sk sl sv uk".split())


def languages_of(config: ParakeetConfig) -> tuple[str, ...]:
    """ISO 639-1 codes of what a checkpoint writes, which its files do not say."""
    return _EUROPEAN if config.vocabulary_size == _MULTILINGUAL_VOCABULARY else _ENGLISH


def _decoded(backend: Backend, batch: Sequence[Piece]) -> list[Decoded]:
    """What the frames say; no frames say nothing, and the backend is not asked."""
    is_audible = [len(piece.frames) + len(piece.behind) > 0 for piece in batch]
    audible = list(compress(batch, is_audible))
    spoken = iter(backend.decode_ahead(audible) if audible else [])
    return [
        next(spoken) if is_one else Decoded([], piece.state, [])
        for piece, is_one in zip(batch, is_audible, strict=True)
    ]


def _own(stream: EngineStream) -> ParakeetStream:
    if not isinstance(stream, ParakeetStream):
        raise TypeError(f"a stream of another engine: {type(stream).__name__}")
    return stream


def _check(stream: ParakeetStream, chunk: Chunk, card: ModelCard) -> None:
    """Raises ``ValueError`` for a chunk that can't be decoded, or does not begin where the last one ended."""
    n_samples, left, right = len(chunk.samples), chunk.left_context_samples, chunk.right_context_samples
    if n_samples > card.max_window_samples:
        raise ValueError(f"{card.name} takes chunks up to {card.max_window_samples} samples, not {n_samples}")
    if chunk.span.n_samples != n_samples:
        raise ValueError(f"the chunk's span has {chunk.span.n_samples} samples, but {n_samples} were given")
    region = n_samples - left - right
    if left % FRAME_SAMPLES or region < 0 or (region % FRAME_SAMPLES and not _is_last(chunk)):
        raise ValueError(
            f"{card.name} takes left contexts and chunk regions of whole frames of {FRAME_SAMPLES} samples, not "
            f"{left} and {region}"
        )
    begins = chunk.span.start_sample + left
    if not chunk.is_first and stream.decoded_sample not in (None, begins):
        raise ValueError(f"this stream goes on at sample {stream.decoded_sample}, the chunk region begins at {begins}")


def _is_last(chunk: Chunk) -> bool:
    """Whether nothing follows, so that even a broken frame is decoded for good."""
    return chunk.is_final and not chunk.right_context_samples


def _buffer(chunk: Chunk) -> NDArray[np.float32]:
    """What is heard at once: the chunk, and silence behind speech that may be over."""
    if not chunk.is_final or not PADDING_SAMPLES:
        return chunk.samples
    return np.concatenate([chunk.samples, np.zeros(PADDING_SAMPLES, np.float32)])


def _cut(chunk: Chunk, frames: Tensor) -> Heard:
    """The frames [T, P] of a chunk's buffer, cut where its region begins and ends."""
    n_left = exact_div(chunk.left_context_samples, FRAME_SAMPLES)
    # Rounded up for the last chunk alone, as the frame that speech breaks off in is its own.
    n_region = -(-(len(chunk.samples) - chunk.left_context_samples - chunk.right_context_samples) // FRAME_SAMPLES)
    start_sample = chunk.span.start_sample + chunk.left_context_samples
    return Heard(
        chunk=chunk,
        region=frames[n_left : n_left + n_region],
        behind=frames[n_left + n_region :],
        region_start_sample=start_sample,
        behind_start_sample=start_sample + n_region * FRAME_SAMPLES,
    )


def _timed(emissions: Sequence[Emission], start_sample: int) -> list[TimedToken]:
    """Tokens on the session's axis, on which their frames begin at ``start_sample``."""
    return [
        TimedToken(
            emission.token_id,
            start_sample + emission.frame * FRAME_SAMPLES,
            start_sample + (emission.frame + emission.duration) * FRAME_SAMPLES,
            emission.logprob,
        )
        for emission in emissions
    ]


def _quality(logprobs: Sequence[float]) -> Quality | None:
    if not logprobs:
        return None
    mean = sum(logprobs) / len(logprobs)
    return Quality(mean_logprob=mean, no_speech_probability=None, compression_ratio=None, temperature=None)
