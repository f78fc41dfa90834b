// The entry point, behind the kernels.
#pragma once

namespace emulated {
static void begin() {
    kernel(*arguments);
    lanes[now].has_ended = true;
}
}  // namespace emulated

extern "C" void run(void (*kernel)(Arguments), const Arguments* arguments, const int* n_blocks, int n_threads,
                    int shared_bytes) {
    emulated::kernel = kernel;
    emulated::arguments = arguments;
    emulated::grid = {n_blocks[0], n_blocks[1], n_blocks[2]};
    emulated::run_blocks(n_threads, shared_bytes);
}
