"""What the engine needs from whatever computes Parakeet's network, and the backend in plain torch.

A backend turns buffers of samples into frames, and frames into tokens. Does not know devices' libraries, words or
streams, nor which backend there is (``models/backends.py``).
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..backends import device_errors
from .encoder import n_encoder_frames
from .features import log_mel, n_mel_frames
from .greedy import Decoded, Emission, Piece, TorchDecoder, TransducerDecoder, TransducerState
from .reference import Parakeet


class Backend(TransducerDecoder, Protocol):
    """Computes one checkpoint. Called from one thread; every method may raise ``BackendError``, and is then over."""

    @property
    def max_buffers(self) -> int:
        """How many buffers it hears together with profit."""

    def listen(self, buffers: Sequence[NDArray[np.float32]]) -> list[Tensor]:
        """Projected frames [T, P] of each buffer [n_samples], which has ``MIN_SAMPLES`` or more."""

    def close(self) -> None:
        """Give back what the backend holds. Never raises."""


class TorchBackend:
    """The reference's modules, on the device and in the float type that the projection has."""

    def __init__(self, model: Parakeet, *, max_buffers: int, max_frames: int) -> None:
        """``model`` is loaded, where it is to run, and packed if wanted; ``max_frames`` is what it is prepared for."""
        self.max_buffers = max_buffers
        self._model = model.eval()
        self._decoder = TorchDecoder(model)
        self._weight = model.encoder_projector.weight  # tells where and in which type to compute
        model.encoder.prepare(max_frames)

    @torch.inference_mode()
    def listen(self, buffers: Sequence[NDArray[np.float32]]) -> list[Tensor]:
        """See ``Backend``: one pass, shorter buffers padded."""
        with self._errors():
            samples = pad_sequence([torch.from_numpy(buffer) for buffer in buffers], batch_first=True)
            n_samples = torch.tensor([len(buffer) for buffer in buffers])
            n_frames = n_encoder_frames(n_mel_frames(n_samples)).tolist()
            device = self._weight.device
            n_samples = n_samples.to(device)
            features = log_mel(samples.to(device), n_samples, self._model.config.n_mels).to(self._weight.dtype)
            frames = self._model.encode(features, n_mel_frames(n_samples))
        return [frames[row, :n] for row, n in enumerate(n_frames)]

    def start(self) -> TransducerState:
        """See ``TransducerDecoder``."""
        with self._errors():
            return self._decoder.start()

    def decode(self, batch: Sequence[tuple[Tensor, TransducerState]]) -> list[tuple[list[Emission], TransducerState]]:
        """See ``TransducerDecoder``."""
        with self._errors():
            return self._decoder.decode(batch)

    def decode_ahead(self, batch: Sequence[Piece]) -> list[Decoded]:
        """See ``TransducerDecoder``."""
        with self._errors():
            return self._decoder.decode_ahead(batch)

    def close(self) -> None:
        """Nothing to do."""

    def _errors(self) -> AbstractContextManager[None]:
        """Around work on the device. On the CPU an error is a mistake of ours, and no other backend's business."""
        return device_errors() if self._weight.is_cuda else nullcontext()
