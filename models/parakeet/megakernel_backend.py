"""Parakeet with its prediction and joint networks in the megakernel: frames and states into seats, records back.

Many streams are decoded in one launch: each has a seat, and a slot takes one seat after the other. A stream's state is
a value: seats remember nothing between calls. Knows slots, requests and records. Does not know how the device runs
(``megakernel.runtime``) or what the encoder computes.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from megakernel.compile import compile_program
from megakernel.cubin import bitmap_words
from megakernel.device import Device, target_for
from megakernel.errors import DeviceError
from megakernel.isa import MAX_SLOTS
from megakernel.launcher import Event, Launcher, TransducerBuffers
from megakernel.mailbox import DoneRecord, EmissionRecord, PartRecord, Record
from megakernel.request import FramePart, TransducerRequest
from megakernel.runtime import Runtime
from megakernel.selftest_transducer import ensure_transducer_right
from megakernel.target import Target
from megakernel.transducer_header import MAX_KERNEL_ROWS

from ..backends import BackendError, device_errors
from .graph import PROJECTOR, graph_constants, transducer_graph
from .greedy import Emission, TransducerState
from .reference import Parakeet

log = logging.getLogger(__name__)

MAX_FRAMES = 512  # of a seat; more are decoded in pieces, which changes nothing
N_SEATS = 64  # for streams of one launch
_SPIN_S = 2e-3  # a call takes less
_WAIT_S = 1.0  # at a time; the runtime itself finds out when the device stalls


class SlotRuntime(Protocol):
    """What is needed of ``megakernel.runtime.Runtime``. Every method may raise ``DeviceError``."""

    def open(self, slot: int, request: TransducerRequest, *, after: Event | None = None) -> int:
        """Ask for ``request``; the slot must be free. Its ticket."""

    def burst(self) -> None:
        """Begin with what was opened."""

    def wait(self, timeout_s: float) -> Sequence[Record]:
        """The next records; none after ``timeout_s``, or when nothing is open."""

    def leave(self) -> None:
        """With nothing open, have the device free for others when this returns."""

    def close(self) -> None:
        """Give everything back."""


@dataclass(frozen=True, slots=True, eq=False)
class SeatState(TransducerState):
    """A state as a seat has it, so that a whole batch of them goes back in one operation."""

    packed: Tensor | None = None  # [L, 2, P] float32: outputs and cells


@dataclass(slots=True)
class _Stream:
    """What is left of one stream's frames, and what they have said."""

    frames: Tensor  # [T, P]
    state: TransducerState
    begins: bool = False
    n_done: int = 0  # frames given
    emissions: list[Emission] = field(default_factory=list)

    @property
    def n_left(self) -> int:
        return len(self.frames) - self.n_done

    def next_frames(self, n: int) -> Tensor:
        """[n, P], of those not given yet."""
        return self.frames if n == len(self.frames) else self.frames[self.n_done : self.n_done + n]


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
            stream = _Stream(self._buffers.frames[0, :0], nothing, begins=True)
            with _runtime_errors():
                self._round([stream])
            self._start = stream.state
        return self._start

    @torch.inference_mode()
    def decode(self, batch: Sequence[tuple[Tensor, TransducerState]]) -> list[tuple[list[Emission], TransducerState]]:
        """See ``TransducerDecoder``."""
        streams = [_Stream(frames, state) for frames, state in batch]
        with _runtime_errors():
            while under_way := [stream for stream in streams if stream.n_left]:
                self._round(under_way[: len(self._buffers.frames)])
        return [(stream.emissions, stream.state) for stream in streams]

    def close(self) -> None:
        """Give everything back. A kernel that can't be stopped keeps its memory, and perhaps the device."""
        try:
            self._runtime.close()
        except DeviceError as error:
            log.warning("the device was not given back: %s", error)

    def _round(self, streams: Sequence[_Stream]) -> None:
        """The next piece of each stream, in one launch."""
        asked: list[_Stream] = []
        for stream in streams:
            n_frames = self._n_next(stream)
            if stream.begins or stream.state.time_jump < n_frames:
                asked.append(stream)
            else:  # passed over as a whole
                stream.state = replace(stream.state, time_jump=stream.state.time_jump - n_frames)
                stream.n_done += n_frames
        if asked:
            self._run(asked)

    def _n_next(self, stream: _Stream) -> int:
        return min(stream.n_left, self._buffers.frames.shape[1])

    def _run(self, streams: Sequence[_Stream]) -> None:
        """Stream i in seat i."""
        lengths = [self._n_next(stream) for stream in streams]
        self._fill(streams, lengths)
        ready = _recorded(self._buffers.frames.device)
        seats = share_out(lengths, self._n_slots)
        for slot, own in enumerate(seats):
            parts = tuple(_part(streams[seat], seat, lengths[seat]) for seat in own)
            self._runtime.open(slot, TransducerRequest(parts), after=ready)
        jumps = self._collect(streams, seats)
        found = self._buffers.state_out[: len(streams)].clone()  # [streams, L, 2, P]
        projected = functional.linear(found[:, -1, 0], *self._projector)
        hidden, cells, packed = found[:, :, 0].unbind(), found[:, :, 1].unbind(), found.unbind()
        for seat, (stream, last) in enumerate(zip(streams, projected.unbind(), strict=True)):
            stream.state = SeatState(hidden[seat], cells[seat], last, jumps[seat], packed[seat])
            stream.n_done += lengths[seat]

    def _fill(self, streams: Sequence[_Stream], lengths: Sequence[int]) -> None:
        """Frames and states to the seats, in two operations: each takes longer to ask for than to do."""
        seats = {n_frames: self._buffers.frames[:, :n_frames].unbind() for n_frames in set(lengths)}
        to = [seats[n_frames][seat] for seat, n_frames in enumerate(lengths)]
        torch._foreach_copy_(to, [each.next_frames(n) for each, n in zip(streams, lengths, strict=True)])
        torch._foreach_copy_(self._seats[: len(streams)], [_packed(each.state) for each in streams])

    def _collect(self, streams: Sequence[_Stream], seats: Sequence[Sequence[int]]) -> list[int]:
        """Emissions to their streams until all slots are done; then by how many frames each seat's are passed."""
        jumps = [0] * len(streams)
        left = [list(reversed(own)) for own in seats]  # of each slot: its seats, the last one first
        n_left = len(streams)
        self._runtime.burst()
        while n_left:
            for record in self._runtime.wait(_WAIT_S):
                match record:
                    case EmissionRecord():
                        stream = streams[left[record.slot][-1]]
                        frame = stream.n_done + record.frame
                        emission = Emission(record.token, frame, record.duration, record.log_probability)
                        stream.emissions.append(emission)
                    case PartRecord():
                        jumps[left[record.slot].pop()] = record.n_past
                        n_left -= 1
                    case DoneRecord():
                        jumps[left[record.slot].pop()] = record.n_verified
                        n_left -= 1
        self._runtime.leave()
        return jumps


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
    if isinstance(state, SeatState) and state.packed is not None:
        return state.packed
    return torch.stack((state.hidden, state.cell), dim=1).float()


