"""The sweep of contexts, with an engine that recites: what is played, and what its figures say."""

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile

from benchmarks.parakeet_streaming import (
    Cut,
    Figures,
    RememberingDetector,
    Setting,
    SpokenStream,
    ends_with,
    errors_of_each,
    flushed_words,
    held_out_streams,
    measure,
    offline_words,
    row,
    silence,
    starts_of_equals,
)
from models.scripted_transducer import ScriptedToken, ScriptedTransducer
from vad.audio import SAMPLE_RATE_HZ
from vad.energy import EnergyDetector

WORDS = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
SETTING = Setting(left_ms=800, chunk_ms=320, right_ms=640)


def noise(duration_s: float) -> np.ndarray:
    return np.random.default_rng(0).normal(0, 0.2, int(duration_s * SAMPLE_RATE_HZ)).astype(np.float32)


def engine(words: list[str] = WORDS) -> ScriptedTransducer:
    """A word every half second from the beginning of the noise on, misheard without 0.4 s behind it."""
    tokens = [ScriptedToken(f" {word}", 8_200 + 8_000 * n, 3) for n, word in enumerate(words)]
    return ScriptedTransducer(tokens, edge_samples=6_400)


def test_with_enough_right_context_nothing_differs_from_one_piece_and_words_are_settled_in_time() -> None:
    stream = SpokenStream(np.concatenate([silence(0.5), noise(4.0), silence(1.0)]), tuple(WORDS))
    whole = measure(engine(), EnergyDetector(), Setting(800, 320, 640, second_pass=True), [stream])
    figures = measure(engine(), EnergyDetector(), SETTING, [stream])
    assert whole.error_rate == figures.error_rate == 0.0 and figures.differs_from(whole) == (0, 0, 0)
    assert figures.start_differences_s(whole) == [0.0] * len(WORDS)
    assert min(whole.settle_s) > max(figures.final_s) > 0.0, "with a second pass nothing is settled before the final"
    # Until the next word begins, and until that has its right context, with a packet and a window on top.
    assert max(figures.settle_s) <= 0.5 + 0.32 + 0.64 + 0.1
    assert row(SETTING, figures, whole).startswith(
        "| 800 | 320 | 640 | 0.00 | +0.00 (+0.00 to +0.00) | 0 / 0 / 0 | 100.0 |"
    )


def test_errors_are_counted_where_they_are_and_a_word_put_in_where_it_stands() -> None:
    references = ["one two", "three", "four five six"]
    assert errors_of_each(references, "one two three four five six") == [0, 0, 0]
    assert errors_of_each(references, "one too three four six") == [1, 0, 1]
    assert errors_of_each(references, "oh one two three four five six seven") == [1, 0, 1]
    assert errors_of_each(references, "") == [2, 1, 3]


def test_starts_are_compared_of_the_same_words_and_of_several_the_nearest() -> None:
    first = [("the", 1.0), ("cat", 1.5), ("sat", 2.0), ("on", 2.5)]
    assert starts_of_equals(first, first) == [(start_s, start_s) for _, start_s in first]
    assert starts_of_equals(first, [("cat", 1.6), ("sad", 2.0), ("on", 2.4)]) == [(1.5, 1.6), (2.5, 2.4)]
    heard = [("a", 1.0), ("the", 3.1)]
    assert starts_of_equals([("the", 1.0), ("the", 3.0)], heard) == [(3.0, 3.1)]
    assert starts_of_equals([("the", 1.0), ("the", 3.0)], heard[1:]) == [(3.0, 3.1)], "not the first of the two"
    assert starts_of_equals(first, []) == starts_of_equals([], first) == []


def test_an_interval_holds_the_difference_and_is_the_narrower_the_fewer_recordings_differ() -> None:
    whole = Figures(n_words=[10] * 200, n_errors=[4] * 200)
    few = Figures(n_words=[10] * 200, n_errors=[*[5] * 8, *[3] * 4, *[4] * 188])
    many = Figures(n_words=[10] * 200, n_errors=[*[5] * 80, *[3] * 76, *[4] * 44])
    (few_low, few_high), (low, high) = few.interval_against(whole), many.interval_against(whole)
    assert low < few_low < 0.002 < few_high < high
    assert -0.011 < low and high < 0.015, "two deviations of the mean of 200 differences of about 0.09"
    assert whole.interval_against(whole) == (0.0, 0.0)


def test_a_detector_that_remembers_answers_the_same() -> None:
    detector, windows = EnergyDetector(), noise(0.5)[: 10 * 512].reshape(10, 512)
    remembering = RememberingDetector(detector)
    question = [(remembering.initial_state(), windows)]
    [(fresh, _)], [(first, _)], [(again, _)] = (d.score(question) for d in (detector, remembering, remembering))
    assert np.array_equal(fresh, first) and again is first


def test_streams_are_of_speakers_kept_apart_only(tmp_path: Path) -> None:
    lines = []
    for speaker in ("ab1", "ab2", "ab3"):
        for n in range(3):
            file = f"{speaker}-{n}.wav"
            soundfile.write(tmp_path / file, noise(2.0), SAMPLE_RATE_HZ)
            line = {"id": file, "file": file, "text": f"Said by {speaker}!", "speaker": speaker, "duration_s": 2.0}
            lines.append(json.dumps(line))
    (tmp_path / "list.jsonl").write_text("\n".join(lines), encoding="utf-8")
    [stream] = held_out_streams(tmp_path / "list.jsonl", minutes=5.0)
    assert len(set(stream.text.split())) == 3 and len(stream.text.split()) == 9
    assert 7.0 < len(stream.samples) / SAMPLE_RATE_HZ < 12.0


@pytest.mark.parametrize("gap_ms", [0, 200])
def test_words_at_a_flush_are_counted_both_ways(gap_ms: int) -> None:
    cut = Cut(np.concatenate([silence(0.5), noise(1.0), silence(1.0)]), "two", 24_000)
    assert flushed_words(engine(WORDS[:2]), EnergyDetector(), SETTING, [cut], gap_ms) == 1
    assert offline_words(engine(WORDS[:2]), [cut], gap_ms) == 1
    assert ends_with("One, two.", "two") and not ends_with("two one", "two") and not ends_with("", "two")
