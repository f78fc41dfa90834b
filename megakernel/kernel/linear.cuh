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


// How many tiles of a slice a warp takes at once, of at most so many: a divisor of the slice's, so that one wait and one
// latency serve them all.
__host__ __device__ constexpr int tiles_together(int tiles, int most) {
    int n = RING_TILES < most ? RING_TILES : most;
    while (tiles % n != 0) n--;
    return n;
}

template <int K, int K_WARPS>
struct Shape {
    static constexpr int GROUPS = N_WARPS / K_WARPS;
    static constexpr int TILES = K / K_WARPS / TILE_K;  // of a warp's slice
    static constexpr int SLICE = K / K_WARPS;
    static constexpr int TOGETHER = tiles_together(TILES, 5);
    static_assert(TILES * TILE_K * 2 <= ZERO_BYTES, "the zeros are too short for a slice of K");
};

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

// Where this lane's four elements of a piece of a row are in shared memory.
__device__ __forceinline__ unsigned char* x_piece(const Machine m, u32 row, u32 piece) {
    return m.x() + row * x_stride(WIDTH) + (piece * STATS_ELEMENTS + m.lane() * 4) * 2;
}

// Pieces of 128 elements of the rows, each a warp's, of which it watches AHEAD at once.
template <int AHEAD>
__device__ __forceinline__ void load_pieces(const Machine m, const u64* from, u32 n_pieces, u32 epoch) {
#pragma unroll 1
    for (u32 first = m.warp(); first < n_pieces; first += AHEAD * N_WARPS) {
        Pair pairs[AHEAD];
        u32 at[AHEAD];  // past the end the last piece again: a second store of the same costs less than branches
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++)  // a row's words lie behind the last one's
            at[i] = min(first + i * N_WARPS, n_pieces - 1) * (STATS_ELEMENTS / 2);
        take_pairs(m, from, at, epoch, pairs);
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            const u32 piece = at[i] / (STATS_ELEMENTS / 2);
            *(uint2*)x_piece(m, piece / STATS_PIECES, piece % STATS_PIECES) = make_uint2(pairs[i].first, pairs[i].second);
        }
    }
}

// Rows of the width into shared memory.
__device__ __forceinline__ void load_rows(const Machine m, u32 n_rows, u32 flags, u32 input, u32 epoch) {
    const u32 n_pieces = n_rows * STATS_PIECES;
    const u64* from = row_words(m, input, WIDTH, 0) + m.lane() * 2;
    if (flags & FLAG_EMBED) {
#pragma unroll 1
        for (u32 piece = m.warp(); piece < n_pieces; piece += N_WARPS) {
            const u32 row = piece / STATS_PIECES, index = piece % STATS_PIECES;
            const float4 v = embedding(m, row, index * STATS_ELEMENTS + m.lane() * 4);
            *(uint2*)x_piece(m, row, index) = make_uint2(pack_bf16(v.x, v.y), pack_bf16(v.z, v.w));
        }
    } else if (n_pieces <= N_WARPS) {
        if (m.warp() < n_pieces) load_pieces<1>(m, from, n_pieces, epoch);
    } else if (n_pieces <= 2 * N_WARPS) {
        load_pieces<2>(m, from, n_pieces, epoch);
    } else {
        load_pieces<5>(m, from, n_pieces, epoch);
    }
    if (flags & FLAG_NORM) {  // each lane reads what it has just written
#pragma unroll 1
        for (u32 piece = m.warp(); piece < n_pieces; piece += N_WARPS) {
            const u32 row = piece / STATS_PIECES, index = piece % STATS_PIECES;
            const uint2 x = *(const uint2*)x_piece(m, row, index);
            const float a = low_bf16(x.x), b = high_bf16(x.x), c = low_bf16(x.y), d = high_bf16(x.y);
            const float2 sum = sum_over_warp(make_float2((a + b) + (c + d), (a * a + b * b) + (c * c + d * d)));
            if (m.lane() == 0) m.misc().stats[m.phase & 1][row][index] = sum;
        }
    }
}

