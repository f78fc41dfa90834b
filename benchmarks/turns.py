"""How often a turn would be cut at a pause inside it, and how long its end is waited for: silence, text, the model.

Every English recording but those of several voices at once, with silence behind it. At each pause, 0.2 s of silence,
the text so far is decoded and the model of turns is asked; how much silence then ends the turn is what the doors make
of both. A pause is cut if it lasts longer than that. Some pauses do lie between sentences, and some recordings do end
inside one, so no way can cut none and wait for nothing: what counts is how the ways compare.

Run from the project's root; prints Markdown:

    python -m benchmarks.turns > benchmarks/results/turns.md
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.recordings import DEFAULT_MANIFEST
from benchmarks.report import heading
from gateway.audio_file import AudioFileError, read_audio
from gateway.doors.deepgram_turns import Thresholds
from gateway.doors.openai_session import EAGERNESS, Patience
from streaming.endpoint import reads_complete
from streaming.engine import Chunk, DecodeOptions, SpeechEngine
from vad.audio import SAMPLE_RATE_HZ, SpeechSpan, seconds
from vad.detector import SpeechDetector
from vad.framer import Framer
from vad.gate import Gate, GateSettings, SpeechPaused, SpeechResumed, SpeechStarted
from vad.turn import MAX_TURN_SAMPLES, TurnDetector

TAIL_S = 3
MAX_DECODED_SAMPLES = 28 * SAMPLE_RATE_HZ
GATE = GateSettings(hangover_ms=TAIL_S * 1_000)
SPONTANEOUS = frozenset(
    {"disfluent", "spontaneous", "conversation", "meeting", "multichannel", "telephone", "telephone-g711"}
)
_LEFT_OUT = frozenset({"nonspeech", "formats", "overlap"})

Samples: TypeAlias = NDArray[np.float32]  # [n_samples] at 16 kHz


@dataclass(frozen=True, slots=True)
class Pause:
    """What is known 0.2 s into a pause, and how long it lasted; ``None`` where nobody spoke again."""

    is_spontaneous: bool
    probability: float  # of the model, that this is the end
    is_complete: bool  # the text reads as a finished sentence
    silence_s: float | None


Way: TypeAlias = Callable[[Pause], float]  # how much silence ends the turn, in seconds


def ways() -> dict[str, Way]:
    """Silence alone, and what the doors make of their protocols' options, without the model and with it."""
    found: dict[str, Way] = {f"silence, {s} s": lambda pause, s=s: s for s in (0.3, 0.5, 0.8, 1.2)}  # type: ignore[misc]
    for eagerness, patience in EAGERNESS.items():
        found[f"`semantic_vad` {eagerness}, text"] = _by_text(patience.done_ms, patience.longest_ms)
        found[f"`semantic_vad` {eagerness}, model"] = _by_model(patience)
    thresholds = Thresholds()
    longest_ms, sentence_ms, _ = thresholds.pauses_ms(is_punctuated=True, has_turn_model=False)
    _, doubted_ms, done_ms = thresholds.pauses_ms(is_punctuated=True, has_turn_model=True)
    assert sentence_ms is not None and doubted_ms is not None and done_ms is not None
    found["`/v2/listen`, text"] = _by_text(sentence_ms, longest_ms)
    found["`/v2/listen`, model"] = _by_model(Patience(longest_ms, doubted_ms, done_ms, thresholds.eot_threshold))
    return found


def _by_text(sentence_ms: int, longest_ms: int) -> Way:
    return lambda pause: (sentence_ms if pause.is_complete else longest_ms) / 1_000


def _by_model(patience: Patience) -> Way:
    def silence_s(pause: Pause) -> float:
        if pause.probability >= patience.threshold:
            return patience.done_ms / 1_000
        return (patience.doubted_ms if pause.is_complete else patience.longest_ms) / 1_000

    return silence_s


def judged(
    samples: Samples, is_spontaneous: bool, engine: SpeechEngine, detector: SpeechDetector, judge: TurnDetector
) -> Iterator[Pause]:
    """Every pause of a recording that ends in silence."""
    for start_sample, at_sample, resumed_sample in _pauses(samples, detector):
        decoded_from = max(start_sample, at_sample - MAX_DECODED_SAMPLES)
        chunk = Chunk(SpeechSpan(decoded_from, at_sample), samples[decoded_from:at_sample], is_final=True)
        [hypothesis] = engine.decode([(engine.open(DecodeOptions()), chunk)])
        probability = judge.probability(samples[max(start_sample, at_sample - MAX_TURN_SAMPLES) : at_sample])
        silence_s = None if resumed_sample is None else seconds(resumed_sample - at_sample) + GATE.pause_ms / 1_000
        yield Pause(is_spontaneous, probability, reads_complete(hypothesis.words), silence_s)


