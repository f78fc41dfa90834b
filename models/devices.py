"""The kinds of backends, fastest first, and what keeps each from running on this machine.

Knows torch and the megakernel's driver and compiler. Does not know what shall run there.
"""

import time
from typing import Any

import torch

from megakernel.cubin import compiler_version
from megakernel.device import find_device
from megakernel.errors import DeviceError

from .backends import device_errors

MEGAKERNEL, TORCH_CUDA, TORCH_CPU = "megakernel", "torch-cuda", "torch-cpu"
MIN_CAPABILITY = (8, 0)  # of a CUDA device: bfloat16 in its tensor cores


def why_no_cuda() -> str | None:
    """What keeps torch from a CUDA device that is good enough, ``None`` if nothing does."""
    if not torch.cuda.is_available():
        return "torch finds no CUDA device"
    capability = torch.cuda.get_device_capability()
    if capability < MIN_CAPABILITY:
        return f"{torch.cuda.get_device_name()} is sm_{capability[0]}{capability[1]}, and sm_80 or newer is needed"
    return None


def why_no_answer() -> str | None:
    """Whether a kernel that went astray still has the device, which then would answer nobody."""
    with device_errors():
        torch.zeros(1, device="cuda")
        done: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]  # torch leaves it out
        done.record()
        deadline_s = time.monotonic() + _ANSWER_WITHIN_S
        while not done.query():
            if time.monotonic() > deadline_s:
                return f"the device has not answered for {_ANSWER_WITHIN_S:.0f} s"
            time.sleep(_POLL_S)
    return None


_ANSWER_WITHIN_S = 5.0
_POLL_S = 0.001


def why_no_megakernel() -> str | None:
    """What keeps the megakernel from running here, ``None`` if nothing is known to; nothing is loaded to find out."""
    if reason := why_no_cuda():
        return reason
    try:
        find_device()
        compiler_version()
    except DeviceError as error:
        return str(error)
    return None


def reasons() -> dict[str, str | None]:
    """Every backend, fastest first, and what keeps it from running here, if anything does."""
    return {MEGAKERNEL: why_no_megakernel(), TORCH_CUDA: why_no_cuda(), TORCH_CPU: None}