// Mean and 1 / deviation of the rows from the sums of their pieces, by the warps that have least to multiply: those of
// the group that would take the SM's next granule.
template <int K_WARPS>
__device__ __forceinline__ void finish_norm(const Machine m, u32 n_rows, const u32* task) {
    constexpr u32 GROUPS = N_WARPS / K_WARPS;
    if (m.warp() / K_WARPS != (task[TASK_FIRST_GROUP] + task[TASK_N_GRANULES]) % GROUPS) return;
#pragma unroll 1
    for (u32 row = m.warp() % K_WARPS; row < n_rows; row += K_WARPS) {
        float2 piece = make_float2(0, 0);
        if (m.lane() < STATS_PIECES) piece = m.misc().stats[m.phase & 1][row][m.lane()];
        const float2 sum = sum_over_warp(piece);
        const float mean = sum.x * (1.0f / WIDTH);
        const float variance = fmaxf(sum.y * (1.0f / WIDTH) - mean * mean, 0.0f);
        if (m.lane() == 0) m.misc().norm[m.phase & 1][row] = make_float2(mean, rsqrtf(variance + EPSILON));
    }
}

typedef float Sums[2][BATCH_GRANULES][4];  // two chains, so that a product need not wait for the last one

__device__ __forceinline__ void multiply_tile(Sums& sums, int granule, uint4 low, uint4 high, uint4 w) {
    mma(sums[0][granule], low.x, high.x, low.y, high.y, w.x, w.y);
    mma(sums[1][granule], low.z, high.z, low.w, high.w, w.z, w.w);
}

// Products of ``n_tiles`` of the slice for one granule, TOGETHER at a time.
template <int TOGETHER, bool HIGH>
__device__ __forceinline__ void multiply_one(Stream& stream, Sums& sums, const unsigned char* low,
                                             const unsigned char* high, int n_tiles) {
#pragma unroll 1
    for (int first = 0; first < n_tiles; first += TOGETHER) {
        uint4 a[TOGETHER], b[TOGETHER] = {}, w[TOGETHER];
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) {
            a[i] = *(const uint4*)(low + (first + i) * TILE_K * 2);
            if (HIGH) b[i] = *(const uint4*)(high + (first + i) * TILE_K * 2);
        }
        stream.take(w);
#pragma unroll
        for (int i = 0; i < TOGETHER; i++) multiply_tile(sums, 0, a[i], b[i], w[i]);
        stream.template refill<TOGETHER>();
    }
}

// The same for several granules, whose tiles of one place in the slice lie beside each other.
template <int GRANULES, bool HIGH>
__device__ __forceinline__ void multiply_several(Stream& stream, Sums& sums, const unsigned char* low,
                                                 const unsigned char* high, int n_tiles) {
#pragma unroll 1
    for (int t = 0; t < n_tiles; t++) {
        uint4 b = make_uint4(0, 0, 0, 0), w[GRANULES];
        const uint4 a = *(const uint4*)(low + t * TILE_K * 2);
        if (HIGH) b = *(const uint4*)(high + t * TILE_K * 2);
        stream.take(w);
#pragma unroll
        for (int g = 0; g < GRANULES; g++) multiply_tile(sums, g, a, b, w[g]);
        stream.template refill<GRANULES>();
    }
}

template <int TOGETHER, bool HIGH>
__device__ __forceinline__ void multiply_rows(Stream& stream, Sums& sums, const unsigned char* low,
                                              const unsigned char* high, int n_tiles, int n_granules) {
    static_assert(BATCH_GRANULES == 2, "a case is missing");
    if (n_granules == 1)
        multiply_one<TOGETHER, HIGH>(stream, sums, low, high, n_tiles);
    else
        multiply_several<2, HIGH>(stream, sums, low, high, n_tiles);
}