def _part(stream: _Stream, seat: int, n_frames: int) -> FramePart:
    return FramePart(n_frames, 0 if stream.begins else stream.state.time_jump, stream.begins, seat)


def _recorded(device: torch.device) -> Event | None:
    """An event behind what was put on the device's stream; ``None`` on the CPU, where everything is done already."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it out
    event.record()
    return event


class MegakernelBackend:
    """See ``backend.Backend``: an encoder in torch, and the rest in the megakernel."""

    def __init__(
        self,
        listen: Callable[[Sequence[NDArray[np.float32]]], list[Tensor]],
        decoder: MegakernelDecoder,
        *,
        max_buffers: int,
    ) -> None:
        """``listen`` turns buffers of samples into projected frames."""
        self.max_buffers = max_buffers
        self._listen = listen
        self._decoder = decoder
        self.start, self.decode, self.close = decoder.start, decoder.decode, decoder.close

    def listen(self, buffers: Sequence[NDArray[np.float32]]) -> list[Tensor]:
        """See ``Backend``."""
        with device_errors():
            return self._listen(buffers)


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

    ``target``: how the device is used; by as many rows a step as the kernel takes if it is None.

    Raises:
        DeviceError, CompileError: if the device can't run it, or computes something else.
    """
    graph = transducer_graph(model.config, n_frames=n_frames, n_seats=n_seats)
    program = compile_program(graph, target or replace(target_for(device), max_rows=MAX_KERNEL_ROWS))
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


@contextmanager
def _runtime_errors() -> Iterator[None]:
    try:
        with device_errors():
            yield
    except DeviceError as error:
        raise BackendError(f"{type(error).__name__}: {error}") from error
