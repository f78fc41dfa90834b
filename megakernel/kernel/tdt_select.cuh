// TRANSDUCE: every SM finds the best token of each frame from the same words and scans them, so every SM knows what comes
// next without another exchange: blanks carry a slot over frames by their durations, the first other token stops it and
// is fed to the predictor. Lane s of warp 0 follows slot s. `transduce.py` says the same.
#pragma once

#include "joint.cuh"

#define DOOR_STEPS 16  // a look at the host takes as long as a hop, so it is taken in some steps only
#define SM_LANES ((N_SMS + 31) / 32)

// Best tokens of a warp's rows into shared memory, with what the first LSTM needs of each one's row of the table: only one
// of them will be fed, but by then it is there. Warp 0 also waits for the control word. ``own`` is that LSTM's part.
// → the control word
template <int P, int LSTM>
__device__ __forceinline__ u32 pick_rows(const Machine m, const Own& own) {
    const u32 n_rows = m.misc().state.n_rows, epoch = m.epoch + At<P>::EPOCH, parity = m.parity();
    const u64* control_word = words(m) + CONTROL_WORD + parity;
    const bool is_idle = m.misc().state.n_active == 0;
    u64 control = 0;
#pragma unroll 1
    for (u32 row = m.warp(); row < n_rows || row == 0; row += N_WARPS) {
        const u64* from = best_words<P>(m, parity, row, m.lane());
        const bool waits_for_control = row == 0 && !is_idle;
        Pair pairs[SM_LANES];
        u64 duration = 0;
        Wait wait;
        bool is_missing = true;
        while (is_missing) {
            if (waits_for_control) control = peek(control_word);
            if (n_rows != 0) duration = peek(sum_word<P>(m, parity, row, N_SMS));
#pragma unroll
            for (u32 i = 0; i < SM_LANES; i++)
                if (m.lane() + 32 * i < N_SMS) pairs[i] = peek_pair(from + 64 * i);
            is_missing = (waits_for_control && (u32)(control >> 32) != epoch) || (n_rows != 0 && (u32)(duration >> 32) != epoch);
#pragma unroll
            for (u32 i = 0; i < SM_LANES; i++)
                if (m.lane() + 32 * i < N_SMS)
                    is_missing |= pairs[i].first_epoch != epoch || pairs[i].second_epoch != epoch;
            is_missing = __any_sync(0xffffffffu, is_missing);
            if (is_missing && __any_sync(0xffffffffu, wait.is_over(m))) break;
        }
        if (n_rows == 0) break;
        Best best;
#pragma unroll
        for (u32 i = 0; i < SM_LANES; i++)
            if (m.lane() + 32 * i < N_SMS) best.offer(__uint_as_float(pairs[i].first), pairs[i].second);
        best = over_warp(best);
        if (m.lane() == 0) m.misc().picks[row] = {best.logit, best.token, (u32)duration};
        if (m.lane() < own.n * GRANULE_UNITS && best.token != BLANK && best.token < N_TOKENS)
            asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(&m.misc().entries[row][m.lane()])),
                         "l"(table_entry<LSTM>(m, own, best.token, m.lane()))
                         : "memory");
    }
    return is_idle && m.warp() == 0 ? take_some_day(m, control_word, epoch) : (u32)control;
}

// A slot at the begin of part ``slot.part`` of its request.
__device__ __forceinline__ void begin_part(const Machine m, FrameSlot& slot, u32 index) {
    const u32* part = m.at<const u32>(PARAMETER_REQUESTS) + index * REQUEST_WORDS + REQUEST_HEAD_WORDS + slot.part * PART_WORDS;
    slot.seat = load_gpu(part + FRAME_PART_SEAT);
    const u32 n_before = slot.n_frames, begin = load_gpu(part + FRAME_PART_BEGIN);
    slot.n_frames = load_gpu(part + FRAME_PART_N_FRAMES);
    if (begin == PART_BEGIN_PART) {
        slot.frame -= n_before;
        return;
    }
    slot.frame = load_gpu(part + FRAME_PART_FIRST_FRAME);
    slot.is_new = begin == PART_BEGIN_NOTHING;
    slot.feed = slot.is_new ? FEED_TOKEN : FEED_STATE;
    slot.token = BLANK;
    slot.row = NO_ROW;
    slot.n_symbols = 0;
}

