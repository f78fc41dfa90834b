// SELECT: every SM merges the same partials, so every SM knows the next step's rows without another exchange. Lane s of
// warp 0 follows slot s. The last SM also writes the records for the host.
#pragma once

#include "head.cuh"

#define PARTIAL_GROUPS ((N_SMS + 31) / 32)

struct Merged {  // a row's partials, or what several of them make
    Best text, mark;
    float text_max, text_lse, mark_lse, all_lse, watched;
};

struct Pick {
    u32 token;
    float logprob;
    float watched;  // probability of the watched token, where the row watches one
    u32 found;
};

__device__ __forceinline__ Merged read_partial(const Machine m, u32 buffer, u32 sm, u32 row, u32 epoch) {
    const u64* from = partial_words(m, buffer, sm, row);
    Pair pairs[PARTIAL_WORDS / 2];
#pragma unroll
    for (int i = 0; i < PARTIAL_WORDS / 2; i++) pairs[i] = peek_pair(from + 2 * i);
#pragma unroll
    for (int i = 0; i < PARTIAL_WORDS / 2 - 1; i++) settle(m, from + 2 * i, epoch, pairs[i]);
    u32 watched = pairs[PARTIAL_WORDS / 2 - 1].first;  // beside the unused word, which has an epoch of its own
    if (pairs[PARTIAL_WORDS / 2 - 1].first_epoch != epoch) watched = take(m, from + PARTIAL_WATCHED, epoch);
    Merged merged;
    merged.text.score = __uint_as_float(pairs[0].first);
    merged.text.token = pairs[0].second;
    merged.text.logit = __uint_as_float(pairs[1].first);
    merged.text_max = __uint_as_float(pairs[1].second);
    merged.text_lse = __uint_as_float(pairs[2].first);
    merged.mark.score = __uint_as_float(pairs[2].second);
    merged.mark.token = pairs[3].first;
    merged.mark.logit = __uint_as_float(pairs[3].second);
    merged.mark_lse = __uint_as_float(pairs[4].first);
    merged.all_lse = __uint_as_float(pairs[4].second);
    merged.watched = __uint_as_float(watched);
    return merged;
}

__device__ __forceinline__ Merged nothing() {
    Merged merged;
    merged.text_max = merged.text_lse = merged.mark_lse = merged.all_lse = merged.watched = NEGATIVE_INFINITY;
    return merged;
}

// log of the sum of the lanes' exponentials
__device__ __forceinline__ float log_sum(float lse) {
    const float top = largest(lse);
    return top == NEGATIVE_INFINITY ? top : top + logf(sum_of(expf(lse - top)));
}

// All lanes' partials as one, the same on every lane.
__device__ __forceinline__ Merged over_warp(const Merged& mine, bool has_marks, bool watches) {
    Merged all = nothing();
    all.text = over_warp(mine.text);
    all.text_max = largest(mine.text_max);
    all.text_lse = log_sum(mine.text_lse);
    if (has_marks) {
        all.mark = over_warp(mine.mark);
        all.mark_lse = log_sum(mine.mark_lse);
    }
    if (watches) {
        all.all_lse = log_sum(mine.all_lse);
        all.watched = largest(mine.watched);
    }
    return all;
}

__device__ __forceinline__ Pick pick_of(const Merged& a, bool has_marks) {
    Pick pick;
    if (has_marks && a.mark_lse > a.text_max) {
        pick.token = a.mark.token;
        pick.logprob = a.mark.logit - a.mark_lse;
        pick.found = is_finite(a.mark.score) && is_finite(pick.logprob);
    } else {
        const bool is_mark = a.mark.score > a.text.score;
        pick.token = is_mark ? a.mark.token : a.text.token;
        pick.logprob = (is_mark ? a.mark.logit : a.text.logit) - log_add(a.text_lse, a.mark_lse);
        pick.found = is_finite(is_mark ? a.mark.score : a.text.score) && is_finite(pick.logprob);
    }
    pick.watched = expf(a.watched - a.all_lse);
    return pick;
}

