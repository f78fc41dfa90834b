"""Telephone frames in order: whatever is late, doubled or missing, the clock stays that of the call."""

import random

from hypothesis import given
from hypothesis import strategies as st

from gateway.doors.jitter import MAX_WAITING, Reorderer

FRAME = 160  # bytes, 20 ms of G.711


def frame(number: int) -> bytes:
    return bytes([number % 251]) * FRAME


def through(order, *, timestamps=False) -> bytes:
    reorderer = Reorderer(8_000, b"\xff")
    out = b"".join(reorderer.push(frame(n), n, 20 * n if timestamps else None) for n in order)
    return out + reorderer.flush()


@given(st.integers(0, 2**32), st.integers(1, 200))
def test_frames_shuffled_within_the_window_come_out_in_order(seed: int, n_frames: int) -> None:
    order = sorted(range(n_frames), key=lambda n: n + random.Random(f"{seed}/{n}").uniform(0, 5))
    order.sort(key=lambda n: n != 0)  # the first frame is the first
    assert through(order) == b"".join(map(frame, range(n_frames)))


@given(st.integers(0, 2**32))
def test_doubled_frames_count_once_and_lost_ones_are_silence(seed: int) -> None:
    chance = random.Random(seed)
    kept = [n for n in range(300) if n in (0, 299) or chance.random() > 0.02]
    order = [n for n in kept for _ in range(1 + (chance.random() < 0.01))]
    assert through(order) == b"".join(frame(n) if n in set(kept) else b"\xff" * FRAME for n in range(300))


def test_a_hole_in_the_timestamps_becomes_silence_of_its_length() -> None:
    reorderer = Reorderer(8_000, b"\xff")
    first = reorderer.push(frame(1), None, 5)
    second = reorderer.push(frame(2), None, 1_025)
    assert first == frame(1) and second == b"\xff" * 8_000 + frame(2)
    assert reorderer.push(frame(3), None, 1_045) == frame(3)


def test_small_drift_and_a_clock_that_jumped_are_no_holes() -> None:
    reorderer = Reorderer(8_000, b"\xff")
    reorderer.push(frame(1), None, 0)
    assert reorderer.push(frame(2), None, 90) == frame(2)
    assert reorderer.push(frame(3), None, 3_600_000) == frame(3)


def test_holes_behind_a_clock_that_jumped_are_heard_again() -> None:
    for jumped_ms in (3_600_000, -3_600_000):
        reorderer = Reorderer(8_000, b"\xff")
        reorderer.push(frame(1), None, 0)
        assert reorderer.push(frame(2), None, jumped_ms) == frame(2)
        assert reorderer.push(frame(3), None, jumped_ms + 1_020) == b"\xff" * 8_000 + frame(3)


def test_after_four_hours_with_losses_the_clock_is_exact_and_nothing_has_piled_up() -> None:
    chance, n_frames = random.Random(0), 4 * 3_600 * 10  # of 100 ms
    reorderer, n_bytes = Reorderer(8_000, b"\xff"), 0
    for number in range(n_frames):
        if number in (0, n_frames - 1) or chance.random() > 0.02:
            n_bytes += len(reorderer.push(bytes(800), number, 100 * number))
            n_bytes += len(reorderer.push(bytes(800), number, 100 * number)) if chance.random() < 0.01 else 0
        assert len(reorderer._waiting) <= 4
    assert n_bytes + len(reorderer.flush()) == n_frames * 800


def test_frames_without_bytes_do_not_wait_for_ever() -> None:
    reorderer = Reorderer(8_000, b"\xff")
    reorderer.push(frame(0), 0, None)
    for number in range(2, 10_000):
        reorderer.push(b"", number, None)
    assert len(reorderer._waiting) <= MAX_WAITING + 1
    assert reorderer.push(frame(1), 10_000, None) == frame(1)


def test_a_codec_is_given_its_frames_in_order_and_each_once_and_a_lost_one_is_as_long_as_the_others() -> None:
    given: list[bytes] = []

    def decode(data: bytes) -> bytes:
        given.append(data)
        return data * FRAME

    reorderer = Reorderer(8_000, b"\xff", decode)
    order = [0, 2, 1, 1, 3, 5, 4, 5, *range(7, 40)]  # shuffled, doubled, and 6 is lost
    out = b"".join(reorderer.push(bytes([n]), n, None) for n in order) + reorderer.flush()
    assert given == [bytes([n]) for n in range(40) if n != 6]
    assert out == b"".join(b"\xff" * FRAME if n == 6 else frame(n) for n in range(40))


def test_frames_of_a_codec_that_can_not_be_read_do_not_wait_for_ever() -> None:
    given: list[bytes] = []
    reorderer = Reorderer(8_000, b"\xff", lambda data: given.append(data) or b"")
    for number in [0, *range(2, 20)]:
        reorderer.push(bytes([number]), number, None)
    assert len(given) == 19
