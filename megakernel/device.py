"""The GPU of this machine: what it is, what a program for it looks like, and calls of its driver.

Knows ``cuda.bindings`` in its 13.x versions and turns every error of the driver into an exception. Does not know
programs or torch.
"""

import ctypes
import functools
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import DriverError, NoDeviceError, OutOfDeviceMemoryError
from .isa import MAX_ROWS
from .target import KNOWN, Target

log = logging.getLogger(__name__)

OLDEST_CAPABILITY = (8, 0)  # cp.async and bfloat16 matrix instructions
_SMALL_SHARED_BYTES = 163 * 1024  # below this, half the rows leave the ring its depth
_ARCH_SUFFIX = {(9, 0): "a", (10, 0): "a"}  # as in KNOWN


@dataclass(frozen=True, slots=True)
class Device:
    """What the driver says of one GPU."""

    index: int
    name: str
    capability: tuple[int, int]
    n_sms: int
    shared_bytes: int  # that a block may opt in to
    memory_bytes: int
    is_cooperative: bool  # all blocks of a launch can be made to run at once
    driver: int  # 13000: CUDA 13.0

    @property
    def arch(self) -> str:
        """As NVRTC spells it."""
        major, minor = self.capability
        return f"sm_{major}{minor}{_ARCH_SUFFIX.get(self.capability, '')}"


def find_device(index: int = 0) -> Device:
    """The GPU with that index, if programs run on it.

    Raises:
        NoDeviceError: if there is none, no driver or no cuda-bindings, or the GPU is too old.
    """
    device = _describe(index)
    if device.capability < OLDEST_CAPABILITY:
        raise NoDeviceError(f"{device.name} is {device.arch}; sm_{OLDEST_CAPABILITY[0]}{OLDEST_CAPABILITY[1]} or newer")
    if not device.is_cooperative:
        raise NoDeviceError(f"{device.name}: the driver offers no cooperative launch")
    return device


