"""A random checkpoint over a small vocabulary, which writes nonsense by all the rules, in letters."""

import json
from functools import cache
from typing import Any

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray

from models.tokenizer import WhisperTokenizer
from models.whisper.config import WhisperConfig
from models.whisper.reference import Whisper

SPECIALS = ("endoftext", "startoftranscript", "en", "de", "translate", "transcribe", "startoflm", "startofprev")
CORPUS = ("it was the best of times, it was the worst of times", "wir sind hier und dort", "sunny 😀 day")


def tokenizer_json() -> dict[str, Any]:
    """A small byte-level vocabulary with two languages; timestamps follow it."""
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator(CORPUS, trainer)
    content: dict[str, Any] = json.loads(bpe.to_str())
    first = len(content["model"]["vocab"])
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    content["added_tokens"] = [
        {"id": first + i, "content": f"<|{name}|>", "special": True} | flags
        for i, name in enumerate((*SPECIALS, "nospeech", "notimestamps"))
    ]
    return content


@cache
def small_checkpoint(width: int = 64) -> tuple[Whisper, WhisperTokenizer]:
    """One encoder layer and two decoder layers, each with an alignment head."""
    torch.manual_seed(1)
    tokenizer = WhisperTokenizer(tokenizer_json())
    n_vocab = tokenizer.timestamp_begin + 1501
    heads = ((0, 0), (1, 0))
    model = Whisper(WhisperConfig(80, n_vocab, width, width // 64, 2 * width, 1, 2, 1500, 448, heads)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
        for token in range(tokenizer.eot):
            if not tokenizer.decode([token]).strip().isalpha():
                model.decoder.embed_tokens.weight[token] *= 0.01
    return model, tokenizer


def noise(n_samples: int) -> NDArray[np.float32]:
    """The same for the same length."""
    return np.random.default_rng(n_samples).normal(scale=0.1, size=n_samples).astype(np.float32)
