"""A transducer that recites: tokens of a script, each at its place on the time axis, decoded frame by frame.

For tests without weights. Carries its state from chunk to chunk as a real one does: where the next frame is, how many
frames a token's duration still skips, and the word that is open. Hears a token wrongly whose sound is too near the edge
of the audio, and fails when told to. Never looks at the samples, and so never notices silence.
"""

from bisect import bisect_left
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace

from streaming.capability import Capability
from streaming.engine import Chunk, DecodeOptions, EngineStream, ModelCard, StreamWarning, TransducerContext
from streaming.transcript import Hypothesis, Word
from vad.audio import SAMPLE_RATE_HZ, samples_from_ms

from .scripted import Reciting

FRAME_SAMPLES = samples_from_ms(80)
MAX_WINDOW_SAMPLES = 40 * SAMPLE_RATE_HZ
CONTEXT = TransducerContext(
    frame_samples=FRAME_SAMPLES,
    left_samples=30 * FRAME_SAMPLES,
    chunk_samples=4 * FRAME_SAMPLES,
    right_samples=10 * FRAME_SAMPLES,
    min_chunk_samples=2 * FRAME_SAMPLES,
    max_chunk_samples=25 * FRAME_SAMPLES,
)


@dataclass(frozen=True, slots=True)
class ScriptedToken:
    """A piece of text, with its leading space if it begins a word, heard at ``sample``.

    ``duration`` in frames is how far the model jumps behind it; never past the next token.
    """

    text: str
    sample: int
    duration: int = 1


@dataclass(frozen=True, slots=True)
class _Emission:
    text: str
    start_sample: int
    end_sample: int


@dataclass(frozen=True, slots=True)
class _State:
    """What is carried over: replaced, never changed."""

    next_sample: int | None = None  # where the next chunk region has to begin; None: anywhere
    time_jump: int = 0  # frames still to be skipped there
    open_word: tuple[_Emission, ...] = ()


@dataclass(slots=True, eq=False)
class _Stream:
    options: DecodeOptions
    warnings: tuple[StreamWarning, ...] = ()
    state: _State = field(default_factory=_State)


