from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megakernel.errors import CompileError
from megakernel.fuse import fuse
from megakernel.isa import LOOP_BATCH_GRANULES, LOOP_WARPS, PARTIAL_WORDS, TILE_BYTES, Op
from megakernel.memory import ALIGN_WORDS, AUX_GRANULE_BYTES, dump, lay_out, parts, verify
from megakernel.schedule import assign_to_sms
from megakernel.target import MISC_BYTES, SUMS_BYTES, Target
from megakernel.tasks import split_into_tasks


def laid_out(graph, n_sms, *, max_rows=16, shared_bytes=232_448):
    target = Target(f"{n_sms} SMs", "sm_90a", n_sms, shared_bytes, max_rows=max_rows)
    phases = split_into_tasks(fuse(graph), graph.sizes)
    schedule = assign_to_sms(phases, target)
    return lay_out(phases, schedule, target, graph.sizes), phases, schedule, target


def tiles_as_a_warp_uses_them(phases, schedule, sm, warp):
    """Word for word what a warp does: phases, batches of its group's granules, its slice of K, the batch's granules."""
    first_tile = 0
    for index, phase in enumerate(phases):
        if phase.n_granules == 0:
            continue
        group, k_warp = divmod(warp, phase.k_warps)
        first, n = int(schedule.first_granule[index, sm]), int(schedule.n_granules[index, sm])
        mine = [first + j for j in range(n) if (schedule.first_group[index, sm] + j) % phase.n_groups == group]
        slice_tiles = phase.granule_tiles // phase.k_warps
        for begin in range(0, len(mine), LOOP_BATCH_GRANULES):
            for tile in range(slice_tiles):
                for granule in mine[begin : begin + LOOP_BATCH_GRANULES]:
                    yield first_tile + granule * phase.granule_tiles + k_warp * slice_tiles + tile
        first_tile += phase.n_granules * phase.granule_tiles


@settings(deadline=None, max_examples=40)
@given(
    width=st.sampled_from([128, 256, 384, 640]),
    wide=st.sampled_from([256, 896]),
    n_tokens=st.integers(120, 700),
    n_more_sms=st.integers(0, 3),
)
def test_the_tape_lies_in_the_order_in_which_each_warp_uses_it(tiny_graph, width, wide, n_tokens, n_more_sms):
    n_sms = width // 64 + n_more_sms  # fewer could not hold the residual stream
    memory, phases, schedule, _ = laid_out(tiny_graph(width=width, wide=wide, n_tokens=n_tokens), n_sms)
    for sm in range(n_sms):
        for warp in range(LOOP_WARPS):
            first, n = (int(word) for word in memory.warp_tiles[sm, warp])
            expected = list(tiles_as_a_warp_uses_them(phases, schedule, sm, warp))
            assert memory.tile_index[first : first + n].tolist() == expected
    n_tiles = sum(weight.n_tiles for weight in memory.weights)
    assert sorted(memory.tile_index.tolist()) == list(range(n_tiles))


@settings(deadline=None, max_examples=20)
@given(n_layers=st.integers(1, 3), n_sms=st.integers(2, 12), max_rows=st.sampled_from([8, 16]))
def test_no_two_parts_of_the_exchange_area_share_a_word(tiny_graph, n_layers, n_sms, max_rows):
    memory, phases, _, target = laid_out(tiny_graph(n_layers=n_layers), n_sms, max_rows=max_rows)
    uses = np.zeros(memory.exchange_words, np.int64)
    n_words = 0
    for _name, first, n in parts(phases, memory, target):
        assert first % ALIGN_WORDS == 0
        uses[first : first + n] += 1
        n_words += n
    assert uses.max() == 1 and uses.sum() == n_words
    assert uses[memory.control_word] == 1


def test_rows_blocks_and_partials_have_room(tiny_graph):
    memory, phases, _, target = laid_out(tiny_graph(), 3)
    words = {name: n for name, _, n in parts(phases, memory, target)}
    assert words["0.qkv"] == 16 * 384 // 2
    assert words["0.attention"] == 16 * 128 // 2
    assert words["0.attention.blocks"] == 16 * 2 * 2 * (2 + 32)  # rows, heads, blocks of 64 in 80 positions
    assert words["head"] == 3 * 16 * PARTIAL_WORDS


def test_every_phase_waits_for_the_epoch_of_what_it_reads(tiny_graph):
    memory, phases, _, _ = laid_out(tiny_graph(n_layers=2), 3)
    buffers = {phase.name: buffer for phase, buffer in zip(phases, memory.buffers, strict=True)}
    assert [buffer.epoch for buffer in memory.buffers] == [*range(1, len(phases)), 0]
    assert memory.epochs_per_step == len(phases) - 1
    for phase in phases:
        if phase.reads is None:
            assert (buffers[phase.name].input, buffers[phase.name].input_epoch) == (0, 0)
            continue
        source, reader = buffers[phase.reads], buffers[phase.name]
        is_blocks = phase.op is Op.COMBINE
        assert reader.input == (source.partial if is_blocks else source.output)
        assert reader.input_epoch == source.epoch
        if is_blocks:
            assert (reader.output, reader.partial) == (source.output, source.partial)


