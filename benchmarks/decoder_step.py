"""One token of a Whisper's decoder: the megakernel, its own one-phase-a-launch modes, and torch.

Run from the project's root, on a machine with an NVIDIA GPU:

    python -m benchmarks.decoder_step
    python -m benchmarks.decoder_step --model large-v3 --compiled

All in one process on the same random weights at true shapes, a full window of audio, 4 task tokens (2 where there are
no languages), 128 tokens behind the first 64; repeats take turns. A is the bare step in eager torch, B the same under
torch.compile (max-autotune) in a CUDA graph, C and D the megakernel's bodies one phase a launch in a CUDA graph,
without and with programmatic dependent launch.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks import shapes
from benchmarks.report import heading
from benchmarks.shapes import CONFIGS, Decoders, median_and_p95
from megakernel.launcher import Mode
from megakernel.mailbox import DoneRecord, TokenRecord
from megakernel.predict import predict
from megakernel.request import Request
from megakernel.runtime import Runtime
from models.whisper.config import WhisperConfig

N_TOKENS = 128  # timed
FIRST_TOKENS = 64  # before, so that prompt, launch and first steps cancel out
PROMPT_STEPS = 4  # at most, for 8 windows
DRAFT_TOKENS = 40
COPY_BYTES = 1 << 31

Timed = Callable[[], float]  # µs a step


# --- ours ------------------------------------------------------------------------------------------------------------


def run_s(runtime: Runtime, requests: Sequence[Request]) -> tuple[float, list[list[int]]]:
    """Seconds until all requests, one a slot, are done, and what they wrote."""
    written: list[list[int]] = [[] for _ in requests]
    n_done = 0
    began_s = time.perf_counter()
    for slot, request in enumerate(requests):
        runtime.open(slot, request)
    runtime.burst()
    while n_done < len(requests):
        for record in runtime.wait(1.0):
            if isinstance(record, TokenRecord):
                written[record.slot].append(record.token)
            n_done += isinstance(record, DoneRecord)
    spent_s = time.perf_counter() - began_s
    runtime.leave()
    return spent_s, written


def ours(runtime: Runtime, request: Callable[[int], Request], n_slots: int) -> float:
    """µs a step with ``n_slots`` requests, each ``request`` of how many tokens to write."""
    spent_s = []
    for n_tokens in (FIRST_TOKENS, FIRST_TOKENS + N_TOKENS):
        # One phase a launch: as many steps as are needed are queued, so that nobody waits for the host.
        with patch("megakernel.launcher.GRAPH_STEPS", n_tokens + PROMPT_STEPS):
            spent_s.append(run_s(runtime, [request(n_tokens)] * n_slots)[0])
    return (spent_s[1] - spent_s[0]) / N_TOKENS * 1e6


def verify(runtime: Runtime, config: WhisperConfig) -> tuple[Timed, Timed, list[int]]:
    """ms of a request whose draft of 40 tokens holds, and of the same without a draft; what is written."""
    request = partial(shapes.request, DRAFT_TOKENS + 1, config=config)
    _, (tokens,) = run_s(runtime, [request()])
    plain, drafted = request(), request(draft=tuple(tokens[:DRAFT_TOKENS]))
    return (lambda: run_s(runtime, [drafted])[0] * 1e3), (lambda: run_s(runtime, [plain])[0] * 1e3), tokens


# --- torch -----------------------------------------------------------------------------------------------------------


class TorchStep:
    """A decoder's step on static caches, as one writes it for a CUDA graph; ``run`` advances by one token."""

    def __init__(self, config: WhisperConfig, tensors: Mapping[str, Tensor], cross_cache: Tensor) -> None:
        """``cross_cache`` [batch, layer, keys or values, head, position, 64] tells type and device too."""
        self._config, self._tensors, self._batch = config, tensors, len(cross_cache)
        layers = range(config.n_decoder_layers)
        self._cross = [(cross_cache[:, i, 0].contiguous(), cross_cache[:, i, 1].contiguous()) for i in layers]
        room = (self._batch, config.n_heads, config.n_text_positions, 64)
        self._own = [(cross_cache.new_zeros(room), cross_cache.new_zeros(room)) for _ in layers]
        device = cross_cache.device
        self._positions = torch.arange(config.n_text_positions, device=device)
        self.token = torch.zeros(self._batch, 1, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)

    def run(self) -> None:
        """One token for each window."""
        tensors, config = self._tensors, self._config
        x = functional.embedding(self.token, tensors["model.decoder.embed_tokens.weight"])
        x = x + tensors["model.decoder.embed_positions.weight"][self.position][None]
        mask = (self._positions <= self.position)[None, None, None]
        for index in range(config.n_decoder_layers):
            x = self._layer(f"model.decoder.layers.{index}", index, x, mask)
        x = self._norm("model.decoder.layer_norm", x)
        logits = functional.linear(x, tensors["model.decoder.embed_tokens.weight"])
        self.token.copy_(logits.argmax(-1))
        self.position.add_(1).clamp_(max=config.n_text_positions - 1)

    def _layer(self, name: str, index: int, x: Tensor, mask: Tensor) -> Tensor:
        y = self._norm(f"{name}.self_attn_layer_norm", x)
        queries = self._heads(f"{name}.self_attn.q_proj", y)
        keys, values = self._own[index]
        keys.index_copy_(2, self.position, self._heads(f"{name}.self_attn.k_proj", y))
        values.index_copy_(2, self.position, self._heads(f"{name}.self_attn.v_proj", y))
        y = functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        x = x + self._linear(f"{name}.self_attn.out_proj", self._merged(y))
        y = self._norm(f"{name}.encoder_attn_layer_norm", x)
        queries = self._heads(f"{name}.encoder_attn.q_proj", y)
        y = functional.scaled_dot_product_attention(queries, *self._cross[index])
        x = x + self._linear(f"{name}.encoder_attn.out_proj", self._merged(y))
        y = self._linear(f"{name}.fc1", self._norm(f"{name}.final_layer_norm", x))
        return x + self._linear(f"{name}.fc2", functional.gelu(y))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        weight, bias = self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"]
        return functional.layer_norm(x, (self._config.width,), weight, bias)

    def _heads(self, name: str, x: Tensor) -> Tensor:
        return self._linear(name, x).view(self._batch, 1, self._config.n_heads, 64).transpose(1, 2)

    def _merged(self, x: Tensor) -> Tensor:
        return x.transpose(1, 2).reshape(self._batch, 1, self._config.width)


