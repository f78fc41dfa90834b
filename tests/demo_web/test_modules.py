"""The microphone page's modules that need no browser, tested in their own language by node's test runner."""

import shutil
import subprocess
from pathlib import Path

import pytest

NODE = shutil.which("node")
MIN_NODE_VERSION = 20  # the first whose runner and language the tests can use
HERE = Path(__file__).resolve().parent


def _node_version() -> int:
    assert NODE is not None
    said = subprocess.run([NODE, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    return int(said.removeprefix("v").split(".")[0])


@pytest.mark.skipif(NODE is None, reason="node is not installed")
@pytest.mark.parametrize("name", sorted(path.name for path in HERE.glob("*.test.mjs")))
def test_javascript_tests_pass(name: str) -> None:
    if _node_version() < MIN_NODE_VERSION:
        pytest.skip(f"node {MIN_NODE_VERSION} is needed, this is {_node_version()}")
    assert NODE is not None
    run = subprocess.run([NODE, "--test", str(HERE / name)], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
