"""A program with anything wrong in it is refused by the checker, or seen to fail when it is interpreted.

A mutant changes one number that the kernel reads, to a value that means something else: never a word of a task without
granules, nor a group where there is only one, as nobody looks at those. So no mutant is equivalent to its program.
"""

import random
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from megakernel.checker import check
from megakernel.errors import CompileError, InterpreterError
from megakernel.isa import LOOP_WARPS, Flag, Op, Phase, Task
from megakernel.numbers import from_bits
from megakernel.program import Program

N_CHECKED = 8  # mutants of a kind
N_RUN = 8
Mutation = Callable[[Program, random.Random], Program]


# ---------------------------------------------------------------------- how to change a program


def with_phase_word(program: Program, phase: int, word: Phase, value: int) -> Program:
    phases = program.phases.copy()
    assert phases[phase, word] != value
    phases[phase, word] = value
    return replace(program, phases=phases)


def with_task_word(program: Program, sm: int, phase: int, word: Task, value: int) -> Program:
    tasks = program.tasks.copy()
    assert tasks[sm, phase, word] != value
    tasks[sm, phase, word] = value
    return replace(program, tasks=tasks)


def phases_of(program: Program, *ops: Op) -> list[int]:
    return [i for i, words in enumerate(program.phases) if words[Phase.OP] in ops]


def any_phase(program: Program, rng: random.Random, *ops: Op) -> int:
    return rng.choice(phases_of(program, *ops))


def any_task(program: Program, rng: random.Random) -> tuple[int, int]:
    """SM and phase of a task with granules."""
    return tuple(rng.choice(np.argwhere(program.tasks[:, :, Task.N_GRANULES]).tolist()))


def other(rng: random.Random, value: int, *candidates: int) -> int:
    return rng.choice([candidate for candidate in candidates if candidate != value and candidate >= 0])


def any_waiting_phase(program: Program, rng: random.Random) -> int:
    return rng.choice([i for i, words in enumerate(program.phases) if words[Phase.INPUT_EPOCH]])


PUBLISHING = (Op.LINEAR, Op.ATTEND_SELF, Op.ATTEND_CROSS, Op.COMBINE, Op.HEAD)
ATTENTION = (Op.ATTEND_SELF, Op.ATTEND_CROSS, Op.COMBINE)


def input_epoch(program, rng):
    phase = any_waiting_phase(program, rng)
    value = int(program.phases[phase, Phase.INPUT_EPOCH])
    return with_phase_word(program, phase, Phase.INPUT_EPOCH, other(rng, value, value - 1, value + 1, value - 2))


def dropped_edge(program, rng):
    phase = any_waiting_phase(program, rng)
    return with_phase_word(program, phase, Phase.INPUT_EPOCH, 0)


def epoch(program, rng):
    phase = any_phase(program, rng, *PUBLISHING)
    value = int(program.phases[phase, Phase.EPOCH])
    return with_phase_word(program, phase, Phase.EPOCH, other(rng, value, value - 1, value + 1, 0))


def epochs_of_two_phases(program, rng):
    """Swapped, and whoever reads them with them: words come in an order in which nobody may reuse them."""
    a, b = rng.sample(phases_of(program, Op.LINEAR), 2)
    phases = program.phases.copy()
    swap = {int(phases[a, Phase.EPOCH]): phases[b, Phase.EPOCH], int(phases[b, Phase.EPOCH]): phases[a, Phase.EPOCH]}
    for words in phases:
        for word in (Phase.EPOCH, Phase.INPUT_EPOCH):
            words[word] = swap.get(int(words[word]), words[word])
    return replace(program, phases=phases)


def epochs_of_a_step(program, rng):
    """A buffer's words carry one epoch of a step, so that even a step that is too short mixes up none of them."""
    return replace(program, epochs_per_step=program.epochs_per_step - rng.randint(1, 3))


def input_offset(program, rng):
    """COMBINE reads at PARTIAL, which says the same."""
    phase = rng.choice(
        [p for p in phases_of(program, *Op) if program.phases[p, Phase.INPUT] != program.phases[p, Phase.PARTIAL]]
    )
    value = int(program.phases[phase, Phase.INPUT])
    return with_phase_word(
        program, phase, Phase.INPUT, other(rng, value, value + 1, value + 16, value - 16, value - 64)
    )


