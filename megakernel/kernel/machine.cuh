// The machine under the bodies: types, bfloat16, the matrix instruction, loads and stores that other SMs see, and the
// one shared-memory layout. No toolkit headers, so that NVRTC needs none.
#pragma once

#include "isa.h"
#include "program.h"

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

struct Parameters {
    u64 word[PARAMETER_WORDS];
};

#define N_THREADS (32 * N_WARPS)
#define HEAD_SIZE 64
#define NEGATIVE_INFINITY __int_as_float(0xff800000)
#define STATS_PIECES (WIDTH / STATS_ELEMENTS)
#define ZERO_BYTES 2048  // at least 64 for each tile of a slice of K
#define BLOCK_WORDS (BLOCK_STATS_WORDS + HEAD_SIZE / 2)
#define CONTROL_SM (N_SMS - 1)  // has least attention to do, so it is the one that looks at the host's door

// ---------------------------------------------------------------------- numbers

__device__ __forceinline__ float low_bf16(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ __forceinline__ float gelu(float x) { return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f)); }

// The whole warp's largest; floats compare as their bits do once the negative ones are turned round.
__device__ __forceinline__ u32 ordered(float x) {
    u32 bits = __float_as_uint(x);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

__device__ __forceinline__ float largest(float x) {
    u32 top = __reduce_max_sync(0xffffffffu, ordered(x));
    return __uint_as_float(top ^ (top >> 31 ? 0x80000000u : 0xffffffffu));
}

__device__ __forceinline__ float sum_of(float x) {
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) x += __shfl_xor_sync(0xffffffffu, x, mask);
    return x;
}

// log(exp(a) + exp(b)), also where one is minus infinity
__device__ __forceinline__ float log_add(float a, float b) {
    float top = fmaxf(a, b);
    return top == NEGATIVE_INFINITY ? top : top + logf(expf(a - top) + expf(b - top));
}

__device__ __forceinline__ bool is_finite(float x) { return (__float_as_uint(x) & 0x7f800000u) != 0x7f800000u; }

// d[16 rows x 8] += a[16 rows x 16] · b[16 x 8]; rows 8 to 15 of a are a1 and a3
__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// the transposed 8 x 8 matrix of which each lane holds two neighbouring elements of row lane / 4
__device__ __forceinline__ u32 transpose(u32 pair) {
    u32 out;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(pair));
    return out;
}

// ---------------------------------------------------------------------- memory

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

// 16 bytes that nobody reads again soon, past the L1
__device__ __forceinline__ uint4 load_through(const void* p) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