class ScriptedTransducer(Reciting):
    """Recites ``script``, whose tokens are in order of their samples.

    ``edge_samples``: a token is heard right only with so much audio behind it, or at the end of speech; else it comes
    out with a ``?``. ``failing_decodes`` are the calls of ``decode``, counted from 1, that raise.
    """

    def __init__(
        self,
        script: Sequence[ScriptedToken],
        *,
        name: str = "scripted-transducer",
        context: TransducerContext = CONTEXT,
        max_window_samples: int = MAX_WINDOW_SAMPLES,
        edge_samples: int = 0,
        failing_decodes: AbstractSet[int] = frozenset(),
    ) -> None:
        """Raises ``ValueError`` for a script out of order."""
        self._script = tuple(script)
        self._samples = [token.sample for token in script]
        if self._samples != sorted(self._samples):
            raise ValueError("the tokens of a script come in order of their samples")
        self._edge_samples = edge_samples
        capabilities = frozenset({Capability.WORD_TIMES, Capability.PUNCTUATION})
        super().__init__(ModelCard(name, ("en",), max_window_samples, capabilities, 64, context), failing_decodes)

    def open(self, options: DecodeOptions) -> EngineStream:
        """Begin a stream. Raises ``UnsupportedOptionError``."""
        self._card.check(options)
        stream = _Stream(options)
        self._open.add(stream)
        return stream

    def decode(self, batch: Sequence[tuple[EngineStream, Chunk]]) -> list[Hypothesis]:
        """The words whose tokens lie in each chunk region, and tentatively those in its right context.

        Raises:
            ScriptedFailureError: on the calls in ``failing_decodes``; no stream's state has changed then.
            ValueError: for a stream that is not open, or a chunk that does not go on where the last one ended.
        """
        self._count_decode()
        heard = [self._decode_one(self._opened(stream), chunk) for stream, chunk in batch]
        for (stream, _), (_, state) in zip(batch, heard, strict=True):
            self._opened(stream).state = state
        return [hypothesis for hypothesis, _ in heard]

    def _opened(self, stream: EngineStream) -> _Stream:
        self._require_open(stream)
        assert isinstance(stream, _Stream), "only this engine's streams are open in it"
        return stream

    def _decode_one(self, stream: _Stream, chunk: Chunk) -> tuple[Hypothesis, _State]:
        state = _State() if chunk.is_first else stream.state
        begin_sample = chunk.span.start_sample + chunk.left_context_samples
        region_end_sample = chunk.span.end_sample - chunk.right_context_samples
        self._check(chunk, state, begin_sample, region_end_sample)
        settled, state = self._listen(state, begin_sample, region_end_sample, chunk)
        if chunk.is_final and not chunk.right_context_samples:
            words = _words([*settled, *state.open_word])
            return Hypothesis(words, "en", None, len(words)), _State()
        more, copy = self._listen(state, region_end_sample, chunk.span.end_sample, chunk)
        settled_words = _words(settled)
        return Hypothesis((*settled_words, *_words([*more, *copy.open_word])), "en", None, len(settled_words)), state

    def _check(self, chunk: Chunk, state: _State, begin_sample: int, region_end_sample: int) -> None:
        if len(chunk.samples) != chunk.span.n_samples or chunk.span.n_samples > self._card.max_window_samples:
            raise ValueError(f"{len(chunk.samples)} samples for {chunk.span}; {self._card.max_window_samples} at most")
        if state.next_sample is not None and begin_sample != state.next_sample:
            raise ValueError(f"the chunk region begins at {begin_sample}; the last one ended at {state.next_sample}")
        whole = [chunk.left_context_samples, *([] if chunk.is_final else [region_end_sample - begin_sample])]
        if any(part < 0 or part % FRAME_SAMPLES for part in whole) or region_end_sample < begin_sample:
            raise ValueError(f"a left context and a chunk region of {whole} samples are not whole frames")

    def _listen(
        self, state: _State, begin_sample: int, end_sample: int, chunk: Chunk
    ) -> tuple[list[_Emission], _State]:
        """Greedy decoding of the frames in between: the emissions of words that are over, and the state behind them."""
        n_frames = -(-(end_sample - begin_sample) // FRAME_SAMPLES)
        over: list[_Emission] = []
        open_word = state.open_word
        frame = state.time_jump
        while frame < n_frames:
            at_sample = begin_sample + frame * FRAME_SAMPLES
            tokens = self._tokens_in(at_sample, min(at_sample + FRAME_SAMPLES, end_sample))
            for token in tokens:
                duration = 0 if token is not tokens[-1] else self._duration(token, at_sample)
                text = token.text if self._hears(token, chunk) else f"{token.text}?"
                if text.startswith(" "):
                    over += open_word
                    open_word = ()
                emission = _Emission(text, at_sample, at_sample + duration * FRAME_SAMPLES)
                open_word = (*open_word, emission)
                frame += duration
            frame += not tokens  # a blank
        return over, replace(
            state, next_sample=begin_sample + n_frames * FRAME_SAMPLES, time_jump=frame - n_frames, open_word=open_word
        )

    def _tokens_in(self, start_sample: int, end_sample: int) -> tuple[ScriptedToken, ...]:
        return self._script[bisect_left(self._samples, start_sample) : bisect_left(self._samples, end_sample)]

    def _duration(self, token: ScriptedToken, frame_sample: int) -> int:
        """At least one frame behind the last token of a frame; never beyond the frame of the next token."""
        following = bisect_left(self._samples, frame_sample + FRAME_SAMPLES)
        room = token.duration
        if following < len(self._samples):
            room = (self._samples[following] - frame_sample) // FRAME_SAMPLES
        return max(1, min(token.duration, room))

    def _hears(self, token: ScriptedToken, chunk: Chunk) -> bool:
        return chunk.is_final or token.sample + self._edge_samples <= chunk.span.end_sample


def _words(emissions: Sequence[_Emission]) -> tuple[Word, ...]:
    """Pieces joined to words: one that begins with a space begins a word."""
    groups: list[list[_Emission]] = []
    for emission in emissions:
        if emission.text.startswith(" ") or not groups:
            groups.append([])
        groups[-1].append(emission)
    return tuple(
        Word("".join(piece.text for piece in group), group[0].start_sample, group[-1].end_sample, None)
        for group in groups
    )
