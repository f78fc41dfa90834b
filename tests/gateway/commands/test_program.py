"""The command line as a whole: help, exit codes, and whose packages it runs with."""

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile

from gateway import __main__ as entry
from gateway.commands import pull
from gateway.commands.demo import serving
from gateway.commands.program import COMMANDS, parser, run
from gateway.commands.waiting import waiting

REPOSITORY = Path(__file__).parents[3]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parser().parse_args([command, "--help"])
    assert end.value.code == 0
    assert COMMANDS[command].HELP[1:20] in capsys.readouterr().out


def test_wrong_usage_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        run(["sing"])
    assert end.value.code == 2
    assert "sing" in capsys.readouterr().err


def test_a_wrong_setting_is_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--port", "70000"]) == 2
    assert "senseway: command line: port is 70000; it must lie in 0..65535" in capsys.readouterr().err


def test_an_unknown_model_is_exit_code_1_and_names_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["pull", "whisper-huge"]) == 1
    assert "whisper-tiny.en" in capsys.readouterr().err


def test_ctrl_c_is_exit_code_130_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pull, "find_model", interrupted)
    assert run(["pull", "whisper-base"]) == 130
    assert "Traceback" not in capsys.readouterr().err


def test_a_recordings_file_is_named_when_it_is_pulled(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pull, "recording", lambda name: Path("kept") / f"{name}.wav")
    assert run(["pull", "two_cities"]) == 0
    assert capsys.readouterr().out == f"two_cities: {Path('kept/two_cities.wav')}\n"


def test_a_reader_that_leaves_is_no_failure() -> None:
    command = f"{sys.executable} -m gateway models | head -c 1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], cwd=REPOSITORY, capture_output=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_listing_the_models_needs_no_torch() -> None:
    program = "import sys\nfrom gateway.commands.program import run\nrun(['models'])\nsys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, stdout=subprocess.DEVNULL, check=True)


def test_help_loads_nothing_heavy() -> None:
    program = (
        "import sys\nfrom gateway.commands.program import run\n"
        "try: run(['--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'onnxruntime', 'uvicorn'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


def test_our_packages_lie_beside_each_other() -> None:
    assert entry.misplaced_siblings() == []


def test_threads_spin_briefly_unless_the_environment_says_how_long() -> None:
    ours: dict[str, str] = {}
    theirs = {"GOMP_SPINCOUNT": "7"}
    entry.keep_threads_from_spinning(ours)
    entry.keep_threads_from_spinning(theirs)
    assert (int(ours["GOMP_SPINCOUNT"]) < 10_000, theirs) == (True, {"GOMP_SPINCOUNT": "7"})


def test_a_package_of_somebody_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "streaming").mkdir()
    (tmp_path / "streaming" / "__init__.py").write_text("")
    program = (
        f"import sys; sys.path[:0] = [{str(tmp_path)!r}, {str(REPOSITORY)!r}]\nfrom gateway.__main__ import main\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program + "sys.exit(main(['models']))"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert f"package streaming should lie at {REPOSITORY / 'streaming'}, but Python finds {tmp_path}" in done.stderr


class Terminal:
    """Remembers what was written."""

    def __init__(self, *, is_terminal: bool) -> None:
        self.written = ""
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal

    def write(self, text: str) -> None:
        self.written += text

    def flush(self) -> None: ...


@pytest.mark.parametrize(("is_terminal", "expected"), [(True, "\r\x1b[2K"), (False, "")])
def test_waiting_leaves_a_clean_line_on_a_terminal_and_nothing_elsewhere(is_terminal: bool, expected: str) -> None:
    terminal = Terminal(is_terminal=is_terminal)
    with waiting("working", out=terminal):  # type: ignore[arg-type]  # as much of a TextIO as is used
        pass
    assert terminal.written.endswith(expected)
    assert bool(terminal.written) == is_terminal


def test_a_taken_port_is_told_before_any_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert run(["serve", "--port", str(port), "--model", "no-such-model"]) == 1
    expected = f"senseway: can't listen on 127.0.0.1 port {port}: Address already in use; --port picks another\n"
    assert capsys.readouterr().err == expected


@pytest.fixture
def as_from_a_terminal() -> Iterator[None]:
    """What a script starts in the background ignores Ctrl-C, and so does all that it starts; not under this."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.e2e
@pytest.mark.usefixtures("as_from_a_terminal")
def test_ctrl_c_ends_a_server_and_a_stream_without_a_traceback(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "silence.wav", np.zeros(60 * 16_000), 16_000)
    with serving("scripted") as server:
        command = [sys.executable, "-m", "gateway", "stream", str(tmp_path / "silence.wav"), "--url", server.url]
        stream = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
        assert stream.stderr is not None
        assert stream.stderr.readline() == "scripted listens\n"
        stream.send_signal(signal.SIGINT)
        _, said = stream.communicate()
    assert (stream.returncode, said) == (130, "")
    assert server.process.returncode == 130
