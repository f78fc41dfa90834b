"""From probabilities to spans of speech: hysteresis, a minimum of speech, hangover and padding.

Knows the probability of each window and positions on the audio axis, and decides. Does not know samples, detectors or
clocks: what it is told is all that happens to it.
"""

from dataclasses import dataclass

from .audio import samples_from_ms
from .framer import WINDOW_SAMPLES


@dataclass(frozen=True, slots=True)
class GateSettings:
    """How much evidence makes speech, and how much silence ends it.

    A window is voiced from ``threshold`` on and stays so, for the windows behind it, until one is below
    ``negative_threshold``. ``min_speech_ms`` of windows at or above ``threshold`` within ``onset_ms`` are speech; less
    is a click.
    """

    threshold: float = 0.4  # 0.01..0.99
    negative_threshold: float = 0.2  # 0.01..threshold
    min_speech_ms: int = 96  # 32..1000
    onset_ms: int = 256  # min_speech_ms..2000
    pause_ms: int = 192  # 32..5000; silence after which decoding pays; no event if the hangover is over first
    hangover_ms: int = 450  # 100..10000; silence that ends a span
    pre_roll_ms: int = 320  # 300..2000; audio before the onset that belongs to the span
    post_roll_ms: int = 160  # 0..5000; audio behind the last voiced window that belongs to the span

    def __post_init__(self) -> None:
        """Raises ``ValueError`` that names setting, value, unit and range."""
        _check_range("threshold", self.threshold, 0.01, 0.99, "")
        _check_range("negative_threshold", self.negative_threshold, 0.01, self.threshold, " (which is threshold)")
        _check_range("min_speech_ms", self.min_speech_ms, 32, 1000, " ms")
        _check_range("onset_ms", self.onset_ms, self.min_speech_ms, 2000, " ms (from min_speech_ms on)")
        _check_range("pause_ms", self.pause_ms, 32, 5000, " ms")
        _check_range("hangover_ms", self.hangover_ms, 100, 10_000, " ms")
        _check_range("pre_roll_ms", self.pre_roll_ms, 300, 2000, " ms")
        _check_range("post_roll_ms", self.post_roll_ms, 0, 5000, " ms")


def _check_range(name: str, value: float, low: float, high: float, unit: str) -> None:
    if not low <= value <= high:  # also true for NaN
        raise ValueError(f"{name} is {value}; it must lie in {low}..{high}{unit}")


@dataclass(frozen=True, slots=True)
class SpeechStarted:
    """A span begins at ``start_sample``; the voice itself was first heard in the window at ``onset_sample``."""

    start_sample: int
    onset_sample: int


@dataclass(frozen=True, slots=True)
class SpeechPaused:
    """The voice has been silent for ``pause_ms``; ``at_sample`` is where that was known. A good moment to decode."""

    at_sample: int


@dataclass(frozen=True, slots=True)
class SpeechResumed:
    """The voice came back, in the window at ``at_sample``, before the hangover was over."""

    at_sample: int


@dataclass(frozen=True, slots=True)
class SpeechEnded:
    """The span ends before ``end_sample``; the last voiced window ended at ``speech_end_sample``."""

    end_sample: int
    speech_end_sample: int


GateEvent = SpeechStarted | SpeechPaused | SpeechResumed | SpeechEnded


@dataclass(slots=True)
class _Span:
    """The speech in progress; what the settings were when it began holds for all of it."""

    settings: GateSettings
    start_sample: int
    speech_end_sample: int  # end of the last voiced window
    hurried_ms: int | None = None  # the silence that ends it, if less than the settings say; until the voice comes back
    is_voiced: bool = True
    is_paused: bool = False


