// The megakernel's own stream and exchange, alone and against their alternatives, for megakernel_parts.py. Every kernel
// runs as the loop does: one block on each SM, all at once. What a launch is told it finds in the words of Parameters
// that these names stand for.
#include "linear.cuh"

#define N_ROUNDS PARAMETER_MAX_STEPS
#define FIRST_EPOCH PARAMETER_EPOCH  // no round of any launch before has used it or one behind it
#define N_ROWS PARAMETER_PHASE
#define PARTNER PARAMETER_PHASE
#define COUNTED PARAMETER_STATE
#define PLAIN PARAMETER_RESIDUAL  // memory without tags, for what is counted or copied
#define KERNEL extern "C" __global__ void __launch_bounds__(N_THREADS, 1)

__device__ __forceinline__ Machine begin(const Parameters& p) {
    Machine m = {(u32)p.word[FIRST_EPOCH], 0, 0, 0};
    m.forget();
    if (m.thread() < PARAMETER_WORDS) m.misc().parameters.word[m.thread()] = p.word[m.thread()];
    if (m.thread() == 0) {
        m.misc().dead = 0;
        m.misc().patience = 1u << 20;
    }
    __syncthreads();
    return m;
}

// ---------------------------------------------------------------------- memory

// Every warp's part of the tape, N_ROUNDS times.
KERNEL stream_alone(const __grid_constant__ Parameters p) {
    const Machine m = begin(p);
    start_stream(m, 0);
    Stream stream(m);
    const u32 n = stream.n_bytes / TILE_BYTES * (u32)p.word[N_ROUNDS] / 4;
    u32 sum = 0;
#pragma unroll 1
    for (u32 i = 0; i < n; i++) {
        uint4 w[4];
        stream.take(w);
#pragma unroll
        for (int t = 0; t < 4; t++) sum ^= w[t].x ^ w[t].y ^ w[t].z ^ w[t].w;
        stream.refill<4>();
    }
    stop_stream();
    if (sum == 0x12345678u) m.at<u32>(COUNTED)[0] = sum;  // so that nothing is left out
}

// N_ROUNDS MiB from PLAIN to the EXCHANGE's place, by as many SMs as there are blocks.
extern "C" __global__ void __launch_bounds__(1024, 1) copy(const __grid_constant__ Parameters p) {
    constexpr u32 AHEAD = 4;
    const uint4* from = (const uint4*)p.word[PLAIN];
    uint4* to = (uint4*)p.word[PARAMETER_EXCHANGE];
    const u64 n = p.word[N_ROUNDS] << 16, stride = (u64)gridDim.x * blockDim.x;
    for (u64 i = (u64)blockIdx.x * blockDim.x + threadIdx.x; i + (AHEAD - 1) * stride < n; i += AHEAD * stride) {
        uint4 v[AHEAD];
#pragma unroll
        for (u32 a = 0; a < AHEAD; a++) v[a] = __ldcs(from + i + a * stride);
#pragma unroll
        for (u32 a = 0; a < AHEAD; a++) __stcs(to + i + a * stride, v[a]);
    }
}

// ---------------------------------------------------------------------- one word

// A word goes to and fro between SM 0 and SM PARTNER: a round is one way.
KERNEL hop_between_two(const __grid_constant__ Parameters p) {
    const Machine m = begin(p);
    const u32 partner = (u32)p.word[PARTNER];
    if ((m.sm() != 0 && m.sm() != partner) || m.thread() != 0) return;
#pragma unroll 1
    for (u32 round = 0; round < p.word[N_ROUNDS]; round++) {
        u64* word = words(m) + (round & 1) * 16;  // on lines of their own
        if ((round & 1) == (m.sm() == 0 ? 0u : 1u))
            publish(word, round, m.epoch + round);
        else
            take(m, word, m.epoch + round);
    }
}

// Every SM publishes a word in each replica and waits for one of every SM.
KERNEL hop_among_all(const __grid_constant__ Parameters p) {
    constexpr u32 STRIDE = (N_SMS + 15) / 16 * 16, PAIRS = (N_SMS + 1) / 2, EACH = (PAIRS + 31) / 32;
    const Machine m = begin(p);
    if (m.warp() != 0) return;
#pragma unroll 1
    for (u32 round = 0; round < p.word[N_ROUNDS]; round++) {
        u64* buffer = words(m) + (round & 1) * N_REPLICAS * STRIDE;
        const u32 epoch = m.epoch + round;
        if (m.lane() < N_REPLICAS) publish(buffer + m.lane() * STRIDE + m.sm(), round, epoch);
        if (m.sm() == 0 && N_SMS % 2 && m.lane() < N_REPLICAS) publish(buffer + m.lane() * STRIDE + N_SMS, round, epoch);
        const u64* mine = buffer + (m.sm() % N_REPLICAS) * STRIDE;
        Pair pairs[EACH];
#pragma unroll
        for (u32 i = 0; i < EACH; i++) pairs[i] = peek_pair(mine + min(m.lane() + 32 * i, PAIRS - 1) * 2);
#pragma unroll
        for (u32 i = 0; i < EACH; i++) settle(m, mine + min(m.lane() + 32 * i, PAIRS - 1) * 2, epoch, pairs[i]);
        __syncwarp();
    }
}

