"""What chunk, left and right context cost and bring: error rate, delay and CPU time of a Parakeet, on a virtual clock.

Speakers whom the small model has never heard, joined into streams with pauses, are played in real time through a
session each; a decode takes the CPU time it took on one thread. The yardstick is the same session with a second pass:
every utterance in one piece. Then words cut off by a flush, with more and less silence added behind them. Needs the
list of recordings in ``../shared/train``, beside the checkout.
"""

import argparse
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

import jiwer
import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.remembering import RememberingDetector
from benchmarks.report import heading
from gateway import messages as m
from gateway.config import SessionConfig
from gateway.session import ServedModel, Session
from gateway.simulation import Seen, Simulation
from models.catalog import load_engine
from models.parakeet import engine as parakeet
from models.parakeet.config import FRAME_SAMPLES
from models.parakeet.training.data import SPLIT_SEED, decode, held_out_speakers, read_list, spoken
from streaming.engine import Chunk, DecodeOptions, EngineStream, ModelCard, SpeechEngine, TransducerContext
from streaming.transcript import Hypothesis, text_of
from vad.audio import SAMPLE_RATE_HZ, SpeechSpan, samples_from_ms
from vad.detector import SpeechDetector
from vad.gate import GateSettings
from vad.silero import SileroDetector

FRAME_S = FRAME_SAMPLES / SAMPLE_RATE_HZ
DEFAULT_LIST = Path(__file__).parents[2] / "shared" / "train" / "train.jsonl"
PACKET_SAMPLES = 800  # 50 ms
STREAM_S = 60.0
MIN_PAUSE_S, MAX_PAUSE_S = 0.2, 1.2
DIGITS_IN_A_ROW = 5  # before and with the one that a flush follows
GAPS_MS = (0, 100, 200)
PADDINGS_MS = (0, 160, 320, 480, 960)

CHUNKS_MS = (160, 240, 320, 400, 480, 560, 640, 800, 960, 1_200, 1_600, 2_000)
FEW_CHUNKS_MS = (160, 640, 2_000)
LEFTS_MS = (480, 960, 1_600, 2_400, 4_000, 5_600, 8_000, 10_000)
RIGHTS_MS = (0, 80, 160, 320, 480, 640, 960, 1_280, 2_000)

Samples = NDArray[np.float32]  # [n_samples] at 16 kHz


@dataclass(frozen=True, slots=True, eq=False)
class SpokenStream:
    """Sound and what is said in each of the recordings that it is made of."""

    samples: Samples
    texts: tuple[str, ...]

    @property
    def text(self) -> str:
        """All that is said."""
        return " ".join(self.texts)


@dataclass(frozen=True, slots=True)
class Setting:
    """One column of choices; in ms."""

    left_ms: int
    chunk_ms: int
    right_ms: int
    second_pass: bool = False

    def context_of(self, context: TransducerContext) -> TransducerContext:
        """The model's context with these lengths instead."""
        return replace(
            context,
            left_samples=samples_from_ms(self.left_ms),
            chunk_samples=samples_from_ms(self.chunk_ms),
            right_samples=samples_from_ms(self.right_ms),
        )


@dataclass(slots=True)
class Figures:
    """What one setting gave over all streams."""

    references: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    n_words: list[int] = field(default_factory=list)  # of each recording
    n_errors: list[int] = field(default_factory=list)  # of each recording
    word_times_s: list[list[tuple[str, float]]] = field(default_factory=list)  # of each stream: words and starts
    settle_s: list[float] = field(default_factory=list)  # from a word's end to the message that settles it
    final_s: list[float] = field(default_factory=list)  # from the end of the voice to the final
    cpu_s: float = 0.0
    audio_s: float = 0.0

    @property
    def error_rate(self) -> float:
        """Errors for each reference word."""
        return float(jiwer.wer(self.references, self.texts))

    def differs_from(self, other: "Figures") -> tuple[int, int, int]:
        """Words substituted, left out and put in, compared with what ``other`` wrote."""
        compared = jiwer.process_words(other.texts, self.texts)
        return compared.substitutions, compared.deletions, compared.insertions

    def interval_against(self, other: "Figures", *, n_draws: int = 4_000, seed: int = 0) -> tuple[float, float]:
        """Between which differences of the error rates, this one's less ``other``'s, 95 % of drawn samples lie.

        Recordings are drawn with replacement, each with what both made of it (a paired bootstrap, percentiles).
        """
        n_words, more = np.array(self.n_words), np.array(self.n_errors) - np.array(other.n_errors)
        rng = np.random.default_rng(seed)
        drawn = rng.multinomial(len(more), np.full(len(more), 1 / len(more)), size=n_draws)
        low, high = np.percentile(drawn @ more / (drawn @ n_words), (2.5, 97.5))
        return float(low), float(high)

    def start_differences_s(self, other: "Figures") -> list[float]:
        """How far the starts of words that both wrote lie apart."""
        return [
            abs(ours_s - theirs_s)
            for ours, theirs in zip(self.word_times_s, other.word_times_s, strict=True)
            for ours_s, theirs_s in starts_of_equals(ours, theirs)
        ]


