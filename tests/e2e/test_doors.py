"""Real speech through every door, with the real model and detector: the text is that of the native protocol."""

from functools import cache

import numpy as np
import pytest
import soundfile
import soxr

from benchmarks.door_texts import RECIPES, Models, Samples, same_words, text_through
from benchmarks.remembering import RememberingDetector, RememberingEngine, RememberingJudge
from models.smart_turn import SmartTurn
from models.store import recording, turn_model
from tests.fetched import engine_of, or_skip
from tests.words import error_rate, normalised
from vad.audio import SAMPLE_RATE_HZ
from vad.levels import TwoLevelDetector
from vad.silero import SileroDetector

pytestmark = [pytest.mark.weights, pytest.mark.e2e]

HOPE_TEXT = "It was the spring of hope, it was the winter of despair."


@cache
def models() -> Models:
    with or_skip():
        engine, judge = engine_of("whisper-tiny.en"), SmartTurn(turn_model())
    detector = RememberingDetector(TwoLevelDetector(SileroDetector()))
    return Models(RememberingEngine(engine), detector, RememberingJudge(judge))


@cache
def hope() -> Samples:
    """Half a second of silence, the sentence, and a second of silence."""
    with or_skip():
        samples, rate_hz = soundfile.read(recording("two_cities"), dtype="float32")
    said = soxr.resample(samples[int(17.4 * rate_hz) : int(20.9 * rate_hz)], rate_hz, SAMPLE_RATE_HZ)
    return np.concatenate([np.zeros(8_000, np.float32), said, np.zeros(16_000, np.float32)])


@pytest.mark.parametrize("door", RECIPES)
def test_the_text_is_that_of_the_native_protocol(door: str) -> None:
    here, there = text_through(RECIPES[door], hope(), models())
    assert same_words(here, there)
    assert error_rate(HOPE_TEXT, here) == 0


@pytest.mark.parametrize("door", RECIPES)
def test_two_turns_with_a_pause_between_them_are_those_of_the_native_protocol(door: str) -> None:
    here, there = text_through(RECIPES[door], np.concatenate([hope(), hope()]), models())
    assert same_words(here, there)
    assert error_rate(f"{HOPE_TEXT} {HOPE_TEXT}", here) == 0


@pytest.mark.parametrize("door", RECIPES)
@pytest.mark.parametrize("gap_ms", [0, 100])
def test_the_last_word_just_before_the_end_is_heard(door: str, gap_ms: int) -> None:
    cut = int((0.5 + 3.1) * SAMPLE_RATE_HZ)  # to the last of "despair"
    said = np.concatenate([hope()[:cut], np.zeros(gap_ms * 16, np.float32)])
    here, _ = text_through(RECIPES[door], said, models())
    assert normalised(here).split()[-1] == "despair"


@pytest.mark.parametrize("door", RECIPES)
def test_what_is_not_speech_gives_no_text(door: str) -> None:
    noise = np.random.default_rng(7).normal(0, 0.1, 5 * SAMPLE_RATE_HZ).astype(np.float32)
    here, there = text_through(RECIPES[door], noise, models())
    assert here == there == ""