__device__ __forceinline__ void arrive(u32* counter) {
    asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ __forceinline__ void wait_for(const Machine m, const u32* counter, u32 target) {
    u32 found;
    Wait wait;
    do {
        asm volatile("ld.acquire.gpu.global.u32 %0,[%1];" : "=r"(found) : "l"(counter) : "memory");
    } while ((int)(found - target) < 0 && !wait.is_over(m));
}

// The same by a counter.
KERNEL barrier(const __grid_constant__ Parameters p) {
    const Machine m = begin(p);
    u32* counter = m.at<u32>(COUNTED);
#pragma unroll 1
    for (u32 round = 0; round < p.word[N_ROUNDS]; round++) {
        __syncthreads();
        if (m.thread() == 0) {
            arrive(counter);
            wait_for(m, counter, (round + 1) * N_SMS);
        }
        __syncthreads();
    }
}

// ---------------------------------------------------------------------- rows

struct Share {  // of a row of WIDTH elements: whole granules, as LINEAR has them
    u32 first_pair, n_pairs;
    __device__ __forceinline__ explicit Share(u32 sm) {
        constexpr u32 GRANULES = WIDTH / GRANULE_ROWS, PAIRS = GRANULE_ROWS / 2;
        first_pair = sm * GRANULES / N_SMS * PAIRS;
        n_pairs = (sm + 1) * GRANULES / N_SMS * PAIRS - first_pair;
    }
};

// This SM's part of ``n_rows`` rows as tagged words; returns the buffer, one of two that take turns.
__device__ __forceinline__ u32 publish_share(const Machine m, const Share share, u32 n_rows, u32 round) {
    const u32 buffer = (round & 1) * N_REPLICAS * TARGET_ROWS * WIDTH / 2;
    for (u32 i = m.thread(); i < n_rows * share.n_pairs; i += N_THREADS)
        publish_row(m, buffer, WIDTH, i / share.n_pairs, share.first_pair + i % share.n_pairs, round, m.epoch + round);
    return buffer;
}

// Every SM publishes its part of N_ROWS rows, and then has all of them in shared memory: tagged words, as LINEAR does.
KERNEL rows_tagged(const __grid_constant__ Parameters p) {
    const Machine m = begin(p);
    const Share share(m.sm());
    const u32 n_rows = (u32)p.word[N_ROWS];
#pragma unroll 1
    for (u32 round = 0; round < p.word[N_ROUNDS]; round++) {
        const u32 buffer = publish_share(m, share, n_rows, round);
        load_rows(m, n_rows, 0, buffer, m.epoch + round);
        __syncthreads();
    }
}

// The same, all words of a thread looked at together. Each thread first watches the last of its own alone.
template <int AHEAD>
__device__ __forceinline__ void take_together(const Machine m, const u64* from, u32 n_pairs, u32 epoch) {
    Wait wait;
#pragma unroll 1
    for (u32 first = m.thread(); first < n_pairs; first += AHEAD * N_THREADS) {
        Pair pairs[AHEAD];
        pairs[AHEAD - 1] = take_pair(m, from + min(first + (AHEAD - 1) * N_THREADS, n_pairs - 1) * 2, epoch);
#pragma unroll
        for (u32 i = 0; i < AHEAD - 1; i++) pairs[i] = peek_pair(from + min(first + i * N_THREADS, n_pairs - 1) * 2);
        bool is_whole;
        do {
            is_whole = true;
#pragma unroll
            for (u32 i = 0; i < AHEAD; i++)
                if (pairs[i].first_epoch != epoch || pairs[i].second_epoch != epoch) {
                    is_whole = false;
                    pairs[i] = peek_pair(from + min(first + i * N_THREADS, n_pairs - 1) * 2);
                }
        } while (!is_whole && !wait.is_over(m));
#pragma unroll
        for (u32 i = 0; i < AHEAD; i++) {
            const u32 at = min(first + i * N_THREADS, n_pairs - 1);
            *(uint2*)(m.x() + at / (WIDTH / 4) * x_stride(WIDTH) + at % (WIDTH / 4) * 8) =
                make_uint2(pairs[i].first, pairs[i].second);
        }
    }
}

KERNEL rows_tagged_together(const __grid_constant__ Parameters p) {
    const Machine m = begin(p);
    const Share share(m.sm());
    const u32 n_rows = (u32)p.word[N_ROWS];
#pragma unroll 1
    for (u32 round = 0; round < p.word[N_ROUNDS]; round++) {
        const u32 buffer = publish_share(m, share, n_rows, round);
        if (n_rows <= 2)
            take_together<3>(m, row_words(m, buffer, WIDTH, 0), n_rows * WIDTH / 4, m.epoch + round);
        else
            take_together<10>(m, row_words(m, buffer, WIDTH, 0), n_rows * WIDTH / 4, m.epoch + round);
        __syncthreads();
    }
}

// The same with plain stores, a word of who has arrived, and plain loads of twice as many elements at a time. ARRIVAL:
// by a counter, by one of several counters each, or by a flag each.
enum Arrival { COUNTER, COUNTERS, FLAGS };
constexpr u32 N_COUNTERS = 8, LINE_WORDS = 32;  // each counter in a line of its own

template <Arrival ARRIVAL>
__device__ __forceinline__ void say(const Machine m, u32 round) {
    u32* at = m.at<u32>(COUNTED);
    if (ARRIVAL == COUNTER) arrive(at);
    if (ARRIVAL == COUNTERS) arrive(at + m.sm() % N_COUNTERS * LINE_WORDS);
    if (ARRIVAL == FLAGS) asm volatile("st.release.gpu.global.u32 [%0],%1;" ::"l"(at + m.sm()), "r"(round + 1) : "memory");
}

// By the first warp. All of it hears of all that said so before.
template <Arrival ARRIVAL>
__device__ __forceinline__ void hear(const Machine m, u32 round) {
    constexpr u32 QUADS = (N_SMS + 3) / 4;
    const u32* at = m.at<u32>(COUNTED);
    if (ARRIVAL == COUNTER) {
        if (m.lane() == 0) wait_for(m, at, (round + 1) * N_SMS);
    } else if (ARRIVAL == COUNTERS) {
        const u32 own = m.lane() % N_COUNTERS, n = (N_SMS - own + N_COUNTERS - 1) / N_COUNTERS;
        if (m.lane() < N_COUNTERS) wait_for(m, at + own * LINE_WORDS, (round + 1) * n);
    } else {
        Wait wait;
        bool is_whole;
        do {
            is_whole = true;
#pragma unroll
            for (u32 i = 0; i < (QUADS + 31) / 32; i++) {
                const u32 quad = min(m.lane() + 32 * i, QUADS - 1);
                uint4 v;
                asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3},[%4];"
                             : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                             : "l"(at + quad * 4)
                             : "memory");
                is_whole &= (v.x > round) & (v.y > round || quad * 4 + 1 >= N_SMS) & (v.z > round || quad * 4 + 2 >= N_SMS) &
                            (v.w > round || quad * 4 + 3 >= N_SMS);
            }
        } while (!is_whole && !wait.is_over(m));
        asm volatile("fence.acq_rel.gpu;" ::: "memory");
    }
    __syncwarp();
}

