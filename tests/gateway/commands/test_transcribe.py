"""Whole recordings: which stretches reach the model, and what is written."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from gateway.commands import transcribe
from gateway.commands.failure import CommandError
from gateway.commands.program import parser, run
from gateway.commands.transcribe import Part, as_json, as_text, speech_regions, transcribed
from models import catalog
from streaming.engine import DecodeOptions, UnsupportedOptionError
from streaming.transcript import Word
from tests.loudness import LoudnessDetector
from vad.audio import SAMPLE_RATE_HZ, SpeechSpan

RATE = SAMPLE_RATE_HZ


class CountingEngine:
    """Writes down how long what it is given is, and remembers it."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def transcribe(self, samples: NDArray[np.float32], options: DecodeOptions) -> Iterator[Part]:
        if options.language == "xx":
            raise UnsupportedOptionError("counter does not know language 'xx'")
        self.given.append(len(samples))
        words = (Word(f" {len(samples)}", 0, 1_600, 0.5), Word(" more", None, None, None))
        yield Part(SpeechSpan(0, len(samples)), words, "en")


def sound(*pieces: tuple[float, float]) -> NDArray[np.float32]:
    """Pieces of (seconds, loudness)."""
    return np.concatenate([np.full(round(length_s * RATE), loudness, np.float32) for length_s, loudness in pieces])


def test_silence_reaches_no_model() -> None:
    engine = CountingEngine()
    assert list(transcribed(sound((60.0, 0.0)), engine, LoudnessDetector(), DecodeOptions())) == []
    assert engine.given == []


@pytest.mark.parametrize("n_samples", [0, 1, 511])
def test_less_than_a_window_is_no_speech(n_samples: int) -> None:
    assert speech_regions(np.zeros(n_samples, np.float32), LoudnessDetector()) == []


def test_short_pauses_stay_inside_a_region_and_long_ones_part_it() -> None:
    samples = sound((3.0, 0.0), (2.0, 0.5), (1.0, 0.0), (2.0, 0.5), (10.0, 0.0), (1.0, 0.5))
    regions = speech_regions(samples, LoudnessDetector())
    edges_s = [edge / RATE for region in regions for edge in (region.start_sample, region.end_sample)]
    assert edges_s == pytest.approx([2.5, 8.5, 17.5, 19.0], abs=0.04)


def test_times_count_from_the_start_of_the_recording() -> None:
    parts = list(transcribed(sound((3.0, 0.0), (2.0, 0.5)), CountingEngine(), LoudnessDetector(), DecodeOptions()))
    (part,) = parts
    first, second = part.words
    assert part.span.start_sample / RATE == pytest.approx(2.5, abs=0.04)
    assert first.start_sample == part.span.start_sample
    assert second.start_sample is None


def test_an_option_that_the_model_lacks_is_refused() -> None:
    with pytest.raises(CommandError, match="does not know language 'xx'"):
        list(transcribed(sound((1.0, 0.5)), CountingEngine(), LoudnessDetector(), DecodeOptions(language="xx")))


PARTS = [Part(SpeechSpan(0, RATE), (Word(" Ever", 0, 8_000, 0.98765), Word(" tried.", 8_000, 16_000, None)), "en")]


def test_text_has_one_line_for_each_part() -> None:
    assert as_text(PARTS * 2) == "Ever tried.\nEver tried.\n"


def test_json_has_words_in_seconds() -> None:
    (segment,) = json.loads(as_json(PARTS))["segments"]
    assert segment["text"] == "Ever tried."
    assert segment["words"][0] == {"text": " Ever", "start_s": 0.0, "end_s": 0.5, "confidence": 0.988}
    assert segment["words"][1]["confidence"] is None


@pytest.mark.parametrize(("form", "beginning"), [("srt", "1\n00:00:00,000 -->"), ("vtt", "WEBVTT\n\n00:00:00.000 -->")])
def test_subtitles_come_from_the_same_parts(form: str, beginning: str) -> None:
    assert transcribe._WRITERS[form](PARTS).startswith(beginning)


def test_a_model_that_takes_no_recordings_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    soundfile.write(tmp_path / "a.wav", np.zeros(1_600), RATE)
    assert run(["transcribe", str(tmp_path / "a.wav"), "--model", "scripted"]) == 1
    assert "scripted takes no whole recordings" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["missing.wav", "."])
def test_what_is_no_file_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["transcribe", str(tmp_path / name)]) == 1
    assert capsys.readouterr().err == f"senseway: there is no file {tmp_path / name}\n"


def test_a_recording_without_speech_gives_nothing_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(catalog, "load_engine", lambda name, n_threads: CountingEngine())
    soundfile.write(tmp_path / "quiet.wav", np.zeros(RATE), RATE)
    assert run(["transcribe", str(tmp_path / "quiet.wav")]) == 0
    assert capsys.readouterr() == ("", f"senseway: {tmp_path / 'quiet.wav'}: nobody speaks in it\n")


def test_a_file_that_is_no_audio_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("no audio at all")
    assert run(["transcribe", str(tmp_path / "notes.txt")]) == 1
    assert "notes.txt" in capsys.readouterr().err


def test_every_form_is_offered() -> None:
    parsed: argparse.Namespace = parser().parse_args(["transcribe", "a.wav", "--format", "vtt"])
    assert parsed.format == "vtt"
