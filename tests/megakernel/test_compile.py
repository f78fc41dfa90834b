import time
from pathlib import Path

import pytest

import megakernel
from megakernel.checker import check
from megakernel.compile import compile_ops, compile_program
from megakernel.fuse import fuse
from megakernel.predict import predict
from megakernel.target import KNOWN, Target

GOLDEN = Path(__file__).parent.parent / "golden" / "megakernel_tiny.txt"
TINY = Target("5 SMs", "sm_90a", 5, 232_448, bandwidth_gb_s=160)
STAGES = ["graph", "fused", "tasks", "schedule", "memory", "program"]
MAX_IMBALANCE = 1.02


def stages_of(graph, target):
    stages = []
    compile_program(graph, target, trace=lambda stage, text: stages.append((stage, text)))
    return stages


def test_stages_are_those_of_the_committed_text(tiny_graph):
    stages = stages_of(tiny_graph(), TINY)
    text = "\n".join(f"# {stage}\n\n{text}" for stage, text in stages)
    assert text == GOLDEN.read_text(), "a program has changed: if that is meant, commit the new text with its reason"


def test_the_trace_gets_every_stage_in_order(tiny_graph):
    assert [stage for stage, _ in stages_of(tiny_graph(), TINY)] == STAGES


def test_a_graph_and_its_fused_ops_make_the_same_program(tiny_graph):
    graph = tiny_graph(n_layers=2)
    whole = compile_program(graph, TINY)
    half = compile_ops(graph.name, fuse(graph), graph.sizes, TINY)
    assert (whole.phases == half.phases).all() and (whole.tasks == half.tasks).all()
    assert (whole.tile_index == half.tile_index).all() and (whole.warp_tiles == half.warp_tiles).all()


@pytest.mark.parametrize("target", KNOWN, ids=lambda target: target.arch)
def test_a_large_decoder_is_level_and_fits_every_known_gpu(large_graph, target):
    graph = large_graph()
    began_s = time.process_time()
    program = compile_program(graph, target)
    assert time.process_time() - began_s < 5  # about 0.1 on one core
    assert predict(program).balance <= MAX_IMBALANCE
    assert program.aux_in_shared == (target.n_sms >= 108)  # fewer SMs have more granules each


def test_the_checker_agrees(large_graph):
    check(compile_program(large_graph(), next(target for target in KNOWN if target.arch == "sm_90a")))


def test_the_readme_shows_the_committed_text():
    readme = (Path(megakernel.__file__).parent / "README.md").read_text()
    shown = readme.split("```")[1].splitlines()
    golden = GOLDEN.read_text().splitlines()
    assert [line for line in shown if line not in golden] == []
