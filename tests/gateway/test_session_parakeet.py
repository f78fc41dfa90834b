"""A whole session over Parakeet's engine and its greedy decoding: seams change nothing but what the encoder hears.

The encoder here hears every frame by itself, so that contexts make no difference; then whatever is cut where, text and
times are those of each utterance in one piece, to the bit. Predictor, joint network and their state are the real ones.
"""

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from numpy.typing import NDArray
from torch import Tensor

from gateway import messages as m
from models.backends import Backends, Offer
from models.parakeet.config import FRAME_SAMPLES, HOP_SAMPLES
from models.parakeet.engine import ParakeetEngine
from models.parakeet.greedy import Decoded, Emission, Piece, TransducerState, ahead_in_two, decode, start
from models.parakeet.tokens import Pieces
from tests.models.parakeet.files import PIECES
from tests.models.parakeet.small import SMALL, small_model
from vad.audio import SAMPLE_RATE_HZ

torch.set_num_threads(1)  # many tiny products: threads would only wait for one another
MODEL = small_model(seed=2)
SPELT = Pieces.of(dict(enumerate(PIECES)), n_tokens=21, blank_id=20, source="x")
EAR = torch.randn(FRAME_SAMPLES, SMALL.d_predictor, generator=torch.Generator().manual_seed(1)) * 0.3
LAYOUTS = st.lists(st.sampled_from([0.3, 0.7, 1.5, 3.0, -0.2, -0.3, -0.8]), min_size=1, max_size=4)  # below 0: silence


class FrameByFrame:
    """A backend whose encoder hears each frame alone; calls in ``fails_on`` (of ``listen``, from 1) raise."""

    max_buffers = 4

    def __init__(self, fails_on: frozenset[int] = frozenset()) -> None:
        self._fails_on = fails_on
        self._n_calls = 0

    def listen(self, buffers: Sequence[NDArray[np.float32]]) -> list[Tensor]:
        self._n_calls += 1
        if self._n_calls in self._fails_on:
            raise RuntimeError("fails, as asked")
        return [_frames(buffer) for buffer in buffers]

    def start(self) -> TransducerState:
        return start(MODEL)

    def decode(self, batch: Sequence[tuple[Tensor, TransducerState]]) -> list[tuple[list[Emission], TransducerState]]:
        return [decode(MODEL, frames, state) for frames, state in batch]

    def decode_ahead(self, batch: Sequence[Piece]) -> list[Decoded]:
        return ahead_in_two(self, batch)

    def close(self) -> None:
        pass


def _frames(buffer: NDArray[np.float32]) -> Tensor:
    n_frames = -(-(len(buffer) // HOP_SAMPLES) // (FRAME_SAMPLES // HOP_SAMPLES))
    padded = np.zeros(n_frames * FRAME_SAMPLES, np.float32)
    padded[: len(buffer)] = buffer[: len(padded)]
    rows = torch.from_numpy(padded.reshape(n_frames, FRAME_SAMPLES))
    # Row by row: a product of many rows may round otherwise than that of one.
    return torch.stack([row @ EAR for row in rows]) if n_frames else torch.zeros(0, SMALL.d_predictor)


def sound(layout: Sequence[float]) -> NDArray[np.float32]:
    noise = np.random.default_rng(0)
    pieces = [
        noise.normal(0.0, 0.5, int(item * SAMPLE_RATE_HZ)) if item > 0 else np.zeros(int(-item * SAMPLE_RATE_HZ))
        for item in (-0.3, *layout, -1.0)
    ]
    return np.clip(np.concatenate(pieces), -1, 1).astype(np.float32)


def play(world, samples, *, fails_on=frozenset(), n_bytes=3_200, delay_s=0.0, **chosen):
    backend = FrameByFrame(fails_on)
    engine = ParakeetEngine(
        Backends([Offer("frames", lambda: backend)], model="small"), SPELT, name="small", languages=("en",)
    )
    simulation = world.simulation(engine, delay_s)
    hello = structs.replace(world.hello, audio=m.AudioSpec("f32le", SAMPLE_RATE_HZ), **chosen)
    data = samples.astype("<f4").tobytes()
    packets = [
        (min(at + n_bytes, len(data)) / 4 / SAMPLE_RATE_HZ, m.Audio(data[at : at + n_bytes]))
        for at in range(0, len(data), n_bytes)
    ]
    seen = simulation.run([(0.0, hello), *packets, (len(samples) / SAMPLE_RATE_HZ, m.Bye())])
    finals = [item.message for item in seen if isinstance(item.message, m.Final)]
    return [(word.text, word.start_s, word.end_s) for final in finals for word in final.words], seen


@settings(max_examples=12, deadline=None)
@given(
    layout=LAYOUTS,
    chunk_ms=st.sampled_from(range(160, 2_001, 80)),
    n_bytes=st.sampled_from([2_048, 3_200, 25_600]),
    delay_s=st.sampled_from([0.0, 0.3]),
    fails_on=st.frozensets(st.integers(1, 30).map(lambda n: 2 * n), max_size=3),
)
def test_any_chunks_packets_delays_and_failures_give_words_and_times_of_one_piece(
    world, layout, chunk_ms, n_bytes, delay_s, fails_on
) -> None:
    samples = sound(layout)
    whole, _ = play(world, samples, second_pass=True, chunk_ms=2_000)
    cut, _ = play(world, samples, chunk_ms=chunk_ms, n_bytes=n_bytes, delay_s=delay_s, fails_on=fails_on)
    assert cut == whole
    assert whole or max(layout) < 1.5, "what lasts is heard and written"


def test_every_chunk_size_says_what_one_piece_says(world) -> None:
    samples = sound([2.0, -0.2, 1.5, -0.8, 1.5])
    whole, _ = play(world, samples, second_pass=True)
    assert len(whole) > 10, "the network says something"
    for chunk_ms in range(160, 2_001, 80):
        cut, seen = play(world, samples, chunk_ms=chunk_ms)
        assert cut == whole
        settled = [item.message for item in seen if isinstance(item.message, m.Partial) and item.message.n_committed]
        assert settled, "words are settled before the final"


def test_nothing_is_settled_before_the_first_seconds_of_an_utterance_which_ready_states(world) -> None:
    cut, seen = play(world, sound([2.0, -0.2, 2.5]), chunk_ms=160)
    [ready] = [item.message for item in seen if isinstance(item.message, m.Ready)]
    [started] = [item.message for item in seen if isinstance(item.message, m.SpeechStarted)]
    partials = [item for item in seen if isinstance(item.message, m.Partial)]
    settling = [item.at_s for item in partials if item.message.n_committed]
    begins_s = started.start_s
    assert ready.chunking.first_ms > ready.chunking.latency_ms
    assert partials[0].at_s < begins_s + 1.0, "words are shown long before"
    assert 0.0 <= settling[0] - begins_s - ready.chunking.first_ms / 1_000 < 0.3