def output_offset(program, rng):
    phase = any_phase(program, rng, *PUBLISHING)
    value = int(program.phases[phase, Phase.OUTPUT])
    return with_phase_word(program, phase, Phase.OUTPUT, other(rng, value, value + 1, value + 16, value - 16))


def overlapping_buffers(program, rng):
    """A linear's rows moved on top of another's, readers and all. (Far apart in the step, this does no harm.)"""
    return moved_onto(program, *rng.sample(phases_of(program, Op.LINEAR), 2))


def written_over_while_read(program, rng):
    """The rows that a linear reads moved on top of those that it writes."""
    linears = phases_of(program, Op.LINEAR)
    pairs = [
        (a, b)
        for a in linears
        for b in linears
        if program.phases[a, Phase.EPOCH] == program.phases[b, Phase.INPUT_EPOCH]
    ]
    return moved_onto(program, *rng.choice(pairs))


def moved_onto(program: Program, a: int, b: int) -> Program:
    phases = program.phases.copy()
    was = phases[a, Phase.OUTPUT].copy()
    readers = (phases[:, Phase.INPUT] == was) & (phases[:, Phase.INPUT_EPOCH] == phases[a, Phase.EPOCH])
    phases[readers, Phase.INPUT] = phases[a, Phase.OUTPUT] = phases[b, Phase.OUTPUT] + 16
    return replace(program, phases=phases)


def partial_offset(program, rng):
    phase = any_phase(program, rng, *ATTENTION)
    value = int(program.phases[phase, Phase.PARTIAL])
    return with_phase_word(program, phase, Phase.PARTIAL, other(rng, value, value + 2, value + 34, value - 34))


def control_word(program, rng):
    head = int(program.phases[-2, Phase.OUTPUT])
    rows = program.target.max_rows * 12
    return replace(program, control_word=head + rng.randrange(program.target.n_sms) * rows + rng.randrange(11))


def shrunk_exchange_area(program, rng):
    return replace(program, exchange_words=program.control_word - rng.randrange(1000))


def granules_of_an_sm(program, rng):
    sm, phase = any_task(program, rng)
    n = int(program.tasks[sm, phase, Task.N_GRANULES])
    return with_task_word(program, sm, phase, Task.N_GRANULES, other(rng, n, n - 1, n + 1))


def first_granule(program, rng):
    sm, phase = any_task(program, rng)
    first = int(program.tasks[sm, phase, Task.FIRST_GRANULE])
    return with_task_word(program, sm, phase, Task.FIRST_GRANULE, other(rng, first, first - 1, first + 1))


def border_between_sms(program, rng):
    """One granule goes to the neighbour; its tiles and row sums stay."""
    _, phase = any_task(program, rng)
    sm = rng.randrange(program.target.n_sms - 1)
    tasks = program.tasks.copy()
    tasks[sm, phase, Task.N_GRANULES] += 1
    tasks[sm + 1, phase, Task.N_GRANULES] -= 1
    tasks[sm + 1, phase, Task.FIRST_GRANULE] += 1
    return replace(program, tasks=tasks)


def dropped_task(program, rng):
    sm, phase = any_task(program, rng)
    tasks = program.tasks.copy()
    tasks[sm, phase] = 0
    return replace(program, tasks=tasks)


def swapped_tasks(program, rng):
    """Two SMs take each other's granules of a phase."""
    _, phase = any_task(program, rng)
    a, b = rng.sample(np.flatnonzero(program.tasks[:, phase, Task.N_GRANULES]).tolist(), 2)
    tasks = program.tasks.copy()
    tasks[[a, b], phase] = tasks[[b, a], phase]
    return replace(program, tasks=tasks)


def swapped_phases(program, rng):
    """Two neighbours of the step's order, on every SM; COMBINE's place is behind its ATTEND, so they are no pair."""
    a = rng.choice([p for p in range(len(program.phases) - 1) if not np.array_equal(*program.phases[p : p + 2])])
    order = list(range(len(program.phases)))
    order[a : a + 2] = order[a + 1], order[a]
    names = tuple(program.phase_names[i] for i in order)
    return replace(
        program,
        phases=program.phases[order],
        tasks=program.tasks[:, order],
        phase_names=names,
        op_of_phase=tuple(program.op_of_phase[i] for i in order),
    )


