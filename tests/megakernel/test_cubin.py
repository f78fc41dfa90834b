"""The kernel compiled for GPUs that are not here, and kept on disk.

Shipped programs are compiled too, one of them for every architecture, with limits on what the assembler makes of them.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from megakernel.compile import compile_program
from megakernel.cubin import (
    ENTRY,
    KERNELS,
    LOOP_KERNEL,
    PHASE_KERNEL,
    PROGRAM_HEADER,
    Cubin,
    Usage,
    build_cubin,
    cache_key,
    compile_sources,
    compiler_version,
    kernel_sources,
    parse_usage,
    program_header,
    read_entry,
    write_entry,
)
from megakernel.errors import CompileError, KernelCompileError
from megakernel.graph import Graph
from megakernel.isa import LOOP_WARPS
from megakernel.ops import FusedHead, FusedLinear, Norm
from megakernel.program import Program
from megakernel.target import KNOWN, Target
from models.whisper.config import SpecialTokens, WhisperConfig
from models.whisper.graph import decoder_graph
from tests.nvrtc import needs_nvrtc

SMALL_KERNEL = (
    'extern "C" __global__ void add(float* a) { __shared__ float s[3]; s[threadIdx.x % 3] = X; a[1] = s[0]; }'
)


@pytest.fixture(scope="module")
def program(tiny_graph: Callable[..., Graph]) -> Program:
    return compile_program(tiny_graph(), Target("five", "sm_90a", 5, 232_448))


# --- what is written for the compiler ---


def definitions(header: str) -> Mapping[str, str]:
    lines = (line.split(maxsplit=2) for line in header.splitlines() if line.startswith("#define"))
    return {name: value for _, name, value in lines}


def test_the_header_says_the_programs_numbers(program: Program) -> None:
    said = definitions(program_header(program))
    assert said["N_SMS"] == "5"
    assert said["N_PHASES"] == str(len(program.phases))
    assert said["RING_TILES"] == "15"
    assert said["MISC_BYTES"] == str(program.misc_bytes)
    assert said["WIDTH"] == "128"
    assert said["N_HEADS"] == "2"
    assert said["BITMAP_WORDS"] == "4"
    assert said["EPSILON"] == "1e-05f"
    assert said["AUX_IN_SHARED"] in "01"


def test_each_linear_shape_is_named_once(program: Program) -> None:
    header = program_header(program)
    assert "#define LINEAR_SHAPES(X) X(128,4) X(256,8)\n" in header
    assert "#define HEAD_SHAPES(X) X(128,4)\n" in header


def test_norms_that_disagree_on_epsilon_are_refused(program: Program) -> None:
    def with_another(op: object) -> object:
        return replace(op, norm=Norm("a", "b", 1e-6)) if isinstance(op, FusedHead) else op

    changed = tuple(with_another(op) for op in program.ops)
    assert any(isinstance(op, FusedLinear) and op.norm for op in changed)
    with pytest.raises(CompileError, match="one epsilon for all norms"):
        program_header(replace(program, ops=changed))  # type: ignore[arg-type]  # of the kinds that they were


def test_sources_are_the_entry_and_what_it_includes() -> None:
    sources = kernel_sources()
    assert {ENTRY, "isa.h"} <= set(sources)
    included = {line.split('"')[1] for text in sources.values() for line in text.splitlines() if "#include" in line}
    assert included <= {*sources, PROGRAM_HEADER}


# --- compiling ---


def small(cache: Path | None = None, *, value: str = "1", arch: str = "sm_90a") -> Cubin:
    return compile_sources(
        {ENTRY: '#include "program.h"\n' + SMALL_KERNEL, PROGRAM_HEADER: f"#define X {value}\n"}, arch=arch, cache=cache
    )


@needs_nvrtc
def test_machine_code_comes_with_what_it_takes() -> None:
    cubin = small()
    assert cubin.code.startswith(b"\x7fELF")
    assert list(cubin.usage) == ["add"]
    assert 0 < cubin.usage["add"].registers < 64
    assert cubin.usage["add"].static_shared_bytes == 12


@needs_nvrtc
def test_an_error_in_the_source_is_told_in_the_compilers_words() -> None:
    with pytest.raises(KernelCompileError, match=r'identifier "oops" is undefined'):
        small(value="oops")


@needs_nvrtc
def test_an_unknown_architecture_is_refused() -> None:
    with pytest.raises(KernelCompileError, match="sm_61"):
        small(arch="sm_61")


def test_sources_without_their_entry_are_refused() -> None:
    with pytest.raises(KernelCompileError, match="lack megakernel.cu: a.cuh"):
        compile_sources({"a.cuh": ""}, arch="sm_90a", cache=None)


def test_the_report_is_read_kernel_by_kernel() -> None:
    report = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'g' for 'sm_90a'
ptxas info    : Function properties for g
ptxas         .     296 bytes stack frame, 600 bytes spill stores, 36 bytes spill loads
ptxas info    : Function properties for _Z1hv
ptxas         .     32 bytes stack frame, 4 bytes spill stores, 8 bytes spill loads
ptxas info    : Used 128 registers, used 0 barriers, 296 bytes cumulative stack size
ptxas info    : Compiling entry function 'f' for 'sm_90a'
ptxas info    : Function properties for f
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 1 barriers, 48 bytes smem
"""
    assert parse_usage(report) == {"g": Usage(128, 648, 296, 0), "f": Usage(12, 0, 0, 48)}
    assert parse_usage("") == {}
    with pytest.raises(KernelCompileError, match="neither registers nor spills"):
        parse_usage("Compiling entry function 'f' for 'sm_90a'")


