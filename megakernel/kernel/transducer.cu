// A transducer's whole decode loop: predictor, joint and what they pick, for the frames of several slots. One block on
// each SM runs the same phases in the same order; what an SM does in a phase is its task. Every word of a phase is known
// here, so each has a body of its own.
#define TRANSDUCER
#include "isa.h"
#include "machine.cuh"
#include "mailbox.cuh"
#include "tdt_select.cuh"

static_assert(TARGET_ROWS >= MAX_SLOTS, "every slot needs a row");

__device__ __forceinline__ void load_tables(const Machine m) {
    const float2* aux = m.at<const float2>(PARAMETER_AUX) + (u64)m.sm() * AUX_GRANULES * GRANULE_ROWS;
    for (u32 i = m.thread(); i < AUX_GRANULES * GRANULE_ROWS; i += N_THREADS) m.misc().bias[i] = __ldg(aux + i).y;
    for (u32 i = m.thread(); i < sizeof(m.misc().told) / 4; i += N_THREADS) ((u32*)m.misc().told)[i] = 0;
}

// This SM's and this warp's part of every phase. ``before``: tiles of the warp that earlier phases use.
template <int P>
__device__ __forceinline__ void find_own(const Machine m, Own (&own)[N_PHASES], u32 before) {
    if constexpr (P < N_PHASES) {
        const uint4 task = __ldg((const uint4*)m.at<const u32>(PARAMETER_TASKS) + m.sm() * N_PHASES + P);
        static_assert(TASK_WORDS == 4 && TASK_FIRST_GRANULE == 0 && TASK_N_GRANULES == 1 && TASK_AUX == 2, "a task's words");
        const u32 turn = (m.warp() / At<P>::K_WARPS + At<P>::GROUPS - task.w) % At<P>::GROUPS;
        own[P] = {task.y, task.x, task.z, task.w, (task.y + At<P>::GROUPS - 1 - turn) / At<P>::GROUPS, before};
        find_own<P + 1>(m, own, before + own[P].n_mine * At<P>::TILES);
    }
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
__device__ __noinline__ void stall(const Machine m) {
    while (load_gpu(m.at<u32>(PARAMETER_CONTROL) + CONTROL_ABORT) == 0) __nanosleep(1000);
    m.misc().dead = 1;
}

// Phase P and those behind it.
template <int P>
__device__ __forceinline__ void run_phases(Machine& m, const Own (&own)[N_PHASES], u32 stepping, Progress& progress) {
    if constexpr (P < N_PHASES) {
        m.phase = P;
        const bool has_task = own[P].n != 0 && stepping != 0;
        if constexpr (At<P>::OP_ == OP_TRANSDUCE) {
            transduce<P - 1, 0>(m, own[0]);
        } else if constexpr (At<P>::OP_ == OP_JOINT) {
            joint<P>(m, own[P], stepping, progress);
        } else if constexpr (At<P>::OP_ == OP_LSTM && At<P>::K == 0) {
            static_assert(P == 0, "the layer behind the lookup is the first");
            if (has_task) lstm_of_table<P>(m, own[P], stepping);
            if (m.warp() == N_WARPS - 1) make_rows(m);
            if (m.sm() == CONTROL_SM) tell<N_PHASES - 2>(m);
        } else if constexpr (At<P>::OP_ == OP_LSTM) {
            if (has_task) lstm<P>(m, own[P], stepping, progress);
        } else if constexpr (At<P>::OP_ == OP_RECUR) {
            if (has_task) recur<P>(m, own[P], stepping, progress);
        } else {
            if (has_task) predict<P>(m, own[P], stepping, progress);
        }
        run_phases<P + 1>(m, own, stepping, progress);
    }
}

extern "C" __global__ void __launch_bounds__(N_THREADS, 1) transducer_loop(const __grid_constant__ Parameters p) {
    Machine m = {0, 0};
    if (m.thread() < PARAMETER_WORDS) m.misc().parameters.word[m.thread()] = p.word[m.thread()];
    if (m.thread() == 0) {
        m.misc().dead = 0;
        m.misc().patience = (u32)(p.word[PARAMETER_SPIN_NS] >> 10);
    }
    __syncthreads();
    State& state = m.misc().state;
    load_tables(m);
    load_state(m);
    load_tape(m);
    __syncthreads();
    Own own[N_PHASES];
    find_own<0>(m, own, 0);
    const u32* asked = m.at<const u32>(PARAMETER_CONTROL);
    const u32 stall_step = __ldg(asked + CONTROL_STALL_SM) == m.sm() + 1 ? __ldg(asked + CONTROL_STALL_STEP) : 0xffffffffu;
    const u32 base = (u32)m.number(PARAMETER_EPOCH);
    if (m.thread() == 0) {
        state.n_steps = 0;
        state.leave = 0;
        m.misc().door = state.n_fetched = state.n_commands = (u32)m.number(PARAMETER_COMMANDS);
        state.n_records = (u32)m.number(PARAMETER_RECORDS);
    }
    __syncthreads();
    if (m.warp() == 0) begin_slots(m);
    __syncthreads();
    while (true) {
        const u32 n_steps = state.n_steps;
        m.epoch = base + n_steps * EPOCHS_PER_STEP;
        if (n_steps == stall_step) stall(m);
        Progress progress;
        progress.loaded = NO_INPUT;
        progress.last = NO_PHASE;
        run_phases<0>(m, own, state.stepping, progress);
        if (state.leave != 0 || m.misc().dead) break;
        if (m.sm() == CONTROL_SM && m.thread() == 0) store_host(m.at<u32>(PARAMETER_HOST_BEAT), state.n_steps);
    }
    if (m.misc().dead && m.thread() == 0) note_fault(m, FAULT_KIND_TIMEOUT, m.misc().dead - 1);
    if (m.sm() != CONTROL_SM) return;
    const u32 leave = m.misc().dead ? LEAVE_REASON_FAULT : state.leave;
    m.epoch += EPOCHS_PER_STEP;
    if (!m.misc().dead) tell<N_PHASES - 2>(m);
    __syncthreads();
    if (!m.misc().dead) save_state(m);
    __syncthreads();
    if (m.thread() == 0) {
        emit(m, RECORD_KIND_LEFT, 0, 0, leave, 0, 0);
        leave_counts(m, leave);
    }
}
