from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megakernel.errors import CompileError
from megakernel.fuse import fuse
from megakernel.isa import LOOP_WARPS, Flag, Op
from megakernel.schedule import (
    assign_to_sms,
    balance,
    bytes_of_sms,
    dump,
    granules_of_group,
    tiles_of_warps,
    verify,
)
from megakernel.target import Target
from megakernel.tasks import split_into_tasks


def phases_of(graph):
    return split_into_tasks(fuse(graph), graph.sizes)


def target_of(n_sms):
    return Target(f"{n_sms} SMs", "sm_90a", n_sms, 232_448)


@settings(deadline=None)
@given(
    width=st.sampled_from([128, 256, 640]),
    wide=st.sampled_from([256, 1024]),
    n_layers=st.integers(1, 3),
    n_tokens=st.integers(120, 900),
    n_sms=st.integers(1, 13),
)
def test_every_granule_has_one_sm_and_the_stream_stays(tiny_graph, width, wide, n_layers, n_tokens, n_sms):
    phases = phases_of(tiny_graph(width=width, wide=wide, n_layers=n_layers, n_tokens=n_tokens))
    schedule = assign_to_sms(phases, target_of(n_sms))
    owners = []
    for index, phase in enumerate(phases):
        taken = [
            granule
            for first, n in zip(schedule.first_granule[index], schedule.n_granules[index], strict=True)
            for granule in range(first, first + n)
        ]
        assert taken == list(range(phase.n_granules))
        mean = -(-phase.n_granules // n_sms)
        if phase.op is Op.LINEAR and Flag.RESIDUAL not in phase.flags:
            assert schedule.n_granules[index].max() <= mean + 1
        if phase.op is Op.HEAD:
            assert schedule.n_granules[index].min() >= 1
        if Flag.RESIDUAL in phase.flags:
            owners.append(schedule.n_granules[index].tolist())
    assert all(owner == owners[0] for owner in owners)


@settings(deadline=None)
@given(n_sms=st.integers(1, 13), n_tokens=st.integers(900, 3000))
def test_bytes_are_level_to_a_granule_where_the_last_phase_can_level_them(tiny_graph, n_sms, n_tokens):
    phases = phases_of(tiny_graph(n_tokens=n_tokens))
    sm_bytes = bytes_of_sms(phases, assign_to_sms(phases, target_of(n_sms))).sum(axis=0)
    assert sm_bytes.max() - sm_bytes.min() <= max(phase.granule_bytes for phase in phases)


@settings(deadline=None)
@given(n_sms=st.integers(1, 13), width=st.sampled_from([128, 256, 384]))
def test_warps_of_an_sm_are_level_to_a_granule_slice(tiny_graph, n_sms, width):
    phases = phases_of(tiny_graph(width=width, wide=2 * width, n_layers=2, n_tokens=500))
    tiles = tiles_of_warps(phases, assign_to_sms(phases, target_of(n_sms))).sum(axis=0)  # [n_sms, LOOP_WARPS]
    widest = max(phase.granule_tiles // phase.k_warps for phase in phases if phase.n_granules)
    assert (tiles.max(axis=1) - tiles.min(axis=1)).max() <= 2 * widest


@given(n=st.integers(0, 40), log_groups=st.integers(0, 4), data=st.data())
def test_groups_take_granules_in_turn(n, log_groups, data):
    n_groups = 2**log_groups
    first = data.draw(st.integers(0, n_groups - 1))
    taken = np.bincount([(first + j) % n_groups for j in range(n)], minlength=n_groups)
    assert granules_of_group(np.array(n), np.array(first), n_groups).tolist() == taken.tolist()


def test_tiles_of_warps_are_those_of_the_granules(tiny_graph):
    phases = phases_of(tiny_graph())
    schedule = assign_to_sms(phases, target_of(3))
    tiles = tiles_of_warps(phases, schedule)
    assert tiles.shape == (len(phases), 3, LOOP_WARPS)
    for index, phase in enumerate(phases):
        assert tiles[index].sum() == phase.n_granules * phase.granule_tiles


def test_a_head_too_small_to_give_every_sm_a_part_is_refused(tiny_graph):
    with pytest.raises(CompileError, match="the head's 13 granules give each of 14 SMs one"):
        assign_to_sms(phases_of(tiny_graph()), target_of(14))


@pytest.mark.parametrize(
    ("field", "phase", "sm", "by", "rule"),
    [
        ("n_granules", 0, 1, 1, "every granule lies on one SM"),
        ("first_granule", 0, 1, 1, "every granule lies on one SM"),
        ("first_group", 0, 1, LOOP_WARPS, "the first group is one of"),
        ("n_granules", 1, 0, 1, "every granule lies on one SM"),
    ],
)
def test_a_wrong_schedule_is_refused(tiny_graph, field, phase, sm, by, rule):
    phases = phases_of(tiny_graph())
    schedule = assign_to_sms(phases, target_of(3))
    changed = getattr(schedule, field).copy()
    changed[phase, sm] += by
    with pytest.raises(CompileError, match=rule):
        verify(replace(schedule, **{field: changed}), phases)


def test_a_stream_that_changes_its_sm_is_refused(tiny_graph):
    phases = phases_of(tiny_graph())
    schedule = assign_to_sms(phases, target_of(3))
    last = max(index for index, phase in enumerate(phases) if Flag.RESIDUAL in phase.flags)
    n, first = schedule.n_granules.copy(), schedule.first_granule.copy()
    n[last] = np.roll(n[last], 1)
    first[last] = np.cumsum(n[last]) - n[last]
    assert (n[last] != schedule.n_granules[last]).any()
    with pytest.raises(CompileError, match="stays on its SM"):
        verify(replace(schedule, n_granules=n, first_granule=first), phases)


def test_balance_is_the_largest_over_the_mean():
    assert balance(np.array([1, 2, 3])) == 1.5
    assert balance(np.array([0, 0])) == 1.0


def test_dump_says_how_granules_spread(tiny_graph):
    phases = phases_of(tiny_graph())
    text = dump(assign_to_sms(phases, target_of(3)), phases)
    assert "0.qkv" in text and "granules: 16 on 3; bytes so far max/mean 1.000" in text
