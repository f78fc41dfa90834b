"""The soak counts what the device does, and notices a text that changes."""

import pytest

from benchmarks.shapes import CONFIGS, special_tokens
from benchmarks.soak import Soak
from megakernel.compile import compile_program
from megakernel.pick import HeadPartial, Row
from megakernel.program import Program
from megakernel.runtime import Runtime
from megakernel.target import Target
from models.whisper.graph import decoder_graph
from tests.megakernel.test_runtime import Clock, ScriptedDevice

CONFIG = CONFIGS["tiny.en"]
N_STEPS = 3_000


class ForgetfulDevice(ScriptedDevice):
    """Writes another token once."""

    n_looks = 0

    def _partial(self, row: Row) -> HeadPartial:
        self.n_looks += 1
        return super()._partial(row) if self.n_looks != 2_000 else HeadPartial(1.0, 5, 1.0, 1.0, 1.0)


@pytest.fixture(scope="module")
def program() -> Program:
    graph = decoder_graph(CONFIG, special_tokens(CONFIG), n_cross_positions=CONFIG.n_audio_positions)
    return compile_program(graph, Target("H200", "sm_90a", 132, 232_448))


def soaked(program: Program, device: ScriptedDevice, n_stalls: int) -> tuple[Soak, Runtime]:
    runtime = Runtime(program, device, n_rules=1, clock=Clock())
    soak = Soak(runtime, CONFIG, n_slots=2, n_sms=132)
    soak.run(N_STEPS, n_stalls, 60.0)
    return soak, runtime


def test_stalls_are_found_and_no_text_changes(program: Program, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.soak.STALL_STEP", 30)
    soak, runtime = soaked(program, ScriptedDevice(program), 2)
    assert runtime.n_steps >= N_STEPS
    assert (len(soak.found_ms), len(runtime.faults)) == (2, 2)
    assert soak.n_differences == 0
    assert min(soak.n_requests, soak.n_cancelled, soak.n_drafted, soak.n_verified) > 0
    assert soak.n_tokens > N_STEPS / 2


def test_a_text_that_changes_is_counted(program: Program) -> None:
    soak, _ = soaked(program, ForgetfulDevice(program), 0)
    assert soak.n_differences > 0
