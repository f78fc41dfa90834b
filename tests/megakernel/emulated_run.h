// The entry point, behind the kernel.
#pragma once

namespace emulated {
static const Parameters* arguments;

struct Still {  // which warps stand still
    unsigned order = 0;
    int n_warps = 0, n_turns = 0;
    std::vector<int> warp;  // of each block; from n_warps on all but one, from 2 n_warps on none

    Still() {}
    Still(unsigned order, int n_blocks, int n_warps) : order(order), n_warps(n_warps), warp(n_blocks, 2 * n_warps) {}
    int draw(int below) {
        order = order * 1664525u + 1013904223u;
        return (order >> 8) % below;
    }
    void turn() {
        if (order == 0 || n_turns-- > 0) return;
        n_turns = 1 << draw(10);
        for (int& w : warp) w = draw(3 * n_warps);
    }
    bool is_still(int block, int of) const {
        return warp[block] < n_warps ? of == warp[block] : warp[block] < 2 * n_warps && of != warp[block] - n_warps;
    }
};

static void begin() {
    KERNEL(*arguments);
    now->has_ended = true;
    _longjmp(scheduler_place, 1);
}
}  // namespace emulated

// ``order``: 0 for threads in turn; any other draws, for some turns each, one warp of each block that stands still
// meanwhile or one that alone goes on, as a GPU's warps may. → 0, or ``line_apart``, where the run ended
extern "C" int run(const Parameters* parameters, int n_blocks, int n_threads, int shared_bytes, unsigned order) {
    using namespace emulated;
    const size_t STACK = 1 << 16;
    arguments = parameters;
    std::vector<char> memory((size_t)n_blocks * (shared_bytes + 128) + 128), stacks(STACK * n_blocks * n_threads);
    blocks.assign(n_blocks, Block());
    lanes.assign((size_t)n_blocks * n_threads, Lane());
    for (int b = 0; b < n_blocks; b++) {
        blocks[b].warps.resize(n_threads / 32);
        blocks[b].own_memory = (char*)(((uintptr_t)memory.data() + (size_t)b * (shared_bytes + 128) + 127) & ~(uintptr_t)127);
        for (int t = 0; t < n_threads; t++) {
            Lane& lane = lanes[(size_t)b * n_threads + t];
            lane.block = b, lane.thread = t, lane.has_begun = lane.has_ended = false;
            getcontext(&lane.context);
            lane.context.uc_stack.ss_sp = stacks.data() + STACK * ((size_t)b * n_threads + t);
            lane.context.uc_stack.ss_size = STACK;
            lane.context.uc_link = &scheduler;
            makecontext(&lane.context, begin, 0);
        }
    }
    static size_t n_left, next;
    static Still still;
    still = Still(order, n_blocks, n_threads / 32);
    line_apart = 0;
    for (n_left = lanes.size(), next = 0; n_left && !line_apart; next = next + 1 == lanes.size() ? 0 : next + 1) {
        if (next == 0) still.turn();
        now = &lanes[next];
        if (now->has_ended || still.is_still(now->block, now->thread / 32)) continue;
        if (!_setjmp(scheduler_place)) {
            if (now->has_begun) _longjmp(now->place, 1);
            now->has_begun = true;
            setcontext(&now->context);
        }
        n_left -= now->has_ended;
    }
    return line_apart;
}
