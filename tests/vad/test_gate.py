"""Laws of the gate over random probabilities, and the moments at which it speaks."""

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vad.audio import samples_from_ms
from vad.framer import WINDOW_SAMPLES
from vad.gate import Gate, GateEvent, GateSettings, SpeechEnded, SpeechPaused, SpeechResumed, SpeechStarted

WINDOW_MS = 32
probabilities = st.lists(
    st.one_of(st.floats(0.0, 1.0), st.sampled_from([0.0, 0.2, 0.34, 0.35, 0.4, 0.5, 0.9])), max_size=200
)
# Runs make long speech and long silence likely, which single draws don't.
runs = st.lists(st.tuples(st.sampled_from([0.0, 0.3, 0.9]), st.integers(1, 30)), max_size=20).map(
    lambda pairs: [probability for probability, n_windows in pairs for _ in range(n_windows)]
)
tracks = st.one_of(probabilities, runs)
settings_of_all_kinds = st.builds(
    GateSettings,
    threshold=st.floats(0.4, 0.9),
    negative_threshold=st.floats(0.05, 0.4),
    min_speech_ms=st.integers(32, 200),
    onset_ms=st.integers(200, 600),
    pause_ms=st.integers(32, 600),
    hangover_ms=st.integers(100, 5000),
    pre_roll_ms=st.integers(300, 1000),
    post_roll_ms=st.integers(0, 1000),
)


@dataclass(frozen=True)
class Span:
    start: int
    end: int
    onset: int
    speech_end: int


def events_of(track: list[float], settings: GateSettings, *, from_sample: int = 0) -> list[GateEvent]:
    """Everything the gate says about ``track``, the end of audio included."""
    gate = Gate(settings, not_before_sample=from_sample)
    events = [event for index, p in enumerate(track) for event in gate.push(from_sample + index * WINDOW_SAMPLES, p)]
    return events + gate.force_end(from_sample + len(track) * WINDOW_SAMPLES)


def spans_of(events: list[GateEvent]) -> list[Span]:
    ends = [event for event in events if isinstance(event, SpeechEnded)]
    starts = [event for event in events if isinstance(event, SpeechStarted)]
    return [
        Span(start.start_sample, end.end_sample, start.onset_sample, end.speech_end_sample)
        for start, end in zip(starts, ends, strict=True)
    ]


def hurried(n_silent: int, hurry_ms: int, *, resumes: bool = False) -> int:
    """Windows of silence until the span ends, told to hurry after ``n_silent`` of them."""
    gate = Gate(GateSettings(hangover_ms=3_200))
    track = [0.9] * 10 + [0.0] * n_silent
    for index, probability in enumerate(track):
        gate.push(index * WINDOW_SAMPLES, probability)
    gate.hurry(hurry_ms)
    track += [0.9] * 3 if resumes else []
    for index in range(n_silent + 10, len(track)):
        gate.push(index * WINDOW_SAMPLES, track[index])
    n_windows = 0 if resumes else n_silent
    while gate.is_speech:
        gate.push((len(track) + n_windows - (0 if resumes else n_silent)) * WINDOW_SAMPLES, 0.0)
        n_windows += 1
    return n_windows


def test_a_span_told_to_hurry_ends_after_less_silence_but_never_more() -> None:
    assert hurried(5, 320) == 10
    assert hurried(20, 320) == 21, "at the next window, if it is over already"
    assert hurried(5, 9_000) == 100


def test_of_several_hangovers_the_least_holds() -> None:
    gate = Gate(GateSettings(hangover_ms=3_200))
    for index in range(13):
        gate.push(index * WINDOW_SAMPLES, 0.9 if index < 10 else 0.0)
    gate.hurry(320)
    gate.hurry(640)
    n_windows = 3
    while gate.is_speech:
        gate.push((10 + n_windows) * WINDOW_SAMPLES, 0.0)
        n_windows += 1
    assert n_windows == 10


