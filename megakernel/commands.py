"""What the host's commands do to slots, whatever the slots are of.

Knows commands and when they come too late. Does not know requests, nor what a slot remembers.
"""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from .isa import Command, CommandKind, FaultKind, LeaveReason
from .pick import SelectError


class Ticketed(Protocol):
    """A request under way."""

    @property
    def ticket(self) -> int:
        """The host's number for it."""


SlotT = TypeVar("SlotT", bound=Ticketed)
SaidT = TypeVar("SaidT")


def carry_out(
    slots: Sequence[SlotT | None],
    commands: Sequence[Sequence[int]],  # words of ``isa.Command`` each, as of the count in the control word
    opened: Callable[[int], SlotT],
    cancelled: Callable[[int, SlotT], SaidT],
) -> tuple[tuple[SlotT | None, ...], tuple[SaidT, ...], LeaveReason | None]:
    """Slots after the host's commands, what the host is told, and whether the kernel leaves.

    A cancellation whose ticket is not the slot's comes too late and does nothing. All commands are carried out, and the
    last one that says to leave decides.

    Raises:
        SelectError: for a command that there is not, or a slot that there is not or that is open.
    """
    after = list(slots)
    told: list[SaidT] = []
    leave = None
    for command in commands:
        kind, index, ticket = (int(command[word]) for word in (Command.KIND, Command.SLOT, Command.TICKET))
        if kind == CommandKind.OPEN and index < len(after) and after[index] is None:
            after[index] = opened(index)
        elif kind == CommandKind.CANCEL and index < len(after):
            slot = after[index]
            if slot is not None and slot.ticket == ticket:
                told.append(cancelled(index, slot))
                after[index] = None
        elif kind == CommandKind.YIELD:
            leave = LeaveReason.YIELD
        elif kind == CommandKind.STOP:
            leave = LeaveReason.STOP
            after = [None] * len(after)
        else:
            raise SelectError(FaultKind.BAD_COMMAND, f"command {kind} for slot {index}")
    return tuple(after), tuple(told), leave
