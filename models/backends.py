"""Which of several backends computes a model: the fastest that opens, and the next when one fails.

A backend is whatever computes one checkpoint; each family of models says what its own can do. Knows offers and
failures; does not know models, devices, text or streams.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

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


class Closable(Protocol):
    """What all backends have in common."""

    def close(self) -> None:
        """Give back what the backend holds. Never raises."""


BackendT = TypeVar("BackendT", bound=Closable)


@dataclass(frozen=True, slots=True)
class Offer(Generic[BackendT]):
    """A backend that might serve. ``open`` raises ``BackendError`` if it can't."""

    name: str
    open: Callable[[], BackendT]


class Backends(Generic[BackendT]):
    """The backend in use. The last offer is expected to work always: its error is everyone's."""

    def __init__(self, offers: Sequence[Offer[BackendT]], *, model: str) -> None:
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

    def _open_first(self) -> tuple[str, BackendT]:
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
