"""From a program and the kernel's sources to machine code for one GPU, compiled by NVRTC and kept on disk.

The sources lie in ``kernel/`` and include ``isa.h`` (made from ``isa.py``) and ``program.h``, the one text that is
written here: the program's numbers as definitions. Needs neither a GPU nor a driver, and does not know how the code is
launched.
"""

import hashlib
import json
import logging
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from . import transducer_header
from .errors import CompileError, CompilerMissingError, KernelCompileError
from .isa import Op, Phase
from .ops import FusedHead, FusedLinear
from .program import Program
from .target import SUMS_BYTES

log = logging.getLogger(__name__)

ENTRY = "megakernel.cu"
PROGRAM_HEADER = "program.h"
KERNELS = LOOP_KERNEL, PHASE_KERNEL = "megakernel_loop", "megakernel_phase"  # whole steps, and one phase a launch

_FORMAT = "senseway cubin 1"
_BITS_PER_WORD = 32

# --- what the program says to the sources ----------------------------------------------------------------------------


def program_header(program: Program) -> str:
    """The text of ``program.h``: numbers of the program, its target and its sizes, and lists of linear shapes."""
    if program.sizes.transducer is not None:
        return transducer_header.transducer_header(program)
    target, sizes = program.target, program.sizes
    n_phases, _ = program.phases.shape
    numbers = {
        "N_SMS": target.n_sms,
        "N_PHASES": n_phases,
        "N_WARPS": sizes.n_warps,
        "BATCH_GRANULES": sizes.batch_granules,
        "TARGET_ROWS": target.max_rows,
        "RING_TILES": program.ring_tiles,
        "X_BYTES": program.x_bytes,
        "SUMS_BYTES": SUMS_BYTES,
        "MISC_BYTES": program.misc_bytes,
        "WIDTH": sizes.width,
        "N_HEADS": sizes.width // sizes.head_size,
        "N_LAYERS": sizes.n_layers,
        "N_SLOTS": sizes.max_slots,
        "N_POSITIONS": sizes.n_positions,
        "N_CROSS_POSITIONS": sizes.n_cross_positions,
        "N_TOKENS": sizes.n_tokens,
        "END_TOKEN": sizes.end_token,
        "MARK_BEGIN": sizes.mark_begin,
        "BITMAP_WORDS": bitmap_words(sizes.n_tokens),
        "EPOCHS_PER_STEP": program.epochs_per_step,
        "CONTROL_WORD": program.control_word,
        "EXCHANGE_WORDS": program.exchange_words,
        "N_REPLICAS": program.n_replicas,
        "N_SCORE_HEADS": program.n_score_heads,
        "AUX_GRANULES": program.aux_granules,
        "RESIDUAL_GRANULES": program.residual_granules,
        "LINEAR_AUX_GRANULES": program.linear_aux_granules,
        "AUX_IN_SHARED": int(program.aux_in_shared),
    }
    lines = [f"// Made from the program {program.name} for {target.name}.", "#pragma once", ""]
    lines += [f"#define {name} {value}" for name, value in numbers.items()]
    lines += [f"#define EPSILON {_epsilon(program)!r}f"]
    lines += [f"#define LINEAR_SHAPES(X) {_shapes(program, Op.LINEAR)}"]
    lines += [f"#define HEAD_SHAPES(X) {_shapes(program, Op.HEAD)}", ""]
    return "\n".join(lines)


