"""The demo's figures from given arrivals, and its server."""

from pathlib import Path

import pytest

from gateway.client_events import Event, Final, Partial, SpeechEnded, SpeechStarted, Word
from gateway.commands.demo import (
    Arrival,
    final_delays_s,
    first_partial_delays_s,
    report,
    serving,
    transcript,
)
from gateway.commands.failure import CommandError
from gateway.commands.word_errors import compare, words_of


def final(text: str, end_s: float, *, reason: str = "silence") -> Final:
    words = tuple(Word(f" {word}", None, end_s, None) for word in text.split())
    return Final(1, 1, 1, text, 0.0, end_s, words, len(words), "en", reason)


def partial(text: str) -> Partial:
    return Partial(1, 1, 1, text, 0.0, 1.0, (), 0, "en")


def arrivals(*items: tuple[float, Event]) -> list[Arrival]:
    return [Arrival(at_s, event) for at_s, event in items]


SESSION = arrivals(
    (1.4, SpeechStarted(1, 0.7, 1.0)),
    (1.5, partial("")),
    (1.75, partial("it")),
    (2.0, partial("it was")),
    (3.0, SpeechEnded(1, 2.5, 2.6)),
    (3.25, final("It was the", 2.5)),
    (4.0, SpeechStarted(1, 3.5, 3.75)),
    (5.25, final("best", 5.0, reason="max_span")),
    (5.8, SpeechEnded(1, 5.5, 5.6)),
    (6.0, final("of times", 5.5)),
)


def test_the_first_partial_counts_from_the_onset_to_the_first_words() -> None:
    assert first_partial_delays_s(SESSION) == [0.75, 1.5]


def test_finals_count_from_the_end_of_the_voice_unless_speech_went_on() -> None:
    assert final_delays_s(SESSION) == [0.75, 0.5]


def test_the_report_has_words_and_delays_and_cpu_time() -> None:
    errors = compare(words_of("it was the best of crimes"), words_of(transcript(SESSION)))
    text = report(SESSION, errors, audio_s=10.0, cpu_s=2.5)
    assert "5 of 6 right" in text
    assert "1 wrong, 0 missing, 0 extra" in text
    assert "1.12 s (median of 2, longest 1.50 s)" in text
    assert "2.5 s for 10.0 s of audio: real-time factor 0.25" in text


def test_a_report_of_nothing_says_none() -> None:
    assert "none" in report([], compare(["a"], []), audio_s=1.0, cpu_s=None)


@pytest.mark.e2e
def test_a_server_that_does_not_start_is_reported_with_what_it_said() -> None:
    with pytest.raises(CommandError, match=r"did not come up(.|\n)*no model 'whisper-huge'"), serving("whisper-huge"):
        pass


@pytest.mark.e2e
def test_a_server_of_the_demo_stops_with_it() -> None:
    with serving("scripted") as server:
        assert server.process.poll() is None
        cpu_s = server.cpu_s()
        assert cpu_s is None or cpu_s > 0
    assert server.process.poll() is not None


@pytest.mark.e2e
def test_a_server_of_the_demo_fetches_no_model_of_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SENSEWAY_TURN_MODEL", raising=False)
    monkeypatch.setenv("SENSEWAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")  # what is fetched after all fails at once
    with serving("scripted"):
        pass
    assert not (tmp_path / "cache").exists()  # where a fetch begins
