"""The rolling audio of a session."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streaming.window import RollingAudio
from vad.audio import AudioFrame, SpeechSpan


@given(st.lists(st.tuples(st.integers(0, 70_000), st.integers(0, 80_000)), max_size=12))
def test_what_is_kept_is_what_came(steps: list[tuple[int, int]]) -> None:
    """Any mix of appending and forgetting leaves exactly the newest samples, in place."""
    window = RollingAudio()
    handed_out = []
    for n_samples, forget in steps:
        start = window.end_sample
        window.append(AudioFrame(start, np.arange(start, start + n_samples, dtype=np.float32)))
        window.drop_before(window.start_sample + forget)
        kept = window.samples(SpeechSpan(window.start_sample, window.end_sample))
        assert np.array_equal(kept, np.arange(window.start_sample, window.end_sample, dtype=np.float32))
        handed_out.append((kept, kept.copy()))
    assert all(np.array_equal(kept, then) for kept, then in handed_out), "what was handed out stays as it was"


def test_forgetting_never_goes_past_the_end_or_back() -> None:
    window = RollingAudio()
    window.append(AudioFrame(0, np.zeros(10, np.float32)))
    window.drop_before(50)
    assert (window.start_sample, window.end_sample) == (10, 10)
    window.drop_before(3)
    assert window.start_sample == 10


def test_a_gap_in_the_audio_is_refused() -> None:
    window = RollingAudio()
    with pytest.raises(ValueError, match="begins at sample 5, the window ends at 0"):
        window.append(AudioFrame(5, np.zeros(1, np.float32)))


def test_forgotten_audio_can_not_be_asked_for() -> None:
    window = RollingAudio()
    window.append(AudioFrame(0, np.zeros(100, np.float32)))
    window.drop_before(50)
    with pytest.raises(ValueError, match="not inside 50..100"):
        window.samples(SpeechSpan(40, 60))


def test_what_was_handed_out_stays_as_it_was() -> None:
    window = RollingAudio()
    window.append(AudioFrame(0, np.ones(100, np.float32)))
    held = window.samples(SpeechSpan(0, 100))
    window.drop_before(100)
    window.append(AudioFrame(100, np.zeros(1 << 17, np.float32)))
    assert held.sum() == 100


def test_memory_stays_bounded_over_hours() -> None:
    window = RollingAudio()
    second = np.zeros(16_000, np.float32)
    for i in range(3_600):
        window.append(AudioFrame(i * 16_000, second))
        window.drop_before(window.end_sample - 15 * 16_000)
    assert window._buffer.nbytes < 4 * 16_000 * 60
