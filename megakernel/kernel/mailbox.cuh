// The host's side of the loop, all of it on the last SM: the door, commands and requests come in, records go out.
// Nothing here waits for the host while there are rows to work on.
#pragma once

#include "exchange.cuh"

// A record of two halves, each one write and each with the record's number, so that the host can tell when it is whole.
__device__ __forceinline__ void emit(const Machine m, u32 kind, u32 slot, u32 ticket, u32 token, u32 value, u32 extra) {
    if (m.sm() != CONTROL_SM) return;
    const u32 sequence = 1 + atomicAdd(&m.misc().state.n_records, 1u);
    uint4* to = m.at<uint4>(PARAMETER_HOST_RECORDS) + (sequence - 1) % RECORD_SLOTS * (RECORD_WORDS / 4);
    if (kind == RECORD_KIND_DONE) __threadfence_system();  // scores and caches of the slot come first
    store_host(to, make_uint4(kind | slot << 8, ticket, token, sequence));
    store_host(to + 1, make_uint4(value, extra, m.misc().state.n_steps, sequence));
}

// One look at the host, by one thread of the last SM.
__device__ __forceinline__ void look_at_door(const Machine m) {
    m.misc().door = load_host(m.at<const u32>(PARAMETER_HOST_DOOR));
    if (load_host(m.at<const u32>(PARAMETER_HOST_ABORT)) != 0) raise(m, FAULT_KIND_ABORTED);
}

// By one thread: looks until the host has written a command, or the time to be idle is over.
__device__ __forceinline__ void wait_at_door(const Machine m) {
    const u64 since = clock_ns();
    u32 pause_ns = 100;
    m.misc().idle_leave = 0;
    while (true) {
        look_at_door(m);
        if (m.misc().door != m.misc().state.n_fetched || m.misc().dead) break;
        if (clock_ns() - since > m.number(PARAMETER_IDLE_NS)) {
            m.misc().idle_leave = LEAVE_REASON_IDLE;
            break;
        }
        __nanosleep(pause_ns);
        pause_ns = pause_ns < 10000 ? 2 * pause_ns : 20000;
    }
}

// Copies the commands up to the door, and the requests of slots that open, to where every SM can read them.
__device__ __noinline__ void fetch(const Machine m) {
    State& state = m.misc().state;
    const u32 door = m.misc().door;
    u32* requests = m.at<u32>(PARAMETER_REQUESTS);
    for (u32 c = state.n_fetched; c != door; c++) {
        const u32* from = m.at<const u32>(PARAMETER_HOST_COMMANDS) + c % COMMAND_SLOTS * COMMAND_WORDS;
        u32* to = requests + MAX_SLOTS * REQUEST_WORDS + c % COMMAND_SLOTS * COMMAND_WORDS;
        if (m.thread() < COMMAND_WORDS) store_gpu(to + m.thread(), load_host(from + m.thread()));
        const u32 kind = load_host(from + COMMAND_KIND), slot = load_host(from + COMMAND_SLOT);
        if (kind == COMMAND_KIND_OPEN && slot < MAX_SLOTS && !state.slots[slot].active) {
            const u32* request = m.at<const u32>(PARAMETER_HOST_REQUESTS) + slot * REQUEST_WORDS;
            for (u32 i = m.thread(); i < REQUEST_WORDS; i += N_THREADS)
                store_gpu(requests + slot * REQUEST_WORDS + i, load_host(request + i));
        }
    }
    __threadfence();
    __syncthreads();
    if (m.thread() == 0) state.n_fetched = door;
}

// The word for which every SM waits before the next step: commands to carry out, and whether to leave.
__device__ __forceinline__ void publish_control(const Machine m, u32 epoch, u32 leave) {
    const State& state = m.misc().state;
    if (state.n_steps + 1 >= m.number(PARAMETER_MAX_STEPS) && leave == 0) leave = LEAVE_REASON_STEPS;
    publish(words(m) + CONTROL_WORD, (state.n_fetched & 0xffffffu) | leave << 24, epoch);
}

// At the join of a step with rows, on the last SM.
__device__ __forceinline__ void answer_door(const Machine m) {
    if (m.sm() != CONTROL_SM) return;
    if (m.misc().door != m.misc().state.n_fetched) fetch(m);
    if (m.thread() == 0) publish_control(m, m.epoch + m.field(PHASE_EPOCH), 0);
}

// A step without rows. All SMs arrive, so that none is still in the step before; then the last one watches the door.
// ``phase`` of the machine is HEAD.
__device__ __noinline__ void idle(const Machine m) {
    const u32 epoch = m.epoch + m.field(PHASE_EPOCH), partials = m.field(PHASE_OUTPUT);
    u64* const arrivals = words(m) + partials + PARTIAL_UNUSED;
    if (m.thread() == 0) publish(arrivals + m.sm() * TARGET_ROWS * PARTIAL_WORDS, 0, epoch);
    if (m.sm() != CONTROL_SM) return;
    for (u32 sm = m.thread(); sm < N_SMS; sm += N_THREADS) take(m, arrivals + sm * TARGET_ROWS * PARTIAL_WORDS, epoch);
    __syncthreads();
    if (m.thread() == 0) wait_at_door(m);
    __syncthreads();
    if (m.misc().door != m.misc().state.n_fetched) fetch(m);
    if (m.thread() == 0) publish_control(m, epoch, m.misc().idle_leave);
}
