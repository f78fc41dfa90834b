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
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from models.parakeet.config import n_frames_of
from models.parakeet.training.alignment import Aligned, TimedPieces, align, padded
from models.parakeet.training.buffers import Contexts
from models.parakeet.training.data import SAMPLE_RATE_HZ, Utterance, Word, decode, faster, spoken

NO_WORDS: Mapping[str, tuple[Word, ...]] = MappingProxyType({})
Sounds = tuple[Tensor, ...]  # a recording at each tempo, each float32 [n]

SHORT_S = 1.2  # recordings below this are single words, and are said in a row
LONGEST_RUN = 8  # words in a row
PADDED_SHARE = 0.5  # of the streams: silent behind the last word, as what is added at the end of a stream is
SILENT_SHARE = 0.3  # of the streams: no noise at all
LEAST_GAIN, MOST_GAIN = 0.1, 1.5


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """An utterance at several tempos; its audio lies apart, on the device."""

    utterance: Utterance
    text: str
    lengths: tuple[int, ...]  # samples at each tempo
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
class Layout:
    """A batch on paper: what sounds where, and its labels. Made apart from the device, and cheap to send."""

    sources: tuple[tuple[int, int], ...]  # recording and tempo of each sound
    rows: NDArray[np.int64]  # of each sound
    starts: NDArray[np.int64]  # of each sound, in its row
    gains: NDArray[np.float32]  # of each sound
    n_samples: tuple[int, ...]  # of each row
    speech_ends: tuple[int, ...]  # of each row, samples
    tokens: NDArray[np.int64]  # [B, U]
    n_tokens: tuple[int, ...]  # of each row
    contexts: Contexts | None = None  # of the buffers that it is to be encoded in; None: whole streams
    aligned: Aligned | None = None  # where it is known when each word is said, and asked for


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Streams side by side, padded with zeros."""

    samples: Tensor  # float32 [B, N]
    n_samples: tuple[int, ...]  # of each row
    tokens: Tensor  # int64 [B, U]
    n_tokens: tuple[int, ...]  # of each row
    contexts: Contexts | None = None
    aligned: Aligned | None = None


@dataclass(frozen=True, slots=True)
class Augmentation:
    """How much the audio and its spelling are varied; `Augmentation.none()` leaves them as they are."""

    tempos: tuple[float, ...] = (0.85, 0.92, 1.0, 1.08, 1.17)
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
) -> tuple[list[Recording], list[Sounds]]:
    """Decodes the recordings in threads (libsndfile lets others run) and puts them on the device at all tempos."""
    recordings: list[Recording] = []
    sounds: list[Sounds] = []
    with ThreadPoolExecutor() as pool:
        decoded = pool.map(lambda utterance: decode(utterance.path), utterances)
        for utterance, samples in zip(utterances, decoded, strict=True):
            there = torch.from_numpy(samples).to(device, non_blocking=True)
            sounds.append(tuple(faster(there, tempo) for tempo in tempos))
            lengths = tuple(len(sound) for sound in sounds[-1])
            known = words.get(utterance.utterance_id)
            recordings.append(Recording(utterance, spoken(utterance.text), lengths, tuple(tempos), known))
    return recordings, sounds


def in_a_row(recordings: Sequence[Recording], rng: random.Random, *, with_times: bool = False) -> list[tuple[int, ...]]:
    """All recordings (or those whose words' times are known), shuffled; single words in runs by one speaker."""
    usable = [(i, r) for i, r in enumerate(recordings) if r.words is not None or not with_times]
    sentences = [(i,) for i, r in usable if r.utterance.duration_s >= SHORT_S]
    words: dict[str, list[int]] = {}
    for index, recording in usable:
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
    with_times: bool = False,
) -> Iterator[list[Stream]]:
    """Every recording once (or all again before they run out), as batches of about ``audio_s``.

    The streams of a batch have one of the lengths. One that too little is left for gives way to a longer one; what is
    longer than all comes last.
    """
    waiting = in_a_row(recordings, rng, with_times=with_times)
    n_few = max(1, len(waiting) // 3) if is_endless else 0  # no longer enough to choose streams of a length from
    while waiting:
        drawn_s = rng.choice(lengths_s)
        for length_s in sorted(length_s for length_s in lengths_s if length_s >= drawn_s):
            batch, left = _fill(recordings, waiting, audio_s=audio_s, length_s=length_s, pause_s=pause_s, rng=rng)
            if len(batch) * length_s > audio_s / 2:
                break
        if not batch:
            slowest = max(length for item in waiting for index in item for length in recordings[index].lengths)
            length_s = slowest / SAMPLE_RATE_HZ * LONGEST_RUN + LONGEST_RUN * pause_s
            batch, left = _fill(recordings, waiting, audio_s=audio_s, length_s=length_s, pause_s=pause_s, rng=rng)
        yield batch
        waiting = left + in_a_row(recordings, rng, with_times=with_times) if len(left) < n_few else left


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
    tempo = rng.randrange(len(recordings[item[0]].lengths))
    gain = LEAST_GAIN * (MOST_GAIN / LEAST_GAIN) ** rng.random()
    gap_s = rng.uniform(0.0, pause_s / 3)
    placed, end = list[Placed](), start
    for index in item:
        start = end + (_samples(rng, gap_s) if placed else 0)
        end = start + recordings[index].lengths[tempo]
        placed.append(Placed(index, tempo, start, end, gain))
    return placed, end


def _closed(placed: list[Placed], end: int, length: int, rng: random.Random) -> Stream:
    """Half of the streams end with the speech, as a stream does whose microphone was let go."""
    return Stream(tuple(placed), min(length, end + rng.choice((0, 0, _samples(rng, 0.3), _samples(rng, 1.0)))))


def _samples(rng: random.Random, longest_s: float) -> int:
    return int(rng.uniform(0.0, longest_s) * SAMPLE_RATE_HZ)


def lay_out(
    streams: Sequence[Stream],
    recordings: Sequence[Recording],
    tokenizer: Tokenizer,
    contexts: Contexts | None = None,
) -> Layout:
    """The streams as a batch on paper."""
    placed = [(row, sound) for row, stream in enumerate(streams) for sound in stream.placed]
    texts = [" ".join(recordings[sound.index].text for sound in stream.placed) for stream in streams]
    ids = [np.asarray(encoding.ids, dtype=np.int64) for encoding in tokenizer.encode_batch(texts)]
    return Layout(
        sources=tuple((sound.index, sound.tempo) for _, sound in placed),
        rows=np.array([row for row, _ in placed]),
        starts=np.array([sound.start_sample for _, sound in placed]),
        gains=np.array([sound.gain for _, sound in placed], dtype=np.float32),
        n_samples=tuple(stream.n_samples for stream in streams),
        speech_ends=tuple(stream.placed[-1].end_sample for stream in streams),
        tokens=padded(ids, 0).numpy(),
        n_tokens=tuple(len(row) for row in ids),
        contexts=contexts,
    )


def assemble(layout: Layout, sounds: Sequence[Sounds], augmentation: Augmentation, rng: random.Random) -> Batch:
    """The streams' audio and labels on the sounds' device, in a dozen operations."""
    parts = [sounds[index][tempo] for index, tempo in layout.sources]
    device = parts[0].device
    n_rows, longest = len(layout.n_samples), max(layout.n_samples)
    lengths = np.array([len(part) for part in parts])
    shifts = layout.rows * longest + layout.starts - (np.cumsum(lengths) - lengths)
    counts = torch.from_numpy(lengths).to(device, non_blocking=True)
    n_all = int(lengths.sum())

    def spread(values: Tensor) -> Tensor:
        return torch.repeat_interleave(values.to(device, non_blocking=True), counts, output_size=n_all)

    samples = torch.zeros(n_rows * longest, device=device)
    place = torch.arange(n_all, device=device) + spread(torch.from_numpy(shifts))
    samples[place] = torch.cat(parts) * spread(torch.from_numpy(layout.gains))
    samples = samples.view(n_rows, longest)
    if augmentation.narrow_share:
        samples = narrowed(samples, augmentation.narrow_share, rng)
    if augmentation.noise_share:
        samples = noisy(samples, augmentation.noise_share, rng)
        ends = [end if rng.random() < PADDED_SHARE else longest for end in layout.speech_ends]
        samples = samples * (
            torch.arange(longest, device=device) < torch.tensor(ends).to(device, non_blocking=True)[:, None]
        )
    aligned = layout.aligned.to(device) if layout.aligned else None
    tokens = torch.from_numpy(layout.tokens).to(device, non_blocking=True)
    return Batch(samples, layout.n_samples, tokens, layout.n_tokens, layout.contexts, aligned)


def narrowed(samples: Tensor, share: float, rng: random.Random) -> Tensor:
    """A share of the rows without what is above a frequency of 3.4 to 7 kHz, most at the 4 kHz of a telephone."""
    n = 1 << (samples.shape[1] - 1).bit_length()
    rows = [row for row in range(len(samples)) if rng.random() < share]
    if not rows:
        return samples
    bands = [4_000.0 if rng.random() < 0.6 else rng.uniform(3_400.0, 7_000.0) for _ in rows]
    chosen = torch.tensor(rows).to(samples.device, non_blocking=True)
    spectrum = torch.fft.rfft(samples[chosen], n)
    frequency = torch.arange(spectrum.shape[1], device=samples.device) * (SAMPLE_RATE_HZ / n)
    spectrum *= frequency[None] < torch.tensor(bands).to(samples.device, non_blocking=True)[:, None]
    samples[chosen] = torch.fft.irfft(spectrum, n)[:, : samples.shape[1]]
    return samples


def noisy(samples: Tensor, share: float, rng: random.Random) -> Tensor:
    """Rows with noise: a share 8 to 40 dB below their speech, the others 60 to 90 dB below full scale or not at all.

    Half of it is white and half has a falling spectrum (white noise summed up, with a leak).
    """
    white = torch.randn_like(samples)
    brown = torch.nn.functional.avg_pool1d(white[:, None], kernel_size=9, stride=1, padding=4)[:, 0] * 3.0
    level = samples.square().sum(dim=1).div_((samples != 0).sum(dim=1).clamp(min=1)).sqrt_()
    rows = range(len(samples))
    is_loud = torch.tensor([rng.random() < share for _ in rows]).to(samples.device, non_blocking=True)
    is_brown = torch.tensor([rng.random() < 0.5 for _ in rows]).to(samples.device, non_blocking=True)
    loud = level * torch.tensor([10 ** (-rng.uniform(8, 40) / 20) for _ in rows]).to(samples.device, non_blocking=True)
    levels = [0.0 if rng.random() < SILENT_SHARE else 10 ** (-rng.uniform(60, 90) / 20) for _ in rows]
    quiet = torch.tensor(levels).to(samples.device, non_blocking=True)
    scale = torch.where(is_loud, loud, quiet)
    return samples + torch.where(is_brown[:, None], brown, white) * scale[:, None]


def with_path(
    layout: Layout,
    streams: Sequence[Stream],
    recordings: Sequence[Recording],
    tokenizer: Tokenizer,
    *,
    blank: int,
    longest: int,
) -> Layout:
    """The layout with the path that its words' times say; every recording of it needs them.

    The words are spelled anew, for with dropout a tokenizer spells them as it likes.
    """
    said = [
        [word for placed in stream.placed for word in _said(placed, recordings[placed.index])] for stream in streams
    ]
    encodings = iter(tokenizer.encode_batch([word.text for row in said for word in row]))
    rows = [[TimedPieces(tuple(next(encodings).ids), word.start_s, word.end_s) for word in row] for row in said]
    ids = [np.array([piece for word in row for piece in word.ids], dtype=np.int64) for row in rows]
    return replace(
        layout,
        tokens=padded(ids, 0).numpy(),
        n_tokens=tuple(len(row) for row in ids),
        aligned=align(rows, [n_frames_of(n) for n in layout.n_samples], blank=blank, longest=longest),
    )


def _said(placed: Placed, recording: Recording) -> list[Word]:
    """A recording's words at their times in the stream."""
    assert recording.words is not None, "recordings without times are left out before"
    start_s, factor = placed.start_sample / SAMPLE_RATE_HZ, recording.factors[placed.tempo]
    return [Word(word.text, start_s + word.start_s / factor, start_s + word.end_s / factor) for word in recording.words]
