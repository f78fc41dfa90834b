// ATTEND_SELF, ATTEND_CROSS and COMBINE. A unit is (slot, head, block of positions); its SM follows from the three alone,
// so the slot's own keys and values are always read by the very threads that wrote them. All warps share a unit: a thread
// holds 8 dimensions of one position (of PIECES positions), which it loads before it waits for the queries.
//
// Scratch: scores [row][BLOCK] where linears keep their activations, sums over warps where they keep theirs.
#pragma once

#include "exchange.cuh"

#define SCALE 0.125f          // 1 / sqrt(HEAD_SIZE)
#define ROWS_TOGETHER 4       // whose sums over the warps fit beside each other
#define BLOCK_WORDS (BLOCK_STATS_WORDS + HEAD_SIZE / 2)

struct Unit {
    u32 slot, head, block;
};

template <bool CROSS>
__device__ __forceinline__ u32 blocks_of(const Slot& slot, u32 position) {
    return CROSS ? (slot.n_positions + CROSS_BLOCK - 1) / CROSS_BLOCK : position / SELF_BLOCK + 1;
}

// Calls ``work(unit)`` for this SM's units of one slot. Self attention counts them block after block, so that a short
// slot's heads lie on neighbouring SMs; cross attention head after head.
template <bool CROSS, class Work>
__device__ __forceinline__ void for_units(const Machine m, u32 slot_index, u32 n_heads, u32 n_blocks, u32 needed,
                                          Work work) {
    const u32 base = slot_index * n_heads * n_blocks;
    const u32 end = CROSS ? n_heads * n_blocks : n_heads * needed;
    for (u32 i = (m.sm() + N_SMS - base % N_SMS) % N_SMS; i < end; i += N_SMS) {
        Unit unit = {slot_index, CROSS ? i / n_blocks : i % n_heads, CROSS ? i % n_blocks : i / n_heads};
        if (unit.block < needed) work(unit);
    }
}

__device__ __forceinline__ u64 cache_offset(u32 slot, u32 layer, u32 is_value, u32 head, u32 n_positions) {
    return ((((u64)slot * N_LAYERS + layer) * 2 + is_value) * N_HEADS + head) * n_positions * HEAD_SIZE;
}

__device__ __forceinline__ void prefetch_cross(const Machine m, u32 layer) {
    const u32 n_blocks = (N_CROSS_POSITIONS + CROSS_BLOCK - 1) / CROSS_BLOCK;
    for (u32 s = 0; s < MAX_SLOTS; s++) {
        const Slot& slot = m.misc().state.slots[s];
        if (slot.n_rows == 0) continue;
        for_units<true>(m, s, N_HEADS, n_blocks, blocks_of<true>(slot, 0), [&](Unit unit) {
            const u32 line = m.thread() & 255;  // of 128 bytes: two positions
            const u32 position = unit.block * CROSS_BLOCK + line * 2;
            if (line < CROSS_BLOCK / 2 && position < slot.n_positions) {
                for (u32 value = m.thread() >> 8; value < 2; value += 2)
                    prefetch_l2(m.at<const u16>(PARAMETER_CROSS_CACHE) +
                                cache_offset(s, layer, value, unit.head, N_CROSS_POSITIONS) + position * HEAD_SIZE);
            }
        });
    }
}

__device__ __forceinline__ float dot8(uint4 a, uint4 b) {
    float s = low_bf16(a.x) * low_bf16(b.x);
    s = fmaf(high_bf16(a.x), high_bf16(b.x), s);
    s = fmaf(low_bf16(a.y), low_bf16(b.y), s);
    s = fmaf(high_bf16(a.y), high_bf16(b.y), s);
    s = fmaf(low_bf16(a.z), low_bf16(b.z), s);
    s = fmaf(high_bf16(a.z), high_bf16(b.z), s);
    s = fmaf(low_bf16(a.w), low_bf16(b.w), s);
    return fmaf(high_bf16(a.w), high_bf16(b.w), s);
}

__device__ __forceinline__ void add_scaled(float (&sum)[8], float p, uint4 v) {
    sum[0] = fmaf(p, low_bf16(v.x), sum[0]);
    sum[1] = fmaf(p, high_bf16(v.x), sum[1]);
    sum[2] = fmaf(p, low_bf16(v.y), sum[2]);
    sum[3] = fmaf(p, high_bf16(v.y), sum[3]);
    sum[4] = fmaf(p, low_bf16(v.z), sum[4]);
    sum[5] = fmaf(p, high_bf16(v.z), sum[5]);
    sum[6] = fmaf(p, low_bf16(v.w), sum[6]);
    sum[7] = fmaf(p, high_bf16(v.w), sum[7]);
}

