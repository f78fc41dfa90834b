"""The transducer's kernel at full size compiled for GPUs that are not here."""

from dataclasses import replace

import pytest

from megakernel.compile import compile_program
from megakernel.cubin import build_cubin
from megakernel.errors import CompileError
from megakernel.target import KNOWN, Target
from megakernel.transducer_header import KERNEL, MAX_KERNEL_ROWS, transducer_header
from tests.megakernel.transducers import compiled, tiny_transducer
from tests.nvrtc import needs_nvrtc


@needs_nvrtc
@pytest.mark.parametrize("target", KNOWN, ids=[target.arch for target in KNOWN])
def test_it_fits_every_architecture_without_spilling(target: Target) -> None:
    graph = tiny_transducer(width=640, n_tokens=8193, durations=(0, 1, 2, 3, 4))
    program = compile_program(graph, replace(target, max_rows=MAX_KERNEL_ROWS))
    usage = build_cubin(program, cache=None).usage
    assert list(usage) == [KERNEL]  # and nothing of the token loop's
    assert usage[KERNEL].spill_bytes == 0
    assert usage[KERNEL].static_shared_bytes == 0


def test_more_rows_than_the_kernel_takes_are_refused() -> None:
    with pytest.raises(CompileError, match="8 rows a step, not 16"):
        transducer_header(compiled(3, 16))
