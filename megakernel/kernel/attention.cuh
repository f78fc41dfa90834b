// ATTEND_SELF, ATTEND_CROSS and COMBINE. A unit is (slot, head, block of positions); its SM follows from the three alone,
// and a position's warp and lanes from the position, so the slot's own keys and values are always read by the very
// threads that wrote them.
//
// A warp sees its positions of the unit to the end, for all rows of the slot at once: scores on tensor cores with the rows
// on m and the positions on n, largest score, exponentials, weighted values. Then the warps' shares meet in shared
// memory, where activations lie in linears.
#pragma once

#include "exchange.cuh"

#define SCALE 0.125f          // 1 / sqrt(HEAD_SIZE)

struct Unit {
    u32 slot, head, block;
};

template <bool CROSS>
__device__ __forceinline__ u32 blocks_of(const Slot& slot, u32 position) {
    return CROSS ? (slot.n_positions + CROSS_BLOCK - 1) / CROSS_BLOCK : position / SELF_BLOCK + 1;
}

// A unit's number counts a slot's units from those of the slots before it on; every N_SMS-th is an SM's. Self attention
// counts block after block, so that a short slot's heads lie on neighbouring SMs; cross attention head after head.
template <bool CROSS>
struct Units {
    static constexpr u32 POSITIONS = CROSS ? N_CROSS_POSITIONS : N_POSITIONS, BLOCK = CROSS ? CROSS_BLOCK : SELF_BLOCK;
    static constexpr u32 BLOCKS = (POSITIONS + BLOCK - 1) / BLOCK, OF_SLOT = N_HEADS * BLOCKS, END = MAX_SLOTS * OF_SLOT;

    static __device__ __forceinline__ Unit unit(u32 number) {
        const u32 slot = number / OF_SLOT, i = number % OF_SLOT;
        return {slot, CROSS ? i / BLOCKS : i % N_HEADS, CROSS ? i % BLOCKS : i / N_HEADS};
    }
    // This SM's first in a slot.
    static __device__ __forceinline__ u32 first(const Machine m, u32 slot) {
        const u32 base = slot * OF_SLOT;
        return base + (m.sm() + N_SMS - base % N_SMS) % N_SMS;
    }
    // Positions that some row of the slot may look at, 0 if it has none.
    static __device__ __forceinline__ u32 limit(const Machine m, const Slot& slot) {
        if (slot.n_rows == 0) return 0;
        return CROSS ? slot.n_positions : m.misc().state.rows[slot.first_row].position + slot.n_rows;
    }
};

// A bit for each slot that has rows in this step.
__device__ __forceinline__ u32 slots_with_rows(const Machine m) {
    return __ballot_sync(0xffffffffu, m.lane() < MAX_SLOTS && m.misc().state.slots[m.lane() % MAX_SLOTS].n_rows != 0);
}

__device__ __forceinline__ u64 cache_offset(u32 slot, u32 layer, u32 is_value, u32 head, u32 n_positions) {
    return ((((u64)slot * N_LAYERS + layer) * 2 + is_value) * N_HEADS + head) * n_positions * HEAD_SIZE;
}

struct Piece {  // 8 elements of an exchanged row, asked for and perhaps not there yet
    Pair a, b;

    __device__ __forceinline__ void ask(const u64* from) {
        a = peek_pair(from);
        b = peek_pair(from + 2);
    }
    __device__ __forceinline__ uint4 get(const Machine m, const u64* from, u32 epoch) {
        settle(m, from, epoch, a);
        settle(m, from + 2, epoch, b);
        return make_uint4(a.first, a.second, b.first, b.second);
    }
};

