"""Utterances joined into streams, and streams cut into buffers, for training the small model."""

import random
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.parakeet.config import FRAME_SAMPLES, n_frames_of
from models.parakeet.training.buffers import Contexts, draw_contexts, encode_in_buffers
from models.parakeet.training.data import Utterance, Word, faster, held_out_speakers, read_list, read_words, spoken
from models.parakeet.training.streams import (
    Augmentation,
    Recording,
    Sounds,
    assemble,
    lay_out,
    plan_batches,
    with_path,
)
from models.parakeet.training.tokenizer import learn_tokenizer, with_dropout

TEXTS = ["the cat sat on the mat", "a cat and a hat", "one two three", "the hat on the mat"]


def recording(index: int, duration_s: float, *, speaker: str = "a1") -> Recording:
    utterance = Utterance(f"u{index}", Path("none"), TEXTS[index % 4], speaker, duration_s)
    return Recording(utterance, TEXTS[index % 4], (int(duration_s * 16_000),), (1.0,))


def sounds(recordings: list[Recording]) -> list[Sounds]:
    """A constant for each recording: its number."""
    return [(torch.full((each.lengths[0],), float(index + 1)),) for index, each in enumerate(recordings)]


durations_s = st.lists(st.floats(0.3, 9.0), min_size=1, max_size=30)


@settings(max_examples=50, deadline=None)
@given(durations_s=durations_s, seed=st.integers(0, 99))
def test_an_epoch_has_every_recording_once_and_none_overlap(durations_s: list[float], seed: int) -> None:
    recordings = [recording(index, duration) for index, duration in enumerate(durations_s)]
    rng = random.Random(seed)
    planned = list(plan_batches(recordings, audio_s=20.0, lengths_s=(3.0, 6.0), pause_s=1.0, rng=rng))
    streams = [stream for batch in planned for stream in batch]
    assert sorted(placed.index for stream in streams for placed in stream.placed) == list(range(len(recordings)))
    for stream in streams:
        ends = [0, *(placed.end_sample for placed in stream.placed)]
        starts = [*(placed.start_sample for placed in stream.placed), stream.n_samples]
        assert all(start >= end for start, end in zip(starts, ends, strict=True))


def test_a_batch_holds_audio_and_labels_where_they_were_planned() -> None:
    recordings = [recording(index, 1.5) for index in range(3)]
    tokenizer = learn_tokenizer(TEXTS, n_pieces=40)
    rng = random.Random(1)
    (streams,) = plan_batches(recordings, audio_s=30.0, lengths_s=(9.0,), pause_s=0.2, rng=rng)
    batch = assemble(lay_out(streams, recordings, tokenizer), sounds(recordings), Augmentation.none(), rng)
    for row, stream in enumerate(streams):
        for placed in stream.placed:
            part = batch.samples[row, placed.start_sample : placed.end_sample]
            assert torch.allclose(part, torch.full_like(part, (placed.index + 1) * placed.gain))
        text = " ".join(recordings[placed.index].text for placed in stream.placed)
        assert tokenizer.decode(batch.tokens[row, : batch.n_tokens[row]].tolist()) == text


def test_a_path_has_each_word_where_it_is_said_in_the_stream() -> None:
    first, second = recording(0, 3.0), recording(2, 3.0)
    first = replace(first, text="the cat", words=(Word("the", 0.1, 0.5), Word("cat", 1.0, 1.4)))
    second = replace(second, text="three", words=(Word("three", 0.5, 1.0),))
    recordings, tokenizer, rng = [first, second], learn_tokenizer(TEXTS, n_pieces=40), random.Random(1)
    (streams,) = plan_batches(recordings, audio_s=10.0, lengths_s=(9.0,), pause_s=0.2, rng=rng)
    layout = lay_out(streams, recordings, tokenizer)
    aligned = with_path(layout, streams, recordings, tokenizer, blank=40, longest=4).aligned
    assert aligned is not None
    for row, stream in enumerate(streams):
        for placed in stream.placed:
            for word in recordings[placed.index].words or ():
                start_s = placed.start_sample / 16_000 + word.start_s
                frames = range(round(start_s / 0.08), round((start_s + word.end_s - word.start_s) / 0.08))
                pieces = [aligned.pieces[row, frame].item() for frame in frames]
                assert tokenizer.decode([piece for piece, _ in groupby(pieces)]) == word.text


