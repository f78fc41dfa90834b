// LSTM, RECUR and the LINEAR between them and the joint: rows of all slots times granules of a weight that lies in
// shared memory. The product of what comes next with the recurrent weight is made by RECUR while the LSTM's own result
// is on its way, and stays with the cells on the SM that has the unit.
//
// K_WARPS warps share a granule's K; the groups of K_WARPS warps take the SM's granules in turn, BATCH_GRANULES at a
// time, and a fixed-order sum over the warps of a group ends each batch. Row i is slot i.
#pragma once

#include "exchange.cuh"

template <int P>
struct At {  // the words of phase P
    static constexpr u32 OP_ = PHASE[P][PHASE_OP], K = PHASE[P][PHASE_K], N = PHASE[P][PHASE_N];
    static constexpr u32 K_WARPS = PHASE[P][PHASE_K_WARPS] ? PHASE[P][PHASE_K_WARPS] : 1, LAYER = PHASE[P][PHASE_LAYER];
    static constexpr u32 INPUT = PHASE[P][PHASE_INPUT], INPUT_EPOCH = PHASE[P][PHASE_INPUT_EPOCH];
    static constexpr u32 OUTPUT = PHASE[P][PHASE_OUTPUT], EPOCH = PHASE[P][PHASE_EPOCH];
    static constexpr u32 PARTIAL = PHASE[P][PHASE_PARTIAL];
    static constexpr u32 GROUPS = N_WARPS / K_WARPS, BATCH = BATCH_GRANULES * GROUPS;
    static constexpr u32 TILES = K / K_WARPS / TILE_K;  // of a warp's slice
    static constexpr u32 STRIDE = K * 2 + X_ROW_PAD_BYTES;
};

#define PREDICTOR_ROWS 8
static_assert(MAX_SLOTS <= PREDICTOR_ROWS, "a slot has no row");
static_assert(2 * BATCH_GRANULES * N_WARPS * PREDICTOR_ROWS * GRANULE_ROWS * 4 <= SUMS_BYTES, "two phases' sums");

// ---------------------------------------------------------------------- the tape

// This lane's part of tile ``index`` of its warp's.
__device__ __forceinline__ uint4 tile(const Machine m, u32 index) {
#if !IS_RESIDENT
    if (index >= RING_TILES) {
        const u32 first = __ldg(m.at<const u32>(PARAMETER_WARP_TILES) + (m.sm() * N_WARPS + m.warp()) * 2);
        return __ldg((const uint4*)(m.at<const char>(PARAMETER_TAPE) + (u64)(first + index) * TILE_BYTES) + m.lane());
    }
#endif
    return ((const uint4*)(shared + (m.warp() * RING_TILES + index) * TILE_BYTES))[m.lane()];
}

__device__ __forceinline__ void load_tape(const Machine m) {
    const u32* part = m.at<const u32>(PARAMETER_WARP_TILES) + (m.sm() * N_WARPS + m.warp()) * 2;
    const char* from = m.at<const char>(PARAMETER_TAPE) + (u64)__ldg(part) * TILE_BYTES + m.lane() * 16;
    const u32 to = shared_address(shared) + m.warp() * RING_TILES * TILE_BYTES + m.lane() * 16;
    const u32 n = min(__ldg(part + 1), (u32)RING_TILES);
    for (u32 i = 0; i < n; i++)
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to + i * TILE_BYTES),
                     "l"(from + i * TILE_BYTES)
                     : "memory");
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncwarp();
}

// ---------------------------------------------------------------------- products

typedef float Sums[BATCH_GRANULES][2][4];  // two chains, so that a product need not wait for the last one

