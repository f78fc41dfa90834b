// ATTEND_SELF, ATTEND_CROSS and COMBINE. A unit is (slot, head, block of positions); its SM follows from the three alone,
// so the slot's own keys and values are always read by the very threads that wrote them. All warps share a unit: a thread
// holds 8 dimensions of one position (of PIECES positions), which it loads before it waits for the queries.
//
// Each warp sees its own positions to the end (largest score, exponentials, weighted values); the warps' results meet in
// shared memory, in the place of activations and sums, where one barrier and one more pass make the block's.
#pragma once

#include "exchange.cuh"

#define SCALE 0.125f          // 1 / sqrt(HEAD_SIZE)
#define ROWS_TOGETHER 8       // whose sums over the warps fit beside each other

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

struct Piece {  // 8 elements of an exchanged row, asked for and perhaps not there yet
    const u64* from;
    Pair a, b;

    __device__ __forceinline__ void ask(const Machine m, u32 buffer, u32 n, u32 row, u32 element) {
        from = row_words(m, buffer, n, row) + element / 2;
        a = peek_pair(from);
        b = peek_pair(from + 2);
    }
    __device__ __forceinline__ uint4 get(const Machine m, u32 epoch) {
        settle(m, from, epoch, a);
        settle(m, from + 2, epoch, b);
        return make_uint4(a.first, a.second, b.first, b.second);
    }
};

// One row's view of this thread's positions, this warp's share of it left in ``sums`` [64] and ``stats``.
template <bool CROSS, u32 PIECES>
__device__ __forceinline__ void attend_row(const Machine m, uint4 q, const uint4 (&keys)[PIECES],
                                           const uint4 (&values)[PIECES], u32 first, u32 seen, u32 n_plain,
                                           float tail_bias, float* dump, float* sums, float2* stats) {
    constexpr u32 POSITIONS = N_THREADS / 8;
    float s[PIECES], top = NEGATIVE_INFINITY;
#pragma unroll
    for (u32 i = 0; i < PIECES; i++) {
        const u32 position = first + i * POSITIONS;
        s[i] = dot8(q, keys[i]);
        s[i] += __shfl_xor_sync(0xffffffffu, s[i], 1);
        s[i] += __shfl_xor_sync(0xffffffffu, s[i], 2);
        s[i] += __shfl_xor_sync(0xffffffffu, s[i], 4);
        s[i] = position < seen ? s[i] * SCALE : NEGATIVE_INFINITY;
        if (CROSS && dump != nullptr && position < seen && (m.lane() & 7) == 0) dump[position] = s[i];
        if (CROSS && position >= n_plain) s[i] += tail_bias;
        top = fmaxf(top, s[i]);
    }
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 8));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 16));
    float total = 0, sum[8] = {};
#pragma unroll
    for (u32 i = 0; i < PIECES; i++) {
        const float weight = s[i] == NEGATIVE_INFINITY ? 0.0f : expf(s[i] - top);
        total += weight;
        add_scaled(sum, weight, values[i]);
    }
    total += __shfl_xor_sync(0xffffffffu, total, 8);
    total += __shfl_xor_sync(0xffffffffu, total, 16);
#pragma unroll
    for (int d = 0; d < 8; d++) {
        sum[d] += __shfl_xor_sync(0xffffffffu, sum[d], 8);
        sum[d] += __shfl_xor_sync(0xffffffffu, sum[d], 16);
    }
    if (m.lane() < 8) {
        float4* to = (float4*)(sums + m.lane() * 8);
        to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]);
        to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
        if (m.lane() == 0) *stats = make_float2(top, total);
    }
}

