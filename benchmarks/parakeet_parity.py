"""Parakeet TDT at its full size against transformers' class: the same random weights, the same audio.

    python -m benchmarks.parakeet_parity

Needs about 7 GB of memory and transformers. Weights are drawn, so what is said means nothing; the distance between both
computations is what is measured.
"""

import argparse

import torch
import transformers

from benchmarks.parakeet_encoder import V3
from benchmarks.report import heading
from models.parakeet.encoder import n_encoder_frames
from models.parakeet.features import log_mel, n_mel_frames
from models.parakeet.greedy import decode, start
from models.parakeet.reference import Parakeet
from vad.audio import SAMPLE_RATE_HZ


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=2.0, help="of noise")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    theirs = their_model()
    ours = Parakeet.without_values(V3).eval()
    ours.load(theirs.state_dict())
    print(heading("Parakeet TDT against transformers, full size, random weights, float32"))
    print("| what | largest difference | largest value |\n|---|---|---|")
    for what, given, expected in compared(theirs, ours, round(arguments.seconds * SAMPLE_RATE_HZ)):
        print(f"| {what} | {(given - expected).abs().max():.2g} | {expected.abs().max():.3g} |")


@torch.no_grad()
def their_model() -> transformers.ParakeetForTDT:
    """v3's sizes, its weights so large that no layer vanishes beside the residual."""
    model = transformers.ParakeetForTDT(
        transformers.ParakeetTDTConfig(
            encoder_config=dict(num_mel_bins=128, attention_bias=False, convolution_bias=False, scale_input=False)
        )
    ).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.normal_(std=parameter[0].numel() ** -0.5)
    return model


@torch.inference_mode()
def compared(
    theirs: transformers.ParakeetForTDT, ours: Parakeet, n_samples: int
) -> list[tuple[str, torch.Tensor, torch.Tensor]]:
    """(what, ours, theirs) of each stage."""
    samples = 0.1 * torch.randn(n_samples)
    extractor = transformers.ParakeetFeatureExtractor(feature_size=V3.n_mels)
    batch = extractor([samples.numpy()], sampling_rate=SAMPLE_RATE_HZ)
    their_features, mask = batch["input_features"], batch["attention_mask"]
    lengths = torch.tensor([n_samples])
    n_frames = n_mel_frames(lengths)
    features = log_mel(samples[None], lengths, V3.n_mels)
    heard = theirs.get_audio_features(input_features=their_features, attention_mask=mask)
    n = int(n_encoder_frames(n_frames))
    states = ours.encoder(features, n_frames)
    projected = ours.encoder_projector(states)
    plain = ours.encode(features, n_frames)
    ours.encoder.prepare(n)
    prepared = ours.encode(features, n_frames)
    emissions, state = decode(ours, projected[0], start(ours))
    replayed = replay(theirs, projected, [emission.token_id for emission in emissions])
    return [
        ("features", features[0], their_features[0, : features.shape[1]]),
        ("encoder", states[0], heard.last_hidden_state[0, :n]),
        ("projected frames", projected[0], heard.pooler_output[0, :n]),
        ("with prepared distances", prepared, plain),
        (f"prediction behind {len(emissions)} tokens", state.projected, replayed),
    ]


def replay(theirs: transformers.ParakeetForTDT, projected: torch.Tensor, tokens: list[int]) -> torch.Tensor:
    """What their prediction network says behind ``tokens``."""
    text = torch.tensor([[V3.blank_id, *tokens]])
    return theirs.decoder(text)[0, -1]


if __name__ == "__main__":
    main()
