"""The encoder against transformers' class, random weights; batches, tables and bands against the plain computation."""

import pytest
import torch

from models.parakeet.config import ParakeetConfig
from models.parakeet.encoder import band, n_encoder_frames, relative_shift
from models.parakeet.reference import Parakeet
from tests.models.parakeet.small import CONFIGS, SMALL, reference_class, small_model

# Sums of a few hundred float32 products in another order, through some ten layers with norms between.
TOLERANCE = 5e-5


def random_features(config: ParakeetConfig, n_frames: list[int], *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    features = torch.randn(len(n_frames), max(n_frames), config.n_mels, generator=generator)
    lengths = torch.tensor(n_frames)
    return features * (torch.arange(max(n_frames)) < lengths[:, None])[..., None], lengths


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", CONFIGS)
@torch.inference_mode()
def test_projected_states_equal_those_of_transformers(name: str, seed: int) -> None:
    config = CONFIGS[name]
    theirs = reference_class(config, seed=seed)
    ours = small_model(config, seed=seed)
    features, n_frames = random_features(config, [93, 40, 9, 2], seed=seed)
    mask = torch.arange(features.shape[1]) < n_frames[:, None]
    expected = theirs.get_audio_features(input_features=features, attention_mask=mask)
    projected = ours.encode(features, n_frames)
    lengths = n_encoder_frames(n_frames)
    assert lengths.tolist() == expected.attention_mask.sum(-1).tolist()
    for row, n in enumerate(lengths.tolist()):
        torch.testing.assert_close(projected[row, :n], expected.pooler_output[row, :n], atol=TOLERANCE, rtol=TOLERANCE)


@torch.inference_mode()
def test_double_precision_agrees_far_more_closely() -> None:
    theirs, ours = reference_class(SMALL, seed=0).double(), small_model(seed=0).double()
    features, n_frames = random_features(SMALL, [70], seed=0)
    expected = theirs.get_audio_features(
        input_features=features.double(), attention_mask=torch.ones(1, 70, dtype=torch.bool)
    )
    # transformers' softmax is in float32 whatever the type; ours is not.
    torch.testing.assert_close(ours.encode(features.double(), n_frames), expected.pooler_output, atol=1e-6, rtol=1e-6)


@torch.inference_mode()
def test_a_stream_in_a_padded_batch_gives_what_it_gives_alone() -> None:
    model = small_model()
    features, n_frames = random_features(SMALL, [33, 120, 64], seed=1)
    together = model.encode(features, n_frames)
    for row, n in enumerate(n_frames.tolist()):
        alone = model.encode(features[row : row + 1, :n], n_frames[row : row + 1])[0]
        torch.testing.assert_close(together[row, : len(alone)], alone, atol=TOLERANCE, rtol=TOLERANCE)


@torch.inference_mode()
def test_the_table_of_distances_is_sliced_for_shorter_buffers_and_not_needed_for_longer_ones() -> None:
    model = small_model()
    inputs = [random_features(SMALL, [n], seed=n) for n in (16, 80, 200)]
    expected = [model.encode(*each) for each in inputs]
    model.encoder.prepare(10)
    table = model.encoder.position_keys(10)[0]
    for (features, n_frames), plain in zip(inputs, expected, strict=True):
        torch.testing.assert_close(model.encode(features, n_frames), plain, atol=TOLERANCE, rtol=TOLERANCE)
    assert model.encoder.position_keys(4)[0].data_ptr() != 0
    torch.testing.assert_close(model.encoder.position_keys(4)[0], table[:, 6:13])
    assert model.encoder.position_keys(4)[0].untyped_storage().data_ptr() == table.untyped_storage().data_ptr()


def test_relative_shift_picks_the_distance_from_row_to_column() -> None:
    n = 5
    distances = torch.arange(n - 1, -n, -1.0).expand(n, -1)  # what column each score is of
    positions = torch.arange(n)
    assert torch.equal(relative_shift(distances[None])[0], (positions[:, None] - positions).float())


@torch.inference_mode()
def test_a_band_wider_than_the_buffer_is_full_attention_and_a_narrow_one_is_not() -> None:
    def banded(left: int, right: int) -> torch.Tensor:
        sizes = {name: getattr(SMALL, name) for name in SMALL.__dataclass_fields__} | {"attention_span": (left, right)}
        model = Parakeet(ParakeetConfig(**sizes)).eval()
        model.load(small_model().state_dict())
        return model.encode(features, n_frames)

    features, n_frames = random_features(SMALL, [160, 24], seed=2)
    full = small_model().encode(features, n_frames)
    assert torch.equal(banded(20, 20)[0], full[0])
    assert not torch.allclose(banded(2, 1)[0], full[0], atol=1e-3)
    assert banded(2, 1)[1, :3].isfinite().all()


@torch.inference_mode()
def test_beyond_the_band_nothing_is_seen() -> None:
    features, _ = random_features(SMALL, [320], seed=3)
    block = small_model().encoder.blocks[0].self_attn
    model = small_model().encoder
    x = torch.randn(1, 40, SMALL.d_model)
    keys = model.position_keys(40)[0]
    allowed = band(40, 3, 2, x.device)[None, None]
    changed = x.clone()
    changed[:, 13:] += 1.0
    difference = (block(x, keys, allowed) - block(changed, keys, allowed)).abs().amax(dim=-1)[0]
    assert not difference[:11].any()  # row 10 sees up to column 12
    assert (difference[11:] > 0).all()


@torch.inference_mode()
def test_folding_the_batch_norms_changes_nothing() -> None:
    model = small_model()
    features, n_frames = random_features(SMALL, [90, 50], seed=4)
    before = model.encode(features, n_frames)
    for block in model.encoder.blocks:
        block.conv.fold_norm()
        block.conv.fold_norm()  # once more is no fault
    after = model.encode(features, n_frames)
    torch.testing.assert_close(after[0], before[0], atol=TOLERANCE, rtol=TOLERANCE)


def test_every_parameter_can_be_trained() -> None:
    model = small_model().train()
    features, n_frames = random_features(SMALL, [90, 50], seed=5)
    frames = model.encode(features, n_frames)  # [B, T, P]
    nothing = torch.zeros(SMALL.n_predictor_layers, 2, SMALL.d_predictor)
    predicted, _, _ = model.decoder(torch.randint(SMALL.vocabulary_size, (2, 5)), nothing, nothing)
    model.joint(frames[:, :, None], predicted[:, None]).square().mean().backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert without == []
    unmoved = [name for name, parameter in model.named_parameters() if not parameter.grad.any()]
    assert unmoved == []