// This warp's part of a batch for rows that lie in shared memory from ``slice`` on: its granules from ``index`` (of its
// group's ``n_mine``) on. Lanes whose row is none read zeros.
template <int K, int K_WARPS>
__device__ __forceinline__ void multiply(const Machine m, Stream& stream, Sums& sums, u32 n_rows,
                                         const unsigned char* slice, int index, int n_mine) {
    constexpr int TILES = Shape<K, K_WARPS>::TILES, TOGETHER = Shape<K, K_WARPS>::TOGETHER;
    if (index >= n_mine) return;
    const int n_granules = min(n_mine - index, BATCH_GRANULES);
    const u32 row = m.lane() >> 2;
    const unsigned char* zeros = (const unsigned char*)m.misc().zeros;
    const unsigned char* low = row < n_rows ? slice + row * x_stride(K) + (m.lane() & 3) * 16 : zeros;
    if (n_rows <= 8) {
        multiply_rows<TOGETHER, false>(stream, sums, low, zeros, TILES, n_granules);
    } else {
        const unsigned char* high = row + 8 < n_rows ? low + 8 * x_stride(K) : zeros;
        multiply_rows<TOGETHER, true>(stream, sums, low, high, TILES, n_granules);
    }
}

// N tiles of a row as the left operand, straight from the words where it was published.
template <int N>
__device__ __forceinline__ void take_operand(const Machine m, const u64* from, u32 epoch, uint4 (&a)[N]) {
    u32 at[2 * N];
    Pair pairs[2 * N];
#pragma unroll
    for (int i = 0; i < 2 * N; i++) at[i] = i / 2 * (TILE_K / 2) + i % 2 * 2;
    take_pairs(m, from, at, epoch, pairs);
#pragma unroll
    for (int i = 0; i < N; i++)
        a[i] = make_uint4(pairs[2 * i].first, pairs[2 * i].second, pairs[2 * i + 1].first, pairs[2 * i + 1].second);
}

// Products of a warp's slice of K, which it takes from the words itself, for some granules.
template <int K, int K_WARPS, int GRANULES, bool HIGH>
__device__ __forceinline__ void multiply_words(const Machine m, Stream& stream, Sums& sums, const u64* from, u32 n_rows,
                                               u32 epoch) {
    constexpr int TILES = Shape<K, K_WARPS>::TILES;
    constexpr int TOGETHER = tiles_together(TILES, HIGH ? 2 : 5);  // as many words as registers hold
    const u32 row = m.lane() >> 2;
#pragma unroll 1
    for (int first = 0; first < TILES; first += TOGETHER) {
        uint4 a[TOGETHER] = {}, b[TOGETHER] = {};
        if (row < n_rows) take_operand(m, from + first * (TILE_K / 2), epoch, a);
        if (HIGH && row + 8 < n_rows) take_operand(m, from + 8 * (K / 2) + first * (TILE_K / 2), epoch, b);
        __syncwarp();
#pragma unroll
        for (int t = 0; t < TOGETHER; t++) {
            uint4 w[GRANULES];
            stream.take(w);
#pragma unroll
            for (int g = 0; g < GRANULES; g++) multiply_tile(sums, g, a[t], b[t], w[g]);
            stream.template refill<GRANULES>();
        }
    }
}

// This warp's part of a batch for rows that shared memory has no room for, straight from where they were published.
template <int K, int K_WARPS>
__device__ __forceinline__ void multiply_published(const Machine m, Stream& stream, Sums& sums, u32 n_rows, u32 input,
                                                   u32 epoch, int index, int n_mine) {
    if (index >= n_mine) return;
    const u64* from = row_words(m, input, K, m.lane() >> 2) +
                      (m.warp() % K_WARPS * Shape<K, K_WARPS>::SLICE + (m.lane() & 3) * 8) / 2;
    const bool one = n_mine - index == 1;
    if (n_rows <= 8 && one)
        multiply_words<K, K_WARPS, 1, false>(m, stream, sums, from, n_rows, epoch);
    else if (n_rows <= 8)
        multiply_words<K, K_WARPS, 2, false>(m, stream, sums, from, n_rows, epoch);
    else if (one)
        multiply_words<K, K_WARPS, 1, true>(m, stream, sums, from, n_rows, epoch);
    else
        multiply_words<K, K_WARPS, 2, true>(m, stream, sums, from, n_rows, epoch);
}

// Rows for which the sums of a batch have room: with 8 there are two buffers, with 16 one.
__device__ __forceinline__ u32 sum_rows(u32 n_rows) { return n_rows <= 8 ? 8 : 16; }

