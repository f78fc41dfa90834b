"""What the compiler makes is accepted on every target; what breaks a rule is refused with phase, SM and rule.

That no change to a program gets past it is ``test_mutants.py``'s.
"""

import random
from dataclasses import replace

import numpy as np
import pytest

from megakernel.checker import balance, buffers, check, epochs, granules, joins, limits, records, residual, shapes
from megakernel.compile import compile_program
from megakernel.errors import CompileError
from megakernel.isa import Flag, Op, Phase, Task
from megakernel.target import KNOWN, Target


@pytest.fixture(scope="module")
def program(make_decoder):
    return make_decoder(random.Random(0), n_layers=2, n_sms=4, max_rows=8).program


def changed(array, index, value):
    array = array.copy()
    array[index] = value
    return array


@pytest.mark.parametrize(("n_sms", "max_rows"), [(1, 8), (2, 8), (2, 16), (3, 16), (5, 16), (8, 8), (12, 16)])
def test_tiny_programs_are_accepted(tiny_graph, n_sms, max_rows):
    check(compile_program(tiny_graph(n_layers=2), Target("tiny", "sm_80", n_sms, 166_912, max_rows)))


@pytest.mark.parametrize("target", KNOWN, ids=lambda target: target.name)
def test_large_programs_are_accepted(large_graph, target):
    check(compile_program(large_graph(), target))


def test_an_error_names_program_phase_and_sm(program):
    phase = program.phase_names.index("1.after_cross")
    tasks = changed(program.tasks, (2, phase, Task.AUX), 99)
    with pytest.raises(
        CompileError, match=rf"^check: tiny, phase {phase} \(1.after_cross\), SM 2: row sums and biases at granule 99"
    ):
        check(replace(program, tasks=tasks))


def test_an_array_of_another_shape_is_refused(program):
    with pytest.raises(CompileError, match=r"tasks is uint32 \(3, "):
        shapes(replace(program, tasks=program.tasks[:3]))
    with pytest.raises(CompileError, match="phases is int64"):
        shapes(replace(program, phases=program.phases.astype(np.int64)))


def test_a_program_without_its_last_op_is_refused(program):
    with pytest.raises(CompileError, match="phases are of ops"):
        records(replace(program, ops=program.ops[:-1]))


def test_a_word_that_its_op_does_not_say_is_refused(program):
    with pytest.raises(CompileError, match="phase 0 .*: K_WARPS is 8, not 4"):
        records(replace(program, phases=changed(program.phases, (0, Phase.K_WARPS), 8)))


def test_more_blocks_than_the_kernel_holds_are_refused(tiny_graph):
    graph = tiny_graph(n_positions=512)
    with pytest.raises(CompileError, match="phase 1 .*: 8 blocks of 64, not at most 7 of 64"):
        check(compile_program(graph, Target("tiny", "sm_80", 3, 166_912, 8)))


def test_blocks_of_another_size_than_the_kernels_are_refused(program):
    with pytest.raises(CompileError, match="phase 5 .*: 2 blocks of 128, not at most 7 of 256"):
        limits(replace(program, phases=changed(program.phases, (5, Phase.BLOCK), 128)))


def test_a_norm_of_other_rows_than_the_streams_is_refused(program):
    with pytest.raises(CompileError, match="phase 9 .*: norms and embeddings are of 128 elements, not 256"):
        limits(replace(program, phases=changed(program.phases, (9, Phase.FLAGS), Flag.NORM)))
    with pytest.raises(CompileError, match="phase 4 .*: rows of 160 elements are no pieces of 128"):
        limits(replace(program, phases=changed(program.phases, (4, Phase.K), 160)))


def test_heads_of_another_size_are_refused(program):
    with pytest.raises(CompileError, match="heads of 32 elements, not 64"):
        limits(replace(program, sizes=replace(program.sizes, head_size=32)))


def test_an_epoch_that_two_phases_carry_is_refused(program):
    with pytest.raises(CompileError, match="phase 1 .*: epoch 1 does not follow 1"):
        epochs(replace(program, phases=changed(program.phases, (1, Phase.EPOCH), 1)))


def test_buffers_that_overlap_are_refused(program):
    first = int(program.phases[0, Phase.OUTPUT])
    with pytest.raises(CompileError, match="begins inside that of phase 0"):
        buffers(replace(program, phases=changed(program.phases, (3, Phase.OUTPUT), first + 32)))


def test_a_granule_of_two_sms_is_refused(program):
    n = int(program.tasks[0, 0, Task.N_GRANULES])
    with pytest.raises(CompileError, match=f"phase 0 .*, SM 1: granules {n + 1} to {n} are nobody's, or two SMs'"):
        granules(replace(program, tasks=changed(program.tasks, (0, 0, Task.N_GRANULES), n + 1)))


def test_a_stream_that_changes_its_sm_is_refused(program):
    last = [p for p, words in enumerate(program.phases) if words[Phase.FLAGS] & Flag.RESIDUAL][-1]
    with pytest.raises(CompileError, match=f"phase {last} .*, SM 1: owns other rows than in phase 3"):
        residual(replace(program, tasks=changed(program.tasks, (1, last, Task.N_GRANULES), 1)))


def test_an_sm_that_reads_too_much_is_refused(program):
    with pytest.raises(CompileError, match=r"SM 3: reads \d+ bytes, 1\.\d+ times the mean"):
        balance(replace(program, warp_tiles=changed(program.warp_tiles, (3, 0, 1), 100)))


def test_an_sm_that_nobody_hears_from_in_a_step_is_refused(program):
    """It may still be choosing the last step's tokens when the others write the next one's results over them."""
    tasks = program.tasks.copy()
    linears = np.flatnonzero(program.phases[:, Phase.OP] == Op.LINEAR)
    tasks[3, linears] = 0
    with pytest.raises(
        CompileError, match=r"phase 20 \(head\), SM 0: writes OUTPUT of phase 20 while SM 3 may still read it"
    ):
        joins(replace(program, tasks=tasks))
