"""Sizes read from shapes, and what is refused."""

import pytest

from models.errors import WeightsError
from models.whisper.config import WhisperConfig

SHAPES = {
    "model.encoder.conv1.weight": (384, 80, 3),
    "model.encoder.layers.0.fc1.weight": (1536, 384),
    "model.encoder.layers.3.fc1.weight": (1536, 384),
    "model.encoder.embed_positions.weight": (1500, 384),
    "model.decoder.layers.3.fc1.weight": (1536, 384),
    "model.decoder.embed_tokens.weight": (51864, 384),
    "model.decoder.embed_positions.weight": (448, 384),
}


def test_sizes_come_from_the_shapes() -> None:
    config = WhisperConfig.of(SHAPES, {})
    assert (config.n_mels, config.n_vocab, config.width, config.n_heads, config.n_ffn) == (80, 51864, 384, 6, 1536)
    assert (config.n_encoder_layers, config.n_decoder_layers) == (4, 4)
    assert (config.n_audio_positions, config.n_text_positions) == (1500, 448)


def test_alignment_heads_of_a_known_checkpoint_need_no_file_and_a_files_own_win() -> None:
    assert (2, 5) in WhisperConfig.of(SHAPES, {}).alignment_heads
    assert WhisperConfig.of(SHAPES, {"alignment_heads": [[1, 2]]}).alignment_heads == ((1, 2),)


def test_an_unknown_checkpoint_is_aligned_by_the_upper_half_of_its_layers_without_a_correction() -> None:
    config = WhisperConfig.of(SHAPES | {"model.decoder.embed_tokens.weight": (60000, 384)}, {})
    assert set(config.alignment_heads) == {(layer, head) for layer in (2, 3) for head in range(6)}
    assert config.attention_lags_ms == (0, 0)


def test_weights_without_a_telling_tensor_are_refused_by_its_name() -> None:
    shapes = {name: shape for name, shape in SHAPES.items() if "conv1" not in name}
    with pytest.raises(WeightsError, match="model.encoder.conv1.weight missing"):
        WhisperConfig.of(shapes, {})


def test_an_alignment_head_outside_the_network_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no head \(4, 0\)"):
        WhisperConfig.of(SHAPES, {"alignment_heads": [[4, 0]]})
