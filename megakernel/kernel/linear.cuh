// LINEAR and the product inside HEAD: rows of activations times this SM's granules of a weight, on tensor cores with the
// rows on m (16, of which 8 may stay empty) and the granule's 8 weight rows on n.
//
// K_WARPS warps share a granule's K; the groups of K_WARPS warps take the SM's granules in turn, BATCH_GRANULES at a
// time, and a fixed-order sum over the warps of a group ends each batch. Natural order of k holds everywhere: lane
// (row or weight row = lane / 4, j = lane % 4) has elements 8 j to 8 j + 7 of a tile's 32 as one 16-byte piece, which
// are the registers of two products.
#pragma once

#include "exchange.cuh"
#include "stream.cuh"

template <int K, int K_WARPS>
struct Shape {
    static constexpr int GROUPS = N_WARPS / K_WARPS;
    static constexpr int TILES = K / K_WARPS / TILE_K;  // of a warp's slice
    static constexpr int SLICE = K / K_WARPS;
};

// How many of a slice's tiles fit into shared memory at once for so many rows.
template <int K, int K_WARPS>
__device__ __forceinline__ int resident_tiles(u32 n_rows) {
    int fit = ((int)(X_BYTES / n_rows) - X_ROW_PAD_BYTES) / (K_WARPS * TILE_K * 2);
    return fit < Shape<K, K_WARPS>::TILES ? fit : Shape<K, K_WARPS>::TILES;
}

__device__ __forceinline__ u32 x_stride(int elements) { return elements * 2 + X_ROW_PAD_BYTES; }

// Four elements of the row's embedding, rounded as they would be exchanged.
__device__ __forceinline__ float4 embedding(const Machine m, u32 row, u32 element) {
    const Row& r = m.misc().state.rows[row];
    uint2 token = __ldg((const uint2*)(m.at<const u16>(PARAMETER_TOKEN_TABLE) + (u64)r.token * WIDTH + element));
    float4 position = __ldg((const float4*)(m.at<const float>(PARAMETER_POSITION_TABLE) + r.position * WIDTH + element));
    position.x += low_bf16(token.x);
    position.y += high_bf16(token.x);
    position.z += low_bf16(token.y);
    position.w += high_bf16(token.y);
    return position;
}

__device__ __forceinline__ float2 sum_over_warp(float2 v) {
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) {
        v.x += __shfl_xor_sync(0xffffffffu, v.x, mask);
        v.y += __shfl_xor_sync(0xffffffffu, v.y, mask);
    }
    return v;
}

