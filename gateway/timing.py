"""How late a session's text is: delays against the moments at which the audio came. Pure; the time is passed in.

Knows when which second of audio arrived and what was said when. Does not know how figures are kept or shown.
"""

from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from enum import StrEnum

from gateway.effects import Said, UtteranceOver
from gateway.messages import Final, Partial, SpeechEnded, SpeechStarted, WordItem

MAX_ARRIVALS = 8_192  # packets whose arrival is remembered; half are forgotten when there are more


class Delay(StrEnum):
    """What is measured, in seconds."""

    FIRST_PARTIAL = "first_partial"  # from the onset of speech to the first text of it
    TIME_TO_FINAL = "time_to_final"  # from the end of speech to the final
    WORD_SHOWN = "word_shown"  # from a word's end to its first showing
    WORD_SETTLED = "word_settled"  # and to the text that will not change


@dataclass(frozen=True, slots=True)
class Observation:
    """One measured delay."""

    delay: Delay
    seconds: float


class Timing:
    """One session's delays."""

    def __init__(self) -> None:
        self._audio_s: list[float] = []  # how much audio there was, rising, and when
        self._arrived_s: list[float] = []
        self._onsets_s: deque[float] = deque()  # arrival of the onset of each utterance in work
        self._ends_s: deque[float] = deque()  # and of its end, where it has ended
        self._is_first = True
        self._has_final = False
        self._shown_s = 0.0  # audio position up to which words have been shown, and settled
        self._settled_s = 0.0

    def took(self, audio_s: float, now_s: float) -> None:
        """There are ``audio_s`` seconds of audio now."""
        if len(self._audio_s) >= MAX_ARRIVALS:
            del self._audio_s[: MAX_ARRIVALS // 2], self._arrived_s[: MAX_ARRIVALS // 2]
        self._audio_s.append(audio_s)
        self._arrived_s.append(now_s)

    def heard(self, said: Said, now_s: float) -> list[Observation]:
        """The delays that what was said now makes known."""
        match said:
            case SpeechStarted(onset_s=onset_s):
                self._onsets_s.append(self._arrival_s(onset_s))
            case SpeechEnded(speech_end_s=end_s):
                self._ends_s.append(self._arrival_s(end_s))
            case Partial() | Final():
                return self._transcribed(said, now_s)
            case UtteranceOver():
                return self._over(now_s)
            case _:
                pass
        return []

    def _arrival_s(self, audio_s: float) -> float:
        index = bisect_left(self._audio_s, audio_s)
        return self._arrived_s[min(index, len(self._arrived_s) - 1)] if self._arrived_s else 0.0

    def _transcribed(self, segment: Partial | Final, now_s: float) -> list[Observation]:
        if not segment.text:
            return []
        found = []
        if self._is_first and self._onsets_s:
            found.append(Observation(Delay.FIRST_PARTIAL, now_s - self._onsets_s[0]))
        self._is_first = False
        self._has_final = self._has_final or isinstance(segment, Final)
        found += self._words(segment.words, self._shown_s, Delay.WORD_SHOWN, now_s)
        found += self._words(segment.words[: segment.n_committed], self._settled_s, Delay.WORD_SETTLED, now_s)
        self._shown_s = max([self._shown_s, *_ends(segment.words)])
        self._settled_s = max([self._settled_s, *_ends(segment.words[: segment.n_committed])])
        return found

    def _words(self, words: tuple[WordItem, ...], behind_s: float, delay: Delay, now_s: float) -> list[Observation]:
        return [Observation(delay, now_s - self._arrival_s(end_s)) for end_s in _ends(words) if end_s > behind_s]

    def _over(self, now_s: float) -> list[Observation]:
        had_final, self._has_final, self._is_first = self._has_final, False, True
        if self._onsets_s:
            self._onsets_s.popleft()
        ended_s = self._ends_s.popleft() if self._ends_s else now_s
        return [Observation(Delay.TIME_TO_FINAL, now_s - ended_s)] if had_final else []


def _ends(words: tuple[WordItem, ...]) -> list[float]:
    return [word.end_s for word in words if word.end_s is not None]
