"""Sizes, special tokens and alignment heads of one Whisper checkpoint.

Knows how to read sizes from the shapes of the weights, so that they can't contradict each other. Does not know text,
audio or the network's arithmetic.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import WeightsError

HEAD_SIZE = 64  # of every published checkpoint; the number of heads follows from the width

# Heads whose cross-attention follows the audio, as (decoder layer, head); by (decoder layers, width, vocabulary), as
# neither the weights nor ``config.json`` tell. From openai-whisper's ``_ALIGNMENT_HEADS``.
_ALIGNMENT_HEADS: dict[tuple[int, int, int], tuple[tuple[int, int], ...]] = {
    (4, 384, 51864): ((1, 0), (2, 0), (2, 5), (3, 0), (3, 1), (3, 2), (3, 3), (3, 4)),
    (4, 384, 51865): ((2, 2), (3, 0), (3, 2), (3, 3), (3, 4), (3, 5)),
    (6, 512, 51865): ((3, 1), (4, 2), (4, 3), (4, 7), (5, 1), (5, 2), (5, 4), (5, 6)),
    (12, 768, 51865): ((5, 3), (5, 9), (8, 0), (8, 4), (8, 7), (8, 8), (9, 0), (9, 7), (9, 9), (10, 5)),
    (4, 1280, 51866): ((2, 4), (2, 11), (3, 3), (3, 6), (3, 11), (3, 14)),
}


# By how much the alignment heads look behind (positive) or ahead of a word's start and end, in ms. Medians over half of
# 2900 aligned words (LibriSpeech, TextGrids); with them starts of the other half are off by 40 and 20 ms in the median.
_ATTENTION_LAGS_MS: dict[tuple[int, int, int], tuple[int, int]] = {
    (4, 384, 51864): (90, 90),
    (6, 512, 51865): (-10, -50),
}


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Token ids that are no text; those of the tokenizer, by the names that decoding uses."""

    end_of_text: int
    start_of_transcript: int
    languages: tuple[int, ...]  # empty for English-only models
    translate: int
    transcribe: int
    start_of_lm: int
    start_of_previous: int
    no_speech: int
    no_timestamps: int
    timestamp_begin: int  # 0.00 s; each later token is 0.02 s more, up to 30.00 s


@dataclass(frozen=True, slots=True)
class WhisperConfig:
    """One checkpoint. Widths in elements, positions in encoder frames of 20 ms (audio) and tokens (text)."""

    n_mels: int
    n_vocab: int
    width: int
    n_heads: int
    n_ffn: int
    n_encoder_layers: int
    n_decoder_layers: int
    n_audio_positions: int
    n_text_positions: int
    alignment_heads: tuple[tuple[int, int], ...]  # (decoder layer, head)
    attention_lags_ms: tuple[int, int] = (0, 0)  # what their starts and ends are too late; 0 where nobody measured

    def __post_init__(self) -> None:
        if self.width % self.n_heads:
            raise ValueError(f"width {self.width} is not a multiple of {self.n_heads} heads")
        for layer, head in self.alignment_heads:
            if not (0 <= layer < self.n_decoder_layers and 0 <= head < self.n_heads):
                raise ValueError(f"no head ({layer}, {head}) in {self.n_decoder_layers} layers of {self.n_heads}")

    @staticmethod
    def of(shapes: Mapping[str, tuple[int, ...]], settings: Mapping[str, Any]) -> "WhisperConfig":
        """Sizes from the shapes of HF-named tensors.

        ``settings`` is what the model's JSON files say; only ``alignment_heads`` is read from it, as the published
        Hugging Face ``config.json`` has none and ``generation_config.json`` and CTranslate2's ``config.json`` do.

        Raises:
            WeightsError: if a tensor that tells a size is missing.
        """
        missing = {_CONV, _FFN, _TOKENS, _AUDIO_POSITIONS, _TEXT_POSITIONS} - set(shapes)
        if missing:
            raise WeightsError(f"these are no Whisper weights: {', '.join(sorted(missing))} missing")
        width, n_mels, _ = shapes[_CONV]
        n_vocab = shapes[_TOKENS][0]
        n_decoder_layers = _n_layers(shapes, "model.decoder.layers.")
        checkpoint = (n_decoder_layers, width, n_vocab)
        known_heads = _ALIGNMENT_HEADS.get(checkpoint, _last_layers_half(n_decoder_layers, width // HEAD_SIZE))
        heads = settings.get("alignment_heads") or known_heads
        return WhisperConfig(
            n_mels=n_mels,
            n_vocab=n_vocab,
            width=width,
            n_heads=width // HEAD_SIZE,
            n_ffn=shapes[_FFN][0],
            n_encoder_layers=_n_layers(shapes, "model.encoder.layers."),
            n_decoder_layers=n_decoder_layers,
            n_audio_positions=shapes[_AUDIO_POSITIONS][0],
            n_text_positions=shapes[_TEXT_POSITIONS][0],
            alignment_heads=tuple((int(layer), int(head)) for layer, head in heads),
            attention_lags_ms=_ATTENTION_LAGS_MS.get(checkpoint, (0, 0)),
        )


_CONV = "model.encoder.conv1.weight"
_FFN = "model.encoder.layers.0.fc1.weight"
_TOKENS = "model.decoder.embed_tokens.weight"
_AUDIO_POSITIONS = "model.encoder.embed_positions.weight"
_TEXT_POSITIONS = "model.decoder.embed_positions.weight"


def _n_layers(shapes: Mapping[str, tuple[int, ...]], prefix: str) -> int:
    return 1 + max(int(name.removeprefix(prefix).split(".")[0]) for name in shapes if name.startswith(prefix))


def _last_layers_half(n_layers: int, n_heads: int) -> tuple[tuple[int, int], ...]:
    """All heads of the upper half of the layers: openai-whisper's choice where nobody measured."""
    return tuple((layer, head) for layer in range(n_layers // 2, n_layers) for head in range(n_heads))
