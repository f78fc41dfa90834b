"""Differences from the reference are found where they are, and told apart from rounding."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from benchmarks.clips import Clip
from benchmarks.parity import Comparison, References, listing, summary, windows
from models.whisper.backend import Writing
from models.whisper.decode import Decoded
from models.whisper.torch_backend import TorchBackend
from models.whisper.vocabulary import rule_book
from tests.models.whisper.small import noise, small_checkpoint


class Wrong(TorchBackend):
    """Writes another third token."""

    def write(self, writings: Sequence[Writing]) -> list[Decoded]:
        return [
            replace(one, tokens=(*one.tokens[:2], one.tokens[2] ^ 1, *one.tokens[3:]))
            for one in super().write(writings)
        ]


@pytest.fixture(scope="module")
def references() -> References:
    torch.set_num_threads(1)
    model, tokenizer = small_checkpoint()
    return References.of(model, rule_book(tokenizer, model.config.n_vocab), "cpu")


def test_the_reference_does_not_differ_from_itself(references: References) -> None:
    one = Comparison(references, TorchBackend(references.exact, references.rules)).compare("noise", noise(20_000))
    assert one is not None and one.difference is None and one.n_equal == one.n_tokens
    assert one.same_language and max(map(abs, one.logprob_errors)) < 1e-4  # a draft is checked in larger products


def test_a_wrong_token_is_no_rounding(references: References) -> None:
    _, tokenizer = small_checkpoint()
    one = Comparison(references, Wrong(references.exact, references.rules)).compare("noise", noise(20_000))
    assert one is not None and one.difference is not None
    assert (one.n_equal, one.difference.index) == (2, 2)
    assert one.difference.gap > one.difference.rounding > 0
    assert not one.difference.is_rounding
    assert "| noise | 2 |" in listing([one.difference], tokenizer)
    assert "| small | wrong | 1 |" in summary("small", "wrong", [one])


def test_long_clips_are_compared_in_parts() -> None:
    names = [
        (name, len(samples)) for name, samples in windows([Clip("a", noise(480_000 + 20_000)), Clip("b", noise(900))])
    ]
    assert names == [("a", 480_000), ("a, part 2", 20_000)]