def test_words_that_could_not_be_aligned_are_not_known(tmp_path: Path) -> None:
    (tmp_path / "words.jsonl").write_text('["a", [["yes", 0.1, 0.4]]]\n["b", null]\n')
    assert read_words(tmp_path / "words.jsonl") == {"a": (Word("yes", 0.1, 0.4),)}


def test_pieces_begin_words_with_the_mark_and_dropout_spells_the_same_text() -> None:
    tokenizer = learn_tokenizer(TEXTS, n_pieces=40)
    pieces = tokenizer.encode("the cat").tokens
    assert pieces[0].startswith("▁") and "".join(pieces) == "▁the▁cat"
    varied = with_dropout(tokenizer, 0.5)
    spellings = {tuple(varied.encode("the cat sat").ids) for _ in range(30)}
    assert len(spellings) > 1
    assert {varied.decode(list(spelling)) for spelling in spellings} == {"the cat sat"}


def test_speakers_kept_apart_are_a_few_of_each_corpus_and_always_the_same() -> None:
    speakers = [f"ls{number}" for number in range(20)] + ["fsdd-a", "fsdd-b", "fsdd-c", "lj"]
    utterances = [Utterance(name, Path("none"), "", name, 1.0) for name in speakers]
    apart = held_out_speakers(utterances, seed=4)
    assert apart == held_out_speakers(reversed(utterances), seed=4)
    assert sum(name.startswith("ls") for name in apart) == 2
    assert sum(name.startswith("fsdd") for name in apart) == 1
    assert "lj" not in apart


def test_a_list_without_a_field_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"id": "a", "file": "a", "text": "", "speaker": "s"}\n')
    with pytest.raises(ValueError, match="line 1: no duration_s"):
        read_list(tmp_path / "train.jsonl")


def test_learnt_spelling_has_lower_case_letters_and_apostrophes_alone() -> None:
    assert spoken("It’s (two) THIRTY, p.m.") == "it's two thirty p m"


def test_a_tone_played_faster_is_higher_and_shorter() -> None:
    time_s = torch.arange(16_000) / 16_000
    tone = torch.sin(2 * torch.pi * 400 * time_s)
    fast = faster(tone, 1.25)
    assert len(fast) == 12_800
    spectrum = torch.fft.rfft(fast).abs()
    assert abs(int(spectrum.argmax()) * 16_000 / len(fast) - 500) < 2


def frame_numbers(samples: Tensor, n_samples: Tensor) -> Tensor:
    """In place of an encoder: each frame says which sample it begins with."""
    return samples[:, ::FRAME_SAMPLES, None]


@settings(max_examples=60, deadline=None)
@given(lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4), seed=st.integers(0, 999))
def test_buffers_cover_every_frame_of_a_stream_in_its_place(lengths: list[int], seed: int) -> None:
    contexts = draw_contexts(random.Random(seed))
    n_samples = [length * FRAME_SAMPLES - seed % 1000 for length in lengths]
    samples = torch.arange(max(n_samples)).float().repeat(len(lengths), 1)
    frames = encode_in_buffers(frame_numbers, samples, n_samples, contexts)
    for row, n in enumerate(n_samples):
        expected = torch.arange(n_frames_of(n)) * FRAME_SAMPLES
        assert torch.equal(frames[row, : n_frames_of(n), 0], expected.float())


def test_a_buffer_knows_no_more_than_its_contexts() -> None:
    def counts(samples: Tensor, n_samples: Tensor) -> Tensor:
        return (n_samples / FRAME_SAMPLES)[:, None, None].expand(-1, samples.shape[1] // FRAME_SAMPLES, 1)

    frames = encode_in_buffers(counts, torch.zeros(1, 20 * FRAME_SAMPLES), [20 * FRAME_SAMPLES], Contexts(3, 4, 2))
    assert frames[0, ::4, 0].tolist() == [6.0, 9.0, 9.0, 9.0, 7.0]
