"""The megakernel's slots write what ``decode`` writes, over a network that is a table of random logits."""

from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megakernel.isa import EndReason, RecordKind
from megakernel.ops import Sizes
from megakernel.pick import Row, allowed_tokens, merge, partial_of
from megakernel.select import Emitted, Slot, Slots, Written, accept, mask_of, rows_of_step
from models.whisper import decode as decode_module
from models.whisper import graph as graph_module
from models.whisper.config import SpecialTokens, WhisperConfig
from models.whisper.decode import Request, Rules, decode, mask_logits
from models.whisper.graph import rule_bitmaps, slot_request

# Text 0..19, end 20, start 21, two languages, tasks, markers, timestamps 30..44.
SPECIAL = SpecialTokens(20, 21, (22, 23), 24, 25, 26, 27, 28, 29, 30)
CONFIG = WhisperConfig(8, 45, 128, 2, 128, 1, 2, 20, 64, ((0, 0), (1, 0)))
SIZES = Sizes(128, 64, 2, 64, 20, n_tokens=45, end_token=20, mark_begin=30, max_slots=8)
TIMED, UNTIMED = (Rules.of(SPECIAL, 45, non_speech=(3, 4), space=5, with_timestamps=timed) for timed in (True, False))
RULES = (TIMED, UNTIMED)
BITMAPS = rule_bitmaps(RULES)
RANGES = ((0, 13), (13, 13), (26, 13), (39, 6))  # of four SMs


@pytest.fixture(autouse=True, scope="module")
def _early_first_timestamp() -> Iterator[None]:
    """Fewer timestamps may come first than there are."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (decode_module, graph_module):
            patch.setattr(module, "MAX_INITIAL_TIMESTAMP_INDEX", 3)
        yield


def logits_behind(fed: Sequence[int], seed: int) -> NDArray[np.float32]:
    """[n_vocab], a function of the tokens fed so far."""
    logits = np.random.default_rng([seed, *fed]).normal(scale=2, size=SIZES.n_tokens)
    logits[30:] -= 2  # together about as likely as one text token
    return logits.astype(np.float32)


class Table:
    """What ``decode`` needs of a model; a cache is the list of tokens fed so far."""

    config = CONFIG

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def decoder(self, tokens: torch.Tensor, cache: Any) -> torch.Tensor:
        rows = []
        for token in tokens[0].tolist():
            cache.fed[cache.n_tokens :] = [token]
            cache.n_tokens += 1
            rows.append(torch.from_numpy(logits_behind(cache.fed, self.seed)))
        cache.alignment_scores = [torch.zeros(1, len(rows), 1)]
        return torch.stack(rows)[None]

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def run_slots(slots: Slots, seeds: Sequence[int], max_rows: int) -> list[Emitted]:
    """What the host is told until all slots are done; slot i has the logits of ``seeds[i]``."""
    fed: list[list[int]] = [[] for _ in slots]
    told: list[Emitted] = []
    while any(slots):
        rows = rows_of_step(slots, max_rows, SIZES)
        merged = []
        for row in rows:
            fed[row.slot][row.position :] = [row.token]
            logits, allowed = logits_behind(fed[row.slot], seeds[row.slot]), allowed_tokens(row, BITMAPS, SIZES)
            merged.append(merge([partial_of(logits[a : a + n], a, row, allowed, SIZES) for a, n in RANGES]))
        slots, emitted = accept(slots, rows, merged, SIZES)
        told += emitted
    return told


@st.composite
def windows(draw: st.DrawFn) -> tuple[Request, Rules, int]:
    """A request with or without a draft, its rules, and the seed of its logits."""
    seed, rules = draw(st.integers(0, 9999)), draw(st.sampled_from(RULES))
    prompt = tuple(draw(st.lists(st.integers(0, 19), max_size=12)))
    head = (*((27, *prompt) if prompt else ()), 21, 22, 25)
    prefix = ((30, 7, 8, 31, 31, 9) if rules is TIMED else (7, 8, 9))[: draw(st.integers(0, 6))]
    request = Request(head, len(head) - 3, prefix, (), draw(st.integers(1, 60)))
    tokens = [record.token for record in run_slots((slot_of(request, rules),), [seed], 1) if record.kind == 1]
    cut, skip = draw(st.integers(0, len(tokens))), draw(st.integers(0, 3))
    draft = (*tokens[:cut], *draw(st.lists(st.integers(0, 44), max_size=3)), *tokens[cut + skip :])
    return Request(head, len(head) - 3, prefix, draft, request.max_tokens), rules, seed


def slot_of(request: Request, rules: Rules) -> Slot:
    index = RULES.index(rules)
    return Slot.of(
        slot_request(request, rules, CONFIG, rules_index=index, temperature=0, n_positions=20, n_plain=20), ticket=1
    )


@settings(max_examples=30, deadline=None)
@given(st.lists(windows(), min_size=1, max_size=4), st.integers(4, 16))
def test_slots_write_what_decode_writes(several: list[tuple[Request, Rules, int]], max_rows: int) -> None:
    slots = tuple(slot_of(request, rules) for request, rules, _ in several)
    told = run_slots(slots, [seed for _, _, seed in several], max_rows)
    for index, (request, rules, seed) in enumerate(several):
        cache: Any = SimpleNamespace(fed=[], n_tokens=0, self_keys=[torch.zeros(1)])
        model: Any = Table(seed)
        expected = decode(model, cache, request, rules)
        own = [record for record in told if record.slot == index]
        records = [record for record in own if record.kind is RecordKind.TOKEN]
        tokens = [record.token for record in records]
        done = own[-1]
        assert tokens == [*expected.tokens, *[SPECIAL.end_of_text] * expected.has_ended]
        assert (done.token == EndReason.END_TOKEN) == expected.has_ended
        assert [record.value for record in records[: len(expected.logprobs)]] == pytest.approx(
            expected.logprobs, abs=1e-4
        )
        assert sum(record.value for record in records) / (len(expected.tokens) + 1) == pytest.approx(
            expected.mean_logprob, abs=1e-4
        )
        assert done.value == pytest.approx(expected.no_speech_probability, rel=1e-4)
        assert done.extra == expected.n_verified


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(RULES), st.lists(st.sampled_from([7, 8, 30, 31, 33, 33, 40, 44]), max_size=8))
def test_the_same_tokens_are_allowed_whatever_was_written(rules: Rules, tokens: list[int]) -> None:
    request = slot_of(Request((21,), 0, (), (), 5), rules).request
    written = Written()
    for token in tokens:
        written = written.after(token, SIZES.mark_begin)
    row = Row(0, 9, 0, mask_of(written, request, SIZES), request)
    logits = torch.zeros(45)
    logits[30:] = -1e4  # so that text is not outweighed
    masked = mask_logits(logits, tokens, rules)
    assert (allowed_tokens(row, BITMAPS, SIZES) == (masked > -torch.inf).numpy()).all()
