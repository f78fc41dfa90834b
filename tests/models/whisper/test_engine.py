"""The engine's promises: options, prefix, draft, times and long recordings, on a random model and on real weights."""

from collections.abc import Sequence
from functools import cache, partial

import numpy as np
import pytest
import soundfile
import soxr
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from models.backends import BackendError, Backends, Offer
from models.store import RECORDINGS, find_model, recording
from models.whisper.backend import Writing
from models.whisper.decode import Decoded
from models.whisper.engine import WhisperEngine, WhisperStream
from models.whisper.torch_backend import TorchBackend
from models.whisper.vocabulary import rule_book
from models.whisper.window import WINDOW_SAMPLES
from streaming.capability import Capability
from streaming.engine import Chunk, DecodeOptions, Task, UnsupportedOptionError
from streaming.transcript import Hypothesis, Word, text_of
from tests.models.whisper.small import noise, small_checkpoint
from vad.audio import SAMPLE_RATE_HZ, SpeechSpan


def engine_on(*backends: type[TorchBackend]) -> WhisperEngine:
    """An engine with the small model on these backends."""
    model, tokenizer = small_checkpoint()
    rules = rule_book(tokenizer, model.config.n_vocab)
    offers = [Offer(kind.__name__, partial(kind, model, rules)) for kind in backends]
    return WhisperEngine(Backends(offers, model="small"), model.config, tokenizer, name="small")


@cache
def small() -> WhisperEngine:
    return engine_on(TorchBackend)


def chunk(
    samples: NDArray[np.float32], *, start: int = 0, prefix: Sequence[Word] = (), is_final: bool = False
) -> Chunk:
    return Chunk(SpeechSpan(start, start + len(samples)), samples, is_final, prefix=tuple(prefix))


def decode(stream: WhisperStream, one: Chunk, engine: WhisperEngine | None = None) -> Hypothesis:
    return (engine or small()).decode([(stream, one)])[0]


ENGLISH = DecodeOptions(language="en")


def test_an_unknown_language_is_refused() -> None:
    with pytest.raises(UnsupportedOptionError, match="does not know language 'xx'"):
        small().open(DecodeOptions(language="xx"))


def test_vocabulary_that_does_not_fit_is_named_in_a_warning() -> None:
    stream = small().open(DecodeOptions(vocabulary=("Kovloom", "term " * 100, "Sintra")))
    assert len(stream.warnings) == 1
    assert "term term" in stream.warnings[0].message
    assert "Kovloom" not in stream.warnings[0].message
    assert small().open(DecodeOptions(vocabulary=("Kovloom",))).warnings == ()


def test_vocabulary_context_and_task_change_what_is_written() -> None:
    samples = noise(24_000)
    plain = decode(small().open(ENGLISH), chunk(samples)).words
    for options in (
        DecodeOptions(language="en", vocabulary=("worst times",)),
        DecodeOptions(language="en", context="it was the best"),
        DecodeOptions(language="en", task=Task.TRANSLATE),
        DecodeOptions(language="de"),
    ):
        assert decode(small().open(options), chunk(samples)).words != plain


def test_a_prompt_as_long_as_it_likes_leaves_room_to_write() -> None:
    stream = small().open(DecodeOptions(language="en", context="the best of times " * 300))
    assert decode(stream, chunk(noise(24_000))).words


@settings(max_examples=15, deadline=None)
@given(st.integers(1_600, 40_000), st.integers(0, 10**9), st.booleans())
def test_word_times_lie_in_the_span_and_never_go_back(n_samples: int, start: int, is_final: bool) -> None:
    words = decode(small().open(ENGLISH), chunk(noise(n_samples), start=start, is_final=is_final)).words
    edges = [(word.start_sample, word.end_sample) for word in words]
    assert all(start <= first <= last <= start + n_samples for first, last in edges)
    assert [first for first, _ in edges] == sorted(first for first, _ in edges)
    assert all(word.confidence is not None and 0 <= word.confidence <= 1 for word in words)


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(3_200, 30_000), min_size=2, max_size=4), st.integers(0, 3))
def test_what_a_stream_heard_before_changes_nothing_but_the_speed(lengths: list[int], n_prefix: int) -> None:
    used, prefix = small().open(ENGLISH), ()
    samples = noise(30_000)
    for length in lengths:
        fresh = small().open(ENGLISH)
        one = chunk(samples[:length], prefix=prefix)
        hypothesis = decode(used, one)
        assert text_of(hypothesis.words) == text_of(decode(fresh, one).words)
        prefix = hypothesis.words[:n_prefix]


