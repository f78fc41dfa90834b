"""Whole recordings through our Whisper engine and through faster-whisper: error rates, CPU time, word times.

Run from the project's root:

    python -m benchmarks.whisper_offline --model whisper-tiny.en --write

Both have the same weights, the language given, greedy decoding with fallback to higher temperatures, no speech
detector, nothing carried over between windows, one thread. faster-whisper computes in int8. With ``--write`` tables and
figures go to benchmarks/results/whisper_offline_<model>.{md,json}.
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.recordings import DEFAULT_MANIFEST, ENGLISH, Answer, Recording, Score, read_manifest, score
from models.store import ModelFiles, find_model
from models.whisper.engine import WhisperEngine
from streaming.engine import DecodeOptions
from streaming.transcript import text_of
from vad.audio import seconds

RESULTS = Path(__file__).parent / "results"
Recogniser = Callable[[NDArray[np.float32], str, bool], Answer]  # samples, language, whether words' times are wanted


@dataclass(frozen=True, slots=True)
class Run:
    """One recogniser's scores by kind."""

    name: str
    scores: dict[str, Score]


def ours(files: ModelFiles) -> Recogniser:
    """Our engine."""
    engine = WhisperEngine.load(files, name=files.name, n_threads=1)

    def recognise(samples: NDArray[np.float32], language: str, with_words: bool) -> Answer:
        began_s = time.process_time()
        segments = list(engine.transcribe(samples, DecodeOptions(language=language)))
        cpu_s = time.process_time() - began_s
        words = tuple(word for segment in segments for word in segment.words)
        timed = tuple((word.text, seconds(word.start_sample or 0), seconds(word.end_sample or 0)) for word in words)
        return Answer(text_of(words), timed, cpu_s)

    return recognise


def theirs(files: ModelFiles) -> Recogniser:
    """faster-whisper. Its word times need a second pass, which its CPU time leaves out, as it does without them."""
    from faster_whisper import WhisperModel

    with tempfile.TemporaryDirectory() as folder:
        link_with_vocabulary(files, Path(folder))
        model = WhisperModel(folder, device="cpu", compute_type="int8", cpu_threads=1)
    options: dict[str, Any] = {"beam_size": 1, "best_of": 1, "condition_on_previous_text": False}

    def recognise(samples: NDArray[np.float32], language: str, with_words: bool) -> Answer:
        began_s = time.process_time()
        segments = list(model.transcribe(samples, language=language, **options)[0])
        cpu_s = time.process_time() - began_s
        timed_segments: list[Any] = []
        if with_words:
            timed_segments = list(model.transcribe(samples, language=language, word_timestamps=True, **options)[0])
        timed = tuple((w.word, w.start, w.end) for segment in timed_segments for w in segment.words or ())
        return Answer("".join(segment.text for segment in segments), timed, cpu_s)

    return recognise


def link_with_vocabulary(files: ModelFiles, folder: Path) -> None:
    """The model's files in ``folder`` with what CTranslate2 wants besides: the tokens in the order of their ids."""
    for path in (files.weights, files.tokenizer, files.config):
        (folder / path.name).symlink_to(path)
    content = json.loads(files.tokenizer.read_bytes())
    ids = content["model"]["vocab"] | {token["content"]: token["id"] for token in content["added_tokens"]}
    tokens = sorted(ids, key=ids.__getitem__)
    if "<|0.00|>" not in ids:  # files of English-only models end before the timestamps
        tokens += [f"<|{index * 0.02:.2f}|>" for index in range(1501)]
    (folder / "vocabulary.json").write_text(json.dumps(tokens))


def run(name: str, recognise: Recogniser, recordings: Sequence[Recording]) -> Run:
    """Recognise every recording; non-speech counts as English, since some language has to be named."""
    answers = {}
    for recording in recordings:
        language = recording.language if recording.language != "zxx" else "en"
        answers[recording.recording_id] = recognise(recording.samples(), language, bool(recording.words))
    return Run(name, score(recordings, answers))


