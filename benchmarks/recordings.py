"""Recordings with references, and how a recogniser's words are scored against them.

Reads a manifest of JSON lines beside the recordings (``id``, ``file``, ``kind``, ``language``, ``transcript``,
``duration_s``, ``words`` where their times are known). Rates are errors over reference words of all clips of a kind,
both texts put through Whisper's normaliser; Chinese and Japanese count characters; spelt digits and letters count one
by one. Knows no recogniser.
"""

import json
import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jiwer
import numpy as np
import soundfile
import soxr
from numpy.typing import NDArray
from whisper_normalizer.basic import BasicTextNormalizer
from whisper_normalizer.english import EnglishTextNormalizer

from vad.audio import SAMPLE_RATE_HZ

DEFAULT_MANIFEST = Path(__file__).parents[2] / "shared" / "audio" / "manifest.jsonl"
ENGLISH = "all English, no overlap"
_NO_SPEECH, _OVERLAP, _FORMATS = "nonspeech", "overlap", "formats"
_UNKNOWN_LANGUAGES = {"mul", "und"}
_SPELT_KINDS = {"digits", "alphanumeric"}
_CHARACTER_LANGUAGES = {"zh", "ja"}
_DIGIT_WORDS = "zero one two three four five six seven eight nine".split()

TimedWord = tuple[str, float, float]  # text, start and end in seconds


@dataclass(frozen=True, slots=True)
class Recording:
    """One line of the manifest. ``words`` is empty where no times are known."""

    recording_id: str
    path: Path
    kind: str
    language: str
    transcript: str
    duration_s: float
    words: tuple[TimedWord, ...]

    def samples(self) -> NDArray[np.float32]:
        """Mono at 16 kHz, [n_samples]; channels are averaged."""
        audio, rate_hz = soundfile.read(self.path, dtype="float32", always_2d=True)
        mono: NDArray[np.float32] = audio.mean(axis=1)
        return mono if rate_hz == SAMPLE_RATE_HZ else soxr.resample(mono, rate_hz, SAMPLE_RATE_HZ)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a recogniser made of one recording, and the CPU seconds it took."""

    text: str
    words: tuple[TimedWord, ...]
    cpu_s: float


@dataclass(slots=True)
class Score:
    """Totals over the clips of one kind. For non-speech every word is an insertion and there is no reference."""

    n_clips: int = 0
    n_reference: int = 0
    n_substituted: int = 0
    n_deleted: int = 0
    n_inserted: int = 0
    n_clips_with_text: int = 0
    audio_s: float = 0.0
    cpu_s: float = 0.0
    start_errors_s: list[float] = field(default_factory=list)  # ours minus the reference, signed

    @property
    def error_rate(self) -> float | None:
        """Errors for each reference word, ``None`` without reference words."""
        n_errors = self.n_substituted + self.n_deleted + self.n_inserted
        return n_errors / self.n_reference if self.n_reference else None

    @property
    def cpu_per_audio_s(self) -> float:
        """CPU seconds for each second of audio."""
        return self.cpu_s / self.audio_s

    def add(self, other: "Score") -> None:
        """Take another kind's totals in."""
        self.n_clips += other.n_clips
        self.n_reference += other.n_reference
        self.n_substituted += other.n_substituted
        self.n_deleted += other.n_deleted
        self.n_inserted += other.n_inserted
        self.n_clips_with_text += other.n_clips_with_text
        self.audio_s += other.audio_s
        self.cpu_s += other.cpu_s
        self.start_errors_s += other.start_errors_s


def read_manifest(path: Path, *, languages: Iterable[str] | None, every: int = 1) -> list[Recording]:
    """Recordings that can be scored, in the manifest's order; ``languages`` limits those with speech.

    Left out are those without a transcript, with several languages, and the files that test readers of formats.
    """
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    wanted = [line for line in lines if _is_scorable(line) and (line["kind"] == _NO_SPEECH or _speaks(line, languages))]
    return [_recording(line, path.parent) for line in wanted[::every]]


