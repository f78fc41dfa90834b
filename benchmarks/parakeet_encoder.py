"""Parakeet's encoder at the size of 0.6B v3: ours, transformers', nano-parakeet's, and what each part of ours costs.

Run from the project's root, on a machine with an NVIDIA GPU:

    python -m benchmarks.parakeet_encoder

All in one process with random weights (ours and transformers' the same) in bfloat16; repeats take turns. From mel
features on the device to the encoder's states; ours goes on to what the joint network sees of them. nano-parakeet and
transformers are left out where they are not installed.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from benchmarks.decoder_step import captured, copy_gb_s
from benchmarks.report import heading
from benchmarks.shapes import median_and_p95
from megakernel.device import find_device
from models.parakeet.config import FRAME_SAMPLES, HOP_SAMPLES, ParakeetConfig
from models.parakeet.device import DeviceKernels, Gpu, KernelOperations, build
from models.parakeet.features import log_mel
from models.parakeet.fused import SAMPLES_BEHIND, Layer, Lengths, Linear, Operations, TorchOperations
from models.parakeet.reference import Parakeet
from models.parakeet.stage import Stage, bucket, n_frames_of
from models.wheels import cache_folder

V3 = ParakeetConfig(
    n_mels=128,
    n_layers=24,
    d_model=1024,
    n_heads=8,
    d_ffn=4096,
    conv_kernel=9,
    subsampling_channels=256,
    d_predictor=640,
    n_predictor_layers=2,
    vocabulary_size=8193,
    blank_id=8192,
)
SAMPLE_RATE_HZ = 16_000
WORKLOADS = {"2 s": (1, 2), "14 s": (1, 14), "16 × 2 s": (16, 2), "16 × 14 s": (16, 14)}  # buffers, seconds
COMPILED = ("2 s",)  # for which torch.compile tunes as well, a minute each
MAX_FRAMES = 256
N_REPEATS = 7
N_GRAPH, N_EAGER = 20, 3  # calls of a repeat
GEMM_TFLOPS_SIZE = 8192

Timed = Callable[[], None]


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Buffers of one length: what each contestant takes of them."""

    name: str
    features: Tensor  # float32 [B, M, n_mels]
    padded: Tensor  # float32 [B, 8 · T, n_mels], as ours are
    samples: Tensor  # float32 [B, N]
    lengths: Lengths

    @property
    def n_frames(self) -> int:
        """Encoder frames of all buffers, without padding."""
        return int(self.lengths.n_frames.sum())


