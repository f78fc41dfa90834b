"""How often a turn is cut at a pause inside it, and how long its end is waited for: silence, text, the model of turns.

Every English recording with ten seconds of silence behind it, on a virtual clock where decodes take no time. A pause is
silence of 0.2 s or more that speech follows in the same recording, and a cut is a turn that ends in one. Some pauses do
lie between sentences, and some recordings do end inside one, so neither figure can reach zero: what counts is how ways
compare. Run from the project's root; prints Markdown:

    python -m benchmarks.turns > benchmarks/results/turns.md
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from benchmarks.recordings import DEFAULT_MANIFEST
from benchmarks.remembering import RememberingDetector, RememberingEngine, RememberingJudge, SpellingEngine
from benchmarks.report import heading
from gateway.audio_file import AudioFileError, read_audio
from gateway.config import DEFAULT_HANGOVER_MS, SessionConfig
from gateway.doors.deepgram_turns import Thresholds
from gateway.doors.door import House
from gateway.doors.openai_session import EAGERNESS, TranscriptionSession, TurnDetection
from gateway.messages import Audio, AudioSpec, Bye, EngineItem, Hello, Input, SpeechEnded
from gateway.session import ServedModel, Session
from gateway.simulation import Simulation
from streaming.engine import SpeechEngine
from vad.audio import SAMPLE_RATE_HZ
from vad.detector import SpeechDetector
from vad.framer import Framer
from vad.gate import Gate, GateSettings, SpeechResumed
from vad.turn import TurnDetector

GATE = GateSettings(hangover_ms=DEFAULT_HANGOVER_MS)
TAIL_S = 10
PACKET_SAMPLES = 512
SPONTANEOUS = frozenset(
    {"disfluent", "spontaneous", "conversation", "meeting", "multichannel", "telephone", "telephone-g711"}
)
_LEFT_OUT = frozenset({"nonspeech", "formats", "overlap"})

Samples = NDArray[np.float32]  # [n_samples] at 16 kHz


@dataclass(frozen=True, slots=True)
class Way:
    """One way to tell the end of a turn."""

    name: str
    hello: Hello

    @property
    def needs_text(self) -> bool:
        """Whether what is written can end a turn."""
        return isinstance(self.hello.sentence_hangover_ms, int)


@dataclass(slots=True)
class Tally:
    """What came of one way for one kind of speech."""

    n_pauses: int = 0
    n_cuts: int = 0
    delays_s: list[float] = field(default_factory=list)


def ways(engine: SpeechEngine) -> list[Way]:
    """Silence alone, and what the doors make of their protocols' options, without the model and with it."""
    found = [Way(f"silence, {ms / 1_000:g} s", _hello(hangover_ms=ms)) for ms in (300, 500, 800, 1_200)]
    for eagerness in EAGERNESS:
        for has_model in (False, True):
            house = House({engine.card.name: engine.card}, GATE, SessionConfig(), has_turn_model=has_model)
            turns = TurnDetection(silence_duration_ms=EAGERNESS[eagerness].longest_ms, eagerness=eagerness)
            hello = TranscriptionSession(engine.card.name, turn_detection=turns).hello(house)
            hello = msgspec.structs.replace(hello, speech_threshold=GATE.threshold)
            found.append(Way(f"`semantic_vad` {eagerness}, {'model' if has_model else 'text'}", _plain(hello)))
    for has_model in (False, True):
        thresholds = Thresholds()
        pauses = thresholds.pauses_ms(is_punctuated=True, has_turn_model=has_model)
        hello = _hello(
            hangover_ms=pauses[0],
            sentence_hangover_ms=pauses[1],
            turn_hangover_ms=pauses[2],
            turn_threshold=thresholds.eot_threshold,
        )
        found.append(Way(f"`/v2/listen`, {'model' if has_model else 'text'}", hello))
    return found


def _hello(**turns: int | float | None) -> Hello:
    audio = {"encoding": "f32le", "sample_rate_hz": SAMPLE_RATE_HZ}
    return _plain(msgspec.convert({"type": "hello", "audio": audio, **turns}, Hello))


def _plain(hello: Hello) -> Hello:
    """With audio as it is here, and few partials, which end nothing."""
    return msgspec.structs.replace(hello, audio=AudioSpec("f32le", SAMPLE_RATE_HZ), partial_interval_ms=10_000)


def n_pauses(samples: Samples, detector: SpeechDetector) -> int:
    """Silences that speech follows."""
    gate = Gate(GateSettings(hangover_ms=TAIL_S * 1_000))
    windows = Framer().push(samples)
    [(probabilities, _)] = detector.score(
        [(detector.initial_state(), np.stack([window.samples for window in windows]))]
    )
    events = [
        event
        for window, probability in zip(windows, probabilities, strict=True)
        for event in gate.push(window.start_sample, float(probability))
    ]
    return sum(isinstance(event, SpeechResumed) for event in events)


