"""The network with what only training needs: a loss on both heads, dropout, masked features, an averaged copy.

It knows how features, encoder, prediction and joint network make the two losses. It does not know where audio comes
from, nor how long to train.
"""

import copy
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional

from models.parakeet.config import ParakeetConfig, n_frames_of
from models.parakeet.encoder import Encoder, n_encoder_frames
from models.parakeet.features import MIN_SAMPLES, log_mel, n_mel_frames
from models.parakeet.reference import Parakeet
from models.parakeet.training.alignment import Aligned
from models.parakeet.training.buffers import encode_in_buffers
from models.parakeet.training.loss import tdt_loss
from models.parakeet.training.streams import Batch


@dataclass(frozen=True, slots=True)
class Regularisation:
    """What keeps a network from learning its recordings by heart."""

    dropout: float = 0.1
    text_dropout: float = 0.2  # of what the prediction network says
    token_dropout: float = 0.2  # of the tokens that the prediction network is told, how many become blanks
    n_frequency_masks: int = 2
    widest_frequency_mask: float = 0.25  # of all channels
    n_time_masks: int = 8
    widest_time_mask: float = 0.045  # of a buffer, and at most `LONGEST_TIME_MASK` mel frames
    widest_warp: float = 0.08  # of the mel channels' numbers: as if throats were so much shorter or longer
    hears_twice: bool = True  # each stream with two masks, and if in buffers, also in one piece; they shall agree
    under_normalisation: float = 0.02  # sigma of the paper: lowers each token's log-probability, so favours few steps

    @staticmethod
    def none() -> "Regularisation":
        """For the error rate, or to see whether a few recordings can be learnt by heart."""
        return Regularisation(0.0, 0.0, 0.0, 0, 0.0, 0, 0.0, 0.0, False, 0.0)


LONGEST_TIME_MASK = 40  # mel frames
BRANCH_SCALE = 0.5  # of first weights
SUM = 2  # torch's number of that reduction


@dataclass(frozen=True, slots=True, eq=False)
class Losses:
    """Means over labels, so that streams of any length count by what is said in them."""

    transducer: Tensor  # nats a label
    ctc: Tensor  # nats a label; along a path, nats a frame
    inconsistency: Tensor  # nats a label: by how much two hearings of the same streams disagree, if there are two


