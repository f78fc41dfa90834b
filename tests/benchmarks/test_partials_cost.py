"""The draft of the last partial saves passes of the decoder and changes no token, by the measurement's own count."""

import itertools

import torch

from benchmarks.clips import Clip
from benchmarks.partials_cost import measure, row
from models.whisper.torch_backend import TorchBackend
from models.whisper.vocabulary import rule_book
from tests.models.whisper.small import noise, small_checkpoint


def test_both_ways_are_timed_and_compared() -> None:
    torch.set_num_threads(1)
    model, tokenizer = small_checkpoint()
    rules = rule_book(tokenizer, model.config.n_vocab)
    ticks = itertools.count()
    cost = measure(TorchBackend(model, rules), rules, [Clip("noise", noise(40_000))], lambda: float(next(ticks)))
    assert (cost.n_windows, cost.n_different) == (4, 0)
    assert cost.afresh_s == cost.drafted_s == 4.0
    assert "| 1/1.0 | 0 |" in row("small", "torch-cpu", cost)
