"""The token loop's kernel, compiled for the processor: what it decodes is what ``evaluate`` decodes."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megakernel.compile import compile_program
from megakernel.graph import Graph
from megakernel.interpreter import device_memory
from megakernel.isa import Parameter
from megakernel.mailbox import DoneRecord, SlotRecord, TokenRecord
from megakernel.numbers import round_bf16
from megakernel.request import Request
from megakernel.runtime import Runtime
from megakernel.target import Target
from tests.megakernel.conftest import Decoder, random_constants
from tests.megakernel.emulator import COMPILER, EmulatedLoop
from tests.megakernel.running import records_of

TOLERANCE = 0.03  # of a log-probability: sums are in another order
THREE = Target("three", "sm_80", 3, 232_448)
# Attention keeps four results at a time, and one SM has all units; a group of sixteen warps takes one granule and two.
CASES: dict[str, tuple[Target, dict[str, Any]]] = {
    "four results": (
        Target("one", "sm_86", 1, 101_376, max_rows=8),
        {"n_layers": 2, "dumped_heads": (0, 1)},
    ),
    "sixteen warps": (Target("three", "sm_80", 3, 232_448), {"wide": 1536, "dumped_heads": (0,)}),
}
ORDERS = (1, 12)  # in the second a warp read the next step's number of rows, until a SELECT without rows waited for all
PLAIN = Request(head=(3, 14, 15), max_tokens=6, n_positions=290)


class Device:
    """A decoder for a few SMs, on the processor and as ``evaluate`` has it."""

    def __init__(self, graph: Graph, folder: Path, target: Target = THREE) -> None:
        program = compile_program(graph, target)
        sizes, draws = program.sizes, np.random.default_rng(3)
        constants, bitmaps = random_constants(graph, 3), np.zeros((1, 2, -(-sizes.n_tokens // 32)), np.uint32)
        cross = (sizes.max_slots, sizes.n_layers, 2, sizes.width // 64, sizes.n_cross_positions, 64)
        cross_cache = round_bf16(draws.standard_normal(cross, np.float32))
        self.decoder = Decoder(program, constants, bitmaps, cross_cache)
        self.launcher = EmulatedLoop(program, device_memory(program, constants, bitmaps, cross_cache), folder)
        self.runtime = Runtime(program, self.launcher, n_rules=1)

    def run(self, requests: Sequence[Request]) -> list[list[SlotRecord]]:
        """Records of each request, one a slot."""
        return list(records_of(self.runtime, dict(enumerate(requests))).values())


@pytest.fixture(scope="module")
def device(tiny_graph: Callable[..., Graph], tmp_path_factory: pytest.TempPathFactory) -> Device:
    if COMPILER is None:
        pytest.skip("no g++")
    return Device(tiny_graph(), tmp_path_factory.mktemp("kernel"))


def tokens_of(records: Sequence[object]) -> list[tuple[int, float]]:
    return [(record.token, record.log_probability) for record in records if isinstance(record, TokenRecord)]


def test_one_row_several_and_all_of_them_write_what_evaluate_writes(device: Device) -> None:
    for n_requests in (1, 3, 8):
        requests = [replace(PLAIN, head=(3 + slot, 14, 15)[: 1 + slot % 3]) for slot in range(n_requests)]
        expected, _ = device.decoder.evaluate(requests)
        for slot, records in enumerate(device.run(requests)):
            wanted = tokens_of([record for record in expected if getattr(record, "slot", None) == slot])
            got = tokens_of(records)
            assert [token for token, _ in got] == [token for token, _ in wanted]
            for (_, log_probability), (_, wanted_one) in zip(got, wanted, strict=True):
                assert log_probability == pytest.approx(wanted_one, abs=TOLERANCE)


def test_a_rows_bits_depend_neither_on_a_draft_nor_on_neighbours(device: Device) -> None:
    alone = tokens_of(device.run([PLAIN])[0])
    draft = tuple(token for token, _ in alone)
    for other in (draft, (*draft[:2], 1, *draft[3:])):
        assert tokens_of(device.run([replace(PLAIN, draft=other)])[0]) == alone
    together = device.run([PLAIN, *(replace(PLAIN, head=(slot, 2)) for slot in range(1, 8))])
    assert tokens_of(together[0]) == alone
    assert device.runtime.faults == []


def test_a_draft_that_goes_wrong_goes_on_where_evaluate_has_it_go_on(device: Device) -> None:
    rng = random.Random(7)
    text = {token for token, _ in tokens_of(device.run([replace(PLAIN, prefix=(2, 6))])[0])}
    for _ in range(12):
        draft = tuple(rng.choice([*text, 1, 2]) for _ in range(rng.randint(1, 14)))
        asked = replace(PLAIN, prefix=(2, 6), max_tokens=12, draft=draft)
        expected, _ = device.decoder.evaluate([asked])
        done, wanted = device.run([asked])[0][-1], expected[-1]
        assert isinstance(done, DoneRecord) and isinstance(wanted, DoneRecord)
        assert done.n_verified == wanted.n_verified


def test_rules_markers_and_temperatures_are_those_of_evaluate(device: Device) -> None:
    rng = random.Random(5)
    for _ in range(4):
        requests = [device.decoder.request(rng, max_tokens=4) for _ in range(rng.randint(1, 6))]
        expected, _ = device.decoder.evaluate(requests)
        for slot, records in enumerate(device.run(requests)):
            wanted = [record for record in expected if getattr(record, "slot", None) == slot]
            assert [token for token, _ in tokens_of(records)] == [token for token, _ in tokens_of(wanted)]
            assert [type(record) for record in records] == [type(record) for record in wanted]


def test_warps_that_stand_still_for_a_while_change_nothing(device: Device) -> None:
    requests = [replace(PLAIN, max_tokens=2), replace(PLAIN, head=tuple(range(57)), max_tokens=3, draft=(14, 15))]
    in_turn = [tokens_of(records) for records in device.run(requests)]
    try:
        for order in ORDERS:
            device.launcher.order = order
            assert [tokens_of(records) for records in device.run(requests)] == in_turn
    finally:
        device.launcher.order = 0
    assert device.runtime.faults == []


@pytest.mark.skipif(COMPILER is None, reason="no g++")
@pytest.mark.parametrize("case", CASES)
def test_rows_over_a_blocks_border_and_short_slots_beside_them_are_those_of_evaluate(
    tiny_graph: Callable[..., Graph], tmp_path: Path, case: str
) -> None:
    target, given = CASES[case]
    device = Device(tiny_graph(**given), tmp_path, target)
    fed = tuple(position * 7 % 79 for position in range(55))
    requests = [
        Request(head=fed, max_tokens=15, n_positions=257, draft=fed[:14]),
        Request(head=(3, 14), max_tokens=3, n_positions=1),
        Request(head=fed[9:30], max_tokens=1, n_positions=299, n_plain=100, tail_bias=0.5),
    ]
    expected, memory = device.decoder.evaluate(requests)
    together = [tokens_of(records) for records in device.run(requests)]
    scores = device.launcher.array(Parameter.SCORES).view(np.float32)[: memory.scores.size].reshape(memory.scores.shape)
    for slot, request in enumerate(requests):
        wanted = tokens_of([record for record in expected if getattr(record, "slot", None) == slot])
        assert [token for token, _ in together[slot]] == [token for token, _ in wanted]
        assert [x for _, x in together[slot]] == pytest.approx([x for _, x in wanted], abs=TOLERANCE)
        of_head = slice(None), slice(len(request.head)), slice(request.n_positions)
        np.testing.assert_allclose(scores[slot][of_head], memory.scores[slot][of_head], atol=0.05)
    assert tokens_of(device.run(requests[:1])[0]) == together[0]
    assert device.runtime.faults == []