// What a warp sees of a block, in groups of 8 positions. Where a block has not enough of them for all warps, an SM's units
// are seen by as many teams of warps in turn.
template <bool CROSS>
struct Share {
    static constexpr u32 BLOCK = CROSS ? CROSS_BLOCK : SELF_BLOCK;
    static constexpr u32 GROUPS = BLOCK / 8 / N_WARPS < 2 ? 2 : BLOCK / 8 / N_WARPS;
    static constexpr u32 POSITIONS = GROUPS * 8, WARPS = BLOCK / POSITIONS, TEAMS = N_WARPS / WARPS;

    // Always the same of a unit, so that keys and values are read by the threads that wrote them.
    static __device__ __forceinline__ bool is_own(const Machine m, u32 number) {
        return number / N_SMS % TEAMS == m.warp() / WARPS;
    }
    static __device__ __forceinline__ u32 warp(const Machine m) { return m.warp() % WARPS; }
};

// Asks the L2 for what the warp will see of a unit: a position's keys or values of one head are a line.
template <bool CROSS>
__device__ __forceinline__ void prefetch_unit(const Machine m, u32 layer, u32 number) {
    constexpr u32 OWN = Share<CROSS>::POSITIONS;
    if (number >= Units<CROSS>::END || !Share<CROSS>::is_own(m, number)) return;
    const Unit unit = Units<CROSS>::unit(number);
    const u32 limit = Units<CROSS>::limit(m, m.misc().state.slots[unit.slot]);
    const u16* cache = m.at<u16>(CROSS ? PARAMETER_CROSS_CACHE : PARAMETER_SELF_CACHE);
#pragma unroll
    for (u32 line = m.lane(); line < 2 * OWN; line += 32) {
        const u32 position = unit.block * Units<CROSS>::BLOCK + Share<CROSS>::warp(m) * OWN + line % OWN;
        if (position < limit)
            prefetch_l2(cache + cache_offset(unit.slot, layer, line / OWN, unit.head, Units<CROSS>::POSITIONS) +
                        position * HEAD_SIZE);
    }
}

// The same for this SM's first unit of cross attention.
__device__ __forceinline__ void prefetch_first(const Machine m, u32 layer) {
    prefetch_unit<true>(m, layer, Units<true>::first(m, __ffs(slots_with_rows(m)) - 1));
}

// A group's keys or values: [8 positions][32 dimensions] of both halves of the head. Lane (n = lane / 4, j = lane % 4)
// has dimensions 8 j to 8 j + 7 of position n.
typedef uint4 Held[2];

// This step's keys and values of one position, from the words ``from`` on, and into the cache too.
__device__ __forceinline__ void keep_new(const Machine m, const u64* from, u32 epoch, u16* key_cache, u64 to_values,
                                         uint4 (&key)[2], uint4 (&value)[2]) {
    constexpr u32 WORDS = N_HEADS * HEAD_SIZE / 2;
    Piece pieces[4];
#pragma unroll
    for (u32 t = 0; t < 2; t++) {
        pieces[t].ask(from + WORDS + t * TILE_K / 2);
        pieces[2 + t].ask(from + 2 * WORDS + t * TILE_K / 2);
    }
#pragma unroll
    for (u32 t = 0; t < 2; t++) {
        key[t] = pieces[t].get(m, from + WORDS + t * TILE_K / 2, epoch);
        value[t] = pieces[2 + t].get(m, from + 2 * WORDS + t * TILE_K / 2, epoch);
        *(uint4*)(key_cache + t * TILE_K) = key[t];
        *(uint4*)(key_cache + to_values + t * TILE_K) = value[t];
    }
}