// 8 elements of an exchanged row
__device__ __forceinline__ uint4 take_piece(const Machine m, u32 buffer, u32 n, u32 row, u32 element, u32 epoch) {
    const u64* from = row_words(m, buffer, n, row) + element / 2;
    Pair a = peek_pair(from), b = peek_pair(from + 2);
    settle(m, from, epoch, a);
    settle(m, from + 2, epoch, b);
    return make_uint4(a.first, a.second, b.first, b.second);
}

// This thread's piece of the keys (values) of one position: from the cache, or of this step, then into the cache too.
template <bool CROSS>
__device__ __forceinline__ uint4 load_piece(const Machine m, const Unit& unit, const Slot& slot, u32 first_position,
                                            u32 position, u32 limit, u32 dimension, u32 is_value, u32 layer, u32 input,
                                            u32 epoch) {
    if (position >= limit) return make_uint4(0, 0, 0, 0);
    u16* cache = m.at<u16>(CROSS ? PARAMETER_CROSS_CACHE : PARAMETER_SELF_CACHE) +
                 cache_offset(unit.slot, layer, is_value, unit.head, CROSS ? N_CROSS_POSITIONS : N_POSITIONS) +
                 position * HEAD_SIZE + dimension;
    if (CROSS || position < first_position) return load_through(cache);
    const u32 width = N_HEADS * HEAD_SIZE;
    uint4 piece = take_piece(m, input, 3 * width, slot.first_row + position - first_position,
                             (1 + is_value) * width + unit.head * HEAD_SIZE + dimension, epoch);
    *(uint4*)cache = piece;
    return piece;
}

template <bool CROSS>
__device__ __forceinline__ void attend_unit(const Machine m, const Unit& unit) {
    constexpr u32 BLOCK = CROSS ? CROSS_BLOCK : SELF_BLOCK, PIECES = BLOCK * HEAD_SIZE / 8 / N_THREADS;
    constexpr u32 POSITIONS = N_THREADS / 8;  // of one piece for each thread
    const Slot& slot = m.misc().state.slots[unit.slot];
    const u32 layer = m.field(PHASE_LAYER), input = m.field(PHASE_INPUT);
    const u32 input_epoch = m.epoch + m.field(PHASE_INPUT_EPOCH), epoch = m.epoch + m.field(PHASE_EPOCH);
    const u32 width = N_HEADS * HEAD_SIZE, q_width = CROSS ? width : 3 * width;
    const u32 first_position = m.misc().state.rows[slot.first_row].position;
    const u32 begin = unit.block * BLOCK, limit = CROSS ? slot.n_positions : first_position + slot.n_rows;
    const u32 dimension = (m.thread() & 7) * 8;
    float* scores = (float*)m.x();  // [row of the slot][BLOCK]

    uint4 keys[PIECES], values[PIECES];
    if (CROSS) {
#pragma unroll
        for (u32 i = 0; i < PIECES; i++) {
            u32 position = begin + (m.thread() >> 3) + i * POSITIONS;
            keys[i] = load_piece<CROSS>(m, unit, slot, first_position, position, limit, dimension, 0, layer, input, 0);
            values[i] = load_piece<CROSS>(m, unit, slot, first_position, position, limit, dimension, 1, layer, input, 0);
        }
    } else {
        u32 position = begin + (m.thread() >> 3);
        keys[0] = load_piece<CROSS>(m, unit, slot, first_position, position, limit, dimension, 0, layer, input,
                                    input_epoch);
        values[0] = load_piece<CROSS>(m, unit, slot, first_position, position, limit, dimension, 1, layer, input,
                                      input_epoch);
    }

    // rows that look into this block: all, or those at or behind its begin
    const u32 first_row = CROSS || first_position >= begin ? 0 : begin - first_position;
    for (u32 r = first_row; r < slot.n_rows; r++) {
        uint4 q = take_piece(m, input, q_width, slot.first_row + r, unit.head * HEAD_SIZE + dimension, input_epoch);
#pragma unroll
        for (u32 i = 0; i < PIECES; i++) {
            float s = dot8(q, keys[i]);
            s += __shfl_xor_sync(0xffffffffu, s, 1);
            s += __shfl_xor_sync(0xffffffffu, s, 2);
            s += __shfl_xor_sync(0xffffffffu, s, 4);
            if ((m.lane() & 7) == 0) scores[r * BLOCK + (m.thread() >> 3) + i * POSITIONS] = s * SCALE;
        }
    }
    __syncthreads();

    const u32 dump = CROSS && (m.field(PHASE_SCORE_HEADS) >> unit.head & 1);
    for (u32 r = first_row + m.warp(); r < slot.n_rows; r += N_WARPS) {
        const u32 seen = CROSS ? limit : first_position + r + 1;  // positions that this row may look at
        float s[BLOCK / 32], top = NEGATIVE_INFINITY;
#pragma unroll
        for (u32 i = 0; i < BLOCK / 32; i++) {
            u32 position = begin + m.lane() + 32 * i;
            s[i] = position < seen ? scores[r * BLOCK + m.lane() + 32 * i] : NEGATIVE_INFINITY;
            if (CROSS && dump && position < seen) {
                u32 index = m.field(PHASE_SCORES) - 1 +
                            __popc(m.field(PHASE_SCORE_HEADS) & ((1u << unit.head) - 1));
                u64 row = ((u64)unit.slot * N_SCORE_HEADS + index) * N_POSITIONS + first_position + r;
                m.at<float>(PARAMETER_SCORES)[row * N_CROSS_POSITIONS + position] = s[i];
            }
            if (CROSS && position >= slot.n_plain) s[i] += slot.tail_bias;
            top = fmaxf(top, s[i]);
        }
#pragma unroll
        for (int mask = 16; mask; mask >>= 1) top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, mask));
        float sum = 0;
