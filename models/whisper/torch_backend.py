"""Whisper's network in torch as a backend: the reference's modules on the CPU, packed, or on a CUDA device.

Knows the modules, features and the remembered silence. Does not know why it was chosen, or text.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import numpy as np
import torch
from numpy.typing import NDArray

from ..backends import device_errors
from ..mel import log_mel
from .backend import Audio, LanguageGuess, Writing
from .decode import Decoded, RuleBook, decode, language_probabilities
from .reference import DecoderCache, SilentTail, Whisper
from .window import (
    DIGITAL_SILENCE,
    FRAMES_PER_POSITION,
    LOUDEST_FEATURE,
    QUIETEST_FEATURE,
    TAIL_STRIDE,
    encoded_positions,
)


class TorchBackend:
    """One window at a time, on the device and in the float type that the model's embedding has."""

    max_windows = 1

    def __init__(self, model: Whisper, rules: RuleBook) -> None:
        """``model`` is loaded, where it is to run, and packed if wanted."""
        self._model = model.eval()
        self._special = rules.special
        self._weight = model.decoder.embed_tokens.weight  # tells where and in which type to compute
        self._tail = silent_tail(model)

    @torch.inference_mode()
    def listen(self, windows: Sequence[NDArray[np.float32]]) -> list[Audio | None]:
        """See ``Backend``."""
        return [self._listen(window) for window in windows]

    @torch.inference_mode()
    def guess_languages(self, audios: Sequence[Audio]) -> list[LanguageGuess]:
        """See ``Backend``."""
        return [self._guess(_own(audio)) for audio in audios]

    @torch.inference_mode()
    def write(self, writings: Sequence[Writing]) -> list[Decoded]:
        """See ``Backend``."""
        return [self._write(writing) for writing in writings]

    def forget(self, audios: Sequence[Audio]) -> None:
        """Nothing to do: an audio's memory is its own."""

    def close(self) -> None:
        """Nothing to do."""

    def _errors(self) -> AbstractContextManager[None]:
        """Around work on the device. On the CPU an error is a mistake of ours, and no other backend's business."""
        return device_errors() if self._weight.is_cuda else nullcontext()

    def _listen(self, samples: NDArray[np.float32]) -> DecoderCache | None:
        config = self._model.config
        n_positions = encoded_positions(len(samples), config.n_audio_positions)
        features = log_mel(samples, config.n_mels, FRAMES_PER_POSITION * n_positions)
        loudest = features.max()
        if loudest <= DIGITAL_SILENCE:
            return None
        levelled = (features + (LOUDEST_FEATURE - loudest))[None].to(self._weight)
        with self._errors():
            return self._model.decoder.open_cache(self._model.encoder(levelled, self._tail), self._tail)

    def _guess(self, cache: DecoderCache) -> LanguageGuess:
        with self._errors(), one_thread():
            probabilities = language_probabilities(self._model, cache, self._special)
            best = int(probabilities.argmax())
            return LanguageGuess(best, float(probabilities[best]))

    def _write(self, writing: Writing) -> Decoded:
        with self._errors(), one_thread():
            return decode(
                self._model, _own(writing.audio), writing.request, writing.rules, temperature=writing.temperature
            )


@contextmanager
def one_thread() -> Iterator[None]:
    """Around work of the decoder, whose products are too small for a CPU's threads to share.

    With two threads on two cores of their own, tiny.en and base write no sooner, for 1.7 times the CPU time, which goes
    into waiting for one another. At the width of large the second thread saves a tenth of the time.
    """
    n_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(n_threads)


@torch.inference_mode()
def silent_tail(model: Whisper) -> SilentTail:
    """The silence that stands behind short windows, computed where the model is."""
    n_frames = FRAMES_PER_POSITION * model.config.n_audio_positions
    silence = torch.full((1, model.config.n_mels, n_frames), QUIETEST_FEATURE)
    return model.silent_tail(silence.to(model.decoder.embed_tokens.weight), stride=TAIL_STRIDE)


def _own(audio: Audio) -> DecoderCache:
    if not isinstance(audio, DecoderCache):
        raise TypeError(f"audio of another backend: {type(audio).__name__}")
    return audio