// What the step's picks do to one slot.
__device__ __forceinline__ void accept(const Machine m, FrameSlot& slot, u32 index) {
    const bool only_resumed = slot.resumes && slot.feed == FEED_TOKEN;
    slot.resumes = 0;
    if (only_resumed) return;
    slot.row = NO_ROW;
    Told& told = m.misc().told[index];
    const u32 begin = slot.frame;
    slot.feed = FEED_NOTHING;
    slot.is_new = 0;
    while (slot.frame - begin < slot.n_rows) {
        const u32 row = slot.first_row + slot.frame - begin;
        const FramePick pick = m.misc().picks[row];
        if (!is_finite(pick.logit)) {
            raise(m, FAULT_KIND_NOT_FINITE);
            return;
        }
        const u32 duration = DURATION(pick.duration), at_least_one = duration > 1 ? duration : 1;
        if (pick.token == BLANK) {
            slot.frame += at_least_one;
            slot.n_symbols = 0;
            continue;
        }
        told.emits = 1;
        told.ticket = slot.ticket;
        told.row = row;
        told.token = pick.token;
        told.logit = pick.logit;
        told.extra = slot.frame * EXTRA_DURATIONS + duration;
        const u32 ahead = ++slot.n_symbols == MAX_SYMBOLS ? at_least_one : duration;
        if (ahead != 0) slot.n_symbols = 0;
        slot.frame += ahead;
        slot.feed = FEED_TOKEN;
        slot.token = pick.token;
        slot.row = row;
        return;
    }
    if (slot.frame < slot.n_frames) return;
    told.done_ticket = slot.ticket;
    told.n_past = slot.frame - slot.n_frames;
    if (++slot.part == slot.n_parts) {
        slot.active = 0;
        told.done = END_REASON_FRAMES;
    } else {
        told.done = PART_DONE;
        begin_part(m, slot, index);
    }
}

__device__ __forceinline__ void open_frames(const Machine m, u32 index) {
    const u32* request = m.at<const u32>(PARAMETER_REQUESTS) + index * REQUEST_WORDS;
    FrameSlot slot = {};
    slot.active = 1;
    slot.ticket = load_gpu(request + FRAME_REQUEST_TICKET);
    slot.n_parts = load_gpu(request + FRAME_REQUEST_N_PARTS);
    begin_part(m, slot, index);
    m.misc().state.slots[index] = slot;
}

// Commands up to the control word's count, one after the other, by one thread.
__device__ __noinline__ void obey(const Machine m, u32 count) {
    State& state = m.misc().state;
    const u32* commands = m.at<const u32>(PARAMETER_REQUESTS) + MAX_SLOTS * REQUEST_WORDS;
    __threadfence();
    while ((state.n_commands & 0xffffffu) != count) {
        const u32* command = commands + state.n_commands % COMMAND_SLOTS * COMMAND_WORDS;
        const u32 kind = load_gpu(command + COMMAND_KIND), index = load_gpu(command + COMMAND_SLOT);
        const u32 ticket = load_gpu(command + COMMAND_TICKET);
        state.n_commands++;
        if (kind == COMMAND_KIND_YIELD || kind == COMMAND_KIND_STOP) {
            state.leave = kind == COMMAND_KIND_YIELD ? LEAVE_REASON_YIELD : LEAVE_REASON_STOP;
            if (kind == COMMAND_KIND_STOP)
                for (u32 s = 0; s < MAX_SLOTS; s++) state.slots[s].active = 0;
        } else if (index >= N_SLOTS || (kind != COMMAND_KIND_OPEN && kind != COMMAND_KIND_CANCEL) ||
                   (kind == COMMAND_KIND_OPEN && state.slots[index].active)) {
            raise(m, FAULT_KIND_BAD_COMMAND);
            return;
        } else if (kind == COMMAND_KIND_OPEN) {
            open_frames(m, index);
        } else if (state.slots[index].active && state.slots[index].ticket == ticket) {  // else it ended meanwhile
            const FrameSlot& slot = state.slots[index];
            m.misc().told[index].done = END_REASON_CANCELLED;
            m.misc().told[index].done_ticket = ticket;
            m.misc().told[index].n_past = slot.frame > slot.n_frames ? slot.frame - slot.n_frames : 0;
            state.slots[index].active = 0;
        }
    }
}

__device__ __forceinline__ bool has_rows(const FrameSlot& slot) {
    return slot.active && slot.frame < slot.n_frames && !(slot.resumes && slot.feed == FEED_TOKEN);
}

// For whom the predictor steps. Lane s follows slot s; warp 0.
__device__ __forceinline__ void keep_slot(const Machine m, const FrameSlot& slot) {
    State& state = m.misc().state;
    const bool is_active = m.lane() < MAX_SLOTS && slot.active;
    if (m.lane() < MAX_SLOTS) state.slots[m.lane()] = slot;
    const u32 stepping = __ballot_sync(0xffffffffu, is_active && (slot.resumes || slot.feed != FEED_NOTHING));
    const u32 active = __ballot_sync(0xffffffffu, is_active);
    if (m.lane() == 0) {
        state.stepping = stepping;
        state.n_active = __popc(active);
    }
}

