"""Recordings of any length: how they are cut, and what they are told as."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.parakeet.config import FRAME_SAMPLES
from models.parakeet.engine import MAX_WINDOW_FRAMES
from models.parakeet.recording import (
    CHUNK_SAMPLES,
    LEFT_SAMPLES,
    MAX_PART_SAMPLES,
    RIGHT_SAMPLES,
    parts_of,
    recording_chunks,
)
from streaming.transcript import Word


@given(n_samples=st.integers(1, 8 * CHUNK_SAMPLES))
@settings(deadline=None, max_examples=40)
def test_every_sample_is_in_one_region_and_every_chunk_fits_the_model(n_samples: int) -> None:
    samples = np.arange(n_samples, dtype=np.float32)
    chunks = list(recording_chunks(samples))
    begin = 0
    for index, chunk in enumerate(chunks):
        assert chunk.span.start_sample + chunk.left_context_samples == begin
        assert len(chunk.samples) == chunk.span.n_samples <= MAX_WINDOW_FRAMES * FRAME_SAMPLES
        assert chunk.samples[0] == np.float32(chunk.span.start_sample)
        assert chunk.is_first == (index == 0)
        assert chunk.left_context_samples == min(begin, LEFT_SAMPLES)
        begin = chunk.span.end_sample - chunk.right_context_samples
        is_last = index == len(chunks) - 1
        assert (chunk.is_final, chunk.right_context_samples) == (is_last, 0 if is_last else RIGHT_SAMPLES)
        assert is_last or begin % FRAME_SAMPLES == 0
    assert begin == n_samples


def test_nothing_is_no_chunk() -> None:
    assert list(recording_chunks(np.zeros(0, np.float32))) == []


def word(text: str, start_s: float, end_s: float) -> Word:
    return Word(text, round(start_s * 16_000), round(end_s * 16_000), 0.5)


def test_parts_end_with_sentences() -> None:
    words = [word(" Come", 0.1, 0.4), word(" in.", 0.5, 0.8), word(" Why?", 1.0, 1.4), word(" Well", 2.0, 2.5)]
    parts = list(parts_of(words, "en"))
    assert [[w.text for w in part.words] for part in parts] == [[" Come", " in."], [" Why?"], [" Well"]]
    assert [(part.span.start_sample, part.span.end_sample) for part in parts] == [
        (1_600, 12_800),
        (16_000, 22_400),
        (32_000, 40_000),
    ]
    assert {part.language for part in parts} == {"en"}


def test_a_text_without_full_stops_is_cut_at_words() -> None:
    words = [word(f" {i}", i, i + 0.5) for i in range(40)]
    parts = list(parts_of(words, None))
    assert [w for part in parts for w in part.words] == words
    assert all(part.span.n_samples <= MAX_PART_SAMPLES for part in parts)
    assert len(parts) == 3


def test_a_part_is_told_before_the_next_one_is_decoded() -> None:
    def endless() -> object:
        yield word(" One.", 0, 1)
        pytest.fail("asked for more before the first part was told")

    assert next(iter(parts_of(endless(), None))).words[0].text == " One."  # type: ignore[arg-type]