def test_a_voice_that_comes_back_has_the_whole_hangover_again() -> None:
    assert hurried(5, 320, resumes=True) == 100


@given(tracks, settings_of_all_kinds, st.integers(0, 10**9))
def test_spans_are_ordered_and_never_overlap(track: list[float], settings: GateSettings, from_sample: int) -> None:
    edge = from_sample
    for span in spans_of(events_of(track, settings, from_sample=from_sample)):
        assert edge <= span.start <= span.onset < span.speech_end <= span.end
        edge = span.end
    assert edge <= from_sample + len(track) * WINDOW_SAMPLES


@given(tracks, settings_of_all_kinds)
def test_events_follow_the_order_started_paused_resumed_ended(track: list[float], settings: GateSettings) -> None:
    may_follow: dict[type | None, set[type]] = {
        None: {SpeechStarted},
        SpeechStarted: {SpeechPaused, SpeechEnded},
        SpeechPaused: {SpeechResumed, SpeechEnded},
        SpeechResumed: {SpeechPaused, SpeechEnded},
        SpeechEnded: {SpeechStarted},
    }
    last: type | None = None
    for event in events_of(track, settings):
        assert type(event) in may_follow[last]
        last = type(event)
    assert last in (None, SpeechEnded)


@given(tracks, settings_of_all_kinds)
def test_the_pre_roll_is_whole_where_no_span_is_in_its_way(track: list[float], settings: GateSettings) -> None:
    edge = 0
    for span in spans_of(events_of(track, settings)):
        assert span.start == max(edge, span.onset - samples_from_ms(settings.pre_roll_ms))
        edge = span.end


