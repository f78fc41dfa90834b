"""What decoding suffers from an encoder beside it: SMs shared in turns, or split into two groups.

Run from the project's root, on a machine with an NVIDIA GPU:

    python -m benchmarks.sm_split

Whisper large-v3-turbo at true shapes with random weights. One window is decoded; full windows are encoded beside it,
each begun ``PERIOD_MS`` after the last or when that is done. In turns: the kernel has all SMs, and leaves for an
encoder whose window is to be decoded. Split: the kernel stays on some SMs, in a green context or just there first.
Tokens are timed as the host sees them.
"""

import argparse
import sys
import time
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks import shapes
from benchmarks.report import heading
from benchmarks.shapes import TURBO, Decoders, median_and_p95, random_model
from megakernel.device import split_sms
from megakernel.mailbox import DoneRecord, TokenRecord
from megakernel.runtime import Runtime
from models.whisper.stage import Stage
from models.whisper.torch_backend import silent_tail
from models.whisper.window import POSITION_SAMPLES

SPLITS = (64, 96)  # SMs of the decoder
PERIOD_MS = 15.0
N_TOKENS = 400
N_TEXTS = 3
ENCODER_SLOT = 7


class Encoder:
    """A full window's front end, encoder and cross projections as a CUDA graph on one stream."""

    def __init__(self, stage: Stage, stream: torch.cuda.Stream) -> None:
        samples = torch.randn(1, TURBO.n_audio_positions * POSITION_SAMPLES, device="cuda") * 0.1
        self._inputs = samples, torch.tensor([TURBO.n_audio_positions]).cuda(), torch.tensor([ENCODER_SLOT]).cuda()
        self._stream, self._graph = stream, torch.cuda.CUDAGraph()
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        self._began_s, self._is_on = 0.0, False
        self.took_ms: list[float] = []
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._run(stage)
            stream.synchronize()
            with torch.cuda.graph(self._graph, stream=stream):
                self._kept = self._run(stage)
        torch.cuda.synchronize()

    def _run(self, stage: Stage) -> Tensor:
        return stage(*self._inputs)

    def start_if_due(self) -> torch.cuda.Event | None:
        """Begin the next window; what is recorded behind it, ``None`` if it is not time yet."""
        if self._is_on:
            if not self._events[1].query():
                return None
            self.took_ms.append(self._events[0].elapsed_time(self._events[1]))
            self._is_on = False
        if time.perf_counter() - self._began_s < PERIOD_MS / 1e3:
            return None
        self._began_s, self._is_on = time.perf_counter(), True
        with torch.cuda.stream(self._stream):
            self._events[0].record()
            self._graph.replay()
            self._events[1].record()
        return self._events[1]

    def finish(self) -> None:
        """Wait for the last window."""
        self._stream.synchronize()
        self._is_on = False


@dataclass(frozen=True, slots=True)
class Timed:
    """Between two tokens, as the host saw them; and each window's encoder."""

    token_us: list[float]
    encoder_ms: list[float]


def decode(runtime: Runtime, encoder: Encoder | None, *, in_turns: bool) -> Timed:
    """Some texts, one after the other. ``in_turns``: each window encoded beside is decoded, too, for one token."""
    token_us: list[float] = []
    if encoder is not None:
        encoder.took_ms.clear()
    for _ in range(N_TEXTS):
        runtime.open(0, shapes.request(N_TOKENS))
        runtime.burst()
        is_done, beside_open, last_s = False, False, 0.0
        while not is_done or beside_open:
            if encoder is not None and not is_done and not beside_open and (after := encoder.start_if_due()):
                if in_turns:
                    runtime.open(1, shapes.request(1), after=after)
                    beside_open = True
            for record in runtime.records():
                now_s = time.perf_counter()
                if isinstance(record, TokenRecord) and record.slot == 0:
                    token_us += [(now_s - last_s) * 1e6] if last_s else []
                    last_s = now_s
                if isinstance(record, DoneRecord):
                    is_done, beside_open = is_done or record.slot == 0, beside_open and record.slot == 0
    return Timed(token_us, [] if encoder is None else list(encoder.took_ms))


def alone_ms(encoder: Encoder, n_windows: int = 20) -> float:
    """A window's encoder with nobody beside it."""
    encoder.took_ms.clear()
    while len(encoder.took_ms) < n_windows:
        encoder.start_if_due()
    encoder.finish()
    return median_and_p95(encoder.took_ms)[0]


def row(name: str, runtime: Runtime, encoder: Encoder, *, in_turns: bool) -> str:
    """Alone, then with the encoder beside it."""
    encoder_ms = alone_ms(encoder)
    decode(runtime, None, in_turns=in_turns)
    alone = median_and_p95(decode(runtime, None, in_turns=in_turns).token_us)
    timed = decode(runtime, encoder, in_turns=in_turns)
    beside = median_and_p95(timed.token_us)
    mean_us = float(np.mean(timed.token_us))
    beside_ms = f"{median_and_p95(timed.encoder_ms)[0]:.2f}" if timed.encoder_ms else "none was encoded"
    print(f"{name}: {len(timed.token_us)} tokens, {len(timed.encoder_ms)} windows", file=sys.stderr, flush=True)
    return (
        f"| {name} | {alone[0]:.0f} | {alone[1]:.0f} | {beside[0]:.0f} | {beside[1]:.0f} | {beside[1] / alone[1]:.2f} "
        f"| {max(timed.token_us):.0f} | {mean_us:.0f} | {encoder_ms:.2f} | {beside_ms} |"
    )


HEADER = (
    "| decoder | alone, µs a token: median | p95 | encoder beside: median | p95 | p95 beside / alone | largest | mean "
    "| encoder alone, ms | beside |\n|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|"
)


def with_kernel(decoders: Decoders, encoder: Encoder, name: str, *, is_resident: bool) -> str:
    """One line; the kernel has left behind it."""
    runtime = Runtime(decoders.program, decoders.launcher, n_rules=1, is_resident=is_resident)
    line = row(name, runtime, encoder, in_turns=not is_resident)
    runtime.leave()
    encoder.finish()  # where it found no SM, it has some now
    return line


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sms", type=int, nargs="+", default=list(SPLITS), help="of the decoder")
    arguments = parser.parse_args()
    print(heading("Decoding beside an encoder, Whisper large-v3-turbo"))
    print(f"A full window's encoder every {PERIOD_MS:.0f} ms.\n\n{HEADER}", flush=True)
    with torch.inference_mode():
        decoders = shapes.load()
        model = random_model()
        stage = Stage(model, silent_tail(model), torch.zeros_like(decoders.cross_cache))
        del model
        everywhere = Encoder(stage, torch.cuda.Stream())
        print(with_kernel(decoders, everywhere, "all SMs, in turns", is_resident=False), flush=True)
        for n_sms in arguments.sms:
            split = split_sms(0, n_sms)
            decoders = shapes.load(n_sms=split.n_sms, stream=split.stream)
            name = f"{split.n_sms} SMs, stays, in a green context"
            print(with_kernel(decoders, everywhere, name, is_resident=True), flush=True)
            rest = Encoder(stage, torch.cuda.ExternalStream(int(split.rest_stream)))
            name += f"; encoder in another of {split.n_rest}"
            print(with_kernel(decoders, rest, name, is_resident=True), flush=True)
            decoders = shapes.load(n_sms=split.n_sms)
            name = f"{split.n_sms} SMs, stays, without green contexts"
            print(with_kernel(decoders, everywhere, name, is_resident=True), flush=True)


if __name__ == "__main__":
    main()
