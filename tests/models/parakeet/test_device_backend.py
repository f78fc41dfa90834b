"""Both halves of a GPU's backend behind one interface, tried on the CPU, and what keeps the kernels away."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megakernel.errors import NoDeviceError
from models.backends import BackendError
from models.parakeet.config import ParakeetConfig
from models.parakeet.device_backend import DeviceBackend, operations_on_device
from models.parakeet.fused import TorchOperations
from models.parakeet.graph_decoder import GraphDecoder
from models.parakeet.greedy import TorchDecoder
from models.parakeet.reference import Parakeet
from models.parakeet.stage import Listener, Stage
from tests.models.parakeet.small import SMALL, noise, small_model

V3 = ParakeetConfig(128, 24, 1024, 8, 4096, 9, 256, 640, 2, 8193, 8192)


def backend_of(model: Parakeet) -> DeviceBackend:
    stage = Stage(model, TorchOperations(model.config, torch.float32), torch.zeros(1), max_frames=64)
    return DeviceBackend(Listener(stage, None).listen, GraphDecoder(model, torch.zeros(1), None))


def test_what_is_heard_and_written_is_what_the_reference_hears_and_writes() -> None:
    model = small_model()
    backend, reference = backend_of(model), TorchDecoder(model)
    buffers: list[NDArray[np.float32]] = [noise(n, seed=n).numpy() for n in (40_000, 16_001, 70_000)]
    frames = backend.listen(buffers)
    written = backend.decode([(own, backend.start()) for own in frames])
    wanted = reference.decode([(own, reference.start()) for own in frames])
    assert [len(own) for own in frames] == [32, 13, 55]
    for (emissions, _), (wanted_emissions, _) in zip(written, wanted, strict=True):
        assert [e.token_id for e in emissions] == [e.token_id for e in wanted_emissions]
    assert any(emissions for emissions, _ in written)


def test_what_the_device_raises_is_an_error_of_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = backend_of(small_model())

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore lines")

    monkeypatch.setattr(backend, "_listen", fail)
    monkeypatch.setattr(GraphDecoder, "decode", fail)
    for call in (lambda: backend.listen([]), lambda: backend.decode([])):
        with pytest.raises(BackendError, match="^CUDA error: an illegal memory access was encountered$"):
            call()
    backend.close()


def test_sizes_without_kernels_get_torchs_pieces_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        assert isinstance(operations_on_device(SMALL, cache=tmp_path), TorchOperations)
    assert "the encoder's pieces are torch's: the encoder's kernels are not made for" in caplog.text


def test_a_machine_without_a_gpu_gets_torchs_pieces_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> None:
        raise NoDeviceError("the driver offers no GPU")

    monkeypatch.setattr("models.parakeet.device_backend.find_device", nothing)
    assert isinstance(operations_on_device(V3, cache=tmp_path), TorchOperations)
