import numpy as np
import pytest
import soxr
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.resample import Resampler

USUAL_RATES_HZ = [8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000]
ODD_RATES_HZ = [8_001, 15_999, 16_001, 47_999]
rates = st.sampled_from(USUAL_RATES_HZ + ODD_RATES_HZ)


def noise(n: int, seed: int = 0) -> np.ndarray:
    return (0.1 * np.random.default_rng(seed).normal(size=n)).astype(np.float32)


def resampled(samples: np.ndarray, rate_hz: int) -> np.ndarray:
    resampler = Resampler(rate_hz)
    return np.concatenate((resampler.push(samples), resampler.flush()))


@settings(max_examples=40, deadline=None)
@given(rates, st.lists(st.integers(0, 3000), min_size=1, max_size=8))
def test_any_cut_into_packets_gives_the_same_samples_bit_for_bit(rate_hz: int, sizes: list[int]) -> None:
    samples = noise(sum(sizes))
    resampler = Resampler(rate_hz)
    parts = [resampler.push(packet) for packet in np.split(samples, np.cumsum(sizes)[:-1])]
    assert np.array_equal(np.concatenate([*parts, resampler.flush()]), resampled(samples, rate_hz))


@pytest.mark.parametrize("rate_hz", USUAL_RATES_HZ + ODD_RATES_HZ)
def test_a_tone_stays_the_tone_at_every_moment(rate_hz: int) -> None:
    """Amplitude, phase and clock in one: the output is the sine of its own time, to 66 dB."""
    for tone_hz in (200, 1000, 3400):
        tone = np.sin(2 * np.pi * tone_hz * np.arange(rate_hz) / rate_hz).astype(np.float32)
        output = resampled(tone, rate_hz)
        expected = np.sin(2 * np.pi * tone_hz * np.arange(len(output)) / 16_000)
        assert np.abs(output - expected)[200:-200].max() < 10 ** (-66 / 20)


@pytest.mark.parametrize("rate_hz", [22_050, 24_000, 32_000, 44_100, 48_000, 47_999])
def test_what_16_khz_cannot_hold_is_gone_instead_of_folded_back(rate_hz: int) -> None:
    tone = np.sin(2 * np.pi * 8_500 * np.arange(rate_hz) / rate_hz).astype(np.float32)
    assert np.abs(resampled(tone, rate_hz)[200:-200]).max() < 10 ** (-75 / 20)


@pytest.mark.parametrize("rate_hz", [8_000, 11_025, 44_100, 48_000, 47_999])
def test_speech_band_noise_comes_out_as_if_soxr_had_made_it_in_one_piece(rate_hz: int) -> None:
    spectrum = np.fft.rfft(noise(rate_hz))
    spectrum[3_300:] = 0  # one bin is 1 Hz
    samples = np.fft.irfft(spectrum, rate_hz).astype(np.float32)
    expected = soxr.resample(samples, rate_hz, 16_000)
    error = (resampled(samples, rate_hz) - expected)[300:-300]
    assert np.sqrt(np.mean(error**2)) < 10 ** (-100 / 20) * np.sqrt(np.mean(expected**2))


@pytest.mark.parametrize("level", [1.0, -0.25])
@pytest.mark.parametrize("rate_hz", [8_000, 11_025, 47_999])
def test_a_constant_stays_constant(rate_hz: int, level: float) -> None:
    output = resampled(np.full(rate_hz, level, dtype=np.float32), rate_hz)
    assert np.abs(output[200:-200] - level).max() < 2e-5


@settings(max_examples=40, deadline=None)
@given(rates, st.lists(st.integers(0, 5000), min_size=1, max_size=6))
def test_after_each_flush_exactly_the_output_before_the_end_of_the_input_is_out(rate_hz: int, sizes: list[int]) -> None:
    resampler, n_out = Resampler(rate_hz), 0
    for n_samples in sizes:
        n_out += len(resampler.push(noise(n_samples))) + len(resampler.flush())
        assert n_out == resampler.output_position(resampler.n_in) == -(-resampler.n_in * 16_000 // rate_hz)
        assert len(resampler.flush()) == 0


@pytest.mark.parametrize("rate_hz", USUAL_RATES_HZ + ODD_RATES_HZ)
def test_a_flush_changes_only_the_few_samples_before_it(rate_hz: int) -> None:
    samples, cut = noise(rate_hz), rate_hz // 3 + 1
    resampler = Resampler(rate_hz)
    parts = [resampler.push(samples[:cut]), resampler.flush(), resampler.push(samples[cut:]), resampler.flush()]
    whole = resampled(samples, rate_hz)
    changed = np.flatnonzero(np.concatenate(parts) != whole)
    barrier = resampler.output_position(cut)
    assert len(changed) == 0 or (barrier - 241 <= changed[0] and changed[-1] < barrier)


@pytest.mark.parametrize("packet_samples", [1, 37, 480])
@pytest.mark.parametrize("rate_hz", USUAL_RATES_HZ + ODD_RATES_HZ)
def test_no_more_than_15_ms_are_held_back_of_packets_of_any_size(rate_hz: int, packet_samples: int) -> None:
    resampler, n_out = Resampler(rate_hz), 0
    for _ in range(rate_hz // 10 // packet_samples):
        n_out += len(resampler.push(noise(packet_samples)))
        assert resampler.n_in / rate_hz - n_out / 16_000 < 0.0151


@pytest.mark.parametrize("rate_hz", [8_000, 24_000, 32_000, 44_100, 48_000])
def test_no_more_than_10_ms_are_held_back_of_packets_of_20_ms(rate_hz: int) -> None:
    resampler = Resampler(rate_hz)
    for index in range(1, 50):
        n_out = len(resampler.push(noise(rate_hz // 50)))
        assert n_out == (160 if index == 1 else 320)


@pytest.mark.parametrize("rate_hz", [11_025, 44_100, 12_345])
def test_a_click_after_half_a_minute_of_packets_and_flushes_is_where_it_was(rate_hz: int) -> None:
    """Each block is made from its own index alone, so what holds here and in ``output_position`` holds after hours."""
    resampler, n_out = Resampler(rate_hz), 0
    for second in range(30):
        n_out += len(resampler.push(np.zeros(rate_hz, dtype=np.float32)))
        if second % 7 == 0:
            n_out += len(resampler.flush())
    click = np.zeros(rate_hz, dtype=np.float32)
    click[rate_hz // 2] = 1
    n_out += int(np.argmax(resampler.push(click)))
    assert abs(n_out / 16_000 - (30 + (rate_hz // 2) / rate_hz)) <= 0.5 / 16_000


@given(rates, st.integers(0, 10**10))
def test_positions_map_there_and_back(rate_hz: int, position: int) -> None:
    resampler = Resampler(rate_hz)
    output = resampler.output_position(position)
    assert (output - 1) * rate_hz < position * 16_000 <= output * rate_hz
    back = resampler.input_position(output)
    assert back * 16_000 <= output * rate_hz < (back + 1) * 16_000
    assert back >= position
