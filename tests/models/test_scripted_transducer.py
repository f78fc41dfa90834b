"""The transducer that recites: frames in, tokens out, and a state that may be cut anywhere."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.scripted import ScriptedFailureError
from models.scripted_transducer import FRAME_SAMPLES, MAX_WINDOW_SAMPLES, ScriptedToken, ScriptedTransducer
from streaming.engine import Chunk, DecodeOptions, SpeechEngine
from streaming.transcript import Hypothesis, Word
from vad.audio import SpeechSpan

TOKENS = [
    ScriptedToken(" it", 100, 4),
    ScriptedToken(" was", 3 * FRAME_SAMPLES, 2),
    ScriptedToken("n't", 6 * FRAME_SAMPLES + 1, 1),
    ScriptedToken(".", 6 * FRAME_SAMPLES + 2, 4),
    ScriptedToken(" so", 12 * FRAME_SAMPLES, 0),
]
N_FRAMES = 14


def chunk(
    first: int, left: int, region: int, right: int = 0, *, is_final: bool = False, is_first: bool = False
) -> Chunk:
    """A chunk whose region begins at frame ``first``; lengths are in frames."""
    span = SpeechSpan((first - left) * FRAME_SAMPLES, (first + region + right) * FRAME_SAMPLES)
    samples = np.zeros(span.n_samples, np.float32)
    return Chunk(
        span,
        samples,
        is_final,
        left_context_samples=left * FRAME_SAMPLES,
        right_context_samples=right * FRAME_SAMPLES,
        is_first=is_first,
    )


def settled(hypothesis: Hypothesis) -> tuple[Word, ...]:
    return hypothesis.words[: hypothesis.n_settled]


def decode(engine: ScriptedTransducer, *chunks: Chunk) -> list[Hypothesis]:
    stream = engine.open(DecodeOptions())
    return [engine.decode([(stream, one)])[0] for one in chunks]


def whole() -> tuple[Word, ...]:
    return decode(ScriptedTransducer(TOKENS), chunk(0, 0, N_FRAMES, is_final=True))[0].words


def test_pieces_join_to_words_whose_times_are_frames_and_durations() -> None:
    engine: SpeechEngine = ScriptedTransducer(TOKENS)
    assert engine.card.transducer is not None
    assert [word.text for word in whole()] == [" it", " wasn't.", " so"]
    times = [(word.start_sample, word.end_sample) for word in whole()]
    assert times == [(0, 3 * FRAME_SAMPLES), (3 * FRAME_SAMPLES, 10 * FRAME_SAMPLES)] + [
        (12 * FRAME_SAMPLES, 13 * FRAME_SAMPLES)
    ]


@given(st.lists(st.integers(0, N_FRAMES), max_size=6), st.integers(0, 3))
def test_cutting_anywhere_gives_the_same_words(cuts: list[int], n_left: int) -> None:
    bounds = [0, *sorted(cuts)]
    chunks = [chunk(at, min(at, n_left), to - at, N_FRAMES - to) for at, to in zip(bounds, bounds[1:], strict=False)]
    last = chunk(bounds[-1], min(bounds[-1], n_left), N_FRAMES - bounds[-1], is_final=True)
    heard = decode(ScriptedTransducer(TOKENS), *chunks, last)
    assert sum((settled(hypothesis) for hypothesis in heard), ()) == whole()
    shown = ()
    for hypothesis in heard:
        assert shown + hypothesis.words == whole(), "what is behind the region is heard too, tentatively"
        shown += settled(hypothesis)


def test_a_word_is_settled_when_the_next_one_begins() -> None:
    [before, after] = decode(ScriptedTransducer(TOKENS), chunk(0, 0, 3, 2), chunk(3, 3, 1, 2))
    assert (before.n_settled, [word.text for word in before.words]) == (0, [" it", " was"])
    assert (after.n_settled, [word.text for word in after.words]) == (1, [" it", " was"])


def test_a_token_at_the_edge_is_misheard_until_there_is_enough_behind_it() -> None:
    engine = ScriptedTransducer(TOKENS, edge_samples=2 * FRAME_SAMPLES)
    [near, far] = decode(engine, chunk(0, 0, 0, 4), chunk(0, 0, 0, 5))
    assert [word.text for word in near.words] == [" it", " was?"]
    assert [word.text for word in far.words] == [" it", " was"]


def test_a_failed_decode_leaves_the_state_as_it_was() -> None:
    engine = ScriptedTransducer(TOKENS, failing_decodes={2})
    stream = engine.open(DecodeOptions())
    engine.decode([(stream, chunk(0, 0, 4, 2))])
    with pytest.raises(ScriptedFailureError):
        engine.decode([(stream, chunk(4, 4, 4, 2))])
    [hypothesis] = engine.decode([(stream, chunk(4, 4, 10, is_final=True))])
    assert [word.text for word in hypothesis.words] == [" wasn't.", " so"]


def test_a_gap_an_overlap_and_broken_frames_are_refused() -> None:
    for wrong in (chunk(5, 2, 2), chunk(3, 2, 2)):
        with pytest.raises(ValueError, match="the last one ended at 5120"):
            decode(ScriptedTransducer(TOKENS), chunk(0, 0, 4), wrong)
    span = SpeechSpan(0, 1_000)
    with pytest.raises(ValueError, match="whole frames"):
        decode(ScriptedTransducer(TOKENS), Chunk(span, np.zeros(1_000, np.float32), is_final=False))
    long = SpeechSpan(0, MAX_WINDOW_SAMPLES + 1)
    with pytest.raises(ValueError, match="at most"):
        decode(ScriptedTransducer(TOKENS), Chunk(long, np.zeros(long.n_samples, np.float32), is_final=True))


def test_a_first_chunk_carries_nothing_over_and_may_begin_anywhere() -> None:
    [_, anew] = decode(ScriptedTransducer(TOKENS), chunk(0, 0, 4), chunk(6, 0, 8, is_final=True, is_first=True))
    assert [word.text for word in anew.words] == ["n't.", " so"]


def test_a_script_out_of_order_and_a_stream_that_is_closed_are_refused() -> None:
    with pytest.raises(ValueError, match="in order"):
        ScriptedTransducer([ScriptedToken(" b", 5), ScriptedToken(" a", 4)])
    engine = ScriptedTransducer(TOKENS)
    stream = engine.open(DecodeOptions())
    engine.close(stream)
    assert engine.n_open_streams == 0
    with pytest.raises(ValueError, match="not open"):
        engine.decode([(stream, chunk(0, 0, 4))])
    with pytest.raises(ValueError, match="not open"):
        engine.close(stream)
