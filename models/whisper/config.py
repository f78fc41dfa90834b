"""Sizes, special tokens and decoding lists of one Whisper checkpoint.

Knows how to read them from the JSON files of Hugging Face (``config.json``, ``generation_config.json``) and CTranslate2,
and from the shapes of the weights where a file says nothing. Does not know text, audio or the network's arithmetic.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import WeightsError

HEAD_SIZE = 64  # of every published checkpoint; the number of heads follows from the width

# Heads whose cross-attention follows the audio in time, as (decoder layer, head). Found by openai-whisper and published in
# its ``_ALIGNMENT_HEADS``; keyed by (decoder layers, width, vocabulary), since neither the weights nor ``config.json`` have them.
_ALIGNMENT_HEADS: dict[tuple[int, int, int], tuple[tuple[int, int], ...]] = {
    (4, 384, 51864): ((1, 0), (2, 0), (2, 5), (3, 0), (3, 1), (3, 2), (3, 3), (3, 4)),
    (4, 384, 51865): ((2, 2), (3, 0), (3, 2), (3, 3), (3, 4), (3, 5)),
    (6, 512, 51865): ((3, 1), (4, 2), (4, 3), (4, 7), (5, 1), (5, 2), (5, 4), (5, 6)),
    (12, 768, 51865): ((5, 3), (5, 9), (8, 0), (8, 4), (8, 7), (8, 8), (9, 0), (9, 7), (9, 9), (10, 5)),
    (4, 1280, 51866): ((2, 4), (2, 11), (3, 3), (3, 6), (3, 11), (3, 14)),
}

_N_VOCAB_ENGLISH = 51864
_N_LANGUAGES = {51864: 99, 51865: 99, 51866: 100}  # language tokens in the table; English-only models have them unused
N_TIMESTAMPS = 1501  # 0.00 s to 30.00 s in steps of 0.02 s


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Token ids that are no text. Languages are ``first_language`` + index; timestamps ``timestamp_begin`` + index."""

    end_of_text: int
    start_of_transcript: int
    first_language: int
    n_languages: int
    translate: int
    transcribe: int
    start_of_lm: int
    start_of_previous: int
    no_speech: int
    no_timestamps: int
    timestamp_begin: int
    is_multilingual: bool

    @staticmethod
    def of_vocabulary(n_vocab: int) -> "SpecialTokens":
        """The layout of a published vocabulary: specials follow the text tokens in one fixed order.

        Raises:
            ValueError: for a size that no published model has.
        """
        if n_vocab not in _N_LANGUAGES:
            raise ValueError(f"no Whisper vocabulary has {n_vocab} tokens; known sizes are {sorted(_N_LANGUAGES)}")
        end_of_text = 50256 if n_vocab == _N_VOCAB_ENGLISH else 50257
        n_languages = _N_LANGUAGES[n_vocab]
        translate = end_of_text + 2 + n_languages
        return SpecialTokens(
            end_of_text=end_of_text,
            start_of_transcript=end_of_text + 1,
            first_language=end_of_text + 2,
            n_languages=n_languages,
            translate=translate,
            transcribe=translate + 1,
            start_of_lm=translate + 2,
            start_of_previous=translate + 3,
            no_speech=translate + 4,
            no_timestamps=translate + 5,
            timestamp_begin=translate + 6,
            is_multilingual=n_vocab != _N_VOCAB_ENGLISH,
        )