// One warp's slice of K for N of its granules, whose tiles of one place in the slice lie beside each other.
template <int P, int N, bool HIGH>
__device__ __forceinline__ void multiply_granules(const Machine m, Sums& sums, u32 first_tile) {
    const unsigned char* low = m.x() + (m.lane() >> 2) * At<P>::STRIDE + (m.lane() & 3) * 16 +
                               (m.warp() % At<P>::K_WARPS) * At<P>::TILES * TILE_K * 2;
#pragma unroll 5
    for (int t = 0; t < (int)At<P>::TILES; t++) {
        const uint4 a = *(const uint4*)(low + t * TILE_K * 2);
        uint4 b = make_uint4(0, 0, 0, 0);
        if (HIGH) b = *(const uint4*)(low + 8 * At<P>::STRIDE + t * TILE_K * 2);
#pragma unroll
        for (int g = 0; g < N; g++) {
            const uint4 w = tile(m, first_tile + t * N + g);
            mma(sums[g][0], a.x, b.x, a.y, b.y, w.x, w.y);
            mma(sums[g][1], a.z, b.z, a.w, b.w, w.z, w.w);
        }
    }
}

template <int P>
__device__ __forceinline__ u32 granules_of_group(const Machine m) {
    const u32* task = m.misc().tasks[P];
    const u32 turn = (m.warp() / At<P>::K_WARPS + At<P>::GROUPS - task[TASK_FIRST_GROUP]) % At<P>::GROUPS;
    return (task[TASK_N_GRANULES] + At<P>::GROUPS - 1 - turn) / At<P>::GROUPS;
}

// The sums of batch ``batch`` in shared memory, [granule of the group][warp][row of ROWS][8], and the barrier behind.
template <int P, int ROWS, bool HIGH>
__device__ __forceinline__ void batch_sums(const Machine m, float* to, u32 batch) {
    const u32 n_mine = granules_of_group<P>(m), before = batch * BATCH_GRANULES;
    const u32 first = m.misc().first_tile[P][m.warp()] + before * At<P>::TILES;
    const u32 n = n_mine > before ? min(n_mine - before, (u32)BATCH_GRANULES) : 0;
    Sums sums = {};
    static_assert(BATCH_GRANULES == 4, "a case is missing");
    if (n == 1) multiply_granules<P, 1, HIGH>(m, sums, first);
    if (n == 2) multiply_granules<P, 2, HIGH>(m, sums, first);
    if (n == 3) multiply_granules<P, 3, HIGH>(m, sums, first);
    if (n == 4) multiply_granules<P, 4, HIGH>(m, sums, first);
    const u32 row = m.lane() >> 2, column = (m.lane() & 3) * 2;
#pragma unroll
    for (int g = 0; g < BATCH_GRANULES; g++) {
        if (g >= n) break;
        float* at = to + ((g * N_WARPS + m.warp()) * ROWS + row) * GRANULE_ROWS + column;
        *(float2*)at = make_float2(sums[g][0][0] + sums[g][1][0], sums[g][0][1] + sums[g][1][1]);
        if (ROWS > 8)
            *(float2*)(at + 8 * GRANULE_ROWS) = make_float2(sums[g][0][2] + sums[g][1][2], sums[g][0][3] + sums[g][1][3]);
    }
    __syncthreads();
}

// Where granule ``in_batch`` of a batch was summed: its group's first warp's sums of ``row``.
template <int P, int ROWS>
__device__ __forceinline__ const float* sums_of(const Machine m, const float* sums, u32 in_batch, u32 row) {
    const u32 group = (m.misc().tasks[P][TASK_FIRST_GROUP] + in_batch) % At<P>::GROUPS;
    return sums + ((in_batch / At<P>::GROUPS * N_WARPS + group * At<P>::K_WARPS) * ROWS + row) * GRANULE_ROWS;
}

template <int P, int ROWS>
__device__ __forceinline__ float2 sum_pair(const float* at) {
    float2 y = *(const float2*)at;
#pragma unroll
    for (int w = 1; w < (int)At<P>::K_WARPS; w++) {
        const float2 more = *(const float2*)(at + w * ROWS * GRANULE_ROWS);
        y.x += more.x;
        y.y += more.y;
    }
    return y;
}