// One warp's positions for some rows: its shares to ``shares`` [row][warp][pair] and ``stats`` [row][warp]. This lane
// has row ``row`` there, if ``is_row``, and positions 2 j and 2 j + 1 of each group.
template <bool CROSS, u32 GROUPS>
__device__ __forceinline__ void see_positions(const Machine m, u32 warp, const uint4 (&q)[2], const Held (&keys)[GROUPS],
                                              const Held (&values)[GROUPS], u32 row, bool is_row, u32 begin, u32 seen,
                                              u32 n_plain, float tail_bias, float* dump, float2* shares, float2* stats) {
    float s[GROUPS][4] = {};
#pragma unroll
    for (u32 g = 0; g < GROUPS; g++)
#pragma unroll
        for (u32 t = 0; t < 2; t++) {
            mma(s[g], q[t].x, 0, q[t].y, 0, keys[g][t].x, keys[g][t].y);
            mma(s[g], q[t].z, 0, q[t].w, 0, keys[g][t].z, keys[g][t].w);
        }
    float top = NEGATIVE_INFINITY, total = 0;
#pragma unroll
    for (u32 i = 0; i < 2 * GROUPS; i++) {
        float& score = s[i / 2][i % 2];
        const u32 position = begin + i / 2 * 8 + (m.lane() & 3) * 2 + i % 2;
        score = position < seen ? score * SCALE : NEGATIVE_INFINITY;
        if (CROSS && dump != nullptr && position < seen) dump[position] = score;
        if (CROSS && position >= n_plain) score += tail_bias;
        top = fmaxf(top, score);
    }
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
    top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
    const float base = top == NEGATIVE_INFINITY ? 0.0f : top;
#pragma unroll
    for (u32 i = 0; i < 2 * GROUPS; i++) total += s[i / 2][i % 2] = expf(s[i / 2][i % 2] - base);
    total += __shfl_xor_sync(0xffffffffu, total, 1);
    total += __shfl_xor_sync(0xffffffffu, total, 2);
    if (is_row && (m.lane() & 3) == 0) stats[row * N_WARPS + warp] = make_float2(top, total);
    // the weights as the left operand, in two bfloat16 parts each, so that next to nothing of them is lost
    u32 coarse[GROUPS], fine[GROUPS];
#pragma unroll
    for (u32 g = 0; g < GROUPS; g++) {
        coarse[g] = pack_bf16(s[g][0], s[g][1]);
        fine[g] = pack_bf16(s[g][0] - low_bf16(coarse[g]), s[g][1] - high_bf16(coarse[g]));
    }
    float2* to = shares + (row * N_WARPS + warp) * (HEAD_SIZE / 2) + (m.lane() & 3) * 4;
#pragma unroll
    for (u32 t = 0; t < 2; t++) {
        float d[4][4] = {};  // dimensions 8 j + 2 i and the next, of each j
#pragma unroll
        for (u32 g = 0; g < GROUPS; g += 2) {
            const u32 first[4] = {values[g][t].x, values[g][t].y, values[g][t].z, values[g][t].w};
            const u32 second[4] = {values[g + 1][t].x, values[g + 1][t].y, values[g + 1][t].z, values[g + 1][t].w};
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const u32 b0 = transpose(first[i]), b1 = transpose(second[i]);
                mma(d[i], coarse[g], 0, coarse[g + 1], 0, b0, b1);
                mma(d[i], fine[g], 0, fine[g + 1], 0, b0, b1);
            }
        }
        if (is_row)
#pragma unroll
            for (u32 i = 0; i < 4; i++) to[t * (TILE_K / 2) + i] = make_float2(d[i][0], d[i][1]);
    }
}

// Results of rows and units whose shares lie in shared memory until all warps have left theirs: while a warp sees its
// positions of one unit, others are at the next already.
struct Kept {
    static constexpr u32 ROW_BYTES = (N_WARPS * (HEAD_SIZE / 2) + N_WARPS) * sizeof(float2);
    static constexpr u32 MOST = 8 * ROW_BYTES <= X_BYTES ? 8 : 4;  // of which the matrix instruction takes 8
    u32 n;
    u32 place;  // of lane i: the i-th's row, head, block and its row's number of blocks, a byte each
    bool has_dumped;
};