# --- the cache ---


@needs_nvrtc
def test_what_was_compiled_is_taken_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = small(tmp_path)
    monkeypatch.setattr("megakernel.cubin._compile", None)
    again = small(tmp_path)
    assert (again.code, again.usage, again.key) == (first.code, first.usage, first.key)
    assert again.seconds == 0 < first.seconds


def test_the_key_changes_with_everything_that_the_code_hangs_on() -> None:
    base = ({"a": "1"}, ("-x",), (13, 0))
    others = [({"a": "2"}, ("-x",), (13, 0)), ({"a": "1"}, ("-y",), (13, 0)), ({"a": "1"}, ("-x",), (13, 1))]
    keys = {cache_key(*arguments) for arguments in [base, *others]}
    assert len(keys) == 4
    assert cache_key({"a": "1", "b": "2"}, (), (1, 2)) == cache_key({"b": "2", "a": "1"}, (), (1, 2))


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: content[:-1],
        lambda content: content.replace(b"machine", b"MACHINE"),
        lambda content: b"",
        lambda content: b"{}\n" + content,
        lambda content: b"null\nx",
        lambda content: content.replace(b'"key": "k"', b'"key": "j"'),
        lambda content: content.replace(b'"registers"', b'"registrars"'),
    ],
)
def test_a_damaged_entry_is_named_and_not_used(
    damage: Callable[[bytes], bytes], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "cubins" / "k.cubin"
    kept = Cubin("k", b"machine\ncode", {"f": Usage(1, 2, 3, 4)}, 0.0)
    write_entry(path, kept)
    entry = read_entry(path, "k")
    assert entry is not None
    assert (entry.code, entry.usage) == (kept.code, kept.usage)
    path.write_bytes(damage(path.read_bytes()))
    with caplog.at_level(logging.WARNING):
        assert read_entry(path, "k") is None
    assert f"the cached kernel {path} is damaged" in caplog.text


def test_nothing_in_the_cache_is_no_damage(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_entry(tmp_path / "k.cubin", "k") is None
    assert caplog.text == ""


@needs_nvrtc
def test_a_damaged_entry_is_compiled_again(tmp_path: Path) -> None:
    first = small(tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(b"rubbish")
    assert small(tmp_path).code == first.code
    assert small(tmp_path).seconds == 0


@needs_nvrtc
def test_each_kernel_can_be_compiled_alone(program: Program, tmp_path: Path) -> None:
    loop, phase = (build_cubin(program, cache=tmp_path, kernels=[kernel]) for kernel in KERNELS)
    assert (set(loop.usage), set(phase.usage)) == ({LOOP_KERNEL}, {PHASE_KERNEL})
    assert loop.key != phase.key
    assert build_cubin(program, cache=tmp_path, kernels=[PHASE_KERNEL]).seconds == 0


# --- the programs that are shipped ---


def _whisper(width: int, n_layers: int, n_vocab: int, *, is_english: bool = False) -> Graph:
    """The decoder of a published size; what its special tokens are called changes nothing here."""
    end = 50256 if is_english else 50257
    begin = n_vocab - 1501
    config = WhisperConfig(
        n_mels=80,
        n_vocab=n_vocab,
        width=width,
        n_heads=width // 64,
        n_ffn=4 * width,
        n_encoder_layers=n_layers,
        n_decoder_layers=n_layers,
        n_audio_positions=1500,
        n_text_positions=448,
        alignment_heads=((n_layers - 1, 0), (n_layers - 1, 3)),
    )
    special = SpecialTokens(end, end + 1, (), begin - 6, begin - 5, begin - 4, begin - 3, begin - 2, begin - 1, begin)
    return decoder_graph(config, special, n_cross_positions=1500)


SHIPPED: Mapping[str, Callable[[], Graph]] = {
    "whisper-tiny.en": lambda: _whisper(384, 4, 51864, is_english=True),
    "whisper-base": lambda: _whisper(512, 6, 51865),
    "whisper-small": lambda: _whisper(768, 12, 51865),
    "whisper-large-v3-turbo": lambda: _whisper(1280, 4, 51866),
    "whisper-large-v3": lambda: _whisper(1280, 32, 51866),
}
N_THREADS = 32 * LOOP_WARPS
MAX_REGISTERS = min(255, 65_536 // N_THREADS)  # of a thread: what an instruction can name, and a share of the SM's file
# Stores and loads, where attention needs more than a thread has; nothing else spills.
SPILL_BYTES = {
    ("whisper-large-v3-turbo", "sm_100a", "megakernel_loop"): 64,
    ("whisper-large-v3-turbo", "sm_100a", "megakernel_phase"): 44,
    ("whisper-large-v3-turbo", "sm_120", "megakernel_loop"): 64,
    ("whisper-large-v3-turbo", "sm_120", "megakernel_phase"): 68,
    ("whisper-large-v3", "sm_90a", "megakernel_loop"): 16,
    ("whisper-tiny.en", "sm_90a", "megakernel_phase"): 116,
}
MEASURED_WITH = (13, 5)
SHIPPED_FOR = (
    ("whisper-large-v3-turbo", "sm_80"),
    ("whisper-large-v3-turbo", "sm_86"),
    ("whisper-large-v3-turbo", "sm_89"),
    ("whisper-large-v3-turbo", "sm_90a"),
    ("whisper-large-v3-turbo", "sm_100a"),
    ("whisper-large-v3-turbo", "sm_120"),
    ("whisper-tiny.en", "sm_90a"),
    ("whisper-base", "sm_90a"),
    ("whisper-small", "sm_90a"),
    ("whisper-large-v3", "sm_90a"),
)  # one model for every GPU and every model for one GPU: all pairs would take minutes


@needs_nvrtc
@pytest.mark.parametrize(("model", "arch"), SHIPPED_FOR)
def test_a_shipped_program_fits_its_architecture(model: str, arch: str) -> None:
    target = next(target for target in KNOWN if target.arch == arch)
    usage = build_cubin(compile_program(SHIPPED[model](), target), cache=None).usage
    assert set(usage) == set(KERNELS)
    for kernel in KERNELS:
        assert usage[kernel].registers <= MAX_REGISTERS
        assert usage[kernel].static_shared_bytes == 0  # every byte is spoken for
        if compiler_version() == MEASURED_WITH:  # others may need a few
            assert usage[kernel].spill_bytes <= SPILL_BYTES.get((model, arch, kernel), 0)


def test_every_model_and_every_architecture_is_compiled_for() -> None:
    assert {model for model, _ in SHIPPED_FOR} == set(SHIPPED)
    assert {arch for _, arch in SHIPPED_FOR} == {target.arch for target in KNOWN}


def test_known_targets_are_one_for_each_architecture() -> None:
    assert {target.arch for target in KNOWN} == {"sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120"}
