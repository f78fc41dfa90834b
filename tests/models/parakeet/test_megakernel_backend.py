"""Streams through the slots of a small transducer's kernel, compiled for this machine's processor."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from torch import Tensor

from megakernel.compile import compile_program
from megakernel.device import Device, target_for
from megakernel.errors import FaultError, SelfTestError
from megakernel.launcher import TransducerBuffers
from megakernel.mailbox import Record
from megakernel.request import FramePart, TransducerRequest
from megakernel.runtime import Runtime
from megakernel.selftest_transducer import compare
from megakernel.target import Target
from megakernel.transducer_header import MAX_KERNEL_ROWS
from models.backends import BackendError
from models.parakeet.backend import TorchBackend
from models.parakeet.config import ParakeetConfig
from models.parakeet.graph import PROJECTOR, graph_constants, transducer_graph
from models.parakeet.greedy import Emission, Piece, TorchDecoder, TransducerState, ahead_in_two
from models.parakeet.loading import read_model
from models.parakeet.megakernel_backend import MegakernelDecoder, share_out, usual_target
from models.parakeet.reference import Parakeet
from models.store import find_model, recording
from tests.megakernel.emulator import COMPILER, EmulatedLauncher

CONFIG = ParakeetConfig(128, 1, 128, 2, 256, 9, 32, 128, 2, 45, 44, max_symbols=3)
N_FRAMES = 16  # of a slot

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no compiler for this machine's processor")


@pytest.fixture(scope="module", name="model")
def model_fixture() -> Parakeet:
    torch.manual_seed(0)
    model = Parakeet(CONFIG).eval()
    with torch.no_grad():
        model.joint.head.weight.mul_(3)
        model.joint.head.bias[CONFIG.blank_id] += 2
        model.decoder.embedding.weight[CONFIG.blank_id] = 0
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    return model


@pytest.fixture(scope="module", name="decoder")
def decoder_fixture(model: Parakeet, tmp_path_factory: pytest.TempPathFactory) -> MegakernelDecoder:
    return emulated_decoder(model, tmp_path_factory.mktemp("kernel"))


def emulated_decoder(model: Parakeet, folder: Path, *, n_frames: int = N_FRAMES) -> MegakernelDecoder:
    graph = transducer_graph(model.config, n_frames=n_frames, n_seats=9)
    program = compile_program(graph, Target("three", "sm_80", 3, 166_912, MAX_KERNEL_ROWS))
    constants = graph_constants(graph, model.state_dict())
    launcher = EmulatedLauncher(program, {name: value.numpy() for name, value in constants.items()}, folder)
    memory = launcher.memory
    buffers = TransducerBuffers(
        frames=torch.from_numpy(memory.frames.view(np.int16)).view(torch.bfloat16),
        state_in=torch.from_numpy(memory.state_in),
        state_out=torch.from_numpy(memory.state_out),
    )
    runtime = Runtime(program, launcher, n_rules=1, idle_ns=0)
    return MegakernelDecoder(runtime, buffers, (constants[f"{PROJECTOR}.weight"], constants[f"{PROJECTOR}.bias"]))


def random_frames(n_frames: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(n_frames, CONFIG.d_predictor, generator=generator) * 2).bfloat16().float()


def what(emissions: Sequence[Emission]) -> list[tuple[int, int, int]]:
    return [(one.token_id, one.frame, one.duration) for one in emissions]


def test_streams_say_what_they_say_in_torch(model: Parakeet, decoder: MegakernelDecoder) -> None:
    """More streams than slots, some longer than a slot, one of no frames. Rounding decides none of these."""
    frames = [random_frames(n, seed) for seed, n in enumerate((20, 7, 0, 33, 1, 16, 5, 9, 12, 4))]
    reference = TorchDecoder(model)
    expected = reference.decode([(each, reference.start()) for each in frames])
    found = decoder.decode([(each, decoder.start()) for each in frames])
    n_emissions = 0
    for (emissions, state), (others, other) in zip(found, expected, strict=True):
        assert what(emissions) == what(others)
        assert [one.logprob for one in emissions] == pytest.approx([one.logprob for one in others], abs=0.05)
        assert state.time_jump == other.time_jump
        for mine, theirs in (
            (state.hidden, other.hidden),
            (state.cell, other.cell),
            (state.projected, other.projected),
        ):
            torch.testing.assert_close(mine, theirs, atol=0.02, rtol=0)
        n_emissions += len(emissions)
    assert n_emissions > 20


def test_cutting_frames_anywhere_changes_no_bit(decoder: MegakernelDecoder) -> None:
    frames = random_frames(30, 100)
    ((whole, behind),) = decoder.decode([(frames, decoder.start())])
    state, said, begin = decoder.start(), list[Emission](), 0
    for end in (1, 2, 4, 13, 14, 27, 30):
        before = [part.clone() for part in (state.hidden, state.cell, state.projected)]
        ((emissions, after),) = decoder.decode([(frames[begin:end], state)])
        assert all(map(torch.equal, before, (state.hidden, state.cell, state.projected)))  # a value is never changed
        said += [replace(one, frame=one.frame + begin) for one in emissions]
        state, begin = after, end
    assert said == whole
    assert torch.equal(state.hidden, behind.hidden) and torch.equal(state.cell, behind.cell)
    assert torch.equal(state.projected, behind.projected) and state.time_jump == behind.time_jump


def test_what_lies_ahead_is_said_in_the_same_launch_and_changes_no_state(decoder: MegakernelDecoder) -> None:
    lengths = [(4, 13), (0, 9), (3, 0), (1, 1), (33, 16), (9, 5), (4, 13), (2, 2), (16, 12), (5, 16), (0, 0), (1, 3)]
    frames = [random_frames(sum(both), seed) for seed, both in enumerate(lengths)]
    state = decoder.start()
    pieces = [
        Piece(each[:n], replace(state, time_jump=seed % 4), each[n:])
        for seed, (each, (n, _)) in enumerate(zip(frames, lengths, strict=True))
    ]
    expected = ahead_in_two(decoder, pieces)
    n_ahead = 0
    for found, other in zip(decoder.decode_ahead(pieces), expected, strict=True):
        assert (found.emissions, found.ahead) == (other.emissions, other.ahead)
        assert found.state.time_jump == other.state.time_jump
        assert torch.equal(found.state.hidden, other.state.hidden) and torch.equal(found.state.cell, other.state.cell)
        torch.testing.assert_close(found.state.projected, other.state.projected)
        n_ahead += len(found.ahead)
    assert n_ahead > 20
    (longer,) = decoder.decode_ahead([Piece(frames[0][:4], state, random_frames(20, 0))])
    assert longer.emissions == expected[0].emissions


def test_frames_that_are_passed_over_ask_the_device_for_nothing(decoder: MegakernelDecoder) -> None:
    state = replace(decoder.start(), time_jump=5)
    ((emissions, after),) = decoder.decode([(random_frames(3, 0), state)])
    assert not emissions and after.time_jump == 2
    assert after.hidden is state.hidden


def test_the_small_model_says_of_real_speech_what_it_says_in_torch(tmp_path: Path) -> None:
    model, _ = read_model(find_model("parakeet-tiny"))
    samples, _ = soundfile.read(recording("beckett"), dtype="float32")
    (frames,) = TorchBackend(model, max_buffers=1, max_frames=160).listen([samples])
    reference, decoder = TorchDecoder(model), emulated_decoder(model, tmp_path, n_frames=128)
    ((expected, _),) = reference.decode([(frames, reference.start())])
    ((found, _),) = decoder.decode([(frames, decoder.start())])
    assert len(found) > 20
    assert what(found) == what(expected)


def test_a_model_of_few_tokens_leaves_the_sms_alone_that_would_have_none() -> None:
    device = Device(0, "NVIDIA H200", (9, 0), 132, 232_448, 1 << 37, is_cooperative=True, driver=13_000)
    small = replace(CONFIG, vocabulary_size=257, blank_id=256)
    assert usual_target(device, small).n_sms == 34
    compile_program(transducer_graph(small, n_frames=8, n_seats=1), usual_target(device, small))
    large = replace(CONFIG, vocabulary_size=8193, blank_id=8192)
    assert usual_target(device, large) == replace(target_for(device), max_rows=MAX_KERNEL_ROWS)


def test_pieces_are_shared_out_evenly_and_no_slot_is_empty() -> None:
    slots = share_out([4, 4, 30, 1, 9, 4, 4, 4, 4, 4], 4)
    assert sorted(index for own in slots for index in own) == list(range(10))
    assert slots[0] == [2]
    assert share_out([0, 0, 0], 8) == [[0], [1], [2]]


class Broken:
    """A runtime whose device gives up."""

    def open(self, slot: int, request: TransducerRequest, *, after: object = None) -> int:
        return 1

    def burst(self) -> None: ...

    def finish(self, timeout_s: float) -> Sequence[Record]:
        raise FaultError("TIMEOUT on SM 3")

    def leave(self) -> None: ...

    def close(self) -> None:
        raise FaultError("the kernel does not leave")


def test_a_device_that_gives_up_is_a_reason_to_take_another_backend(decoder: MegakernelDecoder) -> None:
    broken = MegakernelDecoder(Broken(), decoder._buffers, decoder._projector)
    state = TransducerState(torch.zeros(2, 128), torch.zeros(2, 128), torch.zeros(128))
    with pytest.raises(BackendError, match="TIMEOUT on SM 3"):
        broken.decode([(random_frames(3, 0), state)])
    broken.close()  # says so in the log, and does not raise


def test_the_self_test_accepts_the_kernel_and_finds_a_wrong_weight(model: Parakeet, decoder: MegakernelDecoder) -> None:
    frames = random_frames(12, 7)
    ((emissions, _),) = decoder.decode([(frames, decoder.start())])
    runtime = decoder._runtime
    assert isinstance(runtime, Runtime)
    records = [record for record in _again(runtime, decoder, frames) if record.__class__.__name__ == "EmissionRecord"]
    assert len(records) == len(emissions)
    constants = graph_constants(transducer_graph(CONFIG, n_frames=N_FRAMES, n_seats=9), model.state_dict())
    program = runtime._program
    compare(program, constants, frames, records)  # type: ignore[arg-type]
    wrong = constants | {"joint.head.weight": constants["joint.head.weight"].roll(1, dims=0)}
    with pytest.raises(SelfTestError, match="torch"):
        compare(program, wrong, frames, records)  # type: ignore[arg-type]


def _again(runtime: Runtime, decoder: MegakernelDecoder, frames: Tensor) -> list[Record]:
    decoder._buffers.frames[0, : len(frames)] = frames.bfloat16()
    runtime.open(0, TransducerRequest((FramePart(len(frames), begins=True),)))
    records: list[Record] = []
    runtime.burst()
    while runtime.n_open:
        records += runtime.wait(1.0)
    runtime.leave()
    return records