// One warp a result, from the shares of all in their order.
template <bool CROSS>
__device__ __forceinline__ void publish_kept(const Machine m, const Kept& kept, const float2* shares, const float2* stats) {
    constexpr u32 WARPS = Share<CROSS>::WARPS, PAIRS = HEAD_SIZE / 2;
    static_assert(PAIRS == 32 && Kept::MOST <= N_WARPS, "a warp has a result, a lane a pair");
    const u32 i = m.warp(), place = __shfl_sync(0xffffffffu, kept.place, i % 32);
    const u32 row = place & 255, head = place >> 8 & 255, block = place >> 16 & 255, n_blocks = place >> 24;
    if (i >= kept.n || block >= n_blocks) return;  // the latter: the row does not look so far
    float2 mine = make_float2(NEGATIVE_INFINITY, 0);
    if (m.lane() < WARPS) mine = stats[i * N_WARPS + m.lane()];
    const float best = largest(mine.x), weight = mine.x == NEGATIVE_INFINITY ? 0.0f : expf(mine.x - best);
    const float whole = sum_of(mine.y * weight);
    float2 sum = make_float2(0, 0);
#pragma unroll 4
    for (u32 k = 0; k < WARPS; k++) {
        const float of = __shfl_sync(0xffffffffu, weight, k);
        const float2 share = shares[(i * N_WARPS + k) * PAIRS + m.lane()];
        sum.x = fmaf(of, share.x, sum.x);
        sum.y = fmaf(of, share.y, sum.y);
    }
    if (m.misc().dead) return;
    const u32 epoch = m.epoch + m.field(PHASE_EPOCH), payload = pack_bf16(sum.x / whole, sum.y / whole);
    if (n_blocks == 1) {
        publish_row(m, m.field(PHASE_OUTPUT), N_HEADS * HEAD_SIZE, row, head * PAIRS + m.lane(), payload, epoch + 1);
    } else {
        u64* to = words(m) + m.field(PHASE_PARTIAL) +
                  ((row * N_HEADS + head) * m.field(PHASE_N_BLOCKS) + block) * BLOCK_WORDS;
        publish(to + BLOCK_STATS_WORDS + m.lane(), payload, epoch);
        if (m.lane() < 2) publish(to + m.lane(), __float_as_uint(m.lane() == 0 ? best : whole), epoch);
    }
}

template <bool CROSS>
__device__ __forceinline__ void flush(const Machine m, Kept& kept, const float2* shares, const float2* stats) {
    if (CROSS && kept.has_dumped) __threadfence();  // the host reads the scores once the slot is done
    __syncthreads();
    publish_kept<CROSS>(m, kept, shares, stats);
    __syncthreads();  // the next rows or a linear take the scratch
    kept = {};
}

