"""Options that a model can't honour are refused where they enter."""

import dataclasses

import pytest

from streaming.capability import Capability
from streaming.engine import DecodeOptions, ModelCard, Task, UnsupportedOptionError

PLAIN = ModelCard("plain", ("en",), 480_000, frozenset())
FULL = ModelCard("full", ("en", "de"), 480_000, frozenset(Capability))


def test_every_option_is_tagged_with_the_capability_it_needs() -> None:
    for option in dataclasses.fields(DecodeOptions):
        assert isinstance(option.metadata["capability"], Capability), option.name


@pytest.mark.parametrize(
    "options",
    [
        DecodeOptions(language="de"),
        DecodeOptions(task=Task.TRANSLATE),
        DecodeOptions(vocabulary=("Zwolle",)),
        DecodeOptions(context="before"),
    ],
)
def test_an_option_without_its_capability_is_refused_by_name(options: DecodeOptions) -> None:
    with pytest.raises(UnsupportedOptionError, match="plain does not offer"):
        PLAIN.check(options)
    FULL.check(options)


def test_defaults_need_nothing_and_the_only_language_may_be_named() -> None:
    PLAIN.check(DecodeOptions())
    PLAIN.check(DecodeOptions(language="en"))


def test_an_unknown_language_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnsupportedOptionError, match="'xx'; it knows en, de"):
        FULL.check(DecodeOptions(language="xx"))
