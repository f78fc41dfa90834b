"""Whisper's shapes with random weights: what rivals and the megakernel are given to compute.

The weights are the same for all and say nothing: times do not depend on them, as long as nobody stops early. Knows
sizes and where tensors lie. Does not know how anything is timed.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megakernel.compile import compile_program
from megakernel.device import Device, find_device, target_for
from megakernel.graph import Graph
from megakernel.launcher import Launcher
from megakernel.program import Program
from megakernel.request import Request
from models.wheels import cache_folder
from models.whisper.config import SpecialTokens, WhisperConfig
from models.whisper.decode import RuleBook, Rules
from models.whisper.graph import decoder_graph, graph_constants, rule_bitmaps
from models.whisper.loading import CUBINS
from models.whisper.reference import Decoder, Whisper

# Sizes by config.json, alignment heads by generation_config.json of openai/whisper-* on the hub.
CONFIGS = {
    "tiny.en": WhisperConfig(
        80, 51864, 384, 6, 1536, 4, 4, 1500, 448, ((1, 0), (2, 0), (2, 5), (3, 0), (3, 1), (3, 2), (3, 3), (3, 4))
    ),
    "small": WhisperConfig(
        80,
        51865,
        768,
        12,
        3072,
        12,
        12,
        1500,
        448,
        ((5, 3), (5, 9), (8, 0), (8, 4), (8, 7), (8, 8), (9, 0), (9, 7), (9, 9), (10, 5)),
    ),
    "medium": WhisperConfig(
        80, 51865, 1024, 16, 4096, 24, 24, 1500, 448, ((13, 15), (15, 4), (15, 15), (16, 1), (20, 0), (23, 4))
    ),
    "large-v3": WhisperConfig(
        128,
        51866,
        1280,
        20,
        5120,
        32,
        32,
        1500,
        448,
        ((7, 0), (10, 17), (12, 18), (13, 12), (16, 1), (17, 14), (19, 11), (21, 4), (24, 1), (25, 6)),
    ),
    "large-v3-turbo": WhisperConfig(
        128, 51866, 1280, 20, 5120, 32, 4, 1500, 448, ((2, 4), (2, 11), (3, 3), (3, 6), (3, 11), (3, 14))
    ),
}
TURBO = CONFIGS["large-v3-turbo"]
_ENGLISH_VOCABULARY = 51864  # of models which know English alone
_TOKENS_BESIDE_LANGUAGES = 1509  # special ones: end and start, six of tasks and the like, 1501 timestamps


def special_tokens(config: WhisperConfig) -> SpecialTokens:
    """Where the vocabulary of that size has them; a model for English alone has no languages."""
    is_english = config.n_vocab == _ENGLISH_VOCABULARY
    end = 50256 if is_english else 50257
    behind = config.n_vocab - (_TOKENS_BESIDE_LANGUAGES - 2)
    languages = () if is_english else tuple(range(end + 2, behind))
    return SpecialTokens(end, end + 1, languages, *range(behind, behind + 7))


def head(config: WhisperConfig = TURBO) -> tuple[int, ...]:
    """Transcribe the first language, without timestamps."""
    special = special_tokens(config)
    task = (special.languages[0], special.transcribe) if special.languages else ()
    return (special.start_of_transcript, *task, special.no_timestamps)


def endless_rules(config: WhisperConfig = TURBO) -> Rules:
    """Text of which there is no end, so that every run writes as many tokens as it is asked for."""
    special = special_tokens(config)
    suppressed = torch.zeros(config.n_vocab)
    suppressed[special.end_of_text :] = -torch.inf
    return Rules(special, suppressed, (), with_timestamps=False)


def random_decoder(config: WhisperConfig = TURBO, device: str = "cuda") -> dict[str, Tensor]:
    """HF-named bfloat16 tensors of a decoder, with the spread that training begins with."""
    generator = torch.Generator(device=device).manual_seed(0)
    with torch.device("meta"):
        shapes = {f"model.decoder.{name}": tensor.shape for name, tensor in Decoder(config).state_dict().items()}
    return {name: _random(name, tuple(shape), generator, device) for name, shape in shapes.items()}


def _random(name: str, shape: tuple[int, ...], generator: torch.Generator, device: str) -> Tensor:
    if "layer_norm" in name:
        return torch.full(shape, float(name.endswith("weight")), device=device, dtype=torch.bfloat16)
    return torch.empty(shape, device=device, dtype=torch.bfloat16).normal_(std=0.02, generator=generator)


@dataclass(frozen=True, slots=True, eq=False)
class Decoders:
    """One decoder as tensors, and the same as a program on the GPU, listening to the same random audio."""

    config: WhisperConfig
    tensors: dict[str, Tensor]
    program: Program
    launcher: Launcher

    @property
    def cross_cache(self) -> Tensor:
        """[slot, layer, keys or values, head, position, 64]."""
        return self.launcher.buffers.cross_cache


def decoder_program(config: WhisperConfig, device: Device, *, n_sms: int | None = None) -> Program:
    """The decoder for ``device``, or for so many SMs of it."""
    return compile_program(_graph(config), target_for(device, n_sms=n_sms))


def _graph(config: WhisperConfig) -> Graph:
    return decoder_graph(config, special_tokens(config), n_cross_positions=config.n_audio_positions)


def load(config: WhisperConfig = TURBO, *, n_sms: int | None = None, stream: Any = None) -> Decoders:
    """Compile and pack for this machine's GPU, or for so many SMs of it. ``stream``: see ``Launcher.load``."""
    device = find_device()
    program = decoder_program(config, device, n_sms=n_sms)
    tensors = random_decoder(config)
    bitmaps = rule_bitmaps([endless_rules(config)])
    constants = graph_constants(_graph(config), tensors)
    launcher = Launcher.load(program, constants, bitmaps, device=device, cache=cache_folder() / CUBINS, stream=stream)
    launcher.buffers.cross_cache.normal_(generator=torch.Generator(device="cuda").manual_seed(1))
    torch.cuda.synchronize()
    return Decoders(config, tensors, program, launcher)


def request(n_tokens: int, *, draft: tuple[int, ...] = (), config: WhisperConfig = TURBO) -> Request:
    """Write ``n_tokens`` to a full window."""
    return Request(head=head(config), max_tokens=n_tokens, n_positions=config.n_audio_positions, draft=draft)


def median_and_p95(values: list[float]) -> tuple[float, float]:
    """Of repeats."""
    return float(np.median(values)), float(np.quantile(values, 0.95))


def random_model(config: WhisperConfig = TURBO, device: str = "cuda") -> Whisper:
    """The whole network with random float32 weights on ``device``."""
    generator = torch.Generator(device=device).manual_seed(0)
    model = Whisper.without_values(config, device=device)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(False).copy_(_random(name, tuple(parameter.shape), generator, device))
    return model.eval()


def endless_book(config: WhisperConfig = TURBO) -> RuleBook:
    """Rules under which no text ends, with timestamps or without."""
    rules = endless_rules(config)
    return RuleBook(rules.special, rules, rules)
