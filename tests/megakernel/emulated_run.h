// The entry point, behind the kernel.
#pragma once

namespace emulated {
static const Parameters* arguments;
static void begin() {
    KERNEL(*arguments);
    now->has_ended = true;
    _longjmp(scheduler_place, 1);
}
}  // namespace emulated

extern "C" void run(const Parameters* parameters, int n_blocks, int n_threads, int shared_bytes) {
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
    for (n_left = lanes.size(), next = 0; n_left; next = next + 1 == lanes.size() ? 0 : next + 1) {
        now = &lanes[next];
        if (now->has_ended) continue;
        if (!_setjmp(scheduler_place)) {
            if (now->has_begun) _longjmp(now->place, 1);
            now->has_begun = true;
            setcontext(&now->context);
        }
        n_left -= now->has_ended;
    }
}