#pragma unroll
        for (u32 i = 0; i < BLOCK / 32; i++) {
            float weight = expf(s[i] - top);
            scores[r * BLOCK + m.lane() + 32 * i] = weight;
            sum += weight;
        }
#pragma unroll
        for (int mask = 16; mask; mask >>= 1) sum += __shfl_xor_sync(0xffffffffu, sum, mask);
        if (m.lane() == 0) m.misc().attention[r] = make_float2(top, sum);
    }
    __syncthreads();

    const u32 n_blocks_at_most = m.field(PHASE_N_BLOCKS), output = m.field(PHASE_OUTPUT), partial = m.field(PHASE_PARTIAL);
    for (u32 round = first_row; round < slot.n_rows; round += ROWS_TOGETHER) {
        const u32 n = slot.n_rows - round < ROWS_TOGETHER ? slot.n_rows - round : ROWS_TOGETHER;
        for (u32 r = 0; r < n; r++) {
            float sum[8] = {};
#pragma unroll
            for (u32 i = 0; i < PIECES; i++)
                add_scaled(sum, scores[(round + r) * BLOCK + (m.thread() >> 3) + i * POSITIONS], values[i]);
#pragma unroll
            for (int d = 0; d < 8; d++) {
                sum[d] += __shfl_xor_sync(0xffffffffu, sum[d], 8);
                sum[d] += __shfl_xor_sync(0xffffffffu, sum[d], 16);
            }
            if (m.lane() < 8) {
                float4* to = (float4*)(m.sums() + (r * N_WARPS + m.warp()) * HEAD_SIZE + dimension);
                to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
                to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
            }
        }
        __syncthreads();
        if (m.thread() < n * 32) {
            const u32 r = m.warp(), row = slot.first_row + round + r, pair = m.lane();
            float2 sum = make_float2(0, 0);
#pragma unroll
            for (int w = 0; w < N_WARPS; w++) {
                float2 more = *(const float2*)(m.sums() + (r * N_WARPS + w) * HEAD_SIZE + pair * 2);
                sum.x += more.x;
                sum.y += more.y;
            }
            const float2 stats = m.misc().attention[round + r];
            const u32 payload = pack_bf16(sum.x / stats.y, sum.y / stats.y);
            if (blocks_of<CROSS>(slot, first_position + round + r) == 1) {
                publish_row(m, output, width, row, unit.head * (HEAD_SIZE / 2) + pair, payload, epoch + 1);
            } else {
                u64* to = words(m) + partial + ((row * N_HEADS + unit.head) * n_blocks_at_most + unit.block) * BLOCK_WORDS;
                publish(to + BLOCK_STATS_WORDS + pair, payload, epoch);
                if (pair < 2) publish(to + pair, __float_as_uint(pair == 0 ? stats.x : stats.y), epoch);
            }
        }
        if (round + ROWS_TOGETHER < slot.n_rows) __syncthreads();
    }
    if (dump) __threadfence();  // the host reads the scores once a later word says that the slot is done
}

