"""A transducer from its graph to the packed program: what each stage makes of it, and that all compute the same."""

import random
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import megakernel
from megakernel.checker import check, transducer_joins
from megakernel.compile import compile_program
from megakernel.errors import CompileError, InterpreterError, RequestError
from megakernel.evaluate_transducer import TransducerMemory, TransducerNetwork, run_transducer
from megakernel.fuse import fold_constants, fuse
from megakernel.isa import TRANSDUCER_WARPS, Op, Phase, Task
from megakernel.mailbox import EmissionRecord
from megakernel.ops import FusedJoint, Transducer
from megakernel.pack import pack_tape, unpack_tape
from megakernel.program import Program, dump
from megakernel.request import FramePart, TransducerRequest, encode_transducer_request
from megakernel.target import KNOWN, Target
from megakernel.transducer_header import is_resident
from tests.megakernel.transducers import (
    N_FRAMES,
    N_SEATS,
    Plain,
    asked,
    compiled,
    evaluated,
    interpreted,
    random_constants,
    random_frames,
    said_of,
    tiny_transducer,
)

NOTHING = np.full((N_SEATS, 2, 2, 128), np.nan, np.float32)  # no state to go on from


# --- stages ----------------------------------------------------------------------------------------------------------


def test_the_recurrent_product_comes_while_the_next_result_is_on_its_way() -> None:
    names = [op.name for op in fuse(tiny_transducer())]
    assert names == ["lstm.0", "lstm.1", "lstm.0.next", "predicted", "lstm.1.next", "joint"]


def test_cells_and_what_is_kept_for_them_stay_on_their_sm() -> None:
    program = compiled(7, 16)
    of_op = {op: [i for i, words in enumerate(program.phases) if words[Phase.OP] == op] for op in Op}
    for lstm, recur in zip(of_op[Op.LSTM], of_op[Op.RECUR], strict=True):
        assert program.phases[lstm, Phase.LAYER] == program.phases[recur, Phase.LAYER]
        assert (program.tasks[:, lstm, : Task.N_GRANULES + 1] == program.tasks[:, recur, : Task.N_GRANULES + 1]).all()


def test_durations_have_a_granule_of_their_own() -> None:
    graph = tiny_transducer(n_tokens=45)
    joint = fuse(graph)[-1]
    assert isinstance(joint, FusedJoint)
    assert (joint.first_duration, joint.n) == (48, 52)
    folded = fold_constants(fuse(graph), random_constants(graph, 0))[-1]
    assert not folded.weight[45:48].any() and not folded.bias[45:48].any()


def test_what_is_packed_comes_out_again() -> None:
    program, graph = compiled(5, 8), tiny_transducer()
    folded = fold_constants(program.ops, random_constants(graph, 2))
    for weight, expected in zip(unpack_tape(program, pack_tape(program, folded)), folded, strict=True):
        assert (weight == expected.weight).all()


def test_at_full_size_the_tape_stays_on_an_h200_and_a_step_has_four_hops() -> None:
    graph = tiny_transducer(width=640, n_tokens=8193, durations=(0, 1, 2, 3, 4))
    targets = {target.arch: target for target in KNOWN}
    program = compile_program(graph, replace(targets["sm_90a"], max_rows=8))
    assert is_resident(program)
    assert program.epochs_per_step == 4
    batches = program.tasks[:, -2, Task.N_GRANULES]
    assert batches.max() <= 8  # one batch of the joint's granules
    for target in KNOWN:
        program = compile_program(graph, replace(target, max_rows=8))
        assert program.ring_tiles * TRANSDUCER_WARPS * 512 + program.x_bytes + program.misc_bytes < target.shared_bytes


