"""From a model's files to the backends that could serve it on this machine, fastest first.

Knows which backend needs what. Does not know what an engine does with them.
"""

import logging
from collections.abc import Callable

import torch

from ..store import ModelFiles, read_config
from ..timeline import Timeline
from ..tokenizer import WhisperTokenizer
from ..weights import read_weights
from .backend import Backend, BackendError, Backends, Offer, device_errors
from .config import WhisperConfig
from .cpu import pack
from .decode import RuleBook
from .reference import Whisper
from .torch_backend import TorchBackend
from .vocabulary import rule_book

log = logging.getLogger(__name__)

MEGAKERNEL, TORCH_CUDA, TORCH_CPU = "megakernel", "torch-cuda", "torch-cpu"
MIN_CAPABILITY = (8, 0)  # of a CUDA device: bfloat16 in its tensor cores


def load(files: ModelFiles, *, name: str, n_threads: int | None) -> tuple[Backends, WhisperConfig, WhisperTokenizer]:
    """Read a checkpoint and open the fastest backend that works. What the time went into is logged.

    Raises:
        ModelFilesError: if the files are not those of a Whisper.
    """
    if n_threads is not None:
        torch.set_num_threads(n_threads)
    timeline = Timeline()
    with timeline.part("tokenizer"):
        tokenizer = WhisperTokenizer.load(files.tokenizer)
    with timeline.part("weights"):
        model = read_model(files)
    rules = rule_book(tokenizer, model.config.n_vocab)
    held = [model]  # until the first backend is open; one that takes its place later reads the files again

    def take_model() -> Whisper:
        with timeline.part("weights"):
            return held[0] if held else read_model(files)

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
    model = Whisper(config)
    model.load(tensors)
    return model


def offers(take_model: Callable[[], Whisper], rules: RuleBook, timeline: Timeline) -> list[Offer]:
    """The backends, fastest first. ``take_model`` gives the network, on the CPU, for the taker to keep."""

    def open_torch_cuda() -> Backend:
        if reason := why_no_cuda():
            raise BackendError(reason)
        with device_errors(), timeline.part("weights to the device"):
            return TorchBackend(take_model().to("cuda", torch.bfloat16), rules)

    def open_torch_cpu() -> Backend:
        model = take_model()
        with timeline.part("packing"):
            pack(model)
            return TorchBackend(model, rules)

    return [Offer(TORCH_CUDA, open_torch_cuda), Offer(TORCH_CPU, open_torch_cpu)]


def why_no_cuda() -> str | None:
    """What keeps torch from a CUDA device that is good enough, ``None`` if nothing does."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        return f"{torch.cuda.get_device_name()} is sm_{capability[0]}{capability[1]}, and sm_80 or newer is needed"
    return None