def test_a_batch_gives_what_its_chunks_give_one_by_one() -> None:
    chunks = [chunk(noise(n), start=n) for n in (8_000, 16_000)]
    together = small().decode([(small().open(ENGLISH), one) for one in chunks])
    assert together == [decode(small().open(ENGLISH), one) for one in chunks]
    assert all(hypothesis.words for hypothesis in together)


class Breaking(TorchBackend):
    """Breaks at its second text."""

    n_written = 0

    def write(self, writings: Sequence[Writing]) -> list[Decoded]:
        self.n_written += len(writings)
        if self.n_written > 1:
            raise BackendError("a fault in the middle of it")
        return super().write(writings)


def test_a_fault_in_the_middle_of_a_decode_changes_no_hypothesis_and_is_told() -> None:
    engine = engine_on(Breaking, TorchBackend)
    streams = [(engine.open(DecodeOptions()), small().open(DecodeOptions())) for _ in range(3)]
    assert engine.backend == "Breaking"
    for n_samples in (8_000, 56_000):
        batch = [chunk(noise(n_samples + i), is_final=True) for i in range(3)]
        heard = engine.decode([(broken, one) for (broken, _), one in zip(streams, batch, strict=True)])
        assert heard == small().decode([(whole, one) for (_, whole), one in zip(streams, batch, strict=True)])
    assert engine.backend == "TorchBackend"
    assert "a fault in the middle of it" in engine.why


def test_digital_silence_and_snippets_hold_no_words() -> None:
    assert decode(small().open(ENGLISH), chunk(np.zeros(32_000, np.float32), is_final=True)).words == ()
    assert decode(small().open(ENGLISH), chunk(noise(500))).words == ()


def test_a_chunk_longer_than_the_window_is_refused() -> None:
    with pytest.raises(ValueError, match="takes chunks up to 480000 samples, not 480001"):
        decode(small().open(ENGLISH), chunk(noise(WINDOW_SAMPLES + 1)))


def test_a_language_is_detected_and_stays_where_words_are_settled() -> None:
    stream = small().open(DecodeOptions())
    first = decode(stream, chunk(noise(20_000)))
    assert first.language in ("en", "de")
    assert decode(stream, chunk(noise(4_000))).language == first.language


def test_a_long_recording_is_covered_in_order() -> None:
    n_samples = WINDOW_SAMPLES + 90_000
    segments = list(small().transcribe(noise(n_samples), ENGLISH))
    assert segments
    starts = [word.start_sample for segment in segments for word in segment.words]
    assert starts == sorted(starts)
    assert all(0 <= segment.span.start_sample <= segment.span.end_sample <= n_samples for segment in segments)


# --- real weights ----------------------------------------------------------------------------------------------------


@cache
def tiny() -> WhisperEngine:
    return WhisperEngine.load(find_model("whisper-tiny.en"), name="whisper-tiny.en")


def speech(name: str) -> NDArray[np.float32]:
    samples, rate_hz = soundfile.read(recording(name), dtype="float32")
    return samples if rate_hz == SAMPLE_RATE_HZ else soxr.resample(samples, rate_hz, SAMPLE_RATE_HZ)


def letters(text: str) -> list[str]:
    return "".join(character for character in text.lower() if character.isalpha() or character == " ").split()


@pytest.mark.weights
def test_an_english_model_does_not_offer_languages() -> None:
    assert tiny().card.languages == ("en",)
    assert Capability.LANGUAGE_CHOICE not in tiny().card.capabilities
    with pytest.raises(UnsupportedOptionError):
        tiny().open(DecodeOptions(language="de"))


@pytest.mark.weights
def test_dickens_is_read_word_for_word_over_two_windows() -> None:
    segments = list(tiny().transcribe(speech("two_cities"), DecodeOptions()))
    heard = letters("".join(word.text for segment in segments for word in segment.words))
    expected = letters(RECORDINGS["two_cities"].replace("—", " "))
    assert sum(word in expected for word in heard) >= len(heard) - 3
    assert abs(len(heard) - len(expected)) <= 3


@pytest.mark.weights
def test_growing_chunks_with_settled_words_come_to_the_text_of_the_whole() -> None:
    samples = speech("beckett")
    stream, settled = tiny().open(DecodeOptions()), ()
    for n_samples in range(2 * SAMPLE_RATE_HZ, len(samples), SAMPLE_RATE_HZ):
        words = decode(stream, chunk(samples[:n_samples], prefix=settled), tiny()).words
        settled += tuple(word for word in words[:-2] if word.end_sample < n_samples - SAMPLE_RATE_HZ)
    final = decode(stream, chunk(samples, prefix=settled, is_final=True), tiny()).words
    assert letters(text_of(settled + final)) == letters(RECORDINGS["beckett"])
    assert len(settled) >= 4
