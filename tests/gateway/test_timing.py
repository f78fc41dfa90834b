"""Delays of text against the moments at which its audio came."""

from gateway.effects import UtteranceOver
from gateway.messages import Final, Partial, SpeechEnded, SpeechStarted, WordItem
from gateway.timing import MAX_ARRIVALS, Delay, Observation, Timing


def live(timing: Timing, until_s: float, *, since_s: float = 0.0, lag_s: float = 0.0) -> None:
    """Audio in packets of 100 ms, each ``lag_s`` after its end was spoken."""
    for index in range(round(since_s * 10) + 1, round(until_s * 10) + 1):
        timing.took(index / 10, index / 10 + lag_s)


def segment(kind, n_committed, *ends_s, **more):
    words = tuple(WordItem(f" w{index}", end_s - 0.2, end_s, None) for index, end_s in enumerate(ends_s))
    text = "".join(word.text for word in words).strip()
    return kind(0, 1, 1, text, 0.0, 9.0, words, n_committed, "en", **more)


def rounded(observations: list[Observation]) -> list[tuple[Delay, float]]:
    return [(observation.delay, round(observation.seconds, 3)) for observation in observations]


def test_an_utterance_gives_each_delay_once() -> None:
    timing = Timing()
    live(timing, 1.0)
    assert timing.heard(SpeechStarted(1, 0.2, 0.5), 1.0) == []
    assert rounded(timing.heard(segment(Partial, 0, 0.8), 1.3)) == [
        (Delay.FIRST_PARTIAL, 0.8),
        (Delay.WORD_SHOWN, 0.5),
    ]
    live(timing, 2.0, since_s=1.0)
    assert rounded(timing.heard(segment(Partial, 1, 0.8, 1.2), 1.7)) == [
        (Delay.WORD_SHOWN, 0.5),
        (Delay.WORD_SETTLED, 0.9),
    ]
    timing.heard(SpeechEnded(2, 1.2, 1.4), 1.9)
    final = segment(Final, 2, 0.8, 1.2, reason="silence")
    assert rounded(timing.heard(final, 2.0)) == [(Delay.WORD_SETTLED, 0.8)]
    assert rounded(timing.heard(UtteranceOver(), 2.0)) == [(Delay.TIME_TO_FINAL, 0.8)]


def test_an_utterance_without_words_gives_none() -> None:
    timing = Timing()
    live(timing, 1.0)
    timing.heard(SpeechStarted(1, 0.2, 0.5), 1.0)
    timing.heard(SpeechEnded(2, 0.8, 0.9), 1.2)
    assert timing.heard(UtteranceOver(), 1.5) == []


def test_late_packets_are_not_the_servers_delay() -> None:
    timing = Timing()
    live(timing, 1.0, lag_s=5.0)
    timing.heard(SpeechStarted(1, 0.2, 0.5), 6.0)
    assert rounded(timing.heard(segment(Partial, 0, 0.8), 6.3))[0] == (Delay.FIRST_PARTIAL, 0.8)


def test_memory_is_bounded_and_recent_audio_is_known() -> None:
    timing = Timing()
    live(timing, MAX_ARRIVALS / 10 * 3)
    assert len(timing._audio_s) <= MAX_ARRIVALS
    end_s = MAX_ARRIVALS / 10 * 3
    timing.heard(SpeechStarted(1, end_s - 1.05, end_s - 1.05), end_s)
    assert rounded(timing.heard(segment(Partial, 0, end_s), end_s + 0.5))[0] == (Delay.FIRST_PARTIAL, 1.5)
