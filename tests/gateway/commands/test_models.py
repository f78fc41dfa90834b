"""The table of models and what they can do."""

from pathlib import Path

import pytest

from gateway.commands.models import here, table
from gateway.commands.program import run
from models.catalog import list_models
from streaming.capability import Capability


def test_every_model_and_capability_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["models"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in [*list_models(), *Capability])


def test_a_model_that_is_not_fetched_is_not_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENSEWAY_CACHE", str(tmp_path))
    assert here("whisper-base", 150) == "no"
    assert here("scripted", 0) == "yes"


def test_columns_line_up() -> None:
    assert table(("a", "b"), [("long", "x"), ("", "y")]) == "a     b\nlong  x\n      y"
