// What a transducer's SM has at hand: the resident tape, rows, sums, and the slots with what their predictor remembers.
// Stands in for the token loop's layout where TRANSDUCER is defined.
#pragma once

#define NO_ROW 0xffffffffu

#define PART_DONE 0xffffffffu

enum Feed : u32 { FEED_NOTHING = 0, FEED_TOKEN = 1, FEED_STATE = 2 };

struct __align__(16) FrameSlot {
    u32 active, ticket;
    u32 n_frames, frame;  // all, and the next to look at
    u32 feed;             // Feed
    u32 token;            // to step with
    u32 is_new;           // what the predictor remembers counts as zeros
    u32 resumes;          // outputs and cells are first of all those of STATE_OUT
    u32 n_symbols;        // at this frame
    u32 predicted;        // epoch of its last prediction's words
    u32 first_row, n_rows;
    u32 row;  // of the last step, that had the token, or NO_ROW
    u32 seat, part, n_parts;  // where frames and states lie; which of the request's parts is under way
    u32 state_seat;           // where outputs and cells were written last

    // Whether the predictor takes outputs and cells as they were saved.
    __device__ __forceinline__ bool is_restored() const { return resumes || feed == FEED_STATE; }
};

struct State {  // what lives on between residencies
    FrameSlot slots[MAX_SLOTS];
    uint2 rows[MAX_ROWS];  // slot + MAX_SLOTS x seat, frame
    u32 n_rows;
    u32 stepping;  // bits: slots for which the predictor has something to do
    u32 n_active;
    u32 n_commands;  // carried out
    u32 n_fetched;   // copied from the host
    u32 n_records;
    u32 n_steps;  // of this launch
    u32 leave;    // LeaveReason
};

struct Told {  // to the host, one step later
    u32 emits, ticket, row, token;
    float logit;
    u32 extra;
    u32 done, done_ticket, n_past;  // EndReason, or PART_DONE
};

struct __align__(16) FramePick {
    float logit;
    u32 token, duration;  // an index
};

struct Misc {
    Parameters parameters;
    State state;
    Told told[MAX_SLOTS];
    FramePick picks[MAX_ROWS];
    volatile u32 dead;  // 1 + the phase of a fault: nobody waits any more
    u32 patience;       // polls
    u32 door;
    u32 idle_leave;
    __align__(16) float4 entries[TARGET_ROWS][32];  // of the table's row of each row's token, a lane's unit
    __align__(16) float kept[N_LAYERS][KEPT_GRANULES][MAX_SLOTS][GRANULE_ROWS];
    float cells[N_LAYERS][KEPT_GRANULES][MAX_SLOTS][GRANULE_UNITS];
    __align__(16) float bias[AUX_GRANULES * GRANULE_ROWS];
};

static_assert(sizeof(State) <= 4 * STATE_WORDS, "the state does not fit into its words");
static_assert(sizeof(Misc) <= MISC_BYTES, "the tables do not fit into their part of shared memory");

#define RING_BYTES (N_WARPS * RING_TILES * TILE_BYTES)

extern __shared__ __align__(128) unsigned char shared[];  // tape, sums, Misc

struct Machine {
    u32 epoch;  // of this step: phases publish epoch + EPOCH
    u32 phase;

    __device__ __forceinline__ float* sums() const { return (float*)(shared + RING_BYTES); }
    __device__ __forceinline__ Misc& misc() const { return *(Misc*)(shared + RING_BYTES + SUMS_BYTES); }
    static __device__ __forceinline__ u32 sm() { return blockIdx.x; }
    static __device__ __forceinline__ u32 thread() { return threadIdx.x; }
    static __device__ __forceinline__ u32 warp() { return threadIdx.x >> 5; }
    static __device__ __forceinline__ u32 lane() { return threadIdx.x & 31; }
    __device__ __forceinline__ u64 number(Parameter which) const { return misc().parameters.word[which]; }

    template <class T>
    __device__ __forceinline__ T* at(Parameter which) const {
        return (T*)number(which);
    }
    // Every word of a phase is known when the kernel is compiled; this is for what the token loop shares with it.
    __device__ __forceinline__ u32 field(Phase word) const { return PHASE[phase][word]; }
    // Which of two buffers hold this step's results and control word.
    __device__ __forceinline__ u32 parity() const { return misc().state.n_steps & 1; }
};
