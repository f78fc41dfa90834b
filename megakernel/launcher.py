"""A program in a GPU's memory, and its launches.

Knows which address each parameter of the kernel is, torch tensors as device memory, and the driver. Does not know
requests, records or what to do about a fault (``runtime.py``).
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from . import isa
from .cubin import LOOP_KERNEL, PHASE_KERNEL, Cubin, bitmap_words, build_cubin
from .device import Device, Launch, begin_capture, call, is_done, launch, opt_in, pinned_memory
from .errors import NoDeviceError, OutOfDeviceMemoryError, RequestError, WrongProgramError
from .isa import Parameter
from .mailbox import ADDRESSES, MAILBOX_BYTES, OFFSETS, Mailbox
from .ops import Embed, FusedLinear, FusedLstm
from .program import Program
from .target import SUMS_BYTES
from .transducer_header import KERNEL as TRANSDUCER_KERNEL
from .upload import Constants, Packed, as_tensor, constant, upload_table, upload_weights

log = logging.getLogger(__name__)

GRAPH_STEPS = 32  # that are launched at a time in graph mode; the steps behind the last token are in vain
_CONTROL_BYTES = isa.CONTROL_WORDS * 4
_BYTES_PER_MIB = 1 << 20


class Event(Protocol):
    """A ``torch.cuda.Event`` that a stream has recorded."""

    @property
    def cuda_event(self) -> int:
        """The driver's handle."""

    def query(self) -> bool:
        """Whether everything before it has run."""


class Mode(StrEnum):
    """How steps are launched."""

    LOOP = "loop"  # many steps a launch, all SMs at once
    GRAPH = "graph"  # one phase a launch, in a CUDA graph: the fallback
    GRAPH_DEPENDENT = "graph with programmatic dependent launch"


@dataclass(frozen=True, slots=True)
class Start:
    """What differs from launch to launch."""

    mode: Mode
    goes_on: bool  # in graph mode: counts go on from the last launch, which makes what follows void
    epoch: int  # steps before x epochs of a step
    n_commands: int  # carried out before
    n_records: int  # written before
    max_steps: int
    idle_ns: int
    spin_ns: int


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """A program's memory on the device. The caches and scores are the callers' to fill and to read."""

    program: dict[Parameter, torch.Tensor]  # what never changes
    self_cache: torch.Tensor  # [slot, layer, keys or values, head, n_positions, head size] bfloat16
    cross_cache: torch.Tensor  # [slot, layer, keys or values, head, n_cross_positions, head size] bfloat16
    scores: torch.Tensor  # [slot, dumped head, n_positions, n_cross_positions] float32
    exchange: torch.Tensor
    requests: torch.Tensor
    state: torch.Tensor
    control: torch.Tensor
    residual: torch.Tensor  # between the phases of graph mode
    transducer: "TransducerBuffers | None" = None

    def addresses(self) -> dict[Parameter, int]:
        """Parameter → address."""
        own = {
            Parameter.SELF_CACHE: self.self_cache,
            Parameter.CROSS_CACHE: self.cross_cache,
            Parameter.SCORES: self.scores,
            Parameter.EXCHANGE: self.exchange,
            Parameter.REQUESTS: self.requests,
            Parameter.STATE: self.state,
            Parameter.CONTROL: self.control,
            Parameter.RESIDUAL: self.residual,
        }
        if self.transducer is not None:
            own |= {
                Parameter.FRAMES: self.transducer.frames,
                Parameter.STATE_IN: self.transducer.state_in,
                Parameter.STATE_OUT: self.transducer.state_out,
            }
        return {parameter: tensor.data_ptr() for parameter, tensor in (self.program | own).items()}


@dataclass(frozen=True, slots=True, eq=False)
class TransducerBuffers:
    """What a transducer's seats hold, which is the callers' to fill, and what they leave."""

    frames: torch.Tensor  # [seat, n_frames, width] bfloat16
    state_in: torch.Tensor  # [seat, layer, 2, units] float32: outputs and cells
    state_out: torch.Tensor  # the same; whole once the kernel has left