template <bool CROSS>
__device__ __forceinline__ void attend(const Machine m) {
    const u32 n_blocks = m.field(PHASE_N_BLOCKS);
    for (u32 s = 0; s < MAX_SLOTS; s++) {
        const Slot& slot = m.misc().state.slots[s];
        if (slot.n_rows == 0) continue;
        const u32 last = m.misc().state.rows[slot.first_row].position + slot.n_rows - 1;
        for_units<CROSS>(m, s, N_HEADS, n_blocks, blocks_of<CROSS>(slot, last), [&](Unit unit) {
            attend_unit<CROSS>(m, unit);
            __syncthreads();  // the next unit, or a linear, takes the scratch
        });
    }
}

// One warp a (row, head): the blocks' results, weighted by what each block's exponentials sum to. The warp fetches all
// blocks at once into its part of the scratch; one after the other would pay a hop each.
__device__ __forceinline__ void combine(const Machine m) {
    constexpr u32 PAIRS = BLOCK_WORDS / 2, FETCHES = (MAX_BLOCKS * PAIRS + 31) / 32;
    const u32 n_blocks_at_most = m.field(PHASE_N_BLOCKS), partial = m.field(PHASE_PARTIAL);
    const u32 input_epoch = m.epoch + m.field(PHASE_INPUT_EPOCH), epoch = m.epoch + m.field(PHASE_EPOCH);
    const bool cross = m.field(PHASE_BLOCK) == CROSS_BLOCK;
    u32* scratch = (u32*)m.x() + m.warp() * MAX_BLOCKS * BLOCK_WORDS;
    const u32 n_units = m.misc().state.n_rows * N_HEADS;
    for (u32 unit = m.sm() + m.warp() * N_SMS; unit < n_units; unit += N_WARPS * N_SMS) {
        const u32 row = unit / N_HEADS, head = unit % N_HEADS;
        const Slot& slot = m.misc().state.slots[m.misc().state.rows[row].slot];
        const u32 n = cross ? blocks_of<true>(slot, 0) : blocks_of<false>(slot, m.misc().state.rows[row].position);
        if (n == 1) continue;
        const u64* from = words(m) + partial + unit * n_blocks_at_most * BLOCK_WORDS;
        Pair pairs[FETCHES];
#pragma unroll
        for (u32 i = 0; i < FETCHES; i++)
            if (m.lane() + 32 * i < n * PAIRS) pairs[i] = peek_pair(from + (m.lane() + 32 * i) * 2);
#pragma unroll
        for (u32 i = 0; i < FETCHES; i++) {
            const u32 index = m.lane() + 32 * i;
            if (index >= n * PAIRS) break;
            settle(m, from + index * 2, input_epoch, pairs[i]);
            *(uint2*)(scratch + index * 2) = make_uint2(pairs[i].first, pairs[i].second);
        }
        __syncwarp();
        float top = NEGATIVE_INFINITY, total = 0;
        float2 sum = make_float2(0, 0);
        for (u32 b = 0; b < n; b++) top = fmaxf(top, __uint_as_float(scratch[b * BLOCK_WORDS]));
        for (u32 b = 0; b < n; b++) {
            const u32* block = scratch + b * BLOCK_WORDS;
            const float weight = __uint_as_float(block[1]) * expf(__uint_as_float(block[0]) - top);
            const u32 value = block[BLOCK_STATS_WORDS + m.lane()];
            total += weight;
            sum.x = fmaf(weight, low_bf16(value), sum.x);
            sum.y = fmaf(weight, high_bf16(value), sum.y);
        }
        __syncwarp();
        publish_row(m, m.field(PHASE_OUTPUT), N_HEADS * HEAD_SIZE, row, head * (HEAD_SIZE / 2) + m.lane(),
                    pack_bf16(sum.x / total, sum.y / total), epoch);
    }
    __syncthreads();  // a linear takes the scratch
}
