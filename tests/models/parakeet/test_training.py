"""Training the small model, from recordings to a folder that the product loads."""

import json
import math
import random
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch

from models.parakeet.config import ParakeetConfig
from models.parakeet.training.buffers import Contexts
from models.parakeet.training.data import read_list, read_words, spoken
from models.parakeet.training.learner import Average, Learner, Regularisation, disagreement, masked, warped
from models.parakeet.training.streams import Augmentation, assemble, lay_out, load, plan_batches
from models.parakeet.training.tokenizer import learn_tokenizer
from models.parakeet.training.train import Course, Plan, Speech, rate, settings, train

CPU = torch.device("cpu")
CONFIG = ParakeetConfig(
    n_mels=16,
    n_layers=1,
    d_model=32,
    n_heads=2,
    d_ffn=64,
    conv_kernel=5,
    subsampling_channels=8,
    d_predictor=24,
    n_predictor_layers=1,
    vocabulary_size=13,
    blank_id=12,
)
TONES_HZ = {"low": 300, "high": 2500}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Words that are tones: "low" and "high", one or two a recording, half a second each."""
    rows, words = [], []
    for index, text in enumerate(["low", "high", "low high", "high low", "low low", "high high"]):
        time_s = np.arange(8_000) / 16_000
        tones = [0.3 * np.sin(2 * np.pi * TONES_HZ[word] * time_s) for word in text.split()]
        soundfile.write(tmp_path / f"{index}.wav", np.concatenate(tones), 16_000)
        rows.append(
            {"id": str(index), "file": f"{index}.wav", "text": text, "speaker": "s", "duration_s": 0.5 * len(tones)}
        )
        words.append([str(index), [[word, 0.5 * i, 0.5 * i + 0.5] for i, word in enumerate(text.split())]])
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "words.jsonl").write_text("".join(json.dumps(row) + "\n" for row in words))
    return tmp_path


def test_losses_fall_along_paths_and_then_over_all_alignments(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(1)
    utterances = read_list(folder / "train.jsonl")
    speech = Speech(*load(utterances, (1.0,), CPU, read_words(folder / "words.jsonl")))
    tokenizer = learn_tokenizer([spoken(u.text) for u in utterances], n_pieces=12)
    learner = Learner(CONFIG, Regularisation.none())
    plan = Plan(minutes=10.0, audio_s=12.0, lengths_s=(3.0,), buffered_share=0.3, peak_rate=5e-3, warm_up=1e-9)
    plan = replace(plan, n_norm_batches=2, report_every_s=0.0, max_steps=40, average_decay=0.8)
    train(plan, learner, speech, Speech([], []), tokenizer, Augmentation.none(), folder / "along")
    along = [float(line.split()[-4]) for line in capsys.readouterr().out.splitlines()[:-1]]
    assert along[-1] < 0.5 * along[0]
    train(
        replace(plan, path_first=0.0),
        learner,
        speech,
        Speech([], []),
        tokenizer,
        Augmentation.none(),
        folder / "freely",
    )
    freely = [float(line.split()[-4]) for line in capsys.readouterr().out.splitlines()[:-1]]
    assert freely[-1] < 0.5 * along[0]
    assert {path.name for path in (folder / "freely").iterdir()} == {
        "model.safetensors",
        "config.json",
        "tokenizer.json",
    }


def test_speech_that_comes_later_is_heard_until_the_last_part(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(1)
    utterances = read_list(folder / "train.jsonl")
    speech = Speech(*load(utterances, (1.0,), CPU))
    more = Speech(*load(utterances[:2], (0.9, 1.1), CPU))
    tokenizer = learn_tokenizer([spoken(u.text) for u in utterances], n_pieces=12)
    plan = Plan(
        minutes=10.0, audio_s=6.0, lengths_s=(3.0,), n_workers=2, ask_every_s=0.0, max_steps=4, n_norm_batches=1
    )
    asked = iter([None, more])
    train(
        plan,
        Learner(CONFIG, Regularisation()),
        speech,
        Speech([], []),
        tokenizer,
        Augmentation(tempos=(1.0,)),
        folder / "out",
        lambda: next(asked),
    )
    assert "0.00 h more" in capsys.readouterr().out
    mixed = speech.mixed_with(Speech(more.recordings * 9, more.sounds * 9))
    assert len(mixed.recordings) == len(mixed.sounds) == 2 * len(utterances) + 18


def test_a_gradient_that_is_no_number_changes_no_weight(folder: Path) -> None:
    torch.manual_seed(1)
    utterances = read_list(folder / "train.jsonl")
    recordings, sounds = load(utterances, (1.0,), CPU)
    tokenizer = learn_tokenizer([spoken(u.text) for u in utterances], n_pieces=12)
    learner, plan = Learner(CONFIG, Regularisation.none()), Plan(minutes=1.0)
    optimizer = torch.optim.AdamW(learner.parameters(), fused=True)
    course = Course(learner, Average(learner, 0.9), optimizer, plan, time.monotonic())
    rng = random.Random(1)
    (streams, *_) = plan_batches(recordings, audio_s=12.0, lengths_s=(3.0,), pause_s=0.4, rng=rng)
    batch = assemble(lay_out(streams, recordings, tokenizer), sounds, Augmentation.none(), rng)
    before = [parameter.detach().clone() for parameter in learner.parameters()]
    course.take(replace(batch, samples=batch.samples * math.nan))
    assert all(torch.equal(old, new) for old, new in zip(before, learner.parameters(), strict=True))
    course.take(batch)
    assert not all(torch.equal(old, new) for old, new in zip(before, learner.parameters(), strict=True))


def test_warped_channels_keep_a_slope_and_move_it_a_little() -> None:
    torch.manual_seed(3)
    slope = torch.arange(16.0).expand(2, 5, 16)
    factors = [float(warped(slope, 0.1)[0, 0, 8]) / 8 for _ in range(50)]
    assert 0.9 <= min(factors) < 0.95 and 1.05 < max(factors) <= 1.1
    assert torch.allclose(warped(slope, 0.0), slope, atol=2e-3)


def test_saved_sizes_are_read_back() -> None:
    assert ParakeetConfig.from_transformers(settings(CONFIG)) == CONFIG


def test_states_of_buffers_that_hold_the_whole_stream_are_those_of_the_stream(folder: Path) -> None:
    torch.manual_seed(2)
    recordings, sounds = load(read_list(folder / "train.jsonl"), (1.0,), CPU)
    tokenizer = learn_tokenizer(["low high"], n_pieces=12)
    rng = random.Random(1)
    (streams, *_) = plan_batches(recordings, audio_s=12.0, lengths_s=(3.0,), pause_s=0.4, rng=rng)
    batch = assemble(lay_out(streams, recordings, tokenizer), sounds, Augmentation.none(), rng)
    learner = Learner(CONFIG, Regularisation()).eval()
    whole = learner.states(batch)
    buffered = learner.states(replace(batch, contexts=Contexts(left=0, chunk=whole.shape[1], right=0)))
    for row, n in enumerate(batch.n_samples):
        n_frames = math.ceil(n // 160 / 8)
        assert torch.allclose(whole[row, :n_frames], buffered[row, :n_frames], atol=1e-4)


def test_two_hearings_disagree_by_nothing_if_they_are_equal_and_are_drawn_together() -> None:
    torch.manual_seed(3)
    once = torch.randn(2, 5, 7).log_softmax(-1)
    inside = torch.ones(4, 5, dtype=torch.bool)
    assert float(disagreement(torch.cat((once, once)), inside)) == pytest.approx(0, abs=1e-5)
    logits = torch.randn(4, 5, 7, requires_grad=True)
    before = disagreement(logits.log_softmax(-1), inside)
    before.backward()
    assert logits.grad is not None
    nearer = (logits - 0.3 * logits.grad).detach().log_softmax(-1)
    assert 0 < float(disagreement(nearer, inside)) < 0.9 * float(before.detach())
    assert float(disagreement(nearer, torch.zeros(4, 5, dtype=torch.bool))) == 0


def test_masks_cover_some_of_a_row_and_nothing_is_masked_without() -> None:
    torch.manual_seed(3)
    features = torch.ones(4, 200, 16)
    n_frames = torch.full((4,), 200)
    share = (masked(features, n_frames, Regularisation()) == 0).float().mean()
    assert 0.05 < share < 0.8
    assert torch.equal(masked(features, n_frames, Regularisation.none()), features)


def test_the_learning_rate_goes_up_and_then_down_to_almost_nothing() -> None:
    plan = Plan(minutes=1.0)
    rates = [rate(plan, progress / 100) for progress in range(101)]
    assert rates.index(max(rates)) == round(100 * plan.warm_up)
    assert max(rates) == pytest.approx(plan.peak_rate, rel=0.01)
    assert rates[-1] < 0.01 * plan.peak_rate and min(rates) > 0


def test_the_blank_stays_zero_in_the_embedding() -> None:
    learner = Learner(CONFIG, Regularisation.none())
    embedding = learner.parakeet.decoder.embedding.weight
    embedding.square().sum().add(embedding.sum()).backward()
    assert embedding.grad is not None
    assert embedding[CONFIG.blank_id].abs().sum() == 0 and embedding.grad[CONFIG.blank_id].abs().sum() == 0
    assert embedding.grad[0].abs().sum() > 0
