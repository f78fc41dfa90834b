"""What host and device agree on: opcodes, the words of every record, and the limits of one program.

The one place where a layout is written down; ``isa_header`` renders it as C for the kernel (``kernel/isa.h``, compared
by a test), the compiler and the interpreter import it. Knows numbers only, neither models nor machines.
"""

from enum import IntEnum, IntFlag

PROGRAM_VERSION = 1

# Warps of the one thread block on an SM, and granules whose sums a warp keeps in registers at a time. Measured, H200:
LOOP_WARPS = 16  # with 8 eight windows take 7 % longer and 16 rows 15 %
LOOP_BATCH_GRANULES = 2
TRANSDUCER_WARPS = 8  # with 16 a token takes 12.3 us instead of 9.8: 128 registers are too few for its bodies
TRANSDUCER_BATCH_GRANULES = 4
GRANULE_ROWS = 8  # weight rows that are placed together: the n of one mma.m16n8k16
TILE_K = 32  # columns of a tile: 8 rows x 32 columns of bfloat16, 16 bytes for each lane of a warp
TILE_BYTES = 512
MAX_ROWS = 16  # (slot, position) pairs of one step
MAX_SLOTS = 8
STATS_ELEMENTS = 128  # a norm's sums are taken over pieces of this many elements, then over the pieces in order
X_ROW_PAD_BYTES = 64  # behind each row of activations in shared memory, against bank conflicts
SELF_BLOCK = 64  # positions of the slot's own cache that one attention unit takes
CROSS_BLOCK = 256  # positions of others' keys and values
MAX_BLOCKS = 7  # of one row, whose results COMBINE holds beside each other


class Op(IntEnum):
    """What a phase does."""

    LINEAR = 0  # y = epilogue(W · prologue(x))
    ATTEND_SELF = 1  # over the slot's own cache, which takes the step's keys and values
    ATTEND_CROSS = 2  # over keys and values written before the slot was opened
    COMBINE = 3  # attention over several blocks becomes one row
    HEAD = 4  # a linear whose outputs are reduced at once to what SELECT needs
    SELECT = 5  # next tokens, records for the host, joins and leaves, the next step's rows
    LSTM = 6  # a linear, or a row of a table, plus what RECUR kept → one step of the cells → their outputs
    RECUR = 7  # a linear over those outputs that stays on its SM, for the next step's LSTM; nobody waits for it
    JOINT = 8  # relu(frames + predictor's row) times the vocabulary and the durations, reduced at once
    TRANSDUCE = 9  # SELECT of a transducer: how far each slot's frames go, and the token that stops it


class Flag(IntFlag):
    """How a LINEAR or HEAD reads and writes."""

    EMBED = 1  # x is the token's embedding plus the position's, not an exchanged row
    NORM = 2  # layer norm of x, folded into weights, row sums and biases
    GELU = 4
    RESIDUAL = 8  # y is added to the residual stream, which is what leaves
    STREAM = 16  # with EMBED: x also begins the residual stream


class Phase(IntEnum):
    """Words of a phase record, the same on every SM. Offsets into the exchange area are in tagged words of 8 bytes."""

    OP = 0
    FLAGS = 1
    K = 2  # elements of an input row
    N = 3  # elements of an output row (not HEAD: tokens)
    K_WARPS = 4  # warps that share one granule's K; the other N_WARPS / K_WARPS groups take other granules
    INPUT = 5  # where the input rows lie in the exchange area
    OUTPUT = 6  # where the output rows, or HEAD's partials, lie
    PARTIAL = 7  # ATTEND_*, COMBINE: where the blocks' results lie
    LAYER = 8  # index into the caches
    N_HEADS = 9
    BLOCK = 10  # positions of one block: 64 of the slot's own, 256 of others'
    N_BLOCKS = 11  # at most, of one slot
    EPOCH = 12  # within the step: 1, 2, ... ; what this phase publishes carries step x epochs + EPOCH
    INPUT_EPOCH = 13  # the epoch that its input carries
    SCORES = 14  # ATTEND_CROSS: index of the layer's first dumped head + 1, or 0
    SCORE_HEADS = 15  # ATTEND_CROSS: bit h is set if head h's scores are dumped