@dataclass(frozen=True, slots=True)
class WhisperConfig:
    """One checkpoint. Widths in elements, positions in encoder frames of 20 ms (audio) and tokens (text)."""

    n_mels: int
    n_vocab: int
    width: int
    n_heads: int
    n_ffn: int
    n_encoder_layers: int
    n_decoder_layers: int
    n_audio_positions: int
    n_text_positions: int
    alignment_heads: tuple[tuple[int, int], ...]  # (decoder layer, head)
    suppressed_tokens: tuple[int, ...]  # never written
    suppressed_first_tokens: tuple[int, ...]  # not written as the first token

    def __post_init__(self) -> None:
        if self.width % self.n_heads:
            raise ValueError(f"width {self.width} is not a multiple of {self.n_heads} heads")
        for layer, head in self.alignment_heads:
            if not (0 <= layer < self.n_decoder_layers and 0 <= head < self.n_heads):
                raise ValueError(f"alignment head ({layer}, {head}) lies outside {self.n_decoder_layers} layers of {self.n_heads} heads")

    @staticmethod
    def from_shapes(shapes: Mapping[str, tuple[int, ...]], lists: Mapping[str, Any]) -> "WhisperConfig":
        """Sizes from the shapes of HF-named tensors; decoding lists from ``lists``.

        ``lists`` is the content of ``config.json`` or ``generation_config.json`` of a Hugging Face repository, or of
        CTranslate2's ``config.json``; an empty one serves the published sizes, whose lists are known.

        Raises:
            WeightsError: if a tensor that tells a size is missing.
        """
        missing = {_CONV, _FFN, _TOKENS, _AUDIO_POSITIONS, _TEXT_POSITIONS} - set(shapes)
        if missing:
            raise WeightsError(f"these are no Whisper weights: {', '.join(sorted(missing))} missing")
        width, n_mels, _ = shapes[_CONV]
        n_vocab = shapes[_TOKENS][0]
        n_decoder_layers = _n_layers(shapes, "model.decoder.layers.")
        known_heads = _ALIGNMENT_HEADS.get((n_decoder_layers, width, n_vocab), _last_layers_half(n_decoder_layers, width // HEAD_SIZE))
        heads = lists.get("alignment_heads") or known_heads
        suppressed = lists.get("suppress_tokens") or lists.get("suppress_ids") or _suppressed(n_vocab)
        return WhisperConfig(
            n_mels=n_mels,
            n_vocab=n_vocab,
            width=width,
            n_heads=width // HEAD_SIZE,
            n_ffn=shapes[_FFN][0],
            n_encoder_layers=_n_layers(shapes, "model.encoder.layers."),
            n_decoder_layers=n_decoder_layers,
            n_audio_positions=shapes[_AUDIO_POSITIONS][0],
            n_text_positions=shapes[_TEXT_POSITIONS][0],
            alignment_heads=tuple((int(layer), int(head)) for layer, head in heads),
            suppressed_tokens=tuple(sorted(set(suppressed) | _control_tokens(n_vocab))),
            suppressed_first_tokens=(_SPACE_TOKEN, SpecialTokens.of_vocabulary(n_vocab).end_of_text),
        )


_CONV = "model.encoder.conv1.weight"
_FFN = "model.encoder.layers.0.fc1.weight"
_TOKENS = "model.decoder.embed_tokens.weight"
_AUDIO_POSITIONS = "model.encoder.embed_positions.weight"
_TEXT_POSITIONS = "model.decoder.embed_positions.weight"
_SPACE_TOKEN = 220  # " " in all three vocabularies


def _n_layers(shapes: Mapping[str, tuple[int, ...]], prefix: str) -> int:
    return 1 + max(int(name.removeprefix(prefix).split(".")[0]) for name in shapes if name.startswith(prefix))


def _last_layers_half(n_layers: int, n_heads: int) -> tuple[tuple[int, int], ...]:
    """All heads of the upper half of the layers: openai-whisper's choice where nobody measured."""
    return tuple((layer, head) for layer in range(n_layers // 2, n_layers) for head in range(n_heads))


def _control_tokens(n_vocab: int) -> set[int]:
    special = SpecialTokens.of_vocabulary(n_vocab)
    return {
        special.start_of_transcript,
        special.translate,
        special.transcribe,
        special.start_of_lm,
        special.start_of_previous,
        special.no_speech,
    }

# Tokens of symbols that are not spoken (brackets, notes, hashes, speaker dashes): openai-whisper's ``non_speech_tokens``
# for its two sets of byte-pair ranks.
# fmt: off
_NON_SPEECH_ENGLISH = (
    1, 2, 7, 8, 9, 10, 14, 25, 26, 27, 28, 29, 31, 58, 59, 60, 61, 62, 63, 90, 91, 92, 93, 357, 366, 438, 532,
    685, 705, 796, 930, 1058, 1220, 1267, 1279, 1303, 1343, 1377, 1391, 1635, 1782, 1875, 2162, 2361, 2488,
    3467, 4008, 4211, 4600, 4808, 5299, 5855, 6329, 7203, 9609, 9959, 10563, 10786, 11420, 11709, 11907, 13163,
    13697, 13700, 14808, 15306, 16410, 16791, 17992, 19203, 19510, 20724, 22305, 22935, 27007, 30109, 30420,
    33409, 34949, 40283, 40493, 40549, 47282, 49146,
)
_NON_SPEECH_MULTILINGUAL = (
    1, 2, 7, 8, 9, 10, 14, 25, 26, 27, 28, 29, 31, 58, 59, 60, 61, 62, 63, 90, 91, 92, 93, 359, 503, 522, 542,
    873, 893, 902, 918, 922, 931, 1350, 1853, 1982, 2460, 2627, 3246, 3253, 3268, 3536, 3846, 3961, 4183, 4667,
    6585, 6647, 7273, 9061, 9383, 10428, 10929, 11938, 12033, 12331, 12562, 13793, 14157, 14635, 15265, 15618,
    16553, 16604, 18362, 18956, 20075, 21675, 22520, 26130, 26161, 26435, 28279, 29464, 31650, 32302, 32470,
    36865, 42863, 47425, 49870, 50254,
)
# fmt: on


def _suppressed(n_vocab: int) -> tuple[int, ...]:
    return _NON_SPEECH_ENGLISH if n_vocab == _N_VOCAB_ENGLISH else _NON_SPEECH_MULTILINGUAL
