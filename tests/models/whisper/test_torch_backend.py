"""Whisper in torch: on how many threads its parts run. What it computes is shown by the engine's tests."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from models.whisper.backend import Writing
from models.whisper.decode import Request
from models.whisper.torch_backend import TorchBackend, one_thread
from models.whisper.vocabulary import rule_book
from tests.models.whisper.small import noise, small_checkpoint


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def recorded_threads(module: nn.Module) -> list[int]:
    """How many threads each coming call of ``module`` may use."""
    seen: list[int] = []
    module.register_forward_pre_hook(lambda *_: seen.append(torch.get_num_threads()))
    return seen


@pytest.mark.usefixtures("three_threads")
def test_the_encoder_has_every_thread_and_the_decoder_one() -> None:
    model, tokenizer = copy.deepcopy(small_checkpoint())  # hooks stay on a module
    rules = rule_book(tokenizer, model.config.n_vocab)
    backend = TorchBackend(model, rules)
    encoding, decoding = recorded_threads(model.encoder), recorded_threads(model.decoder)
    (audio,) = backend.listen([noise(16_000)])
    backend.guess_languages([audio])
    request = Request((rules.special.start_of_transcript,), 0, (), (), max_tokens=3)
    backend.write([Writing(audio, request, rules.plain)])
    assert set(encoding) == {3}
    assert len(decoding) > 1 and set(decoding) == {1}
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_threads_come_back_when_the_decoder_fails() -> None:
    with pytest.raises(ZeroDivisionError), one_thread():
        raise ZeroDivisionError
    assert torch.get_num_threads() == 3
