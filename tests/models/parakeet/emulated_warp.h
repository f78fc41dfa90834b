// kernels/warp.cuh for a CPU: a block's threads take turns, each until it waits for the others of its warp or block.
// What differs from a GPU: the order of floating-point sums inside a matrix instruction, and nothing runs at once.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;
struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
using std::max;
using std::min;

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static
#define NEGATIVE_INFINITY (-INFINITY)
#define ALL_LANES 0xffffffffu
#define DYNAMIC_SHARED(name) uint4* name = (uint4*)emulated::dynamic_shared

namespace emulated {
struct Index { int x, y, z; };
struct Matrices { float* d; u32 a[4], b[2]; };
struct Lane { ucontext_t context; Index thread; bool has_ended; };
struct Barrier { int n_waiting = 0; unsigned turn = 0; };

static std::vector<Lane> lanes;
static std::vector<char*> stacks;
static std::vector<Barrier> warps;
static std::vector<Matrices> matrices;
static std::vector<float> passed;
static Barrier block;
static ucontext_t scheduler;
static int now;
static Index block_index, grid, block_size;
static char* dynamic_shared;
static void (*body)();

inline void pause() { swapcontext(&lanes[now].context, &scheduler); }
template <typename Last>
inline void meet(Barrier& barrier, int n, Last last) {
    const unsigned turn = barrier.turn;
    if (++barrier.n_waiting == n) {
        last();
        barrier.n_waiting = 0;
        barrier.turn++;
        return;
    }
    while (barrier.turn == turn) pause();
}
template <typename Last>
inline void meet_warp(Last last) {
    meet(warps[now / 32], std::min(32, (int)lanes.size() - now / 32 * 32), last);
}
inline float float_of(u32 bits) { float x; memcpy(&x, &bits, 4); return x; }
inline u32 bits_of(float x) { u32 bits; memcpy(&bits, &x, 4); return bits; }
inline float element(u32 pair, int i) { return float_of(i ? pair & 0xffff0000u : pair << 16); }

inline void multiply(const Matrices* of) {  // of 32 lanes
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 2; i++) {
            const int g = lane / 4, k = lane % 4 * 2 + i;
            a[g][k] = element(of[lane].a[0], i), a[g + 8][k] = element(of[lane].a[1], i);
            a[g][k + 8] = element(of[lane].a[2], i), a[g + 8][k + 8] = element(of[lane].a[3], i);
            b[k][g] = element(of[lane].b[0], i), b[k + 8][g] = element(of[lane].b[1], i);
        }
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) {
            float sum = 0;
            for (int k = 0; k < 16; k++) sum += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
            of[lane].d[i] += sum;
        }
}
}  // namespace emulated

#define threadIdx emulated::lanes[emulated::now].thread
#define blockIdx emulated::block_index
#define gridDim emulated::grid
#define blockDim emulated::block_size

inline float __int_as_float(int bits) { return emulated::float_of((u32)bits); }
inline float __uint_as_float(u32 bits) { return emulated::float_of(bits); }
inline float __expf(float x) { return std::exp(x); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
inline void __syncthreads() { emulated::meet(emulated::block, (int)emulated::lanes.size(), [] {}); }
inline void __syncwarp() { emulated::meet_warp([] {}); }
inline float __shfl_xor_sync(u32, float x, int mask) {
    const int me = emulated::now;
    emulated::passed[me] = x;
    __syncwarp();
    const float other = emulated::passed[me ^ mask];
    __syncwarp();
    return other;
}
inline u32 __byte_perm(u32 x, u32 y, u32 selector) {
    const u64 bytes = (u64)y << 32 | x;
    u32 out = 0;
    for (int i = 0; i < 4; i++) out |= (u32)(bytes >> (selector >> i * 4 & 7) * 8 & 0xff) << i * 8;
    return out;
}

inline float low_bf16(u32 pair) { return emulated::element(pair, 0); }
inline float high_bf16(u32 pair) { return emulated::element(pair, 1); }
inline u32 rounded_bf16(float x) {
    const u32 bits = emulated::bits_of(x);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 pack_bf16(float low, float high) { return rounded_bf16(high) << 16 | rounded_bf16(low); }
inline void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    emulated::matrices[emulated::now] = {d, {a0, a1, a2, a3}, {b0, b1}};
    emulated::meet_warp([] { emulated::multiply(&emulated::matrices[emulated::now / 32 * 32]); });
}
inline float largest_of_4(float x) {
    x = std::max(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return std::max(x, __shfl_xor_sync(ALL_LANES, x, 2));
}
inline float sum_of_4(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}
inline float sum_of_warp(float x) {
    for (int mask = 16; mask; mask >>= 1) x += __shfl_xor_sync(ALL_LANES, x, mask);
    return x;
}
inline void copy_ahead(void* to, const void* from) { memcpy(to, from, 16); }
inline void wait_for_copies() {}
inline void let_next_begin() {}
inline void wait_for_input() {}

// ---------------------------------------------------------------------- running a kernel

struct Arguments;
namespace emulated {
static void (*kernel)(Arguments);
static const Arguments* arguments;
static void begin();

// Every block of ``kernel``, one after the other.
static void run_blocks(int n_threads, int shared_bytes) {
    while ((int)stacks.size() < n_threads) stacks.push_back((char*)malloc(1 << 17));
    std::vector<char> dynamic(shared_bytes + 16);
    dynamic_shared = (char*)(((uintptr_t)dynamic.data() + 15) & ~(uintptr_t)15);
    lanes.resize(n_threads), matrices.resize(n_threads), passed.resize(n_threads);
    block_size = {n_threads, 1, 1};
    for (int z = 0; z < grid.z; z++)
        for (int y = 0; y < grid.y; y++)
            for (int x = 0; x < grid.x; x++) {
                block_index = {x, y, z};
                block = Barrier();
                warps.assign((n_threads + 31) / 32, Barrier());
                for (int i = 0; i < n_threads; i++) {
                    lanes[i].thread = {i, 0, 0};
                    lanes[i].has_ended = false;
                    getcontext(&lanes[i].context);
                    lanes[i].context.uc_stack.ss_sp = stacks[i];
                    lanes[i].context.uc_stack.ss_size = 1 << 17;
                    lanes[i].context.uc_link = &scheduler;
                    makecontext(&lanes[i].context, begin, 0);
                }
                for (int n_left = n_threads; n_left;)
                    for (now = 0; now < n_threads; now++)
                        if (!lanes[now].has_ended) {
                            swapcontext(&scheduler, &lanes[now].context);
                            n_left -= lanes[now].has_ended;
                        }
            }
}
}  // namespace emulated
