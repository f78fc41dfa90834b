"""Both layouts of checkpoints, from their names to an engine that decodes."""

from pathlib import Path
from typing import Any

import pytest
import torch

from models import devices
from models.backends import Backends
from models.catalog import load_engine
from models.errors import ModelError, ModelFilesError, WeightsError
from models.parakeet import loading
from models.parakeet.backend import TorchBackend
from models.parakeet.config import FRAME_SAMPLES
from models.parakeet.engine import ParakeetEngine
from models.store import find_model, model_type
from models.timeline import Timeline
from streaming.engine import Chunk, DecodeOptions
from tests.models.parakeet.files import nemo_members, write_folder, write_tar
from tests.models.parakeet.small import noise, small_model
from vad.audio import SpeechSpan


def decoded(engine: Any) -> list[str]:
    samples = noise(40 * FRAME_SAMPLES).numpy()
    chunk = Chunk(SpeechSpan(0, len(samples)), samples, is_final=True, is_first=True)
    [hypothesis] = engine.decode([(engine.open(DecodeOptions()), chunk)])
    return [word.text for word in hypothesis.words]


def test_a_folder_and_an_archive_and_a_folder_with_an_archive_are_loaded(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "small")
    archive = write_tar(tmp_path / "small.nemo", nemo_members())
    lone = tmp_path / "lone"
    lone.mkdir()
    write_tar(lone / "any.nemo", nemo_members())
    engines = [load_engine(str(path)) for path in (folder, archive, lone)]
    assert [engine.card.name for engine in engines] == ["small", "small", "lone"]
    assert all(isinstance(engine, ParakeetEngine) for engine in engines)
    texts = [decoded(engine) for engine in engines]
    assert texts[1] == texts[2]
    assert all(texts)


def test_the_family_is_told_without_reading_weights(tmp_path: Path) -> None:
    archive = write_tar(tmp_path / "x.nemo", {"nothing": b""})
    assert model_type(find_model(str(archive))) == "parakeet_tdt"
    with pytest.raises(ModelFilesError, match=r"lacks model_config\.yaml"):
        load_engine(str(archive))


def test_another_model_of_the_family_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "small", settings={"model_type": "parakeet_ctc"})
    with pytest.raises(ModelFilesError, match="of a parakeet_ctc model; supported are whisper, parakeet_tdt"):
        load_engine(str(folder))


def tensors() -> dict[str, torch.Tensor]:
    return dict(small_model().state_dict())


def test_weights_of_half_precision_are_read(tmp_path: Path) -> None:
    folder = write_folder(
        tmp_path / "half", {name: t.half() if t.is_floating_point() else t for name, t in tensors().items()}
    )
    model, _ = loading.read_model(find_model(str(folder)))
    assert model.joint.head.weight.dtype == torch.float32
    torch.testing.assert_close(model.joint.head.weight, tensors()["joint.head.weight"], atol=2e-3, rtol=1e-3)


def test_only_how_often_norms_were_updated_may_be_missing(tmp_path: Path) -> None:
    without = {name: tensor for name, tensor in tensors().items() if not name.endswith("num_batches_tracked")}
    model, _ = loading.read_model(find_model(str(write_folder(tmp_path / "a", without))))
    assert torch.equal(model.state_dict()["joint.head.bias"], tensors()["joint.head.bias"])
    del without["encoder.layers.1.conv.norm.running_var"]
    with pytest.raises(WeightsError, match=r"missing: encoder\.layers\.1\.conv\.norm\.running_var"):
        loading.read_model(find_model(str(write_folder(tmp_path / "b", without))))


def test_tensors_that_are_unknown_or_of_another_shape_are_refused(tmp_path: Path) -> None:
    extra = tensors() | {"ctc_head.weight": torch.zeros(2, 2), "joint.head.bias": torch.zeros(3)}
    with pytest.raises(WeightsError, match=r"unknown: ctc_head\.weight; misshapen: joint\.head\.bias is \[3\]"):
        loading.read_model(find_model(str(write_folder(tmp_path / "a", extra))))


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a")
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text().replace("▁the", "<0x41>"))
    with pytest.raises(ModelFilesError, match="spells text in bytes"):
        load_engine(str(folder))


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "a")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"lacks tokenizer\.json"):
        load_engine(str(folder))


def test_without_a_gpu_the_cpu_serves_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "why_no_cuda", lambda: "torch finds no CUDA device")
    backends = Backends(loading.offers(small_model, Timeline()), model="small")
    assert backends.name == devices.TORCH_CPU
    assert "no torch-cuda: torch finds no CUDA device" in backends.why or "torch-cuda" in backends.why
    assert isinstance(backends.current, TorchBackend)