// The step's rows, by one warp while the first layer's outputs are on their way.
__device__ __forceinline__ void make_rows(const Machine m) {
    State& state = m.misc().state;
    FrameSlot& slot = state.slots[m.lane() % MAX_SLOTS];
    const bool is_one = m.lane() < MAX_SLOTS && has_rows(slot);
    const u32 with_rows = __ballot_sync(0xffffffffu, is_one), n_with = __popc(with_rows);
    const u32 share = n_with > 1 ? TARGET_ROWS / n_with : TARGET_ROWS;
    const u32 n_rows = is_one ? min(share, slot.n_frames - slot.frame) : 0;
    u32 end = n_rows;  // rows of the slots up to this one
#pragma unroll
    for (u32 by = 1; by < MAX_SLOTS; by *= 2) {
        const u32 before = __shfl_up_sync(0xffffffffu, end, by);
        if (m.lane() >= by) end += before;
    }
    if (m.lane() < MAX_SLOTS) {
        slot.n_rows = n_rows;
        slot.first_row = end - n_rows;
    }
    for (u32 i = 0; i < n_rows; i++) state.rows[end - n_rows + i] = make_uint2(m.lane() + MAX_SLOTS * slot.seat, slot.frame + i);
    if (m.lane() == MAX_SLOTS - 1) state.n_rows = end;
    __syncwarp();
}

// The slots as they go on in another launch: what SMs had at hand is lost. Warp 0.
__device__ __noinline__ void begin_slots(const Machine m) {
    FrameSlot slot = m.misc().state.slots[m.lane() % MAX_SLOTS];
    slot.resumes = slot.feed != FEED_STATE && !slot.is_new;
    slot.row = NO_ROW;
    keep_slot(m, slot);
}

// What the picks and the control word make of the slots. Warp 0.
template <int P>
__device__ __forceinline__ void decide(const Machine m, u32 control) {
    State& state = m.misc().state;
    FrameSlot slot = state.slots[m.lane() % MAX_SLOTS];
    if (m.lane() < MAX_SLOTS && slot.active) {
        if (state.stepping >> m.lane() & 1) {
            slot.predicted = m.epoch + At<P>::INPUT_EPOCH;
            slot.state_seat = slot.seat;
        }
        accept(m, slot, m.lane());
    }
    __syncwarp();
    if ((control & 0xffffffu) != (state.n_commands & 0xffffffu)) {
        if (m.lane() < MAX_SLOTS) state.slots[m.lane()] = slot;
        __syncwarp();
        if (m.lane() == 0) obey(m, control & 0xffffffu);
        __syncwarp();
        slot = state.slots[m.lane() % MAX_SLOTS];
    }
    if (m.lane() == 0) {
        if (control >> 24) state.leave = control >> 24;
        state.n_steps++;
    }
    keep_slot(m, slot);
}

// Records of the step before, slot i's by warp i of the last SM, which has nothing else to do then. Nobody writes over
// what it reads before the step after this.
template <int P>
__device__ __noinline__ void tell(const Machine m) {
    static_assert(MAX_SLOTS <= N_WARPS, "a slot is a warp's");
    const u32 epoch = m.epoch + At<P>::EPOCH - EPOCHS_PER_STEP, parity = (m.misc().state.n_steps - 1) & 1;
    const Told told = m.misc().told[m.warp()];
    if (told.emits) {
        const u64* from = sum_word<P>(m, parity, told.row, m.lane());
        u64 words[SM_LANES];
        Wait wait;
        bool is_missing = true;
        while (is_missing) {
            is_missing = false;
#pragma unroll
            for (u32 i = 0; i < SM_LANES; i++)
                if (m.lane() + 32 * i < N_SMS) words[i] = peek(from + 32 * i);
#pragma unroll
            for (u32 i = 0; i < SM_LANES; i++)
                if (m.lane() + 32 * i < N_SMS) is_missing |= (u32)(words[i] >> 32) != epoch;
            if (is_missing && wait.is_over(m)) break;
        }
        LogSum sum;
#pragma unroll
        for (u32 i = 0; i < SM_LANES; i++)
            if (m.lane() + 32 * i < N_SMS) sum.add(__uint_as_float((u32)words[i]));
        __syncwarp();
        const float all = over_warp(sum);
        if (m.lane() == 0 && !m.misc().dead)
            emit(m, RECORD_KIND_EMISSION, m.warp(), told.ticket, told.token, __float_as_uint(told.logit - all), told.extra);
    }
    if (m.lane() == 0) {
        if (told.done == PART_DONE && !m.misc().dead) emit(m, RECORD_KIND_PART, m.warp(), told.done_ticket, 0, 0, told.n_past);
        else if (told.done && !m.misc().dead) emit(m, RECORD_KIND_DONE, m.warp(), told.done_ticket, told.done, 0, told.n_past);
        m.misc().told[m.warp()].emits = m.misc().told[m.warp()].done = 0;
        if (m.warp() == 0 && m.misc().state.n_steps % DOOR_STEPS == 0 && m.misc().state.n_active != 0) look_at_door(m);
    }
    __syncwarp();
}

// ``P`` is JOINT, ``LSTM`` the layer behind the lookup, of which ``own`` is this SM's part.
template <int P, int LSTM>
__device__ __forceinline__ void transduce(const Machine m, const Own& own) {
    const u32 control = pick_rows<P, LSTM>(m, own);
    __syncthreads();
    if (m.warp() == 0 && !m.misc().dead) decide<P>(m, control);
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    if (m.sm() == CONTROL_SM && m.misc().door != m.misc().state.n_fetched) fetch(m);
}
