"""Whatever the interleaving, the packed program computes what its graph says, bit for bit."""

import random
from dataclasses import replace

import numpy as np
import pytest

from megakernel import interpreter
from megakernel.errors import (
    BadWordError,
    DeadlockError,
    DivergenceError,
    OutOfBoundsError,
    RaceError,
    TapeError,
    UninitialisedError,
)
from megakernel.isa import Control, FaultKind, Flag, LeaveReason, Op, Phase, Task
from megakernel.mailbox import LeftRecord
from megakernel.numbers import from_bits
from megakernel.select import accept

SEEDS_A_TEST = 20


def same(found, expected) -> bool:
    return np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize("first_seed", range(0, 200, SEEDS_A_TEST))
def test_interpreted_equals_evaluated_bit_for_bit(make_decoder, first_seed):
    for seed in range(first_seed, first_seed + SEEDS_A_TEST):
        rng = random.Random(seed)
        decoder = make_decoder(rng)
        requests = [decoder.request(rng) for _ in range(rng.choice([1, 1, 1, 1, 2, 2, 3, 3, 4, 8]))]
        expected, memory = decoder.evaluate(requests)
        records, device = decoder.interpret(requests, seed)
        assert records == expected, seed
        assert same(from_bits(device.self_cache), memory.self_cache), seed
        assert same(device.scores, memory.scores), seed


def test_neighbours_change_no_bit_of_a_requests_outcome(make_decoder):
    rng = random.Random(1)
    decoder = make_decoder(rng, n_layers=1, n_sms=3, max_rows=16)
    requests = [decoder.request(rng) for _ in range(4)]
    together, _ = decoder.interpret(requests, seed=1)
    alone, _ = decoder.interpret(requests[:1], seed=2)
    assert [record for record in together if record.slot == 0] == alone


def test_a_launch_may_end_anywhere(make_decoder):
    rng = random.Random(2)
    decoder = make_decoder(rng, n_layers=1, n_sms=3, max_rows=8)
    requests = [replace(decoder.request(rng), head=(1, 2), max_tokens=4) for _ in range(3)]
    whole, _ = decoder.interpret(requests, seed=0)
    device, mailbox = decoder.device()
    for slot, request in enumerate(requests):
        decoder.open(mailbox, slot, request, slot)
    records = []
    while (residency := device.launch(seed=1, max_steps=2)).reason == LeaveReason.STEPS:
        assert residency.n_steps == 2
        records += mailbox.take_records()[:-1]
    assert residency.reason == LeaveReason.IDLE
    records += mailbox.take_records()[:-1]
    assert [replace(record, step=0) for record in records] == whole


# ---------------------------------------------------------------------- faults


@pytest.fixture(scope="module")
def decoder(make_decoder):
    return make_decoder(random.Random(3), n_layers=1, n_sms=3, max_rows=8)


@pytest.fixture
def request_(decoder):
    request = decoder.request(random.Random(3))
    return replace(request, head=(1,), prefix=(), draft=(), max_tokens=3, markers=False, watch_row=None)


def test_a_row_with_nothing_to_pick_is_a_fault(decoder, request_):
    silent = replace(decoder, bitmaps=np.full_like(decoder.bitmaps, 0xFFFFFFFF))
    device, mailbox = silent.device()
    silent.open(mailbox, 0, request_, ticket=1)
    residency = device.launch(seed=0)
    assert (residency.reason, residency.fault) == (LeaveReason.FAULT, FaultKind.NOT_FINITE)
    assert mailbox.take_records() == [LeftRecord(LeaveReason.FAULT, residency.n_steps)]


def test_opening_an_open_slot_is_a_fault(decoder, request_):
    device, mailbox = decoder.device()
    decoder.open(mailbox, 2, request_, ticket=1)
    decoder.open(mailbox, 2, request_, ticket=2)
    assert device.launch(seed=0).fault == FaultKind.BAD_COMMAND


@pytest.mark.parametrize("stalled", [0, 1, 2])
def test_a_stalled_sm_is_a_timeout_after_which_the_request_can_begin_again(decoder, request_, stalled):
    device, mailbox = decoder.device()
    decoder.open(mailbox, 0, request_, ticket=1)
    mailbox.control_before[Control.STALL_SM], mailbox.control_before[Control.STALL_STEP] = stalled + 1, 2
    residency = device.launch(seed=stalled)
    assert residency.fault == FaultKind.TIMEOUT
    assert residency.fault_sm != stalled
    assert mailbox.control_after[Control.FAULT_KIND] == FaultKind.TIMEOUT
    mailbox.take_records()
    mailbox.control_before[Control.STALL_SM] = 0
    device.clear()
    decoder.open(mailbox, 0, request_, ticket=2)
    device.launch(seed=0)
    *records, _ = mailbox.take_records()
    expected, _ = decoder.evaluate([request_])
    assert [replace(record, step=0, ticket=0) for record in records] == expected


