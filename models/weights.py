"""Weights from disk as ``dict[str, torch.Tensor]`` under Hugging Face names, and into a module without a remainder.

Knows two containers: CTranslate2's ``model.bin`` of a Whisper model, and safetensors (one file, or shards with an
index). Does not know where files come from or what a network computes, and runs nothing that a file holds: pickles are
not read.
"""

import json
import math
import mmap
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from .container import INDEX_SUFFIX, WeightsKind
from .errors import WeightsError

Tensors = dict[str, torch.Tensor]

NO_TIES: Mapping[str, str] = MappingProxyType({})


def read_weights(path: Path, kind: WeightsKind) -> Tensors:
    """All tensors of ``path`` in their stored float type, on the CPU, each in memory of its own.

    Raises:
        WeightsError: if the file is unreadable, damaged, or not of this kind.
    """
    match kind:
        case WeightsKind.CTRANSLATE2:
            return read_ctranslate2(path)
        case WeightsKind.SAFETENSORS:
            return read_safetensors(path)
        case WeightsKind.NEMO:
            raise WeightsError(f"{path} is a NeMo archive; only Parakeet's are read")


def load_exactly(
    module: torch.nn.Module, tensors: Mapping[str, torch.Tensor], *, tied: Mapping[str, str] = NO_TIES
) -> None:
    """Copy ``tensors`` into ``module``, cast to the module's dtypes; every parameter and every tensor must be used.

    ``tied`` maps a name to the one whose values it shares (``proj_out.weight`` to the embedding). A tied name may be
    absent from the tensors, from the module, or from both; where the tensors have it, it must equal its source.

    Raises:
        WeightsError: one error that lists every missing, unknown, misshapen and untied tensor. Nothing is copied.
    """
    wanted = module.state_dict()
    given = dict(tensors)
    shared = {name: given[source] for name, source in tied.items() if source in given}
    untied = [name for name, tensor in shared.items() if name in given and not torch.equal(given[name], tensor)]
    for name in tied:
        if name not in wanted:
            given.pop(name, None)
        elif name in shared:
            given.setdefault(name, shared[name])
    misshapen = [
        f"{name} is {list(given[name].shape)}, should be {list(parameter.shape)}"
        for name, parameter in wanted.items()
        if name in given and given[name].shape != parameter.shape
    ]
    _refuse(
        f"weights do not fit {type(module).__name__}",
        missing=sorted(wanted.keys() - given.keys()),
        unknown=sorted(given.keys() - wanted.keys()),
        misshapen=misshapen,
        untied=[f"{name} differs from {tied[name]}" for name in untied],
    )
    module.load_state_dict(given)


def _refuse(what: str, **faults: list[str]) -> None:
    """Raise one WeightsError with every fault, or return if there is none."""
    found = [f"{kind}: {', '.join(names)}" for kind, names in faults.items() if names]
    if found:
        raise WeightsError(f"{what}: {'; '.join(found)}")


# --- safetensors -----------------------------------------------------------------------------------------------------


def read_safetensors(path: Path) -> Tensors:
    """Tensors of one ``*.safetensors`` file, or of all shards that a ``*.safetensors.index.json`` beside them names.

    Raises:
        WeightsError: for a damaged file, a missing shard, or a shard that does not hold what the index says.
    """
    if not path.name.endswith(INDEX_SUFFIX):
        return _read_safetensors_file(path)
    tensors: Tensors = {}
    weight_map = _read_weight_map(path)
    for shard in sorted(set(weight_map.values())):
        held = _read_safetensors_file(path.parent / shard)
        promised = {name for name, file in weight_map.items() if file == shard}
        _refuse(
            f"{path.parent / shard} does not hold what {path.name} says",
            missing=sorted(promised - held.keys()),
            unknown=sorted(held.keys() - promised),
        )
        tensors.update(held)
    return tensors