template <int P, int ROWS>
__device__ __forceinline__ float4 sum_four(const float* at) {
    float4 y = *(const float4*)at;
#pragma unroll
    for (int w = 1; w < (int)At<P>::K_WARPS; w++) {
        const float4 more = *(const float4*)(at + w * ROWS * GRANULE_ROWS);
        y.x += more.x;
        y.y += more.y;
        y.z += more.z;
        y.w += more.w;
    }
    return y;
}

// ---------------------------------------------------------------------- waiting

// Those of N pairs of words that ``mask`` names, all asked for together until all are there.
template <u32 N, class Where, class Epoch>
__device__ __forceinline__ void take_pairs(const Machine m, u32 mask, Pair (&pairs)[N], Where where, Epoch epoch) {
    Wait wait;
    while (true) {
#pragma unroll
        for (u32 i = 0; i < N; i++)
            if (mask >> i & 1) pairs[i] = peek_pair(where(i));
#pragma unroll
        for (u32 i = 0; i < N; i++)
            if ((mask >> i & 1) && pairs[i].first_epoch == epoch(i) && pairs[i].second_epoch == epoch(i)) mask &= ~(1u << i);
        if (mask == 0 || wait.is_over(m)) return;
    }
}

// ---------------------------------------------------------------------- the predictor's rows

#define NO_INPUT 0xffffffffu

// The rows of the stepping slots into shared memory, unless they are there: ``loaded`` says what is. A warp takes an
// eighth of the columns, a lane four elements of every row, all asked for at once.
template <int P>
__device__ __forceinline__ void load_outputs(const Machine m, u32& loaded) {
    if (loaded == At<P>::INPUT) return;
    loaded = At<P>::INPUT;
    constexpr u32 LANES = At<P>::K / N_WARPS / 4;
    const u32 stepping = m.misc().state.stepping, epoch = m.epoch + At<P>::INPUT_EPOCH;
#pragma unroll 1
    for (u32 lane = m.lane(); lane < LANES; lane += 32) {
        const u32 element = (m.warp() * LANES + lane) * 4;
        const u64* from = row_words(m, At<P>::INPUT, At<P>::K, 0) + element / 2;
        Pair pairs[MAX_SLOTS];
        take_pairs<MAX_SLOTS>(m, stepping, pairs, [&](u32 slot) { return from + slot * (At<P>::K / 2); }, [&](u32) { return epoch; });
#pragma unroll
        for (u32 slot = 0; slot < MAX_SLOTS; slot++)
            if (stepping >> slot & 1)
                *(uint2*)(m.x() + slot * At<P>::STRIDE + element * 2) = make_uint2(pairs[slot].first, pairs[slot].second);
    }
    __syncthreads();
}

__device__ __forceinline__ float* predictor_sums(const Machine m, u32 phase) {
    return m.sums() + (phase & 1) * (BATCH_GRANULES * N_WARPS * PREDICTOR_ROWS * GRANULE_ROWS);
}

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
__device__ __forceinline__ float fast_tanh(float x) { return 1.0f - __fdividef(2.0f, __expf(2.0f * x) + 1.0f); }

__device__ __forceinline__ float* lstm_state(const Machine m, Parameter which, u32 slot, u32 layer, u32 unit) {
    return m.at<float>(which) + ((slot * N_LAYERS + layer) * 2) * WIDTH + unit;
}

