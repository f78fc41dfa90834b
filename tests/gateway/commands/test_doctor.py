"""The machine's report: what fails, what is only less."""

import socket
import sys

import pytest

from gateway.commands import doctor
from gateway.commands.doctor import Verdict
from gateway.commands.program import run


def test_a_free_port_is_good_and_a_taken_one_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("SENSEWAY_SERVER_PORT", str(listener.getsockname()[1]))
        assert [finding.verdict for finding in doctor.configuration()] == [Verdict.GOOD, Verdict.FAILS]
    assert [finding.verdict for finding in doctor.configuration()] == [Verdict.GOOD, Verdict.GOOD]


def test_a_wrong_configuration_fails_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SENSEWAY_SERVER_PROT", "1")
    (finding,) = doctor.configuration()
    assert finding.verdict is Verdict.FAILS
    assert "unknown variable SENSEWAY_SERVER_PROT" in finding.detail


def test_a_missing_microphone_is_only_less(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sounddevice", None)
    (finding,) = doctor.microphone()
    assert finding.verdict is Verdict.LESS


def test_a_missing_package_fails_and_a_missing_extra_is_only_less() -> None:
    assert doctor._package("no-such-package", None).verdict is Verdict.FAILS
    assert doctor._package("no-such-package", "mic").verdict is Verdict.LESS
    assert doctor._package("numpy", None).verdict is Verdict.GOOD


def test_the_exit_code_tells_whether_a_server_could_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SENSEWAY_SERVER_PORT", "0")
    assert run(["doctor"]) == 0
    assert "whisper-tiny.en" in capsys.readouterr().out
    monkeypatch.setenv("SENSEWAY_SERVER_PORT", "many")
    assert run(["doctor"]) == 1
    assert "FAIL  configuration" in capsys.readouterr().out
