"""NeMo's archives (``.nemo``): a configuration, weights and a tokenizer in one tar or zip.

Knows how they lie in there and NeMo's names of tensors. Runs nothing that an archive holds: weights are read with
torch's restricted unpickler, and no member is written anywhere under its own name. Does not know what the network
computes.
"""

import io
import lzma
import re
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import torch
import yaml
from torch import Tensor

from ..errors import ModelFilesError, WeightsError
from ..mel import mel_filters
from ..weights import Tensors
from .config import ParakeetConfig
from .features import FFT_SAMPLES, WINDOW_SAMPLES
from .tokens import Pieces, read_sentencepiece

_CONFIG = "model_config.yaml"
_WEIGHTS = "model_weights.ckpt"
_UNPACKED_WEIGHTS = "model_weights/"  # torch's own zip, its members put among the others
_TOKENIZER = re.compile(r"(.+_)?tokenizer\.model")
_MAX_READ_BYTES = 16 << 20  # of the configuration or the tokenizer: lists of some ten thousand pieces take one or two
_MAX_UNPACKING = 10  # how many times larger weights may be than the archive: they hardly pack

# What the libraries raise for damaged archives.
_DAMAGES = (OSError, EOFError, tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError)

# NeMo's name of a part of a tensor's name → transformers'.
_RENAMED = (
    (r"^encoder\.pre_encode\.conv\.", "encoder.subsampling.layers."),
    (r"^encoder\.pre_encode\.out\.", "encoder.subsampling.linear."),
    (r"\.linear_([qkv])\.", r".\1_proj."),
    (r"\.linear_out\.", ".o_proj."),
    (r"\.linear_pos\.", ".relative_k_proj."),
    (r"\.pos_bias_([uv])$", r".bias_\1"),
    (r"\.conv\.batch_norm\.", ".conv.norm."),
    (r"^decoder\.prediction\.embed\.", "decoder.embedding."),
    (r"^decoder\.prediction\.dec_rnn\.lstm\.", "decoder.lstm."),
    (r"^joint\.enc\.", "encoder_projector."),
    (r"^joint\.pred\.", "decoder.decoder_projector."),
    (r"^joint\.joint_net\.2\.", "joint.head."),
)
_WINDOW, _FILTERS = "preprocessor.featurizer.window", "preprocessor.featurizer.fb"
_FRONT_END_TOLERANCE = 1e-4  # of values up to 1 and 0.03; the half floats of some archives are off by that


@dataclass(frozen=True, slots=True, eq=False)
class NemoModel:
    """What an archive holds."""

    config: ParakeetConfig
    pieces: Pieces
    tensors: Tensors  # under transformers' names


def read_nemo(path: Path) -> NemoModel:
    """The model in the archive at ``path``.

    Raises:
        ModelFilesError: if it is no readable archive of a Parakeet TDT.
    """
    try:
        with _opened(path) as archive:
            settings = _settings(archive, path)
            spelt = _pieces(archive, path)
            config = ParakeetConfig.from_nemo(settings, n_pieces=len(spelt), source=f"{_CONFIG} of {path}")
            pieces = Pieces.of(spelt, n_tokens=config.vocabulary_size, blank_id=config.blank_id, source=str(path))
            tensors = _without_front_end(_weights(archive, path), config, path)
    except _DAMAGES as error:
        raise ModelFilesError(f"{path}: not a readable archive: {error}") from error
    return NemoModel(config, pieces, {renamed(name): tensor for name, tensor in tensors.items()})


def renamed(name: str) -> str:
    """NeMo's name of a tensor → transformers'."""
    for pattern, replacement in _RENAMED:
        name = re.sub(pattern, replacement, name)
    return name


# --- archives --------------------------------------------------------------------------------------------------------


class _Archive(Protocol):
    def names(self) -> list[str]: ...

    def n_bytes(self, name: str) -> int: ...

    def open(self, name: str) -> IO[bytes]: ...


class _Zip:
    def __init__(self, file: zipfile.ZipFile) -> None:
        self._file = file

    def names(self) -> list[str]:
        return [name for name in self._file.namelist() if not name.endswith("/")]

    def n_bytes(self, name: str) -> int:
        return self._file.getinfo(name).file_size

    def open(self, name: str) -> IO[bytes]:
        try:
            return self._file.open(name)
        except RuntimeError as error:  # encrypted, or packed in an unknown way
            raise zipfile.BadZipFile(str(error)) from error


class _Tar:
    def __init__(self, file: tarfile.TarFile) -> None:
        # ``tar cf x.nemo -C folder .`` writes each name with ./ before it.
        self._members = {member.name.removeprefix("./"): member for member in file if member.isfile()}
        self._file = file

    def names(self) -> list[str]:
        return list(self._members)

    def n_bytes(self, name: str) -> int:
        return self._members[name].size

    def open(self, name: str) -> IO[bytes]:
        opened = self._file.extractfile(self._members[name])
        assert opened is not None, "only files are members"
        return opened


_ZIP_MAGIC = b"PK\x03\x04"


