"""Streamed error rate, latency and flicker of commit policies and settings, on a virtual clock.

Every clip is played in real time through a session, one at a time; a decode takes the CPU time it took, divided by the
threads it ran on. The network and other sessions are left out; ``streaming.py`` measures with both.
"""

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from benchmarks.recordings import (
    DEFAULT_MANIFEST,
    ENGLISH,
    Answer,
    Recording,
    normalise,
    read_manifest,
    score,
    score_one,
)
from benchmarks.report import RESULTS, heading
from gateway import messages as m
from gateway.config import SessionConfig
from gateway.session import DecodeJob, ServedModel, Session
from gateway.simulation import Seen, Simulation
from models.catalog import load_engine
from streaming.engine import SpeechEngine
from streaming.utterance import CommitPolicy
from vad.audio import SAMPLE_RATE_HZ
from vad.gate import GateSettings
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


def play(
    recording: Recording,
    engine: SpeechEngine,
    detector: SileroDetector,
    config: SessionConfig,
    gate: GateSettings,
    n_threads: int,
) -> tuple[list[Seen], Simulation]:
    """One clip in real time, with a second and a half of silence behind it."""
    samples = np.concatenate([recording.samples(), np.zeros(SAMPLE_RATE_HZ * 3 // 2, np.float32)])
    models = {"model": ServedModel(engine.card, m.EngineItem(engine.backend, engine.why))}
    session = Session("simulated", models, detector.initial_state(), config=config, gate=gate, now_s=0.0)
    simulation = Simulation(session, Timed(engine, n_threads), detector, cost_s=lambda job: Timed.last_cost_s)
    language = m.UNSET if len(engine.card.languages) == 1 else recording.language

    def inputs() -> Iterator[tuple[float, m.ClientMessage]]:
        yield 0.0, m.Hello(audio=m.AudioSpec("f32le", SAMPLE_RATE_HZ), language=language)
        for at in range(0, len(samples), PACKET_SAMPLES):
            packet = samples[at : at + PACKET_SAMPLES]
            yield (at + len(packet)) / SAMPLE_RATE_HZ, m.Audio(packet.astype("<f4").tobytes())
        yield len(samples) / SAMPLE_RATE_HZ, m.Bye()

    return simulation.run(inputs()), simulation


class Timed:
    """An engine whose last decode's cost is known: CPU seconds over threads, so that a busy machine does not distort it."""

    last_cost_s = 0.0

    def __init__(self, engine: SpeechEngine, n_threads: int) -> None:
        self._engine, self._n_threads = engine, n_threads

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def decode(self, batch):  # type: ignore[no-untyped-def]  # the protocol's
        began = time.process_time()
        answer = self._engine.decode(batch)
        Timed.last_cost_s = (time.process_time() - began) / self._n_threads
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


def show_worst(figures: Figures, recordings: list[Recording], n_clips: int) -> None:
    """The clips with the most errors, reference above hypothesis."""
    errors = {r.recording_id: score_one(r, figures.answers[r.recording_id]) for r in recordings}
    count = {name: s.n_substituted + s.n_deleted + s.n_inserted for name, s in errors.items()}
    for recording in sorted(recordings, key=lambda r: -count[r.recording_id])[:n_clips]:
        answer = figures.answers[recording.recording_id]
        print(f"{count[recording.recording_id]} {recording.recording_id}")
        print(f"   {normalise(recording.transcript, recording)}\n   {normalise(answer.text, recording)}")


HEAD = (
    "| setting | error rate % | sub/del/ins | first partial s (median / p90) | time to final s (median / p90) "
    "| words changed per word | decodes a second | decode time / audio time |\n|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    """Measure the settings named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="whisper-tiny.en")
    parser.add_argument("--every", type=int, default=1, help="each n-th clip")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--policy", nargs="+", default=list(CommitPolicy), choices=list(CommitPolicy))
    parser.add_argument("--hangover-ms", type=int, nargs="+", default=[400])
    parser.add_argument("--interval-ms", type=int, nargs="+", default=[500])
    parser.add_argument("--save", action="store_true", help="write benchmarks/results/streaming_policies.md")
    parser.add_argument("--worst", type=int, default=0, help="print so many of the last setting's worst clips")
    arguments = parser.parse_args()
    engine = load_engine(arguments.model, n_threads=arguments.threads)
    detector = SileroDetector()
    recordings = read_manifest(DEFAULT_MANIFEST, languages=["en"], every=arguments.every)
    recordings = [recording for recording in recordings if recording.kind != "overlap"]
    lines = [HEAD]
    print(HEAD, flush=True)
    for policy in arguments.policy:
        for hangover_ms in arguments.hangover_ms:
            for interval_ms in arguments.interval_ms:
                config = SessionConfig(partial_interval_ms=interval_ms, commit_policy=CommitPolicy(policy))
                figures = Figures()
                for recording in recordings:
                    seen, simulation = play(
                        recording, engine, detector, config, GateSettings(hangover_ms=hangover_ms), arguments.threads
                    )
                    collect(figures, recording, seen, simulation)
                lines.append(
                    row(
                        f"{arguments.model}, {policy}, hangover {hangover_ms} ms, every {interval_ms} ms",
                        figures,
                        recordings,
                    )
                )
                print(lines[-1], flush=True)
    if arguments.worst:
        show_worst(figures, recordings, arguments.worst)
    if arguments.save:
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / "streaming_policies.md"
        path.write_text(
            heading("Commit policies, streamed at real time on a virtual clock")
            + f"\n{len(recordings)} clips.\n\n"
            + "\n".join(lines)
            + "\n",
            encoding="utf-8",
        )


if __name__ == "__main__":
    main()
