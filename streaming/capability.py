"""What a model can do, and how a client's demands meet it. Pure; knows no model by name."""

from collections.abc import Set
from dataclasses import dataclass
from enum import StrEnum


class Capability(StrEnum):
    """A feature that one model may offer and another may lack."""

    WORD_TIMES = "word_times"  # every word has a start and an end
    CONFIDENCE = "confidence"  # every word has a probability
    PUNCTUATION = "punctuation"  # text comes with case and punctuation
    VOCABULARY = "vocabulary"  # terms to expect bias the decoding
    CONTEXT = "context"  # text that came before biases the decoding
    LANGUAGE_CHOICE = "language_choice"  # the client may name the language
    LANGUAGE_ID = "language_id"  # the model names the language it heard
    TRANSLATION = "translation"  # speech in any language, text in English


@dataclass(frozen=True, slots=True)
class Negotiated:
    """The outcome: what the session will have, and the wishes that this model can't grant."""

    granted: frozenset[Capability]
    declined: frozenset[Capability]


class MissingCapabilityError(Exception):
    """The client requires what the model does not offer."""

    def __init__(self, missing: Set[Capability]) -> None:
        self.missing = frozenset(missing)
        super().__init__(", ".join(sorted(missing)))


def negotiate(offered: Set[Capability], require: Set[Capability], prefer: Set[Capability]) -> Negotiated:
    """Match demands with what the model offers.

    Raises:
        MissingCapabilityError: if something required is not offered.
    """
    missing = require - offered
    if missing:
        raise MissingCapabilityError(missing)
    return Negotiated(granted=frozenset(offered & (require | prefer)), declined=frozenset(prefer - offered))
