"""Packed matrices against the ones they came from."""

import pytest
import torch
from torch import nn

from models.packed import Bfloat16Linear, Int8Linear
from models.whisper.config import WhisperConfig
from models.whisper.cpu import pack
from models.whisper.reference import Whisper


@pytest.mark.parametrize(("packed", "tolerance"), [(Int8Linear, 0.02), (Bfloat16Linear, 0.01)])
@pytest.mark.parametrize("with_bias", [True, False])
@torch.inference_mode()
def test_a_packed_linear_is_the_linear_within_its_rounding(packed, tolerance: float, with_bias: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(192, 96, bias=with_bias)
    x = torch.randn(3, 7, 192)
    expected = linear(x)
    error = (packed(linear)(x) - expected).abs().max() / expected.abs().max()
    assert float(error) < tolerance


@torch.inference_mode()
def test_a_row_has_one_result_whatever_rows_are_beside_it() -> None:
    torch.manual_seed(0)
    packed = Int8Linear(nn.Linear(192, 96))
    rows = torch.randn(9, 192) * torch.logspace(-2, 2, 9)[:, None]
    assert torch.equal(packed(rows), torch.cat([packed(row[None]) for row in rows]))


@torch.inference_mode()
def test_packing_leaves_no_plain_linear_and_the_same_answers() -> None:
    torch.manual_seed(0)
    config = WhisperConfig(80, 300, 64, 1, 256, 2, 2, 40, 32, ((0, 0), (1, 0)))
    model = Whisper(config).eval()
    mel, tokens = torch.randn(1, 80, 80), torch.randint(300, (1, 6))
    expected = model.logits(model.decoder(tokens, model.decoder.open_cache(model.encoder(mel))))
    pack(model)
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    logits = model.logits(model.decoder(tokens, model.decoder.open_cache(model.encoder(mel))))
    assert float((logits - expected).abs().max() / expected.abs().max()) < 0.06  # some ten roundings in a row