def error_cell(total: Score) -> str:
    """Rate with its parts, or clips with text for non-speech."""
    if total.error_rate is None:
        return f"{total.n_clips_with_text}/{total.n_clips} clips, {total.n_inserted} words"
    return f"{100 * total.error_rate:.1f} % ({total.n_substituted}/{total.n_deleted}/{total.n_inserted})"


def times_cell(total: Score) -> str:
    """Median and 90th percentile of the absolute errors of word starts, and the median signed error."""
    if len(total.start_errors_s) < 10:
        return ""
    errors_ms = sorted(abs(error_s) * 1000 for error_s in total.start_errors_s)
    bias_ms = statistics.median(total.start_errors_s) * 1000
    return f"{statistics.median(errors_ms):.0f} / {errors_ms[int(0.9 * len(errors_ms))]:.0f} ms ({bias_ms:+.0f})"


def table(runs: Sequence[Run]) -> str:
    """Kinds as rows; for each recogniser errors, CPU and word starts."""
    heads = [f"{run.name}: errors (sub/del/ins) | CPU s/s | word starts off by, median / 90 % (bias)" for run in runs]
    lines = [f"| kind | clips | words | {' | '.join(heads)} |", "|---|---|---|" + "---|" * (3 * len(runs))]
    for kind, total in runs[0].scores.items():
        cells = [kind, str(total.n_clips), str(total.n_reference)]
        for one in runs:
            other = one.scores[kind]
            cells += [error_cell(other), f"{other.cpu_per_audio_s:.4f}", times_cell(other)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def processor() -> str:
    """The CPU's name, as Linux tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


_BASELINE = "faster-whisper"


def results_path(model: str, suffix: str) -> Path:
    """Where the results of ``model`` are kept."""
    return RESULTS / f"whisper_offline_{model.removeprefix('whisper-')}{suffix}"


def last_written(model: str, name: str) -> Run:
    """A recogniser's scores from the results file."""
    figures = json.loads(results_path(model, ".json").read_text(encoding="utf-8"))["runs"][name]
    return Run(name, {kind: Score(**total) for kind, total in figures.items()})


def write(model: str, date: str, runs: Sequence[Run]) -> None:
    """Markdown for readers, JSON for scripts."""
    RESULTS.mkdir(exist_ok=True)
    command = f"python -m benchmarks.whisper_offline {' '.join(sys.argv[1:])}"
    text = (
        f"# {model}, whole recordings\n\n{date}, {processor()}, one thread. CPU seconds for each second of audio.\n\n"
        f"`{command}`\n\n{table(runs)}\n"
    )
    results_path(model, ".md").write_text(text, encoding="utf-8")
    figures = {
        "model": model,
        "date": date,
        "processor": processor(),
        "command": command,
        "runs": {one.name: {kind: asdict(total) for kind, total in one.scores.items()} for one in runs},
    }
    results_path(model, ".json").write_text(json.dumps(figures), encoding="utf-8")


def main() -> None:
    """Print the table; with ``--write`` keep it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="whisper-tiny.en")
    parser.add_argument("--manifest", type=Path, default=DEFAULT_MANIFEST)
    parser.add_argument("--every", type=int, default=1, help="take every n-th clip")
    parser.add_argument("--keep-baseline", action="store_true", help="faster-whisper's figures as last written")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--date", default=time.strftime("%Y-%m-%d"))
    arguments = parser.parse_args()
    files = find_model(arguments.model)
    languages = ("en",) if arguments.model.endswith(".en") else None
    recordings = read_manifest(arguments.manifest, languages=languages, every=arguments.every)
    runs = [run("ours", ours(files), recordings)]
    if arguments.keep_baseline:
        runs.append(last_written(arguments.model, _BASELINE))
    else:
        runs.append(run(_BASELINE, theirs(files), recordings))
    print(table(runs))
    print(f"\n{ENGLISH}: {', '.join(f'{one.name} {error_cell(one.scores[ENGLISH])}' for one in runs)}")
    if arguments.write:
        write(arguments.model, arguments.date, runs)


if __name__ == "__main__":
    main()
