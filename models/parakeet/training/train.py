"""Trains a small Parakeet: recordings and transcripts → weights, configuration and vocabulary in one folder.

It knows the schedule, which is by the clock, and the order of the work. What is computed is known in `learner.py`, what
is heard in `streams.py`.

    python -m models.parakeet.training.train --data FOLDER [--more FOLDER ...] --out FOLDER --minutes 6
"""

import argparse
import json
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from models.parakeet.config import SUBSAMPLING, ParakeetConfig
from models.parakeet.reference import Parakeet
from models.parakeet.training.buffers import draw_contexts
from models.parakeet.training.data import SAMPLE_RATE_HZ, SPLIT_SEED, held_out_speakers, read_list, read_words, spoken
from models.parakeet.training.learner import Average, Learner, Regularisation, batch_norms
from models.parakeet.training.streams import (
    NO_WORDS,
    Augmentation,
    Batch,
    Layout,
    Recording,
    Sounds,
    assemble,
    lay_out,
    load,
    plan_batches,
    with_path,
)
from models.parakeet.training.tokenizer import learn_tokenizer, with_dropout

SIZES = ParakeetConfig(
    n_mels=80,
    n_layers=6,
    d_model=192,
    n_heads=4,
    d_ffn=768,
    conv_kernel=9,
    subsampling_channels=64,
    d_predictor=128,
    n_predictor_layers=2,
    vocabulary_size=257,
    blank_id=256,
)

LARGEST_NORM = 1.0  # of the gradient
LATER_TEMPOS = (0.87, 1.0, 1.15)

GENTLE_AUGMENTATION = Augmentation(tempos=(1.0,), noise_share=0.2, narrow_share=0.1, merge_dropout=0.05)
GENTLE_REGULARISATION = Regularisation(
    dropout=0.05, token_dropout=0.1, n_frequency_masks=1, n_time_masks=4, hears_twice=False
)


@dataclass(frozen=True, slots=True)
class Plan:
    """How to train; times in seconds."""

    minutes: float = 6.0
    seed: int = 4
    audio_s: float = 420.0  # of a batch
    lengths_s: tuple[float, ...] = (2.0, 4.0, 8.0, 12.0, 17.0, 17.0, 25.0, 36.0)
    peak_rate: float = 1.8e-3
    warm_up: float = 0.08  # of the time
    weight_decay: float = 0.02
    ctc_weight: float = 0.3
    consistency_weight: float = 0.15
    path_first: float = 0.35  # of the time: along paths, where words' times are known, and without masks at first
    plain_first: float = 0.1  # of the time: features are not masked
    buffered_share: float = 0.4  # of the batches, how many are encoded in buffers as a session's audio is
    average_decay: float = 0.999
    report_every_s: float = 25.0
    n_norm_batches: int = 60  # over which the batch norms of the averaged network are measured
    mixed_until: float = 0.85  # of the time: speech that came later is heard, too
    ask_every_s: float = 4.0
    n_workers: int = 0  # processes that lay batches out
    keeps_norms: bool = False  # the batch norms stay as they are, since small batches tell little of them
    max_steps: int | None = None


def gently(plan: Plan) -> Plan:
    """The same for a network that hears already, but has no second head any more: all alignments at a low rate."""
    return replace(
        plan,
        peak_rate=3e-4,
        warm_up=0.03,
        ctc_weight=0.0,
        path_first=0.0,
        plain_first=0.0,
        lengths_s=(2.0, 4.0, 8.0, 12.0),
        buffered_share=0.1,
        average_decay=0.99,
        report_every_s=600.0,
        keeps_norms=True,
    )


def rate(plan: Plan, progress: float) -> float:
    """The learning rate when ``progress`` of the time, 0 … 1, is over: up in a line, then down a cosine."""
    if progress < plan.warm_up:
        return plan.peak_rate * max(progress / plan.warm_up, 0.01)
    return plan.peak_rate * (
        0.005 + 0.995 * 0.5 * (1 + math.cos(math.pi * (progress - plan.warm_up) / (1 - plan.warm_up)))
    )


@dataclass(frozen=True, slots=True)
class Speech:
    """Recordings, and their audio on the device."""

    recordings: list[Recording]
    sounds: list[Sounds]

    @property
    def duration_s(self) -> float:
        """Of all recordings."""
        return sum(recording.utterance.duration_s for recording in self.recordings)

    def mixed_with(self, other: "Speech") -> "Speech":
        """Both, this one as often as makes it about as long as the other."""
        n_times = max(1, round(other.duration_s / self.duration_s))
        return Speech(self.recordings * n_times + other.recordings, self.sounds * n_times + other.sounds)


