import dataclasses

import numpy as np

from benchmarks.remembering import SPELT_SAMPLES, RememberingDetector, RememberingEngine, SpellingEngine
from streaming.capability import Capability
from streaming.engine import Chunk, DecodeOptions, ModelCard
from streaming.transcript import Hypothesis, Word
from vad.audio import SpeechSpan
from vad.energy import EnergyDetector
from vad.framer import WINDOW_SAMPLES


@dataclasses.dataclass
class CountingStream:
    options: DecodeOptions
    n_heard: int = 0
    warnings: tuple = ()


class CountingEngine:
    """Says how many chunks its stream has heard."""

    card = ModelCard("counting", ("en",), 16_000, frozenset({Capability.CONTEXT}))
    backend = why = "a test"

    def open(self, options):
        return CountingStream(options)

    def decode(self, batch):
        answers = []
        for stream, _ in batch:
            stream.n_heard += 1
            answers.append(Hypothesis((Word(f" {stream.n_heard}", None, None, None),), None, None))
        return answers

    def close(self, stream):
        pass


def chunk(value: float) -> Chunk:
    return Chunk(SpeechSpan(0, 4), np.full(4, value, np.float32), is_final=True)


def texts(engine, stream, values) -> list[str]:
    return [engine.decode([(stream, chunk(value))])[0].words[0].text for value in values]


def test_the_same_chunks_in_the_same_order_are_decoded_once():
    engine = RememberingEngine(CountingEngine())
    first = texts(engine, engine.open(DecodeOptions()), [0.1, 0.2])
    assert texts(engine, engine.open(DecodeOptions()), [0.1, 0.2]) == first == [" 1", " 2"]
    assert (engine.n_decoded, engine.n_remembered) == (2, 2)


def test_a_stream_that_was_answered_from_memory_goes_on_as_if_it_had_decoded():
    engine = RememberingEngine(CountingEngine())
    texts(engine, engine.open(DecodeOptions()), [0.1, 0.2])
    assert texts(engine, engine.open(DecodeOptions()), [0.1, 0.2, 0.3]) == [" 1", " 2", " 3"]


def test_other_samples_options_or_flags_are_decoded():
    engine = RememberingEngine(CountingEngine())
    for options, asked in [
        (DecodeOptions(), chunk(0.1)),
        (DecodeOptions(), chunk(0.2)),
        (DecodeOptions(context="before"), chunk(0.1)),
        (DecodeOptions(), dataclasses.replace(chunk(0.1), is_final=False)),
        (DecodeOptions(), dataclasses.replace(chunk(0.1), prompt="before")),
    ]:
        engine.decode([(engine.open(options), asked)])
    assert (engine.n_decoded, engine.n_remembered) == (5, 0)


def test_what_is_forgotten_is_decoded_anew():
    engine = RememberingEngine(CountingEngine())
    texts(engine, engine.open(DecodeOptions()), [0.1])
    engine.forget()
    texts(engine, engine.open(DecodeOptions()), [0.1])
    assert engine.n_decoded == 2


def test_a_detector_answers_from_memory_as_it_would_anew():
    windows = np.random.default_rng(1).normal(0, 0.1, (3, WINDOW_SAMPLES)).astype(np.float32)
    plain, remembering = EnergyDetector(), RememberingDetector(EnergyDetector())
    for _ in range(2):
        [(expected, state)] = plain.score([(plain.initial_state(), windows)])
        [(got, got_state)] = remembering.score([(remembering.initial_state(), windows)])
        np.testing.assert_array_equal(got, expected)
        np.testing.assert_array_equal(got_state.memory, state.memory)


def spelt(engine, samples, *, start=0, prefix=(), prompt="") -> list[str]:
    chunk = Chunk(SpeechSpan(start, start + len(samples)), samples, is_final=True, prefix=prefix, prompt=prompt)
    [hypothesis] = engine.decode([(engine.open(DecodeOptions()), chunk)])
    return [word.text for word in hypothesis.words]


def test_a_speller_writes_the_same_for_the_same_audio_however_much_follows():
    samples = np.random.default_rng(2).normal(0, 0.1, 10 * SPELT_SAMPLES).astype(np.float32)
    whole = spelt(SpellingEngine(), samples)
    assert len(whole) == 10 and len(set(whole)) == 10
    assert spelt(SpellingEngine(), samples[: 4 * SPELT_SAMPLES + 99]) == whole[:4]
    assert spelt(SpellingEngine(), samples[3 * SPELT_SAMPLES - 5 :], start=3 * SPELT_SAMPLES - 5) == whole[3:]


def test_a_speller_writes_another_text_if_a_sample_or_the_prompt_differs():
    samples = np.random.default_rng(2).normal(0, 0.1, SPELT_SAMPLES).astype(np.float32)
    other = samples.copy()
    other[7] += 1e-6
    texts = [
        spelt(SpellingEngine(), heard, prompt=prompt) for heard, prompt in ((samples, ""), (other, ""), (samples, "x"))
    ]
    assert len({text for [text] in texts}) == 3


def test_a_speller_goes_on_behind_its_prefix():
    samples = np.random.default_rng(2).normal(0, 0.1, 3 * SPELT_SAMPLES).astype(np.float32)
    prefix = (Word(" before", 0, SPELT_SAMPLES, None),)
    assert spelt(SpellingEngine(), samples, prefix=prefix) == spelt(SpellingEngine(), samples)[1:]
