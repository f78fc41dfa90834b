"""Many streams decoded at once say what the reference says of each, wherever their frames are cut."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.parakeet.graph_decoder import BATCHES, GraphDecoder
from models.parakeet.greedy import Emission, TorchDecoder, TransducerState
from models.parakeet.reference import Parakeet
from tests.models.parakeet.small import CONFIGS, small_model

Batch = list[tuple[Tensor, TransducerState]]


@pytest.fixture(scope="module", params=list(CONFIGS))
def model(request: pytest.FixtureRequest) -> Parakeet:
    return small_model(CONFIGS[request.param])


def frames_of(model: Parakeet, n_frames: int) -> Tensor:
    generator = torch.Generator().manual_seed(n_frames)
    return 2 * torch.randn(n_frames, model.config.d_predictor, generator=generator)


def said(emissions: list[Emission]) -> list[tuple[int, int, int]]:
    return [(emission.token_id, emission.frame, emission.duration) for emission in emissions]


def decoder_of(model: Parakeet) -> GraphDecoder:
    return GraphDecoder(model, torch.zeros(1), None)


def test_streams_together_say_what_each_says_to_the_reference(model: Parakeet) -> None:
    reference, decoder = TorchDecoder(model), decoder_of(model)
    frames = [frames_of(model, n) for n in (40, 1, 0, 173, 7)]
    wanted = reference.decode([(own, reference.start()) for own in frames])
    found = decoder.decode([(own, decoder.start()) for own in frames])
    assert sum(len(emissions) for emissions, _ in wanted) > 30
    for (emissions, state), (wanted_emissions, wanted_state) in zip(found, wanted, strict=True):
        assert said(emissions) == said(wanted_emissions)
        for one, other in zip(emissions, wanted_emissions, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
        assert state.time_jump == wanted_state.time_jump
        torch.testing.assert_close(state.hidden, wanted_state.hidden)
        torch.testing.assert_close(state.cell, wanted_state.cell)
        torch.testing.assert_close(state.projected, wanted_state.projected)


@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(0, 60), max_size=4))
def test_frames_in_pieces_say_the_same_to_the_bit(model: Parakeet, cuts: list[int]) -> None:
    decoder, frames = decoder_of(model), frames_of(model, 60)
    ((whole, wanted),) = decoder.decode([(frames, decoder.start())])
    state, pieces, begin = decoder.start(), [], 0
    for end in [*sorted(cuts), len(frames)]:
        ((emissions, state),) = decoder.decode([(frames[begin:end], state)])
        pieces += [(e.token_id, begin + e.frame, e.duration, e.logprob) for e in emissions]
        begin = end
    assert pieces == [(e.token_id, e.frame, e.duration, e.logprob) for e in whole]
    assert state.time_jump == wanted.time_jump
    assert torch.equal(state.hidden, wanted.hidden)


def test_a_state_stays_as_it_is_when_decoding_goes_on_from_it(model: Parakeet) -> None:
    decoder = decoder_of(model)
    ((_, state),) = decoder.decode([(frames_of(model, 30), decoder.start())])
    before = state.hidden.clone(), state.cell.clone(), state.projected.clone()
    first = decoder.decode([(frames_of(model, 50), state)])
    again = decoder.decode([(frames_of(model, 50), state)])
    assert said(first[0][0]) == said(again[0][0])
    after = state.hidden, state.cell, state.projected
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_more_streams_than_a_batch_holds_and_more_frames_than_there_was_room_for() -> None:
    model = small_model()
    reference, decoder = TorchDecoder(model), decoder_of(model)
    decoder.prepare([1])
    frames = [frames_of(model, 20 + n % 3) for n in range(BATCHES[-1] + 2)] + [frames_of(model, 1100)]
    found = decoder.decode([(own, decoder.start()) for own in frames])
    wanted = reference.decode([(own, reference.start()) for own in frames])
    assert [said(emissions) for emissions, _ in found] == [said(emissions) for emissions, _ in wanted]
