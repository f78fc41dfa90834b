// The weight stream: each lane loads, RING_TILES ahead, the 16 bytes of every tile that it alone will read. No barrier
// and no loader warp; at the end of the tape the next step begins, so the ring stays full while nobody needs weights.
#pragma once

#include "machine.cuh"

struct Stream {
    u32 ring;          // shared address of this lane's part of its warp's first slot
    u32 slot;          // bytes from there to the oldest tile
    const char* tape;  // this lane's part of the warp's first tile
    u32 next;          // bytes from there to the tile to load next
    u32 n_bytes;       // of this warp's part of the tape

    // As the last phase left it.
    __device__ __forceinline__ explicit Stream(const Machine m) {
        const uint4 at = m.misc().streams[m.warp()];
        ring = m.base + m.warp() * RING_TILES * TILE_BYTES + m.lane() * 16;
        slot = at.x;
        next = at.y;
        tape = m.at<const char>(PARAMETER_TAPE) + (u64)at.z * TILE_BYTES + m.lane() * 16;
        n_bytes = at.w;
    }

    // For the next phase. All lanes of the warp together.
    __device__ __forceinline__ void leave(const Machine m) const {
        __syncwarp();
        if (m.lane() == 0) *(uint2*)&m.misc().streams[m.warp()] = make_uint2(slot, next);
        __syncwarp();
    }

    // The oldest N tiles. Call refill once their products are issued: it fills the same slots.
    template <int N>
    __device__ __forceinline__ void take(uint4 (&w)[N]) const {
        asm volatile("cp.async.wait_group %0;" ::"n"(RING_TILES - N) : "memory");
#pragma unroll
        for (int i = 0; i < N; i++) {
            u32 at = slot + i * TILE_BYTES;
            if (at >= RING_TILES * TILE_BYTES) at -= RING_TILES * TILE_BYTES;
            asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];"
                         : "=r"(w[i].x), "=r"(w[i].y), "=r"(w[i].z), "=r"(w[i].w)
                         : "r"(ring + at)
                         : "memory");
        }
    }

    template <int N>
    __device__ __forceinline__ void refill() {
#pragma unroll
        for (int i = 0; i < N; i++) {
            asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(ring + slot), "l"(tape + next)
                         : "memory");
            asm volatile("cp.async.commit_group;" ::: "memory");
            next += TILE_BYTES;
            if (next == n_bytes) next = 0;
            slot += TILE_BYTES;
            if (slot == RING_TILES * TILE_BYTES) slot = 0;
        }
    }
};

// Fills the ring from tile ``first`` of this warp's part of the tape on.
__device__ __forceinline__ void start_stream(const Machine m, u32 first) {
    const u32* part = m.at<const u32>(PARAMETER_WARP_TILES) + (m.sm() * N_WARPS + m.warp()) * 2;
    const u32 n_tiles = part[1];
    if (n_tiles == 0) return;
    if (m.lane() == 0) m.misc().streams[m.warp()] = make_uint4(0, first % n_tiles * TILE_BYTES, part[0], n_tiles * TILE_BYTES);
    __syncwarp();
    Stream stream(m);
#pragma unroll 1
    for (int i = 0; i < RING_TILES; i++) stream.refill<1>();
    stream.leave(m);
}

__device__ __forceinline__ void stop_stream() { asm volatile("cp.async.wait_all;" ::: "memory"); }