# ---------------------------------------------------------------------- errors with names


def run_with(decoder, request, words=(), tasks=(), **fields):
    """Run a program some of whose numbers are others: ``words`` and ``tasks`` are pairs of index and value."""
    phases, all_tasks = decoder.program.phases.copy(), decoder.program.tasks.copy()
    for index, value in words:
        phases[index] = value
    for index, value in tasks:
        all_tasks[index] = value
    program = replace(decoder.program, phases=phases, tasks=all_tasks, **fields)
    decoder.interpret([request], seed=0, program=program)


MIX = 3  # a linear that adds to the residual stream


def test_waiting_for_an_epoch_that_never_comes_is_a_deadlock(decoder, request_):
    with pytest.raises(DeadlockError, match=r"SM 0, step 1, phase 3 \(0.after_attention\): word \d+, epoch "):
        run_with(decoder, request_, words=[((MIX, Phase.INPUT_EPOCH), 9)])


def test_a_granule_of_two_sms_is_a_race(decoder, request_):
    first = decoder.program.tasks[1, 0, Task.FIRST_GRANULE]
    with pytest.raises(RaceError, match="twice in epoch"):
        run_with(decoder, request_, tasks=[((1, 0, Task.FIRST_GRANULE), first - 1)])


def test_rows_written_over_while_others_read_them_are_a_race(decoder, request_):
    with pytest.raises(RaceError, match=r"phase \d+ .*word \d+"):
        run_with(decoder, request_, words=[((MIX, Phase.OUTPUT), decoder.program.phases[MIX, Phase.INPUT])])


def test_a_stream_that_nobody_began_is_uninitialised(decoder, request_):
    with pytest.raises(UninitialisedError, match=r"phase 3 .*: \d+ elements of a stream of 0"):
        run_with(decoder, request_, words=[((0, Phase.FLAGS), Flag.EMBED | Flag.NORM)])


def test_keys_that_nobody_wrote_are_uninitialised(decoder, request_):
    device, mailbox = decoder.device()
    decoder.open(mailbox, 0, replace(request_, head=(1, 2, 3)), ticket=1)
    device.start(seed=0, max_steps=2)
    device.advance(1 << 20)
    device.cached_by[0, 0, 1, 0] = -1
    with pytest.raises(UninitialisedError, match="slot 0, head 1, position 0 of the cache was not written"):
        device.launch(seed=0)


def test_keys_of_another_sm_are_a_race(decoder, request_):
    device, mailbox = decoder.device()
    decoder.open(mailbox, 0, replace(request_, head=(1, 2, 3)), ticket=1)
    device.start(seed=0, max_steps=2)
    device.advance(1 << 20)
    device.cached_by[0, 0, 1, 0] = 2
    with pytest.raises(RaceError, match="slot 0, head 1, position 0 of the cache was written by another SM"):
        device.launch(seed=0)


def test_a_warp_that_uses_too_many_tiles_misreads_the_tape(decoder, request_):
    n = decoder.program.tasks[2, -2, Task.N_GRANULES]
    with pytest.raises(TapeError, match=r"SM 2, step 1, phase \d+ \(head\): warp \d+ uses \d+ tiles of \d+"):
        run_with(decoder, request_, tasks=[((2, -2, Task.N_GRANULES), n + 4)])


def test_a_warp_that_leaves_tiles_misreads_the_tape(decoder, request_):
    n = decoder.program.tasks[2, -2, Task.N_GRANULES]
    with pytest.raises(TapeError, match=r"SM 2, .*: warp \d+ used \d+ of its \d+ tiles in a step"):
        run_with(decoder, request_, tasks=[((2, -2, Task.N_GRANULES), n - 1)])


def test_an_exchange_area_that_is_too_small_is_out_of_bounds(decoder, request_):
    with pytest.raises(OutOfBoundsError, match="word "):
        run_with(decoder, request_, exchange_words=decoder.program.control_word)


def test_words_that_no_body_takes_are_refused(decoder, request_):
    with pytest.raises(BadWordError, match="phase 0: no body takes"):
        run_with(decoder, request_, words=[((0, Phase.K_WARPS), 3)])
    with pytest.raises(BadWordError, match="ends a step with HEAD and SELECT"):
        run_with(decoder, request_, words=[((0, Phase.OP), Op.SELECT)])


def test_sms_that_come_to_different_slots_are_found(decoder, request_, monkeypatch):
    calls = []

    def forgetful(slots, *rest):
        calls.append(slots)
        after, told = accept(slots, *rest)
        return (after if len(calls) > 1 else (None, *after[1:])), told

    monkeypatch.setattr(interpreter, "accept", forgetful)
    with pytest.raises(DivergenceError, match=r"SM \d, step 1, .* another SM "):
        decoder.interpret([request_], seed=0)