// Picks of all rows into shared memory: groups of 32 SMs merge across a warp each, then the groups across one.
__device__ __forceinline__ const Pick* merge_partials(const Machine m) {
    Merged* groups = (Merged*)m.x();  // [row][group]
    Pick* picks = (Pick*)m.sums();
    const State& state = m.misc().state;
    const u32 buffer = m.field(PHASE_INPUT), epoch = m.epoch + m.field(PHASE_INPUT_EPOCH);
#pragma unroll 1
    for (u32 i = m.warp(); i < state.n_rows * PARTIAL_GROUPS; i += N_WARPS) {
        const Row& row = state.rows[i / PARTIAL_GROUPS];
        const u32 sm = i % PARTIAL_GROUPS * 32 + m.lane();
        const Merged mine = sm < N_SMS ? read_partial(m, buffer, sm, i / PARTIAL_GROUPS, epoch) : nothing();
        const Merged all = over_warp(mine, row.last_mark != 0, row.position == state.slots[row.slot].watch_row);
        if (m.lane() == 0) groups[i] = all;
    }
    __syncthreads();
#pragma unroll 1
    for (u32 r = m.warp(); r < state.n_rows; r += N_WARPS) {
        const Row& row = state.rows[r];
        const Merged mine = m.lane() < PARTIAL_GROUPS ? groups[r * PARTIAL_GROUPS + m.lane()] : nothing();
        const Merged all = over_warp(mine, row.last_mark != 0, row.position == state.slots[row.slot].watch_row);
        if (m.lane() == 0) picks[r] = pick_of(all, state.slots[row.slot].flags & REQUEST_FLAG_MARKERS);
    }
    __syncthreads();
    return picks;
}

__device__ __forceinline__ void write_token(Slot& slot, u32 token) {
    slot.n_written++;
    slot.before_is_mark = slot.previous_is_mark;
    slot.previous_is_mark = token >= MARK_BEGIN;
    if (token >= MARK_BEGIN) slot.last_mark = token - MARK_BEGIN + 1;
}

__device__ __forceinline__ u32 request_token(const Machine m, u32 slot, u32 index) {
    return load_gpu(m.at<u32>(PARAMETER_REQUESTS) + slot * REQUEST_WORDS + REQUEST_HEAD_WORDS + index);
}

// The draft went wrong at ``cursor``: go on behind the same token nearby, the nearest one, ahead rather than back; else
// one token stands for another. All places are looked at together, since each look takes as long as a hop.
__device__ __forceinline__ void resume_draft(const Machine m, Slot& slot, u32 slot_index, u32 token) {
    const u32 first = slot.n_head + slot.n_prefix, at = slot.cursor;
    u32 found = at;
#pragma unroll
    for (u32 distance = DRAFT_REACH; distance > 0; distance--) {  // so that the nearest is the last word
        if (at >= distance && request_token(m, slot_index, first + at - distance) == token) found = at - distance;
        if (at + distance < slot.n_draft && request_token(m, slot_index, first + at + distance) == token)
            found = at + distance;
    }
    slot.cursor = found + 1;
}

// What the step's picks do to one slot.
__device__ __forceinline__ void accept(const Machine m, Slot& slot, u32 slot_index, const Pick* picks) {
    const u32 n_forced = slot.n_head + slot.n_prefix;
    for (u32 i = 0; i < slot.n_rows; i++) {
        const Row& row = m.misc().state.rows[slot.first_row + i];
        const Pick& pick = picks[slot.first_row + i];
        if (row.position == slot.watch_row) slot.watched = pick.watched;
        if (row.position >= slot.n_head && row.position < n_forced) write_token(slot, row.token);
        slot.n_fed = row.position + 1;
        if (row.position + 1 < n_forced) continue;
        if (!pick.found) {
            raise(m, FAULT_KIND_NOT_FINITE);
            return;
        }
        const u32 token = pick.token;
        emit(m, RECORD_KIND_TOKEN, slot_index, slot.ticket, token, __float_as_uint(pick.logprob), slot.n_out);
        u32 end = token == END_TOKEN ? END_REASON_END_TOKEN : 0;
        if (!end) {
            const bool was_mark = slot.n_written == 0 || slot.previous_is_mark;
            write_token(slot, token);
            if (slot.flags & REQUEST_FLAG_MARKERS && token >= MARK_BEGIN) {
                if (was_mark)
                    slot.segment_first = slot.n_out;
                else
                    emit(m, RECORD_KIND_SEGMENT, slot_index, slot.ticket, slot.segment_first,
                         slot.n_out + 1 - slot.segment_first, 0);
            }
            slot.n_out++;
            slot.pending = token;
            if (slot.n_out >= slot.max_tokens) end = END_REASON_LIMIT;
        }
        if (end) {
            emit(m, RECORD_KIND_DONE, slot_index, slot.ticket, end, __float_as_uint(slot.watched), slot.n_verified);
            slot.active = 0;
            return;
        }
        if (slot.cursor >= slot.n_draft) return;
        const bool has_next = i + 1 < slot.n_rows;
        const u32 expected = has_next ? m.misc().state.rows[slot.first_row + i + 1].token
                                      : request_token(m, slot_index, n_forced + slot.cursor);
        if (token != expected) {
            resume_draft(m, slot, slot_index, token);
            return;
        }
        slot.cursor++;
        slot.n_verified++;
        if (!has_next) return;
    }
}

