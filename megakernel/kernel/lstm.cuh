// LSTM, RECUR and the LINEAR between them and the joint: rows of all slots times granules of a weight that lies in
// shared memory. The product of what comes next with the recurrent weight is made by RECUR while the LSTM's own result
// is on its way, and stays with the cells on the SM that has the unit.
//
// K_WARPS warps share a granule's K; the groups of K_WARPS warps take the SM's granules in turn, BATCH_GRANULES at a
// time, and a fixed-order sum over the warps of a group ends each batch. Row i is slot i. A lane waits for the very
// words that are its registers of the matrix instruction: of row lane / 4 eight elements of each tile.
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
};

// This SM's part of a phase, in registers: what would be looked up in every step otherwise.
struct Own {
    u32 n, first;  // granules
    u32 aux;       // of the first granule
    u32 group;     // of warps, that takes the first granule
    u32 n_mine;    // granules of this warp's group
    u32 tile;      // of the warp's part of the tape, the phase's first
};

#define ROWS 8  // of the matrix instruction's 16
static_assert(MAX_SLOTS <= ROWS && TARGET_ROWS <= ROWS, "a slot or a frame has no row");
static_assert(2 * BATCH_GRANULES * N_WARPS * ROWS * GRANULE_ROWS * 4 <= SUMS_BYTES, "two phases' sums");

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

#define SLICE_TILES (WIDTH / K_WARPS_OF_WIDTH / TILE_K)  // of a row that a warp has

struct Slice {  // a lane's part of its warp's part of the rows
    uint4 tile[SLICE_TILES];
};

typedef float Sums[BATCH_GRANULES][2][4];  // two chains, so that a product need not wait for the last one

// One warp's slice of K for N of its granules, whose tiles of one place in the slice lie beside each other.
template <int N>
__device__ __forceinline__ void multiply_granules(const Machine m, const Slice& x, Sums& sums, u32 first_tile) {
#pragma unroll
    for (int t = 0; t < SLICE_TILES; t++)
#pragma unroll
        for (int g = 0; g < N; g++) {
            const uint4 w = tile(m, first_tile + t * N + g);
            mma(sums[g][0], x.tile[t].x, 0, x.tile[t].y, 0, w.x, w.y);
            mma(sums[g][1], x.tile[t].z, 0, x.tile[t].w, 0, w.z, w.w);
        }
}

// Where a phase's sums lie: two phases in a row have different places.
__device__ __forceinline__ float* sums_at(const Machine m, u32 phase) {
    return m.sums() + (phase & 1) * (BATCH_GRANULES * N_WARPS * ROWS * GRANULE_ROWS);
}

// The sums of batch ``batch`` in shared memory, [granule of the group][warp][row][8], and the barrier behind. ``last``:
// the phase before that has left sums.
template <int P>
__device__ __forceinline__ const float* batch_sums(const Machine m, const Own& own, const Slice& x, u32 batch, u32& last) {
    static_assert(At<P>::K == WIDTH && At<P>::K_WARPS == K_WARPS_OF_WIDTH, "all rows are of one width");
    const u32 before = batch * BATCH_GRANULES, first = own.tile + before * SLICE_TILES;
    const u32 n = own.n_mine > before ? min(own.n_mine - before, (u32)BATCH_GRANULES) : 0;
    Sums sums = {};
    static_assert(BATCH_GRANULES == 4, "a case is missing");
    if (n == 1) multiply_granules<1>(m, x, sums, first);
    if (n == 2) multiply_granules<2>(m, x, sums, first);
    if (n == 3) multiply_granules<3>(m, x, sums, first);
    if (n == 4) multiply_granules<4>(m, x, sums, first);
    if ((last ^ P) % 2 == 0) __syncthreads();  // nobody reads there any more
    last = P;
    float* to = sums_at(m, P) + (m.warp() * ROWS + (m.lane() >> 2)) * GRANULE_ROWS + (m.lane() & 3) * 2;
#pragma unroll
    for (int g = 0; g < BATCH_GRANULES; g++)
        if (g < n)
            *(float2*)(to + g * N_WARPS * ROWS * GRANULE_ROWS) =
                make_float2(sums[g][0][0] + sums[g][1][0], sums[g][0][1] + sums[g][1][1]);
    __syncthreads();
    return sums_at(m, P);
}

