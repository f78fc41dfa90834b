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

// The rows of the step into shared memory. A warp takes an eighth of the columns, a lane four elements of every row; a
// slot's prediction is asked for with its first row. → whether all came
template <int P>
__device__ __forceinline__ bool load_joint(const Machine m) {
    constexpr u32 LANES = At<P>::K / N_WARPS / 4;
    static_assert(LANES <= 32, "a lane has four elements of a row");
    const State& state = m.misc().state;
    const u32 n_rows = state.n_rows, starts = state.starts, stepping = state.stepping;
    if (m.lane() < LANES) {
        const u32 element = (m.warp() * LANES + m.lane()) * 4;
        const u16* frames = m.at<const u16>(PARAMETER_FRAMES) + element;
        uint2 own[TARGET_ROWS];
#pragma unroll
        for (u32 row = 0; row < TARGET_ROWS; row++) {
            if (row >= n_rows) break;
            const uint2 at = state.rows[row];
            own[row] = __ldcg((const uint2*)(frames + (at.x * N_FRAMES + at.y) * At<P>::K));
        }
        const u64* from = row_words(m, At<P>::INPUT, At<P>::K, 0) + element / 2;
        unsigned char* to = m.x() + element * 2;
        Wait wait;
        if (starts == 1) {  // one slot has all rows
            const u32 slot = state.rows[0].x;
            const u32 epoch = stepping >> slot & 1 ? m.epoch + At<P>::INPUT_EPOCH : state.slots[slot].predicted;
            from += slot * (At<P>::K / 2);
            Pair pair = peek_pair(from);
            while ((pair.first_epoch != epoch || pair.second_epoch != epoch) && !wait.is_over(m)) pair = peek_pair(from);
#pragma unroll
            for (u32 row = 0; row < TARGET_ROWS; row++) {
                if (row >= n_rows) break;
                *(uint2*)(to + row * At<P>::STRIDE) =
                    make_uint2(joint_pair(own[row].x, pair.first), joint_pair(own[row].y, pair.second));
            }
        } else {
            Pair pairs[TARGET_ROWS];
            u32 missing = starts;
            while (missing != 0) {
#pragma unroll
                for (u32 row = 0; row < TARGET_ROWS; row++)
                    if (missing >> row & 1) pairs[row] = peek_pair(from + state.rows[row].x * (At<P>::K / 2));
#pragma unroll
                for (u32 row = 0; row < TARGET_ROWS; row++) {
                    if (!(missing >> row & 1)) continue;
                    const u32 slot = state.rows[row].x;
                    const u32 epoch = stepping >> slot & 1 ? m.epoch + At<P>::INPUT_EPOCH : state.slots[slot].predicted;
                    if (pairs[row].first_epoch == epoch && pairs[row].second_epoch == epoch) missing &= ~(1u << row);
                }
                if (missing != 0 && wait.is_over(m)) break;
            }
            Pair pair = pairs[0];
#pragma unroll
            for (u32 row = 0; row < TARGET_ROWS; row++) {
                if (row >= n_rows) break;
                if (starts >> row & 1) pair = pairs[row];
                *(uint2*)(to + row * At<P>::STRIDE) =
                    make_uint2(joint_pair(own[row].x, pair.first), joint_pair(own[row].y, pair.second));
            }
        }
    }
    __syncthreads();
    return m.misc().dead == 0;
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
    float value[N][PER_LANE];
    bool is_token[PER_LANE], is_duration[PER_LANE];
    u32 token[PER_LANE];  // row of the padded weight
};

