// The weight stream: each lane loads, RING_TILES ahead, the 16 bytes of every tile that it alone will read. No barrier
// and no loader warp; at the end of the tape the next step begins, so the ring stays full while nobody needs weights.
#pragma once

#include "machine.cuh"

struct Stream {
    u32 ring;        // shared address of this lane's part of its warp's first slot
    u32 slot;        // bytes from there to the next tile
    const char* tape;  // this lane's part of the warp's first tile
    u32 next;        // tile to load next
    u32 n_tiles;     // of this warp's part of the tape

    __device__ __forceinline__ void load_next() {
        if (n_tiles != 0) {
            asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(ring + slot),
                         "l"(tape + (u64)next * TILE_BYTES)
                         : "memory");
            if (++next == n_tiles) next = 0;
        }
        asm volatile("cp.async.commit_group;" ::: "memory");
        slot = slot + TILE_BYTES == RING_TILES * TILE_BYTES ? 0 : slot + TILE_BYTES;
    }

    __device__ __forceinline__ void start(const Machine m, u32 first) {
        const u32* part = m.at<const u32>(PARAMETER_WARP_TILES) + (m.sm() * N_WARPS + m.warp()) * 2;
        ring = shared_address(shared) + m.warp() * RING_TILES * TILE_BYTES + m.lane() * 16;
        slot = 0;
        tape = m.at<const char>(PARAMETER_TAPE) + (u64)part[0] * TILE_BYTES + m.lane() * 16;
        n_tiles = part[1];
        next = n_tiles == 0 ? 0 : first % n_tiles;
#pragma unroll 1
        for (int i = 0; i < RING_TILES; i++) load_next();
    }

    // The oldest tile. Call load_next once its products are issued: the slot is the one that load_next fills.
    __device__ __forceinline__ uint4 take() {
        uint4 w;
        asm volatile("cp.async.wait_group %0;" ::"n"(RING_TILES - 1) : "memory");
        asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];"
                     : "=r"(w.x), "=r"(w.y), "=r"(w.z), "=r"(w.w)
                     : "r"(ring + slot)
                     : "memory");
        return w;
    }

    __device__ __forceinline__ void stop() { asm volatile("cp.async.wait_all;" ::: "memory"); }
};