// How many rows a slot has work for.
__device__ __forceinline__ u32 rows_wanted(const Slot& slot) {
    const u32 n_forced = slot.n_head + slot.n_prefix;
    const u32 forced = slot.n_fed < n_forced ? n_forced - slot.n_fed : 1;
    const u32 room = slot.max_tokens > slot.n_out + 1 ? slot.max_tokens - slot.n_out - 1 : 0;
    const u32 draft = slot.n_draft - slot.cursor;
    return forced + (draft < room ? draft : room);
}

// One row's masks, from what is written before it.
__device__ __forceinline__ void mask_row(Row& row, const Slot& slot) {
    row.bitmap = slot.rules * 2 + (slot.n_written == 0);
    row.text = row.end = 1;
    row.first_mark = row.last_mark = 0;
    if (!(slot.flags & REQUEST_FLAG_MARKERS)) return;
    row.last_mark = N_TOKENS - MARK_BEGIN;
    if (slot.n_written == 0) {
        row.text = row.end = 0;
        if (slot.max_first_mark + 1 < row.last_mark) row.last_mark = slot.max_first_mark + 1;
    } else if (slot.previous_is_mark && (slot.n_written < 2 || slot.before_is_mark)) {
        row.last_mark = 0;
    } else if (slot.previous_is_mark) {
        row.text = 0;
        row.first_mark = slot.last_mark - 1;
    } else {
        row.first_mark = slot.last_mark;  // 1 + the last one's index, 0 if there is none
    }
}

// The rows of the next step: each active slot has one, then the rest goes to the slots in order. Lane s follows slot s,
// of which ``slot`` is its copy.
__device__ __forceinline__ void make_rows(const Machine m, Slot& slot) {
    State& state = m.misc().state;
    const bool is_active = m.lane() < MAX_SLOTS && slot.active;
    const u32 wanted = is_active ? rows_wanted(slot) : 0, active = __ballot_sync(0xffffffffu, is_active);
    u32 n_rows = __popc(active);
    slot.first_row = __popc(active & ((1u << m.lane()) - 1));
    slot.n_rows = is_active;
    if (__any_sync(0xffffffffu, wanted > 1)) {
        u32 left = TARGET_ROWS - n_rows;
        n_rows = 0;
#pragma unroll 1
        for (u32 s = 0; s < MAX_SLOTS; s++) {
            const u32 want = __shfl_sync(0xffffffffu, wanted, s);
            if (want == 0) continue;
            const u32 extra = want - 1 < left ? want - 1 : left;
            left -= extra;
            if (s == m.lane()) {
                slot.first_row = n_rows;
                slot.n_rows = 1 + extra;
            }
            n_rows += 1 + extra;
        }
    }
    if (m.lane() < MAX_SLOTS) {
        state.slots[m.lane()] = slot;
        const u32 n_forced = slot.n_head + slot.n_prefix;
        const u32 n_known = slot.n_fed < n_forced ? n_forced - slot.n_fed : 1;  // rows before those of the draft
        Slot ahead = slot;  // as it will be behind each row's token
#pragma unroll 1
        for (u32 i = 0; i < slot.n_rows; i++) {
            Row& row = state.rows[slot.first_row + i];
            const u32 position = slot.n_fed + i;
            row.slot = m.lane();
            row.position = position;
            u32 token = slot.pending;
            if (position < n_forced)
                token = request_token(m, m.lane(), position);
            else if (i != 0)
                token = request_token(m, m.lane(), n_forced + slot.cursor + i - n_known);
            row.token = token;
            // the pending token was written when it was picked
            if (position >= slot.n_head && !(i == 0 && slot.n_fed >= n_forced)) write_token(ahead, token);
            mask_row(row, ahead);
        }
    }
    if (m.lane() == 0) state.n_rows = n_rows;
}

