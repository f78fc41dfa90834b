"""Greedy decoding: against transformers' generate, and cut at any frames."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from models.parakeet.encoder import n_encoder_frames
from models.parakeet.greedy import Emission, TorchDecoder, TransducerState, decode, start
from models.parakeet.reference import Parakeet
from tests.models.parakeet.small import CONFIGS, SMALL, reference_class, small_model

N_FRAMES = 32
MODEL = small_model(seed=2)
FRAMES = 2 * torch.randn(N_FRAMES, SMALL.d_predictor, generator=torch.Generator().manual_seed(1))


def decode_pieces(model: Parakeet, pieces: list[torch.Tensor]) -> tuple[list[Emission], TransducerState]:
    """Piece after piece with the state carried, frames counted from the first."""
    state, emissions, n_before = start(model), [], 0
    for piece in pieces:
        found, state = decode(model, piece, state)
        emissions += [replace(emission, frame=emission.frame + n_before) for emission in found]
        n_before += len(piece)
    return emissions, state


WHOLE = decode_pieces(MODEL, [FRAMES])


def assert_same_state(one: TransducerState, other: TransducerState) -> None:
    assert one.time_jump == other.time_jump
    for name in ("hidden", "cell", "projected"):
        assert torch.equal(getattr(one, name), getattr(other, name)), name


@pytest.mark.parametrize(
    "name, seed",
    [("as published", 0), ("as published", 7), ("as published", 4), ("with biases", 0), ("with biases", 2)],
)
@torch.inference_mode()
def test_tokens_and_durations_equal_those_of_transformers(name: str, seed: int) -> None:
    config = CONFIGS[name]
    theirs, ours = reference_class(config, seed=seed), small_model(config, seed=seed)
    features = torch.randn(1, 8 * 40, config.n_mels, generator=torch.Generator().manual_seed(seed))
    mask = torch.ones(features.shape[:2], dtype=torch.bool)
    output = theirs.generate(
        input_features=features, attention_mask=mask, decoder_start_token_id=config.blank_id, max_length=400
    )
    tokens, steps = output.sequences[0, 1:].tolist(), output.durations[0, 1:].tolist()
    frames = [sum(steps[:index]) for index in range(len(steps))]
    expected = [
        (token, frame, step)
        for token, frame, step in zip(tokens, frames, steps, strict=True)
        if token != config.blank_id and frame < 40
    ]
    n_frames = torch.tensor([features.shape[1]])
    projected = ours.encode(features, n_frames)[0, : int(n_encoder_frames(n_frames))]
    emissions, state = decode(ours, projected, start(ours))
    assert [(e.token_id, e.frame, e.duration) for e in emissions] == expected
    assert len(expected) > 3 and len(expected) < len(tokens), "the model says something, and blanks between"
    assert state.time_jump == sum(steps) - 40


def test_the_example_has_every_duration_and_blanks() -> None:
    emissions, _ = WHOLE
    assert {emission.duration for emission in emissions} >= {1, 2, 3, 4}
    gaps = [after.frame - before.frame - before.duration for before, after in pairwise(emissions)]
    assert max(gaps) > 0, "frames with nothing but a blank"


@given(cuts=st.lists(st.integers(0, N_FRAMES), max_size=12))
@settings(deadline=None, max_examples=20)
def test_cut_at_any_frames_the_same_is_emitted_bit_for_bit(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), N_FRAMES]
    whole, whole_state = WHOLE
    pieces = [FRAMES[begin:end] for begin, end in pairwise(edges)]
    emissions, state = decode_pieces(MODEL, pieces)
    assert emissions == whole
    assert_same_state(state, whole_state)


@pytest.mark.parametrize("n_frames", [1, 2, 3, 16])
def test_pieces_of_one_size_give_the_same_too(n_frames: int) -> None:
    whole, whole_state = WHOLE
    emissions, state = decode_pieces(MODEL, list(FRAMES.split(n_frames)))
    assert emissions == whole
    assert_same_state(state, whole_state)


def test_every_single_cut_gives_the_same() -> None:
    whole, whole_state = WHOLE
    for cut in range(N_FRAMES + 1):
        emissions, state = decode_pieces(MODEL, [FRAMES[:cut], FRAMES[cut:]])
        assert emissions == whole
        assert_same_state(state, whole_state)


@pytest.mark.parametrize("max_symbols", [1, 3, 10])
def test_a_token_of_duration_0_is_repeated_up_to_the_limit_and_then_the_next_frame_is_taken(max_symbols: int) -> None:
    model = small_model(replace(SMALL, max_symbols=max_symbols))
    with torch.no_grad():
        model.joint.head.bias[SMALL.vocabulary_size] += 100.0
        model.joint.head.bias[SMALL.blank_id] -= 100.0
    emissions, state = decode_pieces(model, [FRAMES[:4]])
    assert [emission.frame for emission in emissions] == [frame for frame in range(4) for _ in range(max_symbols)]
    assert {emission.duration for emission in emissions} == {0}
    assert state.time_jump == 0
    in_pieces, state_of_pieces = decode_pieces(model, list(FRAMES[:4].split(1)))
    assert in_pieces == emissions
    assert_same_state(state_of_pieces, state)


def test_a_blank_of_duration_0_goes_on_by_one_frame_and_leaves_the_text_as_it_was() -> None:
    model = small_model()
    with torch.no_grad():
        model.joint.head.bias[SMALL.vocabulary_size] += 100.0
        model.joint.head.bias[SMALL.blank_id] += 100.0
    first = start(model)
    emissions, state = decode(model, FRAMES, first)
    assert emissions == []
    assert_same_state(state, first)


def test_a_duration_beyond_the_frames_is_carried_over_even_past_whole_chunks() -> None:
    model = small_model()
    with torch.no_grad():
        model.joint.head.bias[SMALL.blank_id] += 100.0
        model.joint.head.bias[-1] += 100.0  # a blank of 4 frames
    _, state = decode(model, FRAMES[:1], start(model))
    assert state.time_jump == 3
    _, state = decode(model, FRAMES[:2], state)
    assert state.time_jump == 1


def test_logprobs_are_among_the_tokens() -> None:
    first = WHOLE[0][0]
    with torch.inference_mode():
        logits = MODEL.joint(FRAMES[first.frame], start(MODEL).projected)[: SMALL.vocabulary_size]
    assert first.logprob == pytest.approx(float(logits.log_softmax(dim=0)[first.token_id]), abs=1e-5)


def test_a_batch_gives_what_each_stream_gives_alone_and_leaves_the_states() -> None:
    decoder = TorchDecoder(MODEL)
    first = decoder.start()
    before = first.hidden.clone()
    (one, _), (two, state) = decoder.decode([(FRAMES[:30], first), (FRAMES, first)])
    assert two == WHOLE[0]
    assert one == [emission for emission in two if emission.frame < 30]
    assert torch.equal(first.hidden, before)
    assert state is not first
