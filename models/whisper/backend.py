"""What the engine needs from whatever computes Whisper's network, and which backend it has.

A backend turns windows into audio states and requests into tokens. ``Backends`` holds those that could serve a
checkpoint, fastest first, opens the first that works, and goes on to the next when one fails. Knows requests and rules;
does not know devices, text or streams.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .decode import Decoded, Request, Rules

log = logging.getLogger(__name__)


class BackendError(Exception):
    """A backend that can't be opened, or that failed and can't go on; the message says what happened."""


class NoDeviceForBackendError(BackendError):
    """There is nothing here that it could run on, which is no reason to warn."""


@contextmanager
def device_errors() -> Iterator[None]:
    """What a device's libraries raise becomes ``BackendError``: no memory, a lost device, a library that fails.

    torch has classes for some of it only; cuBLAS, cuDNN and the allocator's checks raise ``RuntimeError`` itself.
    """
    try:
        yield
    except RuntimeError as error:
        raise BackendError(str(error).partition("\n")[0]) from error


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


@dataclass(frozen=True, slots=True)
class Offer:
    """A backend that might serve. ``open`` raises ``BackendError`` if it can't."""

    name: str
    open: Callable[[], Backend]


class Backends:
    """The backend in use. The last offer is expected to work always: its error is everyone's."""

    def __init__(self, offers: Sequence[Offer], *, model: str) -> None:
        self._offers = list(offers)
        self._model = model
        self._absent: dict[str, str] = {}  # faster one → why it can't be used
        self._failed: list[str] = []
        self.name, self.current = self._open_first()

    @property
    def why(self) -> str:
        """Why this one is in use and no faster one."""
        return "; ".join([*self._failed, *explain(self._absent)]) or "the fastest there is"

    def replace(self, error: BackendError) -> None:
        """Go on with the next one, since the current one failed.

        Raises:
            BackendError: the same, if there is no other.
        """
        self.current.close()
        if len(self._offers) == 1:
            raise error
        self._failed.append(f"{self.name} failed: {error}")
        failed = self._offers.pop(0).name
        self.name, self.current = self._open_first()
        log.warning("%s: %s failed and %s goes on: %s", self._model, failed, self.name, error)

    def _open_first(self) -> tuple[str, Backend]:
        while len(self._offers) > 1:
            try:
                return self._offers[0].name, self._offers[0].open()
            except BackendError as error:
                name = self._offers.pop(0).name
                self._absent[name] = str(error)
                if not isinstance(error, NoDeviceForBackendError):
                    following = self._offers[0].name
                    log.warning("%s: %s can't be used, so %s is tried: %s", self._model, name, following, error)
        return self._offers[0].name, self._offers[0].open()


def explain(reasons: Mapping[str, str]) -> list[str]:
    """One line for each reason, with the backends that it keeps away."""
    return [
        f"no {' or '.join(name for name, own in reasons.items() if own == reason)}: {reason}"
        for reason in dict.fromkeys(reasons.values())
    ]
