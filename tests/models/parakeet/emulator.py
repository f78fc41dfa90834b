"""The encoder's kernels compiled for this machine's processor and run on it, one thread of a block at a time.

What a GPU would compute, but for the order of sums inside its matrix instruction. Slow: for small sizes.
"""

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from models.parakeet.config import ParakeetConfig
from models.parakeet.device import Argument, Gpu, sources, words

COMPILER = shutil.which("g++")
HERE = Path(__file__).parent


class EmulatedKernels:
    """See ``models.parakeet.device.Kernels``."""

    def __init__(self, config: ParakeetConfig, folder: Path, gpu: Gpu) -> None:
        """Compile in ``folder``."""
        assert COMPILER is not None
        self.gpu = gpu
        texts = sources(config, gpu) | {
            "warp.cuh": (HERE / "emulated_warp.h").read_text(),
            "all.cpp": '#include "encoder.cu"\n' + (HERE / "emulated_run.h").read_text(),
        }
        for name, text in texts.items():
            (folder / name).write_text(text)
        command = [COMPILER, "-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-o", "kernels.so", "all.cpp"]
        subprocess.run(command, cwd=folder, check=True)
        self._library = ctypes.CDLL(str(folder / "kernels.so"))

    def launch(
        self, name: str, arguments: Sequence[Argument], blocks: tuple[int, int, int], n_threads: int, shared_bytes: int
    ) -> None:
        structure, n_blocks = words(arguments), np.array(blocks, np.int32)
        address = ctypes.cast(getattr(self._library, name), ctypes.c_void_p)
        pointers = (ctypes.c_void_p(structure.ctypes.data), ctypes.c_void_p(n_blocks.ctypes.data))
        self._library.run(address, *pointers, n_threads, shared_bytes)
