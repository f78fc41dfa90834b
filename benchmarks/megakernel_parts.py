"""What the megakernel's parts reach alone: its weight stream, a hop between SMs, a phase, rows handed over, the host.

Run from the project's root, on a machine with an NVIDIA GPU:

    python -m benchmarks.megakernel_parts

The small kernels are ``megakernel_parts.cu``, over the megakernel's own headers and the program of Whisper
large-v3-turbo's decoder. Phases are timed in the whole megakernel: as many more of them as one program has than
another, over the difference of their steps.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from benchmarks import shapes
from benchmarks.decoder_step import copy_gb_s, ours
from benchmarks.report import heading
from benchmarks.shapes import TURBO, decoder_program, median_and_p95
from megakernel.compile import compile_program
from megakernel.cubin import PROGRAM_HEADER, Cubin, bitmap_words, compile_sources, kernel_sources, program_header
from megakernel.device import Device, Launch, call, find_device, launch, opt_in, pinned_memory, target_for
from megakernel.graph import Builder, Graph
from megakernel.isa import GRANULE_ROWS, TILE_BYTES, Parameter
from megakernel.launcher import Launcher, dynamic_shared_bytes
from megakernel.ops import Sizes
from megakernel.program import Program
from megakernel.request import Request
from megakernel.runtime import Runtime
from models.wheels import cache_folder
from models.whisper.loading import CUBINS

SOURCE = Path(__file__).with_suffix(".cu")
KERNELS = (
    *("stream_alone", "copy", "hop_between_two", "hop_among_all", "barrier"),
    *("rows_tagged", "rows_tagged_together", "rows_counted", "rows_counted_apart", "rows_flagged"),
    *("look_at_host", "echo"),
)
N_REPEATS = 7
N_ROUNDS = 2_000
FEW_SMS = 64
COPY_MIB = 1_024
STREAM_PASSES = 8
CHAIN_WIDTH = 1024
CHAIN_LENGTHS = (8, 72)  # phases
CHAIN_SMS = 128  # a granule each
NEAR_TILES = 16  # of each warp: 8.6 MB in all, which the L2 holds
LINE_BYTES = 128


def parts_cubin(program: Program, cache: Path | None) -> Cubin:
    """The small kernels, for ``program``'s numbers."""
    sources = {**kernel_sources(), PROGRAM_HEADER: program_header(program), SOURCE.name: SOURCE.read_text("utf-8")}
    return compile_sources(sources, arch=program.target.arch, cache=cache, entry=SOURCE.name)