template <bool CROSS>
__device__ __forceinline__ void attend_unit(const Machine m, const Unit& unit) {
    constexpr u32 BLOCK = CROSS ? CROSS_BLOCK : SELF_BLOCK, PIECES = BLOCK * HEAD_SIZE / 8 / N_THREADS;
    constexpr u32 POSITIONS = N_THREADS / 8, WIDE = N_HEADS * HEAD_SIZE, Q_WIDE = CROSS ? WIDE : 3 * WIDE;
    const Slot& slot = m.misc().state.slots[unit.slot];
    const u32 n_rows = slot.n_rows, slot_row = slot.first_row, n_plain = slot.n_plain;
    const u32 first_position = m.misc().state.rows[slot_row].position;
    const u32 layer = m.field(PHASE_LAYER), input = m.field(PHASE_INPUT);
    const u32 input_epoch = m.epoch + m.field(PHASE_INPUT_EPOCH), epoch = m.epoch + m.field(PHASE_EPOCH);
    const u32 limit = CROSS ? slot.n_positions : first_position + n_rows;
    const u32 dimension = (m.thread() & 7) * 8, mine = unit.block * BLOCK + (m.thread() >> 3);
    const float tail_bias = slot.tail_bias;
    // rows that look into this block: all, or those at or behind its begin
    const u32 first_row = CROSS || first_position >= unit.block * BLOCK ? 0 : unit.block * BLOCK - first_position;

    u16* cache = m.at<u16>(CROSS ? PARAMETER_CROSS_CACHE : PARAMETER_SELF_CACHE) +
                 cache_offset(unit.slot, layer, 0, unit.head, CROSS ? N_CROSS_POSITIONS : N_POSITIONS) +
                 mine * HEAD_SIZE + dimension;
    const u64 to_values = (u64)N_HEADS * (CROSS ? N_CROSS_POSITIONS : N_POSITIONS) * HEAD_SIZE;
    uint4 keys[PIECES], values[PIECES];
    Piece query;
    query.ask(m, input, Q_WIDE, slot_row + first_row, unit.head * HEAD_SIZE + dimension);
    if (!CROSS && mine >= first_position && mine < limit) {  // of this step: take it, and keep it
        Piece key, value;
        key.ask(m, input, Q_WIDE, slot_row + mine - first_position, WIDE + unit.head * HEAD_SIZE + dimension);
        value.ask(m, input, Q_WIDE, slot_row + mine - first_position, 2 * WIDE + unit.head * HEAD_SIZE + dimension);
        keys[0] = key.get(m, input_epoch);
        values[0] = value.get(m, input_epoch);
        *(uint4*)cache = keys[0];
        *(uint4*)(cache + to_values) = values[0];
    } else {
#pragma unroll
        for (u32 i = 0; i < PIECES; i++) {
            keys[i] = values[i] = make_uint4(0, 0, 0, 0);
            if (mine + i * POSITIONS < limit) {
                keys[i] = load_through(cache + i * POSITIONS * HEAD_SIZE);
                values[i] = load_through(cache + to_values + i * POSITIONS * HEAD_SIZE);
            }
        }
    }
    __syncwarp();

    const u32 dumped = CROSS ? m.field(PHASE_SCORE_HEADS) : 0;
    float* dump = nullptr;
    if (CROSS && (dumped >> unit.head & 1)) {
        const u32 index = m.field(PHASE_SCORES) - 1 + __popc(dumped & ((1u << unit.head) - 1));
        dump = m.at<float>(PARAMETER_SCORES) +
               (((u64)unit.slot * N_SCORE_HEADS + index) * N_POSITIONS + first_position) * N_CROSS_POSITIONS;
    }
    float* sums = (float*)m.x();                                                    // [row][warp][HEAD_SIZE]
    float2* stats = (float2*)(sums + ROWS_TOGETHER * N_WARPS * HEAD_SIZE);          // [row][warp]
    const u32 n_blocks_at_most = m.field(PHASE_N_BLOCKS), output = m.field(PHASE_OUTPUT), partial = m.field(PHASE_PARTIAL);
#pragma unroll 1
    for (u32 round = first_row; round < n_rows; round += ROWS_TOGETHER) {
        const u32 n = n_rows - round < ROWS_TOGETHER ? n_rows - round : ROWS_TOGETHER;
#pragma unroll 1
        for (u32 i = 0; i < n; i++) {
            const u32 r = round + i;
            const uint4 q = query.get(m, input_epoch);
            if (r + 1 < n_rows) query.ask(m, input, Q_WIDE, slot_row + r + 1, unit.head * HEAD_SIZE + dimension);
            attend_row<CROSS>(m, q, keys, values, mine, CROSS ? limit : first_position + r + 1, n_plain, tail_bias,
                              dump == nullptr ? dump : dump + (u64)r * N_CROSS_POSITIONS,
                              sums + (i * N_WARPS + m.warp()) * HEAD_SIZE, stats + i * N_WARPS + m.warp());
        }
        __syncthreads();
        if (m.warp() < n) {  // warp i makes row i whole
            const u32 r = round + m.warp(), pair = m.lane();
            const float2 of_warp = stats[m.warp() * N_WARPS + (m.lane() & (N_WARPS - 1))];
            const float top = largest(of_warp.x), share = of_warp.x == NEGATIVE_INFINITY ? 0.0f : expf(of_warp.x - top);
            const float total = sum_of(of_warp.y * share) * 0.5f;  // each warp is there twice
            float2 sum = make_float2(0, 0);
#pragma unroll
            for (int w = 0; w < N_WARPS; w++) {
                const float2 more = *(const float2*)(sums + (m.warp() * N_WARPS + w) * HEAD_SIZE + pair * 2);
                const float weight = __shfl_sync(0xffffffffu, share, w);
                sum.x = fmaf(weight, more.x, sum.x);
                sum.y = fmaf(weight, more.y, sum.y);
            }
            const u32 payload = pack_bf16(sum.x / total, sum.y / total);
            if (blocks_of<CROSS>(slot, first_position + r) == 1) {
                publish_row(m, output, WIDE, slot_row + r, unit.head * (HEAD_SIZE / 2) + pair, payload, epoch + 1);
            } else {
                u64* to = words(m) + partial +
                          (((slot_row + r) * N_HEADS + unit.head) * n_blocks_at_most + unit.block) * BLOCK_WORDS;
                publish(to + BLOCK_STATS_WORDS + pair, payload, epoch);
                if (pair < 2) publish(to + pair, __float_as_uint(pair == 0 ? top : total), epoch);
            }
        }
        __syncthreads();  // the next round, unit or linear takes the scratch
    }
    if (dump != nullptr) __threadfence();  // the host reads the scores once a later word says that the slot is done
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
    u32* scratch = (u32*)m.sums() + m.warp() * MAX_BLOCKS * BLOCK_WORDS;  // a linear fills it behind its first barrier
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
}