class TimedEngine:
    """An engine under another card, that keeps how long its last decode took."""

    def __init__(self, engine: SpeechEngine, card: ModelCard) -> None:
        self._engine = engine
        self.card = card
        self.backend = engine.backend
        self.why = engine.why
        self.last_s = 0.0

    def open(self, options: DecodeOptions) -> EngineStream:
        """See ``SpeechEngine``."""
        return self._engine.open(options)

    def decode(self, batch: Sequence[tuple[EngineStream, Chunk]]) -> list[Hypothesis]:
        """See ``SpeechEngine``."""
        began_s = time.process_time()
        hypotheses = self._engine.decode(batch)
        self.last_s = time.process_time() - began_s
        return hypotheses

    def close(self, stream: EngineStream) -> None:
        """See ``SpeechEngine``."""
        self._engine.close(stream)


# ---------------------------------------------------------------- what is played


def held_out_streams(path: Path, minutes: float, *, seed: int = 0) -> list[SpokenStream]:
    """Recordings of the speakers kept apart, each speaker in streams of about a minute, in turn until it is enough."""
    everything = read_list(path)
    apart = held_out_speakers(everything, seed=SPLIT_SEED)
    rng = random.Random(seed)
    by_speaker: dict[str, list[int]] = {}
    for index, utterance in enumerate(everything):
        if utterance.speaker in apart:
            by_speaker.setdefault(utterance.speaker, []).append(index)
    for indices in by_speaker.values():
        rng.shuffle(indices)
    streams: list[SpokenStream] = []
    while sum(len(stream.samples) for stream in streams) < minutes * 60 * SAMPLE_RATE_HZ and any(by_speaker.values()):
        for indices in by_speaker.values():
            pieces: list[Samples] = [silence(0.5)]
            texts = []
            while indices and sum(map(len, pieces)) < STREAM_S * SAMPLE_RATE_HZ:
                utterance = everything[indices.pop()]
                pieces += [decode(utterance.path), silence(rng.uniform(MIN_PAUSE_S, MAX_PAUSE_S))]
                texts.append(spoken(utterance.text))
            if texts:
                streams.append(SpokenStream(np.concatenate([*pieces, silence(0.5)]), tuple(texts)))
    return streams


def silence(duration_s: float) -> Samples:
    """Zeros."""
    return np.zeros(int(duration_s * SAMPLE_RATE_HZ), np.float32)


# ---------------------------------------------------------------- one setting


def play(
    engine: SpeechEngine,
    detector: SpeechDetector,
    setting: Setting,
    samples: Samples,
    *,
    last: Sequence[m.ClientMessage] = (m.Bye(),),
) -> tuple[list[Seen], float]:
    """What a client sees of ``samples`` in real time and ``last`` right behind them; the CPU seconds of its decodes."""
    assert engine.card.transducer is not None, f"{engine.card.name} does not decode in chunks"
    card = replace(engine.card, transducer=setting.context_of(engine.card.transducer))
    timed = TimedEngine(engine, card)
    session = Session(
        "sweep",
        {card.name: ServedModel(card, timed)},
        detector.initial_state(),
        config=SessionConfig(second_pass=setting.second_pass),
        gate=GateSettings(hangover_ms=m.DEFAULT_HANGOVER_MS),
        now_s=0.0,
    )
    simulation = Simulation(session, timed, detector, cost_s=lambda job: timed.last_s)
    seen = simulation.run(in_real_time(samples, last))
    return seen, sum(decoded.cost_s for decoded in simulation.decodes)