class Launcher:
    """One program on one GPU. Make it with ``load``; one thread at a time."""

    def __init__(
        self,
        program: Program,
        device: Device,
        cubin: Cubin,
        buffers: Buffers,
        *,
        cache: Path | None = None,
        stream: Any = None,
    ) -> None:
        self.program = program
        self.device = device
        self.key = cubin.key
        self.buffers = buffers
        self._n_sms, self._n_phases = program.target.n_sms, len(program.phases)
        self._context = call("cuDevicePrimaryCtxRetain", call("cuDeviceGet", device.index))
        self._enter()
        self._cache = cache
        self._modules: list[Any] = []
        self._shared_bytes, self._n_threads = dynamic_shared_bytes(program), 32 * program.sizes.n_warps
        self._loop = self._kernel(cubin, LOOP_KERNEL if program.sizes.transducer is None else TRANSDUCER_KERNEL)
        self._phase: Any = None  # compiled once it is needed
        low, high = call("cuCtxGetStreamPriorityRange")
        self._stream = call("cuStreamCreateWithPriority", _NON_BLOCKING, high) if stream is None else stream
        self._left = call("cuEventCreate", _NO_TIMING)
        memory, self._mailbox_address = pinned_memory(MAILBOX_BYTES)
        self.mailbox = Mailbox(memory)
        self._parameters = np.zeros(len(Parameter), np.uint64)
        for parameter, address in buffers.addresses().items():
            self._parameters[parameter] = address
        for parameter, block in ADDRESSES.items():
            self._parameters[parameter] = self._mailbox_address + OFFSETS[block]
        self._graph: Any = None  # of one step, whose parameters are those of the launch that captured it

    @classmethod
    def load(
        cls,
        program: Program,
        constants: Constants,
        bitmaps: NDArray[np.uint32],  # [n_rules, 2, bitmap_words]
        *,
        device: Device,
        cache: Path | None,
        stream: Any = None,
    ) -> "Launcher":
        """Compile, pack and place ``program``. Says in the log what took how long.

        ``stream`` is one of ``device.split_sms``, whose group the program was made for, and is destroyed by ``close``;
        without it all SMs are at hand.

        Raises:
            WrongProgramError: if it was made for another GPU.
            NoDeviceError: if torch does not reach the GPU.
            KernelCompileError, CompilerMissingError: as ``build_cubin``.
            OutOfDeviceMemoryError: if it does not fit.
            CompileError: if a constant is missing or misshapen.
            RequestError: if the bitmaps are not those of the vocabulary.
        """
        _check_target(program, device)
        _check_bitmaps(program, bitmaps)
        if not torch.cuda.is_available():
            raise NoDeviceError("this torch was built without CUDA or finds no GPU")
        on = torch.device("cuda", device.index)
        took: dict[str, float] = {}
        try:
            with _timed(took, "kernel", on):
                cubin = build_cubin(program, cache=cache, kernels=[LOOP_KERNEL])
            with _timed(took, "weights", on):
                packed = upload_weights(program, constants, on)
            with _timed(took, "memory", on):
                buffers = _buffers(program, packed, constants, bitmaps, on)
            with _timed(took, "module", on):
                launcher = cls(program, device, cubin, buffers, cache=cache, stream=stream)
        except torch.cuda.OutOfMemoryError as error:
            free, _ = torch.cuda.mem_get_info(on)
            raise OutOfDeviceMemoryError(f"{program.name}: {error} ({free // _BYTES_PER_MIB} MiB are free)") from error
        parts = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in took.items())
        log.info("%s is ready on %s: %s", program.name, device.name, parts)
        return launcher

    # --- launches ---

    def start(self, start: Start) -> None:
        """Launch behind everything that ``wait_for`` and ``clear`` put on the stream. Ends by itself: ``has_left``."""
        self._enter()
        for parameter, value in launch_words(start).items():
            self._parameters[parameter] = value
        before, after = (self._mailbox_address + OFFSETS[name] for name in ("control_before", "control_after"))
        if start.mode is Mode.LOOP:
            call("cuMemcpyAsync", self._control, before, _CONTROL_BYTES, self._stream)
            how = Launch(self._n_sms, self._shared_bytes, self._n_threads, is_cooperative=True)
            launch(self._loop, how, self._stream, self._parameters)
        else:
            self._start_graph(start, before)
        call("cuMemcpyAsync", after, self._control, _CONTROL_BYTES, self._stream)
        call("cuEventRecord", self._left, self._stream)

    def has_left(self) -> bool:
        """Whether what was started last has ended.

        Raises:
            DriverError: if it ended in an error of the device; nothing works on it any more.
        """
        self._enter()
        return is_done(self._left)

    def wait_for(self, event: Event) -> None:
        """The next launch begins after ``event``."""
        self._enter()
        call("cuStreamWaitEvent", self._stream, event.cuda_event, 0)

    def clear(self, *, state: bool) -> None:
        """Zeros into the exchange area, and with ``state`` into all that the device remembers of slots."""
        self._enter()
        self._zero(self.buffers.exchange)
        if state:
            self._zero(self.buffers.state)

    def close(self) -> None:
        """Free what torch does not. Nothing may be running."""
        self._enter()
        self._drop_graph()
        for module in self._modules:
            call("cuModuleUnload", module)
        call("cuEventDestroy", self._left)
        call("cuStreamDestroy", self._stream)

    def _kernel(self, cubin: Cubin, name: str) -> Any:
        module = call("cuModuleLoadData", np.frombuffer(cubin.code, np.uint8).ctypes.data)
        self._modules.append(module)
        kernel = call("cuModuleGetFunction", module, name.encode())
        opt_in(kernel, self._shared_bytes)
        return kernel

    def _start_graph(self, start: Start, control_before: int) -> None:
        if not start.goes_on or self._graph is None:
            self._drop_graph()
            self._graph = self._capture(start.mode)
            call("cuMemcpyAsync", self._control, control_before, _CONTROL_BYTES, self._stream)
        for _ in range(GRAPH_STEPS):
            call("cuGraphLaunch", self._graph, self._stream)

    def _capture(self, mode: Mode) -> Any:
        """One step as a graph of one launch for each phase."""
        if self._phase is None:
            self._phase = self._kernel(
                build_cubin(self.program, cache=self._cache, kernels=[PHASE_KERNEL]), PHASE_KERNEL
            )
        how = Launch(self._n_sms, self._shared_bytes, self._n_threads, is_dependent=mode is Mode.GRAPH_DEPENDENT)
        begin_capture(self._stream)
        for phase in range(self._n_phases):
            parameters = self._parameters.copy()
            parameters[Parameter.PHASE] = phase
            launch(self._phase, how, self._stream, parameters)
        graph = call("cuStreamEndCapture", self._stream)
        executable = call("cuGraphInstantiate", graph, 0)
        call("cuGraphDestroy", graph)
        return executable

    def _drop_graph(self) -> None:
        if self._graph is not None:
            call("cuStreamSynchronize", self._stream)
            call("cuGraphExecDestroy", self._graph)
            self._graph = None

    @property
    def _control(self) -> int:
        return self.buffers.control.data_ptr()

    def _zero(self, tensor: torch.Tensor) -> None:
        call("cuMemsetD8Async", tensor.data_ptr(), 0, tensor.nbytes, self._stream)

    def _enter(self) -> None:
        """Any thread may call, and the driver's context belongs to a thread."""
        call("cuCtxSetCurrent", self._context)