// One unit of one slot: from its gates to its output, which leaves with its neighbour's. All lanes of a warp come here;
// those without a unit have ``is_one`` false.
template <int P>
__device__ __forceinline__ void step_cell(const Machine m, bool is_one, u32 slot_index, u32 granule, u32 which, float4 gates) {
    constexpr u32 LAYER = At<P>::LAYER;
    float output = 0;
    if (is_one) {
        const FrameSlot& slot = m.misc().state.slots[slot_index];
        const u32 unit = (m.misc().tasks[P][TASK_FIRST_GRANULE] + granule) * GRANULE_UNITS + which;
        float& cell = m.misc().cells[LAYER][granule][slot_index][which];
        float after;
        if (slot.resumes || slot.feed == FEED_STATE) {
            const float* from = lstm_state(m, slot.resumes ? PARAMETER_STATE_OUT : PARAMETER_STATE_IN, slot_index, LAYER, unit);
            output = __ldcg(from);
            after = __ldcg(from + WIDTH);
        } else {
            const float before = slot.is_new ? 0.0f : cell;
            after = sigmoid(gates.y) * before + sigmoid(gates.x) * fast_tanh(gates.z);
            output = sigmoid(gates.w) * fast_tanh(after);
        }
        cell = after;
        output = low_bf16(pack_bf16(output, 0.0f));
        float* to = lstm_state(m, PARAMETER_STATE_OUT, slot_index, LAYER, unit);
        __stcg(to, output);
        __stcg(to + WIDTH, after);
    }
    const float other = __shfl_xor_sync(0xffffffffu, output, 1);
    if (!is_one || m.misc().dead) return;
    const u32 payload = which ? pack_bf16(other, output) : pack_bf16(output, other);
    u64* p = words(m) + At<P>::OUTPUT + slot_index * (At<P>::N / GATES / 2) + m.misc().tasks[P][TASK_FIRST_GRANULE] + granule;
    static_assert(GRANULE_UNITS == 2 && N_REPLICAS % 2 == 0, "each of two units writes half of the replicas");
#pragma unroll
    for (u32 replica = 0; replica < N_REPLICAS; replica += 2)
        publish(p + (replica + which) * (TARGET_ROWS * At<P>::N / GATES / 2), payload, m.epoch + At<P>::EPOCH);
}

// The layer behind the lookup: its input's product is a row of a table.
template <int P>
__device__ __forceinline__ void lstm_of_table(const Machine m) {
    const u32 n = m.misc().tasks[P][TASK_N_GRANULES], stepping = m.misc().state.stepping;
    const u32 n_items = n * MAX_SLOTS * GRANULE_UNITS;
#pragma unroll 1
    for (u32 begin = m.warp() * 32; begin < n_items; begin += N_THREADS) {
        const u32 i = begin + m.lane(), which = i % GRANULE_UNITS, granule = i / GRANULE_UNITS % n;
        const u32 slot_index = i / GRANULE_UNITS / n;
        const bool is_one = i < n_items && (stepping >> slot_index & 1);
        float4 gates = make_float4(0, 0, 0, 0);
        if (is_one && m.misc().state.slots[slot_index].feed == FEED_TOKEN) {
            const FrameSlot& slot = m.misc().state.slots[slot_index];
            const u32 unit = (m.misc().tasks[P][TASK_FIRST_GRANULE] + granule) * GRANULE_UNITS + which;
            gates = __ldg(m.at<const float4>(PARAMETER_TABLE) + (u64)slot.token * (At<P>::N / GATES) + unit);
            if (!slot.is_new) {
                const float4 kept = *(const float4*)&m.misc().kept[At<P>::LAYER][granule][slot_index][which * GATES];
                gates = make_float4(gates.x + kept.x, gates.y + kept.y, gates.z + kept.z, gates.w + kept.w);
            }
        }
        step_cell<P>(m, is_one, slot_index, granule, which, gates);
    }
}

