// What the kernels need of the hardware, and bfloat16. No toolkit headers, so that NVRTC needs none.
#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#define NEGATIVE_INFINITY __int_as_float(0xff800000)
#define ALL_LANES 0xffffffffu
#define DYNAMIC_SHARED(name) extern __shared__ uint4 name[]

__device__ __forceinline__ float low_bf16(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high_bf16(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ u32 pack_bf16(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

// d[16 rows x 8] += a[16 rows x 16] · b[16 x 8]. Lane (g = lane / 4, t = lane % 4) has of a: a0 row g, a1 row g + 8,
// both at k 2t and 2t + 1, a2 and a3 the same at k + 8; of b column g: b0 at k 2t and 2t + 1, b1 at k + 8; of d row g
// columns 2t and 2t + 1, then row g + 8.
__device__ __forceinline__ void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ float largest_of_4(float x) {
    x = fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 1));
    return fmaxf(x, __shfl_xor_sync(ALL_LANES, x, 2));
}

__device__ __forceinline__ float sum_of_4(float x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    return x + __shfl_xor_sync(ALL_LANES, x, 2);
}

__device__ __forceinline__ float sum_of_warp(float x) {
#pragma unroll
    for (int mask = 16; mask; mask >>= 1) x += __shfl_xor_sync(ALL_LANES, x, mask);
    return x;
}

// 16 bytes to shared memory while the thread goes on; the same thread waits for all of its own.
__device__ __forceinline__ void copy_ahead(void* to_shared, const void* from) {
    u32 to = (u32)__cvta_generic_to_shared(to_shared);
    asm volatile("cp.async.cg.shared.global [%0],[%1],16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Programmatic dependent launch: the next kernel of the stream may come onto the SMs from now on, and fetch what does
// not depend on this one; and what this one depends on is complete. Before sm_90, kernels follow each other anyway.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
__device__ __forceinline__ void wait_for_input() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
