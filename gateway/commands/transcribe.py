"""`senseway transcribe`: a whole recording to text, in this process, without a server.

Only what the detector takes for speech reaches the model. Knows flags and kinds of output; the rest is the engine's.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from gateway.audio_file import AudioFileError, read_audio
from gateway.commands.failure import CommandError
from gateway.commands.waiting import waiting
from gateway.subtitles import Cue, TimedWord, as_srt, as_vtt, cues_of
from streaming.engine import DecodeOptions, Task, UnsupportedOptionError
from streaming.transcript import Word, text_of
from vad.audio import SpeechSpan, seconds
from vad.detector import SpeechDetector
from vad.framer import Framer, padded
from vad.gate import Gate, GateSettings, SpeechEnded, SpeechStarted

HELP = "write down a whole recording, in this process, without a server"

# Generous at both ends, and short pauses stay inside: the model needs them to place its full stops.
REGION_SETTINGS = GateSettings(hangover_ms=2_000, pre_roll_ms=500, post_roll_ms=500)
_MAX_WINDOWS_AT_ONCE = 512


class RecordingPart(Protocol):
    """A stretch of a recording and what is said in it; times are samples since the recording's start."""

    @property
    def span(self) -> SpeechSpan:
        """Where it lies."""

    @property
    def words(self) -> tuple[Word, ...]:
        """What is said."""

    @property
    def language(self) -> str | None:
        """ISO 639-1 code, ``None`` where the model does not say."""


@runtime_checkable
class RecordingEngine(Protocol):
    """An engine that takes recordings of any length."""

    def transcribe(self, samples: NDArray[np.float32], options: DecodeOptions) -> Iterable[RecordingPart]:
        """The parts of ``samples`` [n_samples] in order."""