class Gate:
    """Cuts one session's audio into spans that are ordered and never overlap.

    Give ``push`` every window in order. Started and ended events alternate; pauses and resumptions lie between them.
    """

    def __init__(self, settings: GateSettings, *, not_before_sample: int = 0) -> None:
        """No span will begin before ``not_before_sample``."""
        self.settings = settings  # of the next span; may be replaced at any time
        self._now_sample = not_before_sample  # end of the last window
        self._floor_sample = not_before_sample  # where the next span may begin at the earliest
        self._span: _Span | None = None
        self._onset_samples: list[int] = []  # starts of the voiced windows that are not yet enough

    @property
    def is_speech(self) -> bool:
        """Whether a span is open, hangover included."""
        return self._span is not None

    @property
    def is_pending(self) -> bool:
        """Whether there is a voice that has not yet lasted long enough to be speech."""
        return bool(self._onset_samples)

    @property
    def keep_from_sample(self) -> int:
        """The earliest sample that a span still to begin can contain.

        Windows never move it back; ``force_end`` does, by less than a window.

        Audio before it is needed only by the span that is open, if one is.
        """
        if self._span is not None:
            return self._end_of(self._span, at_sample=self._now_sample)
        onset_sample = self._onset_samples[0] if self._onset_samples else self._now_sample
        return self._start_for(onset_sample)

    def push(self, start_sample: int, probability: float) -> list[GateEvent]:
        """Take the probability of the window that begins at ``start_sample``.

        Raises:
            ValueError: for a window that begins before the end of the last, or a probability outside 0..1.
        """
        if start_sample < self._now_sample:
            raise ValueError(f"window at {start_sample} begins before {self._now_sample}, where the last one ended")
        if not 0.0 <= probability <= 1.0:
            raise ValueError(f"probability {probability} of the window at {start_sample} lies outside 0..1")
        self._now_sample = start_sample + WINDOW_SAMPLES
        if self._span is None:
            return self._listen(start_sample, probability)
        return self._follow(self._span, start_sample, probability)

    def force_end(self, at_sample: int) -> list[GateEvent]:
        """End what is in progress because no audio behind ``at_sample`` belongs to it: a flush, a stall, the end.

        A pending onset counts as speech, so that a word just before the end is not lost. The next window may begin at
        ``at_sample``, inside the last one if that was filled up with zeros.

        Raises:
            ValueError: if the whole last window lies behind ``at_sample``.
        """
        if at_sample <= self._now_sample - WINDOW_SAMPLES:
            raise ValueError(f"can't end at {at_sample}: the last window reached {self._now_sample}")
        self._now_sample = at_sample
        events: list[GateEvent] = []
        if self._span is None and self._onset_samples:
            self._span = self._begin(speech_end_sample=self._onset_samples[-1] + WINDOW_SAMPLES, events=events)
        if self._span is not None:
            self._finish(self._span, at_sample, events)
        return events

    def hurry(self, hangover_ms: int) -> None:
        """Let less silence end the span that is open, because its speaker seems to be done; until the voice is back.

        Of several the least holds.
        """
        if self._span is not None and not self._span.is_voiced:
            longest_ms = self._span.settings.hangover_ms if self._span.hurried_ms is None else self._span.hurried_ms
            self._span.hurried_ms = min(hangover_ms, longest_ms)

    def _listen(self, start_sample: int, probability: float) -> list[GateEvent]:
        events: list[GateEvent] = []
        n_onset_windows = -(-samples_from_ms(self.settings.onset_ms) // WINDOW_SAMPLES)  # whole ones that hold onset_ms
        oldest_sample = self._now_sample - n_onset_windows * WINDOW_SAMPLES
        self._onset_samples = [sample for sample in self._onset_samples if sample >= oldest_sample]
        if probability >= self.settings.threshold:
            self._onset_samples.append(start_sample)
            if len(self._onset_samples) * WINDOW_SAMPLES >= samples_from_ms(self.settings.min_speech_ms):
                self._span = self._begin(speech_end_sample=self._now_sample, events=events)
        return events

    def _follow(self, span: _Span, start_sample: int, probability: float) -> list[GateEvent]:
        events: list[GateEvent] = []
        if probability >= span.settings.threshold:
            span.is_voiced = True
        elif probability < span.settings.negative_threshold:
            span.is_voiced = False
        if span.is_voiced:
            span.speech_end_sample = self._now_sample
            span.hurried_ms = None
            if span.is_paused:
                span.is_paused = False
                events.append(SpeechResumed(start_sample))
            return events
        silence_samples = self._now_sample - span.speech_end_sample
        hangover_ms = span.settings.hangover_ms if span.hurried_ms is None else span.hurried_ms
        if silence_samples >= samples_from_ms(hangover_ms):
            self._finish(span, self._now_sample, events)
        elif silence_samples >= samples_from_ms(span.settings.pause_ms) and not span.is_paused:
            span.is_paused = True
            events.append(SpeechPaused(self._now_sample))
        return events

    def _begin(self, *, speech_end_sample: int, events: list[GateEvent]) -> _Span:
        onset_sample = self._onset_samples[0]
        start_sample = self._start_for(onset_sample)
        self._onset_samples = []
        events.append(SpeechStarted(start_sample, onset_sample))
        return _Span(self.settings, start_sample, speech_end_sample)

    def _finish(self, span: _Span, at_sample: int, events: list[GateEvent]) -> None:
        end_sample = self._end_of(span, at_sample=at_sample)
        self._span = None
        self._floor_sample = end_sample
        events.append(SpeechEnded(end_sample, min(span.speech_end_sample, at_sample)))

    def _start_for(self, onset_sample: int) -> int:
        return max(self._floor_sample, onset_sample - samples_from_ms(self.settings.pre_roll_ms))

    @staticmethod
    def _end_of(span: _Span, *, at_sample: int) -> int:
        return min(at_sample, span.speech_end_sample + samples_from_ms(span.settings.post_roll_ms))
