"""What is refused before anything reaches a GPU. The launches themselves are tested on one."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from megakernel.compile import compile_program
from megakernel.cubin import bitmap_words
from megakernel.device import Device
from megakernel.errors import NoDeviceError, RequestError, WrongProgramError
from megakernel.graph import Graph
from megakernel.isa import LOOP_WARPS, TILE_BYTES
from megakernel.launcher import Launcher, dynamic_shared_bytes
from megakernel.program import Program
from megakernel.target import KNOWN, MAX_RING_TILES, Target

GPU = Device(0, "a GPU", (9, 0), 5, 232_448, 1 << 30, True, 13000)


@pytest.fixture(scope="module")
def program(tiny_graph: Callable[..., Graph]) -> Program:
    return compile_program(tiny_graph(), Target("five", "sm_90a", 5, 232_448))


def load(program: Program, device: Device, *, n_words: int | None = None) -> Launcher:
    bitmaps = np.zeros((1, 2, n_words or bitmap_words(program.sizes.n_tokens)), np.uint32)
    return Launcher.load(program, {}, bitmaps, device=device, cache=None)


@pytest.mark.parametrize(
    "other", [replace(GPU, capability=(8, 0)), replace(GPU, n_sms=4), replace(GPU, shared_bytes=166_912)]
)
def test_a_program_for_another_gpu_is_refused(program: Program, other: Device) -> None:
    with pytest.raises(WrongProgramError, match="was made for sm_90a, 5 SMs and 232448 bytes"):
        load(program, other)


def test_bitmaps_of_another_vocabulary_are_refused(program: Program) -> None:
    with pytest.raises(RequestError, match=r"uint32 of \[rules, 2, 4\], not uint32 of \(1, 2, 5\)"):
        load(program, GPU, n_words=5)


def test_torch_without_a_gpu_is_no_device(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(NoDeviceError, match="this torch was built without CUDA or finds no GPU"):
        load(program, GPU)


@pytest.mark.parametrize("n_layers", [1, 20])  # the second one's records need more than the usual room
@pytest.mark.parametrize("target", KNOWN, ids=lambda target: target.arch)
def test_a_launch_asks_for_all_shared_memory_that_its_ring_can_use(
    tiny_graph: Callable[..., Graph], target: Target, n_layers: int
) -> None:
    program = compile_program(tiny_graph(n_layers=n_layers, n_tokens=1500, mark_begin=1400), target)
    one_more = dynamic_shared_bytes(program) + LOOP_WARPS * TILE_BYTES
    assert dynamic_shared_bytes(program) <= target.shared_bytes
    assert program.ring_tiles == MAX_RING_TILES or one_more > target.shared_bytes