def test_auxiliary_floats_follow_in_the_order_of_use(tiny_graph):
    memory, phases, schedule, _ = laid_out(tiny_graph(), 3)
    for sm in range(3):
        n_before = 0
        for index, phase in enumerate(phases):
            if phase.op is Op.HEAD:
                assert n_before <= memory.linear_aux_granules
            assert memory.aux[index, sm] == n_before
            n_before += schedule.n_granules[index, sm]
        assert n_before <= memory.aux_granules


def test_auxiliary_floats_are_in_shared_memory_only_where_they_fit(tiny_graph):
    graph = tiny_graph(n_layers=2)
    for n_sms in (2, 3, 12):
        memory, *_ = laid_out(graph, n_sms)
        n_bytes = memory.records_bytes + memory.linear_aux_granules * AUX_GRANULE_BYTES
        assert memory.misc_bytes == MISC_BYTES
        assert memory.aux_in_shared == (n_bytes <= MISC_BYTES)
    assert memory.aux_in_shared and not laid_out(graph, 2)[0].aux_in_shared


def test_records_of_many_phases_take_their_room_from_the_ring(tiny_graph):
    few, _, _, target = laid_out(tiny_graph(), 12, shared_bytes=166_912)
    many, *_ = laid_out(tiny_graph(n_layers=30), 12, shared_bytes=166_912)
    assert few.records_bytes < MISC_BYTES < many.records_bytes <= many.misc_bytes
    assert few.misc_bytes == MISC_BYTES and few.ring_tiles == target.ring_tiles()
    assert many.ring_tiles < few.ring_tiles
    for memory in (few, many):
        ring_bytes = memory.ring_tiles * LOOP_WARPS * TILE_BYTES
        left = target.shared_bytes - target.x_bytes - SUMS_BYTES - memory.misc_bytes - ring_bytes
        assert 0 <= left < LOOP_WARPS * TILE_BYTES


def test_more_phases_than_shared_memory_holds_are_refused(tiny_graph):
    with pytest.raises(CompileError, match=r"memory: 702 phases on 12 SMs: .* take \d+ bytes, which leaves no room"):
        laid_out(tiny_graph(n_layers=70), 12, max_rows=8, shared_bytes=101_376)


def test_a_residual_stream_too_wide_for_the_sms_is_refused(tiny_graph):
    laid_out(tiny_graph(width=1280), 3, shared_bytes=120_000)
    with pytest.raises(CompileError, match="records, rows and residual stream of an SM take"):
        laid_out(tiny_graph(width=1280), 2, shared_bytes=120_000)


def test_a_tile_laid_out_twice_is_refused(tiny_graph):
    memory, phases, schedule, target = laid_out(tiny_graph(), 3)
    doubled = memory.tile_index.copy()
    doubled[0] = doubled[1]
    with pytest.raises(CompileError, match="holds each of .* tiles once"):
        verify(replace(memory, tile_index=doubled), phases, schedule, target)
    with pytest.raises(CompileError, match="holds each of .* tiles once"):
        verify(replace(memory, tile_index=memory.tile_index[:-1]), phases, schedule, target)


def test_a_gap_between_two_warps_is_refused(tiny_graph):
    memory, phases, schedule, target = laid_out(tiny_graph(), 3)
    moved = memory.warp_tiles.copy()
    moved[1, 0, 0] += 1
    with pytest.raises(CompileError, match="follow those of the warp before"):
        verify(replace(memory, warp_tiles=moved), phases, schedule, target)


def test_buffers_that_overlap_or_stick_out_are_refused(tiny_graph):
    memory, phases, schedule, target = laid_out(tiny_graph(), 3)
    moved = (replace(memory.buffers[0], output=memory.buffers[0].output + ALIGN_WORDS), *memory.buffers[1:])
    with pytest.raises(CompileError, match=r"0\.qkv: does not reach into 0\.attention"):
        verify(replace(memory, buffers=moved), phases, schedule, target)
    with pytest.raises(CompileError, match="ends within the area"):
        verify(replace(memory, exchange_words=memory.control_word), phases, schedule, target)


def test_too_few_auxiliary_floats_are_refused(tiny_graph):
    memory, phases, schedule, target = laid_out(tiny_graph(), 3)
    with pytest.raises(CompileError, match="auxiliary floats: an SM has at most"):
        verify(replace(memory, aux_granules=memory.aux_granules - 1), phases, schedule, target)


def test_dump_says_where_everything_lies(tiny_graph):
    memory, phases, _, target = laid_out(tiny_graph(n_layers=2), 2)
    text = dump(memory, phases, target)
    assert "which stay in global memory" in text and "0.attention.blocks" in text and "control" in text