// All of K of every row into shared memory; a warp takes pieces of 128 elements, whose sums it leaves for the norm.
template <int K>
__device__ __forceinline__ void load_rows(const Machine m, u32 n_rows, u32 flags, u32 input, u32 epoch) {
    constexpr int PIECES = K / STATS_ELEMENTS;
    constexpr int AHEAD = 4;
    const u32 n_pieces = n_rows * PIECES;
    for (u32 first = m.warp(); first < n_pieces; first += AHEAD * N_WARPS) {
        Pair pairs[AHEAD];
        const u64* from[AHEAD];
        if (!(flags & FLAG_EMBED)) {
#pragma unroll
            for (int i = 0; i < AHEAD; i++) {
                u32 piece = first + i * N_WARPS;
                if (piece < n_pieces) {
                    from[i] = row_words(m, input, K, piece / PIECES) + (piece % PIECES) * 64 + m.lane() * 2;
                    pairs[i] = peek_pair(from[i]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            u32 piece = first + i * N_WARPS;
            if (piece >= n_pieces) break;
            u32 row = piece / PIECES, element = (piece % PIECES) * STATS_ELEMENTS + m.lane() * 4;
            uint2 x;
            if (flags & FLAG_EMBED) {
                float4 v = embedding(m, row, element);
                x = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
            } else {
                settle(m, from[i], epoch, pairs[i]);
                x = make_uint2(pairs[i].first, pairs[i].second);
            }
            *(uint2*)(m.x() + row * x_stride(K) + element * 2) = x;
            if (flags & FLAG_NORM) {
                float a = low_bf16(x.x), b = high_bf16(x.x), c = low_bf16(x.y), d = high_bf16(x.y);
                float2 sum = sum_over_warp(make_float2((a + b) + (c + d), (a * a + b * b) + (c * c + d * d)));
                if (m.lane() == 0) m.misc().stats[m.phase & 1][row][piece % PIECES % STATS_PIECES] = sum;
            }
        }
    }
}

// Tiles ``first`` to ``first + n`` of every warp's slice of K into shared memory, slice after slice.
template <int K, int K_WARPS>
__device__ __forceinline__ void load_part(const Machine m, u32 n_rows, u32 input, u32 epoch, int first, int n) {
    constexpr int AHEAD = 4;
    const u32 per_slice = n * (TILE_K / 4), per_row = K_WARPS * per_slice, n_items = n_rows * per_row;
    for (u32 begin = m.thread(); begin < n_items; begin += AHEAD * N_THREADS) {
        Pair pairs[AHEAD];
        const u64* from[AHEAD];
        unsigned char* to[AHEAD];
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            u32 item = begin + i * N_THREADS;
            if (item < n_items) {
                u32 row = item / per_row, rest = item % per_row, slice = rest / per_slice, o = rest % per_slice;
                u32 element = slice * Shape<K, K_WARPS>::SLICE + first * TILE_K + o * 4;
                from[i] = row_words(m, input, K, row) + element / 2;
                to[i] = m.x() + row * x_stride(K_WARPS * n * TILE_K) + (slice * n * TILE_K + o * 4) * 2;
                pairs[i] = peek_pair(from[i]);
            }
        }
#pragma unroll
        for (int i = 0; i < AHEAD; i++) {
            if (begin + i * N_THREADS >= n_items) break;
            settle(m, from[i], epoch, pairs[i]);
            *(uint2*)to[i] = make_uint2(pairs[i].first, pairs[i].second);
        }
    }
}

// Mean and 1 / deviation of a row from the sums of its pieces, in order.
__device__ __forceinline__ void finish_norm(const Machine m, u32 n_rows) {
    if (m.warp() != N_WARPS - 1 || m.lane() >= n_rows) return;
    float sum = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < STATS_PIECES; i++) {
        float2 piece = m.misc().stats[m.phase & 1][m.lane()][i];
        sum += piece.x;
        squares += piece.y;
    }
    float mean = sum * (1.0f / WIDTH);
    float variance = fmaxf(squares * (1.0f / WIDTH) - mean * mean, 0.0f);
    m.misc().norm[m.phase & 1][m.lane()] = make_float2(mean, rsqrtf(variance + EPSILON));
}

// The products of one batch: tiles of this warp's granules ``index`` (of its group) and the next, for what of K is in
// shared memory. ``n_mine`` granules belong to the group.
template <int MR>
__device__ __forceinline__ void multiply(const Machine m, Stream& stream, float (&sums)[BATCH_GRANULES][4],
                                         u32 n_rows, u32 stride, const unsigned char* slice, int n_tiles, int index,
                                         int n_mine) {
    const u32 row = m.lane() >> 2;
    const unsigned char* piece = slice + row * stride + (m.lane() & 3) * 16;
    const bool has_low = row < n_rows, has_high = MR == 16 && row + 8 < n_rows;
    if (index >= n_mine) return;
    const bool has_second = index + 1 < n_mine;
#pragma unroll 2
    for (int t = 0; t < n_tiles; t++) {
        uint4 low = make_uint4(0, 0, 0, 0), high = low;
        if (has_low) low = *(const uint4*)(piece + t * TILE_K * 2);
        if (MR == 16 && has_high) high = *(const uint4*)(piece + 8 * stride + t * TILE_K * 2);
        uint4 w = stream.take();
        mma(sums[0], low.x, high.x, low.y, high.y, w.x, w.y);
        mma(sums[0], low.z, high.z, low.w, high.w, w.z, w.w);
        stream.load_next();
        if (has_second) {
            w = stream.take();
            mma(sums[1], low.x, high.x, low.y, high.y, w.x, w.y);
            mma(sums[1], low.z, high.z, low.w, high.w, w.z, w.w);
            stream.load_next();
        }
    }
}

// This warp's sums to shared memory: [granule of the batch][warp][row][8]
template <int MR>
__device__ __forceinline__ void leave_sums(const Machine m, float* to, const float (&sums)[BATCH_GRANULES][4],
                                           u32 n_rows) {
    const u32 row = m.lane() >> 2, column = (m.lane() & 3) * 2;
#pragma unroll
    for (int g = 0; g < BATCH_GRANULES; g++) {
        float* at = to + ((g * N_WARPS + m.warp()) * MR + row) * GRANULE_ROWS + column;
        if (row < n_rows) *(float2*)at = make_float2(sums[g][0], sums[g][1]);
        if (MR == 16 && row + 8 < n_rows) *(float2*)(at + 8 * GRANULE_ROWS) = make_float2(sums[g][2], sums[g][3]);
    }
}

// Everything up to the sums of batch ``batch`` in shared memory and the barrier behind them. → where they are
template <int K, int K_WARPS, int MR>
__device__ __forceinline__ const float* batch_sums(const Machine m, Stream& stream, u32 flags, u32 input, u32 epoch,
                                                   int batch, int n_mine) {
    constexpr int TILES = Shape<K, K_WARPS>::TILES;
    const u32 n_rows = m.misc().state.n_rows;
    const int resident = resident_tiles<K, K_WARPS>(n_rows);
    const bool all = resident == TILES;
    const u32 k_warp = m.warp() % K_WARPS;
    float sums[BATCH_GRANULES][4] = {};
    if (all) {
        if (batch == 0) {
            load_rows<K>(m, n_rows, flags, input, epoch);
            __syncthreads();
            if (flags & FLAG_NORM) finish_norm(m, n_rows);
        }
        multiply<MR>(m, stream, sums, n_rows, x_stride(K), m.x() + k_warp * TILES * TILE_K * 2, TILES,
                     batch * BATCH_GRANULES, n_mine);
    } else {
        for (int first = 0; first < TILES; first += resident) {
            int n = TILES - first < resident ? TILES - first : resident;
            if (batch != 0 || first != 0) __syncthreads();  // everyone is done with what is there
            load_part<K, K_WARPS>(m, n_rows, input, epoch, first, n);
            __syncthreads();
            multiply<MR>(m, stream, sums, n_rows, x_stride(K_WARPS * n * TILE_K), m.x() + k_warp * n * TILE_K * 2, n,
                         batch * BATCH_GRANULES, n_mine);
        }
    }
    float* to = m.sums() + (MR == 8 ? (batch & 1) * (BATCH_GRANULES * N_WARPS * 8 * GRANULE_ROWS) : 0);
    if (MR == 16 && batch != 0) __syncthreads();  // one buffer only: the last batch's readers come first
    leave_sums<MR>(m, to, sums, n_rows);
    __syncthreads();
    return to;
}

// Where granule ``in_batch`` of a batch was summed: the first warp's sums of it, and how many granules of a group it is.
template <int K_WARPS, int MR>
__device__ __forceinline__ const float* granule_sums(const float* sums, u32 in_batch, u32 first_group) {
    constexpr u32 GROUPS = N_WARPS / K_WARPS;
    u32 turn = in_batch / GROUPS, group = (first_group + in_batch) % GROUPS;
    return sums + (turn * N_WARPS + group * K_WARPS) * MR * GRANULE_ROWS;
}

// How many of an SM's granules are this warp's group's.
template <int K_WARPS>
__device__ __forceinline__ int granules_of_group(const Machine m, const u32* task) {
    constexpr int GROUPS = N_WARPS / K_WARPS;
    int turn = ((int)(m.warp() / K_WARPS) - (int)task[TASK_FIRST_GROUP] + GROUPS) % GROUPS;
    return ((int)task[TASK_N_GRANULES] - turn + GROUPS - 1) / GROUPS;
}

// Two neighbouring outputs: the sums over the warps in order, then the norm and the bias.
template <int K_WARPS, int MR>
__device__ __forceinline__ float2 finish_pair(const Machine m, const float* granule, u32 row, u32 pair, u32 flags,
                                              float4 aux) {
    const float* from = granule + row * GRANULE_ROWS + pair * 2;
    float2 y = *(const float2*)from;
#pragma unroll
    for (int w = 1; w < K_WARPS; w++) {
        float2 more = *(const float2*)(from + w * MR * GRANULE_ROWS);
        y.x += more.x;
        y.y += more.y;
    }
    if (flags & FLAG_NORM) {
        float2 norm = m.misc().norm[m.phase & 1][row];
        y.x = (y.x - norm.x * aux.x) * norm.y;
        y.y = (y.y - norm.x * aux.z) * norm.y;
    }
    return make_float2(y.x + aux.y, y.y + aux.w);
}

__device__ __forceinline__ const float2* aux_of(const Machine m, u32 granule) {
#if AUX_IN_SHARED
    return m.misc().aux + granule * GRANULE_ROWS;
#else
    return m.at<const float2>(PARAMETER_AUX) + ((u64)m.sm() * AUX_GRANULES + granule) * GRANULE_ROWS;
#endif
}

// The residual stream begins as the embedding, on the SM that owns the elements.
__device__ __forceinline__ void begin_residual(const Machine m, const u32* owner, u32 n_rows) {
    const u32 n = owner[TASK_N_GRANULES] * (GRANULE_ROWS / 4);
    for (u32 i = m.thread(); i < n * n_rows; i += N_THREADS) {
        u32 row = i / n, element = (i % n) * 4;
        *(float4*)&m.misc().residual[row][element] = embedding(m, row, owner[TASK_FIRST_GRANULE] * GRANULE_ROWS + element);
    }
}

template <int K, int K_WARPS, int MR>
__device__ __forceinline__ void linear(const Machine m, Stream& stream) {
    constexpr u32 GROUPS = N_WARPS / K_WARPS, BATCH = BATCH_GRANULES * GROUPS;
    const u32* task = m.misc().tasks[m.phase];
    const u32 flags = m.field(PHASE_FLAGS), n = m.field(PHASE_N), output = m.field(PHASE_OUTPUT);
    const u32 input = m.field(PHASE_INPUT), input_epoch = m.epoch + m.field(PHASE_INPUT_EPOCH);
    const u32 epoch = m.epoch + m.field(PHASE_EPOCH);
    const u32 n_granules = task[TASK_N_GRANULES], n_rows = m.misc().state.n_rows;
    const int n_mine = granules_of_group<K_WARPS>(m, task);
    for (u32 first = 0; first < n_granules; first += BATCH) {
        const float* sums = batch_sums<K, K_WARPS, MR>(m, stream, flags, input, input_epoch, first / BATCH, n_mine);
        for (u32 i = m.thread(); i < n_rows * BATCH * 4; i += N_THREADS) {
            const u32 pair = i & 3, in_batch = (i >> 2) % BATCH, row = (i >> 2) / BATCH, granule = first + in_batch;
            if (granule >= n_granules) continue;
            const float4 aux = *(const float4*)(aux_of(m, task[TASK_AUX] + granule) + pair * 2);
            float2 y = finish_pair<K_WARPS, MR>(m, granule_sums<K_WARPS, MR>(sums, in_batch, task[TASK_FIRST_GROUP]),
                                                row, pair, flags, aux);
            if (flags & FLAG_GELU) y = make_float2(gelu(y.x), gelu(y.y));
            if (flags & FLAG_RESIDUAL) {
                float2* stream_at = (float2*)&m.misc().residual[row][granule * GRANULE_ROWS + pair * 2];
                y.x += stream_at->x;
                y.y += stream_at->y;
                *stream_at = y;
            }
            publish_row(m, output, n, row, (task[TASK_FIRST_GRANULE] + granule) * (GRANULE_ROWS / 2) + pair,
                        pack_bf16(y.x, y.y), epoch);
        }
    }
}
