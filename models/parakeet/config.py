"""Sizes and special numbers of one Parakeet TDT checkpoint.

Knows how to read them from a ``config.json`` of transformers and from the configuration inside a ``.nemo`` archive, and
refuses what the network here does not compute. Does not know text, audio or the network's arithmetic.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vad.audio import SAMPLE_RATE_HZ

from ..errors import ModelFilesError

HOP_SAMPLES = 160  # one mel frame, 10 ms
SUBSAMPLING = 8  # mel frames of one encoder frame: three convolutions of stride 2
FRAME_SAMPLES = HOP_SAMPLES * SUBSAMPLING  # one encoder frame, 80 ms

DEFAULT_MAX_SYMBOLS = 10  # of every published checkpoint
MODEL_TYPE = "parakeet_tdt"  # in a config.json

_AT_MOST = {  # several times what any published checkpoint has; each is 1 at least
    "n_mels": 1024,
    "n_layers": 256,
    "d_model": 16_384,
    "n_heads": 256,
    "d_ffn": 65_536,
    "conv_kernel": 255,
    "subsampling_channels": 4096,
    "d_predictor": 16_384,
    "n_predictor_layers": 32,
    "vocabulary_size": 1 << 20,
    "max_symbols": 1024,
}
_MAX_DURATIONS = 64


def n_frames_of(n_samples: int) -> int:
    """Encoder frames of a buffer: those of its whole mel frames, the last of which may be short."""
    return -(-(n_samples // HOP_SAMPLES) // SUBSAMPLING)


@dataclass(frozen=True, slots=True)
class ParakeetConfig:
    """One checkpoint. Widths in elements, durations and ``attention_span`` in encoder frames of 80 ms."""

    n_mels: int
    n_layers: int
    d_model: int
    n_heads: int
    d_ffn: int
    conv_kernel: int
    subsampling_channels: int
    d_predictor: int
    n_predictor_layers: int
    vocabulary_size: int  # pieces and the blank
    blank_id: int
    durations: tuple[int, ...] = (0, 1, 2, 3, 4)
    max_symbols: int = DEFAULT_MAX_SYMBOLS  # tokens at one frame, after which the next frame is forced
    has_attention_bias: bool = False  # of the attention's and the feed-forward's linears
    has_convolution_bias: bool = False
    scales_input: bool = False  # by √d_model, behind the subsampling
    attention_span: tuple[int, int] | None = None  # frames seen to the left and right; None: all

    def __post_init__(self) -> None:
        for name, at_most in _AT_MOST.items():
            if not 1 <= getattr(self, name) <= at_most:
                raise ValueError(f"{name} is {getattr(self, name)}, accepted are 1 to {at_most}")
        if self.d_model % self.n_heads or self.d_model % 2:
            raise ValueError(f"width {self.d_model} is not even, or not a multiple of {self.n_heads} heads")
        if self.n_mels % SUBSAMPLING:
            raise ValueError(f"{self.n_mels} mel channels are not a multiple of {SUBSAMPLING}")
        if self.conv_kernel % 2 == 0:
            raise ValueError(f"a convolution kernel of {self.conv_kernel} has no middle")
        if not 0 <= self.blank_id < self.vocabulary_size:
            raise ValueError(f"blank {self.blank_id} is none of {self.vocabulary_size} tokens")
        if not 0 < len(self.durations) <= _MAX_DURATIONS or min(self.durations) < 0:
            raise ValueError(f"durations {self.durations}, accepted are 1 to {_MAX_DURATIONS}, each 0 or more")
        if self.attention_span is not None and min(self.attention_span) < 0:
            raise ValueError(
                f"attention over {self.attention_span} frames to the left and right; accepted are 0 or more"
            )

    @property
    def n_logits(self) -> int:
        """Outputs of the joint network: tokens, then durations."""
        return self.vocabulary_size + len(self.durations)

    @staticmethod
    def from_transformers(settings: Mapping[str, Any], *, source: str = "config.json") -> "ParakeetConfig":
        """From the content of a ``config.json``; ``source`` names it in errors.

        Raises:
            ModelFilesError: if a size is missing, or a choice is one that is not computed here.
        """
        encoder = _mapping(settings, "encoder_config", source)
        _expect(
            settings,
            {"model_type": MODEL_TYPE, "hidden_act": "relu"},
            source,
        )
        _expect(
            encoder,
            {
                "hidden_act": "silu",
                "subsampling_factor": SUBSAMPLING,
                "subsampling_conv_kernel_size": 3,
                "subsampling_conv_stride": 2,
            },
            f"encoder_config of {source}",
        )
        return _checked(
            source,
            n_mels=_integer(encoder, "num_mel_bins", source),
            n_layers=_integer(encoder, "num_hidden_layers", source),
            d_model=_integer(encoder, "hidden_size", source),
            n_heads=_integer(encoder, "num_attention_heads", source),
            d_ffn=_integer(encoder, "intermediate_size", source),
            conv_kernel=_integer(encoder, "conv_kernel_size", source),
            subsampling_channels=_integer(encoder, "subsampling_conv_channels", source),
            d_predictor=_integer(settings, "decoder_hidden_size", source),
            n_predictor_layers=_integer(settings, "num_decoder_layers", source),
            vocabulary_size=_integer(settings, "vocab_size", source),
            blank_id=_integer(settings, "blank_token_id", source),
            durations=_integers(settings, "durations", source),
            max_symbols=_integer(settings, "max_symbols_per_step", source, default=DEFAULT_MAX_SYMBOLS),
            # transformers' class defaults, which the published files therefore need not say
            has_attention_bias=_boolean(encoder, "attention_bias", source, default=True),
            has_convolution_bias=_boolean(encoder, "convolution_bias", source, default=True),
            scales_input=_boolean(encoder, "scale_input", source, default=True),
        )

    @staticmethod
    def from_nemo(settings: Mapping[str, Any], *, n_pieces: int, source: str) -> "ParakeetConfig":
        """From the content of a ``model_config.yaml`` and the number of the tokenizer's pieces (the blank follows).

        Raises:
            ModelFilesError: if a size is missing, or a choice is one that is not computed here.
        """
        encoder = _mapping(settings, "encoder", source)
        prediction = _mapping(_mapping(settings, "decoder", source), "prednet", source)
        decoding = _mapping(settings, "decoding", source)
        greedy = _mapping(decoding, "greedy", source) if decoding.get("greedy") is not None else {}
        joint = _mapping(settings, "joint", source)
        d_model, d_predictor = _integer(encoder, "d_model", source), _integer(prediction, "pred_hidden", source)
        _expect(
            encoder,
            {
                "subsampling": "dw_striding",
                "subsampling_factor": SUBSAMPLING,
                "conv_norm_type": "batch_norm",
                "conv_context_size": None,
                "causal_downsampling": False,
                "att_context_style": "regular",
                "untie_biases": True,
                "reduction": None,
            },
            f"encoder of {source}",
        )
        _expect(_mapping(settings, "preprocessor", source), _FRONT_END, f"preprocessor of {source}")
        attention = encoder.get("self_attention_model", _FULL_ATTENTION)
        if attention not in (_FULL_ATTENTION, _BANDED_ATTENTION):
            raise ModelFilesError(
                f"{source}: self_attention_model is {attention!r}; accepted: {_FULL_ATTENTION}, {_BANDED_ATTENTION}"
            )
        span = _integers(encoder, "att_context_size", source) if attention == _BANDED_ATTENTION else None
        durations = _integers(decoding, "durations", source)
        _expect(joint, {"num_classes": n_pieces, "num_extra_outputs": len(durations)}, f"joint of {source}")
        joint_settings = _mapping(joint, "jointnet", source)
        _expect(joint_settings, {"joint_hidden": d_predictor, "activation": "relu"}, f"jointnet of {source}")
        has_bias = _boolean(encoder, "use_bias", source, default=True)
        return _checked(
            source,
            n_mels=_integer(encoder, "feat_in", source),
            n_layers=_integer(encoder, "n_layers", source),
            d_model=d_model,
            n_heads=_integer(encoder, "n_heads", source),
            d_ffn=d_model * _integer(encoder, "ff_expansion_factor", source),
            conv_kernel=_integer(encoder, "conv_kernel_size", source),
            subsampling_channels=_integer(encoder, "subsampling_conv_channels", source),
            d_predictor=d_predictor,
            n_predictor_layers=_integer(prediction, "pred_rnn_layers", source),
            vocabulary_size=n_pieces + 1,
            blank_id=n_pieces,
            durations=durations,
            max_symbols=_integer(greedy, "max_symbols", source, default=DEFAULT_MAX_SYMBOLS),
            has_attention_bias=has_bias,
            has_convolution_bias=has_bias,
            scales_input=_boolean(encoder, "xscaling", source, default=True),
            attention_span=None if span is None else (span[0], span[-1]),
        )


_FRONT_END = {  # in NeMo's words; ``features.py`` computes it
    "sample_rate": SAMPLE_RATE_HZ,
    "normalize": "per_feature",
    "window_size": 0.025,
    "window_stride": 0.01,
    "window": "hann",
    "n_fft": 512,
    "log": True,
    "frame_splicing": 1,
}

_FULL_ATTENTION, _BANDED_ATTENTION = "rel_pos", "rel_pos_local_attn"  # NeMo's names


def _checked(source: str, **sizes: Any) -> ParakeetConfig:
    try:
        return ParakeetConfig(**sizes)
    except ValueError as error:
        raise ModelFilesError(f"{source}: {error}") from error


def _expect(settings: Mapping[str, Any], expected: Mapping[str, object], source: str) -> None:
    """Refuse a choice that is not computed here; one that is not said is taken to be the usual."""
    faults = [
        f"{name} is {settings[name]!r}, only {value!r} is supported"
        for name, value in expected.items()
        if settings.get(name, value) != value
    ]
    if faults:
        raise ModelFilesError(f"{source}: {'; '.join(faults)}")


def _mapping(settings: Mapping[str, Any], name: str, source: str) -> Mapping[str, Any]:
    value = settings.get(name)
    if not isinstance(value, Mapping):
        raise ModelFilesError(f"{source}: {name} should be an object with the model's sizes, is {value!r}")
    return value


def _integer(settings: Mapping[str, Any], name: str, source: str, *, default: int | None = None) -> int:
    """``default`` where nothing, or null, is said."""
    value = default if settings.get(name) is None else settings[name]
    if not isinstance(value, int) or isinstance(value, bool):
        raise ModelFilesError(f"{source}: {name} should be a whole number, is {value!r}")
    return value


def _integers(settings: Mapping[str, Any], name: str, source: str) -> tuple[int, ...]:
    value = settings.get(name)
    if not isinstance(value, list) or not value or not all(isinstance(number, int) for number in value):
        raise ModelFilesError(f"{source}: {name} should be a list of whole numbers, is {value!r}")
    return tuple(value)


def _boolean(settings: Mapping[str, Any], name: str, source: str, *, default: bool) -> bool:
    value = settings.get(name, default)
    if not isinstance(value, bool):
        raise ModelFilesError(f"{source}: {name} should be true or false, is {value!r}")
    return value