// This warp's sums to shared memory: [granule of the batch][warp][row][8]
__device__ __forceinline__ void leave_sums(const Machine m, float* to, const float (&sums)[BATCH_GRANULES][4],
                                           u32 n_rows) {
    const u32 row = m.lane() >> 2, column = (m.lane() & 3) * 2;
#pragma unroll
    for (int g = 0; g < BATCH_GRANULES; g++) {
        float* at = to + ((g * N_WARPS + m.warp()) * sum_rows(n_rows) + row) * GRANULE_ROWS + column;
        if (row < n_rows) *(float2*)at = make_float2(sums[g][0], sums[g][1]);
        if (row + 8 < n_rows) *(float2*)(at + 8 * GRANULE_ROWS) = make_float2(sums[g][2], sums[g][3]);
    }
}

// Everything up to the sums of batch ``batch`` in shared memory and the barrier behind them. → where they are
template <int K, int K_WARPS>
__device__ __forceinline__ const float* batch_sums(const Machine m, Stream& stream, u32 flags, u32 input, u32 epoch,
                                                   int batch, int n_mine) {
    const u32 n_rows = m.misc().state.n_rows;
    Sums sums = {};
    if (K == WIDTH) {
        if (batch == 0) {
            load_rows(m, n_rows, flags, input, epoch);
            __syncthreads();
        }
        const unsigned char* slice = m.x() + m.warp() % K_WARPS * Shape<K, K_WARPS>::SLICE * 2;
        multiply<K, K_WARPS>(m, stream, sums, n_rows, slice, batch * BATCH_GRANULES, n_mine);
    } else {
        multiply_published<K, K_WARPS>(m, stream, sums, n_rows, input, epoch, batch * BATCH_GRANULES, n_mine);
        if (batch == 0) __syncthreads();  // the last phase's sums have been read
    }
    if (K == WIDTH && batch == 0 && (flags & FLAG_NORM)) finish_norm<K_WARPS>(m, n_rows, m.misc().tasks[m.phase]);
    float* to = m.sums() + (n_rows <= 8 ? (batch & 1) * (BATCH_GRANULES * N_WARPS * 8 * GRANULE_ROWS) : 0);
    if (n_rows > 8 && batch != 0) __syncthreads();  // one buffer only: the last batch's readers come first
#pragma unroll
    for (int g = 0; g < BATCH_GRANULES; g++)
#pragma unroll
        for (int i = 0; i < 4; i++) sums[0][g][i] += sums[1][g][i];
    leave_sums(m, to, sums[0], n_rows);
    __syncthreads();
    return to;
}

// Where granule ``in_batch`` of a batch was summed: the first warp's sums of it.
template <int K_WARPS>
__device__ __forceinline__ const float* granule_sums(const float* sums, u32 n_rows, u32 in_batch, u32 first_group) {
    constexpr u32 GROUPS = N_WARPS / K_WARPS;
    const u32 turn = in_batch / GROUPS, group = (first_group + in_batch) % GROUPS;
    return sums + (turn * N_WARPS + group * K_WARPS) * sum_rows(n_rows) * GRANULE_ROWS;
}

// How many of an SM's granules are this warp's group's.
template <int K_WARPS>
__device__ __forceinline__ int granules_of_group(const Machine m, const u32* task) {
    constexpr int GROUPS = N_WARPS / K_WARPS;
    int turn = ((int)(m.warp() / K_WARPS) - (int)task[TASK_FIRST_GROUP] + GROUPS) % GROUPS;
    return ((int)task[TASK_N_GRANULES] - turn + GROUPS - 1) / GROUPS;
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
        const u32 row = i / n, element = (i % n) * 4;
        *(float4*)&m.misc().residual[row][element] = embedding(m, row, owner[TASK_FIRST_GRANULE] * GRANULE_ROWS + element);
    }
}

// Two neighbouring outputs of one row of a batch, which one thread makes. What does not need the sums is found before
// they are there.
struct Output {
    bool is_one;
    u32 row, sums_at;  // where its first warp's sums are, in floats
    float4 aux;        // row sum, bias, row sum, bias
    float2* residual;
    u64* to;
};

