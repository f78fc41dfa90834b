"""NeMo's archives, tar and zip: the same model as transformers' layout, and every fault said."""

import gzip
import io
import lzma
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models.errors import ModelFilesError, WeightsError
from models.parakeet.nemo import read_nemo, renamed
from models.parakeet.reference import Parakeet
from tests.models.parakeet.files import (
    NEMO_SEED,
    NEMO_SMALL,
    PIECES,
    nemo_members,
    nemo_name,
    nemo_settings,
    nemo_tensors,
    with_unpacked_weights,
    write_tar,
    write_zip,
)
from tests.models.parakeet.small import small_model

WRITERS: dict[str, Callable[[Path, dict[str, bytes]], Path]] = {
    "tar": write_tar,
    "tar without a folder": lambda path, members: write_tar(path, members, prefix=""),
    "zip": write_zip,
    "zip with unpacked weights": lambda path, members: write_zip(path, with_unpacked_weights(members)),
}


@pytest.mark.parametrize("kind", WRITERS)
def test_every_form_of_archive_gives_the_model_that_was_put_in(tmp_path: Path, kind: str) -> None:
    path = WRITERS[kind](tmp_path / "x.nemo", nemo_members())
    read = read_nemo(path)
    assert read.config == NEMO_SMALL
    assert read.pieces.texts == (None, None, None, None, *(p.replace("▁", " ") for p in PIECES[4:]), None)
    model = Parakeet.without_values(read.config)
    model.load(read.tensors)
    for name, tensor in small_model(NEMO_SMALL, seed=NEMO_SEED).state_dict().items():
        assert torch.equal(model.state_dict()[name], tensor), name
    assert list(tmp_path.iterdir()) == [path], "nothing is unpacked beside it"


def test_every_name_of_the_network_has_one_in_an_archive() -> None:
    names = list(small_model(NEMO_SMALL, seed=NEMO_SEED).state_dict())
    assert [renamed(nemo_name(name)) for name in names] == names
    assert (
        renamed("encoder.layers.7.self_attn.linear_pos.weight") == "encoder.layers.7.self_attn.relative_k_proj.weight"
    )
    assert renamed("encoder.layers.7.feed_forward1.linear1.weight") == "encoder.layers.7.feed_forward1.linear1.weight"


def test_banded_attention_is_taken_over(tmp_path: Path) -> None:
    settings = nemo_settings(NEMO_SMALL)
    settings["encoder"] |= {"self_attention_model": "rel_pos_local_attn", "att_context_size": [128, 64]}
    assert read_nemo(write_tar(tmp_path / "x.nemo", nemo_members(settings=settings))).config.attention_span == (128, 64)


