"""What a transducer's program says to ``kernel/transducer.cu``: every word of its phases, as numbers known there.

Knows a program's words and how C is written. Does not know how the sources are compiled (``cubin.py``).
"""

from .errors import CompileError
from .isa import GRANULE_ROWS
from .numbers import k_warps
from .program import Program
from .target import SUMS_BYTES

ENTRY = "transducer.cu"
KERNEL = "transducer_loop"
MAX_KERNEL_ROWS = 8  # frames a step: with 16 a step took 2 to 3 µs more, and seldom are so many frames blank


def transducer_header(program: Program) -> str:
    """The text of ``program.h``.

    Raises:
        CompileError: for a program of more rows than the kernel's bodies take.
    """
    if program.target.max_rows > MAX_KERNEL_ROWS:
        rule = f"the kernel takes {MAX_KERNEL_ROWS} rows a step, not {program.target.max_rows}"
        raise CompileError("cubin", program.name, rule)
    target, sizes, transducer = program.target, program.sizes, program.sizes.transducer
    assert transducer is not None, "a transducer's program"
    numbers = {
        "N_SMS": target.n_sms,
        "N_PHASES": len(program.phases),
        "N_WARPS": sizes.n_warps,
        "BATCH_GRANULES": sizes.batch_granules,
        "TARGET_ROWS": target.max_rows,
        "RING_TILES": program.ring_tiles,
        "IS_RESIDENT": int(is_resident(program)),
        "SUMS_BYTES": SUMS_BYTES,
        "MISC_BYTES": program.misc_bytes,
        "WIDTH": sizes.width,
        "K_WARPS_OF_WIDTH": k_warps(sizes.width, sizes.n_warps),
        "N_LAYERS": sizes.n_layers,
        "N_SLOTS": sizes.max_slots,
        "N_FRAMES": transducer.n_frames,
        "N_TOKENS": sizes.n_tokens,
        "FIRST_DURATION": -(-sizes.n_tokens // GRANULE_ROWS) * GRANULE_ROWS,
        "N_DURATIONS": len(transducer.durations),
        "BLANK": transducer.blank,
        "MAX_SYMBOLS": transducer.max_symbols,
        "EPOCHS_PER_STEP": program.epochs_per_step,
        "CONTROL_WORD": program.control_word,
        "EXCHANGE_WORDS": program.exchange_words,
        "N_REPLICAS": program.n_replicas,
        "AUX_GRANULES": program.aux_granules,
        "KEPT_GRANULES": program.kept_granules,
    }
    lines = [f"// Made from the program {program.name} for {target.name}.", "#pragma once", ""]
    lines += [f"#define {name} {value}" for name, value in numbers.items()]
    durations = "".join(f"(i) == {index} ? {frames} : " for index, frames in enumerate(transducer.durations[:-1]))
    lines += [f"#define DURATION(i) ({durations}{transducer.durations[-1]})"]
    lines += ["", "__device__ constexpr unsigned PHASE[N_PHASES][PHASE_WORDS] = {"]
    lines += [f"    {{{', '.join(map(str, words))}}}," for words in program.phases.tolist()]
    return "\n".join([*lines, "};", ""])


def is_resident(program: Program) -> bool:
    """Whether an SM holds all of its tape; of another the rest is read from the L2 whenever it is used."""
    return bool((program.warp_tiles[:, :, 1] <= program.ring_tiles).all())
