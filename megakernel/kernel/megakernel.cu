// A model's whole decode loop. One block on each SM runs the same phases in the same order; what an SM does
// in a phase is its task. `megakernel_loop` stays for as long as there is work; `megakernel_phase` runs one phase a
// launch with the same bodies, as fallback, for bisecting, and to compare with.
#include "isa.h"
#include "machine.cuh"
#include "stream.cuh"
#include "exchange.cuh"
#include "linear.cuh"
#include "attention.cuh"
#include "head.cuh"
#include "select.cuh"

__device__ __forceinline__ void load_tables(const Machine m) {
    const u32* tasks = m.at<const u32>(PARAMETER_TASKS) + m.sm() * N_PHASES * TASK_WORDS;
    u32* to = &m.misc().tasks[0][0];
    for (u32 i = m.thread(); i < N_PHASES * PHASE_WORDS; i += N_THREADS)
        (&m.misc().phases[0][0])[i] = __ldg(m.at<const u32>(PARAMETER_PHASES) + i);
    for (u32 i = m.thread(); i < N_PHASES * TASK_WORDS; i += N_THREADS) to[i] = __ldg(tasks + i);
#if AUX_IN_SHARED
    const float2* aux = m.at<const float2>(PARAMETER_AUX) + (u64)m.sm() * AUX_GRANULES * GRANULE_ROWS;
    for (u32 i = m.thread(); i < LINEAR_AUX_GRANULES * GRANULE_ROWS; i += N_THREADS) m.misc().aux[i] = __ldg(aux + i);
#endif
}

__device__ __noinline__ void find_phases(const Machine m) {
    if (m.thread() == 0) {
        m.misc().owner = 0;
        for (u32 i = N_PHASES; i-- > 0;) {
            if (m.misc().phases[i][PHASE_FLAGS] & FLAG_RESIDUAL) m.misc().owner = i;
            if (m.misc().phases[i][PHASE_OP] == OP_HEAD) m.misc().head_phase = i;
        }
    }
    __syncthreads();
}

__device__ __forceinline__ void load_state(const Machine m) {
    const u32* from = m.at<const u32>(PARAMETER_STATE);
    u32* to = (u32*)&m.misc().state;
    for (u32 i = m.thread(); i < sizeof(State) / 4; i += N_THREADS) to[i] = load_gpu(from + i);
}

__device__ __forceinline__ void save_state(const Machine m) {
    u32* to = m.at<u32>(PARAMETER_STATE);
    const u32* from = (const u32*)&m.misc().state;
    for (u32 i = m.thread(); i < sizeof(State) / 4; i += N_THREADS) store_gpu(to + i, from[i]);
}

// What the host goes on from, by one thread of the last SM.
__device__ __forceinline__ void leave_counts(const Machine m, u32 leave) {
    u32* control = m.at<u32>(PARAMETER_CONTROL);
    store_gpu(control + CONTROL_N_STEPS, m.misc().state.n_steps);
    store_gpu(control + CONTROL_N_COMMANDS, m.misc().state.n_commands);
    store_gpu(control + CONTROL_N_RECORDS, m.misc().state.n_records);
    store_gpu(control + CONTROL_LEFT, leave);
}

// For tests: one SM stops, the others must notice.
__device__ __forceinline__ void stall_if_asked(const Machine m) {
    u32* control = m.at<u32>(PARAMETER_CONTROL);
    if (__ldg(control + CONTROL_STALL_SM) != m.sm() + 1 || __ldg(control + CONTROL_STALL_STEP) != m.misc().state.n_steps) return;
    while (load_gpu(control + CONTROL_ABORT) == 0) __nanosleep(1000);
    m.misc().dead = 1;
}

__device__ __forceinline__ void run_phase(const Machine m) {
    const u32 op = m.field(PHASE_OP);
    if (op == OP_SELECT) {
        select(m);
        return;
    }
    if (m.misc().state.n_rows == 0) {
        if (op == OP_HEAD) answer_door(m);
        return;
    }
    switch (op) {
        case OP_LINEAR:  // nothing is kept over the call, which has use for all registers
            switch (m.field(PHASE_K)) {
#define RUN(K, K_WARPS)         \
    case K:                     \
        linear<K, K_WARPS>(m);  \
        break;
                LINEAR_SHAPES(RUN)
#undef RUN
            }
            if (m.field(PHASE_FLAGS) & FLAG_STREAM)
                begin_residual(m, m.misc().tasks[m.misc().owner], m.misc().state.n_rows);
            break;
        case OP_ATTEND_SELF:
            if (m.sm() == CONTROL_SM && m.thread() == 0 && m.field(PHASE_LAYER) == 0) look_at_door(m);
            prefetch_first(m, m.field(PHASE_LAYER));
            attend<false>(m);
            break;
        case OP_ATTEND_CROSS:
            attend<true>(m);
            break;
        case OP_COMBINE:
            combine(m);
            break;
        case OP_HEAD:
#define RUN(K, K_WARPS) head<K, K_WARPS>(m);
            HEAD_SHAPES(RUN)
#undef RUN
            break;
    }
}

__device__ __forceinline__ void begin(const Machine m, const Parameters& p) {
    if (m.thread() < PARAMETER_WORDS) m.misc().parameters.word[m.thread()] = p.word[m.thread()];
    if (m.thread() < ZERO_BYTES / 16) m.misc().zeros[m.thread()] = make_uint4(0, 0, 0, 0);
    if (m.thread() == 0) {
        m.misc().dead = 0;
        m.misc().patience = (u32)(p.word[PARAMETER_SPIN_NS] >> 10);
    }
    __syncthreads();
}

