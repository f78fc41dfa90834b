"""The decoder as a graph, evaluated in numpy, beside the reference network and ``decode``."""

import copy
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megakernel import fuse
from megakernel.evaluate import Memory, Network, evaluate, network_of, run_requests
from megakernel.isa import EndReason, RecordKind
from megakernel.ops import FusedAttention
from megakernel.request import Request as SlotRequest
from megakernel.request import encode_request
from megakernel.select import Emitted, Slot, rows_of_step
from models.whisper.config import SpecialTokens, WhisperConfig
from models.whisper.decode import Request, Rules, decode, mask_logits
from models.whisper.graph import (
    as_arrays,
    decoder_graph,
    dumped_heads_of,
    graph_constants,
    rule_bitmaps,
    slot_request,
)
from models.whisper.reference import DecoderCache, Whisper

# A vocabulary of 70: text 0..39, end 40, start 41, two languages, tasks, markers, timestamps 50..69.
SPECIAL = SpecialTokens(40, 41, (42, 43), 44, 45, 46, 47, 48, 49, 50)
CONFIG = WhisperConfig(8, 70, 128, 2, 256, 1, 2, 20, 80, ((0, 1), (1, 0), (1, 1)))
TIMED, UNTIMED = (Rules.of(SPECIAL, 70, non_speech=(3, 4), space=5, with_timestamps=timed) for timed in (True, False))
BITMAPS = rule_bitmaps([TIMED, UNTIMED])
HEAD = (SPECIAL.start_of_transcript, 42, SPECIAL.transcribe)
N_CROSS_POSITIONS = 300  # audio and tail: more than one block
TOLERANCE = 0.08  # of logits around 2: activations are rounded to 8 bits some fifteen times on the way


def random_model(config: WhisperConfig) -> Whisper:
    """Random weights that bfloat16 holds, so that the reference differs by its activations alone."""
    torch.manual_seed(3)
    whisper = Whisper(config).eval().requires_grad_(False)
    for name, parameter in whisper.named_parameters():
        if parameter.dim() > 1:
            gain = 1 if "q_proj" in name or "k_proj" in name else 2  # so that various tokens are written
            parameter.normal_(std=gain * parameter.shape[-1] ** -0.5)
        parameter.copy_(parameter.bfloat16())
    for norm in (module for module in whisper.modules() if isinstance(module, torch.nn.LayerNorm)):
        norm.weight.normal_(1, 0.2)
        norm.bias.normal_(0, 0.2)
    return whisper


def network_for(model: Whisper) -> Network:
    graph = decoder_graph(model.config, SPECIAL, n_cross_positions=N_CROSS_POSITIONS)
    tensors = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    return network_of(fuse.fuse(graph), graph.sizes, as_arrays(graph_constants(graph, tensors)))


@pytest.fixture(scope="module")
def model() -> Whisper:
    return random_model(CONFIG)


@pytest.fixture(scope="module")
def network(model: Whisper) -> Network:
    return network_for(model)


