"""Which backend serves: the first that opens, then the next when one fails, and the reason for it."""

import logging
from collections.abc import Callable

import pytest
import torch

from models.backends import BackendError, Backends, NoDeviceForBackendError, Offer, device_errors
from models.whisper.backend import Backend


class Idle:
    """A backend that does nothing, and knows whether it was closed."""

    max_windows = 1

    def __init__(self) -> None:
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


def opens(backend: object) -> Callable[[], Backend]:
    return lambda: backend


def refuses(reason: str) -> Callable[[], Backend]:
    def open_it() -> Backend:
        raise BackendError(reason)

    return open_it


def test_the_first_that_opens_is_in_use_and_the_reasons_say_why_no_faster_one() -> None:
    slow = Idle()
    unable = [Offer("fast", refuses("no device")), Offer("middle", refuses("too little memory"))]
    backends = Backends([*unable, Offer("slow", opens(slow))], model="m")
    assert (backends.name, backends.current) == ("slow", slow)
    assert backends.why == "no fast: no device; no middle: too little memory"


def test_a_reason_that_two_share_is_told_once() -> None:
    offers = [Offer(name, refuses("no device")) for name in ("fast", "middle")] + [Offer("slow", opens(Idle()))]
    assert Backends(offers, model="m").why == "no fast or middle: no device"


def test_one_that_ought_to_open_and_does_not_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    def no_device() -> Backend:
        raise NoDeviceForBackendError("no device")

    Backends([Offer("fast", no_device), Offer("slow", opens(Idle()))], model="m")
    assert caplog.text == ""
    Backends([Offer("fast", refuses("no memory")), Offer("slow", opens(Idle()))], model="m")
    assert "m: fast can't be used, so slow is tried: no memory" in caplog.text


def test_the_fastest_needs_no_reason() -> None:
    backends = Backends([Offer("fast", opens(Idle())), Offer("slow", refuses("never asked"))], model="m")
    assert (backends.name, backends.why) == ("fast", "the fastest there is")


def test_one_that_fails_is_closed_and_replaced_with_a_line_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    fast, slow = Idle(), Idle()
    offers = [Offer("fast", opens(fast)), Offer("middle", refuses("no")), Offer("slow", opens(slow))]
    backends = Backends(offers, model="m")
    with caplog.at_level(logging.WARNING):
        backends.replace(BackendError("the device is gone"))
    assert fast.is_closed and backends.current is slow
    assert backends.why == "fast failed: the device is gone; no middle: no"
    assert "m: fast failed and slow goes on: the device is gone" in caplog.text


def test_the_error_of_the_last_one_is_everyones() -> None:
    backends = Backends([Offer("only", opens(Idle()))], model="m")
    with pytest.raises(BackendError, match="gone"):
        backends.replace(BackendError("gone"))
    with pytest.raises(BackendError, match="nothing works"):
        Backends([Offer("a", refuses("no")), Offer("b", refuses("nothing works"))], model="m")


def test_what_a_device_raises_is_named_by_its_first_line() -> None:
    with pytest.raises(BackendError, match="^CUDA error: out of memory$"), device_errors():
        raise torch.OutOfMemoryError("CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA`")