__device__ __forceinline__ void open_slot(const Machine m, u32 index) {
    const u32* request = m.at<const u32>(PARAMETER_REQUESTS) + index * REQUEST_WORDS;
    Slot slot = {};
    slot.active = 1;
    slot.ticket = load_gpu(request + REQUEST_TICKET);
    slot.n_head = load_gpu(request + REQUEST_N_HEAD);
    slot.n_prefix = load_gpu(request + REQUEST_N_PREFIX);
    slot.n_draft = load_gpu(request + REQUEST_N_DRAFT);
    slot.max_tokens = load_gpu(request + REQUEST_MAX_TOKENS);
    slot.rules = load_gpu(request + REQUEST_RULES);
    slot.flags = load_gpu(request + REQUEST_FLAGS);
    slot.watch_row = load_gpu(request + REQUEST_WATCH_ROW);
    slot.watch_token = load_gpu(request + REQUEST_WATCH_TOKEN);
    slot.n_positions = load_gpu(request + REQUEST_N_POSITIONS);
    slot.n_plain = load_gpu(request + REQUEST_N_PLAIN);
    slot.tail_bias = __uint_as_float(load_gpu(request + REQUEST_TAIL_BIAS));
    slot.inverse_temperature = __uint_as_float(load_gpu(request + REQUEST_INVERSE_TEMPERATURE));
    slot.seed = load_gpu(request + REQUEST_SEED);
    slot.max_first_mark = load_gpu(request + REQUEST_MAX_FIRST_MARK);
    if (slot.inverse_temperature > 0.0f) slot.n_draft = 0;  // what is drawn is not what was guessed
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
        } else if (index >= MAX_SLOTS || (kind != COMMAND_KIND_OPEN && kind != COMMAND_KIND_CANCEL) ||
                   (kind == COMMAND_KIND_OPEN && state.slots[index].active)) {
            raise(m, FAULT_KIND_BAD_COMMAND);
            return;
        } else if (kind == COMMAND_KIND_OPEN) {
            open_slot(m, index);
        } else if (state.slots[index].active && state.slots[index].ticket == ticket) {  // else it ended meanwhile
            state.slots[index].active = 0;
            emit(m, RECORD_KIND_DONE, index, ticket, END_REASON_CANCELLED, __float_as_uint(state.slots[index].watched),
                 state.slots[index].n_verified);
        }
    }
}

__device__ __noinline__ void begin_rows(const Machine m) {
    Slot slot = m.misc().state.slots[m.lane() % MAX_SLOTS];
    make_rows(m, slot);
}

// What the picks and the control word make of the slots, and the next rows. Warp 0 alone; a call, since its registers
// would be everyone's.
__device__ __noinline__ void decide(const Machine m, const Pick* picks, u32 control) {
    State& state = m.misc().state;
    Slot slot = state.slots[m.lane() % MAX_SLOTS];
    if (m.lane() < MAX_SLOTS && slot.n_rows != 0) accept(m, slot, m.lane(), picks);
    if ((control & 0xffffffu) != (state.n_commands & 0xffffffu)) {
        if (m.lane() < MAX_SLOTS) state.slots[m.lane()] = slot;
        __syncwarp();
        if (m.lane() == 0) obey(m, control & 0xffffffu);
        __syncwarp();
        slot = state.slots[m.lane() % MAX_SLOTS];
    }
    __syncwarp();
    if (m.lane() == 0) {
        if (control >> 24) state.leave = control >> 24;
        state.n_steps++;
    }
    make_rows(m, slot);
}

__device__ __noinline__ void select(const Machine m) {
    const u32 n_rows = m.misc().state.n_rows, epoch = m.epoch + m.field(PHASE_INPUT_EPOCH);
    const Pick* picks = nullptr;
    if (n_rows != 0)
        picks = merge_partials(m);
    else
        __syncthreads();  // all have seen that there are no rows before there are some
    if (m.warp() == 0) {
        const u64* word = words(m) + CONTROL_WORD;
        const u32 control = n_rows != 0 ? take(m, word, epoch) : take_some_day(m, word, epoch);
        if (!m.misc().dead) decide(m, picks, control);
    }
    __syncthreads();
}