def _read_weight_map(path: Path) -> dict[str, str]:
    try:
        index = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise WeightsError(f"{path}: not a readable index: {error}") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{path}: an index needs a non-empty weight_map of tensor name to file name")
    for shard in weight_map.values():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise WeightsError(f"{path}: shard {shard!r} is not a plain file name")
    return weight_map


def _read_safetensors_file(path: Path) -> Tensors:
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}
    except (OSError, SafetensorError) as error:
        raise WeightsError(f"{path}: not a readable safetensors file: {error}") from error


# --- CTranslate2 model.bin -------------------------------------------------------------------------------------------
# Layout (ctranslate2 model_spec.py, binary version 6), little-endian and unaligned: u32 version; spec name; u32
# revision; u32 number of variables; variables; u32 number of aliases; pairs of names. A string is a u16 length that
# counts a closing NUL. A variable is name, u8 rank, u32 dimensions, u8 type, u32 byte count, row-major data.

BINARY_VERSION = 6
SPEC = ("WhisperSpec", 3)  # name and revision
HEAD_DIM = 64  # of every Whisper
HEAD_ALIAS = ("decoder/projection/weight", "decoder/embeddings/weight")  # the tied vocabulary head

_DTYPES: dict[int, np.dtype[np.generic]] = {
    0: np.dtype("<f4"),
    1: np.dtype("i1"),
    2: np.dtype("<i2"),
    3: np.dtype("<i4"),
    4: np.dtype("<f2"),
    5: np.dtype("<u2"),  # bfloat16 bits, for which numpy has no type
}
_BFLOAT16 = 5
_ERF_GELU = 3
_SCALARS = {
    "decoder/activation": _ERF_GELU,
    "decoder/alibi": 0,
    "decoder/pre_norm": 1,
    "decoder/scale_embeddings": 0,
    "decoder/start_from_zero_embedding": 0,
    # One averaged head of the last layer: a default for translation models that Whisper does not use.
    "decoder/alignment_heads": 1,
    "decoder/alignment_layer": -1,
}
_LATER_SCALARS = {"decoder/alibi_use_positive_positions": 0, "decoder/scale_alibi": 0}  # newer converters write these

# Inside a layer: a CTranslate2 name, and the Hugging Face names that its rows are split into, in order.
_SELF_ATTENTION = {
    "self_attention/linear_0": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention/linear_1": ("self_attn.out_proj",),
    "self_attention/layer_norm": ("self_attn_layer_norm",),
}
_CROSS_ATTENTION = {
    "attention/linear_0": ("encoder_attn.q_proj",),
    "attention/linear_1": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
    "attention/linear_2": ("encoder_attn.out_proj",),
    "attention/layer_norm": ("encoder_attn_layer_norm",),
}
_FFN = {"ffn/linear_0": ("fc1",), "ffn/linear_1": ("fc2",), "ffn/layer_norm": ("final_layer_norm",)}
_LAYER = {"encoder": _SELF_ATTENTION | _FFN, "decoder": _SELF_ATTENTION | _CROSS_ATTENTION | _FFN}

_NORM_KINDS = {"gamma": "weight", "beta": "bias"}