template <int P>
__device__ __forceinline__ void lstm(const Machine m, u32& loaded) {
    load_outputs<P>(m, loaded);
    const u32 n = m.misc().tasks[P][TASK_N_GRANULES], stepping = m.misc().state.stepping;
    constexpr u32 ITEMS = At<P>::BATCH * MAX_SLOTS * GRANULE_UNITS;
    static_assert(ITEMS <= N_THREADS && ITEMS % 32 == 0, "a unit of a slot is a thread's");
#pragma unroll 1
    for (u32 first = 0; first < n; first += At<P>::BATCH) {
        float* sums = predictor_sums(m, P);
        if (first != 0) __syncthreads();
        batch_sums<P, PREDICTOR_ROWS, false>(m, sums, first / At<P>::BATCH);
        if (m.thread() >= ITEMS) continue;
        const u32 which = m.thread() % GRANULE_UNITS, in_batch = m.thread() / GRANULE_UNITS % At<P>::BATCH;
        const u32 slot_index = m.thread() / GRANULE_UNITS / At<P>::BATCH, granule = first + in_batch;
        const bool is_one = granule < n && (stepping >> slot_index & 1);
        float4 gates = make_float4(0, 0, 0, 0);
        if (is_one) {
            gates = sum_four<P, PREDICTOR_ROWS>(sums_of<P, PREDICTOR_ROWS>(m, sums, in_batch, slot_index) + which * GATES);
            if (!m.misc().state.slots[slot_index].is_new) {
                const float4 kept = *(const float4*)&m.misc().kept[At<P>::LAYER][granule][slot_index][which * GATES];
                gates = make_float4(gates.x + kept.x, gates.y + kept.y, gates.z + kept.z, gates.w + kept.w);
            }
            const float2* aux = m.misc().aux + (m.misc().tasks[P][TASK_AUX] + granule) * GRANULE_ROWS + which * GATES;
            gates = make_float4(gates.x + aux[0].y, gates.y + aux[1].y, gates.z + aux[2].y, gates.w + aux[3].y);
        }
        step_cell<P>(m, is_one, slot_index, granule, which, gates);
    }
}

// Two neighbouring outputs of one slot for each thread of a batch.
template <int P, class Epilogue>
__device__ __forceinline__ void each_pair(const Machine m, u32& loaded, Epilogue epilogue) {
    load_outputs<P>(m, loaded);
    const u32 n = m.misc().tasks[P][TASK_N_GRANULES], stepping = m.misc().state.stepping;
    static_assert(At<P>::BATCH * MAX_SLOTS * 4 <= N_THREADS, "a pair of a slot is a thread's");
#pragma unroll 1
    for (u32 first = 0; first < n; first += At<P>::BATCH) {
        float* sums = predictor_sums(m, P);
        if (first != 0) __syncthreads();
        batch_sums<P, PREDICTOR_ROWS, false>(m, sums, first / At<P>::BATCH);
        const u32 pair = m.thread() & 3, in_batch = (m.thread() >> 2) % At<P>::BATCH;
        const u32 slot = (m.thread() >> 2) / At<P>::BATCH, granule = first + in_batch;
        if (granule < n && slot < MAX_SLOTS && (stepping >> slot & 1))
            epilogue(slot, granule, pair, sum_pair<P, PREDICTOR_ROWS>(sums_of<P, PREDICTOR_ROWS>(m, sums, in_batch, slot) + pair * 2));
    }
}

template <int P>
__device__ __forceinline__ void recur(const Machine m, u32& loaded) {
    each_pair<P>(m, loaded, [&](u32 slot, u32 granule, u32 pair, float2 y) {
        *(float2*)&m.misc().kept[At<P>::LAYER][granule][slot][pair * 2] = y;
    });
}

template <int P>
__device__ __forceinline__ void predict(const Machine m, u32& loaded) {
    each_pair<P>(m, loaded, [&](u32 slot, u32 granule, u32 pair, float2 y) {
        if (m.misc().dead) return;
        const u32* task = m.misc().tasks[P];
        const float4 aux = *(const float4*)(m.misc().aux + (task[TASK_AUX] + granule) * GRANULE_ROWS + pair * 2);
        publish_row(m, At<P>::OUTPUT, At<P>::N, slot, (task[TASK_FIRST_GRANULE] + granule) * (GRANULE_ROWS / 2) + pair,
                    pack_bf16(y.x + aux.y, y.y + aux.w), m.epoch + At<P>::EPOCH);
    });
}
