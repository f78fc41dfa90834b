"""Parakeet on a GPU: a stage that hears, a decoder that writes, behind one interface.

Knows which pieces of the encoder a GPU gets, and how both parts are made ready. Does not know how the parts compute,
nor what else could (``loading.py``).
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megakernel.device import find_device
from megakernel.errors import DeviceError

from ..backends import device_errors
from ..timeline import Timeline
from .config import ParakeetConfig
from .device import DeviceKernels, Gpu, KernelOperations, build, why_not
from .fused import Operations, TorchOperations
from .graph_decoder import BATCHES, GraphDecoder
from .greedy import Decoded, Emission, Piece, TransducerDecoder, TransducerState
from .megakernel_backend import decoder_on
from .reference import Parakeet
from .stage import Listener, Stage, bucket

log = logging.getLogger(__name__)

MAX_BUFFERS = 64  # heard together


def _nothing() -> None:
    """Memory goes with the last reference."""


class DeviceBackend:
    """Fulfils ``backend.Backend``."""

    max_buffers = MAX_BUFFERS

    def __init__(
        self,
        listen: Callable[[Sequence[NDArray[np.float32]]], list[Tensor]],
        decoder: TransducerDecoder,
        *,
        close: Callable[[], None] = _nothing,
    ) -> None:
        """Both on the same device: the decoder reads frames that are complete when it is called."""
        self._listen = listen
        self._decoder = decoder
        self.close = close

    def listen(self, buffers: Sequence[NDArray[np.float32]]) -> list[Tensor]:
        """See ``Backend``."""
        with device_errors():
            return self._listen(buffers)

    def start(self) -> TransducerState:
        """See ``TransducerDecoder``."""
        with device_errors():
            return self._decoder.start()

    def decode(self, batch: Sequence[tuple[Tensor, TransducerState]]) -> list[tuple[list[Emission], TransducerState]]:
        """See ``TransducerDecoder``."""
        with device_errors():
            return self._decoder.decode(batch)

    def decode_ahead(self, batch: Sequence[Piece]) -> list[Decoded]:
        """See ``TransducerDecoder``."""
        with device_errors():
            return self._decoder.decode_ahead(batch)


def megakernel_on_device(
    model: Parakeet, timeline: Timeline, *, cache: Path, max_frames: int, usual_frames: int
) -> DeviceBackend:
    """The backend whose decoder is the megakernel; arguments as of ``listener_on_device``.

    Raises:
        DeviceError, CompileError, RuntimeError: whatever goes wrong.
    """
    with timeline.part("device"):
        device, stream = find_device(), _new_stream()
    listener = listener_on_device(
        model, timeline, stream, cache=cache, max_frames=max_frames, usual_frames=usual_frames
    )
    with timeline.part("decoder"):
        decoder = decoder_on(model, device, cache=cache)
    return DeviceBackend(listener.listen, decoder, close=decoder.close)


def torch_on_device(
    model: Parakeet, timeline: Timeline, *, cache: Path, max_frames: int, usual_frames: int
) -> DeviceBackend:
    """The backend whose decoder is torch's as well; arguments as of ``listener_on_device``.

    Raises:
        RuntimeError: whatever goes wrong on the device.
    """
    with timeline.part("device"):
        stream = _new_stream()
    listener = listener_on_device(
        model, timeline, stream, cache=cache, max_frames=max_frames, usual_frames=usual_frames
    )
    with timeline.part("decoder graphs"):
        decoder = GraphDecoder(model, torch.zeros(1, dtype=torch.bfloat16, device="cuda"), stream)
        torch.cuda.synchronize()
        decoder.prepare(BATCHES)
    return DeviceBackend(listener.listen, decoder)


def _new_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]  # torch leaves it out


def listener_on_device(
    model: Parakeet,
    timeline: Timeline,
    stream: torch.cuda.Stream,
    *,
    cache: Path,
    max_frames: int,
    usual_frames: int,
) -> Listener:
    """What hears buffers of at most ``max_frames``, with graphs ready for those of up to ``usual_frames``.

    ``model`` is on the CPU or the device. Compiled kernels are kept in ``cache``.

    Raises:
        RuntimeError: whatever goes wrong on the device.
    """
    like = torch.zeros(1, dtype=torch.bfloat16, device="cuda")
    with timeline.part("encoder's kernels"):
        operations = operations_on_device(model.config, cache=cache)
    with timeline.part("weights to the device"):
        stage = Stage(model.to("cuda"), operations, like, max_frames=bucket(max_frames))
    with timeline.part("encoder graphs"):
        torch.cuda.synchronize()  # what was made on torch's own stream is used on another
        listener = Listener(stage, stream)
        listener.prepare(usual_frames)
    return listener


def operations_on_device(config: ParakeetConfig, *, cache: Path) -> Operations:
    """The encoder's pieces as our kernels where they fit and compile, else torch's; the log says which, and why."""
    reason = why_not(config)
    if reason is None:
        try:
            device = find_device()
            cubin = build(config, Gpu.of(device), arch=device.arch, cache=cache)
            return KernelOperations(config, DeviceKernels(config, device, cubin), torch.device("cuda"))
        except DeviceError as error:
            reason = str(error)
    log.info("the encoder's pieces are torch's: %s", reason)
    return TorchOperations(config, torch.bfloat16)
