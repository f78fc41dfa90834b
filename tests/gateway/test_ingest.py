import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.ingest import ENCODINGS, AudioFormat, Ingest, IngestResult

formats = st.builds(
    AudioFormat,
    encoding=st.sampled_from(ENCODINGS),
    sample_rate_hz=st.sampled_from([8_000, 11_025, 16_000, 22_050, 44_100, 48_000]),
    n_channels=st.integers(1, 3),
)


def heard(results: list[IngestResult]) -> np.ndarray:
    return np.concatenate([result.samples for result in results])


@settings(max_examples=60, deadline=None)
@given(formats, st.binary(min_size=0, max_size=4000), st.lists(st.integers(0, 4000), max_size=10))
def test_audio_cut_at_any_bytes_gives_the_same_samples_bit_for_bit(
    audio_format: AudioFormat, data: bytes, cuts: list[int]
) -> None:
    whole = Ingest(audio_format)
    expected = [whole.push(data), whole.flush()]
    edges = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    ingest = Ingest(audio_format)
    results = [ingest.push(data[start:end]) for start, end in zip(edges, edges[1:], strict=False)] + [ingest.flush()]
    assert np.array_equal(heard(results), heard(expected))
    assert sum(result.n_non_finite for result in results) == sum(result.n_non_finite for result in expected)
    assert sum(result.n_clipped for result in results) == sum(result.n_clipped for result in expected)
    assert results[-1].input_samples_taken == len(data) // audio_format.frame_bytes
    assert results[-1].n_dropped_bytes == len(data) % audio_format.frame_bytes


@settings(max_examples=60, deadline=None)
@given(formats, st.lists(st.one_of(st.binary(max_size=900), st.just(b"flush")), max_size=12))
def test_samples_out_are_finite_and_counted_exactly_at_every_barrier(
    audio_format: AudioFormat, inputs: list[bytes]
) -> None:
    ingest, n_out = Ingest(audio_format), 0
    for data in inputs:
        result = ingest.flush() if data == b"flush" else ingest.push(data)
        n_out += len(result.samples)
        assert np.isfinite(result.samples).all()
        due = math.ceil(ingest.input_samples_taken * 16_000 / audio_format.sample_rate_hz)
        assert due - 0.0151 * 16_000 <= n_out <= due
        assert n_out == due or data != b"flush"


def test_an_odd_byte_waits_for_the_next_packet_even_across_a_flush() -> None:
    ingest = Ingest(AudioFormat("s16le", 16_000))
    assert ingest.push(b"\x00").input_samples_taken == 0
    assert ingest.flush().n_dropped_bytes == 1
    result = ingest.push(b"\x40\x00")
    assert result.samples.tolist() == [0.5]
    assert result.input_samples_taken == ingest.input_samples_taken == 1


def test_an_empty_packet_changes_nothing() -> None:
    ingest = Ingest(AudioFormat("s16le", 8_000))
    result = ingest.push(b"")
    assert len(result.samples) == 0 and result.input_samples_taken == 0


def test_what_was_mended_is_counted_in_the_call_that_brought_it() -> None:
    ingest = Ingest(AudioFormat("f32le", 16_000))
    first = ingest.push(np.array([np.nan, 2.0, 0.5], dtype="<f4").tobytes())
    second = ingest.push(np.array([0.5], dtype="<f4").tobytes())
    assert (first.n_non_finite, first.n_clipped) == (1, 1)
    assert (second.n_non_finite, second.n_clipped) == (0, 0)