def ends(
    way: Way, samples: Samples, engine: SpeechEngine, detector: SpeechDetector, judge: TurnDetector
) -> list[float]:
    """How long after its last voice each turn ended."""
    card = engine.card
    served = {card.name: ServedModel(card, EngineItem(engine.backend, engine.why))}
    state = detector.initial_state()
    session = Session("session", served, state, config=SessionConfig(), gate=GATE, now_s=0.0, turn_model=judge.name)
    seen = Simulation(session, engine, detector, turn_detector=judge).run(
        _said(msgspec.structs.replace(way.hello, model=card.name), samples)
    )
    return [item.at_s - item.message.speech_end_s for item in seen if isinstance(item.message, SpeechEnded)]


def _said(hello: Hello, samples: Samples) -> Iterator[tuple[float, Input]]:
    yield 0.0, hello
    for at in range(0, len(samples), PACKET_SAMPLES):
        packet = samples[at : at + PACKET_SAMPLES]
        yield (at + len(packet)) / SAMPLE_RATE_HZ, Audio(packet.astype("<f4").tobytes())
    yield len(samples) / SAMPLE_RATE_HZ, Bye()


def recordings(manifest: Path, every: int) -> Iterator[tuple[bool, Samples]]:
    """English speech, and whether it is spontaneous; silence behind it."""
    lines = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines() if line.strip()]
    english = [line for line in lines if line["language"] == "en" and line["kind"] not in _LEFT_OUT]
    spontaneous = [line for line in english if line["kind"] in SPONTANEOUS]
    for line in [*spontaneous, *[line for line in english if line not in spontaneous][::every]]:
        try:
            samples, _ = read_audio(manifest.parent / line["file"])
        except AudioFileError:
            continue
        yield line["kind"] in SPONTANEOUS, np.concatenate([samples, np.zeros(TAIL_S * SAMPLE_RATE_HZ, np.float32)])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="whisper-tiny.en")
    parser.add_argument("--manifest", type=Path, default=DEFAULT_MANIFEST)
    parser.add_argument("--every", type=int, default=1, help="take every nth of read speech")
    arguments = parser.parse_args()
    from models.catalog import load_engine
    from models.smart_turn import SmartTurn
    from models.store import turn_model
    from vad.levels import TwoLevelDetector
    from vad.silero import SileroDetector

    engine = RememberingEngine(load_engine(arguments.model, n_threads=1))
    detector = RememberingDetector(TwoLevelDetector(SileroDetector()))
    judge = RememberingJudge(SmartTurn(turn_model()))
    compared = ways(engine)
    tallies: dict[bool, dict[str, Tally]] = {kind: {way.name: Tally() for way in compared} for kind in (True, False)}
    nothing_written = RememberingEngine(SpellingEngine())  # where silence alone decides
    for is_spontaneous, samples in recordings(arguments.manifest, arguments.every):
        pauses = n_pauses(samples, detector)
        for way in compared:
            delays_s = ends(way, samples, engine if way.needs_text else nothing_written, detector, judge)
            tally = tallies[is_spontaneous][way.name]
            tally.n_pauses += pauses
            tally.n_cuts += max(0, len(delays_s) - 1)
            tally.delays_s += delays_s[-1:]
        print(len(judge.costs_ms), "pauses judged", file=sys.stderr)
        for memory in (engine, nothing_written, detector, judge):
            memory.forget()
    print(heading("Ends of turns: silence, text and a model"))
    print(f"{(__doc__ or '').split(chr(10) * 2)[1].partition(' Run from')[0]}\n")
    for kind, name in ((True, "Spontaneous speech and calls"), (False, "Read speech and short commands")):
        print(f"## {name}\n\n{_table(tallies[kind])}\n")
    costs_ms = np.array(judge.costs_ms)
    median_ms, high_ms = np.percentile(costs_ms, [50, 95])
    print(f"The model takes {median_ms:.0f} ms of one core for a pause, {high_ms:.0f} ms at the 95th percentile of")
    print(f"{len(costs_ms)} pauses.")


def _table(tallies: Mapping[str, Tally]) -> str:
    rows = [
        "| the end is told by | pauses | cut | ends | waited, median s | mean s | 90th percentile s |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, tally in tallies.items():
        share = 100 * tally.n_cuts / max(1, tally.n_pauses)
        median_s, high_s = np.percentile(tally.delays_s, [50, 90]) if tally.delays_s else (np.nan, np.nan)
        counts = f"{tally.n_pauses} | {share:.0f} % | {len(tally.delays_s)}"
        rows.append(f"| {name} | {counts} | {median_s:.2f} | {np.mean(tally.delays_s):.2f} | {high_s:.2f} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
