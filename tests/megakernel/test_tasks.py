from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megakernel.errors import CompileError
from megakernel.fuse import fuse
from megakernel.isa import GRANULE_ROWS, LOOP_WARPS, TILE_K, Flag, Op
from megakernel.ops import Embed, FusedAttention, FusedHead, FusedLinear, FusedOp, Norm
from megakernel.tasks import combine_unit_sm, cross_unit_sm, dump, self_unit_sm, split_into_tasks
from tests.megakernel.small import ONE_LAYER

NORM = Norm("gamma", "beta", 1e-5)
QKV = FusedLinear("qkv", None, "w", "b", 384, 128, embed=Embed("tokens", "positions"), norm=NORM)
ATTEND = FusedAttention("attention", "qkv", 128, 2, layer=0, block=64, n_blocks=2, is_cross=False)
MIX = FusedLinear("mix", "attention", "w", "b", 128, 128, residual=True)
Q = FusedLinear("q", "mix", "w", "b", 128, 128, norm=NORM)
CROSS = FusedAttention("cross", "q", 128, 2, 0, block=256, n_blocks=2, is_cross=True, dumped_heads=(1,), first_dump=4)
HEAD = FusedHead("head", "cross", "tokens", 100, 128)
STEP: tuple[FusedOp, ...] = (QKV, ATTEND, MIX, Q, CROSS, HEAD)


def test_a_step_becomes_phases_in_order():
    phases = split_into_tasks(STEP, ONE_LAYER)
    assert [(phase.name, phase.op) for phase in phases] == [
        ("qkv", Op.LINEAR),
        ("attention.blocks", Op.ATTEND_SELF),
        ("attention", Op.COMBINE),
        ("mix", Op.LINEAR),
        ("q", Op.LINEAR),
        ("cross.blocks", Op.ATTEND_CROSS),
        ("cross", Op.COMBINE),
        ("head", Op.HEAD),
        ("select", Op.SELECT),
    ]
    assert [phase.op_index for phase in phases] == [0, 1, 1, 2, 3, 4, 4, 5, 5]
    assert phases[0].flags == Flag.EMBED | Flag.STREAM | Flag.NORM and phases[3].flags == Flag.RESIDUAL
    assert (phases[5].scores, phases[5].score_heads) == (5, 0b10)


def test_without_a_residual_linear_there_is_no_stream():
    phases = split_into_tasks((QKV, ATTEND, replace(HEAD, x="attention")), ONE_LAYER)
    assert phases[0].flags == Flag.EMBED | Flag.NORM


def test_granules_and_warps_cover_a_weight(tiny_graph):
    graph = tiny_graph(width=640, wide=2560, n_layers=2)
    for phase in split_into_tasks(fuse(graph), graph.sizes):
        if phase.op in (Op.LINEAR, Op.HEAD):
            assert 0 <= phase.n_granules * GRANULE_ROWS - phase.n < GRANULE_ROWS
            assert phase.granule_tiles * TILE_K == phase.k and phase.granule_bytes == GRANULE_ROWS * phase.k * 2
            assert phase.n_groups * phase.k_warps == LOOP_WARPS and phase.granule_tiles % phase.k_warps == 0


@pytest.mark.parametrize(
    ("step", "node", "rule"),
    [
        ((replace(QKV, k=64), *STEP[1:]), "qkv", "K = 64 must be a multiple of 128"),
        ((replace(QKV, n=100), *STEP[1:]), "qkv", "N = 100 must be a multiple of 64"),
        ((QKV, replace(ATTEND, x="q"), *STEP[2:]), "attention.blocks", "reads 384 elements of 'q'"),
        ((QKV, replace(ATTEND, width=128, n_heads=1), *STEP[2:]), "attention.blocks", "1 heads of 64"),
        ((QKV, replace(ATTEND, n_blocks=1), *STEP[2:]), "attention.blocks", "1 blocks of 64 do not make up 80"),
        ((QKV, replace(ATTEND, layer=1), *STEP[2:]), "attention.blocks", "layer 1 of 1"),
        ((*STEP[:4], replace(CROSS, dumped_heads=(2,)), HEAD), "cross.blocks", "heads below 2"),
        ((QKV, ATTEND, replace(MIX, n=64), *STEP[3:]), "mix", "the residual stream has 128"),
        ((replace(QKV, residual=True, n=128),), "qkv", "begins with the embedding"),
        ((QKV, ATTEND, replace(MIX, embed=QKV.embed), *STEP[3:]), "mix", "either a value or the embedding"),
        ((QKV, replace(QKV, name="qkv2")), "qkv2", "the first phase alone"),
        ((QKV, QKV), "qkv", "made once"),
        ((*STEP[:-1], replace(HEAD, n=0)), "head", "a token"),
        (STEP[:-1], "qkv", "one head"),
        ((*STEP[:3], replace(Q, norm=Norm("gamma", "beta", 1e-6)), *STEP[4:]), "1e-06", "the same epsilon"),
    ],
)
def test_what_no_phase_can_do_is_refused_with_stage_node_and_rule(step, node, rule):
    with pytest.raises(CompileError) as caught:
        split_into_tasks(step, ONE_LAYER)
    assert caught.value.stage == "tasks"
    assert node in str(caught.value.node) and rule in caught.value.rule


def test_a_norm_over_more_than_shared_memory_holds_is_refused():
    wide = FusedLinear("wide", None, "w", None, 64, 1408, embed=Embed("tokens", "positions"), norm=NORM)
    sizes = replace(ONE_LAYER, width=1408)
    with pytest.raises(CompileError, match="K = 1408 behind a norm must be at most 1280"):
        split_into_tasks((wide,), sizes)


def test_attention_with_another_number_of_heads_is_refused():
    narrow = replace(CROSS, x="q2", width=64, n_heads=1, dumped_heads=())
    step = (*STEP[:4], FusedLinear("q2", "q", "w", "b", 64, 128), narrow)
    step = (*step, FusedLinear("out", "q", "w", "b", 128, 128), replace(HEAD, x="out"))
    with pytest.raises(CompileError, match="all attention has as many heads"):
        split_into_tasks(step, ONE_LAYER)


@given(n_heads=st.integers(1, 20), n_blocks=st.integers(1, 8), n_slots=st.integers(1, 8), n_sms=st.integers(1, 170))
def test_the_units_of_slots_spread_evenly_over_the_sms(n_heads, n_blocks, n_slots, n_sms):
    for place in (self_unit_sm, cross_unit_sm):
        units = [0] * n_sms
        for slot in range(n_slots):
            for head in range(n_heads):
                for block in range(n_blocks):
                    units[place(slot, head, block, n_heads=n_heads, n_blocks=n_blocks, n_sms=n_sms)] += 1
        assert max(units) - min(units) <= 1
    rows = [combine_unit_sm(row, head, n_heads=n_heads, n_sms=n_sms) for row in range(16) for head in range(n_heads)]
    assert max(map(rows.count, range(n_sms))) - min(map(rows.count, range(n_sms))) <= 1


def test_dump_has_a_line_for_each_phase():
    lines = dump(split_into_tasks(STEP, ONE_LAYER)).splitlines()
    assert len(lines) == 9
    assert "128 → 384: 48 granules of 4 tiles, 4 warps x 4" in lines[0] and lines[0].endswith("EMBED NORM STREAM")
