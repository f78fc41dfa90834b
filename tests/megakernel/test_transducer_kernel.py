"""The transducer's kernel under its runtime: on a GPU where there is one, and compiled for the processor everywhere."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from megakernel.compile import compile_program
from megakernel.cubin import bitmap_words
from megakernel.device import find_device, target_for
from megakernel.errors import FaultError, NoDeviceError
from megakernel.isa import EndReason
from megakernel.launcher import Launcher, TransducerBuffers
from megakernel.mailbox import DoneRecord, EmissionRecord, PartRecord, SlotRecord
from megakernel.program import Program
from megakernel.request import FramePart, TransducerRequest
from megakernel.runtime import Runtime
from megakernel.selftest_transducer import compare
from megakernel.target import Target
from megakernel.transducer_header import MAX_KERNEL_ROWS
from tests.megakernel.emulator import COMPILER, EmulatedLauncher
from tests.megakernel.running import records_of
from tests.megakernel.transducers import (
    Constants,
    evaluated,
    random_constants,
    random_frames,
    tiny_transducer,
)

# One whose tape stays in shared memory as a whole, and one that has room for a part of it.
EMULATED = {"resident": (5, 166_912), "partly resident": (2, 166_912)}


@dataclass(frozen=True, slots=True, eq=False)
class Device:
    """A runtime, and the memory of its slots."""

    program: Program
    constants: Constants
    runtime: Runtime
    buffers: TransducerBuffers

    def run(self, requests: dict[int, TransducerRequest]) -> dict[int, list[SlotRecord]]:
        """Records of each slot."""
        return records_of(self.runtime, requests)


def emulated(kind: str, folder: Path) -> Device:
    n_sms, shared_bytes = EMULATED[kind]
    graph = tiny_transducer()
    program = compile_program(graph, Target(kind, "sm_80", n_sms, shared_bytes, MAX_KERNEL_ROWS))
    constants = random_constants(graph, 1)
    launcher = EmulatedLauncher(program, constants, folder)
    memory = launcher.memory
    buffers = TransducerBuffers(
        frames=torch.from_numpy(memory.frames.view(np.int16)).view(torch.bfloat16),
        state_in=torch.from_numpy(memory.state_in),
        state_out=torch.from_numpy(memory.state_out),
    )
    return Device(program, constants, Runtime(program, launcher, n_rules=1), buffers)


def on_gpu() -> Device:
    try:
        device = find_device()
    except NoDeviceError as error:
        pytest.skip(str(error))
    graph = tiny_transducer(n_tokens=8 * device.n_sms + 3)
    program, constants = (
        compile_program(graph, replace(target_for(device), max_rows=MAX_KERNEL_ROWS)),
        random_constants(graph, 1),
    )
    tensors = {name: torch.from_numpy(value) for name, value in constants.items()}
    no_rules = np.zeros((1, 2, bitmap_words(graph.sizes.n_tokens)), np.uint32)
    launcher = Launcher.load(program, tensors, no_rules, device=device, cache=None)
    assert launcher.buffers.transducer is not None
    return Device(program, constants, Runtime(program, launcher, n_rules=1), launcher.buffers.transducer)


@pytest.fixture(scope="module", params=[*EMULATED, pytest.param("gpu", marks=pytest.mark.gpu)], name="device")
def device_fixture(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Device]:
    if request.param == "gpu":
        device = on_gpu()
    elif COMPILER is None:
        pytest.skip("no compiler for this machine's processor")
    else:
        device = emulated(request.param, tmp_path_factory.mktemp("kernel"))
    device.buffers.frames.copy_(torch.from_numpy(random_frames(tiny_transducer(), 3)))
    yield device
    device.runtime.close()


def state_of(device: Device, slot: int) -> Tensor:
    return device.buffers.state_out[slot].clone().cpu()


def one(seat: int, part: FramePart) -> TransducerRequest:
    return TransducerRequest((replace(part, seat=seat),))


REQUESTS = {
    0: one(0, FramePart(24, 0, begins=True)),
    2: one(2, FramePart(20, 3, begins=True)),
    3: one(3, FramePart(9, 0, begins=True)),
    5: one(5, FramePart(1, 0, begins=True)),
    6: one(6, FramePart(0, 0, begins=True)),
}


def same(first: Sequence[SlotRecord], second: Sequence[SlotRecord]) -> bool:
    """Whether the same was said, whatever its ticket and step."""
    return [key(record) for record in first] == [key(record) for record in second]


def key(record: SlotRecord) -> tuple[object, ...]:
    if isinstance(record, EmissionRecord):
        return record.token, record.frame, record.duration, record.log_probability
    if isinstance(record, PartRecord):
        return EndReason.FRAMES, record.n_past
    assert isinstance(record, DoneRecord)
    return record.reason, record.n_verified


def test_the_kernel_says_what_torch_and_the_evaluation_say(device: Device) -> None:
    records = device.run(REQUESTS)
    tensors = {name: torch.from_numpy(value) for name, value in device.constants.items()}
    for slot, request in REQUESTS.items():
        said = [record for record in records[slot] if isinstance(record, EmissionRecord)]
        (part,) = request.parts
        if part.first_frame == 0:
            compare(device.program, tensors, device.buffers.frames[slot, : part.n_frames].float().cpu(), said)
        assert isinstance(records[slot][-1], DoneRecord)
    frames = device.buffers.frames.float().cpu().numpy()
    state_in = device.buffers.state_in.cpu().numpy()
    every = [REQUESTS.get(slot, one(slot, FramePart(0, begins=True))) for slot in range(8)]
    told, memory = evaluated(device.program, device.constants, frames, every, state_in)
    for slot in REQUESTS:
        expected = [record for record in told if isinstance(record, EmissionRecord) and record.slot == slot]
        found = [record for record in records[slot] if isinstance(record, EmissionRecord)]
        assert [(r.token, r.frame, r.duration) for r in found] == [(r.token, r.frame, r.duration) for r in expected]
        for mine, other in zip(found, expected, strict=True):
            assert mine.log_probability == pytest.approx(other.log_probability, abs=0.02)
        np.testing.assert_allclose(state_of(device, slot).numpy(), memory.state_out[slot], atol=0.02)


def test_a_slot_says_the_same_whoever_is_beside_it(device: Device) -> None:
    together = device.run(REQUESTS)
    states = {slot: state_of(device, slot) for slot in REQUESTS}
    for slot in (0, 3):
        alone = device.run({slot: REQUESTS[slot]})
        assert same(alone[slot], together[slot])
        assert torch.equal(state_of(device, slot), states[slot])


def test_a_slot_takes_one_seat_after_the_other(device: Device) -> None:
    apart = device.run(REQUESTS)
    states = {seat: state_of(device, seat) for seat in REQUESTS}
    (first, *others) = (request.parts[0] for request in REQUESTS.values())
    queued = device.run({1: TransducerRequest((first,)), 7: TransducerRequest(tuple(others))})
    expected = [key(record) for seat in REQUESTS if seat != first.seat for record in apart[seat]]
    assert same(queued[1], apart[first.seat])
    assert [key(record) for record in queued[7]] == expected
    assert all(torch.equal(state_of(device, seat), states[seat]) for seat in REQUESTS)


def test_a_part_that_continues_says_what_one_piece_says_and_leaves_the_state_before_it(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = device.run({0: REQUESTS[0]})[0]
    behind = state_of(device, 0)
    frames = device.buffers.frames[0].clone()
    for cut in (0, 9, 24):
        for n_steps in (1024, 2):
            monkeypatch.setattr("megakernel.runtime.MAX_STEPS", n_steps)
            before = device.run({1: one(0, FramePart(cut, begins=True))})[1]
            state = state_of(device, 0)
            device.buffers.frames[4, : 24 - cut] = frames[cut:24]
            parts = (FramePart(cut, begins=True), FramePart(24 - cut, seat=4, continues=True))
            said = device.run({1: TransducerRequest(parts)})[1]
            (ended,) = [index for index, record in enumerate(said) if isinstance(record, PartRecord)]
            tokens = [key(record) for record in said[:ended]]
            tokens += [(t, f + cut, d, p) for t, f, d, p in map(key, said[ended + 1 : -1])]  # type: ignore[misc]
            assert tokens == [key(record) for record in whole[:-1]]
            assert key(said[ended])[1] == key(before[-1])[1] and key(said[-1])[1] == key(whole[-1])[1]
            assert torch.equal(state_of(device, 0), state)
            if any(isinstance(record, EmissionRecord) for record in said[ended:]):
                assert torch.equal(state_of(device, 4), behind)


def test_frames_may_be_cut_anywhere(device: Device) -> None:
    whole = device.run({0: REQUESTS[0]})[0]
    state = state_of(device, 0)
    frames = device.buffers.frames[0].clone()
    said: list[tuple[object, ...]] = []
    jump, begin = 0, 0
    for end in (1, 2, 7, 15, 24):
        device.buffers.frames[4, : end - begin] = frames[begin:end]
        n_frames = end - begin
        if jump >= n_frames:
            jump -= n_frames
        else:
            *emitted, done = device.run({4: one(4, FramePart(n_frames, jump, begins=begin == 0))})[4]
            said += [(t, f + begin, d, p) for t, f, d, p in map(key, emitted)]  # type: ignore[operator]
            assert isinstance(done, DoneRecord)
            jump = done.n_verified
            device.buffers.state_in[4] = device.buffers.state_out[4]
        begin = end
    assert said == [key(record) for record in whole[:-1]]
    assert jump == whole[-1].n_verified  # type: ignore[union-attr]
    assert torch.equal(state_of(device, 4), state)


def test_leaving_after_every_few_steps_changes_nothing(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = device.run(REQUESTS)
    states = {slot: state_of(device, slot) for slot in REQUESTS}
    for n_steps in (2, 3):
        monkeypatch.setattr("megakernel.runtime.MAX_STEPS", n_steps)
        parts = device.run(REQUESTS)
        assert all(same(parts[slot], whole[slot]) for slot in REQUESTS)
        assert all(torch.equal(state_of(device, slot), states[slot]) for slot in REQUESTS)


def test_a_stalled_sm_is_found_and_every_token_comes_once(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megakernel.runtime.SPIN_NS", 50_000_000 if device.buffers.frames.is_cuda else 3000 << 10)
    whole = device.run(REQUESTS)
    device.runtime.inject_stall(sm=1, step=3)
    again = device.run(REQUESTS)
    assert len(device.runtime.faults) == 1
    device.runtime.faults.clear()
    assert all(same(again[slot], whole[slot]) for slot in REQUESTS)


def test_two_faults_in_a_row_are_the_end_since_there_is_no_other_way_to_run(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megakernel.runtime.SPIN_NS", 50_000_000 if device.buffers.frames.is_cuda else 3000 << 10)
    runtime = Runtime(device.program, device.runtime._launches, n_rules=1)  # the last to use these launches
    for _ in range(2):
        runtime.inject_stall(sm=0, step=1)
    runtime.open(0, REQUESTS[0])
    runtime.burst()
    with pytest.raises(FaultError, match="2 times in a row"):
        while runtime.n_open:
            runtime.wait(1.0)
