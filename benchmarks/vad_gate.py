"""What the speech gate keeps, drops and costs, on recordings.

Run from the project's root; prints Markdown:

    python -m benchmarks.vad_gate > benchmarks/results/vad_gate.md

A word counts as heard if a span holds half of it, and as whole if a span holds 90 %. Words by forced alignment often
reach into the silence behind them, so that a word may be heard whole and not count as such. Times in ms.
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.report import heading
from gateway.audio_file import read_audio
from vad.audio import SAMPLE_RATE_HZ, samples_from_ms, seconds
from vad.detector import SpeechDetector
from vad.framer import WINDOW_SAMPLES, Framer, padded
from vad.gate import Gate, GateSettings, SpeechEnded, SpeechStarted
from vad.levels import TwoLevelDetector
from vad.silero import SileroDetector

DEFAULT_MANIFEST = Path(__file__).parents[2] / "shared" / "audio" / "manifest.jsonl"
HOP_SAMPLES = samples_from_ms(10)
VOICE_RANGE_DB = 25.0  # a word's voice is over where its level stays this far below its loudest 10 ms
SETTINGS = (
    GateSettings(),
    GateSettings(min_speech_ms=64),
    GateSettings(min_speech_ms=160),
    GateSettings(negative_threshold=0.3),
    GateSettings(threshold=0.5, negative_threshold=0.35),
    GateSettings(threshold=0.3, negative_threshold=0.15),
    GateSettings(threshold=0.6),
    GateSettings(post_roll_ms=320),
)


@dataclass(frozen=True, slots=True)
class Word:
    """A word of the reference and where its voice ends, in samples."""

    text: str
    start_sample: int
    end_sample: int
    voice_end_sample: int


@dataclass(frozen=True, slots=True, eq=False)
class Clip:
    """A recording, its words if their times are known, and what the detector makes of it."""

    clip_id: str
    kind: str
    n_samples: int
    peak_dbfs: float
    words: tuple[Word, ...]
    probabilities: NDArray[np.float32]  # [n_windows]


@dataclass(frozen=True, slots=True)
class Span:
    """What the gate said about one stretch of speech."""

    start_sample: int
    end_sample: int
    onset_sample: int
    speech_end_sample: int
    known_at_sample: int
    was_forced: bool  # by the end of the clip


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--manifest", type=Path, default=DEFAULT_MANIFEST)
    arguments = parser.parse_args()
    one_level = SileroDetector()
    detector = TwoLevelDetector(one_level)
    clips = list(read_clips(arguments.manifest, detector))
    print(heading("The speech gate on recordings"))
    print(f"One thread. {len(clips)} clips, {sum(seconds(clip.n_samples) for clip in clips) / 60:.0f} minutes.\n")
    _print_non_speech(clips)
    _print_settings(clips)
    _print_quieter(arguments.manifest, {"at one level": one_level, "at two": detector})
    _print_kinds(clips)
    _print_lost_words(clips)
    _print_hangovers(clips)
    _print_times(clips)
    _print_cost(detector)


def read_clips(manifest: Path, detector: SpeechDetector, *, quieter_db: int = 0) -> Iterator[Clip]:
    """Every recording but those that test readers of file formats, scored at its level or ``quieter_db`` below."""
    for row in map(json.loads, manifest.read_text(encoding="utf-8").splitlines()):
        if row["kind"] != "formats":
            samples = read_audio(manifest.parent / row["file"])[0] * np.float32(10 ** (-quieter_db / 20))
            words = tuple(_timed_word(samples, *word) for word in row.get("words") or () if word[2] > word[1])
            peak_dbfs = 20 * float(np.log10(np.abs(samples).max() + 1e-9))
            yield Clip(row["id"], row["kind"], len(samples), peak_dbfs, words, _score(detector, samples))


def _timed_word(samples: NDArray[np.float32], text: str, start_s: float, end_s: float) -> Word:
    start, end = round(start_s * SAMPLE_RATE_HZ), round(end_s * SAMPLE_RATE_HZ)
    n_hops = (min(end, len(samples)) - start) // HOP_SAMPLES
    hops = samples[start : start + n_hops * HOP_SAMPLES].reshape(-1, HOP_SAMPLES)
    levels_db = 10 * np.log10(np.mean(hops**2, axis=1) + 1e-12)
    voiced = np.flatnonzero(levels_db > levels_db.max(initial=-120.0) - VOICE_RANGE_DB)
    return Word(text, start, end, start + (int(voiced[-1]) + 1) * HOP_SAMPLES if len(voiced) else end)


def _score(detector: SpeechDetector, samples: NDArray[np.float32]) -> NDArray[np.float32]:
    framer = Framer()
    windows = [frame.samples for frame in framer.push(samples)]
    rest = framer.flush()
    if rest is not None:
        windows.append(padded(rest.samples))
    [(probabilities, _)] = detector.score([(detector.initial_state(), np.stack(windows))])
    return probabilities


def _spans_of(clip: Clip, settings: GateSettings) -> list[Span]:
    gate, spans, started = Gate(settings), [], SpeechStarted(0, 0)
    n_windows = len(clip.probabilities)
    for index in range(n_windows + 1):
        was_forced = index == n_windows
        now = clip.n_samples if was_forced else (index + 1) * WINDOW_SAMPLES
        events = (
            gate.force_end(now) if was_forced else gate.push(index * WINDOW_SAMPLES, float(clip.probabilities[index]))
        )
        for event in events:
            if isinstance(event, SpeechStarted):
                started = event
            elif isinstance(event, SpeechEnded):
                times = (started.start_sample, event.end_sample, started.onset_sample, event.speech_end_sample, now)
                spans.append(Span(*times, was_forced))
    return spans


def _share_inside(word: Word, spans: Sequence[Span]) -> float:
    inside = sum(max(0, min(word.end_sample, s.end_sample) - max(word.start_sample, s.start_sample)) for s in spans)
    return inside / (word.end_sample - word.start_sample)


def _print_non_speech(clips: Sequence[Clip]) -> None:
    print("## Clips without speech, default settings\n")
    _print_row("clip", "peak dBFS", "highest probability", "windows ≥ 0.5", "seconds in spans")
    _print_row(*["---"] * 5)
    for clip in sorted(_of_kind(clips, "nonspeech"), key=lambda clip: -clip.probabilities.max()):
        in_spans_s = sum(seconds(span.end_sample - span.start_sample) for span in _spans_of(clip, GateSettings()))
        highest, n_above = clip.probabilities.max(), int((clip.probabilities >= 0.5).sum())
        _print_row(clip.clip_id, f"{clip.peak_dbfs:.0f}", f"{highest:.2f}", n_above, f"{in_spans_s:.2f}")


def _print_settings(clips: Sequence[Clip]) -> None:
    print("\n## Settings\n")
    _print_row("settings", "words lost", "words not whole", "of", "seconds of non-speech in spans", "spans")
    _print_row(*["---"] * 6)
    for settings in SETTINGS:
        shares = [
            _share_inside(word, spans) for clip in clips for spans in [_spans_of(clip, settings)] for word in clip.words
        ]
        n_spans = sum(len(_spans_of(clip, settings)) for clip in clips if clip.words)
        lost, not_whole, in_spans = _count(shares, 0.5), _count(shares, 0.9), f"{_non_speech_s(clips, settings):.1f}"
        _print_row(_name_of(settings), lost, not_whole, len(shares), in_spans, n_spans)


def _print_quieter(manifest: Path, detectors: Mapping[str, SpeechDetector]) -> None:
    print("\n## Quieter recordings, default settings\n")
    _print_row("quieter by", "detector", "words lost", "words not whole", "seconds of non-speech in spans")
    _print_row(*["---"] * 5)
    for quieter_db, (name, detector) in itertools.product((0, 6, 12, 24, 36), detectors.items()):
        clips = list(read_clips(manifest, detector, quieter_db=quieter_db))
        shares = [
            _share_inside(word, spans)
            for clip in clips
            for spans in [_spans_of(clip, GateSettings())]
            for word in clip.words
        ]
        non_speech = f"{_non_speech_s(clips, GateSettings()):.1f}"
        _print_row(f"{quieter_db} dB", name, _count(shares, 0.5), _count(shares, 0.9), non_speech)


def _non_speech_s(clips: Iterable[Clip], settings: GateSettings) -> float:
    """Seconds inside spans in the clips that hold no speech."""
    return sum(
        seconds(span.end_sample - span.start_sample)
        for clip in _of_kind(clips, "nonspeech")
        for span in _spans_of(clip, settings)
    )


def _name_of(settings: GateSettings) -> str:
    default = GateSettings()
    changed = {name: getattr(settings, name) for name in GateSettings.__slots__}
    changed = {name: value for name, value in changed.items() if value != getattr(default, name)}
    return ", ".join(f"{name} {value}" for name, value in changed.items()) or "default"


def _print_kinds(clips: Sequence[Clip]) -> None:
    print("\n## Words by kind of recording, default settings\n")
    _print_row("kind", "clips", "median peak dBFS", "words", "lost", "not whole", "first onset outside")
    _print_row(*["---"] * 7)
    for kind in sorted({clip.kind for clip in clips if clip.words}):
        chosen = [clip for clip in _of_kind(clips, kind) if clip.words]
        spans = [_spans_of(clip, GateSettings()) for clip in chosen]
        shares = [_share_inside(word, s) for clip, s in zip(chosen, spans, strict=True) for word in clip.words]
        n_outside = sum(
            not any(span.start_sample <= clip.words[0].start_sample < span.end_sample for span in s)
            for clip, s in zip(chosen, spans, strict=True)
        )
        peak = np.median([clip.peak_dbfs for clip in chosen])
        _print_row(kind, len(chosen), f"{peak:.0f}", len(shares), _count(shares, 0.5), _count(shares, 0.9), n_outside)


def _print_lost_words(clips: Sequence[Clip]) -> None:
    print("\n## Words lost with default settings\n")
    for clip in clips:
        spans = _spans_of(clip, GateSettings())
        lost = [word for word in clip.words if _share_inside(word, spans) < 0.5]
        if lost:
            highest = [_max_probability(clip, word) for word in lost]
            told = ", ".join(f"{word.text} ({p:.2f})" for word, p in zip(lost, highest, strict=True))
            print(f"- {clip.clip_id}: {told}")
    print("\nIn brackets: the highest probability of a window in the word.")


def _max_probability(clip: Clip, word: Word) -> float:
    windows = slice(word.start_sample // WINDOW_SAMPLES, word.end_sample // WINDOW_SAMPLES + 1)
    return float(clip.probabilities[windows].max())


def _print_hangovers(clips: Sequence[Clip]) -> None:
    print("\n## Hangover\n")
    _print_row("hangover", "spans in clips with words", "clips that are split", "words with an end inside", "clips")
    _print_row(*["---"] * 5)
    for hangover_ms in (200, 300, 450, 600, 800):
        worded = [clip for clip in clips if clip.words]
        spans = [_spans_of(clip, replace(GateSettings(), hangover_ms=hangover_ms)) for clip in worded]
        n_cut = sum(
            any(word.start_sample + 1600 < span.speech_end_sample < word.voice_end_sample - 1600 for span in s[:-1])
            for clip, s in zip(worded, spans, strict=True)
            for word in clip.words
        )
        _print_row(hangover_ms, sum(map(len, spans)), sum(len(s) > 1 for s in spans), n_cut, len(worded))


def _print_times(clips: Sequence[Clip]) -> None:
    print("\n## Times, default settings\n")
    print("Positive is late. Only spans that ended before their clip did count for ends.\n")
    _print_row("from", "to", "median", "p10", "p90", "p95", "n")
    _print_row(*["---"] * 7)
    onsets, falls, ends = [], [], []
    hangover_samples = samples_from_ms(GateSettings().hangover_ms)
    for clip in clips:
        spans = _spans_of(clip, GateSettings())
        if clip.words and spans:
            onsets.append(spans[0].onset_sample - clip.words[0].start_sample)
        for span in spans:
            before = [w.voice_end_sample for w in clip.words if w.start_sample < span.speech_end_sample]
            if before and not span.was_forced:
                falls.append(span.speech_end_sample - max(before))
                ends.append(span.known_at_sample - max(before) - hangover_samples)
    _print_row("first word's start", "onset window's start", *_percentiles(onsets))
    _print_row("end of the last voice", "end of the last voiced window", *_percentiles(falls))
    _print_row("end of the last voice", "SpeechEnded, less the hangover", *_percentiles(ends))


def _percentiles(n_samples: Sequence[int]) -> list[str]:
    times_ms = np.array(n_samples) / samples_from_ms(1)
    return [f"{np.percentile(times_ms, share):.0f}" for share in (50, 10, 90, 95)] + [str(len(times_ms))]


def _print_cost(detector: SpeechDetector) -> None:
    print("\n## Cost of the detector\n")
    print("CPU time for each window of 32 ms.\n")
    _print_row("sessions in a batch", "windows each", "µs a window", "share of one core for each session")
    _print_row(*["---"] * 4)
    random = np.random.default_rng(0)
    for n_sessions, n_windows in ((1, 1), (4, 1), (16, 1), (64, 1), (256, 1), (16, 3), (1, 4), (1, 31), (1, 512)):
        windows = (0.1 * random.normal(size=(n_windows, WINDOW_SAMPLES))).astype(np.float32)
        batch = [(detector.initial_state(), windows)] * n_sessions
        detector.score(batch)
        n_runs = max(3, 2000 // (n_sessions * n_windows))
        started_s = time.process_time()
        for _ in range(n_runs):
            detector.score(batch)
        cost_s = (time.process_time() - started_s) / (n_runs * n_sessions * n_windows)
        _print_row(n_sessions, n_windows, f"{cost_s * 1e6:.0f}", f"{cost_s / seconds(WINDOW_SAMPLES):.2%}")


def _of_kind(clips: Iterable[Clip], kind: str) -> list[Clip]:
    return [clip for clip in clips if clip.kind == kind]


def _count(shares: Iterable[float], least: float) -> int:
    return sum(share < least for share in shares)


def _print_row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |")


if __name__ == "__main__":
    main()
