"""From a model's files to the backends that could serve it on this machine, fastest first.

Knows which backend needs what. Does not know what an engine does with them.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megakernel.compile import compile_program
from megakernel.device import find_device, target_for
from megakernel.errors import CompileError
from megakernel.launcher import Launcher, Mode
from megakernel.runtime import Runtime
from megakernel.selftest import ensure_right

from ..backends import BackendError, Backends, NoDeviceForBackendError, Offer, device_errors
from ..devices import MEGAKERNEL, TORCH_CPU, TORCH_CUDA, why_no_answer, why_no_cuda, why_no_megakernel
from ..store import ModelFiles, read_config
from ..timeline import Timeline
from ..tokenizer import WhisperTokenizer
from ..weights import read_weights
from ..wheels import cache_folder
from .backend import Backend
from .config import WhisperConfig
from .cpu import pack
from .decode import RuleBook
from .graph import decoder_graph, graph_constants
from .megakernel_backend import MegakernelBackend, bitmaps
from .reference import Whisper
from .stage import Listener, Stage, buckets
from .timing import attention_of
from .torch_backend import TorchBackend, silent_tail
from .vocabulary import rule_book

log = logging.getLogger(__name__)

SPIN_S = 2e-3  # a step takes less; a sleep takes twice what was asked for, which is as long as a step
CUBINS = "cubins"  # folder of compiled kernels in the cache


def load(
    files: ModelFiles, timeline: Timeline, *, name: str, n_threads: int | None
) -> tuple[Backends[Backend], WhisperConfig, WhisperTokenizer]:
    """Read a checkpoint and open the fastest backend that works. What the time went into is logged.

    Raises:
        ModelFilesError: if the files are not those of a Whisper.
    """
    if n_threads is not None:
        torch.set_num_threads(n_threads)
    with timeline.part("tokenizer"):
        tokenizer = WhisperTokenizer.load(files.tokenizer)
    with timeline.part("weights"):
        model = read_model(files)
    rules = rule_book(tokenizer, model.config.n_vocab)
    held = [model]  # until the first backend is open; one that takes its place later reads the files again

    def take_model() -> Whisper:
        with timeline.part("weights"):
            return held.pop() if held else read_model(files)

    backends = Backends(offers(take_model, rules, timeline), model=name)
    held.clear()
    log.info("%s on %s (%s): %s", name, backends.name, backends.why, timeline)
    return backends, model.config, tokenizer


def read_model(files: ModelFiles) -> Whisper:
    """The network in the files' float type, on the CPU.

    Raises:
        ModelFilesError: if the files are not those of a Whisper.
    """
    tensors = read_weights(files.weights, files.weights_kind)
    config = WhisperConfig.of({key: tuple(tensor.shape) for key, tensor in tensors.items()}, read_config(files))
    model = Whisper.without_values(config)
    model.load(tensors)
    return model


def offers(take_model: Callable[[], Whisper], rules: RuleBook, timeline: Timeline) -> list[Offer[Backend]]:
    """The backends, fastest first. ``take_model`` gives the network, on the CPU, for the taker to keep."""

    def open_torch_cuda() -> Backend:
        if reason := why_no_cuda():
            raise NoDeviceForBackendError(reason)
        if reason := why_no_answer():
            raise BackendError(reason)
        with device_errors():
            model = take_model()
            with timeline.part("weights to the device"):
                return TorchBackend(model.to("cuda", torch.bfloat16), rules)

    def open_torch_cpu() -> Backend:
        model = take_model()
        with timeline.part("packing"):
            pack(model)
            return TorchBackend(model, rules)

    return [
        Offer(MEGAKERNEL, lambda: open_megakernel(take_model, rules, timeline)),
        Offer(TORCH_CUDA, open_torch_cuda),
        Offer(TORCH_CPU, open_torch_cpu),
    ]


def open_megakernel(take_model: Callable[[], Whisper], rules: RuleBook, timeline: Timeline) -> MegakernelBackend:
    """The backend on the first GPU.

    Raises:
        BackendError: if there is none that is good enough, or anything goes wrong on the way.
    """
    if reason := why_no_cuda():
        raise NoDeviceForBackendError(reason)
    if reason := why_no_megakernel():
        raise BackendError(reason)
    with _loading_errors():
        return on_device(take_model(), rules, timeline, cache=cache_folder() / CUBINS)


def on_device(
    model: Whisper, rules: RuleBook, timeline: Timeline, *, cache: Path, mode: Mode = Mode.LOOP
) -> MegakernelBackend:
    """The backend of ``model``, which is used up: its weights are copied. Compiled kernels are kept in ``cache``.

    Raises:
        DeviceError, CompileError, RuntimeError: whatever goes wrong; ``open_megakernel`` makes one error of them.
    """
    config, bits = model.config, bitmaps(rules)
    with timeline.part("device"):
        device = find_device()
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it out
    with timeline.part("weights to the device"):
        model = model.to("cuda")
        torch.cuda.synchronize()
    with timeline.part("program"):
        graph = decoder_graph(config, rules.special, n_cross_positions=config.n_audio_positions)
        program = compile_program(graph, target_for(device))
    with timeline.part("kernel and tape"):  # the launcher's own line in the log tells them apart
        constants = graph_constants(graph, {f"model.{name}": tensor for name, tensor in model.state_dict().items()})
        launcher = Launcher.load(program, constants, bits, device=device, cache=cache)
        # All of a call is opened at once, so the kernel may leave at once. A look at each step's records as they come
        # leaves few of them for the end, when nothing is computed meanwhile.
        runtime = Runtime(program, launcher, n_rules=len(bits), mode=mode, idle_ns=0, spin_s=SPIN_S)
    with timeline.part("self-test"):
        ensure_right(runtime, launcher, constants, bits, cache=cache)
    with timeline.part("silence"):
        stage = Stage(model, silent_tail(model), launcher.buffers.cross_cache)
    del model
    with timeline.part("encoder graphs"), torch.inference_mode():
        torch.cuda.synchronize()  # what was made on torch's own stream is used on another
        listener = Listener(stage, stream)
        listener.prepare([(1, n_encoded) for n_encoded in buckets(config.n_audio_positions)])
        attention_of(launcher.buffers.scores[0, :, :2, :500])  # loads its kernels
    return MegakernelBackend(runtime, launcher.buffers.scores, listener, config, rules, stream=stream)


@contextmanager
def _loading_errors() -> Iterator[None]:
    """Whatever keeps a program from running is a reason to take another backend, and to say so."""
    try:
        with device_errors():
            yield
    except (CompileError, ImportError) as error:
        raise BackendError(f"{type(error).__name__}: {error}") from error
