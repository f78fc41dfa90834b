// HEAD: the product with the vocabulary, reduced at once. A warp follows a row or two: over the batches each of its lanes
// keeps the best token and the running log-sum-exp of both classes for the tokens it sees, and at the end the lanes merge.
#pragma once

#include "linear.cuh"
#include "mailbox.cuh"

struct LogSum {  // log of a sum of exponentials, as largest term and sum relative to it
    float top = NEGATIVE_INFINITY, sum = 0;

    __device__ __forceinline__ void add(float x) {
        if (x == NEGATIVE_INFINITY) return;
        const float both = fmaxf(top, x);
        sum = sum * expf(top - both) + expf(x - both);
        top = both;
    }
    __device__ __forceinline__ float value() const { return top == NEGATIVE_INFINITY ? top : top + logf(sum); }
};

// The sum of all lanes' sums, the same on every lane.
__device__ __forceinline__ LogSum over_warp(LogSum mine) {
    LogSum all;
    all.top = largest(mine.top);
    if (all.top == NEGATIVE_INFINITY) return all;
    all.sum = sum_of(mine.sum * expf(mine.top - all.top));
    return all;
}

struct Best {  // ties go to the lower token
    float score = NEGATIVE_INFINITY, logit = NEGATIVE_INFINITY;
    u32 token = 0xffffffffu;

    __device__ __forceinline__ void offer(float s, float l, u32 t) {
        if (s > score || (s == score && t < token)) {
            score = s;
            logit = l;
            token = t;
        }
    }
};

__device__ __forceinline__ Best over_warp(Best mine) {
    Best best;
    best.score = largest(mine.score);
    best.token = __reduce_min_sync(0xffffffffu, ordered(mine.score) == ordered(best.score) ? mine.token : 0xffffffffu);
    const u32 lane = __ffs(__ballot_sync(0xffffffffu, mine.token == best.token)) - 1;
    best.logit = __shfl_sync(0xffffffffu, mine.logit, lane);
    return best;
}

__device__ __forceinline__ u32 mix(u32 x) {
    x ^= x >> 16;
    x *= 0x7feb352du;
    x ^= x >> 15;
    x *= 0x846ca68bu;
    return x ^ (x >> 16);
}

// Gumbel noise that depends on nothing but its arguments.
__device__ __forceinline__ float gumbel(u32 seed, u32 position, u32 token) {
    u32 h = mix(token + mix(position + mix(seed)));
    float u = ((float)(h >> 9) + 0.5f) * 1.1920928955078125e-7f;  // 2^-23
    return -logf(-logf(u));
}

struct Tally {  // one lane's view of one row's logits
    Best text, mark;
    LogSum text_sum, mark_sum, all_sum;
    float watched = NEGATIVE_INFINITY;

    __device__ __forceinline__ void see(const Row& row, const Slot& slot, u32 token, float logit, bool suppressed) {
        const bool watches = row.position == slot.watch_row;
        if (watches) {
            all_sum.add(logit);
            if (token == slot.watch_token) watched = logit;
        }
        if (suppressed) return;
        float score = logit;
        if (slot.inverse_temperature > 0.0f)
            score = logit * slot.inverse_temperature + gumbel(slot.seed, row.position, token);
        if (token >= MARK_BEGIN) {
            u32 index = token - MARK_BEGIN;
            if (index >= row.first_mark && index < row.last_mark) {
                mark.offer(score, logit, token);
                mark_sum.add(logit);
            }
        } else if (token == END_TOKEN ? row.end : row.text) {
            text.offer(score, logit, token);
            text_sum.add(logit);
        }
    }
    __device__ __forceinline__ void merge(const Row& row, const Slot& slot) {
        text = over_warp(text);
        text_sum = over_warp(text_sum);
        if (row.last_mark != 0) {
            mark = over_warp(mark);
            mark_sum = over_warp(mark_sum);
        }
        if (row.position == slot.watch_row) {
            all_sum = over_warp(all_sum);
            watched = largest(watched);
        }
    }
    // One word of the result; ``which`` differs between lanes.
    __device__ __forceinline__ u32 word(u32 which) const {
        switch (which) {
            case PARTIAL_TEXT_SCORE: return __float_as_uint(text.score);
            case PARTIAL_TEXT_TOKEN: return text.token;
            case PARTIAL_TEXT_LOGIT: return __float_as_uint(text.logit);
            case PARTIAL_TEXT_MAX: return __float_as_uint(text_sum.top);
            case PARTIAL_TEXT_LSE: return __float_as_uint(text_sum.value());
            case PARTIAL_MARK_SCORE: return __float_as_uint(mark.score);
            case PARTIAL_MARK_TOKEN: return mark.token;
            case PARTIAL_MARK_LOGIT: return __float_as_uint(mark.logit);
            case PARTIAL_MARK_LSE: return __float_as_uint(mark_sum.value());
            case PARTIAL_ALL_LSE: return __float_as_uint(all_sum.value());
            case PARTIAL_WATCHED: return __float_as_uint(watched);
            default: return 0;
        }
    }
};

