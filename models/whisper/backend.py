"""What the engine needs from whatever computes Whisper's network.

A backend turns windows into audio states and requests into tokens. Knows requests and rules; does not know devices,
text or streams, nor which backend there is (``models/backends.py``).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .decode import Decoded, Request, Rules

Audio: TypeAlias = object  # a window as its backend remembers it; opaque to everyone else


@dataclass(frozen=True, slots=True, eq=False)
class Writing:
    """One window's text to be written. At ``temperature`` 0 each token is the likeliest one."""

    audio: Audio
    request: Request
    rules: Rules
    temperature: float = 0.0


@dataclass(frozen=True, slots=True)
class LanguageGuess:
    """The likeliest language of a window: index into ``SpecialTokens.languages``, and its probability among them."""

    index: int
    probability: float


class Backend(Protocol):
    """Computes one checkpoint. Called from one thread; every method may raise ``BackendError``, and is then over."""

    @property
    def max_windows(self) -> int:
        """How many windows it remembers, and computes together, at a time."""

    def listen(self, windows: Sequence[NDArray[np.float32]]) -> list[Audio | None]:
        """The audio of each window [n_samples], ``None`` for digital silence; at most ``max_windows`` at a time."""

    def guess_languages(self, audios: Sequence[Audio]) -> list[LanguageGuess]:
        """The likeliest language of each window."""

    def write(self, writings: Sequence[Writing]) -> list[Decoded]:
        """The text of each window; no window may come twice."""

    def forget(self, audios: Sequence[Audio]) -> None:
        """These windows are over."""

    def close(self) -> None:
        """Give back what the backend holds. Never raises."""