#ifndef WITHOUT_MEGAKERNEL_LOOP
extern "C" __global__ void __launch_bounds__(N_THREADS, 1) megakernel_loop(const __grid_constant__ Parameters p) {
    Machine m = {0, 0, 0, 0};
    m.forget();
    begin(m, p);
    State& state = m.misc().state;
    start_stream(m, 0);
    load_tables(m);
    load_state(m);
    __syncthreads();
    find_phases(m);
    if (m.thread() == 0) {
        state.n_steps = 0;
        state.leave = 0;
        m.misc().door = state.n_fetched = state.n_commands = (u32)m.number(PARAMETER_COMMANDS);
        state.n_records = (u32)m.number(PARAMETER_RECORDS);
    }
    __syncthreads();
    if (m.warp() == 0) begin_rows(m);
    __syncthreads();
    while (true) {  // nothing but the epoch and the phase is kept over the bodies, which have use for all registers
        m.forget();
        m.epoch = (u32)m.number(PARAMETER_EPOCH) + m.misc().state.n_steps * EPOCHS_PER_STEP;
        stall_if_asked(m);
        m.phase = 0;
        if (m.misc().state.n_rows == 0) {
            m.phase = m.misc().head_phase;
            idle(m);
            m.phase = N_PHASES - 1;
        }
#pragma unroll 1
        for (; m.phase < N_PHASES; m.phase++) {
            m.forget();
            run_phase(m);
        }
        m.forget();
        if (m.misc().state.leave != 0 || m.misc().dead) break;
        if (m.sm() == CONTROL_SM && m.thread() == 0) store_host(m.at<u32>(PARAMETER_HOST_BEAT), m.misc().state.n_steps);
    }
    stop_stream();
    if (m.misc().dead && m.thread() == 0) note_fault(m, FAULT_KIND_TIMEOUT, m.misc().dead - 1);
    if (m.sm() != CONTROL_SM) return;
    const u32 leave = m.misc().dead ? LEAVE_REASON_FAULT : m.misc().state.leave;
    if (!m.misc().dead) save_state(m);
    __syncthreads();
    if (m.thread() == 0) {
        emit(m, RECORD_KIND_LEFT, 0, 0, leave, 0, 0);
        leave_counts(m, leave);
    }
}
#endif

#ifndef WITHOUT_MEGAKERNEL_PHASE
// Tiles of this warp that the phases before ``phase`` take.
__device__ __forceinline__ u32 tiles_before(const Machine m, u32 phase) {
    u32 n = 0;
#pragma unroll 1
    for (u32 i = 0; i < phase; i++) {
        const u32* record = m.misc().phases[i];
        if (record[PHASE_OP] != OP_LINEAR && record[PHASE_OP] != OP_HEAD) continue;
        const u32 k_warps = record[PHASE_K_WARPS], groups = N_WARPS / k_warps;
        const u32* task = m.misc().tasks[i];
        const u32 turn = (m.warp() / k_warps + groups - task[TASK_FIRST_GROUP]) % groups;
        n += (task[TASK_N_GRANULES] + groups - 1 - turn) / groups * (record[PHASE_K] / k_warps / TILE_K);
    }
    return n;
}

extern "C" __global__ void __launch_bounds__(N_THREADS, 1) megakernel_phase(const __grid_constant__ Parameters p) {
    Machine m = {0, (u32)p.word[PARAMETER_PHASE], 0, 0};
    m.forget();
    begin(m, p);
    State& state = m.misc().state;
    load_tables(m);
    __syncthreads();
    start_stream(m, tiles_before(m, m.phase));
    find_phases(m);
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
    u32* control = m.at<u32>(PARAMETER_CONTROL);
    if (load_gpu(control + CONTROL_LEFT) != 0 || load_gpu(control + CONTROL_ABORT) != 0) return;
    load_state(m);
    float* residual = m.at<float>(PARAMETER_RESIDUAL) + (u64)m.sm() * (sizeof(m.misc().residual) / 4);
    const u32 flags = m.field(PHASE_FLAGS);
    if (flags & FLAG_RESIDUAL)
        for (u32 i = m.thread(); i < sizeof(m.misc().residual) / 4; i += N_THREADS)
            (&m.misc().residual[0][0])[i] = __ldcg(residual + i);
    __syncthreads();
    if (m.thread() == 0) {
        state.n_steps = load_gpu(control + CONTROL_N_STEPS);
        state.n_records = load_gpu(control + CONTROL_N_RECORDS);
        m.misc().door = state.n_fetched = state.n_commands = load_gpu(control + CONTROL_N_COMMANDS);
        state.leave = 0;
        if (m.sm() == CONTROL_SM && m.field(PHASE_OP) == OP_HEAD) look_at_door(m);
    }
    __syncthreads();
    m.epoch = (u32)m.number(PARAMETER_EPOCH) + state.n_steps * EPOCHS_PER_STEP;
    // SELECT's outcome is read from memory here, so one SM is enough, and no other can meet the state it leaves
    if (m.field(PHASE_OP) != OP_SELECT || m.sm() == CONTROL_SM) run_phase(m);
    __syncthreads();
    if (flags & (FLAG_RESIDUAL | FLAG_STREAM))
        for (u32 i = m.thread(); i < sizeof(m.misc().residual) / 4; i += N_THREADS)
            __stcg(residual + i, (&m.misc().residual[0][0])[i]);
    stop_stream();
    if (m.misc().dead && m.thread() == 0) note_fault(m, FAULT_KIND_TIMEOUT, m.misc().dead - 1);
    if (m.sm() != CONTROL_SM || m.field(PHASE_OP) != OP_SELECT) return;
    save_state(m);
    if (m.thread() == 0) leave_counts(m, m.misc().dead ? LEAVE_REASON_FAULT : state.leave);
}
#endif
