"""The house is in order: packages, pins, documents and settings say what is there."""

import ast
import importlib
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gateway.commands.program import COMMANDS
from gateway.config import known_keys
from models.catalog import list_models

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("gateway", "vad", "streaming", "megakernel", "models")
PUBLIC: dict[str, list[str]] = {package: [] for package in PACKAGES}  # what `from package import *` gives

PYPROJECT: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
README = (REPOSITORY / "README.md").read_text()
MAKEFILE = (REPOSITORY / "Makefile").read_text()


def modules() -> list[Path]:
    return [path for package in PACKAGES for path in sorted((REPOSITORY / package).rglob("*.py"))]


def requirements() -> list[Requirement]:
    project = PYPROJECT["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return [Requirement(line) for group in groups for line in group]


def pins() -> dict[str, str]:
    lines = (REPOSITORY / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def test_the_packages_listed_are_the_packages_there() -> None:
    folders = {path.parent.relative_to(REPOSITORY) for path in modules()}
    assert set(PYPROJECT["tool"]["setuptools"]["packages"]) == {".".join(f.parts) for f in folders} | {"demo_web"}


def test_every_folder_of_modules_is_a_package() -> None:
    assert [path.parent for path in modules() if not (path.parent / "__init__.py").is_file()] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_are_those_agreed_on(package: str) -> None:
    assert getattr(importlib.import_module(package), "__all__", []) == PUBLIC[package]


def test_every_module_opens_with_what_it_is_for() -> None:
    assert [path for path in modules() if path.read_text().strip() and not path.read_text().startswith('"""')] == []


def test_every_requirement_is_pinned_to_what_it_allows() -> None:
    wrong = [
        str(requirement)
        for requirement in requirements()
        if requirement.name != "nvidia-cuda-nvrtc"  # constraints.txt says why
        if not requirement.specifier.contains(pins().get(canonicalize_name(requirement.name), "0"))
    ]
    assert wrong == []


def test_pins_have_canonical_names_and_stand_once() -> None:
    lines = [line.split("==")[0] for line in (REPOSITORY / "constraints.txt").read_text().splitlines() if "==" in line]
    assert lines == [canonicalize_name(name) for name in lines]
    assert len(set(lines)) == len(lines)


DISTRIBUTIONS = {"google": "protobuf", "yaml": "pyyaml"}  # of packages with another name


def imported_by(path: Path) -> set[str]:
    """The top-level packages that a module imports absolutely, wherever in it."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    plain = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    of = {node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level}
    return {name.partition(".")[0] for name in plain | of}


def test_every_import_of_another_distribution_is_a_requirement() -> None:
    required = {canonicalize_name(requirement.name) for requirement in requirements()}
    known = {*sys.stdlib_module_names, *PACKAGES, "_typeshed"}
    if "cuda-bindings" in required:  # cuda is a namespace that several distributions share
        known.add("cuda")
    imported = {
        canonicalize_name(DISTRIBUTIONS.get(name, name)) for path in modules() for name in imported_by(path) - known
    }
    assert imported - required == set()


def test_the_readme_names_targets_that_the_makefile_has() -> None:
    targets = set(re.findall(r"^([\w-]+):", MAKEFILE, re.MULTILINE))
    named = set(re.findall(r"(?:^|`)make ([a-z]+)\b", README, re.MULTILINE))
    assert {"demo", "serve", "test", "check", "bench"} <= named <= targets


def test_make_help_names_every_target() -> None:
    phony = re.search(r"^\.PHONY: (.+)$", MAKEFILE, re.MULTILINE)
    assert phony is not None
    assert set(re.findall(r'@echo "make (\w+)', MAKEFILE)) == set(phony[1].split()) - {"help"}


def test_the_readme_names_every_command_and_no_other() -> None:
    assert set(re.findall(r"^\| `senseway (\w+)", README, re.MULTILINE)) == set(COMMANDS)


def test_the_readme_names_every_model_with_weights() -> None:
    assert set(re.findall(r"^\| `((?:whisper|parakeet)[\w.-]+)`", README, re.MULTILINE)) == set(list_models()) - {
        "scripted"
    }


def test_every_link_in_the_documents_leads_somewhere() -> None:
    documents = [path for path in REPOSITORY.glob("*.md")]
    links = [(path, link) for path in documents for link in re.findall(r"\]\(([^)#:]+)\)", path.read_text())]
    assert [(path.name, link) for path, link in links if not (path.parent / link).exists()] == []


def test_every_setting_is_read_somewhere() -> None:
    """A field nobody reads is an option for later."""
    sources = "\n".join(path.read_text() for path in modules() if path.name != "config.py")
    fields = {key.rpartition(".")[2] for key in known_keys()}
    assert {field for field in fields if not re.search(rf"\.{field}\b", sources)} == set()


def test_ci_runs_what_make_test_runs() -> None:
    script = (REPOSITORY / ".ci" / "run").read_text()
    assert script.rstrip().endswith("make test")
    assert (REPOSITORY / ".ci" / "run").stat().st_mode & 0o111


def test_no_package_under_tests_hides_one_of_ours() -> None:
    assert list((REPOSITORY / "tests").rglob("__init__.py")) == []
