"""Requests as a session makes them and windows that only grow: each is timed beside nothing carried over."""

import itertools

import pytest
import torch

from benchmarks.clips import Clip
from benchmarks.partials_cost import HEADER, WAYS, Measured, row
from models.backends import Backends, Offer
from models.whisper.engine import WhisperEngine
from models.whisper.torch_backend import TorchBackend
from models.whisper.vocabulary import rule_book
from tests.models.whisper.small import noise, small_checkpoint


@pytest.mark.parametrize(("way", "n_windows"), [("streamed", 5), ("unsettled", 4)])
def test_every_window_is_timed_as_asked_and_afresh(way: str, n_windows: int) -> None:
    torch.set_num_threads(1)
    model, tokenizer = small_checkpoint()
    ticks = itertools.count()
    measured = Measured(TorchBackend(model, rule_book(tokenizer, model.config.n_vocab)), lambda: float(next(ticks)))
    engine = WhisperEngine(
        Backends([Offer("torch", lambda: measured)], model="small"), model.config, tokenizer, name="s"
    )
    WAYS[way](engine, Clip("noise", noise(40_000)))
    assert (measured.n_windows, measured.n_different) == (n_windows, 0)
    assert measured.afresh.took_s == measured.asked.took_s == measured.shortest.took_s == n_windows
    assert measured.shortest.n_steps == n_windows
    assert measured.asked.n_steps < measured.afresh.n_steps
    line = row("small", way, "torch-cpu", measured)
    assert line.endswith("| 1/1.0 | 0 |")
    assert line.count("|") == HEADER.splitlines()[0].count("|")