template <int K_WARPS>
__device__ __forceinline__ Output output_of(const Machine m, u32 index, const u32* task, u32 first, u32 n_rows) {
    constexpr u32 GROUPS = N_WARPS / K_WARPS, BATCH = BATCH_GRANULES * GROUPS;
    const u32 pair = index & 3, in_batch = (index >> 2) % BATCH, granule = first + in_batch;
    Output out = {};  // all of it, also where it is none: README.md, What binds
    out.row = (index >> 2) / BATCH;
    out.is_one = out.row < n_rows && granule < task[TASK_N_GRANULES];
    if (!out.is_one) return out;
    const u32 turn = in_batch / GROUPS, group = (task[TASK_FIRST_GROUP] + in_batch) % GROUPS;
    out.sums_at = ((turn * N_WARPS + group * K_WARPS) * sum_rows(n_rows) + out.row) * GRANULE_ROWS + pair * 2;
    out.aux = *(const float4*)(aux_of(m, task[TASK_AUX] + granule) + pair * 2);
    out.residual = (float2*)&m.misc().residual[out.row][granule * GRANULE_ROWS + pair * 2];
    out.to = words(m) + m.field(PHASE_OUTPUT) + out.row * (m.field(PHASE_N) / 2) +
             (task[TASK_FIRST_GRANULE] + granule) * (GRANULE_ROWS / 2) + pair;
    return out;
}

// The sums over the warps in order, then the epilogue.
template <int K, int K_WARPS>
__device__ __forceinline__ void publish_output(const Machine m, const Output& out, const float* sums, u32 n_rows,
                                               u32 flags, u32 epoch) {
    const u32 stride = sum_rows(n_rows) * GRANULE_ROWS;
    float2 y = *(const float2*)(sums + out.sums_at);
#pragma unroll
    for (int w = 1; w < K_WARPS; w++) {
        const float2 more = *(const float2*)(sums + out.sums_at + w * stride);
        y.x += more.x;
        y.y += more.y;
    }
    if (K == WIDTH && (flags & FLAG_NORM)) {
        const float2 norm = m.misc().norm[m.phase & 1][out.row];
        y.x = (y.x - norm.x * out.aux.x) * norm.y;
        y.y = (y.y - norm.x * out.aux.z) * norm.y;
    }
    y.x += out.aux.y;
    y.y += out.aux.w;
    if (flags & FLAG_GELU) y = make_float2(gelu(y.x), gelu(y.y));
    if (flags & FLAG_RESIDUAL) {
        y.x += out.residual->x;
        y.y += out.residual->y;
        *out.residual = y;
    }
    const u32 step = TARGET_ROWS * m.field(PHASE_N) / 2, payload = pack_bf16(y.x, y.y);
#pragma unroll
    for (int replica = 0; replica < N_REPLICAS; replica++) publish(out.to + replica * step, payload, epoch);
}

// A call of its own, as are COMBINE and SELECT: measured, inlined they cost the other bodies more registers.
template <int K, int K_WARPS>
__device__ __noinline__ void linear(const Machine m) {
    constexpr u32 BATCH = BATCH_GRANULES * N_WARPS / K_WARPS;
    const u32* task = m.misc().tasks[m.phase];
    const u32 flags = m.field(PHASE_FLAGS), input = m.field(PHASE_INPUT), n_rows = m.misc().state.n_rows;
    const u32 input_epoch = m.epoch + m.field(PHASE_INPUT_EPOCH), epoch = m.epoch + m.field(PHASE_EPOCH);
    const int n_mine = granules_of_group<K_WARPS>(m, task);
    Stream stream(m);
#pragma unroll 1
    for (u32 first = 0; first < task[TASK_N_GRANULES]; first += BATCH) {
        const Output out = output_of<K_WARPS>(m, m.thread(), task, first, n_rows);
        const float* sums = batch_sums<K, K_WARPS>(m, stream, flags, input, input_epoch, first / BATCH, n_mine);
        if (m.misc().dead) continue;
        if (out.is_one) publish_output<K, K_WARPS>(m, out, sums, n_rows, flags, epoch);
        for (u32 i = m.thread() + N_THREADS; i < n_rows * BATCH * 4; i += N_THREADS) {  // narrow models only
            const Output more = output_of<K_WARPS>(m, i, task, first, n_rows);
            if (more.is_one) publish_output<K, K_WARPS>(m, more, sums, n_rows, flags, epoch);
        }
    }
    stream.leave(m);
}
