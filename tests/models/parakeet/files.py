"""Small checkpoints as files: transformers' folder, and NeMo's archives in the forms that are met."""

import io
import json
import re
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
import torch
import yaml
from safetensors.torch import save_file
from torch import Tensor

from models.mel import mel_filters
from models.parakeet.config import ParakeetConfig
from models.parakeet.features import FFT_SAMPLES, WINDOW_SAMPLES
from models.parakeet.reference import Parakeet
from models.parakeet.tokens import SentencePieceModel
from tests.models.parakeet.small import SMALL, small_model, transformers_config

# As v3's begin: no text, then text; the blank follows. 20 pieces for ``SMALL``.
PIECES = "<unk> <|nospeech|> <pad> <|en|> 0 ▁s ▁de er in a t ▁a ▁the ▁¿ ▁' ▁ , . - ?".split()


def write_folder(
    folder: Path,
    tensors: Mapping[str, Tensor] | None = None,
    *,
    config: ParakeetConfig = SMALL,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """transformers' layout."""
    folder.mkdir(parents=True, exist_ok=True)
    held = small_model(config).state_dict() if tensors is None else tensors
    save_file({name: tensor.contiguous() for name, tensor in held.items()}, folder / "model.safetensors")
    content = transformers_config(config).to_dict() | dict(settings or {})
    (folder / "config.json").write_text(json.dumps(content))
    write_tokenizer(folder / "tokenizer.json", config)
    return folder


def write_tokenizer(path: Path, config: ParakeetConfig = SMALL) -> None:
    """PIECES and a blank, as transformers' converter leaves them."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram([(piece, 0.0) for piece in PIECES], unk_id=0))
    tokenizer.add_special_tokens(["<|en|>", "<blank>"])
    assert tokenizer.token_to_id("<blank>") == config.blank_id
    tokenizer.save(str(path))


def nemo_settings(config: ParakeetConfig = SMALL) -> dict[str, Any]:
    """``model_config.yaml``, as far as it is read, and some of the rest."""
    return {
        "target": "nemo.collections.asr.models.rnnt_bpe_models.EncDecRNNTBPEModel",
        "preprocessor": {"normalize": "per_feature", "features": config.n_mels, "window_size": 0.025, "log": True},
        "tokenizer": {"dir": None, "type": "bpe", "model_path": "nemo:0123_tokenizer.model"},
        "encoder": {
            "feat_in": config.n_mels,
            "feat_out": -1,
            "n_layers": config.n_layers,
            "d_model": config.d_model,
            "use_bias": config.has_attention_bias,
            "subsampling": "dw_striding",
            "subsampling_factor": 8,
            "subsampling_conv_channels": config.subsampling_channels,
            "causal_downsampling": False,
            "ff_expansion_factor": config.d_ffn // config.d_model,
            "self_attention_model": "rel_pos",
            "n_heads": config.n_heads,
            "att_context_size": [-1, -1],
            "xscaling": config.scales_input,
            "untie_biases": True,
            "conv_kernel_size": config.conv_kernel,
            "conv_norm_type": "batch_norm",
        },
        "decoder": {
            "blank_as_pad": True,
            "prednet": {"pred_hidden": config.d_predictor, "pred_rnn_layers": config.n_predictor_layers},
        },
        "joint": {
            "num_classes": len(PIECES),
            "num_extra_outputs": len(config.durations),
            "jointnet": {"joint_hidden": config.d_predictor, "activation": "relu"},
        },
        "decoding": {
            "strategy": "greedy_batch",
            "model_type": "tdt",
            "durations": list(config.durations),
            "greedy": {"max_symbols": config.max_symbols},
        },
    }


_NEMO_NAMES = (
    (r"^encoder\.subsampling\.layers\.", "encoder.pre_encode.conv."),
    (r"^encoder\.subsampling\.linear\.", "encoder.pre_encode.out."),
    (r"\.relative_k_proj\.", ".linear_pos."),
    (r"\.([qkv])_proj\.", r".linear_\1."),
    (r"\.o_proj\.", ".linear_out."),
    (r"\.bias_([uv])$", r".pos_bias_\1"),
    (r"\.conv\.norm\.", ".conv.batch_norm."),
    (r"^decoder\.embedding\.", "decoder.prediction.embed."),
    (r"^decoder\.lstm\.", "decoder.prediction.dec_rnn.lstm."),
    (r"^encoder_projector\.", "joint.enc."),
    (r"^decoder\.decoder_projector\.", "joint.pred."),
    (r"^joint\.head\.", "joint.joint_net.2."),
)


def nemo_name(name: str) -> str:
    for pattern, replacement in _NEMO_NAMES:
        name = re.sub(pattern, replacement, name)
    return name


def nemo_tensors(model: Parakeet) -> dict[str, Tensor]:
    own = {nemo_name(name): tensor for name, tensor in model.state_dict().items()}
    return own | {
        "preprocessor.featurizer.window": torch.hann_window(WINDOW_SAMPLES, periodic=False),
        "preprocessor.featurizer.fb": mel_filters(model.config.n_mels, FFT_SAMPLES)[None],
    }


def sentencepiece_model(pieces: list[str] = PIECES) -> bytes:
    model = SentencePieceModel()
    for piece in pieces:
        model.pieces.add(piece=piece)
    data: bytes = model.SerializeToString()
    return data


# All durations are whole in NeMo's feed-forward: its width is a multiple of the model's.
NEMO_SMALL = ParakeetConfig(**({name: getattr(SMALL, name) for name in SMALL.__dataclass_fields__} | {"d_ffn": 64}))
NEMO_SEED = 7  # of weights that have words for noise


def nemo_members(
    *, settings: Mapping[str, Any] | None = None, tensors: object = None, pieces: list[str] = PIECES
) -> dict[str, bytes]:
    """Name → content of an archive with ``model_weights.ckpt``."""
    weights = io.BytesIO()
    torch.save(nemo_tensors(small_model(NEMO_SMALL, seed=NEMO_SEED)) if tensors is None else tensors, weights)
    return {
        "model_config.yaml": yaml.safe_dump(dict(settings or nemo_settings(NEMO_SMALL))).encode(),
        "0123_tokenizer.model": sentencepiece_model(pieces),
        "4567_vocab.txt": b"##s\n",
        "model_weights.ckpt": weights.getvalue(),
    }


def write_tar(path: Path, members: Mapping[str, bytes], *, prefix: str = "./") -> Path:
    with tarfile.open(path, "w") as file:
        for name, content in members.items():
            info = tarfile.TarInfo(prefix + name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return path


def write_zip(path: Path, members: Mapping[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        for name, content in members.items():
            file.writestr(name, content)
    return path


def with_unpacked_weights(members: Mapping[str, bytes]) -> dict[str, bytes]:
    """The members of torch's zip among the archive's own, in a folder ``model_weights``."""
    unpacked = dict(members)
    with zipfile.ZipFile(io.BytesIO(unpacked.pop("model_weights.ckpt"))) as weights:
        for name in weights.namelist():
            unpacked["model_weights/" + name.partition("/")[2]] = weights.read(name)
    return unpacked
