"""Small Parakeets with random weights, ours and transformers', that say something: blanks, tokens, all durations."""

import torch
import transformers

from models.parakeet.config import ParakeetConfig
from models.parakeet.reference import Parakeet

CONFIGS = {
    "as published": ParakeetConfig(
        n_mels=16,
        n_layers=2,
        d_model=32,
        n_heads=4,
        d_ffn=48,
        conv_kernel=9,
        subsampling_channels=8,
        d_predictor=24,
        n_predictor_layers=2,
        vocabulary_size=21,
        blank_id=20,
    ),
    "with biases": ParakeetConfig(
        n_mels=24,
        n_layers=1,
        d_model=24,
        n_heads=2,
        d_ffn=64,
        conv_kernel=5,
        subsampling_channels=6,
        d_predictor=16,
        n_predictor_layers=1,
        vocabulary_size=13,
        blank_id=12,
        has_attention_bias=True,
        has_convolution_bias=True,
        scales_input=True,
    ),
}
SMALL = CONFIGS["as published"]


def transformers_config(config: ParakeetConfig) -> transformers.ParakeetTDTConfig:
    return transformers.ParakeetTDTConfig(
        vocab_size=config.vocabulary_size,
        blank_token_id=config.blank_id,
        pad_token_id=2,
        decoder_hidden_size=config.d_predictor,
        num_decoder_layers=config.n_predictor_layers,
        durations=list(config.durations),
        max_symbols_per_step=config.max_symbols,
        encoder_config=dict(
            hidden_size=config.d_model,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            intermediate_size=config.d_ffn,
            attention_bias=config.has_attention_bias,
            convolution_bias=config.has_convolution_bias,
            conv_kernel_size=config.conv_kernel,
            subsampling_conv_channels=config.subsampling_channels,
            num_mel_bins=config.n_mels,
            scale_input=config.scales_input,
        ),
    )


@torch.no_grad()
def reference_class(config: ParakeetConfig, *, seed: int) -> transformers.ParakeetForTDT:
    """transformers' class, its weights so large that what is heard and said before matters; norms and biases too."""
    torch.manual_seed(seed)
    theirs = transformers.ParakeetForTDT(transformers_config(config)).eval()
    for parameter in theirs.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=1.5 * parameter[0].numel() ** -0.5)
        else:
            parameter.add_(0.1 * torch.randn_like(parameter))
    for name, buffer in theirs.named_buffers():
        if name.endswith("running_var"):
            buffer.uniform_(0.5, 2.0)
        if name.endswith("running_mean"):
            buffer.normal_(std=0.3)
    features = torch.randn(1, 400, config.n_mels)
    heard = theirs.get_audio_features(input_features=features, attention_mask=torch.ones(1, 400, dtype=torch.bool))
    theirs.encoder_projector.bias -= heard.pooler_output[0].mean(dim=0)  # what all frames have in common
    head = theirs.joint.head
    head.bias[config.blank_id] += 1.5  # about as likely as all tokens together
    head.bias[config.vocabulary_size] -= 5.0  # a duration of 0, on which transformers may loop for ever
    head.bias[config.vocabulary_size :] -= 50.0  # which it would take for tokens if they were the likeliest
    return theirs


def small_model(config: ParakeetConfig = SMALL, *, seed: int = 0) -> Parakeet:
    """Ours with the same weights."""
    ours = Parakeet(config).eval()
    ours.load(reference_class(config, seed=seed).state_dict())
    return ours


def noise(n_samples: int, *, seed: int = 0) -> torch.Tensor:
    """[n_samples], louder and quieter in turn."""
    generator = torch.Generator().manual_seed(seed)
    envelope = torch.sin(torch.arange(n_samples) / 4_000).abs() + 0.05
    return 0.2 * envelope * torch.randn(n_samples, generator=generator)