def _describe(index: int) -> Device:
    driver = _bindings()
    try:
        call("cuInit", 0)
        n_devices = call("cuDeviceGetCount")
        version = call("cuDriverGetVersion")
    except DriverError as error:
        raise NoDeviceError(f"the driver offers no GPU: {error}") from error
    if not 0 <= index < n_devices:
        raise NoDeviceError(f"there is no GPU {index}: the driver offers {n_devices}")
    handle = call("cuDeviceGet", index)
    names = driver.CUdevice_attribute

    def attribute(name: str) -> int:
        return int(call("cuDeviceGetAttribute", getattr(names, f"CU_DEVICE_ATTRIBUTE_{name}"), handle))

    return Device(
        index=index,
        name=call("cuDeviceGetName", 256, handle).split(b"\0")[0].decode(),
        capability=(attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")),
        n_sms=attribute("MULTIPROCESSOR_COUNT"),
        shared_bytes=attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
        memory_bytes=int(call("cuDeviceTotalMem", handle)),
        is_cooperative=bool(attribute("COOPERATIVE_LAUNCH")),
        driver=int(version),
    )


def target_for(device: Device, *, n_sms: int | None = None) -> Target:
    """The target to compile for: a known one, else one made from what the device says. ``n_sms``: only so many SMs."""
    for known in KNOWN:
        if (known.name, known.arch, known.n_sms) == (device.name, device.arch, n_sms or device.n_sms):
            return known
    if n_sms is None:
        log.warning("%s (%s, %d SMs) is not among the GPUs this was verified on", *_facts(device))
    max_rows = MAX_ROWS if device.shared_bytes >= _SMALL_SHARED_BYTES else MAX_ROWS // 2
    return Target(device.name, device.arch, n_sms or device.n_sms, device.shared_bytes, max_rows)


def _facts(device: Device) -> tuple[str, str, int]:
    return device.name, device.arch, device.n_sms


# --- the driver ------------------------------------------------------------------------------------------------------


@functools.cache
def _bindings() -> Any:  # the package has no types
    try:
        from cuda.bindings import driver  # an optional extra: a machine without a GPU needs none of it

        driver.cuDriverGetVersion()  # finds the library, which the system's driver brings
    except Exception as error:  # what it raises where there is no library has no base that its releases share
        raise NoDeviceError(f"no driver of NVIDIA's: {error}") from error
    return driver


def call(name: str, *arguments: object) -> Any:
    """Call the driver's function ``name``; what it gives back besides the error, alone or as a tuple.

    Raises:
        OutOfDeviceMemoryError, DriverError: whatever error it returns.
    """
    driver = _bindings()
    error, *given = getattr(driver, name)(*arguments)
    if error != driver.CUresult.CUDA_SUCCESS:
        _raise(driver, name, error)
    return given[0] if len(given) == 1 else tuple(given) or None


def _raise(driver: Any, name: str, error: Any) -> None:
    _, description = driver.cuGetErrorString(error)
    if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise OutOfDeviceMemoryError(f"{name}: out of memory")
    raise DriverError(name, error.name, (description or b"not described").decode())


def is_done(event: Any) -> bool:
    """Whether everything before ``event`` has run.

    Raises:
        DriverError: if what ran has failed.
    """
    driver = _bindings()
    (error,) = driver.cuEventQuery(event)
    if error == driver.CUresult.CUDA_ERROR_NOT_READY:
        return False
    if error != driver.CUresult.CUDA_SUCCESS:
        _raise(driver, "cuEventQuery", error)
    return True


@dataclass(frozen=True, slots=True)
class Split:
    """The SMs of a GPU in two groups. What runs on a stream of one leaves the other alone."""

    n_sms: int  # of the first group
    n_rest: int
    stream: Any
    rest_stream: Any


def split_sms(index: int, n_sms: int) -> Split:
    """At least ``n_sms`` of GPU ``index`` apart from the rest, as green contexts, which live as long as the process.

    Raises:
        DriverError: if the driver can't.
    """
    driver = _bindings()
    device = call("cuDeviceGet", index)
    call("cuDevicePrimaryCtxRetain", device)
    every = call("cuDeviceGetDevResource", device, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)
    groups, _, rest = call("cuDevSmResourceSplitByCount", 1, every, 0, n_sms)
    own, others = (_green_stream(driver, device, resource) for resource in (groups[0], rest))
    return Split(groups[0].sm.smCount, rest.sm.smCount, own, others)


def _green_stream(driver: Any, device: Any, resource: Any) -> Any:
    description = call("cuDevResourceGenerateDesc", [resource], 1)
    context = call("cuGreenCtxCreate", description, device, driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM)
    return call("cuGreenCtxStreamCreate", context, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0)


@dataclass(frozen=True, slots=True)
class Launch:
    """How a kernel is launched."""

    n_blocks: int
    shared_bytes: int
    n_threads: int  # of a block
    n_blocks_y: int = 1
    n_blocks_z: int = 1
    is_cooperative: bool = False  # all blocks run at once, or the launch fails
    is_dependent: bool = False  # may begin before what precedes it on the stream has ended


def launch(kernel: Any, how: Launch, stream: Any, parameters: NDArray[np.uint64]) -> None:
    """Launch ``kernel``, whose one parameter is the structure ``parameters``."""
    driver = _bindings()
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = how.n_blocks, how.n_blocks_y, how.n_blocks_z
    config.blockDimX, config.blockDimY, config.blockDimZ = how.n_threads, 1, 1
    config.sharedMemBytes, config.hStream = how.shared_bytes, stream
    attributes = _attributes(driver, how)
    config.attrs, config.numAttrs = attributes, len(attributes)
    pointers = np.array([parameters.ctypes.data], np.uint64)  # the driver copies what they point to before it returns
    call("cuLaunchKernelEx", config, kernel, int(pointers.ctypes.data), 0)


def _attributes(driver: Any, how: Launch) -> Sequence[Any]:
    ids = driver.CUlaunchAttributeID
    attributes = []
    if how.is_cooperative:
        attribute = driver.CUlaunchAttribute()
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attribute.value.cooperative = 1
        attributes.append(attribute)
    if how.is_dependent:
        attribute = driver.CUlaunchAttribute()
        attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    return attributes


def opt_in(kernel: Any, shared_bytes: int) -> None:
    """Let ``kernel`` be launched with so much dynamic shared memory."""
    attribute = _bindings().CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    call("cuFuncSetAttribute", kernel, attribute, shared_bytes)


def begin_capture(stream: Any) -> None:
    """What is launched on ``stream`` from now on becomes a graph."""
    call("cuStreamBeginCapture", stream, _bindings().CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL)


def pinned_memory(n_bytes: int) -> tuple[NDArray[np.uint8], int]:
    """Zeros in the host's memory that the device reads and writes: the array, and its address on the device.

    It is never freed: a kernel that can't be stopped may still write to it.
    """
    driver = _bindings()
    flags = driver.CU_MEMHOSTALLOC_PORTABLE | driver.CU_MEMHOSTALLOC_DEVICEMAP
    address = int(call("cuMemHostAlloc", n_bytes, flags))
    array = np.ctypeslib.as_array((ctypes.c_uint8 * n_bytes).from_address(address))
    array[:] = 0
    return array, int(call("cuMemHostGetDevicePointer", address, 0))
