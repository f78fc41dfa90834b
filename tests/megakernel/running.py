"""Requests run to their end, whatever kernel is behind the runtime."""

from collections.abc import Mapping

from megakernel.mailbox import SlotRecord
from megakernel.request import Request, TransducerRequest
from megakernel.runtime import Runtime


def records_of(runtime: Runtime, requests: Mapping[int, Request | TransducerRequest]) -> dict[int, list[SlotRecord]]:
    """Records of each slot, of one burst."""
    records: dict[int, list[SlotRecord]] = {slot: [] for slot in requests}
    for slot, request in requests.items():
        runtime.open(slot, request)
    runtime.burst()
    while runtime.n_open:
        for record in runtime.wait(5.0):
            records[record.slot].append(record)
    runtime.leave()
    return records