@given(tracks, settings_of_all_kinds)
def test_every_sustained_voice_lies_in_a_span(track: list[float], settings: GateSettings) -> None:
    spans = spans_of(events_of(track, settings))
    n_needed = -(-settings.min_speech_ms // WINDOW_MS)
    n_voiced = 0
    for index, probability in enumerate(track):
        n_voiced = n_voiced + 1 if probability >= settings.threshold else 0
        if n_voiced >= n_needed:
            first, last = (index - n_needed + 1) * WINDOW_SAMPLES, (index + 1) * WINDOW_SAMPLES
            assert any(span.start <= first and last <= span.end for span in spans)


@given(st.lists(st.floats(0.0, GateSettings().threshold, exclude_max=True), max_size=300))
def test_nothing_below_the_threshold_ever_makes_an_event(track: list[float]) -> None:
    assert events_of(track, GateSettings()) == []


@given(tracks, settings_of_all_kinds)
def test_a_span_holds_at_least_the_minimum_of_speech_unless_it_was_forced(
    track: list[float], settings: GateSettings
) -> None:
    gate = Gate(settings)
    events = [event for index, p in enumerate(track) for event in gate.push(index * WINDOW_SAMPLES, p)]
    for event in events:
        if isinstance(event, SpeechStarted):
            heard = track[event.onset_sample // WINDOW_SAMPLES :][: -(-settings.onset_ms // WINDOW_MS)]
            assert sum(p >= settings.threshold for p in heard) * WINDOW_MS >= settings.min_speech_ms


@given(tracks, settings_of_all_kinds)
def test_audio_to_keep_reaches_back_far_enough_for_every_later_span(track: list[float], settings: GateSettings) -> None:
    gate = Gate(settings)
    kept_from = gate.keep_from_sample
    for index, probability in enumerate(track):
        events = gate.push(index * WINDOW_SAMPLES, probability)
        assert all(event.start_sample >= kept_from for event in events if isinstance(event, SpeechStarted))
        assert gate.keep_from_sample >= kept_from
        kept_from = gate.keep_from_sample
        backlog_ms = ((index + 1) * WINDOW_SAMPLES - kept_from) // 16
        assert backlog_ms <= settings.pre_roll_ms + settings.onset_ms + WINDOW_MS or gate.is_speech
        assert backlog_ms <= max(settings.hangover_ms, settings.pre_roll_ms + settings.onset_ms) + WINDOW_MS


@given(tracks, settings_of_all_kinds, st.integers(0, 200))
def test_a_flush_anywhere_closes_the_span_and_nothing_later_reaches_behind_it(
    track: list[float], settings: GateSettings, cut: int
) -> None:
    gate, cut = Gate(settings), min(cut, len(track))
    cut_sample = cut * WINDOW_SAMPLES
    before = [event for index in range(cut) for event in gate.push(index * WINDOW_SAMPLES, track[index])]
    had_voice = gate.is_speech or gate.is_pending
    forced = gate.force_end(cut_sample)
    assert bool(forced) == had_voice
    assert not gate.is_speech and not gate.is_pending
    assert gate.force_end(cut_sample) == []
    after = [event for index in range(cut, len(track)) for event in gate.push(index * WINDOW_SAMPLES, track[index])]
    after += gate.force_end(len(track) * WINDOW_SAMPLES)
    spans = spans_of(before + forced + after)
    assert all(earlier.end <= later.start for earlier, later in zip(spans, spans[1:], strict=False))
    assert all(span.end <= cut_sample for span in spans_of(before + forced))
    assert all(span.onset >= cut_sample for span in spans_of(after))


def test_a_click_is_not_speech_and_three_windows_are() -> None:
    assert events_of([0.0] * 20 + [0.9] * 2 + [0.0] * 40, GateSettings()) == []
    onset = 20 * WINDOW_SAMPLES
    assert events_of([0.0] * 20 + [0.9] * 3 + [0.0] * 40, GateSettings()) == [
        SpeechStarted(onset - samples_from_ms(320), onset),
        SpeechPaused(onset + (3 + 6) * WINDOW_SAMPLES),  # 192 ms
        SpeechEnded(onset + 3 * WINDOW_SAMPLES + samples_from_ms(160), onset + 3 * WINDOW_SAMPLES),
    ]


@pytest.mark.parametrize("ms", [33, 200, 1000])
def test_a_minimum_that_is_no_whole_number_of_windows_can_be_met(ms: int) -> None:
    gate = Gate(GateSettings(min_speech_ms=ms, onset_ms=ms))
    n_needed = -(-ms // WINDOW_MS)
    said = [bool(gate.push(index * WINDOW_SAMPLES, 0.9)) for index in range(n_needed)]
    assert said == [False] * (n_needed - 1) + [True]


def test_speech_starts_in_the_window_that_completes_the_minimum_and_ends_in_the_one_that_completes_the_hangover() -> (
    None
):
    gate = Gate(GateSettings(hangover_ms=450))
    said = [bool(gate.push(index * WINDOW_SAMPLES, 0.9)) for index in range(10)]
    assert said == [False, False, True] + [False] * 7
    ends = [gate.push(index * WINDOW_SAMPLES, 0.0) for index in range(10, 30)]
    assert [index for index, events in enumerate(ends, start=1) if any(isinstance(e, SpeechEnded) for e in events)] == [
        15
    ]


def test_a_window_between_the_thresholds_prolongs_a_voice_and_does_not_revive_one() -> None:
    voice = [0.9] * 5
    [*_, prolonged] = events_of(voice + [0.3] * 10 + [0.0] * 40, GateSettings())
    assert isinstance(prolonged, SpeechEnded) and prolonged.speech_end_sample == 15 * WINDOW_SAMPLES
    [*_, over] = events_of(voice + [0.0] + [0.3] * 40, GateSettings())
    assert isinstance(over, SpeechEnded) and over.speech_end_sample == 5 * WINDOW_SAMPLES


def test_a_voice_that_comes_back_within_the_hangover_resumes_the_span() -> None:
    events = events_of([0.9] * 5 + [0.0] * 10 + [0.9] * 5 + [0.0] * 40, GateSettings())
    assert [type(event) for event in events] == [
        SpeechStarted,
        SpeechPaused,
        SpeechResumed,
        SpeechPaused,
        SpeechEnded,
    ]
    assert events[2] == SpeechResumed(15 * WINDOW_SAMPLES)


def test_there_is_no_pause_when_the_hangover_is_shorter() -> None:
    events = events_of([0.9] * 5 + [0.0] * 40, GateSettings(hangover_ms=100, pause_ms=192))
    assert [type(event) for event in events] == [SpeechStarted, SpeechEnded]


def test_a_pending_onset_is_accepted_by_a_flush() -> None:
    gate = Gate(GateSettings())
    gate.push(0, 0.0)
    gate.push(WINDOW_SAMPLES, 0.9)
    assert gate.is_pending and not gate.is_speech
    assert gate.force_end(WINDOW_SAMPLES + 100) == [
        SpeechStarted(0, WINDOW_SAMPLES),
        SpeechEnded(WINDOW_SAMPLES + 100, WINDOW_SAMPLES + 100),
    ]


def test_windows_go_on_at_the_flushed_sample_inside_the_window_filled_with_zeros() -> None:
    gate = Gate(GateSettings())
    gate.push(0, 0.9)
    gate.force_end(100)
    gate.push(100, 0.9)
    [started, ended] = gate.force_end(100 + WINDOW_SAMPLES)
    assert started == SpeechStarted(100, 100)
    assert ended == SpeechEnded(100 + WINDOW_SAMPLES, 100 + WINDOW_SAMPLES)


def test_clicks_far_apart_do_not_add_up_to_speech() -> None:
    assert events_of(([0.9] + [0.0] * 9) * 20, GateSettings()) == []


def test_no_span_begins_before_the_first_sample_of_the_gate() -> None:
    [started, *_] = events_of([0.9] * 5, GateSettings(), from_sample=7000)
    assert started == SpeechStarted(7000, 7000)


def test_a_window_that_goes_back_in_time_is_refused() -> None:
    gate = Gate(GateSettings())
    gate.push(0, 0.1)
    with pytest.raises(ValueError, match="window at 100 begins before 512"):
        gate.push(100, 0.1)


@pytest.mark.parametrize("probability", [-0.1, 1.1, float("nan"), float("inf")])
def test_a_probability_that_is_none_is_refused(probability: float) -> None:
    with pytest.raises(ValueError, match=r"lies outside 0\.\.1"):
        Gate(GateSettings()).push(0, probability)


def test_an_end_before_the_last_window_is_refused() -> None:
    gate = Gate(GateSettings())
    gate.push(0, 0.1)
    with pytest.raises(ValueError, match="can't end at 0: the last window reached 512"):
        gate.force_end(0)


@pytest.mark.parametrize(
    ("setting", "value", "told"),
    [
        ("threshold", 1.5, "0.01..0.99"),
        ("threshold", float("nan"), "0.01..0.99"),
        ("negative_threshold", 0.6, "0.01..0.4"),
        ("min_speech_ms", 0, "32..1000 ms"),
        ("onset_ms", 50, "96..2000 ms"),
        ("pause_ms", 6000, "32..5000 ms"),
        ("hangover_ms", 99, "100..10000 ms"),
        ("hangover_ms", 10_001, "100..10000 ms"),
        ("pre_roll_ms", 200, "300..2000 ms"),
        ("post_roll_ms", -1, "0..5000 ms"),
    ],
)
def test_a_setting_out_of_range_is_refused_with_its_range_and_unit(setting: str, value: float, told: str) -> None:
    with pytest.raises(ValueError, match=setting) as refusal:
        GateSettings(**{setting: value})  # type: ignore[arg-type]
    assert told in str(refusal.value) and str(value) in str(refusal.value)
