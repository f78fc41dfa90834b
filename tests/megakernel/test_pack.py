from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megakernel.compile import compile_program
from megakernel.errors import CompileError
from megakernel.folded import Folded
from megakernel.fuse import fold_constants
from megakernel.isa import GRANULE_ROWS, Op, Phase, Task
from megakernel.pack import pack_aux, pack_tape, tape_positions, tiles_of, unpack_tape, weight_of
from megakernel.target import Target

TARGET = Target("3 SMs", "sm_90a", 3, 232_448)


def random_folded(program, seed):
    rng = np.random.default_rng(seed)
    for part in program.weights:
        n, k = (int(program.phases[part.phase, word]) for word in (Phase.N, Phase.K))
        yield Folded(
            rng.integers(0, 2**16, (n, k), np.uint16),
            rng.standard_normal(n, np.float32),
            rng.standard_normal(n, np.float32),
        )


def test_a_lane_finds_its_eight_elements_at_its_place():
    weight = np.arange(16 * 64, dtype=np.uint16).reshape(16, 64)
    tiles = tiles_of(weight)
    for granule in range(2):
        for k_tile in range(2):
            for lane in range(32):
                row, column = 8 * granule + lane // 4, 32 * k_tile + 8 * (lane % 4)
                found = tiles[2 * granule + k_tile, 8 * lane : 8 * lane + 8]
                assert found.tolist() == weight[row, column : column + 8].tolist()


@given(n=st.integers(1, 40), k_tiles=st.integers(1, 5))
def test_tiles_give_the_weight_back_and_pad_with_zeros(n, k_tiles):
    weight = np.random.default_rng(n).integers(1, 2**16, (n, 32 * k_tiles), np.uint16)
    tiles = tiles_of(weight)
    assert (weight_of(tiles, n, 32 * k_tiles) == weight).all()
    assert np.count_nonzero(tiles) == weight.size and tiles.size % (GRANULE_ROWS * 32) == 0


@settings(deadline=None, max_examples=20)
@given(
    width=st.sampled_from([128, 384]), n_tokens=st.integers(80, 300), n_sms=st.integers(6, 10), seed=st.integers(0, 99)
)
def test_what_is_packed_can_be_unpacked(tiny_graph, width, n_tokens, n_sms, seed):
    graph = tiny_graph(width=width, n_tokens=n_tokens, mark_begin=40)
    program = compile_program(graph, replace(TARGET, n_sms=n_sms))
    folded = tuple(random_folded(program, seed))
    tape = pack_tape(program, folded)
    assert tape.dtype == np.uint16 and tape.shape == (len(program.tile_index), 256)
    for weight, constants in zip(unpack_tape(program, tape), folded, strict=True):
        assert (weight == constants.weight).all()


def test_packing_is_a_gather_from_all_weights_tiles(tiny_graph):
    program = compile_program(tiny_graph(), TARGET)
    folded = tuple(random_folded(program, 1))
    tiles = np.concatenate([tiles_of(constants.weight) for constants in folded])
    assert (pack_tape(program, folded) == tiles[program.tile_index]).all()
    assert (tape_positions(program)[program.tile_index] == np.arange(len(tiles))).all()


def test_row_sums_and_biases_lie_where_the_task_says(tiny_graph):
    program = compile_program(tiny_graph(n_tokens=100), TARGET)
    folded = tuple(random_folded(program, 2))
    aux = pack_aux(program, folded)
    assert aux.shape == (3, program.aux_granules, GRANULE_ROWS, 2)
    for part, constants in zip(program.weights, folded, strict=True):
        for sm in range(3):
            task = program.tasks[sm, part.phase]
            first = int(task[Task.FIRST_GRANULE]) * GRANULE_ROWS
            n = min(int(task[Task.N_GRANULES]) * GRANULE_ROWS, len(constants.bias) - first)
            at = int(task[Task.AUX])
            found = aux[sm, at : at + int(task[Task.N_GRANULES])].reshape(-1, 2)
            assert (found[:n, 0] == constants.row_sums[first : first + n]).all()
            assert (found[:n, 1] == constants.bias[first : first + n]).all()
            assert not found[n:].any()


def test_the_constants_of_a_graph_fit_its_program(tiny_graph, random_constants):
    graph = tiny_graph()
    program = compile_program(graph, TARGET)
    folded = fold_constants(program.ops, random_constants(graph, 0))
    head = next(part for part in program.weights if program.phases[part.phase, Phase.OP] == Op.HEAD)
    last = tape_positions(program)[head.first_tile + head.n_tiles - 1]
    tile = pack_tape(program, folded)[last].reshape(GRANULE_ROWS, 32)
    assert tile[:4].any() and not tile[4:].any()  # 100 tokens end in the middle of a granule


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"weight": np.zeros((384, 64), np.uint16)}, r"0\.qkv\.weight: is uint16 of shape \(384, 128\), not uint16"),
        ({"weight": np.zeros((384, 128), np.float32)}, "not float32 of"),
        ({"row_sums": np.zeros(1, np.float32)}, r"0\.qkv\.row_sums: is float32 of shape \(384,\)"),
        ({"bias": np.zeros(384, np.float64)}, r"0\.qkv\.bias: .* not float64"),
    ],
)
def test_constants_of_a_wrong_shape_or_type_are_refused(tiny_graph, change, rule):
    program = compile_program(tiny_graph(), TARGET)
    folded = list(random_folded(program, 0))
    folded[0] = replace(folded[0], **change)
    for pack in (pack_tape, pack_aux):
        with pytest.raises(CompileError, match=rule):
            pack(program, folded)


def test_a_missing_weight_is_refused(tiny_graph):
    program = compile_program(tiny_graph(), TARGET)
    with pytest.raises(CompileError, match="pack: tiny: takes 7 weights, not 6"):
        pack_tape(program, list(random_folded(program, 0))[1:])