def captured(work: Callable[[], None]) -> Callable[[], None]:
    """``work`` as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def torch_us(step: TorchStep, work: Callable[[], None], n_steps: int = N_TOKENS) -> float:
    """µs a step, ``n_steps`` of them from the same position on as the others."""
    step.position.fill_(FIRST_TOKENS + len(shapes.head()))
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(n_steps):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / n_steps * 1e3


def generate_us(config: WhisperConfig, n_tokens: int = 64) -> float:
    """µs a token of transformers' ``generate``, the encoder left out."""
    from transformers import WhisperConfig as TheirConfig
    from transformers import WhisperForConditionalGeneration
    from transformers.modeling_outputs import BaseModelOutput

    sizes = TheirConfig(
        vocab_size=config.n_vocab,
        num_mel_bins=config.n_mels,
        encoder_layers=1,
        encoder_attention_heads=config.n_heads,
        decoder_layers=config.n_decoder_layers,
        decoder_attention_heads=config.n_heads,
        decoder_ffn_dim=config.n_ffn,
        encoder_ffn_dim=config.n_ffn,
        d_model=config.width,
    )
    with torch.device("cuda"), torch.inference_mode():
        model = WhisperForConditionalGeneration(sizes).to(torch.bfloat16).eval()
        audio = BaseModelOutput(torch.randn(1, config.n_audio_positions, config.width, dtype=torch.bfloat16))

        def generate() -> None:
            lengths = {"max_new_tokens": n_tokens, "min_new_tokens": n_tokens}
            model.generate(encoder_outputs=audio, do_sample=False, num_beams=1, return_timestamps=False, **lengths)

        generate()
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        generate()
        torch.cuda.synchronize()
        return (time.perf_counter() - began_s) / n_tokens * 1e6