__device__ __forceinline__ u64* partial_words(const Machine m, u32 buffer, u32 sm, u32 row) {
    return words(m) + buffer + (sm * TARGET_ROWS + row) * PARTIAL_WORDS;
}

template <int K, int K_WARPS>
__device__ __forceinline__ void head(const Machine m) {
    constexpr u32 GROUPS = N_WARPS / K_WARPS, BATCH = BATCH_GRANULES * GROUPS, ROWS = MAX_ROWS / N_WARPS;
    constexpr u32 PER_LANE = (BATCH * GRANULE_ROWS + 31) / 32;
    const u32* task = m.misc().tasks[m.phase];
    const State& state = m.misc().state;
    const u32 flags = m.field(PHASE_FLAGS), n_tokens = task[TASK_N_GRANULES] * GRANULE_ROWS;
    const u32 first_token = task[TASK_FIRST_GRANULE] * GRANULE_ROWS, n_rows = state.n_rows;
    const float2* table = m.at<const float2>(PARAMETER_AUX) + ((u64)m.sm() * AUX_GRANULES + task[TASK_AUX]) * GRANULE_ROWS;
    const int n_mine = granules_of_group<K_WARPS>(m, task);
    Tally tally[ROWS];  // of rows warp, warp + N_WARPS, ...
    Stream stream(m);
#pragma unroll 1
    for (u32 first = 0; first < n_tokens; first += BATCH * GRANULE_ROWS) {
        float2 aux[PER_LANE] = {};
#pragma unroll
        for (u32 i = 0; i < PER_LANE; i++)  // asked for now, needed behind the products
            if (m.warp() < n_rows && first + m.lane() + 32 * i < n_tokens) aux[i] = __ldg(table + first + m.lane() + 32 * i);
        const float* sums = batch_sums<K, K_WARPS>(m, stream, flags, m.field(PHASE_INPUT), m.epoch + m.field(PHASE_INPUT_EPOCH),
                                                   first / (BATCH * GRANULE_ROWS), n_mine);
        if (first == 0) answer_door(m);  // every SM has left the last step
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) {
            const u32 of = m.warp() + r * N_WARPS;
            if (of >= n_rows) break;
            const Row& row = state.rows[of];
            const u32* bitmap = m.at<const u32>(PARAMETER_BITMAPS) + row.bitmap * BITMAP_WORDS;
            const float2 norm = flags & FLAG_NORM ? m.misc().norm[m.phase & 1][of] : make_float2(0, 1);
#pragma unroll
            for (u32 i = 0; i < PER_LANE; i++) {
                const u32 in_batch = m.lane() + 32 * i, local = first + in_batch, token = first_token + local;
                if (in_batch >= BATCH * GRANULE_ROWS || local >= n_tokens || token >= N_TOKENS) continue;
                const u32 suppressed = __ldg(bitmap + token / 32) >> (token & 31) & 1;
                const float* from = granule_sums<K_WARPS>(sums, n_rows, in_batch / GRANULE_ROWS, task[TASK_FIRST_GROUP]) +
                                    of * GRANULE_ROWS + in_batch % GRANULE_ROWS;
                float y = from[0];
#pragma unroll
                for (int w = 1; w < K_WARPS; w++) y += from[w * sum_rows(n_rows) * GRANULE_ROWS];
                y = (y - norm.x * aux[i].x) * norm.y + aux[i].y;
                tally[r].see(row, state.slots[row.slot], token, y, suppressed);
            }
        }
    }
    stream.leave(m);
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
        const u32 of = m.warp() + r * N_WARPS;
        if (of >= n_rows) break;
        tally[r].merge(state.rows[of], state.slots[state.rows[of].slot]);
        if (m.lane() < PARTIAL_UNUSED && !m.misc().dead)
            publish(partial_words(m, m.field(PHASE_OUTPUT), m.sm(), of) + m.lane(), tally[r].word(m.lane()),
                    m.epoch + m.field(PHASE_EPOCH));
    }
    __syncthreads();  // SELECT takes the scratch
}
