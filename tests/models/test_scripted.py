"""The engine that recites: what it says depends on the chunk's place alone, and it behaves at the edges."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.scripted import ScriptedEngine, ScriptedFailureError, recite
from streaming.capability import Capability
from streaming.engine import Chunk, DecodeOptions, EngineStream, SpeechEngine, UnsupportedOptionError
from streaming.transcript import Hypothesis, Word, text_of
from vad.audio import SpeechSpan

TEXT = "It was the best of times, it was the worst of times"
SCRIPT = recite(TEXT, start_sample=1000, word_samples=300, gap_samples=100, confidence=0.5)
END = 1000 + len(SCRIPT) * 400


def chunk(start: int, end: int, *, prefix: tuple[Word, ...] = (), is_final: bool = False) -> Chunk:
    return Chunk(SpeechSpan(start, end), np.zeros(end - start, np.float32), is_final, prefix=prefix)


def decode(engine: ScriptedEngine, one: Chunk) -> Hypothesis:
    return engine.decode([(engine.open(DecodeOptions()), one)])[0]


def heard(start: int, end: int, *, prefix: tuple[Word, ...] = (), flicker: float = 0.0) -> tuple[Word, ...]:
    return decode(ScriptedEngine(SCRIPT, flicker=flicker), chunk(start, end, prefix=prefix)).words


def test_whole_span_recites_the_whole_text() -> None:
    assert text_of(heard(0, END)) == TEXT
    assert heard(0, END) == SCRIPT


def test_words_are_those_that_end_inside_the_span() -> None:
    assert heard(1000, 1299) == ()
    assert heard(1000, 1300) == SCRIPT[:1]
    assert heard(1300, 2100) == SCRIPT[1:3]
    assert heard(1299, 2099) == SCRIPT[:2]
    assert heard(END, END + 100) == ()


@given(start=st.integers(0, END), length=st.integers(0, END), n_prefix=st.integers(0, len(SCRIPT)))
def test_prefix_and_answer_together_are_the_answer_without_prefix(start: int, length: int, n_prefix: int) -> None:
    whole = heard(start, start + length)
    prefix = whole[:n_prefix]
    untimed = tuple(Word(word.text, None, None, None) for word in prefix)
    assert prefix + heard(start, start + length, prefix=prefix) == whole
    assert prefix + heard(start, start + length, prefix=untimed) == whole


@given(cuts=st.lists(st.integers(0, END), max_size=5))
def test_spans_that_follow_each_other_say_every_word_once(cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), END]
    said = [heard(start, end) for start, end in zip(bounds, bounds[1:], strict=False)]
    assert sum(said, ()) == SCRIPT


@given(end=st.integers(1, END))
def test_flicker_mishears_only_the_word_that_is_cut_off(end: int) -> None:
    calm, flickering = heard(0, end), heard(0, end, flicker=1.0)
    assert flickering[: len(calm)] == calm
    cut_off = [word for word in SCRIPT if (word.start_sample or 0) < end < (word.end_sample or 0)]
    misheard = flickering[len(calm) :]
    assert len(misheard) == len(cut_off)
    for word, true_word in zip(misheard, cut_off, strict=True):
        assert word.text != true_word.text
        assert word.text.startswith(" ")
        assert (word.start_sample, word.end_sample) == (true_word.start_sample, end)


def test_a_misheard_word_that_was_committed_is_not_said_again() -> None:
    cut_off = heard(0, 1900, flicker=1.0)
    assert len(cut_off) == 3
    assert heard(0, END, prefix=cut_off) == SCRIPT[3:]


def test_flicker_depends_on_the_seed_and_not_on_what_was_decoded_before() -> None:
    def run(seed: int) -> list[int]:
        engine = ScriptedEngine(SCRIPT, flicker=0.5, seed=seed)
        return [len(decode(engine, chunk(0, end)).words) for end in range(1050, END, 100)]

    assert run(1) == run(1)
    assert run(1) != run(2)
    backwards = ScriptedEngine(SCRIPT, flicker=0.5, seed=1)
    again = [len(decode(backwards, chunk(0, end)).words) for end in reversed(range(1050, END, 100))]
    assert again[::-1] == run(1)


def test_final_chunk_never_flickers() -> None:
    engine = ScriptedEngine(SCRIPT, flicker=1.0)
    assert decode(engine, chunk(0, 1900, is_final=True)).words == SCRIPT[:2]


def test_a_batch_is_answered_in_order() -> None:
    engine = ScriptedEngine(SCRIPT)
    stream = engine.open(DecodeOptions())
    answers = engine.decode([(stream, chunk(1000, 1300)), (stream, chunk(1400, 1700))])
    assert [answer.words for answer in answers] == [SCRIPT[:1], SCRIPT[1:2]]


def test_the_decodes_that_should_fail_do_and_the_others_do_not() -> None:
    engine = ScriptedEngine(SCRIPT, failing_decodes={2})
    decode(engine, chunk(0, END))
    with pytest.raises(ScriptedFailureError, match="decode 2 fails"):
        decode(engine, chunk(0, END))
    assert decode(engine, chunk(0, END)).words == SCRIPT
    assert engine.n_decodes == 3


def test_closed_stream_can_be_neither_decoded_nor_closed() -> None:
    engine: SpeechEngine = ScriptedEngine(SCRIPT)
    stream = engine.open(DecodeOptions())
    engine.close(stream)
    for use in (lambda: engine.close(stream), lambda: engine.decode([(stream, chunk(0, 10))])):
        with pytest.raises(ValueError, match="not open"):
            use()


def test_open_streams_are_counted() -> None:
    engine = ScriptedEngine(SCRIPT)
    streams: list[EngineStream] = [engine.open(DecodeOptions()) for _ in range(3)]
    engine.close(streams[1])
    assert engine.n_open_streams == 2


def test_chunk_that_no_engine_could_take_is_refused() -> None:
    with pytest.raises(ValueError, match="480001 samples; at most 480000"):
        heard(0, 480_001)
    short = Chunk(SpeechSpan(0, 10), np.zeros(9, np.float32), is_final=False)
    with pytest.raises(ValueError, match="9 samples for a span of 10"):
        decode(ScriptedEngine(SCRIPT), short)


def test_card_offers_what_the_script_has() -> None:
    assert ScriptedEngine(SCRIPT).card.capabilities == {
        Capability.WORD_TIMES,
        Capability.CONFIDENCE,
        Capability.PUNCTUATION,
    }
    assert ScriptedEngine(recite("no marks")).card.capabilities == {Capability.WORD_TIMES}
    with pytest.raises(UnsupportedOptionError, match="does not offer vocabulary"):
        ScriptedEngine(SCRIPT).open(DecodeOptions(vocabulary=("Senseway",)))


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ((Word(" a", None, 5, None),), "' a' has none"),
        ((Word(" a", 5, 5, None),), "' a' at 5 to 5 is out of order"),
        ((Word(" a", 0, 5, None), Word(" b", 4, 9, None)), "' b' at 4 to 9 is out of order"),
    ],
)
def test_script_that_can_not_be_recited_is_refused(script: tuple[Word, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScriptedEngine(script)