def swapped_phases_on_one_sm(program, rng):
    """One SM does the tasks of two phases with each other's granules."""
    a, b = rng.sample(phases_of(program, Op.LINEAR, Op.HEAD), 2)
    sm = rng.choice([s for s in range(program.target.n_sms) if (program.tasks[s, a] != program.tasks[s, b]).any()])
    tasks = program.tasks.copy()
    tasks[sm, [a, b]] = tasks[sm, [b, a]]
    return replace(program, tasks=tasks)


def group(program, rng):
    many = [
        (s, p) for s, p in np.argwhere(program.tasks[:, :, 1]).tolist() if program.phases[p, Phase.K_WARPS] < LOOP_WARPS
    ]
    sm, phase = rng.choice(many)
    n_groups = LOOP_WARPS // int(program.phases[phase, Phase.K_WARPS])
    value = int(program.tasks[sm, phase, Task.FIRST_GROUP])
    return with_task_word(program, sm, phase, Task.FIRST_GROUP, other(rng, value, *range(n_groups)))


def aux(program, rng):
    sm, phase = any_task(program, rng)
    value = int(program.tasks[sm, phase, Task.AUX])
    return with_task_word(program, sm, phase, Task.AUX, other(rng, value, value - 1, value + 1, value + 1000))


def unit_counts(program, rng):
    phase = any_phase(program, rng, *ATTENTION)
    word = rng.choice([Phase.N_HEADS, Phase.N_BLOCKS])
    value = int(program.phases[phase, word])
    return with_phase_word(program, phase, word, other(rng, value, value - 1, value + 1, value // 2, 2 * value))


def block_size(program, rng):
    """Half or twice; a border moved by one position can vanish when the row is rounded."""
    phase = any_phase(program, rng, *ATTENTION)
    value = int(program.phases[phase, Phase.BLOCK])
    return with_phase_word(program, phase, Phase.BLOCK, rng.choice([value // 2, 2 * value]))


def layer(program, rng):
    phase = any_phase(program, rng, Op.ATTEND_SELF, Op.ATTEND_CROSS)
    value = int(program.phases[phase, Phase.LAYER])
    return with_phase_word(program, phase, Phase.LAYER, other(rng, value, 0, 1, 2))


def kept_heads(program, rng):
    phase = any_phase(program, rng, Op.ATTEND_CROSS)
    word = rng.choice([Phase.SCORES, Phase.SCORE_HEADS])
    value = int(program.phases[phase, word])
    return with_phase_word(program, phase, word, other(rng, value, 0, 1, 2, 3))


def row_sizes(program, rng):
    phase = any_phase(program, rng, Op.LINEAR, Op.HEAD)
    word = rng.choice([Phase.K, Phase.N])
    value = int(program.phases[phase, word])
    return with_phase_word(program, phase, word, other(rng, value, value - 128, value + 128, value // 2, 2 * value, 7))


def k_warps(program, rng):
    phase = any_phase(program, rng, Op.LINEAR, Op.HEAD)
    value = int(program.phases[phase, Phase.K_WARPS])
    return with_phase_word(program, phase, Phase.K_WARPS, other(rng, value, 1, 2, 4, 8, 16, 3))


def flag(program, rng):
    """Not one that the body does not look at, nor a new begin of the stream behind its last use."""
    phase = any_phase(program, rng, Op.LINEAR, Op.HEAD)
    used = {Flag.NORM} if program.phases[phase, Phase.OP] == Op.HEAD else set(Flag)
    if phase == np.flatnonzero(program.phases[:, Phase.FLAGS] & Flag.RESIDUAL)[-1]:
        used -= {Flag.STREAM}
    value = int(program.phases[phase, Phase.FLAGS])
    return with_phase_word(program, phase, Phase.FLAGS, value ^ rng.choice(sorted(used)))


def opcode(program, rng):
    phase = rng.randrange(len(program.phases))
    value = int(program.phases[phase, Phase.OP])
    return with_phase_word(program, phase, Phase.OP, other(rng, value, *Op))


def tape_of_a_warp(program, rng):
    warp_tiles = program.warp_tiles.copy()
    sm, warp = rng.choice(np.argwhere(warp_tiles[:, :, 1]).tolist())
    word = rng.randrange(2)
    value = int(warp_tiles[sm, warp, word])
    warp_tiles[sm, warp, word] = other(rng, value, value - 1, value + 1)
    return replace(program, warp_tiles=warp_tiles)


def swapped_tiles(program, rng):
    tiles = program.tile_index.copy()
    a, b = rng.sample(range(len(tiles)), 2)
    tiles[[a, b]] = tiles[[b, a]]
    return replace(program, tile_index=tiles)


def shifted_tiles(program, rng):
    """The tiles of one warp, by one."""
    sm, warp = rng.randrange(program.target.n_sms), rng.randrange(LOOP_WARPS)
    first, n = program.warp_tiles[sm, warp].tolist()
    tiles = program.tile_index.copy()
    tiles[first : first + n] = np.roll(tiles[first : first + n], rng.choice([-1, 1]))
    return replace(program, tile_index=tiles)


def room(program, rng):
    name = rng.choice(
        ["aux_granules", "linear_aux_granules", "residual_granules", "n_score_heads", "n_replicas", "version"]
    )
    return replace(program, **{name: getattr(program, name) - 1})


SEEN_WHEN_RUN: tuple[Mutation, ...] = (
    input_epoch,
    dropped_edge,
    epoch,
    input_offset,
    output_offset,
    partial_offset,
    written_over_while_read,
    control_word,
    shrunk_exchange_area,
    granules_of_an_sm,
    first_granule,
    border_between_sms,
    dropped_task,
    swapped_tasks,
    swapped_phases,
    swapped_phases_on_one_sm,
    group,
    aux,
    unit_counts,
    block_size,
    layer,
    kept_heads,
    row_sizes,
    k_warps,
    flag,
    opcode,
    tape_of_a_warp,
    swapped_tiles,
    shifted_tiles,
)
ALL = (*SEEN_WHEN_RUN, epochs_of_two_phases, epochs_of_a_step, overlapping_buffers, room)


# ---------------------------------------------------------------------- what must see it


@pytest.fixture(scope="module")
def decoder(make_decoder):
    return make_decoder(random.Random(5), n_layers=1, n_sms=3, max_rows=16)


@pytest.mark.parametrize("mutation", ALL, ids=lambda mutation: mutation.__name__)
def test_the_checker_refuses(make_decoder, mutation):
    for seed in range(N_CHECKED):
        rng = random.Random(seed)
        program = make_decoder(rng, max_rows=16).program
        check(program)
        with pytest.raises(CompileError, match=r"^check: tiny"):
            check(mutation(program, rng))


@pytest.fixture(scope="module")
def expected(decoder):
    """Requests that use every kind of word: one block and several in both attentions, and what comes of them."""
    request = decoder.request(random.Random(2))
    requests = [
        replace(request, head=tuple(range(66)), prefix=(), draft=(), max_tokens=2, n_positions=300, markers=False),
        replace(request, head=(4,), prefix=(5, 6), draft=(7,), max_tokens=2, n_positions=20, n_plain=None),
    ]
    return requests, *decoder.evaluate(requests)


@pytest.mark.parametrize("mutation", SEEN_WHEN_RUN, ids=lambda mutation: mutation.__name__)
def test_it_shows_when_it_is_run(decoder, expected, mutation):
    requests, records, memory = expected
    for seed in range(N_RUN):
        mutant = mutation(decoder.program, random.Random(seed))
        packed = mutant if mutant.tile_index is not decoder.program.tile_index else decoder.program
        try:
            found, device = decoder.interpret(requests, seed, program=mutant, packed=packed)
        except InterpreterError:
            continue
        same = found == records and np.array_equal(device.scores, memory.scores, equal_nan=True)
        assert not (same and np.array_equal(from_bits(device.self_cache), memory.self_cache, equal_nan=True)), seed


def test_the_program_itself_runs(decoder, expected):
    requests, records, _ = expected
    assert decoder.interpret(requests, 0)[0] == records