def in_real_time(samples: Samples, last: Sequence[m.ClientMessage]) -> Iterator[tuple[float, m.ClientMessage]]:
    """Hello, each packet when its last sample was spoken, then ``last``."""
    yield 0.0, m.Hello(audio=m.AudioSpec("f32le", SAMPLE_RATE_HZ))
    for at in range(0, len(samples), PACKET_SAMPLES):
        packet = samples[at : at + PACKET_SAMPLES]
        yield (at + len(packet)) / SAMPLE_RATE_HZ, m.Audio(packet.astype("<f4").tobytes())
    for message in last:
        yield len(samples) / SAMPLE_RATE_HZ, message


def measure(
    engine: SpeechEngine, detector: SpeechDetector, setting: Setting, streams: Sequence[SpokenStream]
) -> Figures:
    """All streams with one setting."""
    figures = Figures()
    for stream in streams:
        seen, cpu_s = play(engine, detector, setting, stream.samples)
        finals = [item.message for item in seen if isinstance(item.message, m.Final)]
        figures.references.append(stream.text)
        figures.texts.append(spoken(" ".join(final.text for final in finals)))
        figures.n_words += [len(text.split()) for text in stream.texts]
        figures.n_errors += errors_of_each(stream.texts, figures.texts[-1])
        words = [(spoken(word.text), word.start_s or 0.0) for final in finals for word in final.words]
        figures.word_times_s.append([(word, start_s) for word, start_s in words if word and " " not in word])
        figures.settle_s += settle_delays(seen)
        figures.final_s += final_delays(seen)
        figures.cpu_s += cpu_s
        figures.audio_s += len(stream.samples) / SAMPLE_RATE_HZ
    return figures


def starts_of_equals(
    first: Sequence[tuple[str, float]], second: Sequence[tuple[str, float]]
) -> list[tuple[float, float]]:
    """Both starts of each word that is in both texts, when as few words as possible are put in, left out or changed.

    Of such alignments the one whose starts lie nearest: else a "the" would be compared with another one near by.
    """
    # The least (edits, seconds apart) behind each pair of places, and where the way to it came from.
    costs = [[(j, 0.0) for j in range(len(second) + 1)]]
    for i, (word, start_s) in enumerate(first):
        row = [(i + 1, 0.0)]
        for j, (other, other_s) in enumerate(second):
            n_edits, apart_s = costs[i][j]
            is_same = word == other
            row.append(
                min(
                    (n_edits + (not is_same), apart_s + is_same * abs(start_s - other_s)),
                    _edited(costs[i][j + 1]),
                    _edited(row[j]),
                )
            )
        costs.append(row)
    starts: list[tuple[float, float]] = []
    i, j = len(first), len(second)
    while i and j:
        if costs[i][j] == _edited(costs[i - 1][j]):
            i -= 1
        elif costs[i][j] == _edited(costs[i][j - 1]):
            j -= 1
        else:
            i, j = i - 1, j - 1
            if first[i][0] == second[j][0]:
                starts.append((first[i][1], second[j][1]))
    return starts[::-1]


def _edited(cost: tuple[int, float]) -> tuple[int, float]:
    return cost[0] + 1, cost[1]


def errors_of_each(references: Sequence[str], text: str) -> list[int]:
    """How many errors of ``text``, heard of all ``references``, are in which; one put in counts for what follows."""
    ends = np.cumsum([len(reference.split()) for reference in references])
    n_errors = [0] * len(references)
    for piece in jiwer.process_words(" ".join(references), text).alignments[0]:
        if piece.type == "insert":
            places = [piece.ref_start_idx] * (piece.hyp_end_idx - piece.hyp_start_idx)
        else:
            places = [] if piece.type == "equal" else list(range(piece.ref_start_idx, piece.ref_end_idx))
        for place in places:
            n_errors[min(int(np.searchsorted(ends, place, side="right")), len(references) - 1)] += 1
    return n_errors


def settle_delays(seen: Sequence[Seen]) -> list[float]:
    """From the end of each word to the message in which it is settled first."""
    delays: list[float] = []
    n_settled: dict[int, int] = {}
    for item in seen:
        if isinstance(item.message, m.Partial | m.Final):
            segment = item.message
            for word in segment.words[n_settled.get(segment.segment, 0) : segment.n_committed]:
                delays.append(item.at_s - (word.end_s or 0.0))
            n_settled[segment.segment] = max(n_settled.get(segment.segment, 0), segment.n_committed)
    return delays


