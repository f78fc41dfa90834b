"""Sizes from both kinds of configuration; the archive's are in ``test_nemo.py``."""

from typing import Any

import pytest

from models.errors import ModelFilesError
from models.parakeet.config import FRAME_SAMPLES, ParakeetConfig
from tests.models.parakeet.small import CONFIGS, SMALL, transformers_config


def published(**changes: Any) -> dict[str, Any]:
    """A ``config.json`` as v3's, but for ``changes``."""
    encoder = {
        "model_type": "parakeet_encoder",
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "hidden_act": "silu",
        "attention_bias": False,
        "convolution_bias": False,
        "conv_kernel_size": 9,
        "subsampling_factor": 8,
        "subsampling_conv_channels": 256,
        "num_mel_bins": 128,
        "scale_input": False,
    }
    whole = {
        "model_type": "parakeet_tdt",
        "vocab_size": 8193,
        "blank_token_id": 8192,
        "pad_token_id": 2,
        "decoder_hidden_size": 640,
        "num_decoder_layers": 2,
        "hidden_act": "relu",
        "durations": [0, 1, 2, 3, 4],
        "max_symbols_per_step": 10,
    }
    return whole | {"encoder_config": encoder} | changes


def test_the_published_sizes_are_read() -> None:
    assert ParakeetConfig.from_transformers(published()) == ParakeetConfig(
        n_mels=128,
        n_layers=24,
        d_model=1024,
        n_heads=8,
        d_ffn=4096,
        conv_kernel=9,
        subsampling_channels=256,
        d_predictor=640,
        n_predictor_layers=2,
        vocabulary_size=8193,
        blank_id=8192,
    )
    assert FRAME_SAMPLES == 1_280


@pytest.mark.parametrize("name", CONFIGS)
def test_what_transformers_writes_is_read_back(name: str) -> None:
    assert ParakeetConfig.from_transformers(transformers_config(CONFIGS[name]).to_dict()) == CONFIGS[name]


def test_what_is_not_said_is_as_in_transformers_classes() -> None:
    settings = published()
    del settings["max_symbols_per_step"]
    for name in ("attention_bias", "convolution_bias", "scale_input"):
        del settings["encoder_config"][name]
    config = ParakeetConfig.from_transformers(settings)
    assert (config.has_attention_bias, config.has_convolution_bias, config.scales_input) == (True, True, True)
    assert config.max_symbols == 10


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "parakeet_ctc"}, "model_type is 'parakeet_ctc', only 'parakeet_tdt' is supported"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', only 'relu'"),
        ({"vocab_size": None}, "vocab_size should be a whole number, is None"),
        ({"durations": "01234"}, "durations should be a list of whole numbers, is '01234'"),
        ({"durations": [-1, 0]}, r"durations \(-1, 0\), accepted are 1 to 64, each 0 or more"),
        ({"durations": [1] * 65}, "accepted are 1 to 64"),
        ({"num_decoder_layers": 10**9}, "n_predictor_layers is 1000000000, accepted are 1 to 32"),
        ({"max_symbols_per_step": 10**9}, "max_symbols is 1000000000, accepted are 1 to 1024"),
        (
            {"encoder_config": published()["encoder_config"] | {"num_hidden_layers": 10**9}},
            "n_layers is 1000000000, accepted are 1 to 256",
        ),
        ({"encoder_config": None}, "encoder_config should be an object"),
        ({"blank_token_id": 8193}, "blank 8193 is none of 8193 tokens"),
        ({"encoder_config": published()["encoder_config"] | {"subsampling_factor": 4}}, "subsampling_factor is 4"),
        ({"encoder_config": published()["encoder_config"] | {"scale_input": 1}}, "scale_input should be true or false"),
        ({"encoder_config": published()["encoder_config"] | {"conv_kernel_size": 8}}, "kernel of 8 has no middle"),
        ({"encoder_config": published()["encoder_config"] | {"num_mel_bins": 100}}, "100 mel channels"),
    ],
)
def test_what_is_missing_or_not_computed_here_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFilesError, match=message):
        ParakeetConfig.from_transformers(published(**change))


def test_logits_are_of_tokens_and_durations() -> None:
    assert SMALL.n_logits == 26
