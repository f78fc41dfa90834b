"""A program's kernel compiled for this machine's processor and run on it, every thread of every block in turn.

What a GPU would compute, but for the order of sums inside its matrix instruction. Slow: for small sizes. Takes the
place of the launcher under the runtime.
"""

import ctypes
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megakernel import isa
from megakernel.cubin import ENTRY as LOOP_ENTRY
from megakernel.cubin import LOOP_KERNEL, kernel_sources, program_header
from megakernel.interpret_transducer import TransducerDevice, transducer_device
from megakernel.interpreter import DeviceMemory
from megakernel.isa import Control, Parameter
from megakernel.launcher import Event, Start, dynamic_shared_bytes, launch_words
from megakernel.mailbox import ADDRESSES, MAILBOX_BYTES, OFFSETS, Mailbox
from megakernel.program import Program
from megakernel.transducer_header import ENTRY, KERNEL

COMPILER = shutil.which("g++")
HERE = Path(__file__).parent
_ASM = re.compile(r"\basm(?: volatile)?\(")
_OPERAND = re.compile(r'"[=+]?[a-z]"\s*\(')


def without_ptx(source: str) -> str:
    """The source with each statement in PTX as the call of a function of its instruction's name."""
    done = ""
    while match := _ASM.search(source):
        end = _closing(source, match.end() - 1)
        done += source[: match.start()] + _call(source[match.end() : end])
        source = source[end + 1 :]
    return done + source


def _closing(text: str, at: int) -> int:
    """Where the parenthesis that opens at ``at`` closes."""
    depth, in_string = 0, False
    for index in range(at, len(text)):
        character = text[index]
        in_string ^= character == '"'
        if not in_string:
            depth += (character == "(") - (character == ")")
            if depth == 0:
                return index
    raise ValueError(f"{text[at : at + 80]}: nothing closes it")


def _call(statement: str) -> str:
    instruction = re.match(r'\s*"([\w.:]+)', statement)
    if instruction is None:
        return "(void)0"  # what only keeps the compiler from knowing something
    operands, rest = [], statement
    while match := _OPERAND.search(rest):
        end = _closing(rest, match.end() - 1)
        operands.append(rest[match.end() : end])
        rest = rest[end + 1 :]
    return f"{re.sub(r'[.:]', '_', instruction[1])}({', '.join(operands)})"