def copy_gb_s() -> float:
    """Bytes read and written a second, in GB, by a copy within the device's memory; the median of ten."""
    source = torch.empty(COPY_BYTES // 2, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    rates = []
    for _ in range(12):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        rates.append(COPY_BYTES / begin.elapsed_time(end) / 1e6)
    return median_and_p95(rates[2:])[0]


# --- tables ----------------------------------------------------------------------------------------------------------


def rivals(decoders: Decoders, batch: int, *, compiled: bool) -> dict[str, Timed]:
    """Name → one measurement, the slow ones over fewer steps."""
    step = TorchStep(decoders.config, decoders.tensors, decoders.cross_cache[:batch])
    timed: dict[str, Timed] = {}
    modes = {
        "**megakernel**": Mode.LOOP,
        "D: one phase a launch, graph, dependent launch": Mode.GRAPH_DEPENDENT,
        "C: one phase a launch, graph": Mode.GRAPH,
    }
    for name, mode in modes.items():
        timed[name] = partial(ours_in, decoders, mode, batch)
    if compiled:
        compiled_step = torch.compile(step.run, mode="max-autotune-no-cudagraphs")
        timed["B: torch.compile max-autotune, graph"] = partial(torch_us, step, captured(compiled_step))
    timed["torch eager, graph"] = partial(torch_us, step, captured(step.run))
    timed["A: torch eager"] = partial(torch_us, step, step.run, 32)
    return timed


def ours_in(decoders: Decoders, mode: Mode, batch: int) -> float:
    """``ours`` from a clean start in ``mode``."""
    decoders.launcher.clear(state=True)
    runtime = Runtime(decoders.program, decoders.launcher, n_rules=1, mode=mode)
    return ours(runtime, partial(shapes.request, config=decoders.config), batch)


def step_table(decoders: Decoders, batch: int, *, gb_s: float, compiled: bool, n_repeats: int) -> str:
    """Rows of one batch size, the fastest first as a rule."""
    timed = rivals(decoders, batch, compiled=compiled)
    taken: dict[str, list[float]] = {name: [] for name in timed}
    for name in timed:
        timed[name]()  # warm
    for _ in range(n_repeats):
        for name, measure in timed.items():
            taken[name].append(measure())
    predicted = predict(decoders.program, n_slots=batch, n_positions=FIRST_TOKENS + N_TOKENS // 2)
    floor_us = (predicted.weight_bytes + predicted.cache_bytes) / gb_s / 1e3
    best_us, _ = median_and_p95(taken["**megakernel**"])
    lines = [
        f"\n## {batch} window{'s' * (batch > 1)} a step\n",
        "| | µs a step, median | p95 | times the megakernel's |",
        "|---|---:|---:|---:|",
        f"| floor: {(predicted.weight_bytes + predicted.cache_bytes) / 1e6:.0f} MB at {gb_s / 1e3:.2f} TB/s "
        f"| {floor_us:.1f} | | {floor_us / best_us:.2f} |",
    ]
    if predicted.step_us is not None:
        ratio = predicted.step_us / best_us
        lines.append(f"| predicted, {predicted.n_hops} hops | {predicted.step_us:.1f} | | {ratio:.2f} |")
    for name, values in taken.items():
        middle_us, p95_us = median_and_p95(values)
        lines.append(f"| {name} | {middle_us:.1f} | {p95_us:.1f} | {middle_us / best_us:.2f} |")
    return "\n".join(lines)


def verify_table(decoders: Decoders, n_repeats: int) -> str:
    """40 tokens at once against one after the other."""
    decoders.launcher.clear(state=True)
    drafted, plain, tokens = verify(Runtime(decoders.program, decoders.launcher, n_rules=1), decoders.config)
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(n_repeats + 1):
        for values, measure in zip(times, (drafted, plain), strict=True):
            values.append(measure())
    (drafted_ms, drafted_p95), (plain_ms, plain_p95) = (median_and_p95(values[1:]) for values in times)
    return (
        f"\n## A draft of {DRAFT_TOKENS} tokens that holds, and one token more\n\n"
        f"{len(set(tokens))} different tokens are written. Whole requests: opening, prompt, polling by the host.\n\n"
        "| | ms, median | p95 |\n|---|---:|---:|\n"
        f"| verified | {drafted_ms:.2f} | {drafted_p95:.2f} |\n"
        f"| one step a token | {plain_ms:.2f} | {plain_p95:.2f} |\n"
        f"| times as fast | {plain_ms / drafted_ms:.1f} | |"
    )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(CONFIGS), default="large-v3-turbo")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument(
        "--compiled",
        type=int,
        nargs="*",
        default=[1, 8],
        help="those of them with rival B, whose tuning takes a minute",
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--no-generate", action="store_true", help="leave out transformers' generate")
    arguments = parser.parse_args()
    decoders = shapes.load(CONFIGS[arguments.model])
    gb_s = copy_gb_s()
    print(heading(f"One step of Whisper {arguments.model}'s decoder"))
    versions = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
    print(f"{versions}. Copies reach {gb_s / 1e3:.2f} TB/s. {arguments.repeats} repeats.")
    with torch.inference_mode():
        for batch in arguments.batches:
            compiled = batch in arguments.compiled
            print(step_table(decoders, batch, gb_s=gb_s, compiled=compiled, n_repeats=arguments.repeats), flush=True)
        print(verify_table(decoders, arguments.repeats), flush=True)
    if find_spec("transformers") is None:
        print("\ntransformers is not installed, so its `generate` was not measured.")
    elif not arguments.no_generate:
        print(f"\ntransformers' `generate`, eager, one window: {generate_us(decoders.config):.0f} µs a token.")


if __name__ == "__main__":
    main()
