// How SMs hand values to each other: 8-byte words {payload, epoch}, polled until the epoch is the awaited one. The value
// is its own flag, so no fence, counter or reset is needed. Every wait has a limit; past it the SM is dead, and
// from then on nobody waits: the step runs out on whatever it finds and the loop leaves.
#pragma once

#include "machine.cuh"

// The first fault of all SMs is the one that the host reads.
__device__ __noinline__ void note_fault(const Machine m, u32 kind, u32 phase) {
    u32* control = m.at<u32>(PARAMETER_CONTROL);
    if (atomicCAS(control + CONTROL_ABORT, 0u, 1u) != 0u) return;
    control[CONTROL_FAULT_KIND] = kind;
    control[CONTROL_FAULT_SM] = m.sm();
    control[CONTROL_FAULT_PHASE] = phase;
    control[CONTROL_FAULT_EPOCH] = m.epoch;
    __threadfence_system();
}

__device__ __noinline__ void raise(const Machine m, u32 kind) {
    note_fault(m, kind, m.phase);
    m.misc().dead = 1 + m.phase;
}

struct Wait {  // one thread's patience, counted in polls of about a microsecond
    u32 polls = 0;

    // Whether to give up; called after each poll that failed. There are many places that wait, so this is short: the
    // fault is noted when the step has run out.
    __device__ __forceinline__ bool is_over(const Machine m) {
        if (m.misc().dead) return true;
        if (++polls < m.misc().patience) return false;
        m.misc().dead = 1 + m.phase;
        return true;
    }
};

struct Pair {  // two neighbouring words
    u32 first, first_epoch, second, second_epoch;
};

__device__ __forceinline__ u64* words(const Machine m) { return m.at<u64>(PARAMETER_EXCHANGE); }

__device__ __forceinline__ Pair peek_pair(const u64* p) {
    u64 a, b;
    asm volatile("ld.relaxed.gpu.global.v2.b64 {%0,%1},[%2];" : "=l"(a), "=l"(b) : "l"(p) : "memory");
    return {(u32)a, (u32)(a >> 32), (u32)b, (u32)(b >> 32)};
}

// Waits for two words at a 16-byte border, of which ``pair`` is the first look.
__device__ __forceinline__ void settle(const Machine m, const u64* p, u32 epoch, Pair& pair) {
    Wait wait;
    while (pair.first_epoch != epoch || pair.second_epoch != epoch) {
        if (wait.is_over(m)) break;
        pair = peek_pair(p);
    }
}

__device__ __forceinline__ Pair take_pair(const Machine m, const u64* p, u32 epoch) {
    Pair pair = peek_pair(p);
    settle(m, p, epoch, pair);
    return pair;
}

// The pairs at N places, watched together. The last one is waited for alone first: what a thread does not ask for while
// nothing can be there takes nobody's bandwidth.
template <int N>
__device__ __forceinline__ void take_pairs(const Machine m, const u64* from, const u32 (&at)[N], u32 epoch,
                                           Pair (&pairs)[N]) {
    pairs[N - 1] = take_pair(m, from + at[N - 1], epoch);
#pragma unroll
    for (int i = 0; i < N - 1; i++) pairs[i] = peek_pair(from + at[i]);
    Wait wait;
    bool is_whole;
    do {
        is_whole = true;
#pragma unroll
        for (int i = 0; i < N - 1; i++)
            if (pairs[i].first_epoch != epoch || pairs[i].second_epoch != epoch) {
                is_whole = false;
                pairs[i] = peek_pair(from + at[i]);
            }
    } while (!is_whole && !wait.is_over(m));
}

__device__ __forceinline__ u64 peek(const u64* p) {
    u64 word;
    asm volatile("ld.relaxed.gpu.global.b64 %0,[%1];" : "=l"(word) : "l"(p) : "memory");
    return word;
}

__device__ __forceinline__ u32 take(const Machine m, const u64* p, u32 epoch) {
    Wait wait;
    u64 word = peek(p);
    while ((u32)(word >> 32) != epoch) {
        if (wait.is_over(m)) break;
        word = peek(p);
    }
    return (u32)word;
}

// Without limit of time, until somebody raises a fault.
__device__ __forceinline__ u32 take_some_day(const Machine m, const u64* p, u32 epoch) {
    u64 word = peek(p);
    for (u32 polls = 1; (u32)(word >> 32) != epoch && !m.misc().dead; polls++) {
        if ((polls & 63) == 0 && load_gpu(m.at<u32>(PARAMETER_CONTROL) + CONTROL_ABORT) != 0) m.misc().dead = 1 + m.phase;
        word = peek(p);
    }
    return (u32)word;
}

__device__ __forceinline__ void publish(u64* p, u32 payload, u32 epoch) {
    asm volatile("st.relaxed.gpu.global.b64 [%0],%1;" ::"l"(p), "l"(((u64)epoch << 32) | payload) : "memory");
}

// A pair of a row, to every replica of the rows buffer that begins at word ``buffer``.
__device__ __forceinline__ void publish_row(const Machine m, u32 buffer, u32 n, u32 row, u32 pair, u32 payload,
                                            u32 epoch) {
    u64* p = words(m) + buffer + row * (n / 2) + pair;
#pragma unroll
    for (int replica = 0; replica < N_REPLICAS; replica++) publish(p + replica * (TARGET_ROWS * n / 2), payload, epoch);
}

// Where this SM reads a row of the rows buffer that begins at word ``buffer``.
__device__ __forceinline__ const u64* row_words(const Machine m, u32 buffer, u32 n, u32 row) {
    return words(m) + buffer + ((m.sm() % N_REPLICAS) * TARGET_ROWS + row) * (n / 2);
}