GATES = 4  # of an LSTM's unit: input, forget, cell, output; they lie beside each other in a granule
GRANULE_UNITS = GRANULE_ROWS // GATES


class Task(IntEnum):
    """Words of a task record: one SM's part of a phase. All zero where it has none."""

    FIRST_GRANULE = 0  # of the weight; output rows begin at GRANULE_ROWS times this
    N_GRANULES = 1
    AUX = 2  # index of the first granule's (row sum, bias) pairs in this SM's part of the auxiliary floats
    FIRST_GROUP = 3  # the warp group that takes the first granule; the others follow in turn


class Partial(IntEnum):
    """Tagged words of one SM's HEAD result for one row: tokens of two classes, text and the markers at the end."""

    TEXT_SCORE = 0  # the best one's, what is compared: the logit, or at a temperature the logit / T + Gumbel noise
    TEXT_TOKEN = 1
    TEXT_LOGIT = 2  # of that token
    TEXT_MAX = 3  # highest logit of the class
    TEXT_LSE = 4  # log of the sum of exponentials of the class
    MARK_SCORE = 5
    MARK_TOKEN = 6
    MARK_LOGIT = 7
    MARK_LSE = 8
    ALL_LSE = 9  # of every token, allowed or not; rows that watch a token only
    WATCHED = 10  # logit of the watched token, from the SM that has it; minus infinity from the others
    UNUSED = 11


PARTIAL_WORDS = 12
BEST_WORDS = 2  # JOINT's result of one SM for one row: logit and number of its best token
BLOCK_STATS_WORDS = 2  # of an attention block's result: largest score, sum of exponentials; then the row's pairs


class Request(IntEnum):
    """Words of a request's head; its tokens lie behind it (REQUEST_TOKENS): head, prefix, draft."""

    N_HEAD = 0  # tokens that are fed and are not text (prompt and task)
    N_PREFIX = 1  # tokens that are fed and count as written
    N_DRAFT = 2  # tokens that are tried
    MAX_TOKENS = 3  # to be written behind the prefix
    RULES = 4  # index of the bitmap of suppressed tokens
    FLAGS = 5  # RequestFlag
    WATCH_ROW = 6  # position whose unmasked probability of WATCH_TOKEN is reported, or NO_WATCH
    WATCH_TOKEN = 7
    N_POSITIONS = 8  # of the cross attention
    N_PLAIN = 9  # of these, the first ones weigh 1, the rest exp(TAIL_BIAS)
    TAIL_BIAS = 10  # float
    INVERSE_TEMPERATURE = 11  # float; 0: the best token is taken
    SEED = 12
    TICKET = 13  # the host's number for this request, returned in every record
    MAX_FIRST_MARK = 14  # highest index of a marker that may come first
    UNUSED = 15


REQUEST_HEAD_WORDS = 16
REQUEST_TOKENS = 496  # at most
REQUEST_WORDS = REQUEST_HEAD_WORDS + REQUEST_TOKENS
NO_WATCH = 0xFFFFFFFF


class FrameRequest(IntEnum):
    """Words of a transducer's request's head. Behind it, in place of tokens, its parts lie one after the other."""

    N_PARTS = 0
    TICKET = 13  # as in Request


class FramePart(IntEnum):
    """Words of a part: frames of one stream, decoded to their end before the next part begins."""

    SEAT = 0  # where frames and states lie
    N_FRAMES = 1  # of the seat's frames, from the first
    FIRST_FRAME = 2  # to look at
    BEGIN = 3  # PartBegin


class PartBegin(IntEnum):
    """What a part goes on from."""

    STATE = 0  # the seat's STATE_IN
    NOTHING = 1  # the predictor has seen nothing yet
    PART = 2  # the part before, and frames that its last duration reaches to are passed over


