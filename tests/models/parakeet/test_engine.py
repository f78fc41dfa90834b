"""The engine: chunks with contexts to words, what is settled, what a stream carries, and what a failure leaves."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from models.backends import BackendError, Backends, Offer
from models.parakeet.backend import Backend, TorchBackend
from models.parakeet.config import FRAME_SAMPLES
from models.parakeet.engine import CONTEXT, PADDING_SAMPLES, ParakeetEngine, ParakeetStream, languages_of
from models.parakeet.greedy import Decoded, Emission, Piece, TransducerState, ahead_in_two, decode, start
from models.parakeet.tokens import Pieces
from streaming.capability import Capability
from streaming.engine import Chunk, DecodeOptions, UnsupportedOptionError
from streaming.transcript import Hypothesis, Word
from tests.models.parakeet.files import PIECES
from tests.models.parakeet.small import SMALL, noise, small_model
from vad.audio import SpeechSpan

MODEL = small_model(seed=2)
SPELT = Pieces.of(dict(enumerate(PIECES)), n_tokens=21, blank_id=20, source="x")
N_FRAMES = 40
SAMPLES = noise(N_FRAMES * FRAME_SAMPLES).numpy()
# What the encoder would give for each frame of an utterance, whatever the buffer: the seams alone are tested with it.
FRAMES = 2 * torch.randn(N_FRAMES + 20, SMALL.d_predictor, generator=torch.Generator().manual_seed(18))


@dataclass
class FrameReader:
    """A backend that hears the number of each frame in its samples, so that contexts change nothing."""

    max_buffers: int = 3
    heard: list[int] = field(default_factory=list)
    fails_at: int | None = None  # this call of ``decode``
    n_decodes: int = 0

    def listen(self, buffers: Sequence[NDArray[np.float32]]) -> list[Tensor]:
        self.heard.append(len(buffers))
        found = []
        for buffer in buffers:
            n = -(-(len(buffer) // 160) // 8)
            first = round(float(buffer[0])) - 1
            found.append(FRAMES[first : first + n])
        return found

    def start(self) -> TransducerState:
        return start(MODEL)

    def decode(self, batch: Sequence[tuple[Tensor, TransducerState]]) -> list[tuple[list[Emission], TransducerState]]:
        self.n_decodes += 1
        if self.n_decodes == self.fails_at:
            raise RuntimeError("a mistake")
        return [decode(MODEL, frames, state) for frames, state in batch]

    def decode_ahead(self, batch: Sequence[Piece]) -> list[Decoded]:
        return ahead_in_two(self, batch)

    def close(self) -> None:
        pass


def numbered(n_frames: int = N_FRAMES) -> NDArray[np.float32]:
    """Samples that say which frame they belong to, counted from 1."""
    return np.repeat(np.arange(1, n_frames + 1, dtype=np.float32), FRAME_SAMPLES)


def engine_with(*backends: Backend) -> ParakeetEngine:
    offers = [Offer(f"backend {i}", lambda backend=backend: backend) for i, backend in enumerate(backends)]
    return ParakeetEngine(Backends(offers, model="small"), SPELT, name="small", languages=("en",))


def engine_on_network() -> ParakeetEngine:
    return engine_with(TorchBackend(MODEL, max_buffers=4, max_frames=100))


def chunk(
    samples: NDArray[np.float32],
    begin: int,
    end: int,
    *,
    left: int = 0,
    right: int = 0,
    is_final: bool = False,
    offset: int = 0,
) -> Chunk:
    """Frames ``begin`` to ``end`` of an utterance that begins at frame ``offset`` of the session, and contexts."""
    first, last = begin - left, min(end + right, len(samples) // FRAME_SAMPLES)
    return Chunk(
        SpeechSpan((offset + first) * FRAME_SAMPLES, (offset + last) * FRAME_SAMPLES),
        samples[first * FRAME_SAMPLES : last * FRAME_SAMPLES],
        is_final=is_final,
        left_context_samples=left * FRAME_SAMPLES,
        right_context_samples=(last - end) * FRAME_SAMPLES,
        is_first=begin == 0,
    )


def one(engine: ParakeetEngine, stream: ParakeetStream, of: Chunk) -> Hypothesis:
    [hypothesis] = engine.decode([(stream, of)])
    assert hypothesis.n_settled is not None
    return hypothesis


def in_chunks(engine: ParakeetEngine, edges: Sequence[int], *, left: int, right: int) -> list[Word]:
    """All that becomes settled when the regions end at ``edges``, the last one at the end of the audio."""
    stream, words, begin = engine.open(DecodeOptions()), list[Word](), 0
    for edge in edges:
        part = chunk(numbered(), begin, edge, left=min(left, begin), right=right)
        hypothesis = one(engine, stream, part)
        words += hypothesis.words[: hypothesis.n_settled]
        begin = edge
    final = one(engine, stream, chunk(numbered(), begin, N_FRAMES, left=min(left, begin), is_final=True))
    assert final.n_settled == len(final.words)
    return [*words, *final.words]


WHOLE = in_chunks(engine_with(FrameReader()), [], left=0, right=0)


def test_the_example_says_several_words_in_several_tokens() -> None:
    assert len(WHOLE) > 4
    assert max(len(word.text) for word in WHOLE) > 3


@given(
    edges=st.lists(st.integers(0, N_FRAMES), max_size=12).map(sorted),
    left=st.integers(1, 10),
    right=st.integers(0, 8),
)
@settings(deadline=None, max_examples=25)
def test_whatever_the_chunks_no_word_is_lost_doubled_or_torn(edges: list[int], left: int, right: int) -> None:
    assert in_chunks(engine_with(FrameReader()), edges, left=left, right=right) == WHOLE


def test_what_was_settled_is_never_given_again_and_tentative_words_follow_it() -> None:
    engine = engine_with(FrameReader())
    stream, settled = engine.open(DecodeOptions()), list[Word]()
    for begin in range(0, N_FRAMES - 8, 2):
        hypothesis = one(engine, stream, chunk(numbered(), begin, begin + 2, left=min(begin, 6), right=5))
        shown = [*settled, *hypothesis.words]
        starts = [word.start_sample for word in shown]
        assert starts == sorted(starts)
        settled += hypothesis.words[: hypothesis.n_settled]
        assert settled == WHOLE[: len(settled)]
    assert len(settled) > 1


def test_a_word_stays_open_until_the_next_one_begins() -> None:
    engine = engine_with(FrameReader())
    stream = engine.open(DecodeOptions())
    hypotheses = [one(engine, stream, chunk(numbered(), begin, begin + 1)) for begin in range(N_FRAMES)]
    for hypothesis in hypotheses:
        n_open = len(hypothesis.words) - (hypothesis.n_settled or 0)
        assert n_open == (1 if hypothesis.words else 0)
    assert sum(hypothesis.n_settled or 0 for hypothesis in hypotheses) > 1


def test_an_empty_region_moves_nothing_and_shows_what_its_right_context_says() -> None:
    engine = engine_with(FrameReader())
    stream = engine.open(DecodeOptions())
    first = one(engine, stream, chunk(numbered(), 0, 0, right=20))
    assert first.words and first.n_settled == 0
    assert in_chunks(engine, [0, 0, 12, 12], left=4, right=6) == WHOLE


def test_a_pause_is_decoded_to_its_end_without_moving_the_stream_beyond_the_region() -> None:
    engine = engine_with(FrameReader())
    plain, paused = engine.open(DecodeOptions()), engine.open(DecodeOptions())
    for stream in (plain, paused):
        one(engine, stream, chunk(numbered(), 0, 10, right=6))
    pause = one(engine, paused, chunk(numbered(), 10, 12, left=4, right=28, is_final=True))
    one(engine, plain, chunk(numbered(), 10, 12, left=4, right=8))
    assert pause.n_settled is not None and pause.n_settled < len(pause.words)
    later = chunk(numbered(), 12, N_FRAMES, left=4, is_final=True)
    assert one(engine, paused, later) == one(engine, plain, later)


def test_a_broken_frame_at_the_end_is_decoded_too() -> None:
    engine = engine_with(FrameReader())
    n_samples = 30 * FRAME_SAMPLES + 700
    samples = numbered()[:n_samples]
    broken = Chunk(SpeechSpan(0, n_samples), samples, is_final=True, is_first=True)
    hypothesis = one(engine, engine.open(DecodeOptions()), broken)
    assert len(hypothesis.words) == hypothesis.n_settled
    assert all(word.end_sample is not None and word.end_sample <= n_samples for word in hypothesis.words)


def test_times_are_on_the_sessions_axis() -> None:
    engine = engine_with(FrameReader())
    later = one(engine, engine.open(DecodeOptions()), chunk(numbered(), 0, N_FRAMES, is_final=True, offset=1_000))
    shift = 1_000 * FRAME_SAMPLES
    assert [
        replace(word, start_sample=(word.start_sample or 0) - shift, end_sample=(word.end_sample or 0) - shift)
        for word in later.words
    ] == WHOLE


def test_a_first_chunk_begins_anew_whatever_came_before() -> None:
    engine = engine_with(FrameReader())
    stream = engine.open(DecodeOptions())
    one(engine, stream, chunk(numbered(), 0, 17))
    assert list(one(engine, stream, chunk(numbered(), 0, N_FRAMES, is_final=True)).words) == WHOLE


def test_an_utterance_too_short_for_features_says_nothing() -> None:
    engine = engine_on_network()
    stream = engine.open(DecodeOptions())
    short = Chunk(SpeechSpan(0, 100), SAMPLES[:100], is_final=False, right_context_samples=100, is_first=True)
    assert one(engine, stream, short).words == ()


def test_a_recording_is_told_in_sentences_with_the_words_of_one_decode() -> None:
    parts = list(engine_with(FrameReader()).transcribe(numbered(), DecodeOptions()))
    assert [word for part in parts for word in part.words] == WHOLE
    with pytest.raises(UnsupportedOptionError, match="vocabulary"):
        engine_with(FrameReader()).transcribe(numbered(), DecodeOptions(vocabulary=("Quilter",)))


# ---------------------------------------------------------------- batches and failures


def test_a_batch_gives_what_each_stream_gives_alone_in_passes_of_the_backends_size() -> None:
    backend = FrameReader(max_buffers=3)
    engine = engine_with(backend)
    parts = [chunk(numbered(), 0, n, right=4) for n in (3, 9, 20, 31, 12)]
    alone = [one(engine, engine.open(DecodeOptions()), part) for part in parts]
    backend.heard.clear()
    assert engine.decode([(engine.open(DecodeOptions()), part) for part in parts]) == alone
    assert backend.heard == [3, 2]
    assert engine.decode([]) == []


def test_on_the_network_streams_in_one_padded_pass_say_what_they_say_alone() -> None:
    engine = engine_on_network()
    parts = [chunk(SAMPLES, 0, n, is_final=True) for n in (40, 17, 26)]
    alone = [one(engine, engine.open(DecodeOptions()), part) for part in parts]
    together = engine.decode([(engine.open(DecodeOptions()), part) for part in parts])
    assert [[word.text for word in hypothesis.words] for hypothesis in together] == [
        [word.text for word in hypothesis.words] for hypothesis in alone
    ]
    assert any(hypothesis.words for hypothesis in alone)


def test_on_the_network_a_final_equals_decoding_the_padded_utterance_at_once() -> None:
    backend = TorchBackend(MODEL, max_buffers=4, max_frames=100)
    [frames] = backend.listen([np.concatenate([SAMPLES, np.zeros(PADDING_SAMPLES, np.float32)])])
    [(emissions, _)] = backend.decode([(frames, backend.start())])
    expected = [emission.token_id for emission in emissions if SPELT.texts[emission.token_id] is not None]
    engine = engine_on_network()
    words = one(engine, engine.open(DecodeOptions()), chunk(SAMPLES, 0, N_FRAMES, is_final=True)).words
    assert "".join(word.text for word in words) == "".join(SPELT.texts[token_id] or "" for token_id in expected)


@pytest.mark.parametrize("fails_at", [1, 2, 3, 4])
def test_a_failure_moves_no_stream_of_the_batch(fails_at: int) -> None:
    backend = FrameReader(max_buffers=1)
    engine = engine_with(backend)
    streams = [engine.open(DecodeOptions()) for _ in range(2)]
    engine.decode([(stream, chunk(numbered(), 0, 10, right=3)) for stream in streams])
    before = [(stream.state, stream.open_word, stream.decoded_sample) for stream in streams]
    backend.fails_at = backend.n_decodes + fails_at
    with pytest.raises(RuntimeError, match="a mistake"):
        engine.decode([(stream, chunk(numbered(), 10, 14, left=2, right=3)) for stream in streams])
    assert [(stream.state, stream.open_word, stream.decoded_sample) for stream in streams] == before
    finals = engine.decode([(stream, chunk(numbered(), 10, N_FRAMES, left=2, is_final=True)) for stream in streams])
    assert finals[0] == finals[1]
    assert [word.text for word in finals[0].words] == [word.text for word in WHOLE[-len(finals[0].words) :]]


class Broken(FrameReader):
    """Can't decode."""

    def decode(self, batch: Sequence[tuple[Tensor, TransducerState]]) -> list[tuple[list[Emission], TransducerState]]:
        raise BackendError("the device is lost")