def final_delays(seen: Sequence[Seen]) -> list[float]:
    """From the end of the voice to the final; only of utterances that silence ended."""
    delays: list[float] = []
    voice_end_s: float | None = None
    for item in seen:
        match item.message:
            case m.SpeechEnded(speech_end_s=speech_end_s):
                voice_end_s = speech_end_s
            case m.Final(reason="silence") if voice_end_s is not None:
                delays.append(item.at_s - voice_end_s)
                voice_end_s = None
    return delays


HEADER = (
    "| left ms | chunk ms | right ms | word errors % | against one piece, points (95 %) "
    "| put in / left out / other words | starts within a frame, % | settled after, median / p95 s "
    "| final after the voice, median / p95 s | CPU s/s |\n|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
)


def row(setting: Setting, figures: Figures, whole: Figures) -> str:
    """One line of a table."""
    substituted, deleted, inserted = figures.differs_from(whole)
    differences = figures.start_differences_s(whole)
    low, high = figures.interval_against(whole)
    lengths = " | ".join(f"{ms:,}" for ms in (setting.left_ms, setting.chunk_ms, setting.right_ms))
    return (
        f"| {lengths} | {100 * figures.error_rate:.2f} | {100 * (figures.error_rate - whole.error_rate):+.2f} "
        f"({100 * low:+.2f} to {100 * high:+.2f}) "
        f"| {inserted} / {deleted} / {substituted} | {within_a_frame(differences)} "
        f"| {percentile(figures.settle_s, 50):.2f} / {percentile(figures.settle_s, 95):.2f} "
        f"| {percentile(figures.final_s, 50):.2f} / {percentile(figures.final_s, 95):.2f} "
        f"| {figures.cpu_s / figures.audio_s:.3f} |"
    )


def within_a_frame(differences_s: Sequence[float]) -> str:
    """The share of words that begin within a frame of where they begin in one piece, and how far off the others do."""
    others = [round(1_000 * each) for each in differences_s if each > FRAME_S + 1e-6]
    share = f"{100 * (1 - len(others) / len(differences_s)):.1f}" if differences_s else "-"
    return f"{share} (else up to {max(others)} ms)" if others else share


def percentile(values: Sequence[float], percent: int) -> float:
    """Nearest rank; NaN of nothing."""
    return sorted(values)[round((len(values) - 1) * percent / 100)] if values else float("nan")


# ---------------------------------------------------------------- words at a flush


@dataclass(frozen=True, slots=True, eq=False)
class Cut:
    """Speech whose last word is ``word``; behind ``end_sample`` there is silence."""

    samples: Samples
    word: str
    end_sample: int


def cuts(path: Path, n_cuts: int, *, seed: int = 0) -> list[Cut]:
    """Digits in a row by the speakers kept apart, recorded one by one and cut close: their ends are words' ends."""
    everything = read_list(path)
    apart = held_out_speakers(everything, seed=SPLIT_SEED)
    digits = [each for each in everything if each.speaker in apart and " " not in spoken(each.text)]
    rng = random.Random(seed)
    found: list[Cut] = []
    for _ in range(n_cuts if digits else 0):
        run = rng.choices(digits, k=DIGITS_IN_A_ROW)
        pieces = [silence(0.5)]
        for digit in run:
            pieces += [silence(rng.uniform(0.05, MIN_PAUSE_S)), decode(digit.path)]
        samples = np.concatenate(pieces)
        found.append(Cut(np.concatenate([samples, silence(max(GAPS_MS) / 1_000)]), spoken(run[-1].text), len(samples)))
    return found


def flushed_words(
    engine: SpeechEngine, detector: SpeechDetector, setting: Setting, words: Sequence[Cut], gap_ms: int
) -> int:
    """How many words are the last of what is heard when a flush comes ``gap_ms`` behind their end."""
    n_kept = 0
    for cut in words:
        samples = cut.samples[: cut.end_sample + samples_from_ms(gap_ms)]
        seen, _ = play(engine, detector, setting, samples, last=(m.Flush("f"), m.Bye()))
        finals = [item.message for item in seen if isinstance(item.message, m.Final)]
        n_kept += ends_with(" ".join(final.text for final in finals), cut.word)
    return n_kept


def offline_words(engine: SpeechEngine, words: Sequence[Cut], gap_ms: int) -> int:
    """The same in one piece, without a session or a detector."""
    pieces = [cut.samples[: cut.end_sample + samples_from_ms(gap_ms)] for cut in words]
    return sum(ends_with(one_piece(engine, piece), cut.word) for piece, cut in zip(pieces, words, strict=True))


