from dataclasses import replace

import numpy as np
import pytest

from megakernel.compile import compile_program
from megakernel.errors import CompileError
from megakernel.isa import PROGRAM_VERSION, Op, Phase, Task
from megakernel.program import dump, padding_bytes, verify, weight_bytes
from megakernel.target import Target

TARGET = Target("3 SMs", "sm_90a", 3, 232_448)


@pytest.fixture(name="program")
def program_fixture(tiny_graph):
    return compile_program(tiny_graph(), TARGET)


def phase_named(program, name):
    return program.phase_names.index(name)


def test_words_say_what_the_ops_say(program):
    words = program.phases[phase_named(program, "0.cross.blocks")]
    assert words[Phase.OP] == Op.ATTEND_CROSS
    assert (words[Phase.N_HEADS], words[Phase.BLOCK], words[Phase.N_BLOCKS]) == (2, 256, 2)
    assert (words[Phase.SCORES], words[Phase.SCORE_HEADS]) == (1, 0b10)
    assert program.phases[-1, Phase.OP] == Op.SELECT and program.phases[-1, Phase.EPOCH] == 0
    assert program.n_score_heads == 1


def test_an_sm_without_granules_has_an_empty_record(tiny_graph):
    program = compile_program(tiny_graph(width=128), replace(TARGET, n_sms=12))
    idle = program.tasks[..., Task.N_GRANULES] == 0
    assert idle.any() and not program.tasks[idle].any()


def test_padding_is_what_the_last_granule_has_too_many(program):
    assert padding_bytes(program) == 4 * 128 * 2  # 100 tokens in 13 granules of 8


def test_weight_bytes_are_the_tape(program):
    assert weight_bytes(program).sum() == len(program.tile_index) * 512


@pytest.mark.parametrize(
    ("array", "at", "value", "rule"),
    [
        ("phases", (0, Phase.EPOCH), 7, "publishes under epoch 1, not 7"),
        ("phases", (1, Phase.INPUT_EPOCH), 2, "waits for what an earlier phase publishes"),
        ("phases", (1, Phase.INPUT), 16, "waits for what an earlier phase publishes"),
        ("phases", (0, Phase.OUTPUT), 1 << 30, "publishes within the area"),
        ("phases", (0, Phase.K_WARPS), 8, "each warp's part of the tape is as long as its tasks"),
        ("tasks", (0, 0, Task.N_GRANULES), 15, "every granule lies on one SM"),
        ("tasks", (1, 0, Task.FIRST_GRANULE), 15, "every granule lies on one SM"),
        ("tasks", (1, 3, Task.AUX), 1, "row sums and biases follow"),
        ("tasks", (0, 1, Task.N_GRANULES), 1, "a phase without a weight has no granules"),
        ("tasks", (0, 0, Task.FIRST_GROUP), 16, "the first group is one of"),
        ("tile_index", (0,), 1, "holds each of"),
        ("warp_tiles", (0, 1, 0), 1, "follow those of the warp before"),
        ("warp_tiles", (0, 1, 1), 1, "each warp's part of the tape is as long"),
    ],
)
def test_a_changed_word_is_refused(program, array, at, value, rule):
    changed = getattr(program, array).copy()
    changed[at] = value
    with pytest.raises(CompileError, match=rule):
        verify(replace(program, **{array: changed}))


def test_a_stream_that_changes_its_sm_is_refused(program):
    last = phase_named(program, "0.out")
    tasks = program.tasks.copy()
    n = np.roll(tasks[:, last, Task.N_GRANULES], 1)
    tasks[:, last, Task.N_GRANULES], tasks[:, last, Task.FIRST_GRANULE] = n, np.cumsum(n) - n
    n_after = tasks[:, last + 1, Task.AUX].astype(np.int64) - program.tasks[:, last, Task.N_GRANULES] + n
    tasks[:, last + 1, Task.AUX] = n_after
    with pytest.raises(CompileError, match=r"phase 9 \(0\.out\): a row of the residual stream stays"):
        verify(replace(program, tasks=tasks, aux_granules=program.aux_granules + 1))


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        ({"version": PROGRAM_VERSION + 1}, "is of version"),
        ({"epochs_per_step": 3}, "epochs a step, not 3"),
        ({"target": replace(TARGET, n_sms=4)}, r"tasks: has shape \(4, "),
    ],
)
def test_a_program_that_contradicts_itself_is_refused(program, change, rule):
    with pytest.raises(CompileError, match=rule):
        verify(replace(program, **change))


def test_a_dump_says_who_waits_for_whom(program):
    lines = dump(program).splitlines()
    assert lines[0] == "tiny for 3 SMs (sm_90a, 3 SMs, 16 rows), version 1"
    words = program.phases[phase_named(program, "0.after_attention")]
    line = next(line for line in lines if " 0.after_attention " in line)
    assert f"{words[Phase.INPUT]}@3" in line and f"{words[Phase.OUTPUT]}@4" in line and line.endswith("RESIDUAL")
