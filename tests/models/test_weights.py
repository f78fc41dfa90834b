"""Weights: what is read is what was written, and whatever is wrong with a file is one clear error."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from models.container import WeightsKind
from models.errors import WeightsError
from models.weights import load_exactly, read_ctranslate2, read_safetensors, read_weights

D_MODEL = 64  # one head
TYPE_IDS = {torch.float32: 0, torch.int8: 1, torch.int16: 2, torch.float16: 4, torch.bfloat16: 5}
ALIAS = (("decoder/projection/weight", "decoder/embeddings/weight"),)

Variables = dict[str, torch.Tensor]


def string(text: str) -> bytes:
    return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"


def model_bin(
    variables: Variables,
    *,
    version: int = 6,
    spec: str = "WhisperSpec",
    revision: int = 3,
    aliases: tuple[tuple[str, str], ...] = ALIAS,
) -> bytes:
    """A CTranslate2 file written from its description, independently of the reader."""
    parts = [struct.pack("<I", version), string(spec), struct.pack("<II", revision, len(variables))]
    for name, tensor in variables.items():
        data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        shape = struct.pack(f"<B{tensor.ndim}I", tensor.ndim, *tensor.shape)
        parts += [string(name), shape, struct.pack("<BI", TYPE_IDS[tensor.dtype], len(data)), data]
    parts.append(struct.pack("<I", len(aliases)))
    parts += [string(name) for alias in aliases for name in alias]
    return b"".join(parts)


def small_whisper(dtype: torch.dtype = torch.float16) -> Variables:
    """Every variable of a Whisper with one encoder and two decoder layers, filled with noise."""
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    variables = {
        "decoder/embeddings/weight": noise(10, D_MODEL),
        "decoder/position_encodings/encodings": noise(5, D_MODEL),
        "encoder/position_encodings/encodings": noise(4, D_MODEL),
        "encoder/conv1/weight": noise(D_MODEL, 8, 3),
        "encoder/conv1/bias": noise(D_MODEL),
        "encoder/conv2/weight": noise(D_MODEL, D_MODEL, 3),
        "encoder/conv2/bias": noise(D_MODEL),
    }
    rows = {"self_attention/linear_0": 3, "self_attention/linear_1": 1, "ffn/linear_0": 4, "ffn/linear_1": 1}
    cross_rows = {"attention/linear_0": 1, "attention/linear_1": 2, "attention/linear_2": 1}
    for side, n_layers in (("encoder", 1), ("decoder", 2)):
        norms = [f"{side}/layer_norm"]
        for layer in range(n_layers):
            linears = rows | (cross_rows if side == "decoder" else {})
            for name, n_blocks in linears.items():
                columns = 4 * D_MODEL if name == "ffn/linear_1" else D_MODEL
                variables[f"{side}/layer_{layer}/{name}/weight"] = noise(n_blocks * D_MODEL, columns)
                variables[f"{side}/layer_{layer}/{name}/bias"] = noise(n_blocks * D_MODEL)
            variables[f"{side}/layer_{layer}/self_attention/linear_0/bias"][D_MODEL : 2 * D_MODEL] = 0
            if side == "decoder":
                variables[f"{side}/layer_{layer}/attention/linear_1/bias"][:D_MODEL] = 0
            norms += [f"{side}/layer_{layer}/{name.split('/')[0]}/layer_norm" for name in linears]
        for norm in dict.fromkeys(norms):
            variables[f"{norm}/gamma"] = noise(D_MODEL)
            variables[f"{norm}/beta"] = noise(D_MODEL)
    for name, value in {"activation": 3, "alibi": 0, "pre_norm": 1, "scale_embeddings": 0}.items():
        variables[f"decoder/{name}"] = torch.tensor(value, dtype=torch.int8)
    variables["decoder/start_from_zero_embedding"] = torch.tensor(0, dtype=torch.int8)
    for name, value in {"decoder/alignment_heads": 1, "decoder/alignment_layer": -1}.items():
        variables[name] = torch.tensor(value, dtype=torch.int16)
    for side in ("encoder", "decoder"):
        variables[f"{side}/num_heads"] = torch.tensor(1, dtype=torch.int16)
    return variables


@pytest.fixture
def write(tmp_path: Path) -> Callable[[bytes], Path]:
    def to_file(data: bytes) -> Path:
        path = tmp_path / "model.bin"
        path.write_bytes(data)
        return path

    return to_file


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_ctranslate2_values_come_back_under_hugging_face_names(
    write: Callable[[bytes], Path], dtype: torch.dtype
) -> None:
    variables = small_whisper(dtype)
    tensors = read_weights(write(model_bin(variables)), WeightsKind.CTRANSLATE2)

    layer, prefix = "decoder/layer_1", "model.decoder.layers.1"
    stacked = variables[f"{layer}/self_attention/linear_0/weight"]
    assert torch.equal(tensors[f"{prefix}.self_attn.q_proj.weight"], stacked[:D_MODEL])
    assert torch.equal(tensors[f"{prefix}.self_attn.k_proj.weight"], stacked[D_MODEL : 2 * D_MODEL])
    assert torch.equal(tensors[f"{prefix}.self_attn.v_proj.weight"], stacked[2 * D_MODEL :])
    crossed = variables[f"{layer}/attention/linear_1/bias"]
    assert torch.equal(tensors[f"{prefix}.encoder_attn.v_proj.bias"], crossed[D_MODEL:])
    assert torch.equal(tensors[f"{prefix}.fc2.weight"], variables[f"{layer}/ffn/linear_1/weight"])
    assert torch.equal(tensors[f"{prefix}.final_layer_norm.bias"], variables[f"{layer}/ffn/layer_norm/beta"])
    assert torch.equal(tensors["model.encoder.layer_norm.weight"], variables["encoder/layer_norm/gamma"])
    assert not any("k_proj.bias" in name or "proj_out" in name for name in tensors)
    # 7 outside layers, 2 final norms; 15 in an encoder layer, 24 in a decoder layer (q, k, v, out and their norm again)
    assert len(tensors) == 7 + 4 + 15 + 2 * 24


def test_names_and_shapes_are_those_of_the_transformers_class(write: Callable[[bytes], Path]) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is the reference for names")
    config = transformers.WhisperConfig(
        **{"d_model": D_MODEL, "vocab_size": 10, "num_mel_bins": 8, "max_source_positions": 4},
        **{"encoder_layers": 1, "encoder_attention_heads": 1, "encoder_ffn_dim": 4 * D_MODEL},
        **{"decoder_layers": 2, "decoder_attention_heads": 1, "decoder_ffn_dim": 4 * D_MODEL},
        **{"max_target_positions": 5, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0},
    )
    model = transformers.WhisperForConditionalGeneration(config)
    tensors = read_ctranslate2(write(model_bin(small_whisper())))
    load_exactly(model, tensors, tied={"proj_out.weight": "model.decoder.embed_tokens.weight"})
    assert torch.equal(model.proj_out.weight, tensors["model.decoder.embed_tokens.weight"].float())


def test_unknown_and_missing_variables_are_named_together(write: Callable[[bytes], Path]) -> None:
    variables = small_whisper()
    del variables["encoder/conv2/bias"]
    variables["encoder/conv3/bias"] = torch.zeros(3)
    with pytest.raises(WeightsError, match=r"missing: encoder/conv2/bias; unknown: encoder/conv3/bias"):
        read_ctranslate2(write(model_bin(variables)))


def test_bias_on_k_is_refused(write: Callable[[bytes], Path]) -> None:
    variables = small_whisper()
    variables["decoder/layer_0/attention/linear_1/bias"][3] = 0.5
    with pytest.raises(WeightsError, match=r"no k bias.*model\.decoder\.layers\.0\.encoder_attn\.k_proj\.bias"):
        read_ctranslate2(write(model_bin(variables)))


def test_network_of_another_kind_is_refused_by_its_scalars(write: Callable[[bytes], Path]) -> None:
    variables = small_whisper() | {"decoder/activation": torch.tensor(0, dtype=torch.int8)}
    with pytest.raises(WeightsError, match="decoder/activation is 0, should be 3"):
        read_ctranslate2(write(model_bin(variables)))
    del variables["decoder/activation"]
    with pytest.raises(WeightsError, match="decoder/activation is None, should be 3"):
        read_ctranslate2(write(model_bin(variables)))


def test_quantised_file_is_refused(write: Callable[[bytes], Path]) -> None:
    variables = small_whisper()
    variables["encoder/layer_0/ffn/linear_0/weight"] = torch.ones(4 * D_MODEL, D_MODEL, dtype=torch.int8)
    with pytest.raises(WeightsError, match="not_float: encoder/layer_0/ffn/linear_0/weight"):
        read_ctranslate2(write(model_bin(variables)))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (model_bin({}, version=5), "binary version 5; only 6"),
        (model_bin({}, spec="TransformerSpec"), "TransformerSpec revision 3; only WhisperSpec revision 3"),
        (model_bin({}, revision=2), "WhisperSpec revision 2; only WhisperSpec revision 3"),
        (model_bin({}, aliases=()), "tied head"),
        (model_bin({}) + b"!", "1 bytes behind the last alias"),
        (model_bin({}), "missing: decoder/embeddings/weight"),
        (b"", "not a readable model.bin"),
    ],
)
def test_foreign_file_says_what_it_is(write: Callable[[bytes], Path], data: bytes, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        read_ctranslate2(write(data))


def test_absent_file_is_a_weights_error(tmp_path: Path) -> None:
    for kind in WeightsKind:
        with pytest.raises(WeightsError, match=r"absent\.bin"):
            read_weights(tmp_path / "absent.bin", kind)


def test_repeated_variable_is_refused(write: Callable[[bytes], Path]) -> None:
    data = model_bin({"aa": torch.zeros(1), "bb": torch.zeros(1)}).replace(b"bb", b"aa")
    with pytest.raises(WeightsError, match="repeated: aa"):
        read_ctranslate2(write(data))


WHOLE = model_bin(small_whisper())


@settings(max_examples=40, deadline=None)
@given(length=st.integers(min_value=1, max_value=len(WHOLE) - 1))
def test_file_cut_anywhere_is_called_truncated(tmp_path_factory: pytest.TempPathFactory, length: int) -> None:
    path = tmp_path_factory.mktemp("cut") / "model.bin"
    path.write_bytes(WHOLE[:length])
    with pytest.raises(WeightsError, match=r"truncated: .* bytes at offset \d+, \d+ are left"):
        read_ctranslate2(path)


@settings(max_examples=150, deadline=None)
@given(position=st.integers(min_value=0, max_value=4000), value=st.binary(min_size=1, max_size=4))
def test_whatever_the_bytes_the_answer_is_tensors_or_a_weights_error(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: bytes
) -> None:
    scalars_first = dict(sorted(small_whisper().items(), key=lambda item: item[1].numel()))
    data = bytearray(model_bin(scalars_first))
    data[position : position + len(value)] = value
    path = tmp_path_factory.mktemp("fuzz") / "model.bin"
    path.write_bytes(data)
    try:
        assert read_ctranslate2(path)
    except WeightsError as error:
        assert str(path) in str(error)


def test_safetensors_single_and_sharded_hold_the_same(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(3.0), "b": torch.ones(2, 2, dtype=torch.bfloat16), "c": torch.zeros(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    shards = {"one.safetensors": ("a", "c"), "two.safetensors": ("b",)}
    for shard, names in shards.items():
        save_file({name: tensors[name] for name in names}, tmp_path / shard)
    weight_map = {name: shard for shard, names in shards.items() for name in names}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))

    for path in (tmp_path / "model.safetensors", index):
        read = read_weights(path, WeightsKind.SAFETENSORS)
        assert read.keys() == tensors.keys()
        assert all(torch.equal(read[name], tensors[name]) for name in tensors)
        assert read["b"].dtype == torch.bfloat16


def test_shard_that_differs_from_its_index_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(1), "x": torch.zeros(1)}, tmp_path / "one.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "one.safetensors"}}))
    with pytest.raises(WeightsError, match="missing: b; unknown: x"):
        read_safetensors(index)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ("{", "not a readable index"),
        ("[]", "non-empty weight_map"),
        ('{"weight_map": {}}', "non-empty weight_map"),
        ('{"weight_map": {"a": "../secret.safetensors"}}', "not a plain file name"),
        ('{"weight_map": {"a": "gone.safetensors"}}', r"gone\.safetensors: not a readable safetensors file"),
    ],
)
def test_broken_index_is_refused(tmp_path: Path, index: str, message: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(index)
    with pytest.raises(WeightsError, match=message):
        read_safetensors(path)


def test_damaged_safetensors_file_is_a_weights_error(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(100)}, path)
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(WeightsError, match="not a readable safetensors file"):
        read_safetensors(path)


class Tied(torch.nn.Module):
    """Two parameters and a head that shares the first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(3, 2)
        self.norm = torch.nn.LayerNorm(2)
        self.head = torch.nn.Linear(2, 3, bias=False)
        self.head.weight = self.embed.weight