class Learner(nn.Module):
    """A Parakeet that learns, with a second head (CTC) on its encoder that is thrown away in the end."""

    def __init__(self, config: ParakeetConfig, regularisation: Regularisation) -> None:
        super().__init__()
        self.regularisation = regularisation
        self.is_masked = True
        self.parakeet = Parakeet(config)
        self.ctc_head = nn.Linear(config.d_model, config.vocabulary_size)
        _begin_with_what_is_heard(self.parakeet.encoder)
        _keep_blank_at_zero(self.parakeet.decoder.embedding, config.blank_id)
        for block in self.parakeet.encoder.blocks:
            for module in (block.feed_forward1, block.self_attn, block.conv, block.feed_forward2):
                module.register_forward_hook(self._drop)
        self.parakeet.encoder.subsampling.register_forward_hook(self._drop)

    def _drop(self, module: nn.Module, _: object, output: Tensor) -> Tensor:
        return functional.dropout(output, self.regularisation.dropout, self.training)

    def encode(self, samples: Tensor, n_samples: Tensor) -> Tensor:
        """Samples [R, N], their numbers [R] → encoder states [R, T, d_model]."""
        n_samples = n_samples.clamp(min=MIN_SAMPLES)
        with torch.autocast(samples.device.type, enabled=False):
            features = log_mel(samples, n_samples, self.parakeet.config.n_mels)
        n_frames = n_mel_frames(n_samples)
        if self.training and self.is_masked:
            features = masked(warped(features, self.regularisation.widest_warp), n_frames, self.regularisation)
        states: Tensor = self.parakeet.encoder(features, n_frames)
        return states

    def states(self, batch: Batch) -> Tensor:
        """Encoder states [B, T, d_model] of whole streams, or put together from buffers with the batch's contexts."""
        if batch.contexts is not None:
            return encode_in_buffers(self.encode, batch.samples, batch.n_samples, batch.contexts)
        return self.encode(batch.samples, torch.tensor(batch.n_samples).to(batch.samples.device, non_blocking=True))

    def forward(self, batch: Batch) -> Losses:
        """Both losses of a batch: along its path if it has one, else over all alignments."""
        states = self.states(batch)
        if batch.aligned is not None:
            return self._losses_along(states, batch, batch.aligned)
        hears_twice = self.training and self.regularisation.hears_twice
        if hears_twice:
            # In one piece, and with other masks; as if the batch had each stream twice.
            states = torch.cat((states, self.states(replace(batch, contexts=None))))
            tokens, n_tokens, n_samples = batch.tokens.repeat(2, 1), batch.n_tokens * 2, batch.n_samples * 2
            batch = replace(batch, tokens=tokens, n_tokens=n_tokens, n_samples=n_samples)
        n_frames = self._n_frames(batch)
        n_labels_in_all = sum(batch.n_tokens)
        transducer = self._transducer_losses(states, n_frames, batch).sum() / n_labels_in_all
        said = self.ctc_head(states).float().log_softmax(-1)
        # Numbers of frames and labels from here: tensors of them on the device would be waited for.
        ctc = torch.ctc_loss(
            said.transpose(0, 1),
            batch.tokens,
            [n_frames_of(n) for n in batch.n_samples],
            list(batch.n_tokens),
            blank=self.parakeet.config.blank_id,
            reduction=SUM,
            zero_infinity=True,  # a stream with more labels than frames
        )
        inside = torch.arange(states.shape[1], device=states.device) < n_frames[:, None]
        disagreed = disagreement(said, inside) if hears_twice else ctc.new_zeros(())
        return Losses(transducer, ctc / n_labels_in_all, disagreed / n_labels_in_all)

    def _losses_along(self, states: Tensor, batch: Batch, aligned: Aligned) -> Losses:
        """Cross-entropies along the path: of what is said in each frame, and of each step's token and duration."""
        config = self.parakeet.config
        row = torch.arange(len(states), device=states.device)[:, None]
        frames = self.parakeet.encoder_projector(states)[row, aligned.frames]  # [B, K, P]
        predicted = self._predicted(batch.tokens)[row, aligned.n_before]
        logits = self.parakeet.joint(frames, predicted).float()[aligned.counts]  # [steps, V + D]
        token_logits, duration_logits = logits.split((config.vocabulary_size, len(config.durations)), dim=-1)
        tokens = functional.cross_entropy(token_logits, aligned.tokens[aligned.counts], reduction="sum")
        durations = functional.cross_entropy(duration_logits, aligned.durations[aligned.counts], reduction="sum")
        inside = torch.arange(states.shape[1], device=states.device) < self._n_frames(batch)[:, None]
        said = functional.cross_entropy(self.ctc_head(states).float()[inside], aligned.pieces[inside])
        return Losses((tokens + durations) / sum(batch.n_tokens), said, said.new_zeros(()))

    def _n_frames(self, batch: Batch) -> Tensor:
        n_samples = torch.tensor(batch.n_samples).to(batch.samples.device, non_blocking=True)
        return n_encoder_frames(n_mel_frames(n_samples))

    def _transducer_losses(self, states: Tensor, n_frames: Tensor, batch: Batch) -> Tensor:
        config = self.parakeet.config
        frames = self.parakeet.encoder_projector(states)  # [B, T, P]
        logits = self.parakeet.joint(frames[:, :, None], self._predicted(batch.tokens)[:, None])  # [B, T, U + 1, V + D]
        logits = logits.float()
        token_logits = logits[..., : config.vocabulary_size]
        total = token_logits.logsumexp(dim=-1) + self.regularisation.under_normalisation
        blank = token_logits[..., config.blank_id] - total
        which = batch.tokens[:, None, :, None].expand(-1, logits.shape[1], -1, -1)
        labels = token_logits[:, :, :-1].gather(-1, which)[..., 0] - total[:, :, :-1]
        durations = logits[..., config.vocabulary_size :].log_softmax(dim=-1)
        n_labels = torch.tensor(batch.n_tokens).to(states.device, non_blocking=True)
        return tdt_loss(blank, labels, durations, n_frames=n_frames, n_labels=n_labels)

    def _predicted(self, tokens: Tensor) -> Tensor:
        """What the prediction network says before each token and behind the last: [B, U + 1, P]."""
        config = self.parakeet.config
        if self.training and self.regularisation.token_dropout:
            forgotten = torch.rand(tokens.shape, device=tokens.device) < self.regularisation.token_dropout
            tokens = tokens.masked_fill(forgotten, config.blank_id)
        begun = functional.pad(tokens, (1, 0), value=config.blank_id)
        zeros = torch.zeros((config.n_predictor_layers, len(tokens), config.d_predictor), device=tokens.device)
        predicted: Tensor = self.parakeet.decoder(begun, zeros, zeros)[0]
        return functional.dropout(predicted, self.regularisation.text_dropout, self.training)


@torch.no_grad()
def _begin_with_what_is_heard(encoder: Encoder) -> None:
    """First weights under which the states differ from frame to frame as much as the features do.

    With torch's usual ones the subsampling's biases outweigh what it hears fifty to one, and the encoder learns a
    constant from which it does not come back. The branches of each block begin small beside what they are added to.
    """
    for layer in encoder.subsampling.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
            nn.init.zeros_(layer.bias)  # type: ignore[arg-type]
    nn.init.xavier_normal_(encoder.subsampling.linear.weight)
    nn.init.zeros_(encoder.subsampling.linear.bias)
    for block in encoder.blocks:
        for linear in (block.feed_forward1.linear2, block.self_attn.o_proj, block.feed_forward2.linear2):
            linear.weight.mul_(BRANCH_SCALE)
        block.conv.pointwise_conv2.weight.mul_(BRANCH_SCALE)


