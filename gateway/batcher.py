"""Which of the waiting decodes make the next batch. Pure.

Finals go before partials, for somebody waits for them; among equals, who has waited longest. A batch is of one model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from gateway.session import Priority

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Waiting(Generic[Key]):
    """A session with a decode due."""

    key: Key
    model: str
    priority: Priority
    since_s: float


def next_batch(waiting: Sequence[Waiting[Key]], max_batch: dict[str, int]) -> list[Waiting[Key]]:
    """The decodes to run now, most urgent first; ``max_batch`` bounds them by model."""
    if not waiting:
        return []
    in_order = sorted(waiting, key=lambda entry: (entry.priority, entry.since_s))
    model = in_order[0].model
    return [entry for entry in in_order if entry.model == model][: max_batch[model]]
