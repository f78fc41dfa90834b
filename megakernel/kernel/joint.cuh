// JOINT: frames plus predictions, ReLU, times this SM's tokens and durations. What leaves is each row's best token first,
// as everyone waits for it; the log-sum-exps are for the records alone and follow. A row is a frame of a slot.
#pragma once

#include "lstm.cuh"

__device__ __forceinline__ float relu(float x) {  // what is no number stays none
    float y;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(y) : "f"(x));
    return y;
}

__device__ __forceinline__ u32 joint_pair(u32 frame, u32 predicted) {
    return pack_bf16(relu(low_bf16(frame) + low_bf16(predicted)), relu(high_bf16(frame) + high_bf16(predicted)));
}

// A lane's part of its row of the step: of frame and prediction. Both are asked for before either is used.
template <int P>
__device__ __forceinline__ void load_joint(const Machine m, u32 stepping, Slice& x) {
    const State& state = m.misc().state;
    const u32 row = m.lane() >> 2;
    const bool is_one = row < state.n_rows;
    const uint2 at = is_one ? state.rows[row] : make_uint2(0, 0);
    const u32 slot = at.x % MAX_SLOTS, seat = at.x / MAX_SLOTS;
    const u16* frame = m.at<const u16>(PARAMETER_FRAMES) + (u64)(seat * N_FRAMES + at.y) * WIDTH +
                       (m.warp() % K_WARPS_OF_WIDTH) * (SLICE_TILES * TILE_K) + (m.lane() & 3) * 8;
    Slice own;
#pragma unroll
    for (int t = 0; t < SLICE_TILES; t++)
        own.tile[t] = is_one ? __ldcg((const uint4*)(frame + t * TILE_K)) : make_uint4(0, 0, 0, 0);
    const u32 epoch = stepping >> slot & 1 ? m.epoch + At<P>::INPUT_EPOCH : state.slots[slot].predicted;
    take_slice(m, row_words(m, At<P>::INPUT, WIDTH, slot), is_one, epoch, x);
#pragma unroll
    for (int t = 0; t < SLICE_TILES; t++)
        x.tile[t] = make_uint4(joint_pair(own.tile[t].x, x.tile[t].x), joint_pair(own.tile[t].y, x.tile[t].y),
                               joint_pair(own.tile[t].z, x.tile[t].z), joint_pair(own.tile[t].w, x.tile[t].w));
}

struct LogSum {  // log of a sum of exponentials, as largest term and sum relative to it
    float top = NEGATIVE_INFINITY, sum = 0;

    __device__ __forceinline__ void add(float x) {
        const float both = fmaxf(top, x);
        if (both == NEGATIVE_INFINITY) return;
        sum = sum * __expf(top - both) + __expf(x - both);
        top = both;
    }
};

// Of all lanes, the same on every lane.
__device__ __forceinline__ float over_warp(const LogSum& mine) {
    const float top = largest(mine.top);
    return top == NEGATIVE_INFINITY ? top : top + logf(sum_of(mine.sum * __expf(mine.top - top)));
}

struct Best {  // ties go to the lower token; what is no number is above all
    u32 key = 0, token = 0xffffffffu;
    float logit = NEGATIVE_INFINITY;

    __device__ __forceinline__ void offer(float l, u32 t) {
        const u32 k = ordered(l);
        if (k > key || (k == key && t < token)) {
            key = k;
            logit = l;
            token = t;
        }
    }
};

__device__ __forceinline__ Best over_warp(const Best& mine) {
    Best best;
    best.key = __reduce_max_sync(0xffffffffu, mine.key);
    best.token = __reduce_min_sync(0xffffffffu, mine.key == best.key ? mine.token : 0xffffffffu);
    best.logit = __uint_as_float(best.key ^ (best.key >> 31 ? 0x80000000u : 0xffffffffu));
    return best;
}

// Where SM ``sm`` leaves its best token of a row, two words; and its log-sum-exp, behind which (sm = N_SMS) the row's
// duration lies.
template <int P>
__device__ __forceinline__ u64* best_words(const Machine m, u32 parity, u32 row, u32 sm) {
    return words(m) + At<P>::OUTPUT + ((parity * TARGET_ROWS + row) * N_SMS + sm) * BEST_WORDS;
}

template <int P>
__device__ __forceinline__ u64* sum_word(const Machine m, u32 parity, u32 row, u32 sm) {
    return words(m) + At<P>::PARTIAL + (parity * TARGET_ROWS + row) * (N_SMS + 1) + sm;
}

template <int P>
__device__ __forceinline__ void publish_best(const Machine m, u32 row, const Best& best) {
    const u64 tag = (u64)(m.epoch + At<P>::EPOCH) << 32;
    asm volatile("st.relaxed.gpu.global.v2.b64 [%0],{%1,%2};" ::"l"(best_words<P>(m, m.parity(), row, m.sm())),
                 "l"(tag | __float_as_uint(best.logit)), "l"(tag | best.token)
                 : "memory");
}