template <bool CROSS>
__device__ __forceinline__ void attend_unit(const Machine m, u32 number, u32 limit, Kept& kept) {
    constexpr u32 WIDE = N_HEADS * HEAD_SIZE, Q_WIDE = CROSS ? WIDE : 3 * WIDE;
    constexpr u32 POSITIONS = Units<CROSS>::POSITIONS, GROUPS = Share<CROSS>::GROUPS;
    const Unit unit = Units<CROSS>::unit(number);
    const Slot& slot = m.misc().state.slots[unit.slot];
    const u32 n_rows = slot.n_rows, slot_row = slot.first_row;
    const u32 first_position = m.misc().state.rows[slot_row].position;
    const u32 input_epoch = m.epoch + m.field(PHASE_INPUT_EPOCH), dumped = CROSS ? m.field(PHASE_SCORE_HEADS) : 0;
    const u32 row = m.lane() >> 2, warp = Share<CROSS>::warp(m);
    const u32 begin = unit.block * Units<CROSS>::BLOCK + warp * Share<CROSS>::POSITIONS;
    const bool is_own = Share<CROSS>::is_own(m, number);
    // where this lane's elements lie in the slot's first row, and in a position of the cache
    const u64* const from = row_words(m, m.field(PHASE_INPUT), Q_WIDE, slot_row) +
                            (unit.head * HEAD_SIZE + (m.lane() & 3) * 8) / 2;
    Held keys[GROUPS] = {}, values[GROUPS] = {};
    Piece queries[2] = {};
    constexpr u64 TO_VALUES = (u64)N_HEADS * POSITIONS * HEAD_SIZE;
    u16* const cache = m.at<u16>(CROSS ? PARAMETER_CROSS_CACHE : PARAMETER_SELF_CACHE) +
                       cache_offset(unit.slot, m.field(PHASE_LAYER), 0, unit.head, POSITIONS) + (m.lane() & 3) * 8;
    if (is_own) {
        if (row < n_rows) {
            queries[0].ask(from + row * (Q_WIDE / 2));
            queries[1].ask(from + row * (Q_WIDE / 2) + TILE_K / 2);
        }
#pragma unroll
        for (u32 g = 0; g < GROUPS; g++) {
            const u32 position = begin + g * 8 + row;
            u16* at = cache + position * HEAD_SIZE;
#pragma unroll
            for (u32 t = 0; t < 2; t++) keys[g][t] = values[g][t] = make_uint4(0, 0, 0, 0);
            if (position >= limit) continue;
            if (!CROSS && position >= first_position) {
                keep_new(m, from + (position - first_position) * (Q_WIDE / 2), input_epoch, at, TO_VALUES, keys[g],
                         values[g]);
            } else {
#pragma unroll
                for (u32 t = 0; t < 2; t++) {
                    keys[g][t] = load_through(at + t * TILE_K);
                    values[g][t] = load_through(at + TO_VALUES + t * TILE_K);
                }
            }
        }
    }
    float2* const shares = (float2*)m.x();
    float2* const stats = shares + Kept::MOST * N_WARPS * (HEAD_SIZE / 2);
#pragma unroll 1
    for (u32 first = 0; first < n_rows; first += Kept::MOST) {
        const u32 n = min(n_rows - first, Kept::MOST);
        if (kept.n + n > Kept::MOST) flush<CROSS>(m, kept, shares, stats);
        if (is_own) {
            const bool is_row = row < n;
            uint4 q[2] = {};
            const u64* mine = from + (first + row) * (Q_WIDE / 2);
            if (is_row) {
                if (first != 0) {
                    queries[0].ask(mine);
                    queries[1].ask(mine + TILE_K / 2);
                }
                q[0] = queries[0].get(m, mine, input_epoch);
                q[1] = queries[1].get(m, mine + TILE_K / 2, input_epoch);
            }
            float* dump = nullptr;
            if (CROSS && (dumped >> unit.head & 1) && is_row) {
                const u32 index = m.field(PHASE_SCORES) - 1 + __popc(dumped & ((1u << unit.head) - 1));
                dump = m.at<float>(PARAMETER_SCORES) +
                       (((u64)unit.slot * N_SCORE_HEADS + index) * N_POSITIONS + first_position + first + row) * N_CROSS_POSITIONS;
            }
            __syncwarp();
            see_positions<CROSS, GROUPS>(m, warp, q, keys, values, kept.n + row, is_row, begin,
                                         CROSS ? limit : first_position + first + row + 1, slot.n_plain,
                                         slot.tail_bias, dump, shares, stats);
        }
        const u32 position = first_position + first + m.lane() - kept.n;
        if (m.lane() >= kept.n && m.lane() < kept.n + n)
            kept.place = (slot_row + first + m.lane() - kept.n) | unit.head << 8 | unit.block << 16 |
                         blocks_of<CROSS>(slot, position) << 24;
        kept.n += n;
        kept.has_dumped |= (dumped >> unit.head & 1) != 0;
    }
}