class Layouts(IterableDataset[Layout]):
    """Batches on paper, without end; each worker has its own.

    Along paths there are only the recordings whose words' times are known.
    """

    def __init__(
        self,
        recordings: list[Recording],
        tokenizer: Tokenizer,
        augmentation: Augmentation,
        plan: Plan,
        config: ParakeetConfig,
        *,
        along_paths: bool,
    ) -> None:
        self._recordings = recordings
        self._tokenizer = tokenizer
        self._augmentation = augmentation
        self._plan = plan
        self._config = config
        self._along_paths = along_paths

    def __iter__(self) -> Iterator[Layout]:
        """Draws with the worker's own generator."""
        worker = get_worker_info()
        rng = random.Random(1000 * self._plan.seed + 2 * (worker.id if worker else 0) + self._along_paths)
        varied = with_dropout(self._tokenizer, self._augmentation.merge_dropout)
        plans = plan_batches(
            self._recordings,
            audio_s=self._plan.audio_s,
            lengths_s=self._plan.lengths_s,
            pause_s=self._augmentation.max_pause_s,
            rng=rng,
            is_endless=True,
            with_times=self._along_paths,
        )
        for streams in plans:
            contexts = draw_contexts(rng) if rng.random() < self._plan.buffered_share else None
            layout = lay_out(streams, self._recordings, varied, contexts)
            if self._along_paths:
                blank, longest = self._config.blank_id, max(self._config.durations)
                layout = with_path(layout, streams, self._recordings, varied, blank=blank, longest=longest)
            yield layout


def held_out_batches(speech: Speech, tokenizer: Tokenizer, seed: int) -> list[Batch]:
    """The held-out speakers in streams, always the same."""
    rng = random.Random(seed)
    plans = plan_batches(speech.recordings, audio_s=300.0, lengths_s=(17.0,), pause_s=0.5, rng=rng)
    layouts = [lay_out(streams, speech.recordings, tokenizer) for streams in plans]
    return [assemble(layout, speech.sounds, Augmentation.none(), rng) for layout in layouts]