#define LOGITS ((int)(BATCH_GRANULES * (N_WARPS / K_WARPS_OF_WIDTH) * GRANULE_ROWS + 31) / 32)  // of a batch, a lane's

// Row i of the step is warp i's, of which each lane has the tokens lane, lane + 32, ... of a batch.
template <int P>
__device__ __forceinline__ void joint_rows(const Machine m, const Own& own, Progress& progress) {
    static_assert(TARGET_ROWS <= N_WARPS, "a row is a warp's");
    const u32 row = m.warp(), n_rows = m.misc().state.n_rows, epoch = m.epoch + At<P>::EPOCH;
    const u32 first_row = own.first * GRANULE_ROWS;
    const bool has_durations = first_row <= FIRST_DURATION && FIRST_DURATION < first_row + own.n * GRANULE_ROWS;
    Best best, duration;
    LogSum sum;
#pragma unroll 1
    for (u32 first = 0; first < own.n; first += At<P>::BATCH) {
        const float* sums = batch_sums<P>(m, own, progress.x, first / At<P>::BATCH, progress.last);
        if (row >= n_rows) continue;
        float logits[LOGITS];  // minus infinity where there is none
#pragma unroll
        for (int i = 0; i < LOGITS; i++) {
            const u32 local = m.lane() + 32 * i, in_batch = local / GRANULE_ROWS, column = local % GRANULE_ROWS;
            const u32 token = first_row + first * GRANULE_ROWS + local;
            logits[i] = NEGATIVE_INFINITY;
            if (in_batch >= At<P>::BATCH || first + in_batch >= own.n) continue;
            const float* at = sums_of<P>(own, sums, in_batch, row) + column;
            float y = at[0];
#pragma unroll
            for (int w = 1; w < K_WARPS_OF_WIDTH; w++) y += at[w * ROWS * GRANULE_ROWS];
            y += m.misc().bias[(own.aux + first + in_batch) * GRANULE_ROWS + column];
            if (token < N_TOKENS) {
                logits[i] = y;
                best.offer(y, token);
            } else if (token >= FIRST_DURATION && token < FIRST_DURATION + N_DURATIONS) {
                duration.offer(y, token - FIRST_DURATION);
            }
        }
        if (first + At<P>::BATCH >= own.n) {
            const bool speaks = m.lane() == 0 && !m.misc().dead;
            if (has_durations) {
                const Best all = over_warp(duration);
                if (speaks) publish(sum_word<P>(m, m.parity(), row, N_SMS), all.token, epoch);
            }
            const Best all = over_warp(best);
            if (speaks) publish_best<P>(m, row, all);
        }
#pragma unroll
        for (int i = 0; i < LOGITS; i++) sum.add(logits[i]);
    }
    if (row >= n_rows) return;
    const float all = over_warp(sum);
    if (m.lane() == 0 && !m.misc().dead) publish(sum_word<P>(m, m.parity(), row, m.sm()), __float_as_uint(all), epoch);
}

// The word for which every SM waits before the next step: commands to carry out, and whether to leave.
template <int P>
__device__ __forceinline__ void publish_control(const Machine m, u32 leave) {
    const State& state = m.misc().state;
    if (state.n_steps + 1 >= m.number(PARAMETER_MAX_STEPS) && leave == 0) leave = LEAVE_REASON_STEPS;
    publish(words(m) + CONTROL_WORD + m.parity(), (state.n_fetched & 0xffffffu) | leave << 24, m.epoch + At<P>::EPOCH);
}

// Nothing to do. Once all SMs are here, so that none is still in the step before, the last one watches the door.
template <int P>
__device__ __noinline__ void watch_door(const Machine m) {
    for (u32 sm = m.thread(); sm < N_SMS; sm += N_THREADS) take(m, best_words<P>(m, m.parity(), 0, sm), m.epoch + At<P>::EPOCH);
    __syncthreads();
    if (m.thread() == 0) wait_at_door(m);
    __syncthreads();
    if (m.misc().door != m.misc().state.n_fetched) fetch(m);
    if (m.thread() == 0 && !m.misc().dead) publish_control<P>(m, m.misc().idle_leave);
}

template <int P>
__device__ __forceinline__ void joint(const Machine m, const Own& own, u32 stepping, Progress& progress) {
    __syncthreads();  // the rows are made
    const State& state = m.misc().state;
    if (m.sm() == CONTROL_SM && m.thread() == 0 && state.n_active != 0) publish_control<P>(m, 0);
    if (state.n_rows == 0) {
        if (m.thread() == 0 && !m.misc().dead) publish_best<P>(m, 0, Best());
        if (m.sm() == CONTROL_SM && state.n_active == 0) watch_door<P>(m);
        return;
    }
    load_joint<P>(m, stepping, progress.x);
    joint_rows<P>(m, own, progress);
}
