// A GPU for one program on this machine's processor: the threads of all blocks take turns, each until it waits for others
// of its warp or block, or has looked at memory that others write. What differs from a GPU: the order of floating-point
// sums inside a matrix instruction, and nothing runs at once. Instructions that the sources write in PTX are functions
// here, whose names are theirs (`emulator.py` puts the calls in).
#pragma once
#include <algorithm>
#include <chrono>
#include <cmath>
#include <csetjmp>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ucontext.h>
#include <vector>

struct uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
using std::max;
using std::min;

#define __device__
#define __global__
#define __host__
#define __noinline__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) alignas(n)

namespace emulated {
typedef unsigned long long u64;
struct Index { unsigned x; };
struct Barrier { int n_waiting = 0, line = 0; unsigned turn = 0; };
struct Warp { Barrier barrier; unsigned words[32]; float* d[32]; unsigned a[32][4], b[32][2]; };
struct Block { Barrier barrier; std::vector<Warp> warps; char* own_memory; };
struct Lane { ucontext_t context; jmp_buf place; int block, thread; bool has_begun, has_ended; };

static std::vector<Lane> lanes;
static std::vector<Block> blocks;
static ucontext_t scheduler;
static jmp_buf scheduler_place;
static Lane* now;
static const unsigned n_of_warp = 32;
static int line_apart;  // where a thread came to wait for its block while others wait at another place

// Back to the scheduler; by a jump, since changing contexts asks the system each time.
inline void pause() {
    if (!_setjmp(now->place)) _longjmp(scheduler_place, 1);
}
inline Block& block() { return blocks[now->block]; }
inline Warp& warp() { return block().warps[now->thread / 32]; }
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
// All of a block at the same place in the source.
inline void meet_block(int line) {
    Barrier& barrier = block().barrier;
    if (barrier.n_waiting != 0 && barrier.line != line) line_apart = line, pause();
    barrier.line = line;
    meet(barrier, block().warps.size() * 32, [] {});
}
inline void meet_warp() { meet(warp().barrier, n_of_warp, [] {}); }
inline float float_of(unsigned bits) { float x; memcpy(&x, &bits, 4); return x; }
inline unsigned bits_of(float x) { unsigned bits; memcpy(&bits, &x, 4); return bits; }
inline float element(unsigned pair, int i) { return float_of(i ? pair & 0xffff0000u : pair << 16); }
inline unsigned rounded_bf16(float x) {
    const unsigned bits = bits_of(x);
    return (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline void multiply(Warp& of) {
    float a[16][16], b[16][8];
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 2; i++) {
            const int g = lane / 4, k = lane % 4 * 2 + i;
            a[g][k] = element(of.a[lane][0], i), a[g + 8][k] = element(of.a[lane][1], i);
            a[g][k + 8] = element(of.a[lane][2], i), a[g + 8][k + 8] = element(of.a[lane][3], i);
            b[k][g] = element(of.b[lane][0], i), b[k + 8][g] = element(of.b[lane][1], i);
        }
    for (int lane = 0; lane < 32; lane++)
        for (int i = 0; i < 4; i++) {
            float sum = 0;
            for (int k = 0; k < 16; k++) sum += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
            of.d[lane][i] += sum;
        }
}
// Every lane's word, in the order of lanes, given to ``reduce``.
template <typename Reduce>
inline unsigned together(unsigned word, Reduce reduce) {
    Warp& own = warp();
    own.words[now->thread % 32] = word;
    meet_warp();
    const unsigned result = reduce(own.words);
    meet_warp();
    return result;
}
}  // namespace emulated

#define threadIdx (emulated::Index{(unsigned)emulated::now->thread})
#define blockIdx (emulated::Index{(unsigned)emulated::now->block})
#define shared ((unsigned char*)emulated::block().own_memory)

// ---------------------------------------------------------------------- what the compiler knows

inline float __int_as_float(int bits) { return emulated::float_of((unsigned)bits); }
inline float __uint_as_float(unsigned bits) { return emulated::float_of(bits); }
inline unsigned __float_as_uint(float x) { return emulated::bits_of(x); }
inline float __expf(float x) { return std::exp(x); }
inline float __fdividef(float a, float b) { return a / b; }
#define __syncthreads() emulated::meet_block(__LINE__)
inline void __syncwarp() { emulated::meet_warp(); }
inline unsigned __shfl_xor_sync(unsigned, unsigned x, int mask) {
    const int me = emulated::now->thread % 32;
    return emulated::together(x, [&](const unsigned* words) { return words[me ^ mask]; });
}
inline float __shfl_xor_sync(unsigned all, float x, int mask) {
    return __uint_as_float(__shfl_xor_sync(all, __float_as_uint(x), mask));
}
inline unsigned __shfl_sync(unsigned, unsigned x, int lane) {
    return emulated::together(x, [&](const unsigned* words) { return words[lane]; });
}
inline unsigned __shfl_up_sync(unsigned, unsigned x, int by) {
    const int me = emulated::now->thread % 32;
    return emulated::together(x, [&](const unsigned* words) { return words[me < by ? me : me - by]; });
}
inline unsigned __ballot_sync(unsigned, bool x) {
    return emulated::together(x, [](const unsigned* words) {
        unsigned bits = 0;
        for (int i = 0; i < 32; i++) bits |= words[i] << i;
        return bits;
    });
}
inline unsigned __reduce_max_sync(unsigned, unsigned x) {
    return emulated::together(x, [](const unsigned* words) { return *std::max_element(words, words + 32); });
}
inline unsigned __reduce_min_sync(unsigned, unsigned x) {
    return emulated::together(x, [](const unsigned* words) { return *std::min_element(words, words + 32); });
}
inline unsigned __reduce_or_sync(unsigned, unsigned x) {
    return emulated::together(x, [](const unsigned* words) {
        unsigned bits = 0;
        for (int i = 0; i < 32; i++) bits |= words[i];
        return bits;
    });
}
inline bool __any_sync(unsigned all, bool x) { return __ballot_sync(all, x) != 0; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
template <class T> inline T __ldg(const T* p) { return *p; }
template <class T> inline T __ldcg(const T* p) { return *p; }
template <class T> inline void __stcg(T* p, T x) { *p = x; }
inline void __nanosleep(unsigned) { emulated::pause(); }
inline void __threadfence() {}
inline void __threadfence_system() {}
inline unsigned atomicCAS(unsigned* p, unsigned expected, unsigned x) {
    const unsigned before = *p;
    if (before == expected) *p = x;
    return before;
}
inline unsigned atomicAdd(unsigned* p, unsigned x) { return (*p += x) - x; }
inline size_t __cvta_generic_to_shared(const void* p) { return (const char*)p - emulated::block().own_memory; }

// ---------------------------------------------------------------------- what the sources write in PTX

typedef unsigned long long Word;
inline void cvt_rn_bf16x2_f32(unsigned& pair, float high, float low) {
    pair = emulated::rounded_bf16(high) << 16 | emulated::rounded_bf16(low);
}
inline void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(
    float& d0, float& d1, float& d2, float& d3, unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    emulated::Warp& own = emulated::warp();
    const int lane = emulated::now->thread % 32;
    float d[4] = {d0, d1, d2, d3};
    own.d[lane] = d;
    const unsigned a[4] = {a0, a1, a2, a3}, b[2] = {b0, b1};
    memcpy(own.a[lane], a, sizeof a), memcpy(own.b[lane], b, sizeof b);
    emulated::meet(own.barrier, 32, [&] { emulated::multiply(own); });
    d0 = d[0], d1 = d[1], d2 = d[2], d3 = d[3];
}
inline void movmatrix_sync_aligned_m8n8_trans_b16(unsigned& out, unsigned in) {
    const unsigned lane = emulated::now->thread % 32, row = lane / 4;
    out = emulated::together(in, [&](const unsigned* words) {
        unsigned pair = 0;
        for (unsigned i = 0; i < 2; i++) {
            const unsigned word = words[(lane % 4 * 2 + i) * 4 + row / 2];
            pair |= (row & 1 ? word >> 16 : word & 0xffffu) << 16 * i;
        }
        return pair;
    });
}
inline void max_NaN_f32(float& y, float x) { y = std::isnan(x) ? x : std::max(x, 0.0f); }
inline void ld_global_cg_v4_u32(unsigned& x, unsigned& y, unsigned& z, unsigned& w, const void* p) {
    const uint4 v = *(const uint4*)p;
    x = v.x, y = v.y, z = v.z, w = v.w;
}
inline void ld_relaxed_gpu_global_u32(unsigned& v, const unsigned* p) { emulated::pause(), v = *p; }
inline void ld_acquire_sys_global_u32(unsigned& v, const unsigned* p) { emulated::pause(), v = *p; }
inline void st_relaxed_gpu_global_u32(unsigned* p, unsigned v) { *p = v; }
inline void st_relaxed_sys_global_u32(unsigned* p, unsigned v) { *p = v; }
inline void st_volatile_global_v4_u32(uint4* p, unsigned x, unsigned y, unsigned z, unsigned w) { *p = {x, y, z, w}; }
inline void prefetch_global_L2(const void*) {}
inline void mov_u64(Word& t) { t = std::chrono::steady_clock::now().time_since_epoch().count(); }
inline void ld_relaxed_gpu_global_v2_b64(Word& a, Word& b, const Word* p) { emulated::pause(), a = p[0], b = p[1]; }
inline void ld_relaxed_gpu_global_b64(Word& v, const Word* p) { emulated::pause(), v = *p; }
inline void st_relaxed_gpu_global_b64(Word* p, Word v) { *p = v; }
inline void st_relaxed_gpu_global_v2_b64(Word* p, Word a, Word b) { p[0] = a, p[1] = b; }
inline void cp_async_cg_shared_global_L2__128B(unsigned to, const char* from) {
    memcpy(emulated::block().own_memory + to, from, 16);
}
inline void cp_async_cg_shared_global(unsigned to, const void* from) { memcpy(emulated::block().own_memory + to, from, 16); }
inline void cp_async_wait_all() {}
inline void cp_async_commit_group() {}
inline void cp_async_wait_group(int) {}
inline void ld_shared_v4_u32(unsigned& x, unsigned& y, unsigned& z, unsigned& w, unsigned at) {
    const uint4 v = *(const uint4*)(emulated::block().own_memory + at);
    x = v.x, y = v.y, z = v.z, w = v.w;
}
inline void mov_u32(unsigned& v) { v = emulated::now->thread; }
inline void* __cvta_shared_to_generic(size_t at) { return emulated::block().own_memory + at; }
inline int __ffs(unsigned x) { return __builtin_ffs(x); }
inline float __shfl_sync(unsigned all, float x, int lane) { return __uint_as_float(__shfl_sync(all, __float_as_uint(x), lane)); }
inline float rsqrtf(float x) { return 1.0f / std::sqrt(x); }
