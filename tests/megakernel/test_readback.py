import numpy as np
import pytest

from megakernel.compile import compile_program
from megakernel.isa import Op, Phase
from megakernel.numbers import pack_pairs, round_bf16
from megakernel.readback import differences, published_rows
from megakernel.target import Target

TARGET = Target("3 SMs", "sm_90a", 3, 232_448)
N_ROWS = 3


def a_step(program, step):
    """Random rows of every phase, and the exchange area as that step leaves it in all replicas."""
    rng = np.random.default_rng(step)
    exchange = np.zeros(program.exchange_words, np.uint64)
    values = {}
    for name, words in zip(program.phase_names, program.phases, strict=True):
        if words[Phase.OP] in (Op.LINEAR, Op.COMBINE):
            n = int(words[Phase.N])
            values[name] = round_bf16(rng.standard_normal((N_ROWS, n), np.float32))
            tag = step * program.epochs_per_step + int(words[Phase.EPOCH])
            rows = np.zeros((program.n_replicas, program.target.max_rows, n // 2), np.uint64)
            rows[:, :N_ROWS] = pack_pairs(values[name]) | np.uint64(tag) << np.uint64(32)
            exchange[int(words[Phase.OUTPUT]) :][: rows.size] = rows.ravel()
    return values, exchange


def test_what_a_step_left_is_read_by_name(tiny_graph):
    program = compile_program(tiny_graph(), TARGET)
    values, exchange = a_step(program, 5)
    found = published_rows(program, exchange, N_ROWS)
    assert list(found) == list(values)
    assert all((found[name] == values[name]).all() for name in values)


def test_a_word_of_another_step_is_named(tiny_graph):
    program = compile_program(tiny_graph(), TARGET)
    _, exchange = a_step(program, 5)
    at = int(program.phases[program.phase_names.index("0.q"), Phase.OUTPUT]) + 64 + 3
    exchange[at] -= np.uint64(program.epochs_per_step) << np.uint64(32)
    with pytest.raises(ValueError, match=r"0\.q: elements 6 and 7 of row 1 carry epoch 44, others 55"):
        published_rows(program, exchange, N_ROWS)


def test_differences_say_where_and_by_how_much():
    expected = {"a": np.ones((2, 4), np.float32), "b": np.ones((2, 4), np.float32)}
    found = {name: rows.copy() for name, rows in expected.items()}
    found["a"][1, 2] = 3
    found["b"][0, 1] = np.nan
    first, second = differences(found, expected)
    assert "a " in first and "differs by 2.000000 at row 1, element 2: 3.000000, not 1.000000" in first
    assert "differs by inf at row 0, element 1: nan" in second