@contextmanager
def _opened(path: Path) -> Iterator[_Archive]:
    with path.open("rb") as start:
        # Not ``is_zipfile``, which looks at the end, where a tar may hold a zip: torch's.
        is_zip = start.read(len(_ZIP_MAGIC)) == _ZIP_MAGIC
    if is_zip:
        with zipfile.ZipFile(path) as file:
            yield _Zip(file)
    else:
        with tarfile.open(path) as file:
            yield _Tar(file)


def _read(archive: _Archive, name: str, path: Path) -> bytes:
    if name not in archive.names():
        raise ModelFilesError(f"{path} lacks {name}; it holds {', '.join(sorted(archive.names())[:10])}")
    with archive.open(name) as member:
        content = member.read(_MAX_READ_BYTES + 1)  # a few packed bytes may stand for more than the memory holds
    if len(content) > _MAX_READ_BYTES:
        raise ModelFilesError(f"{name} of {path} has more than the {_MAX_READ_BYTES >> 20} MiB that are read")
    return content


# --- what is in them -------------------------------------------------------------------------------------------------


def _settings(archive: _Archive, path: Path) -> Mapping[str, Any]:
    try:
        settings = yaml.safe_load(_read(archive, _CONFIG, path))
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # also: no such date; too deep
        raise ModelFilesError(f"{_CONFIG} of {path}: not readable: {error}") from error
    if not isinstance(settings, dict):
        raise ModelFilesError(f"{_CONFIG} of {path} should hold a mapping, holds {type(settings).__name__}")
    return settings


def _pieces(archive: _Archive, path: Path) -> dict[int, str]:
    found = [name for name in archive.names() if _TOKENIZER.fullmatch(name)]
    if len(found) != 1:
        raise ModelFilesError(f"{path} should hold one SentencePiece tokenizer.model, holds {len(found)}")
    return read_sentencepiece(_read(archive, found[0], path), source=f"{found[0]} of {path}")


def _weights(archive: _Archive, path: Path) -> Tensors:
    unpacked = [name for name in archive.names() if name.startswith(_UNPACKED_WEIGHTS)]
    _refuse_bomb(archive, unpacked, path)
    if unpacked and _WEIGHTS not in archive.names():
        with tempfile.TemporaryFile() as packed:
            _pack(archive, unpacked, packed)
            return _unpickled(packed, path)
    if _WEIGHTS not in archive.names():
        raise ModelFilesError(f"{path} lacks {_WEIGHTS}, and a folder {_UNPACKED_WEIGHTS}")
    _refuse_bomb(archive, [_WEIGHTS], path)
    with archive.open(_WEIGHTS) as member:
        return _unpickled(member, path)


def _refuse_bomb(archive: _Archive, names: list[str], path: Path) -> None:
    n_bytes = sum(archive.n_bytes(name) for name in names)
    if n_bytes > _MAX_UNPACKING * path.stat().st_size:
        raise WeightsError(f"weights of {path} unpack to {n_bytes} bytes, over {_MAX_UNPACKING} times the archive's")


def _pack(archive: _Archive, names: list[str], into: IO[bytes]) -> None:
    """Members of a folder as the zip that torch reads, in a scratch file: weights may be larger than the memory."""
    with zipfile.ZipFile(into, "w", zipfile.ZIP_STORED) as file:
        for name in names:
            with archive.open(name) as member, file.open(name, "w", force_zip64=True) as copy:
                while block := member.read(io.DEFAULT_BUFFER_SIZE << 7):
                    copy.write(block)
    into.seek(0)


def _unpickled(file: IO[bytes], path: Path) -> Tensors:
    if _is_compressed(file):
        raise WeightsError(f"weights of {path} are compressed, which torch never does, and may have any size unpacked")
    try:
        tensors = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch's reader and unpickler raise whatever fits
        raise WeightsError(f"weights of {path} are not readable: {str(error).partition(chr(10))[0]}") from error
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items()
    ):
        raise WeightsError(f"weights of {path} should be a mapping of names to tensors")
    return dict(tensors)


def _is_compressed(file: IO[bytes]) -> bool:
    """Whether members of a zip as torch writes it are; of an older file that is no zip, nothing can be."""
    try:
        with zipfile.ZipFile(file) as members:
            return any(member.compress_type != zipfile.ZIP_STORED for member in members.infolist())
    except zipfile.BadZipFile:
        return False
    finally:
        file.seek(0)


def _without_front_end(tensors: Tensors, config: ParakeetConfig, path: Path) -> Tensors:
    """The tensors without the front end's window and filters, which must be those that features are made with here."""
    ours = {
        _WINDOW: torch.hann_window(WINDOW_SAMPLES, periodic=False),
        _FILTERS: mel_filters(config.n_mels, FFT_SAMPLES)[None],
    }
    for name, expected in ours.items():
        given = tensors.get(name)
        is_other = given is not None and (
            given.shape != expected.shape or (given.float() - expected).abs().max() > _FRONT_END_TOLERANCE
        )
        if is_other:
            raise WeightsError(f"{path}: {name} is not the one of {config.n_mels} mel channels that is used here")
    return {name: tensor for name, tensor in tensors.items() if name not in ours}
