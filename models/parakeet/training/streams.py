"""Utterances joined into streams, as audio on the device and labels beside it.

It knows how speech follows speech with pauses between, and what recordings suffer (level, noise, narrow bands). It
knows neither features nor the network; what is drawn at random comes from the generators given.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from models.parakeet.training.alignment import Aligned, TimedPieces, align, padded
from models.parakeet.training.buffers import n_frames
from models.parakeet.training.data import SAMPLE_RATE_HZ, Utterance, Word, decode, faster, spoken

NO_WORDS: Mapping[str, tuple[Word, ...]] = MappingProxyType({})

SHORT_S = 1.2  # recordings below this are single words, and are said in a row
LONGEST_RUN = 8  # words in a row
PADDED_SHARE = 0.5  # of the streams: silent behind the last word, as what is added at the end of a stream is
SILENT_SHARE = 0.3  # of the streams: no noise at all
LEAST_GAIN, MOST_GAIN = 0.1, 1.5


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """An utterance in memory, once for each tempo."""

    utterance: Utterance
    text: str
    tempos: tuple[Tensor, ...]  # each float32 [n], on the device
    factors: tuple[float, ...]  # how much faster than it was said each is
    words: tuple[Word, ...] | None = None  # None: when each is said is not known


@dataclass(frozen=True, slots=True)
class Placed:
    """A recording's place in a stream."""

    index: int
    tempo: int
    start_sample: int
    end_sample: int
    gain: float


