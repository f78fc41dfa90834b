"""Parakeet with its prediction and joint networks in the megakernel: frames and states into seats, records back.

Many streams are decoded in one launch: each has a seat, and a slot takes one seat after the other. A stream's state is
a value: seats remember nothing between calls. Knows slots, requests and records. Does not know how the device runs
(``megakernel.runtime``) or what the encoder computes.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from megakernel.compile import compile_program
from megakernel.cubin import bitmap_words
from megakernel.device import Device, target_for
from megakernel.errors import DeviceError
from megakernel.isa import GRANULE_ROWS, MAX_SLOTS
from megakernel.launcher import Event, Launcher, TransducerBuffers
from megakernel.mailbox import DoneRecord, EmissionRecord, PartRecord, Record
from megakernel.request import FramePart, TransducerRequest
from megakernel.runtime import Runtime
from megakernel.selftest_transducer import ensure_transducer_right
from megakernel.target import Target
from megakernel.transducer_header import MAX_KERNEL_ROWS

from ..backends import BackendError, device_errors
from .config import ParakeetConfig
from .graph import PROJECTOR, graph_constants, transducer_graph
from .greedy import Decoded, Emission, Piece, TransducerState, ahead_in_two
from .reference import Parakeet

log = logging.getLogger(__name__)

MAX_FRAMES = 512  # of a seat; more are decoded in pieces, which changes nothing
SEATS_OF_STREAM = 2  # at most, in one launch: what is decoded for good, and what lies ahead
N_SEATS = 64 * SEATS_OF_STREAM
_SPIN_S = 2e-3  # a call takes less
_WAIT_S = 1.0  # at a time; the runtime itself finds out when the device stalls


class SlotRuntime(Protocol):
    """What is needed of ``megakernel.runtime.Runtime``. Every method may raise ``DeviceError``."""

    def open(self, slot: int, request: TransducerRequest, *, after: Event | None = None) -> int:
        """Ask for ``request``; the slot must be free. Its ticket."""

    def burst(self) -> None:
        """Begin with what was opened."""

    def finish(self, timeout_s: float) -> Sequence[Record]:
        """All records until nothing is open, or those that came by ``timeout_s``."""

    def leave(self) -> None:
        """With nothing open, have the device free for others when this returns."""

    def close(self) -> None:
        """Give everything back."""


@dataclass(frozen=True, slots=True, eq=False)
class SeatState(TransducerState):
    """A state as a seat has it, so that a whole batch of them goes back in one operation."""

    packed: Tensor = field(kw_only=True)  # [L, 2, P] float32: outputs and cells


@dataclass(slots=True)
class _Stream:
    """What is left of one stream's frames, and what they have said."""

    frames: Tensor  # [T, P]
    n_frames: int  # T: a tensor is slow to say it
    state: TransducerState
    behind: Tensor | None = None  # [T, P], not given yet
    begins: bool = False
    n_done: int = 0  # frames given
    emissions: list[Emission] = field(default_factory=list)
    ahead: list[Emission] = field(default_factory=list)

    @property
    def is_under_way(self) -> bool:
        return self.begins or self.n_done < self.n_frames or self.behind is not None

    def next_jobs(self, room: int) -> "list[_Job]":
        """What comes next in at most two seats of ``room`` frames, one after the other; frames passed over are gone."""
        n_left = self.n_frames - self.n_done
        n = min(n_left, room)
        jobs = []
        if self.begins or self.state.time_jump < n:
            frames = self.frames if n == self.n_frames else self.frames[self.n_done : self.n_done + n]
            jobs.append(_Job(self, frames, n, 0 if self.begins else self.state.time_jump, begins=self.begins))
        else:
            self.state = replace(self.state, time_jump=self.state.time_jump - n)
            self.n_done += n
        if n == n_left and self.behind is not None:
            n_behind = len(self.behind)
            if jobs:
                jobs.append(_Job(self, self.behind, n_behind, 0, is_ahead=True, continues=True))
            elif self.state.time_jump < n_behind:
                jobs.append(_Job(self, self.behind, n_behind, self.state.time_jump, is_ahead=True))
            self.behind = None
        return jobs


@dataclass(slots=True)
class _Job:
    """What one seat has to do in a launch."""

    stream: _Stream
    frames: Tensor  # [T, P]
    n_frames: int  # T
    first_frame: int
    begins: bool = False
    continues: bool = False  # what the job before it in the same stream leaves
    is_ahead: bool = False
    n_past: int = 0  # frames that are passed over behind these

    def part(self, seat: int) -> FramePart:
        return FramePart(self.n_frames, self.first_frame, self.begins, seat, self.continues)

    def add(self, record: EmissionRecord) -> None:
        to, first = (self.stream.ahead, 0) if self.is_ahead else (self.stream.emissions, self.stream.n_done)
        to.append(Emission(record.token, first + record.frame, record.duration, record.log_probability))


