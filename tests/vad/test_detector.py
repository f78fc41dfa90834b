import numpy as np
import pytest

from vad.detector import DetectorState, check_windows
from vad.framer import WINDOW_SAMPLES


def test_a_state_can_not_be_written_to() -> None:
    state = DetectorState(np.zeros(3, dtype=np.float32))
    with pytest.raises(ValueError, match="read-only"):
        state.memory[0] = 1


@pytest.mark.parametrize(
    "windows",
    [
        np.zeros((1, WINDOW_SAMPLES)),
        np.zeros(WINDOW_SAMPLES, dtype=np.float32),
        np.zeros((1, WINDOW_SAMPLES - 1), dtype=np.float32),
        np.zeros((1, 1, WINDOW_SAMPLES), dtype=np.float32),
    ],
)
def test_windows_of_another_type_or_shape_are_refused_with_what_was_seen(windows: np.ndarray) -> None:
    with pytest.raises(ValueError, match=rf"float32 windows \[n, 512\].*got {windows.dtype} of shape"):
        check_windows(windows)


def test_no_windows_are_windows_too() -> None:
    check_windows(np.zeros((0, WINDOW_SAMPLES), dtype=np.float32))