def test_when_a_backend_fails_the_next_one_goes_on_and_open_words_are_kept() -> None:
    class FailsLater(FrameReader):
        def decode(
            self, batch: Sequence[tuple[Tensor, TransducerState]]
        ) -> list[tuple[list[Emission], TransducerState]]:
            if self.n_decodes >= 2:  # of the second chunk
                raise BackendError("the device is lost")
            return super().decode(batch)

    engine = engine_with(FailsLater(), FrameReader())
    stream = engine.open(DecodeOptions())
    first = one(engine, stream, chunk(numbered(), 0, 20))
    assert engine.backend == "backend 0"
    last = one(engine, stream, chunk(numbered(), 20, N_FRAMES, left=5, is_final=True))
    assert (engine.backend, engine.why) == ("backend 1", "backend 0 failed: the device is lost")
    assert last.words[0].text.startswith(first.words[-1].text), "the open word goes on"


def test_a_backend_that_takes_over_hears_no_frame_that_the_failed_one_has_passed_over() -> None:
    @dataclass
    class Watched(FrameReader):
        given: list[TransducerState] = field(default_factory=list)

        def decode(
            self, batch: Sequence[tuple[Tensor, TransducerState]]
        ) -> list[tuple[list[Emission], TransducerState]]:
            self.given += [state for _, state in batch]
            return super().decode(batch)

    jumps = []
    for edge in range(1, N_FRAMES // 2):
        first, second = FrameReader(), Watched()
        engine = engine_with(first, second)
        stream = engine.open(DecodeOptions())
        one(engine, stream, chunk(numbered(), 0, edge))
        assert stream.state is not None
        jumps.append(stream.state.time_jump)
        first.decode = Broken().decode  # type: ignore[method-assign]
        one(engine, stream, chunk(numbered(), edge, N_FRAMES, is_final=True))
        assert second.given[0].time_jump == jumps[-1]
    assert any(jumps), "some duration reached beyond an edge"


def test_the_last_backends_failure_is_everyones() -> None:
    engine = engine_with(Broken())
    with pytest.raises(BackendError, match="the device is lost"):
        one(engine, engine.open(DecodeOptions()), chunk(numbered(), 0, 10))


# ---------------------------------------------------------------- refusals and the card


def test_chunks_that_are_too_long_not_whole_frames_or_do_not_follow_are_refused() -> None:
    engine = engine_with(FrameReader())
    stream = engine.open(DecodeOptions())
    long = np.zeros(engine.card.max_window_samples + 1, np.float32)
    with pytest.raises(ValueError, match="takes chunks up to 640000 samples, not 640001"):
        one(engine, stream, Chunk(SpeechSpan(0, len(long)), long, is_final=True))
    good = chunk(numbered(), 0, 10, right=2)
    with pytest.raises(ValueError, match="the chunk's span has 15359 samples, but 15360 were given"):
        one(engine, stream, replace(good, span=SpeechSpan(0, 15_359)))
    for wrong in (replace(good, left_context_samples=100), replace(good, right_context_samples=100)):
        with pytest.raises(ValueError, match="whole frames of 1280 samples"):
            one(engine, stream, wrong)
    one(engine, stream, good)
    with pytest.raises(ValueError, match="goes on at sample 12800, the chunk region begins at 14080"):
        one(engine, stream, chunk(numbered(), 11, 14))


def test_a_stream_of_another_engine_is_refused() -> None:
    with pytest.raises(TypeError, match="a stream of another engine"):
        engine_with(FrameReader()).decode([(object(), chunk(numbered(), 0, 10))])  # type: ignore[list-item]


def test_the_card_offers_what_the_model_can_do_and_no_more() -> None:
    card = engine_with(FrameReader()).card
    assert card.capabilities == {Capability.WORD_TIMES, Capability.CONFIDENCE, Capability.PUNCTUATION}
    assert card.transducer == CONTEXT
    plain = ParakeetEngine(
        Backends([Offer("x", FrameReader)], model="x"), Pieces((" a", None)), name="x", languages=("en",)
    )
    assert Capability.PUNCTUATION not in plain.card.capabilities


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (DecodeOptions(vocabulary=("Quilter",)), r"small does not offer vocabulary \(vocabulary\)"),
        (DecodeOptions(context="before"), "does not offer context"),
        (DecodeOptions(language="de"), "does not offer language_choice"),
    ],
)
def test_options_that_the_model_can_not_honour_are_refused_with_a_reason(options: DecodeOptions, reason: str) -> None:
    with pytest.raises(UnsupportedOptionError, match=reason):
        engine_with(FrameReader()).open(options)


def test_languages_are_those_of_the_published_models() -> None:
    assert languages_of(SMALL) == ("en",)
    v3 = languages_of(replace(SMALL, vocabulary_size=8193, blank_id=8192))
    assert len(v3) == 25 and {"en", "de", "uk"} <= set(v3)


def test_of_several_languages_none_is_named_and_none_can_be_chosen() -> None:
    engine = ParakeetEngine(Backends([Offer("x", FrameReader)], model="x"), SPELT, name="x", languages=("de", "en"))
    assert one(engine, engine.open(DecodeOptions()), chunk(numbered(), 0, 20)).language is None
    with pytest.raises(UnsupportedOptionError, match="does not offer language_choice"):
        engine.open(DecodeOptions(language="de"))