class MegakernelDecoder:
    """See ``greedy.TransducerDecoder``. States are float32, on the device."""

    def __init__(
        self,
        runtime: SlotRuntime,
        buffers: TransducerBuffers,
        projector: tuple[Tensor, Tensor],
        *,
        n_slots: int = MAX_SLOTS,
    ) -> None:
        """``projector``: weight [P, P] and bias [P] behind the prediction network, float32, on the buffers' device."""
        self._runtime = runtime
        self._n_slots = n_slots
        self._buffers = buffers
        self._projector = projector
        self._seats = buffers.state_in.unbind()
        self._start: TransducerState | None = None

    @torch.inference_mode()
    def start(self) -> TransducerState:
        """See ``TransducerDecoder``. The first call asks the device."""
        if self._start is None:
            state = self._buffers.state_in
            nothing = SeatState(state[0, :, 0], state[0, :, 1], state[0, 0, 0], packed=state[0])
            stream = _Stream(self._buffers.frames[0, :0], 0, nothing, begins=True)
            self._finish([stream])
            self._start = stream.state
        return self._start

    def decode(self, batch: Sequence[tuple[Tensor, TransducerState]]) -> list[tuple[list[Emission], TransducerState]]:
        """See ``TransducerDecoder``."""
        streams = [_Stream(frames, len(frames), state) for frames, state in batch]
        self._finish(streams)
        return [(stream.emissions, stream.state) for stream in streams]

    def decode_ahead(self, batch: Sequence[Piece]) -> list[Decoded]:
        """See ``TransducerDecoder``: in one launch, where all that lies ahead has room in a seat."""
        n_behind = [len(piece.behind) for piece in batch]
        if max(n_behind, default=0) > self._room:
            return ahead_in_two(self, batch)
        streams = [
            _Stream(piece.frames, len(piece.frames), piece.state, piece.behind if n else None)
            for piece, n in zip(batch, n_behind, strict=True)
        ]
        self._finish(streams)
        return [Decoded(stream.emissions, stream.state, stream.ahead) for stream in streams]

    def close(self) -> None:
        """Give everything back. A kernel that can't be stopped keeps its memory, and perhaps the device."""
        try:
            self._runtime.close()
        except DeviceError as error:
            log.warning("the device was not given back: %s", error)

    @property
    def _room(self) -> int:
        """Frames of a seat."""
        return self._buffers.frames.shape[1]

    @torch.inference_mode()
    def _finish(self, streams: Sequence[_Stream]) -> None:
        """Launch after launch, until all has been said."""
        at_once = len(self._seats) // SEATS_OF_STREAM
        with _runtime_errors():
            while under_way := [stream for stream in streams if stream.is_under_way]:
                of_streams = [own for stream in under_way[:at_once] if (own := stream.next_jobs(self._room))]
                if of_streams:
                    self._run(of_streams)

    def _run(self, of_streams: Sequence[Sequence[_Job]]) -> None:
        """One launch: job i in seat i, a stream's jobs one after the other in one slot."""
        jobs = [job for own in of_streams for job in own]
        ends = list(accumulate(map(len, of_streams)))
        self._fill(jobs)
        ready = _recorded(self._buffers.frames.device)
        lengths = [sum(job.n_frames for job in own) for own in of_streams]
        seats = [
            [seat for stream in own for seat in range(ends[stream] - len(of_streams[stream]), ends[stream])]
            for own in share_out(lengths, self._n_slots)
        ]
        for slot, own in enumerate(seats):
            parts = tuple(jobs[seat].part(seat) for seat in own)
            self._runtime.open(slot, TransducerRequest(parts), after=ready)
            ready = None  # what is opened later comes behind it as well
        self._collect(jobs, seats)
        found = self._buffers.state_out[: len(jobs)].clone()  # [jobs, L, 2, P]
        projected = functional.linear(found[:, -1, 0], *self._projector).unbind()
        hidden, cells, packed = found[:, :, 0].unbind(), found[:, :, 1].unbind(), found.unbind()
        for seat, job in enumerate(jobs):
            if not job.is_ahead:
                stream = job.stream
                stream.state = SeatState(hidden[seat], cells[seat], projected[seat], job.n_past, packed=packed[seat])
                stream.n_done += job.n_frames
                stream.begins = False

    def _fill(self, jobs: Sequence[_Job]) -> None:
        """Frames and states to the seats, in two operations: each takes longer to ask for than to do."""
        frames = self._buffers.frames[: len(jobs)]
        seats = {n: frames[:, :n].unbind() for n in {job.n_frames for job in jobs}}
        to = [seats[job.n_frames][seat] for seat, job in enumerate(jobs)]
        torch._foreach_copy_(to, [job.frames for job in jobs])
        restored = [seat for seat, job in enumerate(jobs) if not (job.begins or job.continues)]
        if restored:
            states = [_packed(jobs[seat].stream.state) for seat in restored]
            torch._foreach_copy_([self._seats[seat] for seat in restored], states)

    def _collect(self, jobs: Sequence[_Job], seats: Sequence[Sequence[int]]) -> None:
        """Emissions to their streams until all slots are done, and by how many frames each seat's are passed."""
        left = [[jobs[seat] for seat in reversed(own)] for own in seats]  # of each slot, the last one first
        n_left = len(jobs)
        self._runtime.burst()
        while n_left:
            for record in self._runtime.finish(_WAIT_S):
                match record:
                    case EmissionRecord():
                        left[record.slot][-1].add(record)
                    case PartRecord():
                        left[record.slot].pop().n_past = record.n_past
                        n_left -= 1
                    case DoneRecord():
                        left[record.slot].pop().n_past = record.n_verified
                        n_left -= 1
        self._runtime.leave()