__device__ __forceinline__ u32 load_gpu(const u32* p) {
    u32 v;
    asm volatile("ld.relaxed.gpu.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

__device__ __forceinline__ void store_gpu(u32* p, u32 v) {
    asm volatile("st.relaxed.gpu.global.u32 [%0],%1;" ::"l"(p), "r"(v) : "memory");
}

__device__ __forceinline__ u32 load_host(const u32* p) {
    u32 v;
    asm volatile("ld.acquire.sys.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}

__device__ __forceinline__ void store_host(u32* p, u32 v) {
    asm volatile("st.relaxed.sys.global.u32 [%0],%1;" ::"l"(p), "r"(v) : "memory");
}

// one write of 16 bytes to the host
__device__ __forceinline__ void store_host(uint4* p, uint4 v) {
    asm volatile("st.volatile.global.v4.u32 [%0],{%1,%2,%3,%4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

__device__ __forceinline__ void prefetch_l2(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

__device__ __forceinline__ u64 clock_ns() {
    u64 t;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t));
    return t;
}

// ---------------------------------------------------------------------- shared memory

#ifdef TRANSDUCER
#include "transducer_layout.cuh"
#else

struct Row {  // one (slot, position) of this step
    u32 slot, position, token;
    u32 bitmap;      // which bitmap of suppressed tokens
    u32 text, end;   // may text, may the end token come next
    u32 first_mark, last_mark;  // markers that may come next, half-open
};

struct __align__(16) Slot {
    u32 active, ticket;
    u32 n_fed;    // positions in the cache
    u32 pending;  // the token to feed next, once everything forced is fed
    u32 cursor;   // next token of the draft
    u32 n_written, n_out, n_verified, segment_first;
    u32 last_mark, previous_is_mark, before_is_mark;  // last_mark is 1 + its index
    float watched;
    u32 first_row, n_rows;  // of this step
    u32 n_head, n_prefix, n_draft, max_tokens, rules, flags, watch_row, watch_token, n_positions, n_plain;
    float tail_bias, inverse_temperature;
    u32 seed, max_first_mark;
};

struct State {  // what lives on between residencies, and in graph mode between phases
    Slot slots[MAX_SLOTS];
    Row rows[MAX_ROWS];
    u32 n_rows;
    u32 n_commands;  // carried out
    u32 n_fetched;   // copied from the host
    u32 n_records;
    u32 n_steps;  // of this launch; in graph mode of all
    u32 leave;    // LeaveReason
};

struct Misc {
    Parameters parameters;
    uint4 streams[N_WARPS];  // between the phases that read weights
    State state;
    volatile u32 dead;  // 1 + the phase of a fault: nobody waits any more
    u32 patience;       // polls
    u32 door;
    u32 owner;       // the phase whose task says which elements of the residual stream are this SM's
    u32 head_phase;
    u32 idle_leave;
    uint4 zeros[ZERO_BYTES / 16];    // what stands for the activations of rows that are not
    float2 norm[2][MAX_ROWS];        // mean and 1 / deviation of the row, by parity of the phase
    u32 phases[N_PHASES][PHASE_WORDS];
    u32 tasks[N_PHASES][TASK_WORDS];
    float2 stats[2][TARGET_ROWS][STATS_PIECES];
    float residual[TARGET_ROWS][RESIDUAL_GRANULES * GRANULE_ROWS];
#if AUX_IN_SHARED
    float2 aux[LINEAR_AUX_GRANULES * GRANULE_ROWS];
#endif
};

static_assert(sizeof(State) <= 4 * STATE_WORDS, "the state does not fit into its words");
static_assert(4 * (N_WARPS * (HEAD_SIZE / 2) + N_WARPS) * 8 <= X_BYTES, "attention's shares do not fit");
static_assert(N_WARPS * MAX_BLOCKS * BLOCK_WORDS * 4 <= SUMS_BYTES, "COMBINE has no room");
static_assert(sizeof(Misc) <= MISC_BYTES, "the tables do not fit into their part of shared memory");
static_assert(WIDTH % STATS_ELEMENTS == 0, "a norm's pieces do not fill the row");
static_assert(TARGET_ROWS * (WIDTH * 2 + X_ROW_PAD_BYTES) <= X_BYTES, "the rows of a step do not fit into shared memory");

#define RING_BYTES (N_WARPS * RING_TILES * TILE_BYTES)

extern __shared__ __align__(128) unsigned char shared[];  // ring, activations, sums, Misc

// What every body is given. All but four numbers lies at fixed places in shared memory.
struct Machine {
    u32 epoch;  // of this step: phases publish epoch + EPOCH
    u32 phase;
    u32 index;  // of the thread
    u32 base;   // address of shared memory

    // What bodies derive from these two the compiler would otherwise keep from phase to phase, in registers that are
    // then missing inside the phases: behind this it knows nothing of them any more.
    __device__ __forceinline__ void forget() {
        asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
        base = shared_address(shared);
        asm volatile("" : "+r"(base));
    }

    __device__ __forceinline__ void* at_offset(u32 bytes) const { return __cvta_shared_to_generic(base + bytes); }
    __device__ __forceinline__ unsigned char* x() const { return (unsigned char*)at_offset(RING_BYTES); }
    __device__ __forceinline__ float* sums() const { return (float*)at_offset(RING_BYTES + X_BYTES); }
    __device__ __forceinline__ Misc& misc() const { return *(Misc*)at_offset(RING_BYTES + X_BYTES + SUMS_BYTES); }
    static __device__ __forceinline__ u32 sm() { return blockIdx.x; }
    __device__ __forceinline__ u32 thread() const { return index; }
    __device__ __forceinline__ u32 warp() const { return index >> 5; }
    __device__ __forceinline__ u32 lane() const { return index & 31; }
    __device__ __forceinline__ u64 number(Parameter which) const { return misc().parameters.word[which]; }

    template <class T>
    __device__ __forceinline__ T* at(Parameter which) const {
        return (T*)number(which);
    }
    __device__ __forceinline__ u32 field(Phase word) const { return misc().phases[phase][word]; }
};
#endif
