from dataclasses import replace

import pytest

from megakernel.compile import compile_program
from megakernel.predict import BODY_US, HOP_US, dump, predict
from megakernel.target import KNOWN, Target

TARGET = Target("3 SMs", "sm_90a", 3, 232_448, bandwidth_gb_s=100)
H200 = next(target for target in KNOWN if target.name == "NVIDIA H200")


def test_a_program_without_bytes_to_wait_for_lasts_as_long_as_its_hops(tiny_graph):
    program = compile_program(tiny_graph(), replace(TARGET, bandwidth_gb_s=1_000_000))
    prediction = predict(program, n_positions=65)
    assert prediction.n_hops == len(program.phases)
    assert prediction.step_us == pytest.approx(prediction.n_hops * (HOP_US + BODY_US))


def test_a_slow_memory_is_all_that_counts(tiny_graph):
    program = compile_program(tiny_graph(n_tokens=5000), replace(TARGET, bandwidth_gb_s=1))
    prediction = predict(program)
    assert prediction.step_us is not None and prediction.floor_us is not None
    assert 1 <= prediction.step_us / prediction.floor_us < 1.4


def test_a_row_of_one_block_needs_no_combine(tiny_graph):
    program = compile_program(tiny_graph(), TARGET)
    hops = [predict(program, n_positions=n, n_cross_positions=m).n_hops for n, m in ((64, 256), (65, 256), (65, 257))]
    assert hops == [len(program.phases) - 2, len(program.phases) - 1, len(program.phases)]


def test_caches_count_every_slot_and_position(tiny_graph):
    program = compile_program(tiny_graph(n_layers=2), TARGET)
    prediction = predict(program, n_slots=3, n_positions=70)
    assert prediction.cache_bytes == 2 * 3 * (70 + 300) * 128 * 2 * 2


def test_a_shallow_ring_is_no_quicker(tiny_graph):
    deep = predict(compile_program(tiny_graph(n_tokens=5000), TARGET)).step_us
    shallow = predict(compile_program(tiny_graph(n_tokens=5000), replace(TARGET, shared_bytes=101_376))).step_us
    assert deep is not None and shallow is not None and deep < shallow


def test_without_a_bandwidth_there_are_no_times(tiny_graph):
    prediction = predict(compile_program(tiny_graph(), replace(TARGET, bandwidth_gb_s=None)))
    assert prediction.step_us is None and prediction.floor_us is None
    assert "bandwidth not known" in dump(prediction)


def test_a_large_decoder_on_an_h200_is_predicted_near_its_floor(large_graph):
    prediction = predict(compile_program(large_graph(), H200))
    assert prediction.floor_us == pytest.approx(81, abs=0.5)
    assert prediction.step_us == pytest.approx(103, abs=3)
    assert prediction.n_hops == 38
