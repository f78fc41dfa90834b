"""Packing in torch gives what packing in numpy gives."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megakernel import upload
from megakernel.compile import compile_program
from megakernel.errors import CompileError
from megakernel.fuse import fold_constants
from megakernel.graph import Graph
from megakernel.pack import pack_aux, pack_tape
from megakernel.program import Program
from megakernel.target import Target
from megakernel.upload import upload_weights

Constants = dict[str, NDArray[np.float32]]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def graph(tiny_graph: Callable[..., Graph]) -> Graph:
    return tiny_graph(n_tokens=101)  # the last granule of the head is not full


@pytest.fixture(scope="module")
def constants(graph: Graph, random_constants: Callable[[Graph, int], Constants]) -> Constants:
    return random_constants(graph, 1)


@pytest.fixture(scope="module")
def program(graph: Graph) -> Program:
    return compile_program(graph, Target("five", "sm_90a", 5, 232_448))


@pytest.mark.parametrize("chunk_elements", [1 << 22, 1024, 1])
def test_tape_and_floats_are_those_of_numpy_however_large_the_chunks(
    program: Program, constants: Constants, chunk_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(upload, "_CHUNK_ELEMENTS", chunk_elements)
    folded = fold_constants(program.ops, constants)
    packed = upload_weights(program, {name: torch.from_numpy(array) for name, array in constants.items()}, CPU)
    np.testing.assert_array_equal(packed.tape.view(torch.int16).numpy().view(np.uint16), pack_tape(program, folded))
    aux = pack_aux(program, folded)
    np.testing.assert_allclose(packed.aux.numpy(), aux, rtol=1e-6, atol=1e-6)  # float64 sums in another order


def test_a_constant_that_is_missing_or_misshapen_is_named(program: Program, constants: Constants) -> None:
    tensors = {name: torch.from_numpy(array) for name, array in constants.items()}
    with pytest.raises(CompileError, match="0.mix.weight"):
        upload_weights(program, tensors | {"0.mix.weight": torch.zeros(3, 4)}, CPU)
    with pytest.raises(CompileError, match="None"):
        upload_weights(program, {name: tensor for name, tensor in tensors.items() if name != "norm.beta"}, CPU)