# --- loading ---------------------------------------------------------------------------------------------------------


def dynamic_shared_bytes(program: Program) -> int:
    """Shared memory that a launch asks for."""
    ring_bytes = program.ring_tiles * program.sizes.n_warps * isa.TILE_BYTES
    return ring_bytes + program.x_bytes + SUMS_BYTES + program.misc_bytes


def _check_target(program: Program, device: Device) -> None:
    target = program.target
    if target.arch != device.arch or target.n_sms > device.n_sms or target.shared_bytes > device.shared_bytes:
        raise WrongProgramError(
            f"{program.name} was made for {target.arch}, {target.n_sms} SMs and {target.shared_bytes} bytes of shared "
            f"memory; {device.name} is {device.arch} with {device.n_sms} and {device.shared_bytes}"
        )


def _check_bitmaps(program: Program, bitmaps: NDArray[np.uint32]) -> None:
    n_words = bitmap_words(program.sizes.n_tokens)
    if bitmaps.ndim != 3 or bitmaps.shape[1:] != (2, n_words) or not len(bitmaps) or bitmaps.dtype != np.uint32:
        raise RequestError(f"bitmaps are uint32 of [rules, 2, {n_words}], not {bitmaps.dtype} of {bitmaps.shape}")


def _buffers(
    program: Program, packed: Packed, constants: Constants, bitmaps: NDArray[np.uint32], on: torch.device
) -> Buffers:
    sizes, target = program.sizes, program.target
    cache = (sizes.max_slots, sizes.n_layers, 2, sizes.width // sizes.head_size)
    n_request_words = isa.MAX_SLOTS * isa.REQUEST_WORDS + isa.COMMAND_SLOTS * isa.COMMAND_WORDS
    n_positions, n_cross_positions = sizes.n_positions, sizes.n_cross_positions
    transducer = _transducer_buffers(program, on)
    if transducer is None:
        inputs = _embedding(program, constants, on)
    else:
        n_positions = n_cross_positions = 0
        first = program.ops[0]
        assert isinstance(first, FusedLstm), "a transducer begins with the LSTM behind its lookup"
        inputs = {Parameter.TABLE: upload_table(first, constants, on)}
    return Buffers(
        program={
            **inputs,
            Parameter.TAPE: packed.tape,
            Parameter.AUX: packed.aux,
            Parameter.WARP_TILES: as_tensor(program.warp_tiles, on),
            Parameter.PHASES: as_tensor(program.phases, on),
            Parameter.TASKS: as_tensor(program.tasks, on),
            Parameter.BITMAPS: as_tensor(bitmaps, on),
        },
        self_cache=torch.zeros((*cache, n_positions, sizes.head_size), dtype=torch.bfloat16, device=on),
        cross_cache=torch.zeros((*cache, n_cross_positions, sizes.head_size), dtype=torch.bfloat16, device=on),
        scores=torch.zeros((sizes.max_slots, program.n_score_heads, n_positions, n_cross_positions), device=on),
        exchange=torch.zeros(program.exchange_words, dtype=torch.int64, device=on),
        requests=torch.zeros(n_request_words, dtype=torch.int32, device=on),
        state=torch.zeros(isa.STATE_WORDS, dtype=torch.int32, device=on),
        control=torch.zeros(isa.CONTROL_WORDS, dtype=torch.int32, device=on),
        residual=torch.zeros((target.n_sms, isa.MAX_ROWS, program.residual_granules * isa.GRANULE_ROWS), device=on),
        transducer=transducer,
    )


def _transducer_buffers(program: Program, on: torch.device) -> TransducerBuffers | None:
    sizes, transducer = program.sizes, program.sizes.transducer
    if transducer is None:
        return None
    state = (transducer.n_seats, sizes.n_layers, 2, sizes.width)
    return TransducerBuffers(
        frames=torch.zeros((transducer.n_seats, transducer.n_frames, sizes.width), dtype=torch.bfloat16, device=on),
        state_in=torch.zeros(state, device=on),
        state_out=torch.zeros(state, device=on),
    )


def _embedding(program: Program, constants: Constants, on: torch.device) -> dict[Parameter, torch.Tensor]:
    embeds = [op.embed for op in program.ops if isinstance(op, FusedLinear) and op.embed]
    embed: Embed = embeds[0]
    sizes = program.sizes
    tokens = constant(constants, embed.token_table, sizes.n_tokens, sizes.width)
    positions = constant(constants, embed.position_table, sizes.n_positions, sizes.width)
    return {
        Parameter.TOKEN_TABLE: tokens.to(on, torch.bfloat16).contiguous(),
        Parameter.POSITION_TABLE: positions.to(on, torch.float32).contiguous(),
    }


@contextmanager
def _timed(took: dict[str, float], name: str, on: torch.device) -> Iterator[None]:
    started = time.monotonic()
    yield
    torch.cuda.synchronize(on)  # besides the time: what torch's stream has filled is used on another
    took[name] = time.monotonic() - started


def launch_words(start: Start) -> dict[Parameter, int]:
    """The parameters that differ from launch to launch."""
    return {
        Parameter.EPOCH: start.epoch,
        Parameter.COMMANDS: start.n_commands,
        Parameter.RECORDS: start.n_records,
        Parameter.MAX_STEPS: start.max_steps,
        Parameter.IDLE_NS: start.idle_ns,
        Parameter.SPIN_NS: start.spin_ns,
    }


_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: apart from the legacy default stream
_NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