def share_out(lengths: Sequence[int], n_slots: int) -> list[list[int]]:
    """Which of the pieces each slot takes, in order, so that none has many more frames than another; no slot is empty.

    What a slot costs besides its frames is the step that begins a piece, which counts as one more.
    """
    slots: list[list[int]] = [[] for _ in range(min(n_slots, len(lengths)))]
    loads = [0] * len(slots)
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        slot = loads.index(min(loads))
        slots[slot].append(index)
        loads[slot] += lengths[index] + 1
    return slots


def _packed(state: TransducerState) -> Tensor:
    if isinstance(state, SeatState):
        return state.packed
    return torch.stack((state.hidden, state.cell), dim=1).float()


def _recorded(device: torch.device) -> Event | None:
    """An event behind what was put on the device's stream; ``None`` on the CPU, where everything is done already."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it out
    event.record()
    return event


def decoder_on(
    model: Parakeet,
    device: Device,
    *,
    cache: Path | None,
    n_frames: int = MAX_FRAMES,
    n_seats: int = N_SEATS,
    target: Target | None = None,
) -> MegakernelDecoder:
    """The decoder of ``model``'s weights on a GPU, tested. Compiled kernels are kept in ``cache``.

    ``target``: how the device is used, ``usual_target`` if it is None.

    Raises:
        DeviceError, CompileError: if the device can't run it, or computes something else.
    """
    graph = transducer_graph(model.config, n_frames=n_frames, n_seats=n_seats)
    program = compile_program(graph, target or usual_target(device, model.config))
    constants = graph_constants(graph, model.state_dict())
    no_rules = np.zeros((1, 2, bitmap_words(graph.sizes.n_tokens)), np.uint32)
    launcher = Launcher.load(program, constants, no_rules, device=device, cache=cache)
    runtime = Runtime(program, launcher, n_rules=len(no_rules), idle_ns=0, spin_s=_SPIN_S)
    ensure_transducer_right(runtime, launcher, constants, cache=cache)
    buffers = launcher.buffers.transducer
    assert buffers is not None, "a transducer's launcher has its buffers"
    on = buffers.state_in.device
    weight, bias = (constants[f"{PROJECTOR}.{name}"].to(on, torch.float32) for name in ("weight", "bias"))
    return MegakernelDecoder(runtime, buffers, (weight, bias))


def usual_target(device: Device, config: ParakeetConfig) -> Target:
    """All SMs of a GPU, or as many as a small vocabulary occupies: each has a part of the joint network."""
    n_parts = sum(-(-n // GRANULE_ROWS) for n in (config.vocabulary_size, len(config.durations)))
    n_sms = n_parts if n_parts < device.n_sms else None
    return replace(target_for(device, n_sms=n_sms), max_rows=MAX_KERNEL_ROWS)


@contextmanager
def _runtime_errors() -> Iterator[None]:
    try:
        with device_errors():
            yield
    except DeviceError as error:
        raise BackendError(f"{type(error).__name__}: {error}") from error