def test_the_readme_shows_the_program_as_it_is() -> None:
    readme = (Path(megakernel.__file__).parent / "README.md").read_text(encoding="utf-8")
    shown = readme.split("## Transducers", 1)[1].split("```")[1].strip("\n").splitlines()
    graph = tiny_transducer(width=640, n_tokens=8193, durations=(0, 1, 2, 3, 4))
    target = next(target for target in KNOWN if target.arch == "sm_90a")
    lines = dump(compile_program(graph, replace(target, max_rows=8))).splitlines()
    start = lines.index(shown[0])
    assert [line.replace("transducer", "parakeet") for line in lines[start : start + len(shown)]] == shown


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"durations": ()}, "durations"),
        ({"durations": tuple(range(9))}, "durations"),
        ({"max_symbols": 0}, "tokens at a frame"),
        ({"blank": 45}, "blank"),
    ],
)
def test_a_graph_with_impossible_sizes_is_refused(changes: dict[str, object], rule: str) -> None:
    graph = tiny_transducer()
    assert graph.sizes.transducer is not None
    transducer = Transducer(**{**_fields(graph.sizes.transducer), **changes})  # type: ignore[arg-type]
    with pytest.raises(CompileError, match=rule):
        compile_program(
            replace(graph, sizes=replace(graph.sizes, transducer=transducer)), Target("five", "sm_80", 5, 166_912)
        )


def _fields(transducer: Transducer) -> dict[str, object]:
    return {name: getattr(transducer, name) for name in Transducer.__slots__}


def test_a_joint_of_fewer_granules_than_sms_is_refused() -> None:
    with pytest.raises(CompileError, match="granules give each"):
        compile_program(tiny_transducer(), Target("many", "sm_80", 9, 166_912))


def test_a_request_past_the_slots_room_is_refused() -> None:
    sizes = tiny_transducer().sizes
    wrong = (FramePart(N_FRAMES + 1), FramePart(5, first_frame=6), FramePart(5, seat=N_SEATS))
    for parts in (*((part,) for part in wrong), (), (FramePart(1),) * 200):
        with pytest.raises(RequestError):
            encode_transducer_request(TransducerRequest(parts), ticket=1, sizes=sizes)
    with pytest.raises(RequestError, match="no transducer"):
        encode_transducer_request(TransducerRequest((FramePart(1),)), ticket=1, sizes=replace(sizes, transducer=None))


# --- plain loop ~ evaluate -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n_layers", [1, 2, 3])
def test_the_evaluation_says_what_a_plain_loop_says(n_layers: int) -> None:
    graph = tiny_transducer(n_layers=n_layers)
    constants = random_constants(graph, n_layers)
    frames = random_frames(graph, 5)
    network = TransducerNetwork.of(fuse(graph), graph.sizes, constants)
    memory = TransducerMemory.empty(graph.sizes)
    memory.frames[:] = frames
    told = run_transducer(network, memory, asked(*[FramePart(N_FRAMES, begins=True)] * 8))
    n_compared = 0
    for slot in range(8):
        expected = Plain(graph, constants).decode(frames[slot], lead=0.03)  # less, and rounding may decide
        found = said_of([one for one in told if one.slot == slot])[: len(expected)]
        n_compared += len(expected)
        assert [(s.token, s.frame, s.duration) for s in found] == [(s.token, s.frame, s.duration) for s in expected]
        assert [s.logprob for s in found] == pytest.approx([s.logprob for s in expected], abs=0.03)
    assert n_compared > 20


def some_continue(rng: random.Random, part: FramePart) -> FramePart:
    return replace(part, first_frame=0, begins=False, continues=True) if rng.random() < 0.5 else part


# --- evaluate = interpret --------------------------------------------------------------------------------------------


