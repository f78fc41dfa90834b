"""Smart Turn v3.2, a model of turns by Daily: Whisper tiny's encoder with a head that says whether a speaker is done.

BSD-2-Clause; trained on 23 languages. Knows its ONNX file and the features that it was trained on. Hears only, so that
it needs no transcript; does not know when it is asked, or what for.
"""

from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from vad.turn import MAX_TURN_SAMPLES

from .errors import ModelFilesError
from .mel import HOP_SAMPLES, log_mel

N_MELS = 80
N_FRAMES = MAX_TURN_SAMPLES // HOP_SAMPLES
_VARIANCE_FLOOR = 1e-7  # of the normalisation that the model was trained with


class SmartTurn:
    """A ``TurnDetector``. One pause at a time: its quantised layers scale by a whole batch, so that turns in one would
    change each other's answers.
    """

    name = "smart-turn-v3.2"

    def __init__(self, path: Path) -> None:
        """Load the model at ``path``; it computes on the thread that asks.

        Raises:
            ModelFilesError: if onnxruntime can't make anything of it.
        """
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        try:
            self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # its own have no base that its releases share
            raise ModelFilesError(f"{path}: onnxruntime can't load it: {error}") from error

    def probability(self, samples: NDArray[np.float32]) -> float:
        """See ``TurnDetector``."""
        [answer] = self._session.run(None, {"input_features": features(samples)[None]})
        return float(answer[0, 0])


def features(samples: NDArray[np.float32]) -> NDArray[np.float32]:
    """Log-mel features [N_MELS, N_FRAMES] of the last of ``samples`` [n], which lie at the end of the window.

    Of zero mean and unit variance, the silence before them included: so a quiet voice gives what a loud one does.
    """
    last = samples[-MAX_TURN_SAMPLES:]
    window = np.pad(last, (MAX_TURN_SAMPLES - len(last), 0))
    normal = (window - window.mean()) / np.sqrt(window.var() + np.float32(_VARIANCE_FLOOR))
    found: NDArray[np.float32] = log_mel(normal, N_MELS, N_FRAMES).numpy()
    return found