@dataclass(frozen=True, slots=True)
class _Variable:
    """Where one variable's data lies in the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset_bytes: int


class _Cursor:
    """Reads forward through the bytes of a file and says what was cut off."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.offset_bytes = 0

    def skip(self, n_bytes: int, what: str) -> int:
        """Step over ``n_bytes`` and return where they begin."""
        start = self.offset_bytes
        if start + n_bytes > len(self.data):
            left = f"{len(self.data) - start} are left"
            raise WeightsError(f"{self.path}: truncated: {what} needs {n_bytes} bytes at offset {start}, {left}")
        self.offset_bytes += n_bytes
        return start

    def number(self, code: str, what: str) -> int:
        """The next unsigned integer: B, H or I as in ``struct``."""
        layout = struct.Struct(f"<{code}")
        value: int = layout.unpack_from(self.data, self.skip(layout.size, what))[0]
        return value

    def string(self, what: str) -> str:
        """The next string, without its closing NUL."""
        n_bytes = self.number("H", what)
        start = self.skip(n_bytes, what)
        raw = self.data[start : start + n_bytes]
        if not raw.endswith(b"\0"):
            raise WeightsError(f"{self.path}: {what} at offset {start} is not a NUL-terminated string")
        return raw[:-1].decode("utf-8", errors="replace")

    def variable(self) -> _Variable:
        """The next variable's header; its data is stepped over."""
        name = self.string("a variable's name")
        rank = self.number("B", f"rank of {name}")
        shape = tuple(self.number("I", f"shape of {name}") for _ in range(rank))
        type_id = self.number("B", f"type of {name}")
        n_bytes = self.number("I", f"size of {name}")
        if type_id not in _DTYPES:
            raise WeightsError(f"{self.path}: {name} has unknown type {type_id}; known are {sorted(_DTYPES)}")
        n_expected = math.prod(shape) * _DTYPES[type_id].itemsize
        if n_bytes != n_expected:
            raise WeightsError(f"{self.path}: {name} {list(shape)} should have {n_expected} bytes, has {n_bytes}")
        return _Variable(name, shape, type_id, self.skip(n_bytes, f"data of {name}"))


def read_ctranslate2(path: Path) -> Tensors:
    """Tensors of a Whisper ``model.bin`` (binary version 6, ``WhisperSpec`` revision 3) under Hugging Face names.

    Stacked projections are split into q, k and v; the k bias, which Whisper does not have, must be zero and is dropped.
    The vocabulary head is an alias of the embedding and is not repeated.

    Raises:
        WeightsError: if the file is truncated, is no such model, or holds variables other than a Whisper's.
    """
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            variables = _read_variables(_Cursor(path, data))
            return _to_hugging_face(path, {v.name: _tensor(data, v) for v in variables})
    except (OSError, ValueError) as error:  # ValueError: an empty file can't be mapped
        raise WeightsError(f"{path}: not a readable model.bin: {error}") from error


def _read_variables(cursor: _Cursor) -> list[_Variable]:
    version = cursor.number("I", "binary version")
    if version != BINARY_VERSION:
        raise WeightsError(f"{cursor.path}: CTranslate2 binary version {version}; only {BINARY_VERSION} is read")
    spec = (cursor.string("spec name"), cursor.number("I", "spec revision"))
    if spec != SPEC:
        raise WeightsError(f"{cursor.path}: {spec[0]} revision {spec[1]}; only {SPEC[0]} revision {SPEC[1]} is read")
    variables = [cursor.variable() for _ in range(cursor.number("I", "number of variables"))]
    n_of_name = Counter(variable.name for variable in variables)
    _refuse(f"{cursor.path}", repeated=sorted(name for name, n in n_of_name.items() if n > 1))
    n_aliases = cursor.number("I", "number of aliases")
    aliases = [(cursor.string("an alias"), cursor.string("an alias")) for _ in range(n_aliases)]
    if aliases != [HEAD_ALIAS]:
        raise WeightsError(f"{cursor.path}: the only alias should be {HEAD_ALIAS} (tied head), found {aliases}")
    if cursor.offset_bytes != len(cursor.data):
        raise WeightsError(f"{cursor.path}: {len(cursor.data) - cursor.offset_bytes} bytes behind the last alias")
    return variables


def _tensor(data: mmap.mmap, variable: _Variable) -> torch.Tensor:
    """A copy of the variable's data, which is unaligned in the file."""
    n_values = math.prod(variable.shape)
    values: NDArray[np.generic] = np.frombuffer(data, _DTYPES[variable.type_id], n_values, variable.offset_bytes).copy()
    tensor = torch.from_numpy(values).reshape(variable.shape)
    return tensor.view(torch.bfloat16) if variable.type_id == _BFLOAT16 else tensor


