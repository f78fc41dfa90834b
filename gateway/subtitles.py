"""Transcripts as subtitle files and plain text. Pure: segments in, text out.

Cues follow the segments; a long one is broken at words, so that no cue is longer than a screen holds.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MAX_CUE_CHARACTERS = 84  # two lines of 42, as subtitle guidelines have it


@dataclass(frozen=True, slots=True)
class Cue:
    """A piece of text and when it is said, in seconds."""

    start_s: float
    end_s: float
    text: str


@dataclass(frozen=True, slots=True)
class TimedWord:
    """A word with its leading space; times are ``None`` where the model gives none."""

    text: str
    start_s: float | None
    end_s: float | None


def as_srt(cues: Iterable[Cue]) -> str:
    """The cues as SubRip."""
    return "\n".join(
        f"{number}\n{_clock(cue.start_s, ',')} --> {_clock(cue.end_s, ',')}\n{cue.text}\n"
        for number, cue in enumerate(cues, start=1)
    )


def as_vtt(cues: Iterable[Cue]) -> str:
    """The cues as WebVTT."""
    blocks = [f"{_clock(cue.start_s, '.')} --> {_clock(cue.end_s, '.')}\n{_escaped(cue.text)}\n" for cue in cues]
    return "\n".join(["WEBVTT\n", *blocks])


def cues_of(words: Sequence[TimedWord], start_s: float, end_s: float) -> list[Cue]:
    """A segment as cues of at most ``MAX_CUE_CHARACTERS``; broken only where the words have times."""
    text = "".join(word.text for word in words).strip()
    if not text:
        return []
    cues: list[Cue] = []
    for word in words:
        if word.start_s is None or word.end_s is None:
            return [Cue(start_s, end_s, text)]
        if cues and len(cues[-1].text) + len(word.text) <= MAX_CUE_CHARACTERS:
            cues[-1] = Cue(cues[-1].start_s, word.end_s, cues[-1].text + word.text)
        else:
            cues.append(Cue(word.start_s, word.end_s, word.text.lstrip()))
    return cues


def _clock(time_s: float, decimal_mark: str) -> str:
    total_ms = round(time_s * 1000)
    total_s, ms = divmod(total_ms, 1000)
    minutes, s = divmod(total_s, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{s:02}{decimal_mark}{ms:03}"


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
