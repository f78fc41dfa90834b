"""Silero VAD: a small recurrent network that tells speech from everything else.

Knows the ONNX graphs inside the installed ``silero-vad`` distribution (version 6, 16 kHz) and how they carry context
and state. Does not import that package's Python code, which would bring torch with it.

The distribution ships several weight files that share an interface but not their weights. ``16k_op15`` and
``16k_sequence`` equal the main ``silero_vad.onnx`` (a test holds this); ``silero_vad_half.onnx`` and the safetensors
file are of another version.
"""

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from .audio import SAMPLE_RATE_HZ
from .detector import DetectorState, check_windows
from .framer import WINDOW_SAMPLES

CONTEXT_SAMPLES = 64  # the network sees the end of the window before; without it its answers are wrong but plausible
HIDDEN_SIZE = 128
_STATE_SHAPE = (2, HIDDEN_SIZE)  # h, c of the LSTM
_N_STATE = 2 * HIDDEN_SIZE

# From this many windows on, a session is run through the graph that loops over time inside: 60 µs a window in blocks
# against 113 µs in single steps (2-core AMD EPYC, Zen 4). With fewer, stepping all sessions together is as quick.
_MIN_SEQUENCE_WINDOWS = 4
_MAX_SEQUENCE_WINDOWS = 512  # of one call; bounds the graph's scratch memory on long files


class SileroDetector:
    """A ``SpeechDetector`` that runs Silero VAD on one CPU thread. May be shared by threads."""

    def __init__(self) -> None:
        """Load both graphs. Raises ``FileNotFoundError`` if the distribution or a file of it is missing."""
        self._step = _open("silero_vad_16k_op15.onnx")  # many sessions, one window each
        self._sequence = _open("silero_vad_16k_sequence.onnx")  # one session, many windows
        self._rate = np.array(SAMPLE_RATE_HZ, dtype=np.int64)

    def initial_state(self) -> DetectorState:
        """Zeros: LSTM state and the context of a stream that begins."""
        return DetectorState(np.zeros(_N_STATE + CONTEXT_SAMPLES, dtype=np.float32))

    def score(
        self, batch: Sequence[tuple[DetectorState, NDArray[np.float32]]]
    ) -> list[tuple[NDArray[np.float32], DetectorState]]:
        """Probabilities for each session's windows; see ``SpeechDetector.score``."""
        for _, windows in batch:
            check_windows(windows)
        short = [index for index, (_, windows) in enumerate(batch) if len(windows) < _MIN_SEQUENCE_WINDOWS]
        stepped = dict(zip(short, self._score_in_steps([batch[index] for index in short]), strict=True))
        return [
            stepped[index] if index in stepped else self._score_sequence(state, windows)
            for index, (state, windows) in enumerate(batch)
        ]

    def _score_in_steps(
        self, batch: Sequence[tuple[DetectorState, NDArray[np.float32]]]
    ) -> list[tuple[NDArray[np.float32], DetectorState]]:
        """Run window 0 of every session, then window 1 of those that have one, and so on."""
        inputs = [_with_context(state, windows) for state, windows in batch]
        states = [_lstm_state(state) for state, _ in batch]
        probabilities = [np.empty(len(windows), dtype=np.float32) for _, windows in batch]
        for step_index in range(max((len(windows) for _, windows in batch), default=0)):
            active = [index for index, (_, windows) in enumerate(batch) if len(windows) > step_index]
            output, new_states = self._step.run(
                None,
                {
                    "input": np.stack([inputs[index][step_index] for index in active]),
                    "state": np.stack([states[index] for index in active], axis=1),  # [2, n_active, HIDDEN_SIZE]
                    "sr": self._rate,
                },
            )
            for row, index in enumerate(active):
                probabilities[index][step_index] = output[row, 0]
                states[index] = new_states[:, row]
        return [
            (probabilities[index], _state_after(state, windows, states[index]))
            for index, (state, windows) in enumerate(batch)
        ]

    def _score_sequence(
        self, state: DetectorState, windows: NDArray[np.float32]
    ) -> tuple[NDArray[np.float32], DetectorState]:
        inputs = _with_context(state, windows)
        h, c = _lstm_state(state)[:, None, None]  # [1, 1, HIDDEN_SIZE] each
        blocks: list[NDArray[np.float32]] = []
        for first in range(0, len(inputs), _MAX_SEQUENCE_WINDOWS):
            block = inputs[first : first + _MAX_SEQUENCE_WINDOWS]
            output, h, c = self._sequence.run(["speech_probs", "hn", "cn"], {"input": block, "h": h, "c": c})
            blocks.append(output.reshape(-1))
        return np.concatenate(blocks), _state_after(state, windows, np.stack((h[0, 0], c[0, 0])))


def _open(name: str) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1  # a window is 0.1 ms of work; a thread pool would only take cores from others
    options.inter_op_num_threads = 1
    options.log_severity_level = 3  # errors: the op15 file has unused initialisers, which are warned about
    return onnxruntime.InferenceSession(str(_model_path(name)), options, providers=["CPUExecutionProvider"])


def _model_path(name: str) -> Path:
    try:
        path = Path(str(distribution("silero-vad").locate_file(f"silero_vad/data/{name}")))
    except PackageNotFoundError as error:
        raise FileNotFoundError("the weights come with the distribution silero-vad, which is not installed") from error
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; silero-vad 6.2 or later has it")
    return path


def _with_context(state: DetectorState, windows: NDArray[np.float32]) -> NDArray[np.float32]:
    """Each window behind the last ``CONTEXT_SAMPLES`` of the one before it: [n, CONTEXT_SAMPLES + WINDOW_SAMPLES]."""
    inputs = np.empty((len(windows), CONTEXT_SAMPLES + WINDOW_SAMPLES), dtype=np.float32)
    inputs[:, CONTEXT_SAMPLES:] = windows
    inputs[:1, :CONTEXT_SAMPLES] = state.memory[_N_STATE:]
    inputs[1:, :CONTEXT_SAMPLES] = windows[:-1, -CONTEXT_SAMPLES:]
    return inputs


def _lstm_state(state: DetectorState) -> NDArray[np.float32]:
    return state.memory[:_N_STATE].reshape(_STATE_SHAPE)


def _state_after(state: DetectorState, windows: NDArray[np.float32], lstm_state: NDArray[np.float32]) -> DetectorState:
    """The state behind ``windows``, from the LSTM state [2, HIDDEN_SIZE] that the graph returned."""
    context = windows[-1, -CONTEXT_SAMPLES:] if len(windows) else state.memory[_N_STATE:]
    return DetectorState(np.concatenate((lstm_state.reshape(-1), context)))
