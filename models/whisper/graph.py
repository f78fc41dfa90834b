"""Whisper's decoder for the megakernel: its step as a graph, its constants by the graph's names, and its requests.

Knows both vocabularies, that of checkpoints and decoding and that of the compiler: timestamps are markers, the task
tokens a request's head, the alignment heads those whose scores are kept. Does not know devices, text or audio.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakernel.graph import Builder, Graph
from megakernel.isa import REQUEST_TOKENS
from megakernel.ops import Sizes
from megakernel.request import Request as SlotRequest

from .config import HEAD_SIZE, SpecialTokens, WhisperConfig
from .decode import MAX_INITIAL_TIMESTAMP_INDEX, Request, Rules

_TOKENS = "model.decoder.embed_tokens.weight"
_POSITIONS = "model.decoder.embed_positions.weight"


def decoder_graph(config: WhisperConfig, special: SpecialTokens, *, n_cross_positions: int) -> Graph:
    """The decoder's step. ``n_cross_positions`` of a slot hold audio, with the silent tail behind it.

    Raises:
        CompileError: for sizes that make no graph.
    """
    sizes = Sizes(
        width=config.width,
        head_size=HEAD_SIZE,
        n_layers=config.n_decoder_layers,
        n_positions=config.n_text_positions,
        n_cross_positions=n_cross_positions,
        n_tokens=config.n_vocab,
        end_token=special.end_of_text,
        mark_begin=special.timestamp_begin,
    )
    step = Builder("whisper", sizes)
    x = step.embed("embedding", tokens=_TOKENS, positions=_POSITIONS)
    for index in range(config.n_decoder_layers):
        x = _layer(step, index, x, config)
    y = _norm(step, "layer_norm", x, "model.decoder.layer_norm")
    step.select("select", step.head("head", y, weight=_TOKENS))
    return step.build()


def _layer(step: Builder, index: int, x: str, config: WhisperConfig) -> str:
    own, constants = f"layers.{index}", f"model.decoder.layers.{index}"
    y = _norm(step, f"{own}.self_attn_layer_norm", x, f"{constants}.self_attn_layer_norm")
    y = _linear(step, f"{own}.qkv", y, 3 * config.width, f"{constants}.self_attn.qkv_proj")
    y = step.self_attention(f"{own}.self_attn", y, layer=index, n_heads=config.n_heads)
    y = _linear(step, f"{own}.self_attn.out", y, config.width, f"{constants}.self_attn.out_proj")
    x = step.add(f"{own}.after_self_attn", y, x)

    y = _norm(step, f"{own}.encoder_attn_layer_norm", x, f"{constants}.encoder_attn_layer_norm")
    y = _linear(step, f"{own}.q", y, config.width, f"{constants}.encoder_attn.q_proj")
    dumped_heads = tuple(head for layer, head in dumped_heads_of(config) if layer == index)
    y = step.cross_attention(f"{own}.encoder_attn", y, layer=index, n_heads=config.n_heads, dumped_heads=dumped_heads)
    y = _linear(step, f"{own}.encoder_attn.out", y, config.width, f"{constants}.encoder_attn.out_proj")
    x = step.add(f"{own}.after_encoder_attn", y, x)

    y = _norm(step, f"{own}.final_layer_norm", x, f"{constants}.final_layer_norm")
    y = _linear(step, f"{own}.fc1", y, config.n_ffn, f"{constants}.fc1")
    y = _linear(step, f"{own}.fc2", step.gelu(f"{own}.gelu", y), config.width, f"{constants}.fc2")
    return step.add(f"{own}.out", y, x)


def _norm(step: Builder, name: str, x: str, constants: str) -> str:
    return step.layer_norm(name, x, gamma=f"{constants}.weight", beta=f"{constants}.bias")


def _linear(step: Builder, name: str, x: str, n: int, constants: str) -> str:
    return step.linear(name, x, n, weight=f"{constants}.weight", bias=f"{constants}.bias")


def dumped_heads_of(config: WhisperConfig) -> tuple[tuple[int, int], ...]:
    """The alignment heads (layer, head) in the order in which their scores are kept."""
    return tuple(sorted(set(config.alignment_heads)))


def graph_constants(graph: Graph, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The graph's constants from HF-named tensors, in their float type and on their device.

    Names are the same but for queries, keys and values, which are one linear in the graph; keys have no bias. Raises
    KeyError for a tensor that is missing.
    """
    return {name: _constant(name, tensors) for name in graph.constants}


def _constant(name: str, tensors: Mapping[str, Tensor]) -> Tensor:
    if ".qkv_proj." not in name:
        return tensors[name].detach()
    queries, values = (tensors[name.replace(".qkv_proj.", f".{part}_proj.")] for part in "qv")
    keys = tensors[name.replace(".qkv_proj.", ".k_proj.")] if name.endswith("weight") else torch.zeros_like(queries)
    return torch.cat([queries, keys, values]).detach()


def as_arrays(constants: Mapping[str, Tensor]) -> dict[str, NDArray[np.float32]]:
    """The same for what computes in numpy."""
    return {name: tensor.float().cpu().numpy() for name, tensor in constants.items()}


def rule_bitmaps(every_rules: Sequence[Rules]) -> NDArray[np.uint32]:
    """[n_rules, 2, ceil(n_vocab / 32)] bits of what is never written, and of what is not written first."""
    return np.stack([np.stack([_bits(rules, is_first=False), _bits(rules, is_first=True)]) for rules in every_rules])


def _bits(rules: Rules, *, is_first: bool) -> NDArray[np.uint32]:
    is_suppressed = rules.suppressed.cpu().numpy() < 0
    if is_first:
        is_suppressed[list(rules.suppressed_first)] = True
    padded = np.pad(is_suppressed, (0, -len(is_suppressed) % 32))
    return np.packbits(padded, bitorder="little").view("<u4").astype(np.uint32)


def slot_request(
    request: Request,
    rules: Rules,
    config: WhisperConfig,
    *,
    rules_index: int,  # of ``rules`` in the bitmaps
    temperature: float,
    n_positions: int,  # audio and tail
    n_plain: int,  # audio
    tail_stride: int = 1,  # positions that one of the tail stands for
) -> SlotRequest:
    """What a slot of the megakernel is asked for ``request``; its tokens are those that ``decode`` would write."""
    special = rules.special
    n_forced = len(request.head) + len(request.prefix)
    max_tokens = max(request.room(config.n_text_positions), 1)
    n_marks = config.n_vocab - special.timestamp_begin
    return SlotRequest(
        head=request.head,
        prefix=request.prefix,
        draft=request.draft[: min(max_tokens - 1, REQUEST_TOKENS - n_forced)],
        max_tokens=max_tokens,
        n_positions=n_positions,
        n_plain=n_plain,
        tail_bias=math.log(tail_stride),
        rules=rules_index,
        markers=rules.with_timestamps,
        max_first_mark=min(MAX_INITIAL_TIMESTAMP_INDEX, n_marks - 1) if rules.with_timestamps else 0,
        watch_row=request.start_index,
        watch_token=special.no_speech,
        inverse_temperature=0.0 if temperature == 0 else 1 / temperature,
        seed=round(1000 * temperature),
    )