@dataclass(frozen=True, slots=True)
class Stream:
    """What follows what, and how long it all is."""

    placed: tuple[Placed, ...]
    n_samples: int


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Streams side by side, padded with zeros."""

    samples: Tensor  # float32 [B, N]
    n_samples: tuple[int, ...]  # of each row
    tokens: Tensor  # int64 [B, U]
    n_tokens: Tensor  # int64 [B]
    aligned: Aligned | None = None  # where it is known when each word is said, and asked for


@dataclass(frozen=True, slots=True)
class Augmentation:
    """How much the audio and its spelling are varied; `Augmentation.none()` leaves them as they are."""

    tempos: tuple[float, ...] = (0.9, 1.0, 1.1)
    noise_share: float = 0.4  # of the streams, how many get noise that can be heard
    narrow_share: float = 0.2  # how many lose what is above a frequency
    merge_dropout: float = 0.1  # of the tokenizer's merges
    max_pause_s: float = 1.2

    @staticmethod
    def none() -> "Augmentation":
        """Nothing varied; pauses stay, for streams need them."""
        return Augmentation(tempos=(1.0,), noise_share=0.0, narrow_share=0.0, merge_dropout=0.0)


def load(
    utterances: Sequence[Utterance],
    tempos: Sequence[float],
    device: torch.device,
    words: Mapping[str, tuple[Word, ...]] = NO_WORDS,
) -> list[Recording]:
    """Decodes the recordings in threads (libsndfile and the FFT let others run) and puts them on the device."""

    def read(utterance: Utterance) -> Recording:
        samples = decode(utterance.path)
        return Recording(
            utterance,
            spoken(utterance.text),
            tuple(torch.from_numpy(faster(samples, tempo)).to(device) for tempo in tempos),
            tuple(tempos),
            words.get(utterance.utterance_id),
        )

    with ThreadPoolExecutor() as pool:
        return list(pool.map(read, utterances))


def in_a_row(recordings: Sequence[Recording], rng: random.Random) -> list[tuple[int, ...]]:
    """All recordings, shuffled; those of single words in runs by one speaker, as numbers are told."""
    sentences = [(i,) for i, r in enumerate(recordings) if r.utterance.duration_s >= SHORT_S]
    words: dict[str, list[int]] = {}
    for index, recording in enumerate(recordings):
        if recording.utterance.duration_s < SHORT_S:
            words.setdefault(recording.utterance.speaker, []).append(index)
    runs: list[tuple[int, ...]] = []
    for indices in words.values():
        rng.shuffle(indices)
        while indices:
            length = rng.randint(1, LONGEST_RUN)
            runs.append(tuple(indices[:length]))
            indices = indices[length:]
    items = [*sentences, *runs]
    rng.shuffle(items)
    return items


def plan_batches(
    recordings: Sequence[Recording],
    *,
    audio_s: float,
    lengths_s: Sequence[float],
    pause_s: float,
    rng: random.Random,
    is_endless: bool = False,
) -> Iterator[list[Stream]]:
    """Every recording once (or all again before they run out), as batches of about ``audio_s``.

    The streams of a batch have one of the lengths. One that too little is left for gives way to a longer one; what is
    longer than all comes last.
    """
    waiting = in_a_row(recordings, rng)
    n_few = max(1, len(waiting) // 3) if is_endless else 0  # no longer enough to choose streams of a length from
    while waiting:
        drawn_s = rng.choice(lengths_s)
        for length_s in sorted(length_s for length_s in lengths_s if length_s >= drawn_s):
            batch, left = _fill(recordings, waiting, audio_s=audio_s, length_s=length_s, pause_s=pause_s, rng=rng)
            if len(batch) * length_s > audio_s / 2:
                break
        if not batch:
            slowest = max(len(tempo) for item in waiting for index in item for tempo in recordings[index].tempos)
            length_s = slowest / SAMPLE_RATE_HZ * LONGEST_RUN + LONGEST_RUN * pause_s
            batch, left = _fill(recordings, waiting, audio_s=audio_s, length_s=length_s, pause_s=pause_s, rng=rng)
        yield batch
        waiting = left + in_a_row(recordings, rng) if len(left) < n_few else left


def _fill(
    recordings: Sequence[Recording],
    waiting: list[tuple[int, ...]],
    *,
    audio_s: float,
    length_s: float,
    pause_s: float,
    rng: random.Random,
) -> tuple[list[Stream], list[tuple[int, ...]]]:
    """Streams filled one after the other from the front of ``waiting``, and what still waits."""
    length = int(length_s * SAMPLE_RATE_HZ)
    streams: list[Stream] = []
    left: list[tuple[int, ...]] = []
    placed = list[Placed]()
    n_wanted = max(1, int(audio_s / length_s))
    start = _samples(rng, pause_s / 3)
    for position, item in enumerate(waiting):
        more, end = _place(recordings, item, start, pause_s, rng)
        if end > length:
            left.append(item)
            continue
        placed += more
        start = end + _samples(rng, pause_s)
        if start > length * rng.uniform(0.6, 1.0):
            streams.append(_closed(placed, end, length, rng))
            placed, start = list[Placed](), _samples(rng, pause_s / 3)
            if len(streams) == n_wanted:
                return streams, left + waiting[position + 1 :]
    if placed:
        streams.append(_closed(placed, end=placed[-1].end_sample, length=length, rng=rng))
    return streams, left


def _place(
    recordings: Sequence[Recording], item: tuple[int, ...], start: int, pause_s: float, rng: random.Random
) -> tuple[list[Placed], int]:
    """A sentence, or words in a row at one level and tempo, from sample ``start``; also where they end."""
    tempo = rng.randrange(len(recordings[item[0]].tempos))
    gain = LEAST_GAIN * (MOST_GAIN / LEAST_GAIN) ** rng.random()
    gap_s = rng.uniform(0.0, pause_s / 3)
    placed, end = list[Placed](), start
    for index in item:
        start = end + (_samples(rng, gap_s) if placed else 0)
        end = start + len(recordings[index].tempos[tempo])
        placed.append(Placed(index, tempo, start, end, gain))
    return placed, end


def _closed(placed: list[Placed], end: int, length: int, rng: random.Random) -> Stream:
    """Half of the streams end with the speech, as a stream does whose microphone was let go."""
    return Stream(tuple(placed), min(length, end + rng.choice((0, 0, _samples(rng, 0.3), _samples(rng, 1.0)))))


def _samples(rng: random.Random, longest_s: float) -> int:
    return int(rng.uniform(0.0, longest_s) * SAMPLE_RATE_HZ)


def assemble(
    streams: Sequence[Stream],
    recordings: Sequence[Recording],
    tokenizer: Tokenizer,
    augmentation: Augmentation,
    rng: random.Random,
) -> Batch:
    """The streams' audio and labels on the recordings' device."""
    device = recordings[0].tempos[0].device
    samples = torch.zeros((len(streams), max(stream.n_samples for stream in streams)), device=device)
    texts = []
    for row, stream in enumerate(streams):
        for placed in stream.placed:
            source = recordings[placed.index].tempos[placed.tempo]
            target = samples[row, placed.start_sample : placed.end_sample]
            torch.mul(source, placed.gain, out=target)
        texts.append(" ".join(recordings[placed.index].text for placed in stream.placed))
    if augmentation.narrow_share:
        samples = narrowed(samples, augmentation.narrow_share, rng)
    if augmentation.noise_share:
        samples = noisy(samples, augmentation.noise_share, rng)
        for row, stream in enumerate(streams):
            if rng.random() < PADDED_SHARE:
                samples[row, stream.placed[-1].end_sample :] = 0.0
    ids = [encoding.ids for encoding in tokenizer.encode_batch(texts)]
    n_samples = tuple(stream.n_samples for stream in streams)
    n_tokens = torch.tensor([len(row_ids) for row_ids in ids])
    return Batch(
        samples, n_samples, padded([np.asarray(row, dtype=np.int64) for row in ids], 0).to(device), n_tokens.to(device)
    )


def narrowed(samples: Tensor, share: float, rng: random.Random) -> Tensor:
    """A share of the rows without what is above a frequency of 3.4 to 7 kHz, most at the 4 kHz of a telephone."""
    n = 1 << (samples.shape[1] - 1).bit_length()
    chosen = [row for row in range(len(samples)) if rng.random() < share]
    if not chosen:
        return samples
    bands = [4_000.0 if rng.random() < 0.6 else rng.uniform(3_400.0, 7_000.0) for _ in chosen]
    spectrum = torch.fft.rfft(samples[chosen], n)
    frequency = torch.arange(spectrum.shape[1], device=samples.device) * (SAMPLE_RATE_HZ / n)
    spectrum *= frequency[None] < torch.tensor(bands, device=samples.device)[:, None]
    samples[chosen] = torch.fft.irfft(spectrum, n)[:, : samples.shape[1]]
    return samples


def noisy(samples: Tensor, share: float, rng: random.Random) -> Tensor:
    """Rows with noise: a share 8 to 40 dB below their speech, the others 60 to 90 dB below full scale or not at all.

    Half of it is white and half has a falling spectrum (white noise summed up, with a leak).
    """
    white = torch.randn_like(samples)
    brown = torch.nn.functional.avg_pool1d(white[:, None], kernel_size=9, stride=1, padding=4)[:, 0] * 3.0
    level = samples.square().sum(dim=1).div_((samples != 0).sum(dim=1).clamp(min=1)).sqrt_()
    is_loud = torch.tensor([rng.random() < share for _ in samples], device=samples.device)
    is_brown = torch.tensor([rng.random() < 0.5 for _ in samples], device=samples.device)
    loud = level * torch.tensor([10 ** (-rng.uniform(8, 40) / 20) for _ in samples], device=samples.device)
    levels = [0.0 if rng.random() < SILENT_SHARE else 10 ** (-rng.uniform(60, 90) / 20) for _ in samples]
    quiet = torch.tensor(levels, device=samples.device)
    scale = torch.where(is_loud, loud, quiet)
    return samples + torch.where(is_brown[:, None], brown, white) * scale[:, None]


def with_path(
    batch: Batch,
    streams: Sequence[Stream],
    recordings: Sequence[Recording],
    tokenizer: Tokenizer,
    *,
    blank: int,
    longest: int,
) -> Batch:
    """The batch with the path that its words' times say; every recording of it needs them.

    The words are spelled anew, for with dropout a tokenizer spells them as it likes.
    """
    said = [
        [word for placed in stream.placed for word in _said(placed, recordings[placed.index])] for stream in streams
    ]
    encodings = iter(tokenizer.encode_batch([word.text for row in said for word in row]))
    rows = [[TimedPieces(tuple(next(encodings).ids), word.start_s, word.end_s) for word in row] for row in said]
    aligned = align(rows, [n_frames(n) for n in batch.n_samples], blank=blank, longest=longest)
    device = batch.samples.device
    ids = [[piece for word in row for piece in word.ids] for row in rows]
    return replace(
        batch,
        tokens=padded([np.asarray(row, dtype=np.int64) for row in ids], 0).to(device),
        n_tokens=torch.tensor([len(row) for row in ids]).to(device),
        aligned=Aligned(
            *(
                tensor.to(device)
                for tensor in (
                    aligned.pieces,
                    aligned.frames,
                    aligned.n_before,
                    aligned.tokens,
                    aligned.durations,
                    aligned.counts,
                )
            )
        ),
    )


def _said(placed: Placed, recording: Recording) -> list[Word]:
    """A recording's words at their times in the stream."""
    assert recording.words is not None, "recordings without times are left out before"
    start_s, factor = placed.start_sample / SAMPLE_RATE_HZ, recording.factors[placed.tempo]
    return [Word(word.text, start_s + word.start_s / factor, start_s + word.end_s / factor) for word in recording.words]
