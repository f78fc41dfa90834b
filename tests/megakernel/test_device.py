"""What is made of what a driver says, with no driver, or with one that is played."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from megakernel import device
from megakernel.device import Device, call, find_device, split_sms, target_for
from megakernel.errors import DriverError, NoDeviceError, OutOfDeviceMemoryError
from megakernel.target import KNOWN

H200 = Device(0, "NVIDIA H200", (9, 0), 132, 232_448, 150_000_000_000, True, 13000)


class Driver:
    """One GPU, as attributes; calls fail with ``error`` if it is set."""

    CUresult = SimpleNamespace(CUDA_SUCCESS="0", CUDA_ERROR_OUT_OF_MEMORY=SimpleNamespace(name="oom"))

    class CUdevice_attribute:  # noqa: N801  # the driver's spelling
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR = "major"
        CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR = "minor"
        CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT = "n_sms"
        CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN = "shared"
        CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH = "cooperative"

    def __init__(self, **attributes: int) -> None:
        self._attributes = {"major": 9, "minor": 0, "n_sms": 132, "shared": 232_448, "cooperative": 1, **attributes}
        self.error: Any = "0"

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, tuple[object, ...]] = {
            "cuInit": (),
            "cuDeviceGetCount": (1,),
            "cuDriverGetVersion": (13000,),
            "cuDeviceGet": (0,),
            "cuDeviceGetName": (b"NVIDIA H200\0\0rest",),
            "cuDeviceTotalMem": (150_000_000_000,),
        }
        if name == "cuDeviceGetAttribute":
            return lambda attribute, _: ("0", self._attributes[attribute])
        if name == "cuGetErrorString":
            return lambda _: ("0", b"something broke")
        return lambda *_: (self.error, *answers[name])


def play(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setattr(device, "_bindings", lambda: driver)
    return driver


def test_a_gpu_is_what_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    play(Driver(), monkeypatch)
    assert find_device() == H200
    assert H200.arch == "sm_90a"


@pytest.mark.parametrize(
    ("attributes", "index", "says"),
    [
        ({"major": 7, "minor": 5}, 0, "NVIDIA H200 is sm_75; sm_80 or newer"),
        ({"cooperative": 0}, 0, "no cooperative launch"),
        ({}, 1, "there is no GPU 1: the driver offers 1"),
    ],
)
def test_a_gpu_that_programs_do_not_run_on_is_refused(
    attributes: dict[str, int], index: int, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    play(Driver(**attributes), monkeypatch)
    with pytest.raises(NoDeviceError, match=says):
        find_device(index)


def test_a_driver_that_fails_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    play(Driver(), monkeypatch).error = SimpleNamespace(name="CUDA_ERROR_NO_DEVICE")
    with pytest.raises(NoDeviceError, match="cuInit failed with CUDA_ERROR_NO_DEVICE: something broke"):
        find_device()


def test_errors_of_calls_have_their_name(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = play(Driver(), monkeypatch)
    driver.error = SimpleNamespace(name="CUDA_ERROR_ILLEGAL_ADDRESS")
    with pytest.raises(DriverError) as failed:
        call("cuDeviceGet", 0)
    assert failed.value.code == "CUDA_ERROR_ILLEGAL_ADDRESS"
    driver.error = driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(OutOfDeviceMemoryError, match="cuDeviceGet: out of memory"):
        call("cuDeviceGet", 0)


def test_a_known_gpu_has_its_row(caplog: pytest.LogCaptureFixture) -> None:
    assert target_for(H200) == next(target for target in KNOWN if target.name == "NVIDIA H200")
    assert caplog.text == ""


def test_another_gpu_is_compiled_for_and_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    small = Device(0, "Some GPU", (8, 9), 24, 101_376, 1, True, 13000)
    with caplog.at_level(logging.WARNING):
        target = target_for(small)
    assert (target.name, target.arch, target.n_sms, target.max_rows) == ("Some GPU", "sm_89", 24, 8)
    assert "Some GPU (sm_89, 24 SMs) is not among the GPUs this was verified on" in caplog.text


def test_some_sms_can_be_left_to_others(caplog: pytest.LogCaptureFixture) -> None:
    target = target_for(H200, n_sms=100)
    assert (target.arch, target.n_sms, target.max_rows) == ("sm_90a", 100, 16)
    assert caplog.text == ""


class SplitDriver(Driver):
    """Gives groups of whole eights, and streams that name their group."""

    CUdevResourceType = SimpleNamespace(CU_DEV_RESOURCE_TYPE_SM="SMs")
    CUgreenCtxCreate_flags = SimpleNamespace(CU_GREEN_CTX_DEFAULT_STREAM=1)
    CUstream_flags = SimpleNamespace(CU_STREAM_NON_BLOCKING=1)

    def __getattr__(self, name: str) -> Any:
        def group(n_sms: int) -> SimpleNamespace:
            return SimpleNamespace(sm=SimpleNamespace(smCount=n_sms))

        calls: dict[str, Any] = {
            "cuDevicePrimaryCtxRetain": lambda _: ("0",),
            "cuDeviceGetDevResource": lambda _, kind: ("0", kind),
            "cuDevSmResourceSplitByCount": lambda _, __, ___, n: (
                "0",
                [group(-(-n // 8) * 8)],
                1,
                group(132 - -(-n // 8) * 8),
            ),
            "cuDevResourceGenerateDesc": lambda resources, _: ("0", resources[0].sm.smCount),
            "cuGreenCtxCreate": lambda description, _, __: ("0", f"context of {description}"),
            "cuGreenCtxStreamCreate": lambda context, _, __: ("0", f"stream of a {context}"),
        }
        return calls[name] if name in calls else super().__getattr__(name)


def test_sms_are_split_into_two_groups_with_a_stream_each(monkeypatch: pytest.MonkeyPatch) -> None:
    play(SplitDriver(), monkeypatch)
    split = split_sms(0, 63)
    assert (split.n_sms, split.n_rest) == (64, 68)
    assert (split.stream, split.rest_stream) == ("stream of a context of 64", "stream of a context of 68")