@dataclass(slots=True)
class Course:
    """A training under way."""

    learner: Learner
    average: Average
    optimizer: torch.optim.Optimizer
    plan: Plan
    began_s: float
    step: int = 0
    audio_s: float = 0.0

    @property
    def elapsed_s(self) -> float:
        """Since the first step."""
        return time.monotonic() - self.began_s

    @property
    def progress(self) -> float:
        """The share of the time that is over."""
        return self.elapsed_s / (60 * self.plan.minutes)

    def take(self, batch: Batch) -> Tensor:
        """One step; returns the losses and the gradient's norm, [4]. A gradient that is no number is left out."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate(self.plan, self.progress)
        device = batch.samples.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            losses = self.learner(batch)
        loss = losses.transducer + self.plan.ctc_weight * losses.ctc
        (loss + self.plan.consistency_weight * losses.inconsistency).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.learner.parameters(), LARGEST_NORM)
        # As a gradient scaler does it: the optimizer looks on the device, so that nothing is waited for.
        self.optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
        self.optimizer.step()
        self.average.update(self.learner)
        self.optimizer.zero_grad(set_to_none=True)
        self.step += 1
        self.audio_s += sum(batch.n_samples) / SAMPLE_RATE_HZ
        figures = torch.stack((losses.transducer, losses.ctc, losses.inconsistency, norm)).detach()
        return figures.nan_to_num(0.0, 0.0, 0.0)

    @torch.no_grad()
    def held_out_losses(self, batches: list[Batch]) -> list[float]:
        """Transducer and CTC loss of the averaged network, means over the batches."""
        losses = [self.average.learner(batch) for batch in batches]
        transducer = statistics.mean(loss.transducer.item() for loss in losses)
        return [transducer, statistics.mean(loss.ctc.item() for loss in losses)]


class Source:
    """Batches of whatever is to be learnt from next, laid out by processes of their own."""

    def __init__(
        self, speech: Speech, tokenizer: Tokenizer, augmentation: Augmentation, plan: Plan, config: ParakeetConfig
    ) -> None:
        self.speech = speech
        self._augmentation = augmentation
        self._arguments = (tokenizer, augmentation, plan, config)
        self._rng = random.Random(plan.seed)
        self._n_workers = plan.n_workers
        self._layouts: dict[bool, Iterator[Layout]] = {}

    def next(self, *, along_paths: bool = False) -> Batch:
        """The next batch, along paths or freely."""
        if along_paths not in self._layouts:
            layouts = Layouts(self.speech.recordings, *self._arguments, along_paths=along_paths)
            loader = DataLoader(layouts, batch_size=None, num_workers=self._n_workers, collate_fn=_as_it_is)
            self._layouts[along_paths] = iter(loader)
        return assemble(next(self._layouts[along_paths]), self.speech.sounds, self._augmentation, self._rng)


def _as_it_is(layout: Any) -> Any:
    return layout


def train(
    plan: Plan,
    learner: Learner,
    speech: Speech,
    held_out: Speech,
    tokenizer: Tokenizer,
    augmentation: Augmentation,
    out: Path,
    later: Callable[[], Speech | None] = lambda: None,
) -> Parakeet:
    """Trains until the time is over, reports and saves as it goes, and returns the averaged network.

    ``later`` is asked now and then for more speech, until it has some; with it the middle of the time is spent.
    """
    optimizer = torch.optim.AdamW(
        learner.parameters(), lr=plan.peak_rate, betas=(0.9, 0.98), weight_decay=plan.weight_decay, fused=True
    )
    own = Source(speech, tokenizer, augmentation, plan, learner.parakeet.config)
    mixed: Source | None = None
    has_paths = any(recording.words is not None for recording in speech.recordings)
    test = held_out_batches(held_out, tokenizer, SPLIT_SEED)
    course = Course(learner.train(), Average(learner, plan.average_decay), optimizer, plan, time.monotonic())
    if plan.keeps_norms:
        for norm in batch_norms(learner):
            norm.eval()
    sums, n_summed, reported_s, asked_s = torch.zeros(4), 0, 0.0, 0.0
    while course.progress < 1 and course.step != plan.max_steps:
        learner.is_masked = course.progress >= plan.plain_first
        if mixed is None and course.elapsed_s - asked_s >= plan.ask_every_s and course.progress < plan.mixed_until:
            asked_s = course.elapsed_s
            if more := later():
                mixed = Source(speech.mixed_with(more), tokenizer, augmentation, plan, learner.parakeet.config)
                print(f"{course.elapsed_s:7.1f} s, {more.duration_s / 3600:.2f} h more", flush=True)
        source = mixed if mixed and course.progress < plan.mixed_until else own
        batch = source.next(along_paths=has_paths and course.progress < plan.path_first)
        sums = sums.to(batch.samples.device) + course.take(batch)
        n_summed += 1
        if course.elapsed_s - reported_s >= plan.report_every_s or course.step == plan.max_steps:
            course.average.copy_norms(learner)
            means = [*(sums / n_summed).tolist(), *(course.held_out_losses(test) if test else [])]
            report(course, means)
            save(course.average.learner.parakeet, tokenizer, out)
            sums, n_summed, reported_s = torch.zeros(4), 0, course.elapsed_s
    if not plan.keeps_norms:
        course.average.measure_norms(own.next() for _ in range(plan.n_norm_batches))
    report(course, course.held_out_losses(test) if test else [])
    save(course.average.learner.parakeet, tokenizer, out)
    return course.average.learner.parakeet


def report(course: Course, means: list[float]) -> None:
    """One line: seconds, steps, hours heard, transducer, CTC, inconsistency, gradient's norm, then both held out."""
    fields = [f"{course.elapsed_s:7.1f} s", f"step {course.step}", f"{course.audio_s / 3600:.1f} h"]
    print(*fields, *(f"{mean:.3f}" for mean in means), flush=True)