// Where granule ``in_batch`` of a batch was summed: its group's first warp's sums of ``row``.
template <int P>
__device__ __forceinline__ const float* sums_of(const Own& own, const float* sums, u32 in_batch, u32 row) {
    const u32 group = (own.group + in_batch) % At<P>::GROUPS;
    return sums + ((in_batch / At<P>::GROUPS * N_WARPS + group * At<P>::K_WARPS) * ROWS + row) * GRANULE_ROWS;
}

template <int P>
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

template <int P>
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
#define NO_PHASE (N_PHASES + N_PHASES % 2)  // even: before a step's first sums, which are phase 1's, nobody reads

// With more, one word is watched until it comes: all SMs looking at all words of all rows again and again fill the way to
// memory that those who write need as well.
#define FEW_SLOTS 2

// A lane's pairs of words, two for each of its tiles: asked for together until all carry the epoch. Lanes for which
// ``waits`` is false have zeros.
__device__ __forceinline__ void take_slice(const Machine m, const u64* row, bool waits, u32 epoch, Slice& x) {
    const u64* from = row + (m.warp() % K_WARPS_OF_WIDTH) * (SLICE_TILES * TILE_K / 2) + (m.lane() & 3) * 4;
    Pair pairs[SLICE_TILES][2] = {};
    Wait wait;
    if (m.misc().state.n_active > FEW_SLOTS && waits) {
        Pair first = peek_pair(from);
        while ((first.first_epoch != epoch || first.second_epoch != epoch) && !wait.is_over(m)) first = peek_pair(from);
    }
    bool is_missing = waits;
    while (is_missing) {
        is_missing = false;
#pragma unroll
        for (int t = 0; t < SLICE_TILES; t++)
#pragma unroll
            for (int half = 0; half < 2; half++) pairs[t][half] = peek_pair(from + t * (TILE_K / 2) + half * 2);
#pragma unroll
        for (int t = 0; t < SLICE_TILES; t++)
#pragma unroll
            for (int half = 0; half < 2; half++)
                is_missing |= pairs[t][half].first_epoch != epoch || pairs[t][half].second_epoch != epoch;
        if (is_missing && wait.is_over(m)) break;
    }
#pragma unroll
    for (int t = 0; t < SLICE_TILES; t++)
        x.tile[t] = make_uint4(pairs[t][0].first, pairs[t][0].second, pairs[t][1].first, pairs[t][1].second);
    __syncwarp();
}

// What a warp has and has left so far in a step.
struct Progress {
    u32 loaded;  // whose rows the slice is of: INPUT of its readers
    u32 last;    // phase that has left sums
    Slice x;
};

// The rows of the stepping slots, unless they are there.
template <int P>
__device__ __forceinline__ void load_outputs(const Machine m, u32 stepping, Progress& progress) {
    if (progress.loaded == At<P>::INPUT) return;
    progress.loaded = At<P>::INPUT;
    const u32 slot = m.lane() >> 2;
    take_slice(m, row_words(m, At<P>::INPUT, WIDTH, slot), stepping >> slot & 1, m.epoch + At<P>::INPUT_EPOCH, progress.x);
}

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
__device__ __forceinline__ float fast_tanh(float x) { return 1.0f - __fdividef(2.0f, __expf(2.0f * x) + 1.0f); }