def listen(model: Whisper, n_positions: int, seed: int, bias: float = 0.0) -> DecoderCache:
    """A window's cache, its audio states rounded; ``bias`` is that of the last half."""
    generator = torch.Generator().manual_seed(seed)
    cache = model.decoder.open_cache(torch.randn(1, n_positions, model.config.width, generator=generator))
    for tensors in (cache.cross_keys, cache.cross_values):
        tensors[:] = [tensor.bfloat16().float() for tensor in tensors]
    cache.audio_bias = torch.zeros(n_positions)
    cache.audio_bias[n_positions // 2 :] = bias
    return cache


def memory_of(network: Network, caches: Sequence[DecoderCache]) -> Memory:
    """What slots, one for each cache, listen to."""
    memory = Memory.empty(network.sizes, network.n_score_heads)
    for slot, cache in enumerate(caches):
        for layer, (keys, values) in enumerate(zip(cache.cross_keys, cache.cross_values, strict=True)):
            memory.cross_cache[slot, layer, 0, :, : keys.shape[2]] = keys[0].numpy()
            memory.cross_cache[slot, layer, 1, :, : keys.shape[2]] = values[0].numpy()
    return memory


def asked(request: Request, rules: Rules, n_positions: int, *, stride: int = 1, temperature: float = 0) -> SlotRequest:
    return slot_request(
        request,
        rules,
        CONFIG,
        rules_index=0 if rules is TIMED else 1,
        temperature=temperature,
        n_positions=n_positions,
        n_plain=n_positions // 2,
        tail_stride=stride,
    )


def tokens_of(told: Sequence[Emitted], slot: int) -> list[int]:
    return [record.token for record in told if record.kind is RecordKind.TOKEN and record.slot == slot]


def logits_of(network: Network, memory: Memory, request: SlotRequest) -> NDArray[np.float32]:
    """[forced tokens, n_vocab] of the first slot, sixteen rows a step."""
    slot = Slot.of(request, ticket=0)
    found: list[NDArray[np.float32]] = []
    while slot.n_fed < slot.n_forced:
        rows = rows_of_step((slot,), 16, network.sizes)
        found += list(evaluate(network, memory, rows)["head"])
        slot = replace(slot, n_fed=slot.n_fed + len(rows))
    return np.stack(found)


@pytest.mark.parametrize("n_positions", [40, 256, 300])
def test_logits_and_scores_are_the_references(model: Whisper, network: Network, n_positions: int) -> None:
    stride = 8
    cache = listen(model, n_positions, seed=n_positions, bias=math.log(stride))
    memory = memory_of(network, [cache])
    forced = tuple(np.random.default_rng(0).integers(0, 40, 70).tolist())  # more than one block of positions
    request = asked(Request((*HEAD, *forced), 0, (), (), 2), UNTIMED, n_positions, stride=stride)
    found = logits_of(network, memory, request)
    expected = model.logits(model.decoder(torch.tensor([[*HEAD, *forced]]), cache))[0].numpy()
    assert np.abs(found - expected).max() < TOLERANCE
    assert cache.audio_bias is not None
    for index in range(len(dumped_heads_of(CONFIG))):
        kept = memory.scores[0, index, : len(expected), :n_positions]
        own = cache.alignment_scores[index][0] - cache.audio_bias
        assert np.abs(kept - own.numpy()).max() < TOLERANCE


@pytest.mark.parametrize(
    "config",
    [
        replace(CONFIG, width=384, n_heads=6, n_ffn=640, n_decoder_layers=1, alignment_heads=()),
        replace(CONFIG, width=256, n_heads=4, n_ffn=1024, n_vocab=61, n_decoder_layers=3, n_text_positions=40),
    ],
)
def test_other_sizes_agree_too(config: WhisperConfig) -> None:
    model = random_model(config)
    network, cache = network_for(model), listen(model, 30, seed=0)
    tokens = (*HEAD, *range(20))
    found = logits_of(network, memory_of(network, [cache]), asked(Request(tokens, 0, (), (), 2), UNTIMED, 30))
    expected = model.logits(model.decoder(torch.tensor([tokens]), cache))[0].numpy()
    assert np.abs(found - expected).max() < TOLERANCE


def test_the_error_is_at_most_that_of_torch_in_bfloat16(model: Whisper, network: Network) -> None:
    cache = listen(model, 100, seed=1)
    tokens = (*HEAD, *range(40))
    found = logits_of(network, memory_of(network, [cache]), asked(Request(tokens, 0, (), (), 2), UNTIMED, 100))
    expected = model.logits(model.decoder(torch.tensor([tokens]), cache))[0].numpy()
    half = copy.deepcopy(model).bfloat16()
    for tensors in (cache.cross_keys, cache.cross_values, cache.self_keys, cache.self_values):
        tensors[:] = [tensor.bfloat16() for tensor in tensors]
    cache.n_tokens, cache.audio_bias = 0, None
    other = half.logits(half.decoder(torch.tensor([tokens]), cache))[0].numpy()
    assert np.square(found - expected).mean() < np.square(other - expected).mean()


def is_clear(logits: torch.Tensor, written: Sequence[int], rules: Rules) -> bool:
    """Whether rounding can't turn the choice: neither between two tokens nor between markers and text."""
    best, second = mask_logits(logits, written, rules).topk(2).values.tolist()
    allowed = logits + rules.suppressed
    begin = SPECIAL.timestamp_begin
    lead = float(allowed[begin:].logsumexp(0) - allowed[:begin].max())
    return best - second > 2 * TOLERANCE and (not rules.with_timestamps or abs(lead) > 2 * TOLERANCE)


def assert_equal_where_clear(
    tokens: Sequence[int], model: Whisper, cache: DecoderCache, request: Request, rules: Rules
) -> int:
    """Walk along ``tokens``, the end token among them: how many were clear choices, all of them the reference's."""
    start = (*request.head, *request.prefix)
    cache.n_tokens = 0
    logits = model.logits(model.decoder(torch.tensor([[*start, *tokens]]), cache))[0, len(start) - 1 :]
    n_clear = 0
    for index, token in enumerate(tokens):
        written = [*request.prefix, *tokens[:index]]
        if is_clear(logits[index].clone(), written, rules):
            n_clear += 1
            assert token == int(mask_logits(logits[index].clone(), written, rules).argmax())
    return n_clear


def test_slots_write_what_the_reference_writes(model: Whisper, network: Network) -> None:
    windows = [
        (TIMED, 40, Request(HEAD, 0, (), (), 20)),
        (UNTIMED, 300, Request((49, 7, 8, *HEAD, SPECIAL.no_timestamps), 3, (), (), 12)),
        (TIMED, 260, Request(HEAD, 0, (50, 9, 11), (12, 55, 55, 13), 16)),
    ]
    caches = [listen(model, n, seed, math.log(4)) for seed, (_, n, _) in enumerate(windows)]
    memory = memory_of(network, caches)
    requests = [asked(request, rules, n, stride=4) for rules, n, request in windows]
    told = run_requests(network, memory, requests, BITMAPS)
    n_clear = n_tokens = 0
    for slot, ((rules, _, request), cache) in enumerate(zip(windows, caches, strict=True)):
        tokens = tokens_of(told, slot)
        n_tokens += len(tokens)
        n_clear += assert_equal_where_clear(tokens, model, cache, request, rules)
        reference = decode(model, cache, request, rules)
        done = next(record for record in told if record.kind is RecordKind.DONE and record.slot == slot)
        assert done.value == pytest.approx(reference.no_speech_probability, rel=0.1)
        logprobs = [record.value for record in told if record.kind is RecordKind.TOKEN and record.slot == slot]
        if tokens[: len(reference.tokens)] == list(reference.tokens):
            assert logprobs[: len(reference.logprobs)] == pytest.approx(reference.logprobs, abs=2 * TOLERANCE)
            assert (done.token == EndReason.END_TOKEN) == reference.has_ended
    assert n_clear > n_tokens // 2 > 15


def test_neighbours_and_the_number_of_rows_change_no_bit(model: Whisper, network: Network) -> None:
    caches = [listen(model, n, seed) for seed, n in enumerate((40, 300))]
    requests = [
        asked(Request(HEAD, 0, (), (), 8), TIMED, 40),
        asked(Request((*HEAD, 48), 0, (), (1, 2, 8), 8), UNTIMED, 300),
    ]
    together = run_requests(network, memory_of(network, caches), requests, BITMAPS)
    alone = run_requests(network, memory_of(network, caches), requests[:1], BITMAPS, max_rows=1)
    assert [record for record in together if record.slot == 0] == alone


def test_every_request_of_decoding_fits_a_slot(network: Network) -> None:
    full = Request((*HEAD, *range(30)), 0, (50, 7), tuple(range(40)), 224)
    for rules in (TIMED, UNTIMED):
        request = asked(full, rules, N_CROSS_POSITIONS, temperature=0.4)
        encode_request(request, ticket=1, sizes=network.sizes, n_rules=2)
        assert request.max_tokens == CONFIG.n_text_positions - 35
        assert request.seed == 400
        assert request.inverse_temperature == pytest.approx(2.5)


def test_bitmaps_hold_what_the_rules_suppress() -> None:
    bits = np.unpackbits(BITMAPS.view(np.uint8), axis=-1, bitorder="little")[..., : CONFIG.n_vocab].astype(bool)
    suppressed = {3, 4, *range(SPECIAL.start_of_transcript, SPECIAL.timestamp_begin)}
    assert set(np.flatnonzero(bits[0, 0])) == suppressed
    assert set(np.flatnonzero(bits[0, 1])) == suppressed | {5, SPECIAL.end_of_text}
    assert set(np.flatnonzero(bits[1, 0])) == suppressed | set(range(SPECIAL.timestamp_begin, CONFIG.n_vocab))


def test_turbos_decoder_is_a_graph_of_four_layers() -> None:
    turbo = WhisperConfig(128, 51866, 1280, 20, 5120, 32, 4, 1500, 448, ((2, 4), (2, 11), (3, 3)))
    special = SpecialTokens(50257, 50258, (), 50359, 50360, 50361, 50362, 50363, 50364, 50365)
    ops = fuse.fuse(decoder_graph(turbo, special, n_cross_positions=1500))
    assert len(ops) == 4 * 8 + 1
    kept = [(op.dumped_heads, op.first_dump) for op in ops if isinstance(op, FusedAttention) and op.is_cross]
    assert kept == [((), 0), ((), 0), ((4, 11), 0), ((3,), 2)]