def _pauses(samples: Samples, detector: SpeechDetector) -> list[tuple[int, int, int | None]]:
    """Of each pause: where its turn began, where it was known to be one, and where speech went on, if it did."""
    windows = Framer().push(samples)
    stacked = np.stack([window.samples for window in windows])
    [(probabilities, _)] = detector.score([(detector.initial_state(), stacked)])
    gate, start_sample = Gate(GATE), 0
    found: list[tuple[int, int, int | None]] = []
    for window, probability in zip(windows, probabilities, strict=True):
        for event in gate.push(window.start_sample, float(probability)):
            match event:
                case SpeechStarted():
                    start_sample = event.start_sample
                    if found and found[-1][2] is None:
                        found[-1] = (*found[-1][:2], event.onset_sample)
                case SpeechPaused(at_sample):
                    found.append((start_sample, at_sample, None))
                case SpeechResumed(at_sample):
                    found[-1] = (*found[-1][:2], at_sample)
    return found


def recordings(manifest: Path, every: int) -> Iterator[tuple[bool, Samples]]:
    """English speech, and whether it is spontaneous; silence behind it."""
    lines = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines() if line.strip()]
    wanted = [line for line in lines if line["language"] == "en" and line["kind"] not in _LEFT_OUT]
    for line in wanted[::every]:
        try:
            samples, _ = read_audio(manifest.parent / line["file"])
        except AudioFileError:
            continue
        yield line["kind"] in SPONTANEOUS, np.concatenate([samples, np.zeros(TAIL_S * SAMPLE_RATE_HZ, np.float32)])


class TimedJudge:
    """A model of turns, and the CPU milliseconds of each answer."""

    def __init__(self, detector: TurnDetector) -> None:
        self.name = detector.name
        self.costs_ms: list[float] = []
        self._detector = detector

    def probability(self, samples: Samples) -> float:
        """See ``TurnDetector``."""
        began_s = time.process_time()
        probability = self._detector.probability(samples)
        self.costs_ms.append((time.process_time() - began_s) * 1_000)
        return probability


def main() -> None:
    """Measure, or take what was measured before, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", default="whisper-tiny.en")
    parser.add_argument("--manifest", type=Path, default=DEFAULT_MANIFEST)
    parser.add_argument("--every", type=int, default=1, help="take every nth recording")
    parser.add_argument("--save", type=Path, help="write what was found at each pause")
    parser.add_argument("--saved", type=Path, help="do not measure: read that")
    arguments = parser.parse_args()
    pauses, costs_ms = _read(arguments.saved) if arguments.saved else _measured(arguments)
    if arguments.save:
        found = {"pauses": [asdict(pause) for pause in pauses], "costs_ms": costs_ms}
        arguments.save.write_text(json.dumps(found), encoding="utf-8")
    print(heading("Ends of turns: silence, text and a model"))
    print(f"{(__doc__ or '').split(chr(10) * 2)[1]}\n")
    for kind, name in ((True, "Spontaneous speech and calls"), (False, "Read speech and short commands")):
        print(f"## {name}\n\n{_table([pause for pause in pauses if pause.is_spontaneous == kind])}\n")
    if costs_ms:
        median_ms, high_ms = np.percentile(costs_ms, [50, 95])
        print(f"The model takes {median_ms:.0f} ms of one core for a pause; {high_ms:.0f} ms at the 95th percentile.")


def _measured(arguments: argparse.Namespace) -> tuple[list[Pause], list[float]]:
    from models.catalog import load_engine
    from models.smart_turn import SmartTurn
    from models.store import turn_model
    from vad.levels import TwoLevelDetector
    from vad.silero import SileroDetector

    engine = load_engine(arguments.model, n_threads=1)
    detector, judge = TwoLevelDetector(SileroDetector()), TimedJudge(SmartTurn(turn_model()))
    pauses = [
        pause
        for is_spontaneous, samples in recordings(arguments.manifest, arguments.every)
        for pause in judged(samples, is_spontaneous, engine, detector, judge)
    ]
    return pauses, judge.costs_ms


def _read(path: Path) -> tuple[list[Pause], list[float]]:
    found = json.loads(path.read_text(encoding="utf-8"))
    return [Pause(**pause) for pause in found["pauses"]], found["costs_ms"]


def _table(pauses: Sequence[Pause]) -> str:
    silences_s = [pause.silence_s for pause in pauses if pause.silence_s is not None]
    inside = [pause for pause in pauses if pause.silence_s is not None]
    ends = [pause for pause in pauses if pause.silence_s is None]
    if not inside or not ends:
        return "Too few pauses."
    rows = [
        f"| the end is told by | cut, of {len(inside)} pauses | waited at {len(ends)} ends, median s | mean s "
        "| 90th percentile s |",
        "|---|---|---|---|---|",
    ]
    for name, way in ways().items():
        n_cut = sum(silence_s > way(pause) for silence_s, pause in zip(silences_s, inside, strict=True))
        waited_s = [way(pause) for pause in ends]
        median_s, high_s = np.percentile(waited_s, [50, 90])
        share = f"{100 * n_cut / len(inside):.0f} %"
        rows.append(f"| {name} | {share} | {median_s:.2f} | {np.mean(waited_s):.2f} | {high_s:.2f} |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