def save(model: Parakeet, tokenizer: Tokenizer, out: Path) -> None:
    """Weights in half precision, sizes and vocabulary, as `transformers` lays out a Parakeet."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: tensor.detach().half().cpu().contiguous()
        for name, tensor in model.state_dict().items()
        if not name.endswith((".num_batches_tracked", ".learns"))
    }
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"))
    (out / "config.json").write_text(json.dumps(settings(model.config), indent=1) + "\n", encoding="utf-8")


def settings(config: ParakeetConfig) -> dict[str, object]:
    """A `config.json` with these sizes."""
    return {
        "architectures": ["ParakeetForTDT"],
        "model_type": "parakeet_tdt",
        "vocab_size": config.vocabulary_size,
        "blank_token_id": config.blank_id,
        "pad_token_id": config.blank_id,
        "decoder_hidden_size": config.d_predictor,
        "num_decoder_layers": config.n_predictor_layers,
        "hidden_act": "relu",
        "durations": list(config.durations),
        "max_symbols_per_step": config.max_symbols,
        "encoder_config": {
            "model_type": "parakeet_encoder",
            "hidden_size": config.d_model,
            "intermediate_size": config.d_ffn,
            "num_hidden_layers": config.n_layers,
            "num_attention_heads": config.n_heads,
            "num_key_value_heads": config.n_heads,
            "hidden_act": "silu",
            "attention_bias": config.has_attention_bias,
            "convolution_bias": config.has_convolution_bias,
            "conv_kernel_size": config.conv_kernel,
            "subsampling_factor": SUBSAMPLING,
            "subsampling_conv_channels": config.subsampling_channels,
            "subsampling_conv_kernel_size": 3,
            "subsampling_conv_stride": 2,
            "num_mel_bins": config.n_mels,
            "max_position_embeddings": 5000,
            "scale_input": config.scales_input,
        },
    }


def main() -> None:
    """Reads the lists, splits them by speaker, learns pieces and network, and saves them."""
    usual = Plan()
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="folders with a train.jsonl each")
    parser.add_argument("--words", type=Path, help="when each word is said: begins along those paths")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=usual.minutes)
    parser.add_argument("--seed", type=int, default=usual.seed)
    parser.add_argument("--later", type=Path, help="a folder that gets its list, train.jsonl, during the training")
    parser.add_argument("--start", type=Path, help="go on from the network and vocabulary in this folder")
    parser.add_argument(
        "--gently", action="store_true", help="at a low rate and with little variation, for a last touch"
    )
    parser.add_argument("--steps", type=int, help="stop after so many, to try things")
    parser.add_argument("--audio-s", type=float, default=usual.audio_s, help="audio of a batch, seconds")
    parser.add_argument("--peak-rate", type=float, default=usual.peak_rate)
    parser.add_argument("--workers", type=int, default=usual.n_workers, help="processes that lay out batches")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    plan = Plan(
        minutes=args.minutes,
        seed=args.seed,
        audio_s=args.audio_s,
        peak_rate=args.peak_rate,
        n_workers=args.workers,
        max_steps=args.steps,
    )
    augmentation, regularisation = Augmentation(), Regularisation()
    if args.start:
        plan = replace(plan, path_first=0.0, plain_first=0.0, warm_up=0.03)
    if args.gently:
        plan, augmentation, regularisation = gently(plan), GENTLE_AUGMENTATION, GENTLE_REGULARISATION
    torch.manual_seed(plan.seed)
    utterances = [utterance for folder in args.data for utterance in read_list(folder / "train.jsonl")]
    apart = held_out_speakers(utterances, seed=SPLIT_SEED)
    known = [utterance for utterance in utterances if utterance.speaker not in apart]
    unknown = [utterance for utterance in utterances if utterance.speaker in apart]
    if args.start:
        tokenizer = Tokenizer.from_file(str(args.start / "tokenizer.json"))
    else:
        tokenizer = learn_tokenizer((spoken(u.text) for u in known), n_pieces=SIZES.vocabulary_size - 1)
    device = torch.device(args.device)
    words = read_words(args.words) if args.words else NO_WORDS
    speech = Speech(*load(known, augmentation.tempos, device, words))
    held_out = Speech(*load(unknown, (1.0,), device))

    def later() -> Speech | None:
        if args.later is None or not (args.later / "train.jsonl").exists():
            return None
        return Speech(*load(read_list(args.later / "train.jsonl"), LATER_TEMPOS, device))

    learner = Learner(SIZES, regularisation).to(device)
    if args.start:
        learner.parakeet.load(load_file(args.start / "model.safetensors"))
    n_parameters = sum(parameter.numel() for parameter in learner.parakeet.parameters())
    hours = speech.duration_s / 3600
    print(f"{n_parameters} parameters, {len(known)} utterances, {hours:.2f} h; held out: {sorted(apart)}", flush=True)
    train(plan, learner, speech, held_out, tokenizer, augmentation, args.out, later)


if __name__ == "__main__":
    main()
