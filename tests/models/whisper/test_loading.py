"""Which backend a machine gets; whatever goes wrong while a faster one loads, the CPU serves, and it is told."""

import copy
import logging

import pytest

from megakernel.errors import CompileError, OutOfDeviceMemoryError, SelfTestError
from models import devices
from models.backends import Backends
from models.timeline import Timeline
from models.whisper import loading
from models.whisper.decode import RuleBook
from models.whisper.reference import Whisper
from models.whisper.torch_backend import TorchBackend
from models.whisper.vocabulary import rule_book
from tests.models.whisper.small import small_checkpoint


@pytest.fixture
def rules() -> RuleBook:
    model, tokenizer = small_checkpoint()
    return rule_book(tokenizer, model.config.n_vocab)


def take_model() -> Whisper:
    return copy.deepcopy(small_checkpoint()[0])


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine that seems to have a GPU, which then does not answer torch."""
    monkeypatch.setattr(loading, "why_no_cuda", lambda: None)
    monkeypatch.setattr(loading, "why_no_megakernel", lambda: None)
    monkeypatch.setattr(loading, "why_no_answer", lambda: "the device has not answered for 5 s")
    return monkeypatch


@pytest.mark.parametrize(
    "error",
    [
        OutOfDeviceMemoryError("whisper: 2 GiB were asked for"),
        SelfTestError("token 3 of request 1"),
        CompileError("tasks", "layers.0.fc1", "K is a multiple of 128"),
        ImportError("No module named 'cuda'"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED\nCompile with TORCH_USE_CUDA_DSA"),
    ],
)
def test_whatever_keeps_the_megakernel_from_loading_is_told_and_the_cpu_serves(
    gpu: pytest.MonkeyPatch, rules: RuleBook, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise error

    gpu.setattr(loading, "on_device", fails)
    with caplog.at_level(logging.WARNING):
        backends = Backends(loading.offers(take_model, rules, Timeline()), model="small")
    assert backends.name == devices.TORCH_CPU
    assert isinstance(backends.current, TorchBackend)
    first_line = str(error).partition("\n")[0]
    assert first_line in backends.why and "has not answered" in backends.why
    assert "megakernel can't be used, so torch-cuda is tried: " in caplog.text and first_line in caplog.text


def test_a_machine_without_a_gpu_is_warned_of_nothing(
    monkeypatch: pytest.MonkeyPatch, rules: RuleBook, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(loading, "why_no_cuda", lambda: "torch finds no CUDA device")
    timeline = Timeline()
    backends = Backends(loading.offers(take_model, rules, timeline), model="small")
    assert (backends.name, backends.why) == ("torch-cpu", "no megakernel or torch-cuda: torch finds no CUDA device")
    assert caplog.text == ""
    assert list(timeline.seconds) == ["packing"]


def test_reasons_name_every_backend_and_the_cpu_has_none_against_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "why_no_cuda", lambda: "too old")
    assert devices.reasons() == {"megakernel": "too old", "torch-cuda": "too old", "torch-cpu": None}