PART_WORDS = 4
MAX_PARTS = REQUEST_TOKENS // PART_WORDS


class RequestFlag(IntFlag):
    """What a request's tokens obey."""

    MARKERS = 1  # markers come in pairs around text, never go back, and win when they outweigh all text


class Command(IntEnum):
    """Words of a command from the host; COMMAND_SLOTS of them in a ring, counted by the door."""

    KIND = 0  # CommandKind
    SLOT = 1
    TICKET = 2
    UNUSED = 3


class CommandKind(IntEnum):
    """What the host asks."""

    OPEN = 1  # the slot's request and state are ready
    CANCEL = 2
    YIELD = 3  # leave, keep the slots
    STOP = 4  # leave, drop the slots


COMMAND_WORDS = 4
COMMAND_SLOTS = 64


class Record(IntEnum):
    """Words of a record for the host, written as two halves of 16 bytes; it is whole once both carry its number."""

    KIND = 0  # RecordKind + 256 x slot
    TICKET = 1
    TOKEN = 2  # TOKEN: the token. SEGMENT: index of its first token. DONE: EndReason. LEFT: LeaveReason
    FIRST_SEQUENCE = 3  # number of this record, from 1
    VALUE = 4  # TOKEN: its log-probability, float. SEGMENT: number of tokens. DONE: probability of the watched token
    EXTRA = 5  # TOKEN: its index. DONE: tokens of the draft that held. EMISSION: frame and duration
    STEP = 6
    SEQUENCE = 7  # the same number


class RecordKind(IntEnum):
    """What the device says."""

    TOKEN = 1
    SEGMENT = 2  # a marker closed one: tokens TOKEN to TOKEN + VALUE
    DONE = 3
    LEFT = 4  # the kernel has left; nothing follows
    EMISSION = 5  # a transducer's token: VALUE its log-probability, EXTRA its frame x EXTRA_DURATIONS + its duration
    PART = 6  # a transducer's part of a request is done, and was not the last: EXTRA frames past its last one


EXTRA_DURATIONS = 256  # durations that fit into EXTRA beside the frame


class EndReason(IntEnum):
    """Why a slot is done."""

    END_TOKEN = 1
    LIMIT = 2
    CANCELLED = 3
    FRAMES = 4  # a transducer is past its last frame, by EXTRA frames


RECORD_WORDS = 8
RECORD_SLOTS = 8192  # of the ring


class Parameter(IntEnum):
    """Words of 8 bytes that a launch passes: addresses of device or mapped host memory, then plain numbers."""

    TAPE = 0  # tiles, in the order of use, warp after warp
    WARP_TILES = 1  # [n_sms, N_WARPS, 2] first tile and number of tiles of a warp's part of the tape
    PHASES = 2  # [n_phases, PHASE_WORDS]
    TASKS = 3  # [n_sms, n_phases, TASK_WORDS]
    AUX = 4  # [n_sms, aux_granules, GRANULE_ROWS, 2] float: row sum and bias of each output row
    EXCHANGE = 5  # tagged words
    TOKEN_TABLE = 6  # [n_tokens, width] bfloat16
    POSITION_TABLE = 7  # [n_positions, width] float
    SELF_CACHE = 8  # [slot, layer, keys or values, head, n_positions, head size] bfloat16
    CROSS_CACHE = 9  # [slot, layer, keys or values, head, n_cross_positions, head size] bfloat16
    SCORES = 10  # [slot, dumped head, n_positions, n_cross_positions] float
    BITMAPS = 11  # [n_rules, 2, ceil(n_tokens / 32)] bits of suppressed tokens: anywhere, and as the first one written
    REQUESTS = 12  # [MAX_SLOTS, REQUEST_WORDS], then the commands, filled by the last SM
    STATE = 13  # slots, rows and counters between residencies, STATE_WORDS
    CONTROL = 14  # Control, in device memory
    HOST_DOOR = 15  # commands given so far
    HOST_COMMANDS = 16  # [COMMAND_SLOTS, COMMAND_WORDS]
    HOST_REQUESTS = 17  # [MAX_SLOTS, REQUEST_WORDS]
    HOST_RECORDS = 18  # [RECORD_SLOTS, RECORD_WORDS]
    HOST_BEAT = 19  # steps so far, written every step
    HOST_ABORT = 20  # not 0: leave at once
    EPOCH = 21  # steps before this launch x epochs of a step
    MAX_STEPS = 22  # of this residency
    IDLE_NS = 23  # without an open slot after which to leave
    SPIN_NS = 24  # after about which a word that has not come is a fault; counted in polls of 1,024 ns
    PHASE = 25  # graph mode: the phase to run
    COMMANDS = 26  # commands carried out before this launch
    RECORDS = 27  # records written before this launch
    RESIDUAL = 28  # graph mode: [n_sms, MAX_ROWS, residual elements] float between phases
    FRAMES = 29  # [seat, n_frames, width] bfloat16
    TABLE = 30  # [n_tokens, unit, GATES] float: what the first LSTM adds for its input
    STATE_IN = 31  # [seat, layer, 2, unit] float: outputs and cells that a part goes on from
    STATE_OUT = 32  # the same, behind the last step


