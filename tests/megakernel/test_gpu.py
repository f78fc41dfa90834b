"""The kernel on a GPU: what it computes, and what it does when it is disturbed.

A decoder of two layers with random weights stands for every model; ``evaluate`` says what it should decode. The GPU
adds up in another order, so log-probabilities are compared by tolerance, and tokens as far as the best one is clear.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megakernel.compile import compile_program
from megakernel.cubin import bitmap_words
from megakernel.device import Device, find_device, target_for
from megakernel.errors import NoDeviceError
from megakernel.evaluate import Memory, network_of, run_requests
from megakernel.graph import Graph
from megakernel.isa import EndReason
from megakernel.launcher import Launcher, Mode
from megakernel.mailbox import DoneRecord, LeftRecord, SegmentRecord, SlotRecord, TokenRecord, decode_record
from megakernel.request import Request
from megakernel.runtime import Runtime
from megakernel.select import record_words
from megakernel.selftest import ensure_right
from megakernel.target import X_CHUNK_ELEMENTS

pytestmark = pytest.mark.gpu

TOLERANCE = 0.03  # of a log-probability: some bfloat16 roundings fall the other way
TIMEOUT_S = 20.0
N_MARKERS = 100
FREE, STRIPED, FEW_WORDS = range(3)  # rules: what they leave of the text
WORD_STEP = 64  # from one word to the next that FEW_WORDS leaves; it leaves no end token

Constants = dict[str, NDArray[np.float32]]
Tokens = list[tuple[int, float]]  # token, log-probability


@dataclass(frozen=True, slots=True, eq=False)
class Setup:
    """One program on the GPU, and what it was made from."""

    graph: Graph
    constants: Constants
    bitmaps: NDArray[np.uint32]
    cross: NDArray[np.float32]  # the whole cross cache
    launcher: Launcher

    def runtime(self, mode: Mode = Mode.LOOP) -> Runtime:
        return Runtime(self.launcher.program, self.launcher, n_rules=len(self.bitmaps), mode=mode)


@pytest.fixture(scope="module")
def device() -> Device:
    try:
        return find_device()
    except NoDeviceError as error:
        pytest.skip(f"no GPU: {error}")


@pytest.fixture(scope="module")
def set_up(
    device: Device, random_constants: Callable[[Graph, int], Constants], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[[Graph], Setup]]:
    setups: list[Setup] = []

    def load(graph: Graph) -> Setup:
        constants, bitmaps = random_constants(graph, 11), bitmaps_of(graph)
        words_of_few(constants["tokens"])[:] *= 0.2  # else the last word, fed back, would win for ever
        tensors = {name: torch.from_numpy(array) for name, array in constants.items()}
        cache: Path = tmp_path_factory.mktemp("cache")
        program = compile_program(graph, target_for(device))
        launcher = Launcher.load(program, tensors, bitmaps, device=device, cache=cache)
        rng = np.random.default_rng(5)
        cross = torch.from_numpy(rng.standard_normal(tuple(launcher.buffers.cross_cache.shape), dtype=np.float32))
        launcher.buffers.cross_cache.copy_(cross)
        torch.cuda.synchronize()
        setups.append(Setup(graph, constants, bitmaps, cross.bfloat16().float().numpy(), launcher))
        return setups[-1]

    yield load
    for setup in setups:
        setup.launcher.close()


@pytest.fixture(scope="module")
def graph_of(device: Device, tiny_graph: Callable[..., Graph]) -> Callable[..., Graph]:
    n_tokens = 8 * device.n_sms + 2 * N_MARKERS  # each SM has some
    return partial(tiny_graph, n_tokens=n_tokens, mark_begin=n_tokens - N_MARKERS)


@pytest.fixture(scope="module")
def setup(set_up: Callable[[Graph], Setup], graph_of: Callable[..., Graph]) -> Setup:
    return set_up(graph_of(n_layers=2))


@pytest.fixture(scope="module")
def wide(set_up: Callable[[Graph], Setup], graph_of: Callable[..., Graph]) -> Setup:
    """One with an inner size of which shared memory holds a few rows whole, and many only in pieces."""
    return set_up(graph_of(wide=4 * X_CHUNK_ELEMENTS))


def words_of_few(of_tokens: NDArray[Any]) -> NDArray[Any]:
    """The part of ``of_tokens`` [n_tokens, ...] that is of the words which FEW_WORDS leaves."""
    return of_tokens[: -N_MARKERS - 1 : WORD_STEP]


def bitmaps_of(graph: Graph) -> NDArray[np.uint32]:
    """[rules, 2, words], for the rules FREE, STRIPED and FEW_WORDS."""
    bitmaps = np.zeros((3, 2, bitmap_words(graph.sizes.n_tokens)), np.uint32)
    bitmaps[STRIPED, :, 0] = 0xF0F0F0F0
    suppressed = np.arange(bitmaps.shape[-1] * 32) < graph.sizes.mark_begin
    words_of_few(suppressed[: graph.sizes.n_tokens])[:] = False
    bitmaps[FEW_WORDS] = np.packbits(suppressed, bitorder="little").view(np.uint32)
    return bitmaps


def request(**changes: object) -> Request:
    plain = Request(head=(3, 14, 15), max_tokens=20, n_positions=290)
    return replace(plain, **changes)  # type: ignore[arg-type]  # the tests name fields that there are


def run(runtime: Runtime, requests: Sequence[Request]) -> list[list[SlotRecord]]:
    """Records of each request, one a slot from slot 0 on."""
    records: list[list[SlotRecord]] = [[] for _ in requests]
    for slot, each in enumerate(requests):
        runtime.open(slot, each)
    runtime.burst()
    while runtime.n_open:
        came = runtime.wait(TIMEOUT_S)
        assert came, "the device says nothing"
        for record in came:
            records[record.slot].append(record)
    _until_left(runtime)
    return records


def tokens_of(records: Sequence[SlotRecord]) -> Tokens:
    return [(record.token, record.log_probability) for record in records if isinstance(record, TokenRecord)]


def reference(setup: Setup, requests: Sequence[Request]) -> list[list[SlotRecord]]:
    """What ``evaluate`` decodes: the records of each request, all as of step 0."""
    sizes = setup.graph.sizes
    network = network_of(setup.launcher.program.ops, sizes, setup.constants)
    memory = Memory.empty(sizes, network.n_score_heads)
    memory.cross_cache[:] = setup.cross
    told = run_requests(network, memory, requests, setup.bitmaps)
    records = [decode_record(record_words(emitted, step=0, sequence=1)) for emitted in told]
    return [
        [record for record in records if not isinstance(record, LeftRecord) and record.slot == slot]
        for slot in range(len(requests))
    ]


def assert_close(got_records: Sequence[SlotRecord], expected_records: Sequence[SlotRecord]) -> None:
    """The same tokens with nearly the same log-probabilities, up to a place where two tokens are equally good."""
    got, expected = tokens_of(got_records), tokens_of(expected_records)
    for (token, log_probability), (expected_token, expected_log_probability) in zip(got, expected, strict=False):
        assert log_probability == pytest.approx(expected_log_probability, abs=TOLERANCE)
        if token != expected_token:
            return
    assert len(got) == len(expected)


def test_the_test_at_load_finds_it_right_and_remembers(setup: Setup, tmp_path: Path) -> None:
    tensors = {name: torch.from_numpy(array) for name, array in setup.constants.items()}
    kept = setup.launcher.buffers.cross_cache.clone()
    try:
        for _ in range(2):
            ensure_right(setup.runtime(), setup.launcher, tensors, setup.bitmaps, cache=tmp_path)
    finally:
        setup.launcher.buffers.cross_cache.copy_(kept)
        torch.cuda.synchronize()
    assert [path.suffix for path in tmp_path.iterdir()] == [".right"]


def test_it_decodes_what_the_reference_decodes(setup: Setup) -> None:
    requests = [request(head=(3 + slot, 14, 15)) for slot in range(3)]
    for records, expected in zip(run(setup.runtime(), requests), reference(setup, requests), strict=True):
        assert_close(records, expected)


def test_it_obeys_markers_prefixes_and_bitmaps_as_the_reference_does(setup: Setup) -> None:
    begin = setup.graph.sizes.mark_begin
    requests = [
        request(markers=True, max_first_mark=10, rules=FEW_WORDS),
        request(prefix=(begin, 5, 6), markers=True, max_first_mark=10, rules=STRIPED),
        request(n_positions=100, n_plain=40, tail_bias=-1.5, watch_row=0, watch_token=7),
        request(inverse_temperature=0.8, seed=9),
        request(markers=True, max_first_mark=10),
    ]
    records, expected = run(setup.runtime(), requests), reference(setup, requests)
    for one, expected_one in zip(records, expected, strict=True):
        assert_close(one, expected_one)
    segments = _segments(expected[0])
    assert len(segments) > 3  # few words, so a marker follows each, and no two candidates are nearly as good
    assert _segments(records[0]) == segments


def test_two_runs_are_bit_identical(setup: Setup) -> None:
    requests = [request(head=(slot + 1,), inverse_temperature=0.5 * slot, seed=slot) for slot in range(8)]
    first, second = ([tokens_of(records) for records in run(setup.runtime(), requests)] for _ in range(2))
    assert first == second


def test_a_row_does_not_depend_on_its_neighbours(setup: Setup) -> None:
    requests = [request(head=(slot + 1, 2)) for slot in range(8)]
    together = run(setup.runtime(), requests)
    alone = run(setup.runtime(), requests[:1])
    assert tokens_of(alone[0]) == tokens_of(together[0])


def test_a_draft_changes_the_steps_and_nothing_else(setup: Setup) -> None:
    (plain,) = run(setup.runtime(), [request()])
    tokens = tuple(token for token, _ in tokens_of(plain))
    wrong = (*tokens[:4], 1, *tokens[5:])
    for draft in (tokens, wrong, (9,) * 20):
        (drafted,) = run(setup.runtime(), [request(draft=draft)])
        assert tokens_of(drafted) == tokens_of(plain)
    (drafted,) = run(setup.runtime(), [request(draft=tokens)])
    done, steps = drafted[-1], {record.step for record in drafted if isinstance(record, TokenRecord)}
    assert isinstance(done, DoneRecord)
    assert done.n_verified >= len(tokens) - 1
    assert len(steps) < len(tokens) / 2


def test_where_few_rows_go_in_larger_pieces_neither_draft_nor_neighbours_change_a_bit(wide: Setup) -> None:
    neighbours = [request(head=(slot + 1, 2)) for slot in range(1, 8)]
    (plain,) = run(wide.runtime(), [request()])
    assert_close(plain, reference(wide, [request()])[0])
    tokens = tuple(token for token, _ in tokens_of(plain))
    for draft in ((), tokens, (*tokens[:4], 1, *tokens[5:])):
        for others in ([], neighbours):  # with all of these and a draft the rows of a step are all taken
            drafted, *_ = run(wide.runtime(), [request(draft=draft), *others])
            assert tokens_of(drafted) == tokens_of(plain)


@pytest.mark.parametrize("mode", [Mode.GRAPH, Mode.GRAPH_DEPENDENT])
def test_one_phase_a_launch_gives_the_same_bits(setup: Setup, mode: Mode) -> None:
    requests = [request(head=(slot + 1, 2)) for slot in range(3)]
    loop, graph = (run(setup.runtime(each), requests) for each in (Mode.LOOP, mode))
    assert [tokens_of(records) for records in graph] == [tokens_of(records) for records in loop]


def test_slots_join_and_leave_while_others_go_on(setup: Setup) -> None:
    alone = [tokens_of(run(setup.runtime(), [request(head=(head, 2))])[0]) for head in (1, 2, 3)]
    runtime = setup.runtime()
    got: dict[int, Tokens] = {1: [], 2: [], 3: []}
    slots = {0: 1}
    runtime.open(0, request(head=(1, 2)))
    runtime.burst()
    waiting = [2, 3]
    while runtime.n_open:
        for record in runtime.wait(TIMEOUT_S):
            if isinstance(record, TokenRecord):
                got[slots[record.slot]].append((record.token, record.log_probability))
            if waiting:
                head, slot = waiting.pop(), len(waiting) + 1
                slots[slot] = head
                runtime.open(slot, request(head=(head, 2)))
    _until_left(runtime)
    # the cross cache differs from slot to slot, so only the first one can be compared with itself alone
    assert got[1] == alone[0]
    assert all(len(tokens) == len(alone[0]) for tokens in got.values())


def test_a_cancelled_slot_is_done_and_the_next_request_takes_it(setup: Setup) -> None:
    runtime = setup.runtime()
    runtime.open(0, request(max_tokens=60))
    runtime.cancel(0)
    runtime.burst()
    done = [record for record in _until_done(runtime) if isinstance(record, DoneRecord)]
    assert [record.reason for record in done] == [EndReason.CANCELLED]
    again = run(runtime, [request()])
    assert len(tokens_of(again[0])) == 20


def test_after_a_stall_every_token_comes_once(setup: Setup) -> None:
    marked = request(markers=True, max_first_mark=5, rules=FEW_WORDS)
    requests = [request(head=(1, 2)), *(replace(marked, head=(slot + 1, 2)) for slot in (1, 2))]
    undisturbed = run(setup.runtime(), requests)
    runtime = setup.runtime()
    runtime.inject_stall(sm=7, step=9)
    disturbed = run(runtime, requests)
    assert [tokens_of(records) for records in disturbed] == [tokens_of(records) for records in undisturbed]
    assert [_segments(records) for records in disturbed] == [_segments(records) for records in undisturbed]
    assert all(_segments(records) for records in disturbed[1:])
    assert len(runtime.faults) == 1
    assert runtime.mode is Mode.LOOP


def test_after_two_faults_in_a_row_it_goes_on_one_phase_a_launch(setup: Setup) -> None:
    (undisturbed,) = run(setup.runtime(), [request()])
    runtime = setup.runtime()
    for sm in (3, 4):
        runtime.inject_stall(sm=sm, step=2)
    (got,) = run(runtime, [request()])
    assert tokens_of(got) == tokens_of(undisturbed)
    assert len(runtime.faults) == 2
    assert runtime.mode is Mode.GRAPH


def test_the_scores_that_are_kept_are_those_of_the_reference(setup: Setup) -> None:
    requests = [request(max_tokens=4)]
    run(setup.runtime(), requests)
    sizes = setup.graph.sizes
    network = network_of(setup.launcher.program.ops, sizes, setup.constants)
    memory = Memory.empty(sizes, network.n_score_heads)
    memory.cross_cache[:] = setup.cross
    run_requests(network, memory, requests, setup.bitmaps)
    rows = slice(0, len(requests[0].head) + 1)  # behind these the tokens may differ
    got = setup.launcher.buffers.scores[0, :, rows, :290].cpu().numpy()
    np.testing.assert_allclose(got, memory.scores[0, :, rows, :290], atol=0.05)


def _segments(records: Sequence[SlotRecord]) -> list[tuple[int, int]]:
    return [(record.first, record.n_tokens) for record in records if isinstance(record, SegmentRecord)]


def _until_done(runtime: Runtime) -> list[SlotRecord]:
    records: list[SlotRecord] = []
    while runtime.n_open:
        records += runtime.wait(TIMEOUT_S)
    _until_left(runtime)
    return records


def _until_left(runtime: Runtime) -> None:
    while runtime.is_running:
        assert runtime.records() == []
