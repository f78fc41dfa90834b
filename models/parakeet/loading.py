"""From a Parakeet's files to the backends that could serve it on this machine, fastest first.

Knows both layouts of checkpoints, and which backend needs what. Does not know what an engine does with them.
"""

import logging
from collections.abc import Callable

import torch

from megakernel.errors import CompileError

from ..backends import BackendError, Backends, NoDeviceForBackendError, Offer, device_errors
from ..container import WeightsKind
from ..devices import MEGAKERNEL, TORCH_CPU, TORCH_CUDA, why_no_answer, why_no_cuda, why_no_megakernel
from ..store import ModelFiles, read_config
from ..timeline import Timeline
from ..weights import read_weights
from ..wheels import cache_folder
from .backend import Backend, TorchBackend
from .config import FRAME_SAMPLES, ParakeetConfig
from .cpu import pack
from .device_backend import megakernel_on_device, torch_on_device
from .engine import CONTEXT, MAX_WINDOW_FRAMES, PADDING_SAMPLES
from .nemo import read_nemo
from .reference import Parakeet
from .tokens import Pieces, read_tokenizer_json

log = logging.getLogger(__name__)

MAX_FRAMES = MAX_WINDOW_FRAMES + PADDING_SAMPLES // FRAME_SAMPLES
CPU_BUFFERS = 4  # heard together: more gains nothing where arithmetic is what takes the time
USUAL_FRAMES = (CONTEXT.left_samples + CONTEXT.chunk_samples + CONTEXT.right_samples) // FRAME_SAMPLES  # of a stream
CUBINS = "cubins"  # folder of compiled kernels in the cache


def load(
    files: ModelFiles, timeline: Timeline, *, name: str, n_threads: int | None
) -> tuple[Backends[Backend], ParakeetConfig, Pieces]:
    """Read a checkpoint and open the fastest backend that works. What the time went into is logged.

    Raises:
        ModelFilesError: if the files are not those of a Parakeet TDT.
    """
    if n_threads is not None:
        torch.set_num_threads(n_threads)
    with timeline.part("weights"):
        model, pieces = read_model(files)
    held = [model]  # until the first backend is open; one that takes its place later reads the files again

    def take_model() -> Parakeet:
        with timeline.part("weights"):
            return held.pop() if held else read_model(files)[0]

    backends = Backends(offers(take_model, timeline), model=name)
    held.clear()
    log.info("%s on %s (%s): %s", name, backends.name, backends.why, timeline)
    return backends, model.config, pieces


def read_model(files: ModelFiles) -> tuple[Parakeet, Pieces]:
    """The network in float32, on the CPU, and what its tokens spell.

    Raises:
        ModelFilesError: if the files are not those of a Parakeet TDT.
    """
    if files.weights_kind is WeightsKind.NEMO:
        archive = read_nemo(files.weights)
        config, pieces, tensors = archive.config, archive.pieces, archive.tensors
    else:
        config = ParakeetConfig.from_transformers(read_config(files), source=str(files.config))
        spelt = read_tokenizer_json(files.tokenizer)
        pieces = Pieces.of(
            spelt, n_tokens=config.vocabulary_size, blank_id=config.blank_id, source=str(files.tokenizer)
        )
        tensors = read_weights(files.weights, files.weights_kind)
    model = Parakeet.without_values(config)
    model.load(tensors)
    return model, pieces


def offers(take_model: Callable[[], Parakeet], timeline: Timeline) -> list[Offer[Backend]]:
    """The backends, fastest first. ``take_model`` gives the network, on the CPU, for the taker to keep."""

    cubins = cache_folder() / CUBINS

    def open_megakernel() -> Backend:
        if reason := why_no_cuda():
            raise NoDeviceForBackendError(reason)
        if reason := why_no_megakernel():
            raise BackendError(reason)
        try:
            with device_errors():
                return megakernel_on_device(
                    take_model(), timeline, cache=cubins, max_frames=MAX_FRAMES, usual_frames=USUAL_FRAMES
                )
        except (CompileError, ImportError) as error:
            raise BackendError(f"{type(error).__name__}: {error}") from error

    def open_torch_cuda() -> Backend:
        if reason := why_no_cuda():
            raise NoDeviceForBackendError(reason)
        if reason := why_no_answer():
            raise BackendError(reason)
        with device_errors():
            return torch_on_device(
                take_model(), timeline, cache=cubins, max_frames=MAX_FRAMES, usual_frames=USUAL_FRAMES
            )

    def open_torch_cpu() -> Backend:
        model = take_model()
        with timeline.part("packing"):
            pack(model)
        with timeline.part("distances"):
            return TorchBackend(model, max_buffers=CPU_BUFFERS, max_frames=MAX_FRAMES)

    return [
        Offer(MEGAKERNEL, open_megakernel),
        Offer(TORCH_CUDA, open_torch_cuda),
        Offer(TORCH_CPU, open_torch_cpu),
    ]
