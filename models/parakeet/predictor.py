"""The text side of the transducer: the prediction network, and the joint network over both sides.

Knows tensors and shapes; its parameters have the names of transformers' checkpoints. Does not know what the tokens are,
or how a text is chosen (``greedy.py``).

Shapes: B batch, L layers, P predictor width, V tokens with the blank, N durations.
"""

import torch
from torch import Tensor, nn

from .config import ParakeetConfig


class Predictor(nn.Module):
    """An LSTM over the tokens so far. Blanks are no part of the text and are not fed; the first step's input is one."""

    def __init__(self, config: ParakeetConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(config.vocabulary_size, config.d_predictor)
        self.lstm = nn.LSTM(config.d_predictor, config.d_predictor, config.n_predictor_layers, batch_first=True)
        self.decoder_projector = nn.Linear(config.d_predictor, config.d_predictor)

    def forward(self, tokens: Tensor, hidden: Tensor, cell: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``tokens`` [B, n] after a state [L, B, P] twice: projected outputs [B, n, P], and the state behind them."""
        outputs, (hidden, cell) = self.lstm(self.embedding(tokens), (hidden, cell))
        return self.decoder_projector(outputs), hidden, cell


class Joint(nn.Module):
    """Scores of each token, and of each duration, at a frame and behind a text."""

    def __init__(self, config: ParakeetConfig) -> None:
        super().__init__()
        self.head = nn.Linear(config.d_predictor, config.n_logits)

    def forward(self, frames: Tensor, predicted: Tensor) -> Tensor:
        """Projected frames [..., P] and projected predictions [..., P] → logits [..., V + N]."""
        logits: Tensor = self.head(torch.relu(frames + predicted))
        return logits
