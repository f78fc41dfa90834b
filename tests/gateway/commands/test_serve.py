"""What `senseway serve` loads beside the models."""

from pathlib import Path

import pytest

from gateway.commands import doctor
from gateway.commands.program import run
from gateway.commands.serve import turn_detector_of
from gateway.config import ConfigError, TurnModel, load
from models import store, wheels
from models.errors import ModelFilesError, ModelUnavailableError
from tests.fetched import or_skip


@pytest.fixture
def nothing_to_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty cache, and no network."""

    def refuse(bundle: object, cache: object, download: object = None) -> Path:
        raise ModelUnavailableError("no network")

    monkeypatch.setenv("SENSEWAY_CACHE", str(tmp_path))
    monkeypatch.setattr(store, "fetch", refuse)


def test_without_a_model_of_turns_nothing_is_fetched(nothing_to_be_had: None) -> None:
    assert turn_detector_of(TurnModel.NONE) is None


def test_a_model_that_can_not_be_had_is_left_out_with_a_warning(
    nothing_to_be_had: None, caplog: pytest.LogCaptureFixture
) -> None:
    assert turn_detector_of(TurnModel.AUTO) is None
    assert "punctuation and silence" in caplog.text


def test_a_cache_that_can_not_be_written_does_not_keep_the_server_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SENSEWAY_CACHE", str(tmp_path / "file" / "cache"))
    assert turn_detector_of(TurnModel.AUTO) is None
    assert "punctuation and silence" in caplog.text
    with pytest.raises(OSError):
        turn_detector_of(TurnModel.SMART_TURN)


def test_a_damaged_cache_does_not_keep_the_server_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SENSEWAY_CACHE", str(tmp_path))
    (tmp_path / store._TURN_BUNDLE.folder_name).mkdir()
    assert turn_detector_of(TurnModel.AUTO) is None
    assert "remove that folder" in caplog.text


def test_a_damaged_file_is_noticed_before_it_judges_anybody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("SENSEWAY_CACHE", str(tmp_path))
    folder = tmp_path / store._TURN_BUNDLE.folder_name
    folder.mkdir()
    for name in store._TURN_BUNDLE.files:
        (folder / name).write_bytes(b"no model")
    assert turn_detector_of(TurnModel.AUTO) is None
    assert "smart-turn.onnx is damaged" in caplog.text and "punctuation and silence" in caplog.text
    with pytest.raises(ModelFilesError, match="remove that folder"):
        turn_detector_of(TurnModel.SMART_TURN)
    [finding] = [finding for finding in doctor.weights() if finding.what == store.TURN_MODEL]
    assert finding.verdict is doctor.Verdict.LESS and "is damaged" in finding.detail


def test_a_model_of_turns_that_onnxruntime_can_not_load_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "smart-turn.onnx").write_bytes(b"no model")
    monkeypatch.setattr(store, "turn_model", lambda: tmp_path / "smart-turn.onnx")
    assert turn_detector_of(TurnModel.AUTO) is None
    assert "onnxruntime can't load it" in caplog.text


def test_a_model_that_is_wanted_by_name_is_needed(nothing_to_be_had: None) -> None:
    with pytest.raises(ModelUnavailableError, match="no network"):
        turn_detector_of(TurnModel.SMART_TURN)


@pytest.mark.weights
def test_the_model_is_loaded_where_it_can_be_had() -> None:
    detector = turn_detector_of(TurnModel.AUTO)
    if detector is None:
        pytest.skip("the model can't be had here")
    assert detector.name == "smart-turn-v3.2"


def test_the_setting_takes_three_words() -> None:
    assert load({}, environ={"SENSEWAY_TURN_MODEL": "none"}).turn_model is TurnModel.NONE
    with pytest.raises(ConfigError, match="auto, smart-turn, none"):
        load({}, environ={"SENSEWAY_TURN_MODEL": "some"})


def test_doctor_says_whether_the_model_is_here(nothing_to_be_had: None) -> None:
    [finding] = [finding for finding in doctor.weights() if finding.what == store.TURN_MODEL]
    assert finding.verdict is doctor.Verdict.LESS and "senseway pull smart-turn" in finding.detail


@pytest.mark.weights
def test_pull_fetches_the_model_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with or_skip():
        store.turn_model()
    assert run(["pull", store.TURN_MODEL]) == 0
    assert str(wheels.cache_folder()) in capsys.readouterr().out