template <Arrival ARRIVAL>
__device__ __forceinline__ void rows_arrived(const Parameters& p) {
    constexpr u32 QUADS = WIDTH / 8;  // 16 bytes each
    const Machine m = begin(p);
    const Share share(m.sm());
    const u32 n_rows = (u32)p.word[N_ROWS], n = n_rows * share.n_pairs;
#pragma unroll 1
    for (u32 round = 0; round < p.word[N_ROUNDS]; round++) {
        u32* buffer = m.at<u32>(PLAIN) + (round & 1) * TARGET_ROWS * WIDTH / 2;
        for (u32 i = m.thread(); i < n; i += N_THREADS)
            __stcg(buffer + i / share.n_pairs * (WIDTH / 2) + share.first_pair + i % share.n_pairs, round);
        __syncthreads();
        if (m.thread() == 0) say<ARRIVAL>(m, round);
        if (m.warp() == 0) hear<ARRIVAL>(m, round);
        __syncthreads();
        for (u32 i = m.thread(); i < n_rows * QUADS; i += N_THREADS)
            *(uint4*)(m.x() + i / QUADS * x_stride(WIDTH) + i % QUADS * 16) = load_through(buffer + i * 4);
        __syncthreads();
    }
}

KERNEL rows_counted(const __grid_constant__ Parameters p) { rows_arrived<COUNTER>(p); }
KERNEL rows_counted_apart(const __grid_constant__ Parameters p) { rows_arrived<COUNTERS>(p); }
KERNEL rows_flagged(const __grid_constant__ Parameters p) { rows_arrived<FLAGS>(p); }

// ---------------------------------------------------------------------- the host

// One look after the other at a word in the host's memory.
KERNEL look_at_host(const __grid_constant__ Parameters p) {
    const Machine m = begin(p);
    if (m.sm() != CONTROL_SM || m.thread() != 0) return;
    u32 sum = 0;
#pragma unroll 1
    for (u32 round = 0; round < p.word[N_ROUNDS]; round++) sum += load_host(m.at<const u32>(PARAMETER_HOST_DOOR));
    m.at<u32>(COUNTED)[0] = sum;
}

// Answers the host's every number with the same number.
KERNEL echo(const __grid_constant__ Parameters p) {
    const Machine m = begin(p);
    if (m.sm() != CONTROL_SM || m.thread() != 0) return;
#pragma unroll 1
    for (u32 round = 1; round <= p.word[N_ROUNDS]; round++) {
        Wait wait;
        while (load_host(m.at<const u32>(PARAMETER_HOST_DOOR)) != round && !wait.is_over(m)) {
        }
        store_host(m.at<u32>(PARAMETER_HOST_BEAT), round);
    }
}
