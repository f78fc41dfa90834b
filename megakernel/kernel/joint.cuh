// JOINT: frames plus predictions, ReLU, times this SM's tokens and durations. What leaves is each row's best token first,
// as everyone waits for it; the log-sum-exps are for the records alone and follow.
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

// The rows of the step into shared memory. A warp takes an eighth of the columns, a lane four elements of every row.
template <int P>
__device__ __forceinline__ void load_joint(const Machine m) {
    constexpr u32 LANES = At<P>::K / N_WARPS / 4;
    static_assert(LANES <= 32, "a lane has four elements of a row");
    const State& state = m.misc().state;
    const u32 n_rows = state.n_rows;
    if (m.lane() < LANES) {
        const u32 element = (m.warp() * LANES + m.lane()) * 4;
        const u16* frames = m.at<const u16>(PARAMETER_FRAMES) + element;
        uint2 own[TARGET_ROWS];
        u32 slots = 0;
#pragma unroll
        for (u32 row = 0; row < TARGET_ROWS; row++) {
            if (row >= n_rows) break;
            const uint2 at = state.rows[row];
            own[row] = __ldcg((const uint2*)(frames + ((u64)at.x * N_FRAMES + at.y) * At<P>::K));
            slots |= 1u << at.x;
        }
        const u64* from = row_words(m, At<P>::INPUT, At<P>::K, 0) + element / 2;
        Pair predicted[MAX_SLOTS];
        take_pairs<MAX_SLOTS>(
            m, slots, predicted, [&](u32 slot) { return from + slot * (At<P>::K / 2); },
            [&](u32 slot) { return state.stepping >> slot & 1 ? m.epoch + At<P>::INPUT_EPOCH : state.slots[slot].predicted; });
#pragma unroll
        for (u32 slot = 0; slot < MAX_SLOTS; slot++) {
            if (!(slots >> slot & 1)) continue;
            const u32 first = state.slots[slot].first_row, end = first + state.slots[slot].n_rows;
#pragma unroll
            for (u32 row = 0; row < TARGET_ROWS; row++)
                if (row >= first && row < end)
                    *(uint2*)(m.x() + row * At<P>::STRIDE + element * 2) =
                        make_uint2(joint_pair(own[row].x, predicted[slot].first), joint_pair(own[row].y, predicted[slot].second));
        }
    }
    __syncthreads();
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

// One warp's rows of a batch's logits: rows warp, warp + N_WARPS; of each the tokens lane, lane + 32, ...
template <int P, int ROWS>
struct Logits {
    static constexpr int N = ROWS / N_WARPS, PER_LANE = (int)(At<P>::BATCH * GRANULE_ROWS + 31) / 32;
    float value[N][PER_LANE];  // no number where there is none
    bool is_one[PER_LANE];
    u32 token[PER_LANE];  // row of the padded weight
};

template <int P, int ROWS>
__device__ __forceinline__ void read_logits(const Machine m, Logits<P, ROWS>& logits, u32 first) {
    const u32* task = m.misc().tasks[P];
#pragma unroll
    for (int i = 0; i < logits.PER_LANE; i++) {
        const u32 local = m.lane() + 32 * i, in_batch = local / GRANULE_ROWS, column = local % GRANULE_ROWS;
        logits.is_one[i] = in_batch < At<P>::BATCH && first + in_batch < task[TASK_N_GRANULES];
        logits.token[i] = (task[TASK_FIRST_GRANULE] + first) * GRANULE_ROWS + local;
        if (!logits.is_one[i]) continue;
        const float bias = m.misc().aux[(task[TASK_AUX] + first + in_batch) * GRANULE_ROWS + column].y;
#pragma unroll
        for (int r = 0; r < logits.N; r++) {
            const float* at = sums_of<P, ROWS>(m, m.sums(), in_batch, m.warp() + r * N_WARPS) + column;
            float y = at[0];
#pragma unroll
            for (int w = 1; w < (int)At<P>::K_WARPS; w++) y += at[w * ROWS * GRANULE_ROWS];
            logits.value[r][i] = y + bias;
        }
    }
}

template <int P, int ROWS>
__device__ __forceinline__ void joint_rows(const Machine m) {
    const u32* task = m.misc().tasks[P];
    const u32 n = task[TASK_N_GRANULES], n_rows = m.misc().state.n_rows;
    const u32 first_row = task[TASK_FIRST_GRANULE] * GRANULE_ROWS;
    const bool has_durations = first_row <= FIRST_DURATION && FIRST_DURATION < first_row + n * GRANULE_ROWS;
    Best best[ROWS / N_WARPS], duration[ROWS / N_WARPS];
    LogSum sum[ROWS / N_WARPS];
#pragma unroll 1
    for (u32 first = 0; first < n; first += At<P>::BATCH) {
        if (first != 0) __syncthreads();
        batch_sums<P, ROWS, (ROWS > 8)>(m, m.sums(), first / At<P>::BATCH);
        Logits<P, ROWS> logits;
        read_logits<P, ROWS>(m, logits, first);
        const bool is_last = first + At<P>::BATCH >= n;
#pragma unroll
        for (int r = 0; r < logits.N; r++) {
            const u32 row = m.warp() + r * N_WARPS;
            if (row >= n_rows) break;
#pragma unroll
            for (int i = 0; i < logits.PER_LANE; i++)
                if (logits.is_one[i] && logits.token[i] < N_TOKENS) best[r].offer(logits.value[r][i], logits.token[i]);
            if (!is_last) continue;
            const Best all = over_warp(best[r]);
            if (m.lane() == 0 && !m.misc().dead) publish_best<P>(m, row, all);
        }
        if (has_durations) {
#pragma unroll
            for (int r = 0; r < logits.N; r++)
#pragma unroll
                for (int i = 0; i < logits.PER_LANE; i++)
                    if (logits.is_one[i] && logits.token[i] >= FIRST_DURATION && logits.token[i] < FIRST_DURATION + N_DURATIONS)
                        duration[r].offer(logits.value[r][i], logits.token[i] - FIRST_DURATION);
            if (is_last) {
#pragma unroll
                for (int r = 0; r < logits.N; r++) {
                    const u32 row = m.warp() + r * N_WARPS;
                    const Best all = over_warp(duration[r]);
                    if (row < n_rows && m.lane() == 0 && !m.misc().dead)
                        publish(sum_word<P>(m, m.parity(), row, N_SMS), all.token, m.epoch + At<P>::EPOCH);
                }
            }
        }
#pragma unroll
        for (int r = 0; r < logits.N; r++)
#pragma unroll
            for (int i = 0; i < logits.PER_LANE; i++)
                if (logits.is_one[i] && logits.token[i] < N_TOKENS) sum[r].add(logits.value[r][i]);
    }
#pragma unroll
    for (int r = 0; r < ROWS / N_WARPS; r++) {
        const u32 row = m.warp() + r * N_WARPS;
        if (row >= n_rows) break;
        const float all = over_warp(sum[r]);
        if (m.lane() == 0 && !m.misc().dead)
            publish(sum_word<P>(m, m.parity(), row, m.sm()), __float_as_uint(all), m.epoch + At<P>::EPOCH);
    }
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
    if (m.thread() == 0) {
        const u64 since = clock_ns();
        u32 pause_ns = 100;
        m.misc().idle_leave = 0;
        while (true) {
            look_at_door(m);
            if (m.misc().door != m.misc().state.n_fetched || m.misc().dead) break;
            if (clock_ns() - since > m.number(PARAMETER_IDLE_NS)) {
                m.misc().idle_leave = LEAVE_REASON_IDLE;
                break;
            }
            __nanosleep(pause_ns);
            pause_ns = pause_ns < 10000 ? 2 * pause_ns : 20000;
        }
    }
    __syncthreads();
    if (m.misc().door != m.misc().state.n_fetched) fetch(m);
    if (m.thread() == 0 && !m.misc().dead) publish_control<P>(m, m.misc().idle_leave);
}

template <int P>
__device__ __forceinline__ void joint(const Machine m, u32& loaded) {
    const State& state = m.misc().state;
    if (m.sm() == CONTROL_SM && m.thread() == 0 && state.n_active != 0) publish_control<P>(m, 0);
    if (state.n_rows == 0) {
        if (m.thread() == 0 && !m.misc().dead) publish_best<P>(m, 0, Best());
        if (m.sm() == CONTROL_SM && state.n_active == 0) watch_door<P>(m);
        return;
    }
    loaded = NO_INPUT;
    load_joint<P>(m);
    if (state.n_rows <= 8)
        joint_rows<P, 8>(m);
    else
        joint_rows<P, 16>(m);
}
