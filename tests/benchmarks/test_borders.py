"""Every word once, wherever the border between two segments falls: exactly so with an engine whose words are known."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.borders import Differences, compare, finals_of, memoised_decoder
from models.scripted import ScriptedEngine, recite
from models.store import TWO_CITIES_TEXT
from streaming.pacing import Pacing
from streaming.transcript import text_of
from tests.fetched import engine_of, or_skip
from vad.audio import samples_from_ms

WORDS = TWO_CITIES_TEXT.split()


@settings(max_examples=150, deadline=None)
@given(
    n_words=st.integers(1, 60),
    word_ms=st.integers(300, 700),
    gap_ms=st.integers(0, 400),
    max_span_ms=st.integers(1_500, 12_000),
    interval_ms=st.sampled_from([300, 500, 2_000]),
    flicker=st.sampled_from([0.0, 0.5, 1.0]),
    is_monotonous=st.booleans(),
)
def test_every_word_is_said_once_at_any_border(
    n_words: int,
    word_ms: int,
    gap_ms: int,
    max_span_ms: int,
    interval_ms: int,
    flicker: float,
    is_monotonous: bool,
) -> None:
    """Also where the same word is said over and over, and where words at the edge are heard wrongly."""
    said = ["again"] * n_words if is_monotonous else WORDS[:n_words]
    script = recite(
        " ".join(said), word_samples=samples_from_ms(word_ms), gap_samples=samples_from_ms(gap_ms), confidence=0.9
    )
    samples = np.zeros((script[-1].end_sample or 0) + samples_from_ms(300), np.float32)
    pacing = Pacing(
        partial_interval_samples=samples_from_ms(interval_ms), max_span_samples=samples_from_ms(max_span_ms)
    )
    finals = finals_of(memoised_decoder(ScriptedEngine(script, flicker=flicker), samples), len(samples), pacing)
    assert " ".join(text_of(final.words) for final in finals if final.words) == " ".join(said)


def test_every_border_of_one_second_is_exact() -> None:
    script = recite(" ".join(WORDS[:36]), confidence=0.9)
    samples = np.zeros(script[-1].end_sample or 0, np.float32)
    decode = memoised_decoder(ScriptedEngine(script, flicker=0.7), samples)
    for border_ms in range(5_000, 6_000, 20):
        finals = finals_of(decode, len(samples), Pacing(max_span_samples=samples_from_ms(border_ms)))
        assert len(finals) >= 2
        assert " ".join(text_of(final.words) for final in finals) == " ".join(WORDS[:36])


@pytest.mark.weights
def test_a_few_borders_with_the_real_model() -> None:
    from benchmarks.borders import clips_of, sweep

    engine = engine_of("whisper-tiny.en")
    with or_skip():
        clip = clips_of(0)[0]
    borders = range(samples_from_ms(6_000), samples_from_ms(6_600), samples_from_ms(200))
    whole, _, joined = sweep(clip, memoised_decoder(engine, clip.samples), borders, interval_ms=2_000)
    assert len(whole.split()) >= 30
    assert all(item.differences.is_equal for item in joined)
    assert all(len(item.seams) >= 2 for item in joined)


@pytest.mark.parametrize(
    ("seams", "expected"),
    [
        (["it was the", "best of times"], Differences()),
        (["it was the", "the best of times"], Differences(n_doubled=1)),
        (["it was the best", "the best of times"], Differences(n_doubled=2)),
        (["it was the", "very best of times"], Differences(n_inserted=1)),
        (["it was", "best of times"], Differences(n_lost=1)),
        (["it was that", "best of times"], Differences(n_substituted=1)),
        (["it is the best of", "times"], Differences(n_substituted=1, n_away=1)),
    ],
)
def test_differences_are_told_apart(seams: list[str], expected: Differences) -> None:
    assert compare("it was the best of times", seams) == expected