def test_the_packed_program_computes_the_same_bits_however_sms_take_turns() -> None:
    rng = random.Random(0)
    n_emitted = 0
    for seed in range(5):
        program = compiled(rng.randint(2, 7), rng.choice([8, 16]))
        graph = tiny_transducer()
        constants, frames = random_constants(graph, seed % 3), random_frames(graph, seed)
        state_in = np.random.default_rng(seed).standard_normal((N_SEATS, 2, 2, 128)).astype(np.float32)
        parts = [
            FramePart(n, rng.randint(0, min(n, 3)), begins=rng.random() < 0.5, seat=seat)
            for seat, n in enumerate(rng.randint(0, N_FRAMES) for _ in range(rng.choice([1, 2, 5, N_SEATS])))
        ]
        n_slots = min(rng.choice([1, 3, 8]), len(parts))
        own = [parts[slot::n_slots] for slot in range(n_slots)]
        requests = [TransducerRequest((first, *map(partial(some_continue, rng), others))) for first, *others in own]
        expected, memory = evaluated(program, constants, frames, requests, state_in)
        found, device = interpreted(program, constants, frames, requests, state_in, seed=seed)
        assert found == expected
        assert np.array_equal(device.state_out, memory.state_out, equal_nan=True)
        parts, device = interpreted(program, constants, frames, requests, state_in, seed=seed, max_steps=3)
        assert sorted(map(str, parts)) == sorted(map(str, expected))
        assert np.array_equal(device.state_out, memory.state_out, equal_nan=True)
        n_emitted += sum(isinstance(record, EmissionRecord) for record in expected)
    assert n_emitted > 60


# --- mutants ---------------------------------------------------------------------------------------------------------


def _mutants() -> dict[str, tuple[int, int, int]]:
    """Name → phase, word of its record, what is added to it."""
    return {
        "an LSTM that waits for the words of another phase": (1, Phase.INPUT_EPOCH, 1),
        "an LSTM that publishes under the epoch before": (1, Phase.EPOCH, -1),
        "an LSTM that publishes where the layer before does": (1, Phase.OUTPUT, -1),
        "a product kept for the other layer": (2, Phase.LAYER, 1),
        "a product of the other layer's outputs": (4, Phase.INPUT, -1),
        "a prediction that nobody finds": (3, Phase.OUTPUT, 16),
        "a joint that reads elsewhere": (5, Phase.INPUT, 16),
        "a joint whose sums lie on its best tokens": (5, Phase.PARTIAL, -1),
    }


def _mutant(name: str) -> Program:
    program = compiled(3, 8)
    phase, word, change = _mutants()[name]
    phases = program.phases.copy()
    if change == -1 and word in (Phase.OUTPUT, Phase.INPUT, Phase.PARTIAL):
        phases[phase, word] = program.phases[phase if word == Phase.PARTIAL else 0, Phase.OUTPUT]
    else:
        phases[phase, word] = int(phases[phase, word]) + change
    return replace(program, phases=phases)


@pytest.mark.parametrize("name", _mutants())
def test_a_wrong_word_is_found_by_running_it_and_without(name: str) -> None:
    program, graph = compiled(3, 8), tiny_transducer()
    with pytest.raises(CompileError, match="check"):
        check(_mutant(name))
    constants, frames = random_constants(graph, 1), random_frames(graph, 1)
    requests = asked(FramePart(N_FRAMES, begins=True), FramePart(7, begins=True))
    expected, _ = evaluated(program, constants, frames, requests, NOTHING)
    try:
        found, _ = interpreted(_mutant(name), constants, frames, requests, NOTHING, seed=1, packed=program)
    except (InterpreterError, AssertionError):
        return
    assert found != expected


def test_units_that_change_their_sm_are_found() -> None:
    program = compiled(3, 8)
    tasks = program.tasks.copy()
    tasks[:, 2] = tasks[:, 4]
    moved = tasks[0, 2, Task.N_GRANULES]
    tasks[0, 2, Task.N_GRANULES], tasks[1, 2, Task.FIRST_GRANULE] = moved - 1, moved - 1
    tasks[1, 2, Task.N_GRANULES] += 1
    with pytest.raises(CompileError):
        check(replace(program, tasks=tasks))


@pytest.mark.parametrize(("n_sms", "max_rows"), [(2, 8), (7, 16)])
def test_what_is_compiled_can_neither_race_nor_wait_for_ever(n_sms: int, max_rows: int) -> None:
    check(compiled(n_sms, max_rows))


def test_with_one_place_for_what_the_joint_leaves_there_would_be_a_race() -> None:
    with pytest.raises(CompileError, match="may still read it"):
        transducer_joins(compiled(3, 8), n_parities=1)
