"""The small kernels compile over the megakernel's headers, and the chain is what its name says."""

from benchmarks.megakernel_parts import CHAIN_SMS, KERNELS, chain, parts_cubin
from benchmarks.shapes import TURBO, decoder_program
from megakernel.checker import check
from megakernel.compile import compile_program
from megakernel.device import Device, target_for
from megakernel.isa import Op, Phase, Task
from tests.nvrtc import needs_nvrtc

H200 = Device(0, "NVIDIA H200", (9, 0), 132, 232_448, 1 << 37, is_cooperative=True, driver=13_000)


@needs_nvrtc
def test_the_small_kernels_compile_without_spills() -> None:
    usage = parts_cubin(decoder_program(TURBO, H200), None).usage
    assert set(usage) == set(KERNELS)
    assert all(taken.spill_bytes == 0 for taken in usage.values())


def test_a_chains_phases_have_a_granule_on_each_sm_and_no_race() -> None:
    program = compile_program(chain(6), target_for(H200, n_sms=CHAIN_SMS))
    is_linear = program.phases[:, Phase.OP] == Op.LINEAR
    assert is_linear.sum() == 6
    assert (program.tasks[:, is_linear, Task.N_GRANULES] == 1).all()
    check(program)
