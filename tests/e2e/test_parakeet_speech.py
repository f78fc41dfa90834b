"""Real speech through the small Parakeet in chunks: seams, times and flushes, compared with utterances in one piece.

The model comes with the project and is small, so that it mishears much; what is tested is that chunks add nothing to
that. The recording comes with a wheel; ``benchmarks/parakeet_streaming.py`` has figures of more speakers and settings.
"""

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch

from benchmarks.parakeet_streaming import (
    Cut,
    Figures,
    Samples,
    Setting,
    SpokenStream,
    flushed_words,
    measure,
    offline_words,
    play,
    silence,
)
from gateway import messages as m
from models.catalog import load_engine
from models.parakeet.training.data import spoken
from models.store import TWO_CITIES_TEXT
from streaming.engine import SpeechEngine
from tests.fetched import recorded
from vad.audio import SAMPLE_RATE_HZ
from vad.silero import SileroDetector

pytestmark = pytest.mark.e2e

CHUNKS_MS = (160, 640)
HEARD_S = 24.0  # of the recording: five clauses with pauses between them
FRAME_S = 0.08


@cache
def engine() -> SpeechEngine:
    torch.set_num_threads(1)
    return load_engine("parakeet-tiny", n_threads=1)


@cache
def detector() -> SileroDetector:
    return SileroDetector()


def usual(**chosen: int | bool) -> Setting:
    context = engine().card.transducer
    assert context is not None
    lengths = {"left_ms": context.left_samples, "chunk_ms": context.chunk_samples, "right_ms": context.right_samples}
    return Setting(**{**{name: n // 16 for name, n in lengths.items()}, **chosen})


def two_cities() -> Samples:
    return recorded("two_cities")[: int(HEARD_S * SAMPLE_RATE_HZ)]


@cache
def heard(chunk_ms: int | None = None) -> Figures:
    """The recording in chunks, or each utterance in one piece."""
    setting = usual(second_pass=True) if chunk_ms is None else usual(chunk_ms=chunk_ms)
    stream = SpokenStream(np.concatenate([two_cities(), silence(1.0)]), (spoken(TWO_CITIES_TEXT),))
    return measure(engine(), detector(), setting, [stream])


@pytest.mark.parametrize("chunk_ms", CHUNKS_MS)
def test_seams_neither_double_nor_lose_words(chunk_ms: int) -> None:
    whole, figures = heard(), heard(chunk_ms)
    n_words = len(whole.texts[0].split())
    n_other, n_left_out, n_put_in = figures.differs_from(whole)
    # Nearly as many one way as the other: words that the model hears as two, or two as one.
    assert n_left_out <= 0.1 * n_words and n_put_in <= 0.1 * n_words
    assert n_other <= 0.5 * n_words
    assert n_doubled(figures) <= n_doubled(whole) + 1


def n_doubled(figures: Figures) -> int:
    """Words that stand there twice in a row."""
    return sum(before == after for text in figures.texts for before, after in pairwise(text.split()))


@pytest.mark.parametrize("chunk_ms", CHUNKS_MS)
def test_words_begin_where_they_begin_in_one_piece_within_a_frame(chunk_ms: int) -> None:
    differences = heard(chunk_ms).start_differences_s(heard())
    assert len(differences) > 20
    assert np.mean(np.array(differences) <= FRAME_S + 1e-3) >= 0.95


def test_words_are_settled_at_the_delay_that_ready_states_once_the_next_one_begins() -> None:
    seen, _ = play(engine(), detector(), usual(), two_cities())
    [ready] = [item.message for item in seen if isinstance(item.message, m.Ready)]
    assert ready.chunking is not None
    n_words: dict[int, int] = {}
    for item in seen:
        if isinstance(item.message, m.Partial) and item.message.n_committed > n_words.get(item.message.segment, 0):
            segment = item.message
            n_words[segment.segment] = segment.n_committed
            following = segment.words[segment.n_committed :][:1]
            if following and following[0].start_s is not None:
                assert item.at_s - following[0].start_s <= ready.chunking.latency_ms / 1_000 + 0.2


@cache
def cut_words() -> tuple[Cut, ...]:
    """Words of the recording with a pause behind them, as the model hears them in one piece."""
    seen, _ = play(engine(), detector(), usual(second_pass=True), two_cities())
    finals = [item.message for item in seen if isinstance(item.message, m.Final)]
    found = []
    for final in finals:
        last = final.words[-1]
        assert last.end_s is not None
        end_sample = int(last.end_s * SAMPLE_RATE_HZ)
        start_sample = max(0, end_sample - 4 * SAMPLE_RATE_HZ)
        found.append(Cut(two_cities()[start_sample:], spoken(last.text), end_sample - start_sample))
    return tuple(found)


@pytest.mark.parametrize("gap_ms", [0, 200])
def test_a_flush_keeps_the_last_word_as_often_as_one_piece(gap_ms: int) -> None:
    words = cut_words()
    assert len(words) >= 3
    kept = flushed_words(engine(), detector(), usual(chunk_ms=160), words, gap_ms)
    assert kept >= offline_words(engine(), words, gap_ms) - 1