def _keep_blank_at_zero(embedding: nn.Embedding, blank_id: int) -> None:
    """The text's begin is a blank, whose row is zero in published checkpoints; here it stays so."""
    with torch.no_grad():
        embedding.weight[blank_id] = 0.0
    learns = torch.ones_like(embedding.weight[:, :1])
    learns[blank_id] = 0.0
    embedding.register_buffer("learns", learns, persistent=False)
    embedding.weight.register_hook(lambda grad: grad * embedding.get_buffer("learns"))  # type: ignore[no-untyped-call]


def disagreement(said: Tensor, inside: Tensor) -> Tensor:
    """Of log-probabilities [2·B, T, V], each row half heard twice, the divergences both ways, summed over ``inside``.

    Each hearing is drawn to the other as it is (Yao et al. 2024, "CR-CTC: Consistency regularization on CTC").
    """
    first, second = said.chunk(2)
    fixed_first, fixed_second = first.detach(), second.detach()
    divergences = fixed_second.exp() * (fixed_second - first) + fixed_first.exp() * (fixed_first - second)
    return (divergences.sum(dim=-1) * inside[: len(first)]).sum()


def warped(features: Tensor, widest: float) -> Tensor:
    """Features [R, M, n_mels] whose channels are stretched or squeezed, all by one factor drawn from 1 ± ``widest``."""
    n_mels = features.shape[-1]
    factor = 1.0 + widest * (2.0 * torch.rand((), device=features.device) - 1.0)
    channel = (torch.arange(n_mels, device=features.device) * factor).clamp(max=n_mels - 1.001)
    below = channel.long()
    return torch.lerp(features[..., below], features[..., below + 1], channel - below)


def masked(features: Tensor, n_frames: Tensor, regularisation: Regularisation) -> Tensor:
    """SpecAugment: some bands of channels and some spans of frames [R, M, n_mels] set to the mean, which is zero."""
    n_rows, n_all, n_mels = features.shape
    widest_band = torch.full((n_rows,), regularisation.widest_frequency_mask * n_mels, device=features.device)
    n_channels = torch.full((n_rows,), n_mels, device=features.device)
    widest_span = (n_frames * regularisation.widest_time_mask).clamp(max=LONGEST_TIME_MASK)
    bands = _spans(n_channels, widest_band, n_mels, regularisation.n_frequency_masks)
    spans = _spans(n_frames, widest_span, n_all, regularisation.n_time_masks)
    return features.masked_fill(spans[:, :, None] | bands[:, None, :], 0.0)


def _spans(n: Tensor, widest: Tensor, length: int, n_spans: int) -> Tensor:
    """[R, length]: true in ``n_spans`` spans of each row, placed at random within its first ``n``."""
    shape = (len(n), n_spans, 1)
    width = torch.rand(shape, device=n.device) * widest[:, None, None]
    start = torch.rand(shape, device=n.device) * (n[:, None, None] - width)
    position = torch.arange(length, device=n.device)
    return ((position >= start) & (position < start + width)).any(dim=1)


def batch_norms(learner: Learner) -> list[nn.BatchNorm1d]:
    """Those of the encoder's blocks."""
    return [module for module in learner.modules() if isinstance(module, nn.BatchNorm1d)]


class Average:
    """An exponential mean of a network's parameters: better than where the last steps left them."""

    def __init__(self, learner: Learner, decay: float) -> None:
        self.learner = copy.deepcopy(learner).eval().requires_grad_(False)
        self.learner.parakeet.decoder.lstm.flatten_parameters()  # the copy's lie apart, which cuDNN dislikes
        self._decay = decay
        self._n_updates = 0

    @torch.no_grad()
    def update(self, learner: Learner) -> None:
        """After a step; the mean follows quickly at first."""
        self._n_updates += 1
        decay = min(self._decay, (1 + self._n_updates) / (10 + self._n_updates))
        torch._foreach_lerp_(list(self.learner.parameters()), list(learner.parameters()), 1.0 - decay)

    @torch.no_grad()
    def copy_norms(self, learner: Learner) -> None:
        """Takes over the batch norms' running values, which are near enough to look at while training."""
        for own, other in zip(self.learner.buffers(), learner.buffers(), strict=True):
            own.copy_(other)

    @torch.no_grad()
    def measure_norms(self, batches: Iterable[Batch]) -> None:
        """Gives the batch norms the means and deviations that the averaged network has, as its weights' mean."""
        for norm in batch_norms(self.learner):
            norm.reset_running_stats()
            norm.momentum = None  # the mean of all that follows
            norm.train()
        for batch in batches:
            self.learner.states(batch)
        self.learner.eval()
