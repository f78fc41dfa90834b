"""Greedy decoding of Parakeet TDT 0.6B v3's frames: the megakernel's loop and the best of torch under CUDA graphs.

Run from the project's root, on a machine with an NVIDIA GPU:

    python -m benchmarks.tdt_step

All in one process on the same random weights at true sizes and the same random frames; repeats take turns. The head's
bias makes about half of the looked-at frames blank, as speech does. A loop's time is that of long streams less that of
shorter ones, so that launches, copies and the host's share of a request drop out; the whole request is told apart.
"""

import argparse
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.report import heading
from megakernel.compile import compile_program
from megakernel.device import find_device, target_for
from megakernel.isa import MAX_SLOTS
from megakernel.mailbox import DoneRecord, EmissionRecord
from megakernel.predict import predict
from megakernel.request import FramePart, TransducerRequest
from megakernel.runtime import Runtime
from megakernel.transducer_header import MAX_KERNEL_ROWS
from models.parakeet import graph_decoder
from models.parakeet.config import ParakeetConfig
from models.parakeet.graph import transducer_graph
from models.parakeet.graph_decoder import GraphDecoder
from models.parakeet.greedy import Piece, TorchDecoder
from models.parakeet.megakernel_backend import MegakernelDecoder, decoder_on
from models.parakeet.reference import Parakeet

V3 = ParakeetConfig(128, 1, 1024, 8, 4096, 9, 256, 640, 2, 8193, 8192)  # but for encoder layers, which are not used
N_FRAMES = 1024  # timed: 82 s of audio
FIRST_FRAMES = 256  # before
N_REPEATS = 9
CHUNK_FRAMES = 4  # of a call, 320 ms
AHEAD_FRAMES = 13  # behind them, 1040 ms
N_CALLS = 50
MANY_BLANKS = 100.0  # added to the blank's logit


@dataclass(frozen=True, slots=True)
class Run:
    """One decoding of all streams."""

    seconds: float
    n_tokens: int  # of the stream that has most: streams go on together
    n_steps: int


def random_model(seed: int) -> Parakeet:
    """Weights of a size that spreads logits and keeps gates where they matter."""
    torch.manual_seed(seed)
    model = Parakeet(V3)
    with torch.no_grad():
        model.joint.head.weight.mul_(4)
        model.decoder.embedding.weight[V3.blank_id] = 0
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model.eval()


def make_half_blank(model: Parakeet, frames: Tensor) -> None:
    """Set the blank's bias such that it is the best token at half of the frames."""
    with torch.inference_mode():
        logits = model.joint(frames, TorchDecoder(model).start().projected)[:, : V3.vocabulary_size]
        others = logits.index_fill(1, torch.tensor([V3.blank_id]), -torch.inf).amax(dim=1)
        lead = float((others - logits[:, V3.blank_id]).median())
    with torch.no_grad():
        model.joint.head.bias[V3.blank_id] += lead


# --- ours ------------------------------------------------------------------------------------------------------------


def ours(runtime: Runtime, n_slots: int, n_frames: int) -> Run:
    """Frames lie in the slots already."""
    tokens, steps = [0] * n_slots, [0] * n_slots
    began_s = time.perf_counter()
    for slot in range(n_slots):
        runtime.open(slot, TransducerRequest((FramePart(n_frames, begins=True, seat=slot),)))
    runtime.burst()
    n_done = 0
    while n_done < n_slots:
        for record in runtime.records():
            if isinstance(record, EmissionRecord):
                tokens[record.slot] += 1
            elif isinstance(record, DoneRecord):
                n_done += 1
                steps[record.slot] = record.step
    seconds = time.perf_counter() - began_s
    runtime.leave()
    return Run(seconds, max(tokens), max(steps))


# --- torch -----------------------------------------------------------------------------------------------------------


def torchs(decoder: GraphDecoder, frames: Sequence[Tensor]) -> Run:
    """Whole requests, with the host's look behind every graph."""
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    results = decoder.decode([(each, decoder.start()) for each in frames])
    return Run(time.perf_counter() - began_s, max(len(emissions) for emissions, _ in results), 0)


def replay_us(decoder: GraphDecoder, n_streams: int) -> float:
    """µs a step of graphs that follow each other without anybody looking."""
    streams, run = decoder._of(n_streams, n_rows=N_FRAMES * n_streams)
    stream = decoder._stream
    with torch.inference_mode():
        streams.n_frames.fill_(1 << 30)
        streams.frame.zero_()
    torch.cuda.synchronize()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    n_graphs = 30
    with torch.cuda.stream(stream), torch.inference_mode():
        run()
        begin.record(stream)
        for _ in range(n_graphs):
            run()
        end.record(stream)
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / (n_graphs * graph_decoder.STEPS)


# --- measuring -------------------------------------------------------------------------------------------------------


def slope(run: Callable[[int], Run]) -> tuple[float, float, float]:
    """µs a token and µs a step between the two lengths, medians, and tokens a step (0 where steps aren't counted)."""
    per_token, per_step, share = [], [], []
    for repeat in range(N_REPEATS + 1):
        short, long = run(FIRST_FRAMES), run(N_FRAMES)
        if repeat == 0:
            continue  # the first one warms up
        spent_us = (long.seconds - short.seconds) * 1e6
        n_tokens, n_steps = long.n_tokens - short.n_tokens, long.n_steps - short.n_steps
        per_token.append(spent_us / max(n_tokens, 1))
        per_step.append(spent_us / max(n_steps, 1))
        share.append(n_tokens / max(n_steps, 1))
    return median(per_token), median(per_step), median(share)