template <int P, int ROWS>
__device__ __forceinline__ void read_logits(const Machine m, const Own& own, Logits<P, ROWS>& logits, u32 first) {
#pragma unroll
    for (int i = 0; i < logits.PER_LANE; i++) {
        const u32 local = m.lane() + 32 * i, in_batch = local / GRANULE_ROWS, column = local % GRANULE_ROWS;
        const bool is_one = in_batch < At<P>::BATCH && first + in_batch < own.n;
        const u32 token = (own.first + first) * GRANULE_ROWS + local;
        logits.token[i] = token;
        logits.is_token[i] = is_one && token < N_TOKENS;
        logits.is_duration[i] = is_one && token >= FIRST_DURATION && token < FIRST_DURATION + N_DURATIONS;
        if (!is_one) continue;
        const float bias = m.misc().bias[(own.aux + first + in_batch) * GRANULE_ROWS + column];
#pragma unroll
        for (int r = 0; r < logits.N; r++) {
            const float* at = sums_of<P, ROWS>(own, m.sums(), in_batch, m.warp() + r * N_WARPS) + column;
            float y = at[0];
#pragma unroll
            for (int w = 1; w < (int)At<P>::K_WARPS; w++) y += at[w * ROWS * GRANULE_ROWS];
            logits.value[r][i] = y + bias;
        }
    }
}

template <int P, int ROWS>
__device__ __forceinline__ void joint_rows(const Machine m, const Own& own, bool is_alive) {
    const u32 n_rows = m.misc().state.n_rows, first_row = own.first * GRANULE_ROWS;
    const bool has_durations = first_row <= FIRST_DURATION && FIRST_DURATION < first_row + own.n * GRANULE_ROWS;
    Best best[ROWS / N_WARPS], duration[ROWS / N_WARPS];
    LogSum sum[ROWS / N_WARPS];
#pragma unroll 1
    for (u32 first = 0; first < own.n; first += At<P>::BATCH) {
        if (first != 0) __syncthreads();
        batch_sums<P, ROWS, (ROWS > 8)>(m, own, m.sums(), first / At<P>::BATCH);
        if (m.warp() >= n_rows) continue;
        Logits<P, ROWS> logits;
        read_logits<P, ROWS>(m, own, logits, first);
        const bool is_last = first + At<P>::BATCH >= own.n;
#pragma unroll
        for (int r = 0; r < logits.N; r++) {
            const u32 row = m.warp() + r * N_WARPS;
            if (row >= n_rows) break;
#pragma unroll
            for (int i = 0; i < logits.PER_LANE; i++) {
                if (logits.is_token[i]) best[r].offer(logits.value[r][i], logits.token[i]);
                if (logits.is_duration[i]) duration[r].offer(logits.value[r][i], logits.token[i] - FIRST_DURATION);
            }
            if (!is_last) continue;
            if (has_durations) {
                const Best all = over_warp(duration[r]);
                if (m.lane() == 0 && is_alive)
                    publish(sum_word<P>(m, m.parity(), row, N_SMS), all.token, m.epoch + At<P>::EPOCH);
            }
            const Best all = over_warp(best[r]);
            if (m.lane() == 0 && is_alive) publish_best<P>(m, row, all);
        }
#pragma unroll
        for (int r = 0; r < logits.N; r++)
#pragma unroll
            for (int i = 0; i < logits.PER_LANE; i++)
                if (logits.is_token[i]) sum[r].add(logits.value[r][i]);
    }
#pragma unroll
    for (int r = 0; r < ROWS / N_WARPS; r++) {
        const u32 row = m.warp() + r * N_WARPS;
        if (row >= n_rows) break;
        const float all = over_warp(sum[r]);
        if (m.lane() == 0 && is_alive)
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
__device__ __forceinline__ void joint(const Machine m, const Own& own) {
    __syncthreads();  // the rows are made
    const State& state = m.misc().state;
    if (m.sm() == CONTROL_SM && m.thread() == 0 && state.n_active != 0) publish_control<P>(m, 0);
    if (state.n_rows == 0) {
        if (m.thread() == 0 && !m.misc().dead) publish_best<P>(m, 0, Best());
        if (m.sm() == CONTROL_SM && state.n_active == 0) watch_door<P>(m);
        return;
    }
    const bool is_alive = load_joint<P>(m);
#if TARGET_ROWS > 8
    if (state.n_rows > 8)
        joint_rows<P, 16>(m, own, is_alive);
    else
#endif
        joint_rows<P, 8>(m, own, is_alive);
}