@dataclass(frozen=True, slots=True)
class Part:
    """A ``RecordingPart`` on the time axis of the whole file."""

    span: SpeechSpan
    words: tuple[Word, ...]
    language: str | None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare flags and positions."""
    parser.add_argument("file", type=Path, help="wav, flac, ogg, opus, mp3 and more")
    parser.add_argument("--format", choices=tuple(_WRITERS), default="txt", help="what to write")
    parser.add_argument("--output", type=Path, help="where to write it; standard output unless given")
    parser.add_argument("--model", default="whisper-tiny.en", help="see: senseway models")
    parser.add_argument("--language", help="ISO 639-1 code, de say; detected unless given")
    parser.add_argument("--translate", action="store_true", help="write English, whatever is spoken")
    parser.add_argument(
        "--vocabulary", action="append", default=[], metavar="TERM", help="a term to expect; repeatable"
    )
    parser.add_argument("--channel", type=int, help="the channel to take, from 0; all are mixed down unless given")
    parser.add_argument("--threads", type=int, help="CPU threads; the engine's choice unless given")


def run(arguments: argparse.Namespace) -> int:
    """Write the transcript."""
    samples = _read(arguments.file, arguments.channel)
    with waiting(f"loading {arguments.model}"):
        from models.catalog import load_engine  # torch
        from vad.levels import TwoLevelDetector
        from vad.silero import SileroDetector  # onnxruntime

        engine = load_engine(arguments.model, n_threads=arguments.threads)
        detector = TwoLevelDetector(SileroDetector())
    if not isinstance(engine, RecordingEngine):
        raise CommandError(f"{arguments.model} takes no whole recordings; `senseway stream` works with it")
    options = DecodeOptions(
        language=arguments.language,
        task=Task.TRANSLATE if arguments.translate else Task.TRANSCRIBE,
        vocabulary=tuple(arguments.vocabulary),
    )
    parts = list(_with_progress(transcribed(samples, engine, detector, options), seconds(len(samples))))
    if not parts:
        print(f"senseway: {arguments.file}: nobody speaks in it", file=sys.stderr)
    text = _WRITERS[arguments.format](parts)
    if arguments.output is None:
        sys.stdout.write(text)
    else:
        arguments.output.write_text(text, encoding="utf-8")
    return 0


def transcribed(
    samples: NDArray[np.float32], engine: RecordingEngine, detector: SpeechDetector, options: DecodeOptions
) -> Iterator[Part]:
    """The parts of a recording [n_samples], region by region of speech.

    Raises:
        CommandError: for an option that the model can't honour.
    """
    try:
        for region in speech_regions(samples, detector):
            for part in engine.transcribe(samples[region.start_sample : region.end_sample], options):
                yield _shifted(part, region.start_sample)
    except UnsupportedOptionError as error:
        raise CommandError(str(error)) from error


def speech_regions(samples: NDArray[np.float32], detector: SpeechDetector) -> list[SpeechSpan]:
    """Where in a recording [n_samples] somebody speaks, pauses shorter than two seconds included."""
    gate = Gate(REGION_SETTINGS)
    events = [
        event
        for start_sample, probability in _scored(samples, detector)
        for event in gate.push(start_sample, probability)
    ]
    events += gate.force_end(len(samples)) if len(samples) else []
    starts = [event.start_sample for event in events if isinstance(event, SpeechStarted)]
    ends = [event.end_sample for event in events if isinstance(event, SpeechEnded)]
    return [SpeechSpan(start, end) for start, end in zip(starts, ends, strict=True)]


def _scored(samples: NDArray[np.float32], detector: SpeechDetector) -> Iterator[tuple[int, float]]:
    """Start and probability of each window, the last one filled up with zeros."""
    framer = Framer()
    windows = framer.push(samples)
    if (rest := framer.flush()) is not None:
        windows.append(rest)
    state = detector.initial_state()
    for first in range(0, len(windows), _MAX_WINDOWS_AT_ONCE):
        batch = windows[first : first + _MAX_WINDOWS_AT_ONCE]
        ((probabilities, state),) = detector.score([(state, np.stack([padded(window.samples) for window in batch]))])
        yield from zip([window.start_sample for window in batch], map(float, probabilities), strict=True)


def _shifted(part: RecordingPart, n_samples: int) -> Part:
    span = SpeechSpan(part.span.start_sample + n_samples, part.span.end_sample + n_samples)
    words = tuple(
        replace(word, start_sample=_plus(word.start_sample, n_samples), end_sample=_plus(word.end_sample, n_samples))
        for word in part.words
    )
    return Part(span, words, part.language)


def _plus(sample: int | None, n_samples: int) -> int | None:
    return None if sample is None else sample + n_samples


def _read(path: Path, channel: int | None) -> NDArray[np.float32]:
    if not path.is_file():
        raise CommandError(f"there is no file {path}")
    try:
        samples, info = read_audio(path, channel=channel)
    except AudioFileError as error:
        raise CommandError(f"{path}: {error}") from error
    if info.damage is not None:
        print(f"senseway: {path}: {info.damage}; what comes before is transcribed", file=sys.stderr)
    return samples


def _with_progress(parts: Iterator[Part], duration_s: float) -> Iterator[Part]:
    """The same parts; on a terminal with a bar of the audio behind and ahead."""
    with tqdm(
        total=round(duration_s),
        unit="s",
        desc="audio",
        leave=False,
        disable=None,
        bar_format="{l_bar}{bar}| {n:.0f}/{total} s",
    ) as bar:
        for part in parts:
            bar.update(seconds(part.span.end_sample) - bar.n)
            yield part


def as_text(parts: Iterable[Part]) -> str:
    """One line for each part."""
    return "".join(f"{text_of(part.words)}\n" for part in parts)


def as_json(parts: Iterable[Part]) -> str:
    """Every part with its words, in seconds."""
    return json.dumps({"segments": [_json_part(part) for part in parts]}, ensure_ascii=False, indent=1) + "\n"


def _json_part(part: Part) -> dict[str, Any]:
    return {
        "start_s": _rounded_s(part.span.start_sample),
        "end_s": _rounded_s(part.span.end_sample),
        "language": part.language,
        "text": text_of(part.words),
        "words": [
            {
                "text": word.text,
                "start_s": _rounded_s(word.start_sample),
                "end_s": _rounded_s(word.end_sample),
                "confidence": None if word.confidence is None else round(word.confidence, 3),
            }
            for word in part.words
        ],
    }


def _rounded_s(sample: int | None) -> float | None:
    return None if sample is None else round(seconds(sample), 3)


def _cues(parts: Iterable[Part]) -> list[Cue]:
    return [
        cue
        for part in parts
        for cue in cues_of(
            [TimedWord(word.text, _rounded_s(word.start_sample), _rounded_s(word.end_sample)) for word in part.words],
            seconds(part.span.start_sample),
            seconds(part.span.end_sample),
        )
    ]


def _as_srt(parts: Iterable[Part]) -> str:
    return as_srt(_cues(parts))


def _as_vtt(parts: Iterable[Part]) -> str:
    return as_vtt(_cues(parts))


_WRITERS: Mapping[str, Callable[[Iterable[Part]], str]] = {
    "txt": as_text,
    "json": as_json,
    "srt": _as_srt,
    "vtt": _as_vtt,
}