class Control(IntEnum):
    """Words of 4 bytes in device memory, cleared by the host before a launch."""

    ABORT = 0  # not 0: every SM leaves
    FAULT_KIND = 1
    FAULT_SM = 2
    FAULT_PHASE = 3
    FAULT_EPOCH = 4
    N_STEPS = 5  # when the kernel has left
    N_COMMANDS = 6
    N_RECORDS = 7
    LEFT = 8  # LeaveReason
    STALL_SM = 9  # for tests: this SM + 1 stops at STALL_STEP
    STALL_STEP = 10


CONTROL_WORDS = 16
STATE_WORDS = 1024  # room for them, of 4 bytes; cleared by the host at first
DRAFT_REACH = 3  # tokens of a draft on either side that are searched for the one that was written instead


class LeaveReason(IntEnum):
    """Why the kernel left."""

    IDLE = 1
    STEPS = 2
    YIELD = 3
    STOP = 4
    FAULT = 5


class FaultKind(IntEnum):
    """Why the kernel gave up."""

    TIMEOUT = 1  # a word did not come in time
    ABORTED = 2  # by the host
    NOT_FINITE = 3  # a row without a best token
    BAD_COMMAND = 4


def isa_header() -> str:
    """The same numbers as C: enumerations with their class's name in front, constants as they are."""
    classes: tuple[type[IntEnum] | type[IntFlag], ...] = (
        Op,
        Flag,
        Phase,
        Task,
        Partial,
        Request,
        FrameRequest,
        FramePart,
        PartBegin,
        RequestFlag,
        Command,
        CommandKind,
        Record,
        RecordKind,
    )
    classes += (EndReason, Parameter, Control, LeaveReason, FaultKind)
    lines = ["// Made from isa.py by `python -m megakernel.isa`; a test compares them.", "#pragma once", ""]
    for name, value in globals().items():
        if name.isupper() and isinstance(value, int):
            suffix = "u" if value > 0x7FFFFFFF else ""
            lines.append(f"#define {name} {value}{suffix}")
    for kind in classes:
        prefix = "".join(f"_{c}" if c.isupper() else c.upper() for c in kind.__name__).lstrip("_").upper()
        lines += ["", f"enum {kind.__name__} : unsigned {{"]
        lines += [f"    {prefix}_{member.name} = {member.value}," for member in kind]
        lines.append("};")
    lines += [
        "",
        f"#define PHASE_WORDS {len(Phase)}",
        f"#define TASK_WORDS {len(Task)}",
        f"#define PARAMETER_WORDS {len(Parameter)}",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    from pathlib import Path

    (Path(__file__).parent / "kernel" / "isa.h").write_text(isa_header())
