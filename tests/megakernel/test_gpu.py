"""The kernel on a GPU: what it computes, and what it does when it is disturbed.

A decoder of two layers with random weights stands for every model; ``evaluate`` says what it should decode. The GPU
adds up in another order, so log-probabilities are compared by tolerance, and tokens as far as the best one is clear.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

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
from megakernel.isa import EndReason, RecordKind
from megakernel.launcher import Launcher, Mode
from megakernel.mailbox import DoneRecord, SegmentRecord, SlotRecord, TokenRecord
from megakernel.request import Request
from megakernel.runtime import Runtime
from megakernel.selftest import ensure_right

pytestmark = pytest.mark.gpu

TOLERANCE = 0.03  # of a log-probability: some bfloat16 roundings fall the other way
TIMEOUT_S = 20.0

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
def setup(
    device: Device,
    tiny_graph: Callable[..., Graph],
    random_constants: Callable[[Graph, int], Constants],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Setup]:
    n_tokens = 8 * device.n_sms + 200  # each SM has some
    graph = tiny_graph(n_layers=2, n_tokens=n_tokens, mark_begin=n_tokens - 100)
    constants = random_constants(graph, 11)
    sizes = graph.sizes
    program = compile_program(graph, target_for(device))
    bitmaps = np.zeros((2, 2, bitmap_words(sizes.n_tokens)), np.uint32)
    bitmaps[1, :, 0] = 0xF0F0F0F0
    tensors = {name: torch.from_numpy(array) for name, array in constants.items()}
    cache: Path = tmp_path_factory.mktemp("cache")
    launcher = Launcher.load(program, tensors, bitmaps, device=device, cache=cache)
    rng = np.random.default_rng(5)
    cross = torch.from_numpy(rng.standard_normal(tuple(launcher.buffers.cross_cache.shape), dtype=np.float32))
    launcher.buffers.cross_cache.copy_(cross)
    torch.cuda.synchronize()
    yield Setup(graph, constants, bitmaps, cross.bfloat16().float().numpy(), launcher)
    launcher.close()


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


def reference(setup: Setup, requests: Sequence[Request]) -> list[Tokens]:
    """What ``evaluate`` decodes."""
    sizes = setup.graph.sizes
    network = network_of(setup.launcher.program.ops, sizes, setup.constants)
    memory = Memory.empty(sizes, network.n_score_heads)
    memory.cross_cache[:] = setup.cross
    told = run_requests(network, memory, requests, setup.bitmaps)
    return [
        [(each.token, float(each.value)) for each in told if each.kind is RecordKind.TOKEN and each.slot == slot]
        for slot in range(len(requests))
    ]


def assert_close(got: Tokens, expected: Tokens) -> None:
    """The same tokens with nearly the same log-probabilities, up to a place where two tokens are equally good."""
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
    got = [tokens_of(records) for records in run(setup.runtime(), requests)]
    for one, expected in zip(got, reference(setup, requests), strict=True):
        assert_close(one, expected)


def test_it_obeys_markers_prefixes_and_bitmaps_as_the_reference_does(setup: Setup) -> None:
    begin = setup.graph.sizes.mark_begin
    requests = [
        request(markers=True, max_first_mark=10),
        request(prefix=(begin, 5, 6), markers=True, max_first_mark=10, rules=1),
        request(n_positions=100, n_plain=40, tail_bias=-1.5, watch_row=0, watch_token=7),
        request(inverse_temperature=0.8, seed=9),
    ]
    records = run(setup.runtime(), requests)
    for one, expected in zip(records, reference(setup, requests), strict=True):
        assert_close(tokens_of(one), expected)
    assert any(isinstance(record, SegmentRecord) for record in records[0])


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
    requests = [request(head=(slot + 1, 2), markers=slot > 0, max_first_mark=5) for slot in range(3)]
    undisturbed = run(setup.runtime(), requests)
    runtime = setup.runtime()
    runtime.inject_stall(sm=7, step=9)
    disturbed = run(runtime, requests)
    assert [tokens_of(records) for records in disturbed] == [tokens_of(records) for records in undisturbed]
    assert [_segments(records) for records in disturbed] == [_segments(records) for records in undisturbed]
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