class Emulated:
    """See ``megakernel.runtime.Launches``. A launch is over when ``start`` returns."""

    def __init__(
        self,
        program: Program,
        folder: Path,
        *,
        entry: str,
        kernel: str,
        arrays: Mapping[Parameter, NDArray[np.generic]],
    ) -> None:
        """Compile in ``folder``. ``arrays``: what the program's memory holds besides what every program has."""
        assert COMPILER is not None
        self.program = program
        self.order = 0  # of threads: see ``run`` in emulated_run.h
        texts = {name: without_ptx(text) for name, text in kernel_sources().items()}
        for name in ("machine.cuh", "transducer_layout.cuh"):
            texts[name] = re.sub(r"extern __shared__.*?;", "", texts[name])
        texts |= {"program.h": program_header(program), "emulated_gpu.h": (HERE / "emulated_gpu.h").read_text()}
        run = (HERE / "emulated_run.h").read_text()
        texts["all.cpp"] = f'#include "emulated_gpu.h"\n#include "{entry}"\n#define KERNEL {kernel}\n{run}'
        for name, text in texts.items():
            (folder / name).write_text(text)
        options = ["-std=c++17", "-O1", "-U_FORTIFY_SOURCE", "-w", "-shared", "-fPIC", "-o", "kernel.so"]
        subprocess.run([COMPILER, *options, "all.cpp"], cwd=folder, check=True)
        self._library = ctypes.CDLL(str(folder / "kernel.so"))
        self._mailbox = np.zeros(MAILBOX_BYTES, np.uint8)
        self.mailbox = Mailbox(self._mailbox)
        n_request_words = isa.MAX_SLOTS * isa.REQUEST_WORDS + isa.COMMAND_SLOTS * isa.COMMAND_WORDS
        self._arrays: dict[Parameter, NDArray[np.generic]] = {
            Parameter.WARP_TILES: program.warp_tiles,
            Parameter.TASKS: program.tasks,
            Parameter.EXCHANGE: _aligned(program.exchange_words * 2),
            Parameter.REQUESTS: np.zeros(n_request_words, np.uint32),
            Parameter.STATE: np.zeros(isa.STATE_WORDS, np.uint32),
            Parameter.CONTROL: np.zeros(isa.CONTROL_WORDS, np.uint32),
            **arrays,
        }

    def start(self, start: Start) -> None:
        """See ``Launches``."""
        parameters = np.zeros(len(Parameter), np.uint64)
        for parameter, array in self._arrays.items():
            parameters[parameter] = array.ctypes.data
        for parameter, block in ADDRESSES.items():
            parameters[parameter] = self._mailbox.ctypes.data + OFFSETS[block]
        for parameter, value in launch_words(start).items():
            parameters[parameter] = value
        control = self._arrays[Parameter.CONTROL]
        control[:] = self.mailbox.control_before
        shared_bytes = dynamic_shared_bytes(self.program)
        n_sms, n_threads = self.program.target.n_sms, self.program.sizes.n_warps * 32
        where = ctypes.c_void_p(parameters.ctypes.data)
        line = self._library.run(where, n_sms, n_threads, shared_bytes, self.order)
        assert line == 0, f"a block's threads wait at different places, some in line {line}"
        assert control[Control.LEFT], "the kernel says why it left"
        self.mailbox.control_after[:] = control

    def array(self, parameter: Parameter) -> NDArray[np.generic]:
        """What the kernel has there."""
        return self._arrays[parameter]

    def has_left(self) -> bool:
        """See ``Launches``."""
        return True

    def wait_for(self, event: Event) -> None:
        """See ``Launches``."""

    def clear(self, *, state: bool) -> None:
        """See ``Launches``."""
        for parameter in (Parameter.EXCHANGE, *((Parameter.STATE,) if state else ())):
            self._arrays[parameter][:] = 0

    def close(self) -> None:
        """See ``Launches``."""


class EmulatedLauncher(Emulated):
    """A transducer's."""

    def __init__(self, program: Program, constants: Mapping[str, NDArray[np.float32]], folder: Path) -> None:
        """Compile in ``folder``."""
        self.memory: TransducerDevice = transducer_device(program, constants)
        arrays = {
            Parameter.TAPE: self.memory.memory.tape,
            Parameter.AUX: self.memory.memory.aux,
            Parameter.FRAMES: self.memory.frames,
            Parameter.TABLE: self.memory.table,
            Parameter.STATE_IN: self.memory.state_in,
            Parameter.STATE_OUT: self.memory.state_out,
        }
        super().__init__(program, folder, entry=ENTRY, kernel=KERNEL, arrays=arrays)


class EmulatedLoop(Emulated):
    """A token loop's."""

    def __init__(self, program: Program, memory: DeviceMemory, folder: Path) -> None:
        """Compile in ``folder``; ``memory`` is copied."""
        arrays = {
            Parameter.TAPE: memory.tape,
            Parameter.AUX: memory.aux,
            Parameter.BITMAPS: memory.bitmaps,
            Parameter.TOKEN_TABLE: memory.token_table,
            Parameter.POSITION_TABLE: memory.position_table,
            Parameter.SELF_CACHE: memory.self_cache,
            Parameter.CROSS_CACHE: memory.cross_cache,
            Parameter.SCORES: memory.scores,
        }
        super().__init__(
            program,
            folder,
            entry=LOOP_ENTRY,
            kernel=LOOP_KERNEL,
            arrays={name: _copied(array) for name, array in arrays.items()} | {Parameter.PHASES: program.phases},
        )


def _copied(array: NDArray[np.generic]) -> NDArray[np.uint32]:
    """Its bytes at a border of 128."""
    copy = _aligned(-(-array.nbytes // 4))
    copy.view(np.uint8)[: array.nbytes] = np.ascontiguousarray(array).view(np.uint8).ravel()
    return copy


def _aligned(n_words: int) -> NDArray[np.uint32]:
    """Zeros at a border of 128 bytes."""
    words = np.zeros(n_words + 32, np.uint32)
    first = -words.ctypes.data % 128 // 4
    return words[first : first + n_words]
