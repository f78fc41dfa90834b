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

// This SM's part of a phase, in registers: what would be looked up in every step otherwise.
struct Own {
    u32 n, first;  // granules
    u32 aux;       // of the first granule
    u32 group;     // of warps, that takes the first granule
    u32 n_mine;    // granules of this warp's group
    u32 tile;      // of the warp's part of the tape, the phase's first
};

#define PREDICTOR_ROWS 8
static_assert(MAX_SLOTS <= PREDICTOR_ROWS, "a slot has no row");
static_assert(2 * BATCH_GRANULES * N_WARPS * PREDICTOR_ROWS * GRANULE_ROWS * 4 <= SUMS_BYTES, "two phases' sums");

// ---------------------------------------------------------------------- the tape

// This lane's part of its warp's tile ``index``.
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

// The sums of batch ``batch`` in shared memory, [granule of the group][warp][row of ROWS][8], and the barrier behind.
template <int P, int ROWS, bool HIGH>
__device__ __forceinline__ void batch_sums(const Machine m, const Own& own, float* to, u32 batch) {
    const u32 before = batch * BATCH_GRANULES, first = own.tile + before * At<P>::TILES;
    const u32 n = own.n_mine > before ? min(own.n_mine - before, (u32)BATCH_GRANULES) : 0;
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
__device__ __forceinline__ const float* sums_of(const Own& own, const float* sums, u32 in_batch, u32 row) {
    const u32 group = (own.group + in_batch) % At<P>::GROUPS;
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

// ---------------------------------------------------------------------- the predictor's rows

#define NO_INPUT 0xffffffffu

// The rows of the stepping slots into shared memory, unless they are there: ``loaded`` says what is. Slot i is warp i's,
// each of whose lanes asks for all its words at once. → whether they came
template <int P>
__device__ __forceinline__ bool load_outputs(const Machine m, u32 stepping, u32& loaded) {
    if (loaded != At<P>::INPUT) {
        loaded = At<P>::INPUT;
        constexpr u32 PAIRS = At<P>::K / 4, PER_LANE = (PAIRS + 31) / 32;  // pairs of words, four elements
        static_assert(MAX_SLOTS <= N_WARPS, "a slot is a warp's");
        if (stepping >> m.warp() & 1) {
            const u32 epoch = m.epoch + At<P>::INPUT_EPOCH;
            const u64* from = row_words(m, At<P>::INPUT, At<P>::K, m.warp()) + m.lane() * 2;
            unsigned char* to = m.x() + m.warp() * At<P>::STRIDE + m.lane() * 8;
            Pair pairs[PER_LANE];
            Wait wait;
            bool is_missing = true;
            while (is_missing) {
                is_missing = false;
#pragma unroll
                for (u32 i = 0; i < PER_LANE; i++)
                    if (PAIRS % 32 == 0 || m.lane() + 32 * i < PAIRS) pairs[i] = peek_pair(from + 64 * i);
#pragma unroll
                for (u32 i = 0; i < PER_LANE; i++)
                    if (PAIRS % 32 == 0 || m.lane() + 32 * i < PAIRS)
                        is_missing |= pairs[i].first_epoch != epoch || pairs[i].second_epoch != epoch;
                if (is_missing && wait.is_over(m)) break;
            }
#pragma unroll
            for (u32 i = 0; i < PER_LANE; i++)
                if (PAIRS % 32 == 0 || m.lane() + 32 * i < PAIRS)
                    *(uint2*)(to + 256 * i) = make_uint2(pairs[i].first, pairs[i].second);
        }
        __syncthreads();
    }
    return m.misc().dead == 0;
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
__device__ __forceinline__ void step_cell(const Machine m, const Own& own, bool is_one, bool is_alive, u32 slot_index,
                                          u32 granule, u32 which, float4 gates) {
    constexpr u32 LAYER = At<P>::LAYER;
    float output = 0;
    const u32 unit = (own.first + granule) * GRANULE_UNITS + which;
    if (is_one) {
        const FrameSlot& slot = m.misc().state.slots[slot_index];
        float& cell = m.misc().cells[LAYER][granule][slot_index][which];
        float after;
        if (slot.is_restored()) {
            const float* from = lstm_state(m, slot.resumes ? PARAMETER_STATE_OUT : PARAMETER_STATE_IN, slot_index, LAYER, unit);
            output = __ldcg(from);
            after = __ldcg(from + WIDTH);
        } else {
            const float before = slot.is_new ? 0.0f : cell;
            after = sigmoid(gates.y) * before + sigmoid(gates.x) * fast_tanh(gates.z);
            output = sigmoid(gates.w) * fast_tanh(after);
        }
        cell = after;
        gates.x = after;
    }
    const float other = __shfl_xor_sync(0xffffffffu, output, 1);
    if (!is_one) return;
    const u32 payload = which ? pack_bf16(other, output) : pack_bf16(output, other);
    u64* p = words(m) + At<P>::OUTPUT + slot_index * (At<P>::N / GATES / 2) + own.first + granule;
    static_assert(GRANULE_UNITS == 2 && N_REPLICAS % 2 == 0, "each of two units writes half of the replicas");
    if (is_alive)
#pragma unroll
        for (u32 replica = 0; replica < N_REPLICAS; replica += 2)
            publish(p + (replica + which) * (TARGET_ROWS * At<P>::N / GATES / 2), payload, m.epoch + At<P>::EPOCH);
    float* to = lstm_state(m, PARAMETER_STATE_OUT, slot_index, LAYER, unit);
    __stcg(to, which ? high_bf16(payload) : low_bf16(payload));
    __stcg(to + WIDTH, gates.x);
}

__device__ __forceinline__ float4 plus(float4 a, float4 b) { return make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w); }

// Where a table's row has what this lane's unit of the layer behind the lookup needs; of its granules the lane-th half.
template <int P>
__device__ __forceinline__ const float4* table_entry(const Machine m, const Own& own, u32 token, u32 index) {
    return m.at<const float4>(PARAMETER_TABLE) + (u64)token * (At<P>::N / GATES) + own.first * GRANULE_UNITS + index;
}

// The layer behind the lookup: its input's product is a row of a table, which TRANSDUCE has asked for. Slot i is warp i's.
template <int P>
__device__ __forceinline__ void lstm_of_table(const Machine m, const Own& own, u32 stepping) {
    if (!(stepping >> m.warp() & 1)) return;
    const u32 slot_index = m.warp(), n_units = own.n * GRANULE_UNITS;
    const FrameSlot& slot = m.misc().state.slots[slot_index];
    const bool is_alive = m.misc().dead == 0;
#pragma unroll 1
    for (u32 first = 0; first < n_units; first += 32) {
        const u32 index = first + m.lane(), granule = index / GRANULE_UNITS, which = index % GRANULE_UNITS;
        const bool is_one = index < n_units;
        float4 gates = make_float4(0, 0, 0, 0);
        if (is_one && !slot.is_restored()) {
            gates = first == 0 && slot.row != NO_ROW ? m.misc().entries[slot.row][m.lane()]
                                                     : __ldg(table_entry<P>(m, own, slot.token, index));
            if (!slot.is_new) gates = plus(gates, *(const float4*)&m.misc().kept[At<P>::LAYER][granule][slot_index][which * GATES]);
        }
        step_cell<P>(m, own, is_one, is_alive, slot_index, granule, which, gates);
    }
}

template <int P>
__device__ __forceinline__ void lstm(const Machine m, const Own& own, u32 stepping, u32& loaded) {
    const bool is_alive = load_outputs<P>(m, stepping, loaded);
    constexpr u32 ITEMS = At<P>::BATCH * MAX_SLOTS * GRANULE_UNITS;
    static_assert(ITEMS <= N_THREADS && ITEMS % 32 == 0, "a unit of a slot is a thread's");
    const u32 which = m.thread() % GRANULE_UNITS, in_batch = m.thread() / GRANULE_UNITS % At<P>::BATCH;
    const u32 slot_index = m.thread() / GRANULE_UNITS / At<P>::BATCH;
#pragma unroll 1
    for (u32 first = 0; first < own.n; first += At<P>::BATCH) {
        float* sums = predictor_sums(m, P);
        if (first != 0) __syncthreads();
        batch_sums<P, PREDICTOR_ROWS, false>(m, own, sums, first / At<P>::BATCH);
        const u32 granule = first + in_batch;
        const bool is_one = m.thread() < ITEMS && granule < own.n && (stepping >> slot_index & 1);
        if (!__any_sync(0xffffffffu, is_one)) continue;
        float4 gates = make_float4(0, 0, 0, 0);
        if (is_one) {
            gates = sum_four<P, PREDICTOR_ROWS>(sums_of<P, PREDICTOR_ROWS>(own, sums, in_batch, slot_index) + which * GATES);
            if (!m.misc().state.slots[slot_index].is_new)
                gates = plus(gates, *(const float4*)&m.misc().kept[At<P>::LAYER][granule][slot_index][which * GATES]);
            gates = plus(gates, *(const float4*)&m.misc().bias[(own.aux + granule) * GRANULE_ROWS + which * GATES]);
        }
        step_cell<P>(m, own, is_one, is_alive, slot_index, granule, which, gates);
    }
}

// Two neighbouring outputs of one slot for each thread of a batch.
template <int P, class Epilogue>
__device__ __forceinline__ void each_pair(const Machine m, const Own& own, u32 stepping, Epilogue epilogue) {
    static_assert(At<P>::BATCH * MAX_SLOTS * 4 <= N_THREADS, "a pair of a slot is a thread's");
    const u32 pair = m.thread() & 3, in_batch = (m.thread() >> 2) % At<P>::BATCH, slot = (m.thread() >> 2) / At<P>::BATCH;
#pragma unroll 1
    for (u32 first = 0; first < own.n; first += At<P>::BATCH) {
        float* sums = predictor_sums(m, P);
        if (first != 0) __syncthreads();
        batch_sums<P, PREDICTOR_ROWS, false>(m, own, sums, first / At<P>::BATCH);
        const u32 granule = first + in_batch;
        if (granule < own.n && slot < MAX_SLOTS && (stepping >> slot & 1))
            epilogue(slot, granule, pair, sum_pair<P, PREDICTOR_ROWS>(sums_of<P, PREDICTOR_ROWS>(own, sums, in_batch, slot) + pair * 2));
    }
}

template <int P>
__device__ __forceinline__ void recur(const Machine m, const Own& own, u32 stepping, u32& loaded) {
    load_outputs<P>(m, stepping, loaded);
    each_pair<P>(m, own, stepping, [&](u32 slot, u32 granule, u32 pair, float2 y) {
        *(float2*)&m.misc().kept[At<P>::LAYER][granule][slot][pair * 2] = y;
    });
}

template <int P>
__device__ __forceinline__ void predict(const Machine m, const Own& own, u32 stepping, u32& loaded) {
    const bool is_alive = load_outputs<P>(m, stepping, loaded);
    each_pair<P>(m, own, stepping, [&](u32 slot, u32 granule, u32 pair, float2 y) {
        if (!is_alive) return;
        const float2 bias = *(const float2*)&m.misc().bias[(own.aux + granule) * GRANULE_ROWS + pair * 2];
        publish_row(m, At<P>::OUTPUT, At<P>::N, slot, (own.first + granule) * (GRANULE_ROWS / 2) + pair,
                    pack_bf16(y.x + bias.x, y.y + bias.y), m.epoch + At<P>::EPOCH);
    });
}