TIES = {"head.weight": "embed.weight"}


def fitting() -> dict[str, torch.Tensor]:
    ones = torch.ones(2, dtype=torch.float16)
    return {"embed.weight": torch.full((3, 2), 0.5, dtype=torch.float16), "norm.weight": ones, "norm.bias": ones}


@pytest.mark.parametrize("head", [True, False])
def test_tied_head_may_be_present_or_absent(head: bool) -> None:
    tensors = fitting() | ({"head.weight": fitting()["embed.weight"]} if head else {})
    module, headless = Tied(), Tied()
    del headless.head
    for target in (module, headless):
        load_exactly(target, tensors, tied=TIES)
        assert torch.equal(target.embed.weight, torch.full((3, 2), 0.5))
    assert torch.equal(module.head.weight, module.embed.weight)


def test_head_that_is_not_tied_is_refused() -> None:
    with pytest.raises(WeightsError, match=r"untied: head\.weight differs from embed\.weight"):
        load_exactly(Tied(), fitting() | {"head.weight": torch.zeros(3, 2)}, tied=TIES)


def test_every_misfit_is_listed_in_one_error_and_nothing_is_loaded() -> None:
    module = Tied()
    before = {name: parameter.clone() for name, parameter in module.state_dict().items()}
    tensors = fitting() | {"extra": torch.zeros(1), "norm.bias": torch.zeros(7)}
    del tensors["norm.weight"]
    with pytest.raises(WeightsError) as caught:
        load_exactly(module, tensors, tied=TIES)
    message = str(caught.value)
    assert "missing: norm.weight" in message
    assert "unknown: extra" in message
    assert "misshapen: norm.bias is [7], should be [2]" in message
    assert all(torch.equal(parameter, before[name]) for name, parameter in module.state_dict().items())