def _to_hugging_face(path: Path, variables: dict[str, torch.Tensor]) -> Tensors:
    scalars = {name: tensor.item() for name, tensor in variables.items() if tensor.ndim == 0}
    arrays = {name: tensor for name, tensor in variables.items() if tensor.ndim > 0}
    names = _names(_n_layers(arrays, "encoder"), _n_layers(arrays, "decoder"))
    _refuse(
        f"{path} is not a half or full precision Whisper",
        missing=sorted(names.keys() - arrays.keys()),
        unknown=sorted(arrays.keys() - names.keys()),
        unsplittable=[name for name, array in arrays.items() if array.shape[0] % len(names.get(name, (name,)))],
        not_float=[name for name, array in arrays.items() if not array.is_floating_point()],
        empty=[name for name, array in arrays.items() if array.numel() == 0],
    )
    _refuse(
        f"{path} is not a Whisper as it is known",
        scalars=_scalar_faults(scalars, d_model=arrays["decoder/embeddings/weight"].shape[-1]),
    )
    tensors: Tensors = {}
    for name, parts in names.items():
        for part, rows in zip(parts, arrays[name].chunk(len(parts)), strict=True):
            tensors[part] = rows.clone() if len(parts) > 1 else rows
    return _without_k_biases(path, tensors)


def _n_layers(arrays: dict[str, torch.Tensor], side: str) -> int:
    return len({name.split("/")[1] for name in arrays if name.startswith(f"{side}/layer_") and name.count("/") > 2})


def _names(n_encoder_layers: int, n_decoder_layers: int) -> dict[str, tuple[str, ...]]:
    """Every array of a Whisper in CTranslate2's names, and the Hugging Face names that its rows are split into."""
    names: dict[str, tuple[str, ...]] = {"decoder/embeddings/weight": ("model.decoder.embed_tokens.weight",)}
    for conv in ("conv1", "conv2"):
        for kind in ("weight", "bias"):
            names[f"encoder/{conv}/{kind}"] = (f"model.encoder.{conv}.{kind}",)
    for side, n_layers in (("encoder", n_encoder_layers), ("decoder", n_decoder_layers)):
        names[f"{side}/position_encodings/encodings"] = (f"model.{side}.embed_positions.weight",)
        for source, target in _NORM_KINDS.items():
            names[f"{side}/layer_norm/{source}"] = (f"model.{side}.layer_norm.{target}",)
        for layer in range(n_layers):
            for inner, modules in _LAYER[side].items():
                kinds = _NORM_KINDS if inner.endswith("layer_norm") else {"weight": "weight", "bias": "bias"}
                for source, target in kinds.items():
                    parts = tuple(f"model.{side}.layers.{layer}.{module}.{target}" for module in modules)
                    names[f"{side}/layer_{layer}/{inner}/{source}"] = parts
    return names


def _scalar_faults(scalars: dict[str, float], *, d_model: int) -> list[str]:
    n_heads = d_model // HEAD_DIM
    required = _SCALARS | {"encoder/num_heads": n_heads, "decoder/num_heads": n_heads}
    expected = required | _LATER_SCALARS
    return [
        f"{name} is {scalars.get(name)}, should be {expected.get(name)}"
        for name in sorted(scalars.keys() | required.keys())
        if scalars.get(name) != expected.get(name)
    ]


def _without_k_biases(path: Path, tensors: Tensors) -> Tensors:
    """The tensors without the zeros that CTranslate2 stacks between the biases of q and v."""
    k_biases = [name for name in tensors if name.endswith(".k_proj.bias")]
    _refuse(f"{path}: Whisper has no k bias", nonzero=[name for name in k_biases if bool(tensors[name].any())])
    return {name: tensor for name, tensor in tensors.items() if name not in k_biases}