def bitmap_words(n_tokens: int) -> int:
    """How many words of 32 bits hold one bit for each token."""
    return -(-n_tokens // _BITS_PER_WORD)


def _epsilon(program: Program) -> float:
    norms = [op.norm for op in program.ops if isinstance(op, FusedLinear | FusedHead) and op.norm]
    values = sorted({norm.epsilon for norm in norms})
    if len(values) > 1:
        raise CompileError("cubin", program.name, f"one epsilon for all norms, not {values}: the kernel has one")
    return values[0] if values else 0.0


def _shapes(program: Program, op: Op) -> str:
    """``X(1280,8) X(5120,16)``: K and the warps that share it, of every phase that does ``op``."""
    phases = program.phases[program.phases[:, Phase.OP] == op]
    pairs = sorted({(int(phase[Phase.K]), int(phase[Phase.K_WARPS])) for phase in phases})
    return " ".join(f"X({k},{k_warps})" for k, k_warps in pairs)


# --- sources and options ---------------------------------------------------------------------------------------------


def kernel_sources() -> dict[str, str]:
    """File name → text of everything in ``kernel/``."""
    folder = resources.files(__package__) / "kernel"
    return {file.name: file.read_text() for file in sorted(folder.iterdir(), key=lambda file: file.name)}


def compile_options(arch: str) -> tuple[str, ...]:
    """What NVRTC is asked for. No fast mathematics: a row's bits may not depend on what is compiled beside it."""
    return (f"--gpu-architecture={arch}", "--std=c++17", "--ptxas-options=-v")


def cache_key(sources: Mapping[str, str], options: tuple[str, ...], compiler: tuple[int, int]) -> str:
    """The SHA-256 of everything that the machine code depends on."""
    content = json.dumps([sorted(sources.items()), options, compiler])
    return hashlib.sha256(content.encode()).hexdigest()


# --- compiling -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Usage:
    """What one kernel takes of an SM, by the assembler's own report."""

    registers: int  # of a thread
    spill_bytes: int  # stores and loads, of the functions that it calls too
    stack_bytes: int  # of the one that takes most
    static_shared_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Cubin:
    """Machine code. ``key`` is the SHA-256 of what it was made from."""

    key: str
    code: bytes
    usage: Mapping[str, Usage]  # kernel → what it takes
    seconds: float  # to compile it; 0 from the cache


def build_cubin(
    program: Program, *, cache: Path | None, arch: str | None = None, kernels: Sequence[str] = KERNELS
) -> Cubin:
    """Machine code of ``program``'s kernel, from the folder ``cache`` if it holds it, else compiled and kept there.

    ``arch`` overrides the target's, for tests that compile for every architecture. ``kernels``: which of a token loop's
    are wanted; each alone takes half the time.

    Raises:
        CompilerMissingError: without NVRTC.
        KernelCompileError: if NVRTC refuses the sources or does not know the architecture.
    """
    without = "".join(f"#define WITHOUT_{name.upper()}\n" for name in KERNELS if name not in kernels)
    sources = {**kernel_sources(), PROGRAM_HEADER: program_header(program) + without}
    entry = ENTRY if program.sizes.transducer is None else transducer_header.ENTRY
    return compile_sources(sources, arch=arch or program.target.arch, cache=cache, entry=entry)


def compile_sources(sources: Mapping[str, str], *, arch: str, cache: Path | None, entry: str = ENTRY) -> Cubin:
    """Machine code of ``sources``, which hold ``entry`` and everything that it includes. Raises: as ``build_cubin``."""
    if entry not in sources:
        raise KernelCompileError(f"the kernel's sources lack {entry}: {', '.join(sorted(sources)) or 'there are none'}")
    options = compile_options(arch)
    key = cache_key(sources, options, compiler_version())
    path = cache / f"{key}.cubin" if cache else None
    if path and (kept := read_entry(path, key)):
        return kept
    started = time.monotonic()
    code, report = _compile(sources, entry, options)
    cubin = Cubin(key, code, parse_usage(report), time.monotonic() - started)
    log.info("compiled %s for %s in %.1f s", entry, arch, cubin.seconds)
    if path:
        write_entry(path, cubin)
    return cubin


def compiler_version() -> tuple[int, int]:
    """NVRTC's own, for instance (13, 0).

    Raises:
        CompilerMissingError: if it is not installed.
    """
    _, major, minor = _nvrtc().nvrtcVersion()
    return int(major), int(minor)


def _nvrtc() -> Any:  # the package has no types
    try:
        from cuda.bindings import nvrtc  # an optional extra: a machine without a GPU needs none of it

        nvrtc.nvrtcVersion()  # finds the library, which is another package
    except Exception as error:  # what it raises where there is no library has no base that its releases share
        raise CompilerMissingError(f"NVRTC is not installed: {error}. It comes with senseway[gpu]") from error
    return nvrtc


def _compile(sources: Mapping[str, str], entry: str, options: tuple[str, ...]) -> tuple[bytes, str]:
    """Machine code and the compiler's report."""
    nvrtc = _nvrtc()
    headers = {name: text for name, text in sources.items() if name != entry}
    texts, names = ([item.encode() for item in part] for part in (headers.values(), headers))
    result, handle = nvrtc.nvrtcCreateProgram(sources[entry].encode(), entry.encode(), len(headers), texts, names)
    _check(nvrtc, result, "")
    try:
        (result,) = nvrtc.nvrtcCompileProgram(handle, len(options), [option.encode() for option in options])
        report = _take(nvrtc, handle, "ProgramLog").rstrip(b"\0 ").decode(errors="replace")
        _check(nvrtc, result, f"{' '.join(options)}\n{report}")
        return _take(nvrtc, handle, "CUBIN"), report
    finally:
        nvrtc.nvrtcDestroyProgram(handle)


def _check(nvrtc: Any, result: Any, report: str) -> None:
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelCompileError(f"NVRTC {'.'.join(map(str, compiler_version()))}: {result.name}\n{report}".rstrip())


def _take(nvrtc: Any, handle: Any, what: str) -> bytes:
    result, size = getattr(nvrtc, f"nvrtcGet{what}Size")(handle)
    _check(nvrtc, result, "")
    taken = bytes(size)  # the binding writes into it
    (result,) = getattr(nvrtc, f"nvrtcGet{what}")(handle, taken)
    _check(nvrtc, result, "")
    return taken


_FUNCTION = re.compile(r"Compiling entry function '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def parse_usage(report: str) -> dict[str, Usage]:
    """What each kernel takes, out of the assembler's report. Empty if the report has none."""
    parts = _FUNCTION.split(report)[1:]
    return {name: _usage_of(text) for name, text in zip(parts[::2], parts[1::2], strict=True)}


def _usage_of(text: str) -> Usage:
    """Of a kernel and the functions that it calls, each of which has a line of its own."""
    stacks, used, shared = _STACK.findall(text), _USED.search(text), _SHARED.search(text)
    if not stacks or not used:
        raise KernelCompileError(f"the assembler's report names neither registers nor spills:\n{text}")
    return Usage(
        registers=int(used[1]),
        spill_bytes=sum(int(stores) + int(loads) for _, stores, loads in stacks),
        stack_bytes=max(int(stack) for stack, _, _ in stacks),
        static_shared_bytes=int(shared[1]) if shared else 0,
    )


# --- the cache -------------------------------------------------------------------------------------------------------


def write_entry(path: Path, cubin: Cubin) -> None:
    """Keep ``cubin``: one line of JSON, then the code. Another process sees all of it or nothing."""
    usage = {name: asdict(taken) for name, taken in cubin.usage.items()}
    head = {"format": _FORMAT, "key": cubin.key, "sha256": hashlib.sha256(cubin.code).hexdigest(), "usage": usage}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}-", delete=False) as file:
        file.write(json.dumps(head).encode() + b"\n" + cubin.code)
    os.replace(file.name, path)


def read_entry(path: Path, key: str) -> Cubin | None:
    """What is kept under ``path``; ``None``, and a line in the log, if it is not what ``write_entry`` wrote."""
    try:
        first, _, code = path.read_bytes().partition(b"\n")
    except FileNotFoundError:
        return None
    try:
        return _decode_entry(json.loads(first), code, key)
    except (ValueError, KeyError, TypeError) as error:
        log.warning("the cached kernel %s is damaged (%s): compiling it again", path, error)
        return None


def _decode_entry(head: Mapping[str, Any], code: bytes, key: str) -> Cubin:
    if (head["format"], head["key"]) != (_FORMAT, key):
        raise ValueError("it is another's")
    if hashlib.sha256(code).hexdigest() != head["sha256"]:
        raise ValueError("its hash is not the one it names")
    return Cubin(key, code, {name: Usage(**taken) for name, taken in head["usage"].items()}, seconds=0.0)
