"""Parakeet TDT's network in plain torch: encoder, prediction network, joint network.

Knows how the parts fit together and how weights get in. Does not know audio, text, or how a CPU stores matrices
(``models/packed.py``).
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ..weights import load_exactly
from .config import ParakeetConfig
from .encoder import Encoder
from .predictor import Joint, Predictor


class Parakeet(nn.Module):
    """One network; ``state_dict`` has transformers' names."""

    def __init__(self, config: ParakeetConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.encoder_projector = nn.Linear(config.d_model, config.d_predictor)
        self.decoder = Predictor(config)
        self.joint = Joint(config)

    @classmethod
    def without_values(cls, config: ParakeetConfig) -> "Parakeet":
        """A network whose weights are whatever lay in memory, to be loaded: drawing them takes seconds."""
        with torch.device("meta"):
            model = cls(config)
        return model.to_empty(device="cpu")

    def encode(self, features: Tensor, n_mel_frames: Tensor) -> Tensor:
        """[B, M, n_mels] → what the joint network sees of the frames [B, T, P]."""
        projected: Tensor = self.encoder_projector(self.encoder(features, n_mel_frames))
        return projected

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy transformers-named tensors in.

        How many batches the batch norms were trained on may be absent: it changes nothing in evaluation.

        Raises:
            WeightsError: unless they are otherwise exactly this network's.
        """
        own = self.state_dict()
        unread = {name: tensor for name, tensor in own.items() if name.endswith(".num_batches_tracked")}
        load_exactly(self, unread | dict(tensors))