class Parts:
    """The small kernels, over one program's tape and exchange area."""

    def __init__(self, program: Program, launcher: Launcher, cache: Path) -> None:
        self.program = program
        self._shared_bytes = dynamic_shared_bytes(program)
        module = call("cuModuleLoadData", np.frombuffer(parts_cubin(program, cache).code, np.uint8).ctypes.data)
        self._kernels = {name: call("cuModuleGetFunction", module, name.encode()) for name in KERNELS}
        for name in set(KERNELS) - {"copy"}:
            opt_in(self._kernels[name], self._shared_bytes)
        self._plain = torch.zeros(COPY_MIB << 20, dtype=torch.uint8, device="cuda")
        self._copied = torch.empty_like(self._plain)
        self._counter = torch.zeros(256, dtype=torch.int32, device="cuda")
        self._host, host_address = pinned_memory(2 * LINE_BYTES)
        self._parameters = np.zeros(len(Parameter), np.uint64)
        for parameter, address in launcher.buffers.addresses().items():
            self._parameters[parameter] = address
        self._parameters[Parameter.RESIDUAL] = self._plain.data_ptr()
        self._parameters[Parameter.STATE] = self._counter.data_ptr()
        self._parameters[Parameter.HOST_DOOR] = host_address
        self._parameters[Parameter.HOST_BEAT] = host_address + LINE_BYTES
        self._epoch = 1

    def start(self, name: str, n_rounds: int, number: int = 0) -> None:
        """Launch ``name`` on torch's stream. ``number``: what else it is told, rows or an SM."""
        n_sms = self.program.target.n_sms
        how = Launch(n_sms, self._shared_bytes, 32 * self.program.sizes.n_warps, is_cooperative=True)
        parameters = self._parameters.copy()
        if name == "copy":
            how = Launch(n_sms, 0, n_threads=1024)
            parameters[Parameter.EXCHANGE] = self._copied.data_ptr()
        parameters[Parameter.MAX_STEPS], parameters[Parameter.PHASE] = n_rounds, number
        parameters[Parameter.EPOCH] = self._epoch
        self._epoch += n_rounds
        launch(self._kernels[name], how, torch.cuda.current_stream().cuda_stream, parameters)

    def round_us(self, name: str, n_rounds: int = N_ROUNDS, number: int = 0) -> tuple[float, float]:
        """Median and p95 of a round: what twice as many take longer."""
        values = [
            (self._us(name, 2 * n_rounds, number) - self._us(name, n_rounds, number)) / n_rounds
            for _ in range(N_REPEATS + 1)
        ]
        return median_and_p95(values[1:])

    def _us(self, name: str, n_rounds: int, number: int) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._counter.zero_()
        begin.record()
        self.start(name, n_rounds, number)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e3

    def stream_gb_s(self) -> float:
        """The tape over and over, as the megakernel reads it."""
        n_bytes = int(self.program.warp_tiles[..., 1].sum()) * TILE_BYTES
        return n_bytes / self.round_us("stream_alone", STREAM_PASSES)[0] / 1e3

    def copy_gb_s(self) -> float:
        """Bytes read and written by a copy on the same SMs."""
        return 2 * (1 << 20) / self.round_us("copy", COPY_MIB // 2)[0] / 1e3

    def echo_us(self, n_rounds: int = 500) -> tuple[float, float]:
        """A number from the host to the device and back, as Python sees it."""
        door, beat = self._host[:4].view(np.uint32), self._host[LINE_BYTES : LINE_BYTES + 4].view(np.uint32)
        door[0] = beat[0] = 0
        self.start("echo", n_rounds)
        took_us = []
        for number in range(1, n_rounds + 1):
            began_s = time.perf_counter()
            door[0] = number
            while beat[0] != number and time.perf_counter() - began_s < 1.0:
                pass
            took_us.append((time.perf_counter() - began_s) * 1e6)
        torch.cuda.synchronize()
        return median_and_p95(took_us[10:])


# --- phases of the whole megakernel ----------------------------------------------------------------------------------


def chain(n_linears: int) -> Graph:
    """Linears one behind the other, each of one granule an SM. The second ends the residual stream, which must be."""
    n_tokens = CHAIN_SMS * GRANULE_ROWS
    sizes = Sizes(
        width=CHAIN_WIDTH,
        head_size=64,
        n_layers=1,
        n_positions=512,
        n_cross_positions=64,
        n_tokens=n_tokens,
        end_token=n_tokens - 2,
        mark_begin=n_tokens - 1,
    )
    step = Builder(f"chain of {n_linears}", sizes)
    x = step.embed("embedding", tokens="tokens", positions="positions")
    for index in range(n_linears):
        x = step.linear(f"{index}", x, CHAIN_WIDTH, weight=f"{index}.weight", bias=f"{index}.bias")
        if index == 1:
            x = step.add("sum", x, "embedding")
    step.select("select", step.head("head", x, weight="tokens"))
    return step.build()


def chain_us(n_linears: int, device: Device, cache: Path) -> float:
    """A step's µs."""
    graph = chain(n_linears)
    program = compile_program(graph, target_for(device, n_sms=CHAIN_SMS))
    generator = torch.Generator(device="cuda").manual_seed(0)
    constants = {
        name: torch.empty(shape, device="cuda").normal_(std=CHAIN_WIDTH**-0.5, generator=generator)
        for name, shape in graph.constants.items()
    }
    bitmaps = np.zeros((1, 2, bitmap_words(graph.sizes.n_tokens)), np.uint32)
    bitmaps[..., -1] = 0xC0000000  # the end token and the one marker
    launcher = Launcher.load(program, constants, bitmaps, device=device, cache=cache)
    return step_us(launcher, lambda n_tokens: Request(head=(1,), max_tokens=n_tokens, n_positions=64))


def step_us(launcher: Launcher, request: Callable[[int], Request]) -> float:
    """The median of a few."""
    runtime = Runtime(launcher.program, launcher, n_rules=1)
    middle_us, _ = median_and_p95([ours(runtime, request, 1) for _ in range(N_REPEATS + 1)][1:])
    runtime.close()
    return middle_us


def layers_us(n_layers: int) -> tuple[float, float]:
    """A step's µs with so many of turbo's layers: as it is, and with all weights read from the L2."""
    config = replace(TURBO, n_decoder_layers=n_layers, alignment_heads=())
    found = []
    for is_near in (False, True):
        decoders = shapes.load(config)
        if is_near:  # each warp reads its first tiles again and again, so results are wrong and times are not
            decoders.launcher.buffers.program[Parameter.WARP_TILES][..., 1].clamp_(max=NEAR_TILES)
        found.append(step_us(decoders.launcher, partial(shapes.request, config=config)))
    return found[0], found[1]


def phases_of_layers(n_layers: int, device: Device) -> int:
    """How many phases the layers of that decoder have."""
    config = replace(TURBO, n_decoder_layers=n_layers, alignment_heads=())
    return len(decoder_program(config, device).phases)


# --- tables ----------------------------------------------------------------------------------------------------------


def memory_table(every: Parts, few: Parts, torch_copy_gb_s: float) -> str:
    """The stream against copies."""
    lines = [
        "\n## Memory\n",
        "| | TB/s | times torch's copy |",
        "|---|---:|---:|",
        f"| torch's copy, read and written | {torch_copy_gb_s / 1e3:.2f} | 1.00 |",
    ]
    for parts in (every, few):
        for name, gb_s in (("copy", parts.copy_gb_s()), ("**the tape's stream**", parts.stream_gb_s())):
            where = f"{parts.program.target.n_sms} SMs"
            lines.append(f"| {name}, {where} | {gb_s / 1e3:.2f} | {gb_s / torch_copy_gb_s:.2f} |")
    return "\n".join(lines)


def hop_table(parts: Parts) -> str:
    """One word from SM to SM, and to the host."""
    n_sms = parts.program.target.n_sms
    partners = [1, 2, n_sms // 2, n_sms - 1]
    between = [parts.round_us("hop_between_two", number=partner)[0] for partner in partners]
    rows = [
        (f"tagged word from one SM to another (4 pairs: {min(between):.2f} to {max(between):.2f})", np.median(between)),
        (f"tagged words from {n_sms} SMs to all of them", parts.round_us("hop_among_all")[0]),
        ("barrier of the same by a counter", parts.round_us("barrier")[0]),
        ("one look at a word in the host's memory", parts.round_us("look_at_host")[0]),
        ("a number from the host to the device and back, seen from Python", parts.echo_us()[0]),
    ]
    return "\n".join(["\n## Hops\n", "| | µs |", "|---|---:|", *(f"| {name} | {us:.2f} |" for name, us in rows)])


def phase_table(device: Device, cache: Path) -> str:
    """A phase's µs."""
    few, many = (chain_us(n, device, cache) for n in CHAIN_LENGTHS)
    one_us = (many - few) / (CHAIN_LENGTHS[1] - CHAIN_LENGTHS[0])
    (two_us, two_near_us), (four_us, four_near_us) = layers_us(2), layers_us(4)
    n = phases_of_layers(4, device) - phases_of_layers(2, device)
    return "\n".join(
        [
            "\n## A phase: a hop and what is computed\n",
            "| | µs a phase |",
            "|---|---:|",
            f"| {CHAIN_WIDTH} x {CHAIN_WIDTH}, a granule on each of {CHAIN_SMS} SMs, "
            f"{CHAIN_LENGTHS[1] - CHAIN_LENGTHS[0]} phases | {one_us:.2f} |",
            f"| {n} phases of Whisper turbo's layers, weights from the L2 | {(four_near_us - two_near_us) / n:.2f} |",
            f"| the same, weights from memory | {(four_us - two_us) / n:.2f} |",
        ]
    )


EXCHANGES = {
    "rows_tagged": "tagged, as it is",
    "rows_tagged_together": "tagged, looked at together",
    "rows_counted": "plain, a counter",
    "rows_counted_apart": "plain, 8 counters",
    "rows_flagged": "plain, a flag each",
}


def rows_table(parts: Parts) -> str:
    """Rows from all SMs to all SMs: each kernel's µs."""
    lines = [
        f"\n## Rows of {parts.program.sizes.width} elements from every SM to every SM's shared memory, µs\n",
        f"An SM reads {parts.program.sizes.width * 4 / 1e3:.1f} KB of tagged words a row, or half of that plain.\n",
        f"| rows | {' | '.join(EXCHANGES.values())} |",
        f"|---:|{'---:|' * len(EXCHANGES)}",
    ]
    for n_rows in (1, 2, 4, 8, 16):
        cells = [f"{parts.round_us(name, number=n_rows)[0]:.2f}" for name in EXCHANGES]
        lines.append(f"| {n_rows} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the tables."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    device, cache = find_device(), cache_folder() / CUBINS
    print(heading("The megakernel's parts"))
    print(f"Medians of {N_REPEATS}, each the difference of two launches, one of twice as many rounds.", flush=True)
    every, few = (parts_of(device, n_sms, cache) for n_sms in (None, FEW_SMS))
    print(memory_table(every, few, copy_gb_s()), flush=True)
    print(hop_table(every), flush=True)
    print(rows_table(every), flush=True)
    print(phase_table(device, cache), flush=True)


def parts_of(device: Device, n_sms: int | None, cache: Path) -> Parts:
    """The small kernels for so many SMs."""
    decoders = shapes.load(TURBO, n_sms=n_sms)
    return Parts(decoders.program, decoders.launcher, cache)


if __name__ == "__main__":
    main()
