"""What each open slot was asked and has delivered, so that a request can be given to the device again.

After a fault the device forgets its slots. Each open request then begins anew with what it has delivered as its draft,
and what comes a second time is held back: the reader sees every token once. Knows records and requests, no device.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from .errors import FaultError, RequestError
from .isa import REQUEST_TOKENS
from .mailbox import DoneRecord, EmissionRecord, LeftRecord, PartRecord, Record, SegmentRecord, SlotRecord, TokenRecord
from .request import AnyRequest, Request

_LARGEST_TICKET = 0xFFFFFFFF


@dataclass(slots=True)
class OpenSlot:
    """One request under way."""

    ticket: int
    request: AnyRequest
    is_cancelled: bool = False
    tokens: list[int] = field(default_factory=list)  # delivered
    n_segments: int = 0  # delivered
    n_segments_again: int = 0  # that came since the request last began
    emissions: list[tuple[int, int]] = field(default_factory=list)  # token and frame of those delivered
    n_emissions_again: int = 0  # that came since the request last began
    n_parts: int = 0  # delivered
    n_parts_again: int = 0  # that came since the request last began


class OpenSlots:
    """The open slots, by index."""

    def __init__(self, n_slots: int) -> None:
        self._n_slots = n_slots
        self._open: dict[int, OpenSlot] = {}
        self._last_ticket = 0

    def __len__(self) -> int:
        return len(self._open)

    @property
    def next_ticket(self) -> int:
        """The one that the next request gets."""
        return self._last_ticket % _LARGEST_TICKET + 1

    def open(self, slot: int, request: AnyRequest) -> int:
        """Take note of ``request``. Returns its ticket.

        Raises:
            RequestError: if there is no such slot, or it is open.
        """
        if not 0 <= slot < self._n_slots:
            raise RequestError(f"slot {slot}: there are {self._n_slots}, from 0")
        if slot in self._open:
            raise RequestError(f"slot {slot} is open: its DONE record has not been read yet")
        self._last_ticket = self.next_ticket
        self._open[slot] = OpenSlot(self._last_ticket, request)
        return self._last_ticket

    def cancel(self, slot: int) -> int | None:
        """The ticket of what is to be cancelled; ``None`` if the slot is free or cancelled already."""
        state = self._open.get(slot)
        if state is None or state.is_cancelled:
            return None
        state.is_cancelled = True
        return state.ticket

    def deliver(self, records: Iterable[Record]) -> list[SlotRecord]:
        """The records that the reader has not seen yet; frees the slots that are done.

        Raises:
            FaultError: if a token that comes a second time is another than the first time.
        """
        return [record for record in records if not isinstance(record, LeftRecord) and self._is_new(record)]

    def _is_new(self, record: SlotRecord) -> bool:
        match record:
            case TokenRecord():
                return self._is_new_token(record)
            case SegmentRecord():
                return self._is_new_segment(record)
            case EmissionRecord():
                return self._is_new_emission(record)
            case PartRecord():
                return self._is_new_part(record)
            case DoneRecord():
                return self._is_new_end(record)

    def _is_new_end(self, record: DoneRecord) -> bool:
        if self._of(record) is None:
            return False
        del self._open[record.slot]
        return True

    def _of(self, record: SlotRecord) -> OpenSlot | None:
        state = self._open.get(record.slot)
        return state if state and state.ticket == record.ticket else None

    def _is_new_token(self, record: TokenRecord) -> bool:
        state = self._of(record)
        if state is None:
            return False
        if record.index < len(state.tokens):
            self._must_agree(record, state.tokens[record.index])
            return False
        state.tokens.append(record.token)
        return True

    def _must_agree(self, record: TokenRecord, before: int) -> None:
        if record.token != before:
            raise FaultError(
                f"slot {record.slot}: token {record.index} was {before} before a fault, and is {record.token} after it"
            )

    def _is_new_segment(self, record: SegmentRecord) -> bool:
        state = self._of(record)
        if state is None:
            return False
        state.n_segments_again += 1
        if state.n_segments_again <= state.n_segments:
            return False
        state.n_segments += 1
        return True

    def _is_new_part(self, record: PartRecord) -> bool:
        state = self._of(record)
        if state is None:
            return False
        state.n_parts_again += 1
        if state.n_parts_again <= state.n_parts:
            return False
        state.n_parts += 1
        return True

    def _is_new_emission(self, record: EmissionRecord) -> bool:
        state = self._of(record)
        if state is None:
            return False
        index, said = state.n_emissions_again, (record.token, record.frame)
        state.n_emissions_again += 1
        if index == len(state.emissions):
            state.emissions.append(said)
            return True
        if state.emissions[index] != said:
            raise FaultError(
                f"slot {record.slot}: token {index} and its frame were {state.emissions[index]} before a fault, and "
                f"are {said} after it"
            )
        return False

    def replays(self) -> list[tuple[int, OpenSlot]]:
        """Slot and state of every open request, whose ``request`` now drafts what it has delivered."""
        for state in self._open.values():
            state.n_segments_again = state.n_emissions_again = state.n_parts_again = 0
            if isinstance(state.request, Request):
                state.request = replace(state.request, draft=_draft(state, state.request))
        return sorted(self._open.items())


def _draft(state: OpenSlot, request: Request) -> tuple[int, ...]:
    """What was delivered, then what is left of the first draft behind it; never more than a request holds."""
    draft = (*state.tokens, *request.draft[len(state.tokens) :])
    return draft[: REQUEST_TOKENS - len(request.head) - len(request.prefix)]