def _is_scorable(line: dict[str, Any]) -> bool:
    if line["kind"] == _NO_SPEECH:
        return True
    return bool(line["transcript"]) and line["kind"] != _FORMATS and line["language"] not in _UNKNOWN_LANGUAGES


def _speaks(line: dict[str, Any], languages: Iterable[str] | None) -> bool:
    return languages is None or line["language"] in languages


def _recording(line: dict[str, Any], folder: Path) -> Recording:
    return Recording(
        recording_id=line["id"],
        path=folder / line["file"],
        kind=line["kind"] if line["kind"] != "multilingual" else f"multilingual {line['language']}",
        language=line["language"],
        transcript=line["transcript"] or "",
        duration_s=line["duration_s"],
        words=tuple((text, start_s, end_s) for text, start_s, end_s in line.get("words") or ()),
    )


_english, _basic = EnglishTextNormalizer(), BasicTextNormalizer()


def normalise(text: str, recording: Recording) -> str:
    """Text as it is compared: words, or characters, parted by single spaces."""
    if recording.language in _CHARACTER_LANGUAGES:
        characters = unicodedata.normalize("NFKC", _basic(text))
        return " ".join(character for character in characters if not character.isspace())
    if recording.language not in ("en", "zxx"):
        return " ".join(_basic(text).split())
    if recording.kind in _SPELT_KINDS:
        return _spelt(text)
    return str(_english(text))


def _spelt(text: str) -> str:
    """Digits one by one. Their words are replaced before the normaliser would read "two one" as 21, and after it."""
    digits = _digits_for_words(re.sub(r"[-,./:]", " ", text))
    return " ".join(re.sub(r"(\d)", r" \1 ", _digits_for_words(_english(digits))).split())


def _digits_for_words(text: str) -> str:
    values = {word: str(value) for value, word in enumerate(_DIGIT_WORDS)} | {"oh": "0"}
    pattern = rf"\b({'|'.join(values)})\b"
    return re.sub(pattern, lambda match: values[match[0].lower()], text, flags=re.IGNORECASE)


def score(recordings: Sequence[Recording], answers: Mapping[str, Answer]) -> dict[str, Score]:
    """Totals by kind, and of all English kinds with one speaker under ``ENGLISH``."""
    scores: dict[str, Score] = defaultdict(Score)
    for recording in recordings:
        scores[recording.kind].add(score_one(recording, answers[recording.recording_id]))
    english = Score()
    for kind, total in scores.items():
        if kind not in (_NO_SPEECH, _OVERLAP) and not kind.startswith("multilingual"):
            english.add(total)
    return {**dict(sorted(scores.items())), ENGLISH: english}


def score_one(recording: Recording, answer: Answer) -> Score:
    """The totals of one clip."""
    total = Score(n_clips=1, audio_s=recording.duration_s, cpu_s=answer.cpu_s)
    reference, hypothesis = normalise(recording.transcript, recording), normalise(answer.text, recording)
    total.n_clips_with_text = bool(hypothesis)
    total.n_reference = len(reference.split())
    if not reference or not hypothesis:
        total.n_inserted, total.n_deleted = len(hypothesis.split()), total.n_reference
        return total
    compared = jiwer.process_words(reference, hypothesis)
    total.n_substituted, total.n_deleted = compared.substitutions, compared.deletions
    total.n_inserted = compared.insertions
    total.start_errors_s = start_errors(recording.words, answer.words)
    return total


def start_errors(reference: Sequence[TimedWord], words: Sequence[TimedWord]) -> list[float]:
    """Differences in seconds, ours minus the reference, of the starts of the words that match one to one."""
    expected, got = [_one_word(word) for word in reference], [_one_word(word) for word in words]
    if not expected or not got:
        return []
    pieces = jiwer.process_words(" ".join(expected), " ".join(got)).alignments[0]
    return [
        round(words[piece.hyp_start_idx + i][1] - reference[piece.ref_start_idx + i][1], 3)
        for piece in pieces
        if piece.type == "equal"
        for i in range(piece.ref_end_idx - piece.ref_start_idx)
    ]


def _one_word(word: TimedWord) -> str:
    text = word[0].strip()
    return (_english(text) or text.lower()).replace(" ", "_")