def padded_words(engine: SpeechEngine, words: Sequence[Cut], gap_ms: int, padding_ms: int) -> int:
    """``offline_words`` with another length of the silence that the engine adds behind what is final."""
    with patch.object(parakeet, "PADDING_SAMPLES", samples_from_ms(padding_ms)):
        return offline_words(engine, words, gap_ms)


def one_piece(engine: SpeechEngine, samples: Samples) -> str:
    """The text of one decode."""
    stream = engine.open(DecodeOptions())
    [hypothesis] = engine.decode([(stream, Chunk(SpeechSpan(0, len(samples)), samples, is_final=True, is_first=True))])
    engine.close(stream)
    return text_of(hypothesis.words)


def ends_with(text: str, word: str) -> bool:
    """Whether ``word`` is the last of ``text``."""
    return spoken(text).split()[-1:] == [word]


# ---------------------------------------------------------------- all of it


def main() -> None:
    """Sweep chunk, left and right context, then flushes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="parakeet-tiny")
    parser.add_argument("--list", type=Path, default=DEFAULT_LIST)
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--cuts", type=int, default=60, help="words that a flush cuts off")
    parser.add_argument("--parts", nargs="+", default=["chunk", "left", "right", "flush"])
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    engine, detector = load_engine(arguments.model, n_threads=1), RememberingDetector(SileroDetector())
    context = engine.card.transducer
    assert context is not None, f"{arguments.model} does not decode in chunks"
    usual = Setting(context.left_samples // 16, context.chunk_samples // 16, context.right_samples // 16)
    print(heading(f"{arguments.model}: chunk, left and right context"))
    if set(arguments.parts) & {"chunk", "left", "right"}:
        sweep(engine, detector, usual, held_out_streams(arguments.list, arguments.minutes), arguments.parts)
    if "flush" in arguments.parts:
        flushes(engine, detector, usual, cuts(arguments.list, arguments.cuts))


def sweep(
    engine: SpeechEngine, detector: SpeechDetector, usual: Setting, streams: Sequence[SpokenStream], parts: list[str]
) -> None:
    """Tables of error rates and delays."""
    whole = measure(engine, detector, replace(usual, second_pass=True), streams)
    n_words = sum(len(text.split()) for text in whole.references)
    print(f"{len(streams)} streams, {whole.audio_s / 60:.1f} minutes, {n_words} words, of speakers never trained on.")
    print(f"In one piece (second pass, the same utterances): {100 * whole.error_rate:.2f} % word errors.\n")
    tables = {
        "chunk": ("Chunk", [replace(usual, chunk_ms=ms) for ms in CHUNKS_MS]),
        "left": ("Left context", [replace(usual, left_ms=ms) for ms in LEFTS_MS]),
        "right": ("Right context", [replace(usual, right_ms=ms) for ms in RIGHTS_MS]),
    }
    for part in [part for part in tables if part in parts]:
        title, settings = tables[part]
        print(f"## {title}\n\n{HEADER}")
        for setting in settings:
            print(row(setting, measure(engine, detector, setting, streams), whole), flush=True)
        print()


def flushes(engine: SpeechEngine, detector: SpeechDetector, usual: Setting, words: Sequence[Cut]) -> None:
    """Tables of last words."""
    print("## Last words at a flush\n")
    print(f"Of {len(words)} digits, each the last of {DIGITS_IN_A_ROW}, how many are heard as the last word.\n")
    titles = [*(f"streamed, {ms} ms chunks" for ms in FEW_CHUNKS_MS), "second pass"]
    titles += [f"one piece, {ms:,} ms added" for ms in PADDINGS_MS]
    print(f"| flush behind the word by | {' | '.join(titles)} |\n|---|{'---:|' * len(titles)}")
    settings = [*(replace(usual, chunk_ms=ms) for ms in FEW_CHUNKS_MS), replace(usual, second_pass=True)]
    for gap_ms in GAPS_MS:
        counts = [flushed_words(engine, detector, setting, words, gap_ms) for setting in settings]
        counts += [padded_words(engine, words, gap_ms, padding_ms) for padding_ms in PADDINGS_MS]
        print(f"| {gap_ms} ms | {' | '.join(map(str, counts))} |", flush=True)


if __name__ == "__main__":
    main()
