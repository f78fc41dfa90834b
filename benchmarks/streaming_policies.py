"""Streamed error rate, latency and flicker of commit policies and settings, on a virtual clock.

Every clip is played in real time through a session of its own; a decode takes the CPU time it took on one thread. The
network and other sessions are left out; ``streaming.py`` measures with both.
"""

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np

from benchmarks.recordings import DEFAULT_MANIFEST, ENGLISH, Answer, Recording, read_manifest, score
from benchmarks.report import heading
from gateway import messages as m
from gateway.config import SessionConfig
from gateway.session import ServedModel, Session, StreamSettings
from gateway.simulation import Seen, Simulation
from models.catalog import load_engine
from streaming import context, utterance
from streaming.engine import Chunk, DecodeOptions, EngineStream, SpeechEngine
from streaming.pacing import Pacing
from streaming.transcript import Hypothesis
from streaming.utterance import CommitPolicy
from vad.audio import SAMPLE_RATE_HZ, samples_from_ms
from vad.detector import SpeechDetector
from vad.gate import GateSettings
from vad.levels import TwoLevelDetector
from vad.silero import SileroDetector

PACKET_SAMPLES = 800  # 50 ms, as browsers and telephony bridges send


@dataclass
class Figures:
    """What one setting gave over all clips."""

    answers: dict[str, Answer] = field(default_factory=dict)
    first_partial_s: list[float] = field(default_factory=list)
    final_s: list[float] = field(default_factory=list)
    n_changed: int = 0
    n_words: int = 0
    cpu_s: float = 0.0
    audio_s: float = 0.0
    n_decodes: int = 0

    def add(self, other: "Figures") -> None:
        """Take another clip's figures in."""
        self.answers |= other.answers
        self.first_partial_s += other.first_partial_s
        self.final_s += other.final_s
        self.n_changed += other.n_changed
        self.n_words += other.n_words
        self.cpu_s += other.cpu_s
        self.audio_s += other.audio_s
        self.n_decodes += other.n_decodes