__device__ __forceinline__ float* lstm_state(const Machine m, Parameter which, u32 seat, u32 layer, u32 unit) {
    return m.at<float>(which) + ((seat * N_LAYERS + layer) * 2) * WIDTH + unit;
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
            const float* from = slot.resumes ? lstm_state(m, PARAMETER_STATE_OUT, slot.state_seat, LAYER, unit)
                                             : lstm_state(m, PARAMETER_STATE_IN, slot.seat, LAYER, unit);
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
    float* to = lstm_state(m, PARAMETER_STATE_OUT, m.misc().state.slots[slot_index].seat, LAYER, unit);
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
__device__ __forceinline__ void lstm(const Machine m, const Own& own, u32 stepping, Progress& progress) {
    load_outputs<P>(m, stepping, progress);
    constexpr u32 ITEMS = At<P>::BATCH * MAX_SLOTS * GRANULE_UNITS;
    static_assert(ITEMS <= N_THREADS && ITEMS % 32 == 0, "a unit of a slot is a thread's");
    const u32 which = m.thread() % GRANULE_UNITS, in_batch = m.thread() / GRANULE_UNITS % At<P>::BATCH;
    const u32 slot_index = m.thread() / GRANULE_UNITS / At<P>::BATCH;
#pragma unroll 1
    for (u32 first = 0; first < own.n; first += At<P>::BATCH) {
        const float* sums = batch_sums<P>(m, own, progress.x, first / At<P>::BATCH, progress.last);
        const bool is_alive = m.misc().dead == 0;
        const u32 granule = first + in_batch;
        const bool is_one = m.thread() < ITEMS && granule < own.n && (stepping >> slot_index & 1);
        if (!__any_sync(0xffffffffu, is_one)) continue;
        float4 gates = make_float4(0, 0, 0, 0);
        if (is_one) {
            gates = sum_four<P>(sums_of<P>(own, sums, in_batch, slot_index) + which * GATES);
            if (!m.misc().state.slots[slot_index].is_new)
                gates = plus(gates, *(const float4*)&m.misc().kept[At<P>::LAYER][granule][slot_index][which * GATES]);
            gates = plus(gates, *(const float4*)&m.misc().bias[(own.aux + granule) * GRANULE_ROWS + which * GATES]);
        }
        step_cell<P>(m, own, is_one, is_alive, slot_index, granule, which, gates);
    }
}

// Two neighbouring outputs of one slot for each thread of a batch.
template <int P, class Epilogue>
__device__ __forceinline__ void each_pair(const Machine m, const Own& own, u32 stepping, Progress& progress, Epilogue epilogue) {
    load_outputs<P>(m, stepping, progress);
    static_assert(At<P>::BATCH * MAX_SLOTS * 4 <= N_THREADS, "a pair of a slot is a thread's");
    const u32 pair = m.thread() & 3, in_batch = (m.thread() >> 2) % At<P>::BATCH, slot = (m.thread() >> 2) / At<P>::BATCH;
#pragma unroll 1
    for (u32 first = 0; first < own.n; first += At<P>::BATCH) {
        const float* sums = batch_sums<P>(m, own, progress.x, first / At<P>::BATCH, progress.last);
        const u32 granule = first + in_batch;
        if (granule < own.n && slot < MAX_SLOTS && (stepping >> slot & 1))
            epilogue(slot, granule, pair, sum_pair<P>(sums_of<P>(own, sums, in_batch, slot) + pair * 2));
    }
}

template <int P>
__device__ __forceinline__ void recur(const Machine m, const Own& own, u32 stepping, Progress& progress) {
    each_pair<P>(m, own, stepping, progress, [&](u32 slot, u32 granule, u32 pair, float2 y) {
        *(float2*)&m.misc().kept[At<P>::LAYER][granule][slot][pair * 2] = y;
    });
}

template <int P>
__device__ __forceinline__ void predict(const Machine m, const Own& own, u32 stepping, Progress& progress) {
    each_pair<P>(m, own, stepping, progress, [&](u32 slot, u32 granule, u32 pair, float2 y) {
        if (m.misc().dead) return;
        const float2 bias = *(const float2*)&m.misc().bias[(own.aux + granule) * GRANULE_ROWS + pair * 2];
        publish_row(m, At<P>::OUTPUT, At<P>::N, slot, (own.first + granule) * (GRANULE_ROWS / 2) + pair,
                    pack_bf16(y.x + bias.x, y.y + bias.y), m.epoch + At<P>::EPOCH);
    });
}
