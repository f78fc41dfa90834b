import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vad.framer import WINDOW_SAMPLES, Framer, padded

packet_sizes = st.lists(st.integers(0, 3 * WINDOW_SAMPLES), max_size=12)


def packets(sizes: list[int]) -> list[np.ndarray]:
    ramp = np.arange(sum(sizes), dtype=np.float32)
    return np.split(ramp, np.cumsum(sizes)[:-1]) if sizes else []


@given(packet_sizes, st.integers(0, 10**12))
def test_every_sample_comes_out_once_at_its_position_whatever_the_packets(sizes: list[int], start_sample: int) -> None:
    framer = Framer(start_sample=start_sample)
    frames = [frame for packet in packets(sizes) for frame in framer.push(packet)]
    assert all(len(frame.samples) == WINDOW_SAMPLES for frame in frames)
    assert framer.end_sample == start_sample + sum(sizes)
    remainder = framer.flush()
    if remainder is not None:
        assert 0 < len(remainder.samples) < WINDOW_SAMPLES
        frames.append(remainder)
    assert all(frame.start_sample == start_sample + int(frame.samples[0]) for frame in frames)
    heard = np.concatenate([frame.samples for frame in frames]) if frames else np.zeros(0)
    assert np.array_equal(heard, np.arange(sum(sizes)))


@given(packet_sizes, packet_sizes)
def test_positions_stay_exact_behind_a_flush(before: list[int], after: list[int]) -> None:
    framer = Framer()
    for packet in packets(before):
        framer.push(packet)
    framer.flush()
    assert framer.flush() is None
    frames = [frame for packet in packets(after) for frame in framer.push(packet)]
    assert [frame.start_sample for frame in frames] == [
        sum(before) + index * WINDOW_SAMPLES for index in range(sum(after) // WINDOW_SAMPLES)
    ]


def test_frames_survive_a_caller_who_reuses_the_packet_buffer() -> None:
    framer = Framer()
    packet = np.ones(WINDOW_SAMPLES, dtype=np.float32)
    [frame] = framer.push(packet)
    packet[:] = 0
    assert frame.samples.all()


@pytest.mark.parametrize("samples", [np.zeros(4), np.zeros(4, dtype=np.int16), np.zeros((2, 2), dtype=np.float32)])
def test_other_types_and_shapes_are_refused(samples: np.ndarray) -> None:
    with pytest.raises(ValueError, match=r"mono float32 samples \[n\]; got"):
        Framer().push(samples)


def test_padded_fills_a_window_with_zeros_behind_the_samples() -> None:
    window = padded(np.ones(3, dtype=np.float32))
    assert window.shape == (WINDOW_SAMPLES,) and window.dtype == np.float32
    assert window[:3].all() and not window[3:].any()
