"""The token loop's kernel, compiled for the processor: what it decodes is what ``evaluate`` decodes."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megakernel.compile import compile_program
from megakernel.graph import Graph
from megakernel.interpreter import device_memory
from megakernel.mailbox import DoneRecord, SlotRecord, TokenRecord
from megakernel.numbers import round_bf16
from megakernel.request import Request
from megakernel.runtime import Runtime
from megakernel.target import Target
from tests.megakernel.conftest import Decoder, random_constants
from tests.megakernel.emulator import COMPILER, EmulatedLoop
from tests.megakernel.running import records_of

TOLERANCE = 0.03  # of a log-probability: sums are in another order
PLAIN = Request(head=(3, 14, 15), max_tokens=6, n_positions=290)


class Device:
    """A decoder for three SMs, on the processor and as ``evaluate`` has it."""

    def __init__(self, graph: Graph, folder: Path) -> None:
        program = compile_program(graph, Target("three", "sm_80", 3, 232_448))
        sizes, draws = program.sizes, np.random.default_rng(3)
        constants, bitmaps = random_constants(graph, 3), np.zeros((1, 2, -(-sizes.n_tokens // 32)), np.uint32)
        cross = (sizes.max_slots, sizes.n_layers, 2, sizes.width // 64, sizes.n_cross_positions, 64)
        cross_cache = round_bf16(draws.standard_normal(cross, np.float32))
        self.decoder = Decoder(program, constants, bitmaps, cross_cache)
        self._launcher = EmulatedLoop(program, device_memory(program, constants, bitmaps, cross_cache), folder)
        self.runtime = Runtime(program, self._launcher, n_rules=1)

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