template <bool CROSS>
__device__ __forceinline__ void attend(const Machine m) {
    Kept kept = {};
#pragma unroll 1
    for (u32 slots = slots_with_rows(m); slots != 0; slots &= slots - 1) {
        const u32 slot = __ffs(slots) - 1, end = (slot + 1) * Units<CROSS>::OF_SLOT;
        const u32 limit = Units<CROSS>::limit(m, m.misc().state.slots[slot]);
#pragma unroll 1
        for (u32 number = Units<CROSS>::first(m, slot); number < end; number += N_SMS) {
            if (Units<CROSS>::unit(number).block * Units<CROSS>::BLOCK >= limit) continue;
            prefetch_unit<CROSS>(m, m.field(PHASE_LAYER), number + N_SMS);
            attend_unit<CROSS>(m, number, limit, kept);
        }
    }
    float2* const shares = (float2*)m.x();
    if (kept.n != 0) flush<CROSS>(m, kept, shares, shares + Kept::MOST * N_WARPS * (HEAD_SIZE / 2));
}

// One warp a (row, head): the blocks' results, weighted by what each block's exponentials sum to. The warp fetches all
// blocks at once into its part of the scratch; one after the other would pay a hop each.
__device__ __noinline__ void combine(const Machine m) {
    constexpr u32 PAIRS = BLOCK_WORDS / 2, FETCHES = (MAX_BLOCKS * PAIRS + 31) / 32;
    const u32 n_blocks_at_most = m.field(PHASE_N_BLOCKS), partial = m.field(PHASE_PARTIAL);
    const u32 input_epoch = m.epoch + m.field(PHASE_INPUT_EPOCH), epoch = m.epoch + m.field(PHASE_EPOCH);
    const bool cross = m.field(PHASE_BLOCK) == CROSS_BLOCK;
    u32* scratch = (u32*)m.sums() + m.warp() * MAX_BLOCKS * BLOCK_WORDS;  // a linear fills it behind its first barrier
    const u32 n_units = m.misc().state.n_rows * N_HEADS;
    if (m.sm() >= n_units) return;
    __syncthreads();  // the last linear's sums may still be read
#pragma unroll 1
    for (u32 unit = m.sm() + m.warp() * N_SMS; unit < n_units; unit += N_WARPS * N_SMS) {
        const u32 row = unit / N_HEADS, head = unit % N_HEADS;
        const Slot& slot = m.misc().state.slots[m.misc().state.rows[row].slot];
        const u32 n = cross ? blocks_of<true>(slot, 0) : blocks_of<false>(slot, m.misc().state.rows[row].position);
        if (n == 1) continue;
        const u64* from = words(m) + partial + unit * n_blocks_at_most * BLOCK_WORDS;
        Pair pairs[FETCHES] = {};
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
        float2 block = make_float2(NEGATIVE_INFINITY, 0);  // lane b: block b's largest score and sum
        if (m.lane() < n)
            block = make_float2(__uint_as_float(scratch[m.lane() * BLOCK_WORDS]),
                                __uint_as_float(scratch[m.lane() * BLOCK_WORDS + 1]));
        const float best = largest(block.x), weight = m.lane() < n ? block.y * expf(block.x - best) : 0.0f;
        const float total = sum_of(weight);
        float2 sum = make_float2(0, 0);
#pragma unroll
        for (u32 b = 0; b < MAX_BLOCKS; b++) {
            if (b >= n) break;
            const u32 value = scratch[b * BLOCK_WORDS + BLOCK_STATS_WORDS + m.lane()];
            const float share = __shfl_sync(0xffffffffu, weight, b);
            sum.x = fmaf(share, low_bf16(value), sum.x);
            sum.y = fmaf(share, high_bf16(value), sum.y);
        }
        __syncwarp();
        if (m.misc().dead) return;
        publish_row(m, m.field(PHASE_OUTPUT), N_HEADS * HEAD_SIZE, row, head * (HEAD_SIZE / 2) + m.lane(),
                    pack_bf16(sum.x / total, sum.y / total), epoch);
    }
}