class Payload:
    """Runs when it is unpickled."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return exec, ("raise SystemExit('code of the archive ran')",)


@pytest.mark.parametrize(
    "tensors", [{"joint.enc.weight": Payload()}, {"joint.enc.weight": 3}, {3: torch.zeros(1)}, [torch.zeros(1)]]
)
def test_an_archive_runs_no_code_and_holds_tensors_only(tmp_path: Path, tensors: object) -> None:
    with pytest.raises(WeightsError, match="weights of"):
        read_nemo(write_tar(tmp_path / "x.nemo", nemo_members(tensors=tensors)))


def test_a_bare_pickle_is_no_better(tmp_path: Path) -> None:
    members = nemo_members() | {"model_weights.ckpt": pickle.dumps(Payload())}
    with pytest.raises(WeightsError, match="not readable"):
        read_nemo(write_tar(tmp_path / "x.nemo", members))


@pytest.mark.parametrize("content", [b"!!python/object/apply:os.system ['true']", b"created: 2001-99-99", b"[" * 5_000])
def test_yaml_makes_no_objects_and_what_it_can_not_read_is_said(tmp_path: Path, content: bytes) -> None:
    members = nemo_members() | {"model_config.yaml": content}
    with pytest.raises(ModelFilesError, match=r"model_config.yaml of .*: not readable"):
        read_nemo(write_tar(tmp_path / "x.nemo", members))


@pytest.mark.parametrize("name", ["model_config.yaml", "0123_tokenizer.model", "model_weights.ckpt"])
def test_a_missing_member_is_named(tmp_path: Path, name: str) -> None:
    members = nemo_members()
    del members[name]
    with pytest.raises(ModelFilesError, match=name.partition("_")[2] if name[0] == "0" else name):
        read_nemo(write_tar(tmp_path / "x.nemo", members))


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut off"])
def test_what_is_no_archive_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.nemo"
    path.write_bytes(content)
    with pytest.raises(ModelFilesError, match="not a readable archive"):
        read_nemo(path)


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress])
def test_a_compressed_archive_is_read_and_one_cut_short_is_refused(
    tmp_path: Path, pack: Callable[[bytes], bytes]
) -> None:
    path = write_tar(tmp_path / "x.nemo", nemo_members())
    packed = pack(path.read_bytes())
    path.write_bytes(packed)
    assert read_nemo(path).config == NEMO_SMALL
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ModelFilesError, match="not a readable archive: Compressed file ended"):
        read_nemo(path)


def test_an_encrypted_zip_is_refused(tmp_path: Path) -> None:
    path = write_zip(tmp_path / "x.nemo", nemo_members())
    content = bytearray(path.read_bytes())
    for member in zipfile.ZipFile(path).infolist():
        content[member.header_offset + 6] |= 1
    entry = zipfile.ZipFile(path).start_dir
    while (entry := content.find(b"PK\x01\x02", entry)) >= 0:
        content[entry + 8] |= 1
        entry += 4
    path.write_bytes(content)
    with pytest.raises(ModelFilesError, match="not a readable archive: .* is encrypted"):
        read_nemo(path)


@pytest.mark.parametrize("name", ["model_config.yaml", "0123_tokenizer.model"])
def test_a_few_bytes_that_unpack_to_very_many_are_not_read(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.nemo"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for member, content in (nemo_members() | {name: bytes(17 << 20)}).items():
            file.writestr(member, content)
    with pytest.raises(ModelFilesError, match=f"{name} of .* has more than the 16 MiB that are read"):
        read_nemo(path)


@pytest.mark.parametrize("name", ["model_weights.ckpt", "model_weights/data/0"])
def test_weights_that_unpack_to_very_many_bytes_are_not_written_to_a_disk(tmp_path: Path, name: str) -> None:
    members = nemo_members() if name == "model_weights.ckpt" else with_unpacked_weights(nemo_members())
    path = tmp_path / "x.nemo"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for member, content in (members | {name: bytes(20 << 20)}).items():
            file.writestr(member, content)
    with pytest.raises(WeightsError, match="unpack to 2[0-9]{7} bytes, over 10 times"):
        read_nemo(path)


def test_weights_compressed_inside_their_own_file_are_not_unpacked(tmp_path: Path) -> None:
    members = nemo_members()
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(members["model_weights.ckpt"])) as weights,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as file,
    ):
        for name in weights.namelist():
            file.writestr(name, weights.read(name))
    members["model_weights.ckpt"] = packed.getvalue()
    with pytest.raises(WeightsError, match="are compressed, which torch never does"):
        read_nemo(write_tar(tmp_path / "x.nemo", members))


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("encoder", {"subsampling": "striding"}, "subsampling is 'striding', only 'dw_striding'"),
        ("encoder", {"self_attention_model": "abs_pos"}, "self_attention_model is 'abs_pos'; accepted: rel_pos"),
        ("encoder", {"conv_norm_type": "layer_norm"}, "conv_norm_type"),
        ("encoder", {"conv_context_size": "causal"}, "conv_context_size is 'causal', only None"),
        ("preprocessor", {"normalize": "NA"}, "normalize is 'NA', only 'per_feature'"),
        ("joint", {"num_extra_outputs": 3}, "num_extra_outputs is 3, only 5"),
        ("encoder", {"n_layers": "two"}, "n_layers should be a whole number, is 'two'"),
        ("encoder", {"n_heads": 5}, "not a multiple of 5 heads"),
        ("encoder", {"n_heads": 0}, "n_heads is 0, accepted are 1 to 256"),
        ("encoder", {"n_layers": -1}, "n_layers is -1, accepted are 1 to 256"),
        ("encoder", {"self_attention_model": "rel_pos_local_attn", "att_context_size": []}, "should be a list"),
        ("encoder", {"self_attention_model": "rel_pos_local_attn", "att_context_size": [-1, -1]}, "accepted are 0"),
        ("decoding", {"greedy": "fast"}, "greedy should be an object"),
        ("decoding", {"durations": None}, "durations should be a list"),
        ("joint", {"jointnet": {"joint_hidden": 7, "activation": "relu"}}, "joint_hidden is 7"),
        ("decoder", {"prednet": None}, "prednet should be an object"),
    ],
)
def test_a_configuration_that_is_not_computed_here_is_refused(
    tmp_path: Path, part: str, change: dict[str, object], message: str
) -> None:
    settings = nemo_settings(NEMO_SMALL)
    settings[part] = settings[part] | change
    with pytest.raises(ModelFilesError, match=message):
        read_nemo(write_tar(tmp_path / "x.nemo", nemo_members(settings=settings)))


@pytest.mark.parametrize("name", ["preprocessor.featurizer.window", "preprocessor.featurizer.fb"])
def test_another_front_end_than_ours_is_refused(tmp_path: Path, name: str) -> None:
    tensors = nemo_tensors(small_model(NEMO_SMALL, seed=NEMO_SEED))
    tensors[name] = 1.1 * tensors[name]
    with pytest.raises(WeightsError, match=name):
        read_nemo(write_tar(tmp_path / "x.nemo", nemo_members(tensors=tensors)))