def workload(name: str, batch: int, seconds: int) -> Workload:
    """Noise that grows louder, so that no two frames are alike."""
    n_samples = seconds * SAMPLE_RATE_HZ
    n_frames, room = n_frames_of(n_samples), bucket(n_frames_of(n_samples))
    loudness = torch.linspace(0.01, 0.3, n_samples, device="cuda")
    samples = torch.zeros(batch, room * FRAME_SAMPLES + SAMPLES_BEHIND, device="cuda")
    samples[:, :n_samples] = torch.randn(batch, n_samples, device="cuda") * loudness
    numbers = torch.tensor([n_samples, n_samples // HOP_SAMPLES, n_frames], dtype=torch.int32, device="cuda")
    lengths = Lengths.of(numbers[:, None].expand(3, batch).contiguous(), room)
    padded = log_mel(samples, lengths.n_samples, V3.n_mels).contiguous()
    return Workload(name, padded[:, : n_samples // HOP_SAMPLES].contiguous(), padded, samples, lengths)


def random_model(config: ParakeetConfig = V3, device: str = "cuda") -> Parakeet:
    """float32 on ``device``; norms and biases are random too, for else some of them would change nothing."""
    torch.manual_seed(0)
    with torch.device(device):
        model = Parakeet(config)
    for name, tensor in model.state_dict().items():
        if name.endswith(("running_mean", "bias_u", "bias_v")):
            tensor.normal_(std=0.3)
        elif "norm" in name and name.endswith(("weight", "running_var")):
            tensor.uniform_(0.5, 1.5)
    return model.eval().requires_grad_(False)


# --- contestants -----------------------------------------------------------------------------------------------------


class Without(KernelOperations):
    """The pieces but for one, whose result is whatever lies in memory."""

    def __init__(self, piece: str, kernels: DeviceKernels) -> None:
        super().__init__(V3, kernels, torch.device("cuda"))
        self._piece = piece

    def first_strides(self, features: Tensor, strides: Any, lengths: Lengths) -> Tensor:
        """See ``Operations``."""
        if self._piece == "subsampling's convolutions":
            return features.new_empty(lengths.batch, lengths.room * 2, V3.n_mels // 4, 256, dtype=torch.bfloat16)
        return super().first_strides(features, strides, lengths)

    def second_stride(self, x: Tensor, strides: Any, lengths: Lengths) -> Tensor:
        """See ``Operations``."""
        if self._piece == "subsampling's convolutions":
            return x.new_empty(lengths.batch, lengths.room, V3.n_mels // 8, 256)
        return super().second_stride(x, strides, lengths)

    def product(self, x: Tensor, linear: Linear, *, silu: bool = False) -> Tensor:
        """See ``Operations``."""
        n = len(linear.weight)
        names = {4096: "feed-forward, first products", 3072: "queries, keys, values", 2048: "gate's product"}
        if self._piece == names[n]:
            return x.new_empty(len(x), n)
        return super().product(x, linear, silu=silu)

    def advance(self, residual: Tensor | None, x: Tensor, linear: Linear, **how: Any) -> tuple[Tensor, Tensor]:
        """See ``Operations``."""
        of_ffn = linear.weight.shape[1] == V3.d_ffn
        name = (
            "feed-forward, second products, with norms"
            if of_ffn
            else "attention's and gate's last products, with norms"
        )
        if self._piece == name:
            after = x.new_empty(len(x), V3.d_model, dtype=torch.float32) if residual is None else residual
            return after, x.new_empty(len(x), V3.d_model)
        return super().advance(residual, x, linear, **how)

    def attend(self, qkv: Tensor, layer: Layer, lengths: Lengths) -> Tensor:
        """See ``Operations``."""
        if self._piece == "attention":
            return qkv.new_empty(len(qkv), V3.d_model)
        return super().attend(qkv, layer, lengths)

    def convolve(self, x: Tensor, layer: Layer, lengths: Lengths) -> Tensor:
        """See ``Operations``."""
        if self._piece == "gate and convolution":
            return x.new_empty(len(x), V3.d_model)
        return super().convolve(x, layer, lengths)


PIECES = (
    "subsampling's convolutions",
    "feed-forward, first products",
    "feed-forward, second products, with norms",
    "queries, keys, values",
    "attention",
    "attention's and gate's last products, with norms",
    "gate's product",
    "gate and convolution",
)


def same_weights(stage: Stage, operations: Operations) -> Stage:
    """The stage with other pieces."""
    import copy

    other = copy.copy(stage)
    other._operations = operations
    return other


def theirs(model: Parakeet) -> Any:
    """transformers' encoder with the same weights."""
    from transformers import ParakeetEncoder, ParakeetEncoderConfig

    sizes = ParakeetEncoderConfig(
        hidden_size=V3.d_model,
        num_hidden_layers=V3.n_layers,
        num_attention_heads=V3.n_heads,
        intermediate_size=V3.d_ffn,
        attention_bias=False,
        convolution_bias=False,
        num_mel_bins=V3.n_mels,
        scale_input=False,
    )
    with torch.device("cuda"):
        encoder = ParakeetEncoder(sizes)
    encoder.load_state_dict(model.encoder.state_dict(), strict=False)
    return encoder.to(torch.bfloat16).eval().requires_grad_(False)


class Contestants:
    """Everything that is measured, with weights on the device."""

    def __init__(self, *, compiled: bool) -> None:
        device = find_device()
        self.model = random_model()
        like = torch.zeros(1, dtype=torch.bfloat16, device="cuda")
        self.kernels = DeviceKernels(
            V3, device, build(V3, Gpu.of(device), arch=device.arch, cache=cache_folder() / "cubins")
        )
        self.stage = Stage(self.model, self._own(), like, max_frames=MAX_FRAMES)
        self.compiled = compiled
        self.theirs = theirs(self.model) if find_spec("transformers") else None
        self.their_blocks: Any = None
        self.nano: Any = None
        if find_spec("nano_parakeet"):
            from nano_parakeet.model import FastConformerEncoder

            with torch.device("cuda"):
                self.nano = FastConformerEncoder().to(torch.bfloat16).eval().requires_grad_(False)

    def _own(self, max_own_rows: int | None = None) -> KernelOperations:
        more = {} if max_own_rows is None else {"max_own_rows": max_own_rows}
        return KernelOperations(V3, self.kernels, torch.device("cuda"), **more)

    def of(self, load: Workload, *, everything: bool) -> dict[str, tuple[Timed, int]]:
        """Name → one call, and how many calls a repeat has."""
        stage, lengths = self.stage, load.lengths

        def graph(work: Callable[[], object]) -> tuple[Timed, int]:
            return captured(lambda: void(work())), N_GRAPH

        timed = {
            "**ours, graph**": graph(lambda: stage.encode(load.padded, lengths)),
            "ours from samples on, graph": graph(lambda: stage(load.samples, lengths)),
        }
        for name, operations in {
            "ours, every product the library's": self._own(0),
            "ours, every product its own": self._own(1 << 30),
        }.items():
            if not (everything and operations._max_own_rows and load.n_frames > 200):
                other = same_weights(stage, operations)
                timed[name] = graph(lambda other=other: other.encode(load.padded, lengths))
        if not everything:
            return timed
        plain = same_weights(stage, TorchOperations(V3, torch.bfloat16))
        timed["ours, pieces in torch, graph"] = graph(lambda: plain.encode(load.padded, lengths))
        features = load.features.to(torch.bfloat16)
        if self.theirs is not None:
            theirs = self.theirs
            if self.compiled and load.name in COMPILED:
                with_compiled_blocks(theirs)
                timed["transformers, blocks by torch.compile max-autotune, graph"] = graph(lambda: theirs(features))
                without_compiled_blocks(theirs)
            timed["transformers, graph"] = graph(lambda: theirs(features))
            timed["transformers, eager"] = (lambda: void(theirs(features))), N_EAGER
        if self.nano is not None:
            n_mel = lengths.n_mel_frames.long()
            timed["nano-parakeet, eager"] = (lambda: void(self.nano(features.transpose(1, 2), n_mel))), N_EAGER
        return timed

    def without(self, load: Workload, piece: str) -> tuple[Timed, int]:
        """Ours but for one piece."""
        other = same_weights(self.stage, Without(piece, self.kernels))
        return captured(lambda: void(other.encode(load.padded, load.lengths))), N_GRAPH

    def errors(self, load: Workload) -> list[str]:
        """Of ours and transformers' in bfloat16, from the float32 reference; relative, over all frames."""
        n_own = int(load.lengths.n_frames[0])
        wanted = self.model.encoder(load.features, load.lengths.n_mel_frames)
        found = self.stage.states(load.padded, load.lengths).view(len(wanted), load.lengths.room, -1)[:, :n_own]
        projected = self.stage(load.samples, load.lengths)[:, :n_own]
        lines = [
            f"ours {relative(found, wanted):.4f}",
            f"from samples to projected {relative(projected, self.model.encoder_projector(wanted)):.4f}",
        ]
        if self.theirs is not None:
            states = self.theirs(load.features.to(torch.bfloat16)).last_hidden_state
            lines.append(f"transformers {relative(states, wanted):.4f}")
        return lines


def with_compiled_blocks(theirs: Any) -> None:
    """Each block by the one piece of code that is compiled for all."""
    for block in theirs.layers:
        block.compile(mode="max-autotune-no-cudagraphs")


def without_compiled_blocks(theirs: Any) -> None:
    """As it was."""
    for block in theirs.layers:
        block._compiled_call_impl = None


def void(_: object) -> None:
    """Nothing of a result."""


def relative(found: Tensor, wanted: Tensor) -> float:
    """Distance over size."""
    return float((found.float() - wanted).norm() / wanted.norm())


# --- tables ----------------------------------------------------------------------------------------------------------


def call_ms(work: Timed, n_calls: int) -> float:
    """ms of one of ``n_calls``."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(n_calls):
        work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / n_calls


def measure(timed: dict[str, tuple[Timed, int]]) -> dict[str, tuple[float, float]]:
    """Name → median and p95 in ms; they take turns."""
    taken: dict[str, list[float]] = {name: [] for name in timed}
    for work, _ in timed.values():
        work()  # warm
    for _ in range(N_REPEATS):
        for name, (work, n_calls) in timed.items():
            taken[name].append(call_ms(work, n_calls))
    return {name: median_and_p95(values) for name, values in taken.items()}


def gemm_tflops() -> float:
    """Of a large bfloat16 product by the library."""
    n = GEMM_TFLOPS_SIZE
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    ms = measure({"": ((lambda: void(a @ b)), 5)})[""][0]
    return 2 * n**3 / ms / 1e9


def floor_ms(model: Parakeet, n_frames: int, *, gb_s: float, tflops: float) -> tuple[float, float]:
    """Reading the encoder's weights once, and its matrix products; without the positions', which are computed once."""
    names = {name: tensor for name, tensor in model.encoder.named_parameters() if "relative_k_proj" not in name}
    weights = sum(tensor.numel() for tensor in names.values())
    products = sum(tensor.numel() for name, tensor in names.items() if ".layers." in f".{name}" and tensor.dim() > 1)
    return weights * 2 / gb_s / 1e6, 2 * products * n_frames / tflops / 1e9


def table(contestants: Contestants, load: Workload, *, gb_s: float, tflops: float, everything: bool) -> str:
    """One workload."""
    results = measure(contestants.of(load, everything=everything))
    ours_ms, _ = results["**ours, graph**"]
    reading_ms, multiplying_ms = floor_ms(contestants.model, load.n_frames, gb_s=gb_s, tflops=tflops)
    floor = max(reading_ms, multiplying_ms)
    lines = [
        f"\n## {load.name}: {load.n_frames} frames, padded to {load.lengths.batch} × {load.lengths.room}\n",
        "| | ms, median | p95 | times ours |",
        "|---|---:|---:|---:|",
        f"| floor: weights {reading_ms:.2f} ms, products {multiplying_ms:.2f} ms | {floor:.2f} | "
        f"| {floor / ours_ms:.2f} |",
    ]
    lines += [f"| {name} | {ms:.3f} | {p95:.3f} | {ms / ours_ms:.2f} |" for name, (ms, p95) in results.items()]
    lines.append(f"\nRelative error from the float32 reference: {', '.join(contestants.errors(load))}.")
    without = measure({piece: contestants.without(load, piece) for piece in PIECES})
    lines += ["\n| piece of ours | ms less without it | share |", "|---|---:|---:|"]
    for piece, (ms, _) in without.items():
        lines.append(f"| {piece} | {ours_ms - ms:.3f} | {(ours_ms - ms) / ours_ms:.0%} |")
    return "\n".join(lines)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--ours", action="store_true", help="ours alone")
    parser.add_argument(
        "--no-compile", action="store_true", help="leave out torch.compile, whose tuning takes a minute"
    )
    arguments = parser.parse_args()
    with torch.inference_mode():
        gb_s, tflops = copy_gb_s(), gemm_tflops()
        contestants = Contestants(compiled=not arguments.no_compile)
        print(heading("Parakeet's encoder, the size of 0.6B v3"))
        print(
            f"torch {torch.__version__}, CUDA {torch.version.cuda}. Copies reach {gb_s / 1e3:.2f} TB/s, products "
            f"{tflops:.0f} TFLOP/s. {N_REPEATS} repeats. Everything in bfloat16, random weights."
        )
        for name in arguments.workloads:
            load = workload(name, *WORKLOADS[name])
            print(table(contestants, load, gb_s=gb_s, tflops=tflops, everything=not arguments.ours), flush=True)


if __name__ == "__main__":
    main()
