"""What a user is told to type."""

import sys
from pathlib import Path

import pytest

from gateway.commands import extras
from gateway.commands.extras import how_to_install

HERE = Path(__file__).parents[3]


def test_in_a_checkout_its_pins_hold_and_it_stays_editable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(HERE / ".venv" / "bin" / "python"))
    expected = ".venv/bin/python -m pip install --constraint constraints.txt --editable '.[mic]'"
    assert how_to_install("mic") == expected
    assert expected.replace("mic", "gpu") in (HERE / "README.md").read_text()


def test_an_installed_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(extras, "CHECKOUT", tmp_path)
    assert how_to_install("media") == f"{sys.executable} -m pip install 'senseway[media]'"