def load_ours(model: Parakeet, frames: Tensor, cache: Path) -> MegakernelDecoder:
    """With ``frames`` in its seats."""
    decoder = decoder_on(model, find_device(), cache=cache, n_frames=N_FRAMES, n_seats=MAX_SLOTS)
    decoder._buffers.frames.copy_(frames)
    torch.cuda.synchronize()
    return decoder


def main() -> None:
    """Print the result in Markdown."""
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--no-compile", action="store_true", help="leave torch.compile out")
    options = arguments.parse_args()
    logging.basicConfig(level=logging.INFO)
    model = random_model(0)
    frames = torch.randn(8, N_FRAMES, V3.d_predictor, generator=torch.Generator().manual_seed(1)).bfloat16()
    make_half_blank(model, frames[0, :256].float())
    print(heading("Greedy TDT decoding at Parakeet 0.6B v3's sizes"))
    print(f"torch {torch.__version__}, random weights, {N_REPEATS} repeats, medians.\n")
    with TemporaryDirectory() as folder:
        _ours(model, frames, Path(folder))
    _torchs(model, frames, is_compiled=False)
    if not options.no_compile:
        _torchs(model, frames, is_compiled=True)


def _ours(model: Parakeet, frames: Tensor, cache: Path) -> None:
    decoder = load_ours(model, frames, cache)
    runtime = decoder._runtime
    assert isinstance(runtime, Runtime)
    graph = transducer_graph(V3, n_frames=N_FRAMES, n_seats=MAX_SLOTS)
    prediction = predict(compile_program(graph, replace(target_for(find_device()), max_rows=MAX_KERNEL_ROWS)))
    print(
        f"## Megakernel, {MAX_KERNEL_ROWS} rows a step\n\nPredicted: {prediction.step_us:.1f} µs a step with a token.\n"
    )
    print("| streams | µs a token | µs a step | tokens a step |")
    print("|---|---:|---:|---:|")
    for n_slots in (1, 2, 4, 8):
        per_token, per_step, share = slope(lambda n_frames, n=n_slots: ours(runtime, n, n_frames))
        print(f"| {n_slots} | {per_token:.2f} | {per_step:.2f} | {share:.2f} |", flush=True)
    decoder.close()
    _blanks(model, frames, cache)
    _calls(model, frames, cache)


def _calls(model: Parakeet, frames: Tensor, cache: Path) -> None:
    """Whole calls as the product makes them, from tensors on the device to emissions and states."""
    decoder = decoder_on(model, find_device(), cache=cache)
    on, start = frames.to("cuda"), decoder.start()
    end = CHUNK_FRAMES + AHEAD_FRAMES
    print(f"\n| whole calls of streams | {CHUNK_FRAMES} frames each, µs | and {AHEAD_FRAMES} that lie ahead, µs |")
    print("|---|---:|---:|")
    for n_streams in (1, 8, 16, 64):
        of = [on[i % len(on), i : i + end] for i in range(n_streams)]
        pairs = [(each[:CHUNK_FRAMES], start) for each in of]
        pieces = [Piece(each[:CHUNK_FRAMES], start, each[CHUNK_FRAMES:]) for each in of]
        alone_us, ahead_us = _call_us(partial(decoder.decode, pairs)), _call_us(partial(decoder.decode_ahead, pieces))
        print(f"| {n_streams} | {alone_us:.0f} | {ahead_us:.0f} |", flush=True)
    decoder.close()


def _call_us(call: Callable[[], object]) -> float:
    spent = []
    for _ in range(N_CALLS):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        call()
        spent.append(time.perf_counter() - began_s)
    return median(spent[N_CALLS // 5 :]) * 1e6


def _blanks(model: Parakeet, frames: Tensor, cache: Path) -> None:
    """Silence: no step has a token."""
    bias = model.joint.head.bias
    with torch.no_grad():
        bias[V3.blank_id] += MANY_BLANKS
    decoder = load_ours(model, frames, cache)
    runtime = decoder._runtime
    assert isinstance(runtime, Runtime)
    with torch.no_grad():
        bias[V3.blank_id] -= MANY_BLANKS
    for n_slots in (1, 8):
        _, per_step, _ = slope(lambda n_frames, n=n_slots: ours(runtime, n, n_frames))
        print(f"\n{n_slots} streams of blanks alone: {per_step:.2f} µs a window")
    decoder.close()


def _torchs(model: Parakeet, frames: Tensor, *, is_compiled: bool) -> None:
    name = "compiled step" if is_compiled else "eager step"
    on = frames.to("cuda")
    step = torch.compile(graph_decoder.step, dynamic=False) if is_compiled else graph_decoder.step
    with patch.object(graph_decoder, "step", step):
        decoder = GraphDecoder(model, torch.zeros(0, dtype=torch.bfloat16, device="cuda"), torch.cuda.Stream())
        print(f"\n## torch, {name}, {graph_decoder.STEPS} steps a graph\n")
        print("| streams | µs a token, with the host | µs a step, replayed without a look |")
        print("|---|---:|---:|")
        for n_streams in (1, 8):
            per_token, _, _ = slope(lambda n, s=n_streams: torchs(decoder, [on[i, :n] for i in range(s)]))
            print(f"| {n_streams} | {per_token:.1f} | {replay_us(decoder, n_streams):.1f} |", flush=True)


if __name__ == "__main__":
    main()