def play(
    recording: Recording, engine: SpeechEngine, detector: SpeechDetector, config: SessionConfig, gate: GateSettings
) -> tuple[list[Seen], Simulation]:
    """One clip in real time, with a second and a half of silence behind it."""
    samples = np.concatenate([recording.samples(), np.zeros(SAMPLE_RATE_HZ * 3 // 2, np.float32)])
    models = {"model": ServedModel(engine.card, m.EngineItem(engine.backend, engine.why))}
    caller = Session("simulated", models, detector.initial_state(), config=config, gate=gate, now_s=0.0)
    timed = Timed(engine)
    simulation = Simulation(caller, timed, detector, cost_s=lambda job: timed.last_cost_s)
    language = m.UNSET if len(engine.card.languages) == 1 else recording.language

    def inputs() -> Iterator[tuple[float, m.ClientMessage]]:
        yield 0.0, m.Hello(audio=m.AudioSpec("f32le", SAMPLE_RATE_HZ), language=language)
        for at in range(0, len(samples), PACKET_SAMPLES):
            packet = samples[at : at + PACKET_SAMPLES]
            yield (at + len(packet)) / SAMPLE_RATE_HZ, m.Audio(packet.astype("<f4").tobytes())
        yield len(samples) / SAMPLE_RATE_HZ, m.Bye()

    return simulation.run(inputs()), simulation


class Timed:
    """An engine whose last decode's cost is known, in CPU seconds, so that a busy machine does not distort it."""

    def __init__(self, engine: SpeechEngine) -> None:
        self._engine = engine
        self.last_cost_s = 0.0

    def open(self, options: DecodeOptions) -> EngineStream:
        """See ``SpeechEngine``."""
        return self._engine.open(options)

    def close(self, stream: EngineStream) -> None:
        """See ``SpeechEngine``."""
        self._engine.close(stream)

    def decode(self, batch: Sequence[tuple[EngineStream, Chunk]]) -> list[Hypothesis]:
        """See ``SpeechEngine``."""
        began = time.process_time()
        answer = self._engine.decode(batch)
        self.last_cost_s = time.process_time() - began
        return answer


def collect(figures: Figures, recording: Recording, seen: list[Seen], simulation: Simulation) -> None:
    """Add one clip's figures."""
    finals = [(item.at_s, item.message) for item in seen if isinstance(item.message, m.Final)]
    partials = [(item.at_s, item.message) for item in seen if isinstance(item.message, m.Partial) and item.message.text]
    words = tuple((word.text, word.start_s or 0.0, word.end_s or 0.0) for _, final in finals for word in final.words)
    cost_s = sum(decode.cost_s for decode in simulation.decodes)
    text = " ".join(final.text for _, final in finals)
    figures.answers[recording.recording_id] = Answer(text, words, cost_s)
    figures.cpu_s += cost_s
    figures.n_decodes += len(simulation.decodes)
    figures.audio_s += recording.duration_s
    figures.n_words += len(words)
    figures.n_changed += flicker([message for _, message in sorted(partials + finals, key=lambda pair: pair[1].event)])
    if recording.words and finals:
        shown = partials + finals
        figures.first_partial_s.append(min(at_s for at_s, _ in shown) - recording.words[0][1])
        figures.final_s.append(finals[-1][0] - recording.words[-1][2])


def flicker(events: list[m.Partial | m.Final]) -> int:
    """Words shown and later changed."""
    changed, shown = 0, {}
    for event in events:
        now = [word.text for word in event.words]
        before = shown.get(event.segment, [])
        changed += sum(1 for old, new in zip(before, now, strict=False) if old != new) + max(0, len(before) - len(now))
        shown[event.segment] = now
    return changed


def row(name: str, figures: Figures, recordings: list[Recording]) -> str:
    """One line of the table."""
    total = score(recordings, figures.answers)[ENGLISH]
    cells = [
        name,
        f"{100 * (total.error_rate or 0):.2f}",
        f"{total.n_substituted}/{total.n_deleted}/{total.n_inserted}",
        _quantiles(figures.first_partial_s),
        _quantiles(figures.final_s),
        f"{figures.n_changed / max(figures.n_words, 1):.2f}",
        f"{figures.n_decodes / figures.audio_s:.2f}",
        f"{figures.cpu_s / figures.audio_s:.3f}",
    ]
    return "| " + " | ".join(cells) + " |"


def _quantiles(values: list[float]) -> str:
    ordered = sorted(values)
    return f"{statistics.median(ordered):.2f} / {ordered[int(0.9 * len(ordered))]:.2f}" if ordered else "-"


HEAD = (
    "| setting | error rate % | sub/del/ins | first partial s (median / p90) | time to final s (median / p90) "
    "| words changed per word | decodes a second | decode time / audio time |\n|---|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True, slots=True)
class Variant:
    """One way to stream. Milliseconds; what is a constant of the product is patched for the run."""

    name: str
    policy: CommitPolicy = CommitPolicy.AGREEMENT
    margin_ms: int | None = None  # how close to the edge of the audio a settled word may end
    hangover_ms: int = 400
    prompt_gap_ms: int | None = None  # below 0: no text is carried over
    lead_gap_ms: int | None = None  # below 0: no audio is heard again
    lead_ms: int | None = None
    max_span_ms: int | None = None
    has_prefix: bool = True  # settled words are given to the decoder

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The product's constants as this variant has them."""
        margin = "AGREEMENT_MARGIN_SAMPLES" if self.policy is CommitPolicy.AGREEMENT else "ATTENTION_MARGIN_SAMPLES"
        chosen = [
            (utterance, margin, self.margin_ms),
            (context, "MAX_PROMPT_GAP_SAMPLES", self.prompt_gap_ms),
            (context, "MAX_LEAD_GAP_SAMPLES", self.lead_gap_ms),
            (context, "MAX_LEAD_SAMPLES", self.lead_ms),
        ]
        with ExitStack() as stack:
            for module, name, value_ms in chosen:
                if value_ms is not None:
                    stack.enter_context(patch.object(module, name, samples_from_ms(value_ms)))
            if self.max_span_ms is not None:
                pacing = Pacing(max_span_samples=samples_from_ms(self.max_span_ms))
                stack.enter_context(patch.object(StreamSettings, "pacing", pacing))
            if not self.has_prefix:
                stack.enter_context(patch.object(utterance.Utterance, "next_request", _next_request_without_prefix))
            yield


_next_request = utterance.Utterance.next_request


def _next_request_without_prefix(self: utterance.Utterance) -> utterance.DecodeRequest | None:
    self._retry = self._retry or self.due() is not None
    return _next_request(self)


AGREEMENT, ATTENTION = CommitPolicy.AGREEMENT, CommitPolicy.ATTENTION
VARIANTS = (
    Variant("as shipped"),
    *(Variant(f"agreement, margin {ms} ms", margin_ms=ms) for ms in (200, 800, 2400)),
    *(Variant(f"attention, margin {ms} ms", ATTENTION, ms) for ms in (1000, 1600, 2500)),
    Variant("nothing carried over", prompt_gap_ms=-1, lead_gap_ms=-1),
    Variant("text carried over", lead_gap_ms=-1),
    Variant("lead of 4 s", lead_ms=4_000),
    Variant("settled words not given", has_prefix=False),
    *(Variant(f"hangover {ms} ms", hangover_ms=ms) for ms in (300, 550)),
    Variant("span up to 20 s", max_span_ms=20_000),
)

_engine: SpeechEngine
_detector: SpeechDetector


def _load(model: str) -> None:
    """Once in each process."""
    global _engine, _detector
    _engine, _detector = load_engine(model, n_threads=1), TwoLevelDetector(SileroDetector())


def _run(task: tuple[Variant | None, Recording]) -> tuple[Variant | None, Figures]:
    """One clip by one variant, or offline for ``None``."""
    variant, recording = task
    figures = Figures()
    if variant is None:
        transcribe(figures, recording, _engine)
        return None, figures
    with variant.applied():
        gate = GateSettings(hangover_ms=variant.hangover_ms)
        seen, simulation = play(recording, _engine, _detector, SessionConfig(commit_policy=variant.policy), gate)
    collect(figures, recording, seen, simulation)
    return variant, figures


def transcribe(figures: Figures, recording: Recording, engine: SpeechEngine) -> None:
    """One clip whole, offline."""
    language = None if len(engine.card.languages) == 1 else recording.language
    began = time.process_time()
    segments = list(engine.transcribe(recording.samples(), DecodeOptions(language=language)))  # type: ignore[attr-defined]
    text = "".join(word.text for segment in segments for word in segment.words)
    figures.cpu_s = time.process_time() - began
    figures.answers[recording.recording_id] = Answer(text, (), figures.cpu_s)
    figures.audio_s = recording.duration_s


def main() -> None:
    """Measure every variant, or those named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="whisper-tiny.en")
    parser.add_argument("--every", type=int, default=1, help="each n-th clip")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--variant", nargs="+", help="names; all without")
    parser.add_argument("--manifest", type=Path, default=DEFAULT_MANIFEST)
    arguments = parser.parse_args()
    recordings = read_manifest(arguments.manifest, languages=["en"], every=arguments.every)
    recordings = [recording for recording in recordings if recording.kind not in ("overlap", "nonspeech")]
    variants = [v for v in VARIANTS if arguments.variant is None or v.name in arguments.variant]
    tasks = [(v, r) for r in sorted(recordings, key=lambda r: -r.duration_s) for v in (None, *variants)]
    totals: dict[Variant | None, Figures] = {variant: Figures() for variant in (None, *variants)}
    with multiprocessing.Pool(arguments.processes, _load, (arguments.model,)) as pool:
        for variant, figures in pool.imap_unordered(_run, tasks):
            totals[variant].add(figures)
    title = f"{arguments.model}: ways to stream, at real time on a virtual clock"
    print(heading(title) + f"\n{len(recordings)} clips, one thread a decode.\n\n{HEAD}")
    for variant, figures in totals.items():
        print(row(variant.name if variant else "offline, whole clips", figures, recordings))


if __name__ == "__main__":
    main()
