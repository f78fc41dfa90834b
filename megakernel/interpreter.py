"""Runs a packed program on the CPU, word by word as the kernel does: every SM a coroutine, interleaved at random.

What it computes equals ``evaluate`` bit for bit, whatever the interleaving; what no program may do is an error with a
name. Knows the layouts of ``isa.py``, the packed tape and the mailbox. Does not know the graph: of a program's ops it
takes the norm's epsilon alone, which the kernel gets as a constant too.
"""

import random
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import isa, numbers
from .errors import (
    BadWordError,
    DeadlockError,
    DivergenceError,
    OutOfBoundsError,
    RaceError,
    TapeError,
    UninitialisedError,
)
from .exchange import Exchange, Wait, Words
from .fuse import fold_constants
from .isa import (
    BLOCK_STATS_WORDS,
    GRANULE_ROWS,
    PARTIAL_WORDS,
    TILE_K,
    Command,
    CommandKind,
    Control,
    FaultKind,
    Flag,
    LeaveReason,
    Op,
    Partial,
    Phase,
)
from .mailbox import OFFSETS
from .ops import Embed, FusedLinear
from .pack import pack_aux, pack_tape
from .pick import (
    HeadPartial,
    Row,
    SelectError,
    allowed_tokens,
    merge,
    partial_of,
)
from .program import Program
from .select import Emitted, Slots, accept, carry_out, left, record_words, rows_of_step

COUNT_BITS = 24  # of the control word, for the commands carried out; a LeaveReason lies above
IDLE_POLLS = 50  # of the door without an open slot after which the kernel leaves; stands for IDLE_NS
ABORT_SHARE = 0.1  # of the turns in which the host's abort word is looked at

Steps = Generator[Wait | None, None, None]  # a coroutine: it yields what it waits for, or nothing
Floats = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMemory:
    """What lies in device memory. The kernel writes the self cache and the scores."""

    tape: NDArray[np.uint16]  # [n_tiles, 256]
    aux: NDArray[np.float32]  # [n_sms, aux_granules, GRANULE_ROWS, 2]
    token_table: NDArray[np.uint16]  # [n_tokens, width] bits of bfloat16
    position_table: NDArray[np.float32]  # [n_positions, width]
    bitmaps: NDArray[np.uint32]  # [n_rules, 2, ceil(n_tokens / 32)]
    self_cache: NDArray[np.uint16]  # [slot, layer, keys or values, head, n_positions, head size]
    cross_cache: NDArray[np.uint16]  # [slot, layer, keys or values, head, n_cross_positions, head size]
    scores: NDArray[np.float32]  # [slot, dumped head, n_positions, n_cross_positions]


def device_memory(
    program: Program,
    constants: Mapping[str, NDArray[np.float32]],  # by the graph's names
    bitmaps: NDArray[np.uint32],  # [n_rules, 2, ceil(n_tokens / 32)]
    cross_cache: NDArray[np.float32],  # [slot, layer, keys or values, head, n_cross_positions, head size]
) -> DeviceMemory:
    """Constants packed for ``program``, and empty caches."""
    folded = fold_constants(program.ops, constants)
    first, sizes = program.ops[0], program.sizes
    assert isinstance(first, FusedLinear) and isinstance(first.embed, Embed)
    n_heads = sizes.width // sizes.head_size
    own = (sizes.max_slots, sizes.n_layers, 2, n_heads, sizes.n_positions, sizes.head_size)
    scores = (sizes.max_slots, program.n_score_heads, sizes.n_positions, sizes.n_cross_positions)
    return DeviceMemory(
        tape=pack_tape(program, folded),
        aux=pack_aux(program, folded),
        token_table=numbers.to_bits(constants[first.embed.token_table]),
        position_table=constants[first.embed.position_table],
        bitmaps=bitmaps,
        self_cache=np.full(own, 0x7FC0, np.uint16),  # no number
        cross_cache=numbers.to_bits(cross_cache),
        scores=np.full(scores, np.nan, np.float32),
    )


@dataclass(frozen=True, slots=True)
class Residency:
    """How a launch ended."""

    reason: LeaveReason
    n_steps: int
    fault: FaultKind | None = None
    fault_sm: int = 0
    fault_phase: int = 0


class Interpreter:
    """A device with its memory and one program, and the mailbox that it shares with a host.

    ``mailbox`` [MAILBOX_BYTES] is the memory of a ``mailbox.Mailbox``. Between launches the slots stay, as they do in
    device memory.
    """

    def __init__(self, program: Program, memory: DeviceMemory, mailbox: NDArray[np.uint8]) -> None:
        self.verify_words(program)
        self.program = program
        self.memory = memory
        self.host = {name: mailbox.view(np.uint32)[offset // 4 :] for name, offset in OFFSETS.items()}
        self.words: list[list[int]] = program.phases.tolist()
        self.tasks: list[list[list[int]]] = program.tasks.tolist()
        self.epsilon = next((op.norm.epsilon for op in program.ops if isinstance(op, FusedLinear) and op.norm), 0.0)
        self.weights: dict[tuple[int, int], _Weights] = {}  # by SM and phase, as the tape is the same every step
        self.n_records = 0
        self.slots: Slots = ()
        self._launch: Launch | None = None
        self.clear()

    def verify_words(self, program: Program) -> None:
        """Raise BadWordError for what no body of the kernel could take."""
        _verify_words(program)

    def new_sm(self, launch: "Launch", index: int) -> "Sm":
        """One of a launch's SMs."""
        return Sm(launch, index)

    def keep(self, control: "Sm") -> None:
        """What the control SM leaves behind for the next launch."""
        self.slots = control.slots

    def clear(self, *, state: bool = True) -> None:
        """Zeros into the exchange area. Behind a fault also forget the slots and take all commands as carried out."""
        self.exchange = Exchange(self.program.exchange_words, self.program.target.n_sms)
        self.epoch = 0
        if not state:
            return
        sizes = self.program.sizes
        self.slots = (None,) * sizes.max_slots
        self.n_commands = int(self.host["door"][0])
        self.commands: dict[int, list[int]] = {}  # by place in the ring; the control SM copies them
        self.requests: dict[int, NDArray[np.uint32]] = {}  # [REQUEST_WORDS] by slot; the control SM copies them
        # By which SM a position of a slot's own cache was written since the slot was opened, or -1.
        shape = (sizes.max_slots, sizes.n_layers, sizes.width // sizes.head_size, sizes.n_positions)
        self.cached_by = np.full(shape, -1, np.int64)

    def start(self, seed: int, *, max_steps: int = 1 << 30) -> None:
        """Begin a launch, whose SMs take turns that ``seed`` decides."""
        self._launch = Launch(self, random.Random(seed), max_steps)

    def advance(self, n_turns: int) -> Residency | None:
        """Give SMs so many turns, each of which ends where the SM waits or has published something.

        Returns how the launch ended, or ``None`` if it has not.

        Raises:
            InterpreterError: what the program did that no program may.
        """
        launch = self._launch
        assert launch is not None, "nothing was started"
        with np.errstate(all="ignore"):  # a device that computes nonsense does not say so
            for _ in range(n_turns):
                if not launch.running:
                    self._launch = None
                    return launch.leave()
                launch.turn()
        return None

    def launch(self, seed: int, *, max_steps: int = 1 << 30) -> Residency:
        """Start, and advance until the kernel has left. Raises InterpreterError as ``advance``."""
        self.start(seed, max_steps=max_steps)
        while (residency := self.advance(1 << 20)) is None:
            pass
        return residency


TOKEN_OPS = frozenset({Op.LINEAR, Op.ATTEND_SELF, Op.ATTEND_CROSS, Op.COMBINE})  # in front of HEAD and SELECT


def _verify_words(program: Program) -> None:
    """Raise BadWordError for what no body of the kernel could take."""
    ops = [int(op) for op in program.phases[:, Phase.OP]]
    if ops[-2:] != [Op.HEAD, Op.SELECT] or not set(ops[:-2]) <= TOKEN_OPS:
        raise BadWordError(f"{program.name}: the kernel ends a step with HEAD and SELECT, not {ops}")
    for index, words in enumerate(program.phases):
        if not _is_legal(words, program.sizes.head_size):
            raise BadWordError(f"{program.name}, phase {index}: no body takes {words.tolist()}")


def _is_legal(words: NDArray[np.uint32], head_size: int) -> bool:
    k, n, n_heads, n_blocks = (int(words[word]) for word in (Phase.K, Phase.N, Phase.N_HEADS, Phase.N_BLOCKS))
    match Op(int(words[Phase.OP])):
        case Op.LINEAR | Op.HEAD:
            k_warps = int(words[Phase.K_WARPS])
            is_cut = k_warps in (1, 2, 4, 8, 16) and k % (TILE_K * k_warps) == 0 == k % isa.STATS_ELEMENTS
            return is_cut and 0 < k < 1 << 16 and 0 < n < 1 << 20
        case Op.SELECT:
            return True
    return 0 < n < 1 << 16 and 0 < n_heads * head_size <= n and 0 < n_blocks < 1 << 10 and 0 < words[Phase.BLOCK]


# ---------------------------------------------------------------------- one launch


class Launch:
    """The SMs of one launch, and who runs next."""

    def __init__(self, device: Interpreter, rng: random.Random, max_steps: int) -> None:
        self.device = device
        self.rng = rng
        self.max_steps = max_steps
        self.fault: tuple[FaultKind, int, int] | None = None  # kind, SM, phase
        self.ends: list[tuple[object, int]] = []  # of each step: slots and commands, by the first SM through it
        device.exchange.launch()
        self.sms = [device.new_sm(self, sm) for sm in range(device.program.target.n_sms)]
        self.running = {sm.index: sm.run() for sm in self.sms}
        self._speeds = [10 ** rng.uniform(-2, 0) for _ in self.sms]  # some SMs fall far behind others
        self._waits: dict[int, Wait] = {}
        self._looked: dict[int, int] = {}  # SM → version of the exchange area in which its words were not there

    def turn(self) -> None:
        """One SM goes on as far as it comes, or leaves."""
        if self.device.host["abort"][0] and self.rng.random() < ABORT_SHARE:
            self._raise_fault(FaultKind.ABORTED, len(self.sms) - 1)
        ready = [sm for sm in self.running if self._may_go_on(sm)]
        if not ready:
            self._give_up()
            return
        sm = self.rng.choices(ready, [self._speeds[sm] for sm in ready])[0]
        wait = self._waits.get(sm)
        if self.fault and (wait or self.sms[sm].is_stalled):
            del self.running[sm]
        elif wait and not self.device.exchange.is_ready(wait):
            self._looked[sm] = self.device.exchange.version
        else:
            self._waits.pop(sm, None)
            self._advance(sm)

    def _may_go_on(self, sm: int) -> bool:
        if self.fault:
            return True
        return not self.sms[sm].is_stalled and self._looked.get(sm) != self.device.exchange.version

    def _give_up(self) -> None:
        """Everyone waits. Unless a test has stopped an SM, that is the program's fault."""
        if not any(sm.is_stalled for sm in self.sms):
            missing = self.device.exchange.missing
            waits = [
                f"{wait.what}: word {missing(wait)}, epoch {wait.epoch}" for _, wait in sorted(self._waits.items())
            ]
            raise DeadlockError("; ".join(waits))
        self._raise_fault(FaultKind.TIMEOUT, self.rng.choice(list(self._waits) or [0]))

    def _advance(self, sm: int) -> None:
        try:
            wait = next(self.running[sm])
            if wait:
                self._waits[sm] = wait
        except StopIteration:
            del self.running[sm]
        except SelectError as error:
            self._raise_fault(error.kind, sm)
            del self.running[sm]

    def _raise_fault(self, kind: FaultKind, sm: int) -> None:
        """The first fault counts; from then on every SM leaves at its next wait."""
        if self.fault is None:
            self.fault = kind, sm, self.sms[sm].phase

    def leave(self) -> Residency:
        """Keep the slots for the next launch; last of all the host is told that the kernel has left. Once a launch."""
        device, control = self.device, self.sms[-1]
        reason = LeaveReason.FAULT if self.fault else control.leave
        assert reason is not None, "without a fault every SM stays until it is told to leave"
        for _ in control.emit([left(reason)]):
            pass
        residency = Residency(reason, control.n_steps, *(self.fault or ()))
        self._fill_control(residency)
        if not self.fault:
            device.keep(control)
            device.n_commands = control.n_commands
            device.epoch += control.n_steps * device.program.epochs_per_step
        return residency

    def _fill_control(self, residency: Residency) -> None:
        """What the host finds in ``Control`` behind the launch."""
        words = {
            Control.FAULT_KIND: residency.fault or 0,
            Control.FAULT_SM: residency.fault_sm,
            Control.FAULT_PHASE: residency.fault_phase,
            Control.N_STEPS: residency.n_steps,
            Control.N_COMMANDS: self.sms[-1].n_commands,
            Control.N_RECORDS: self.device.n_records,
            Control.LEFT: residency.reason,
        }
        for word, value in words.items():
            self.device.host["control_after"][word] = value


# ---------------------------------------------------------------------- one SM


@dataclass(frozen=True, slots=True, eq=False)
class _Weights:
    """What an SM's warps took from the tape in one phase."""

    before: NDArray[np.int64]  # [n_warps] tiles that each had used of its part
    after: NDArray[np.int64]
    weight: Floats  # [rows, K] bfloat16


class Sm:
    """Its own copy of slots and rows, its elements of the residual stream, its warps' places on the tape."""

    def __init__(self, launch: Launch, index: int) -> None:
        device, program = launch.device, launch.device.program
        self.launch, self.device, self.program, self.index = launch, device, program, index
        self.exchange, self.memory = device.exchange, device.memory
        self.n_sms, self.max_rows = program.target.n_sms, program.target.max_rows
        self.is_control = index == self.n_sms - 1
        self.slots = device.slots
        self.rows: Sequence[Row] = rows_of_step(self.slots, self.max_rows, program.sizes)
        self.n_commands = self.n_fetched = device.n_commands
        self.n_steps = 0
        self.phase = 0
        self.leave: LeaveReason | None = None
        self.is_stalled = False  # by a test
        # tiles of its part of the tape that each warp has used in this step
        self.used = np.zeros(self.program.sizes.n_warps, np.int64)
        self.stream: Floats = np.zeros((0, 0), np.float32)  # [rows, elements that this SM owns]

    # --- steps and phases ---

    def run(self) -> Steps:
        """Step after step until the kernel leaves."""
        n_phases = len(self.device.words)
        while self.leave is None and not self.launch.fault:
            if self._must_stall():
                self.is_stalled = True
                yield None
            n_tiles = self.program.warp_tiles[self.index, :, 1] * bool(self.rows)
            self.stream = np.zeros((len(self.rows), 0), np.float32)
            for phase in range(0 if self.rows else n_phases - 2, n_phases):
                self.phase = phase
                yield from self._run_phase(self.device.words[self.phase])
            if (self.used != n_tiles).any():
                warp = int(np.argmax(self.used != n_tiles))
                raise TapeError(
                    f"{self.name}: warp {warp} used {self.used[warp]} of its {n_tiles[warp]} tiles in a step"
                )
            self.used = np.zeros(self.program.sizes.n_warps, np.int64)

    def _must_stall(self) -> bool:
        control = self.device.host["control_before"]
        return bool(control[Control.STALL_SM] == self.index + 1 and control[Control.STALL_STEP] == self.n_steps)

    def _run_phase(self, words: list[int]) -> Steps:
        match Op(words[Phase.OP]):
            case Op.LINEAR:
                yield from self._linear(words)
            case Op.ATTEND_SELF | Op.ATTEND_CROSS:
                yield from self._attend(words)
            case Op.COMBINE:
                yield from self._combine(words)
            case Op.HEAD if self.rows:
                yield from self._head(words)
            case Op.HEAD:
                yield from self._idle(words)
            case Op.SELECT:
                yield from self._select(words)

    @property
    def name(self) -> str:
        """Where this SM is, for errors."""
        return f"SM {self.index}, step {self.n_steps}, phase {self.phase} ({self.program.phase_names[self.phase]})"

    # --- words ---

    def _tag(self, epoch: int) -> int:
        """What the words of this step carry whose phase record says ``epoch``."""
        return (self.device.epoch + self.n_steps * self.program.epochs_per_step + epoch) & 0xFFFFFFFF

    def _take(self, words: Words, epoch: int) -> Generator[Wait | None, None, NDArray[np.uint32]]:
        """Payloads of the words, in their shape, once they carry ``epoch``; now and then in two goes."""
        flat, parts = words.ravel(), []
        cut = self.launch.rng.randrange(flat.size) if self.launch.rng.random() < 0.3 else 0
        for part in (flat[:cut], flat[cut:]) if cut else (flat,):
            wait = Wait(part, self._tag(epoch), self.name)
            yield wait
            parts.append(self.exchange.take(self.index, wait))
        return np.concatenate(parts).reshape(words.shape)

    def _publish(self, words: Words, payload: NDArray[np.uint32], epoch: int) -> Steps:
        """Write words in up to three goes, beginning anywhere; ``payload`` is broadcast to their shape."""
        rng = self.launch.rng
        flat, values = words.ravel(), np.broadcast_to(payload, words.shape).ravel()
        begin = rng.randrange(flat.size)
        flat, values = np.roll(flat, begin), np.roll(values, begin)
        cuts = sorted(rng.randrange(flat.size) for _ in range(rng.randrange(3)))
        for low, high in zip([0, *cuts], [*cuts, flat.size], strict=True):
            if low < high:
                self.exchange.publish(self.index, flat[low:high], values[low:high], self._tag(epoch), self.name)
                yield None

    def _row_words(self, offset: int, n: int, rows: Sequence[int], pairs: Words) -> Words:
        """[rows, pairs] of the replica that this SM reads, in a buffer of rows of ``n`` elements."""
        replica = self.index % self.program.n_replicas
        return offset + (replica * self.max_rows + np.array(rows, np.int64)[:, None]) * (n // 2) + pairs

    def _all_row_words(self, offset: int, n: int, rows: Sequence[int], pairs: Words) -> Words:
        """[replicas, rows, pairs] of every replica."""
        replica = np.arange(self.program.n_replicas)[:, None, None]
        return offset + (replica * self.max_rows + np.array(rows, np.int64)[:, None]) * (n // 2) + pairs

    # --- linear ---

    def _linear(self, words: list[int]) -> Steps:
        first, n, _, _ = self.device.tasks[self.index][self.phase]
        if n:
            yield from self._granules(words, first)
        if words[Phase.FLAGS] & Flag.STREAM:
            self._begin_stream()

    def _granules(self, words: list[int], first: int) -> Steps:
        flags = Flag(words[Phase.FLAGS])
        x = yield from self._input(words)
        y = self._product(words, x)
        if Flag.GELU in flags:
            y = numbers.gelu(y)
        if Flag.RESIDUAL in flags:
            y = self._add_to_stream(y)
        pairs = first * GRANULE_ROWS // 2 + np.arange(y.shape[1] // 2)
        out = self._all_row_words(words[Phase.OUTPUT], words[Phase.N], range(len(x)), pairs)
        yield from self._publish(out, numbers.pack_pairs(y), words[Phase.EPOCH])

    def _input(self, words: list[int]) -> Generator[Wait | None, None, Floats]:
        """[rows, K] bfloat16."""
        if words[Phase.FLAGS] & Flag.EMBED:
            embedding = self._embedding()
            if words[Phase.K] != embedding.shape[1]:
                raise OutOfBoundsError(
                    f"{self.name}: {words[Phase.K]} elements of an embedding of {embedding.shape[1]}"
                )
            return numbers.round_bf16(embedding)
        pairs = np.arange(words[Phase.K] // 2)
        read = self._row_words(words[Phase.INPUT], words[Phase.K], range(len(self.rows)), pairs)
        return numbers.unpack_pairs((yield from self._take(read, words[Phase.INPUT_EPOCH])))

    def _embedding(self) -> Floats:
        """[rows, width], not rounded."""
        tokens, positions = [row.token for row in self.rows], [row.position for row in self.rows]
        if max(tokens) >= len(self.memory.token_table) or max(positions) >= len(self.memory.position_table):
            raise OutOfBoundsError(f"{self.name}: tokens {tokens} at positions {positions}")
        return numbers.embed(numbers.from_bits(self.memory.token_table[tokens]), self.memory.position_table[positions])

    def _begin_stream(self) -> None:
        """The elements that this SM owns are those that the first residual linear has it compute."""
        owner = next((i for i, words in enumerate(self.device.words) if words[Phase.FLAGS] & Flag.RESIDUAL), 0)
        first, n, _, _ = self.device.tasks[self.index][owner]
        embedding = self._embedding()
        if n > self.program.residual_granules or (first + n) * GRANULE_ROWS > embedding.shape[1]:
            raise OutOfBoundsError(f"{self.name}: granules {first} to {first + n} of the residual stream")
        self.stream = embedding[:, first * GRANULE_ROWS : (first + n) * GRANULE_ROWS]

    def _add_to_stream(self, y: Floats) -> Floats:
        if y.shape[1] > self.stream.shape[1]:
            raise UninitialisedError(f"{self.name}: {y.shape[1]} elements of a stream of {self.stream.shape[1]}")
        self.stream = self.stream.copy()
        self.stream[:, : y.shape[1]] += y
        added: Floats = self.stream[:, : y.shape[1]]
        return added

    def _product(self, words: list[int], x: Floats) -> Floats:
        """[rows, 8 x granules] with norm and bias: each warp's slice of K, then the warps in order."""
        weight, k_warps = self._weights(words), words[Phase.K_WARPS]
        slices = x.reshape(len(x), k_warps, -1).swapaxes(0, 1)  # [warps, rows, k]
        parts = weight.reshape(len(weight), k_warps, -1).swapaxes(0, 1)  # [warps, n, k]
        y = numbers.add_in_order(numbers.accumulate(slices, parts))
        aux = self._aux()
        if words[Phase.FLAGS] & Flag.NORM:
            y = numbers.apply_norm(y, numbers.row_stats(x, self.device.epsilon), aux[:, 0])
        return y + aux[:, 1]

    def _aux(self) -> Floats:
        """[8 x granules, 2] row sums and biases."""
        _, n, begin, _ = self.device.tasks[self.index][self.phase]
        if begin + n > self.memory.aux.shape[1]:
            raise OutOfBoundsError(f"{self.name}: row sums of granules {begin} to {begin + n}")
        return self.memory.aux[self.index, begin : begin + n].reshape(-1, 2)

    def _weights(self, words: list[int]) -> Floats:
        """[8 x granules, K]: the next tiles of every warp, where the warp takes them to belong."""
        known = self.device.weights.get((self.index, self.phase))
        if known is None or (known.before != self.used).any():
            before = self.used.copy()
            known = _Weights(before, self.used, self._read_tape(words))
            self.device.weights[self.index, self.phase] = known
        self.used = known.after.copy()
        return known.weight

    def _read_tape(self, words: list[int]) -> Floats:
        _, n, _, first_group = self.device.tasks[self.index][self.phase]
        k_warps, n_k_tiles = words[Phase.K_WARPS], words[Phase.K] // TILE_K
        n_groups, n_slice = self.program.sizes.n_warps // k_warps, n_k_tiles // k_warps
        if n * n_k_tiles > len(self.memory.tape):
            raise TapeError(f"{self.name}: {n} granules are more than the tape")
        weight = np.empty((n, GRANULE_ROWS, n_k_tiles, TILE_K), np.uint16)
        for group in range(n_groups):
            mine = [j for j in range(n) if (first_group + j) % n_groups == group]
            for k_warp in range(k_warps):
                tiles = self._next_tiles(
                    group * k_warps + k_warp, _order_of_use(len(mine), n_slice, self.program.sizes.batch_granules)
                )
                tiles = tiles.reshape(len(mine), n_slice, GRANULE_ROWS, TILE_K).swapaxes(1, 2)
                weight[mine, :, k_warp * n_slice : (k_warp + 1) * n_slice] = tiles
        return numbers.from_bits(weight).reshape(n * GRANULE_ROWS, -1)

    def _next_tiles(self, warp: int, order: NDArray[np.int64]) -> NDArray[np.uint16]:
        """[..., 256]: the tiles at these places behind the last one that the warp used."""
        first, n = (int(word) for word in self.program.warp_tiles[self.index, warp])
        begin, self.used[warp] = int(self.used[warp]), self.used[warp] + order.size
        if self.used[warp] > n or first + n > len(self.memory.tape):
            raise TapeError(f"{self.name}: warp {warp} uses {self.used[warp]} tiles of {n} from {first}")
        return self.memory.tape[first + begin + order]

    # --- attention ---

    def _attend(self, words: list[int]) -> Steps:
        """This SM's units of every slot that has rows."""
        is_cross = words[Phase.OP] == Op.ATTEND_CROSS
        n_heads, n_blocks = words[Phase.N_HEADS], words[Phase.N_BLOCKS]
        for slot in sorted({row.slot for row in self.rows}):
            needed = max(self._n_blocks(row, words) for row in self.rows if row.slot == slot)
            for head in range(n_heads):
                for block in range(min(needed, n_blocks) if is_cross else needed):
                    unit = head * n_blocks + block if is_cross else block * n_heads + head
                    if (slot * n_heads * n_blocks + unit) % self.n_sms == self.index:
                        yield from self._attend_unit(words, slot, head, block)

    def _n_blocks(self, row: Row, words: list[int]) -> int:
        """How many blocks of positions a row attends to."""
        attend = self.device.words[self.phase - 1] if words[Phase.OP] == Op.COMBINE else words
        is_cross = attend[Phase.OP] == Op.ATTEND_CROSS
        n_positions = row.request.n_positions if is_cross else row.position + 1
        return -(-n_positions // words[Phase.BLOCK])

    def _attend_unit(self, words: list[int], slot: int, head: int, block: int) -> Steps:
        """One head of one slot over one block of positions, for the rows that see it."""
        is_cross = words[Phase.OP] == Op.ATTEND_CROSS
        begin = block * words[Phase.BLOCK]
        end = begin + words[Phase.BLOCK]
        rows = [i for i, row in enumerate(self.rows) if row.slot == slot and (is_cross or row.position >= begin)]
        cache = self.memory.cross_cache if is_cross else self.memory.self_cache
        if words[Phase.LAYER] >= cache.shape[1] or head >= cache.shape[3] or begin >= cache.shape[4]:
            raise OutOfBoundsError(f"{self.name}: layer {words[Phase.LAYER]}, head {head}, position {begin}")
        q = yield from self._head_of(words, rows, head)
        if is_cross:
            end = min(end, self.rows[rows[0]].request.n_positions)
            visible = [end - begin] * len(rows)
        else:
            yield from self._cache(words, slot, head, begin, end)
            end = min(end, self.rows[rows[-1]].position + 1)
            self._verify_cached(words, slot, head, begin, end)
            visible = [min(self.rows[i].position + 1, end) - begin for i in rows]
        keys, values = numbers.from_bits(cache[slot, words[Phase.LAYER], :, head, begin:end])
        scores = numbers.block_scores(q, keys)
        if is_cross:
            scores = self._keep_scores(words, rows, head, begin, scores)
        result = numbers.attend_block(scores, values, np.array(visible))
        yield from self._publish_block(words, rows, head, block, *result)

    def _head_of(self, words: list[int], rows: Sequence[int], head: int) -> Generator[Wait | None, None, Floats]:
        """[rows, head size] of the input; heads are counted through queries, keys and values."""
        pairs = (self.program.sizes.head_size // 2) * head + np.arange(self.program.sizes.head_size // 2)
        read = self._row_words(words[Phase.INPUT], words[Phase.K], rows, pairs)
        return numbers.unpack_pairs((yield from self._take(read, words[Phase.INPUT_EPOCH])))

    def _cache(self, words: list[int], slot: int, head: int, begin: int, end: int) -> Steps:
        """Keys and values of this step's rows in the block, into the slot's own cache."""
        rows = [i for i, row in enumerate(self.rows) if row.slot == slot and begin <= row.position < end]
        if not rows:
            return
        positions, layer = [self.rows[i].position for i in rows], words[Phase.LAYER]
        for which in (0, 1):
            x = yield from self._head_of(words, rows, (1 + which) * words[Phase.N_HEADS] + head)
            self.memory.self_cache[slot, layer, which, head, positions] = numbers.to_bits(x)
        self.device.cached_by[slot, layer, head, positions] = self.index

    def _verify_cached(self, words: list[int], slot: int, head: int, begin: int, end: int) -> None:
        by = self.device.cached_by[slot, words[Phase.LAYER], head, begin:end]
        if (by == self.index).all():
            return
        position = begin + int(np.argmax(by != self.index))
        where = f"{self.name}: slot {slot}, head {head}, position {position} of the cache"
        if (by < 0).any():
            raise UninitialisedError(f"{where} was not written")
        raise RaceError(f"{where} was written by another SM")

    def _keep_scores(self, words: list[int], rows: Sequence[int], head: int, begin: int, scores: Floats) -> Floats:
        """Scores of kept heads go to memory as they are; the tail's count with their bias."""
        heads = words[Phase.SCORE_HEADS]
        request = self.rows[rows[0]].request
        if heads >> head & 1:
            kept = words[Phase.SCORES] - 1 + (heads & (1 << head) - 1).bit_count()
            if not 0 <= kept < self.memory.scores.shape[1]:
                raise OutOfBoundsError(f"{self.name}: scores of head {kept}")
            positions = [self.rows[i].position for i in rows]
            self.memory.scores[self.rows[rows[0]].slot, kept, positions, begin : begin + scores.shape[1]] = scores
        n_plain = request.n_positions if request.n_plain is None else request.n_plain
        biased = scores.copy()
        biased[:, max(n_plain - begin, 0) :] += np.float32(request.tail_bias)
        return biased

    def _publish_block(
        self,
        words: list[int],
        rows: Sequence[int],
        head: int,
        block: int,
        largest: Floats,
        total: Floats,
        mixed: Floats,
    ) -> Steps:
        """A row's only block is the row; else the block waits for COMBINE."""
        n_pairs = self.program.sizes.head_size // 2
        pairs = n_pairs * head + np.arange(n_pairs)
        for i, row in enumerate(rows):
            payload = numbers.pack_pairs(mixed[i])
            if self._n_blocks(self.rows[row], words) == 1:
                out = self._all_row_words(words[Phase.OUTPUT], words[Phase.N], [row], pairs)
                yield from self._publish(out, payload, words[Phase.EPOCH] + 1)  # COMBINE's
            else:
                stats = np.array([largest[i], total[i]], np.float32).view(np.uint32)
                out = self._block_words(words, row, head, block)
                yield from self._publish(out, np.concatenate([stats, payload]), words[Phase.EPOCH])

    def _block_words(self, words: list[int], row: int, head: int, block: int) -> Words:
        n_words = BLOCK_STATS_WORDS + self.program.sizes.head_size // 2
        index = (row * words[Phase.N_HEADS] + head) * words[Phase.N_BLOCKS] + block
        return words[Phase.PARTIAL] + index * n_words + np.arange(n_words)

    def _combine(self, words: list[int]) -> Steps:
        """This SM's heads of the rows that have several blocks."""
        n_heads, n_pairs = words[Phase.N_HEADS], self.program.sizes.head_size // 2
        for unit in range(self.index, len(self.rows) * n_heads, self.n_sms):
            row, head = divmod(unit, n_heads)
            n = self._n_blocks(self.rows[row], words)
            if n == 1:
                continue
            read = np.stack([self._block_words(words, row, head, block) for block in range(n)])
            blocks = yield from self._take(read, words[Phase.INPUT_EPOCH])
            stats = np.ascontiguousarray(blocks[:, :BLOCK_STATS_WORDS].T).view(np.float32)
            y = numbers.combine_blocks(stats[0], stats[1], numbers.unpack_pairs(blocks[:, BLOCK_STATS_WORDS:]))
            out = self._all_row_words(words[Phase.OUTPUT], words[Phase.N], [row], head * n_pairs + np.arange(n_pairs))
            yield from self._publish(out, numbers.pack_pairs(y), words[Phase.EPOCH])

    # --- head and select ---

    def _head(self, words: list[int]) -> Steps:
        """What this SM's tokens are worth, for every row; the control SM also looks at the door."""
        first, n, _, _ = self.device.tasks[self.index][self.phase]
        x: Floats | None = None
        if n:
            x = yield from self._input(words)
        if self.is_control:
            yield from self._answer_door(words, None)
        token, sizes = first * GRANULE_ROWS, self.program.sizes
        if words[Phase.N] > sizes.n_tokens or token >= words[Phase.N]:
            raise OutOfBoundsError(f"{self.name}: token {token} of {words[Phase.N]}, of {sizes.n_tokens}")
        logits = None if x is None else self._product(words, x)[:, : words[Phase.N] - token]
        for i, row in enumerate(self.rows):
            partial = HeadPartial()
            if logits is not None:
                partial = partial_of(logits[i], token, row, allowed_tokens(row, self.memory.bitmaps, sizes), sizes)
            out = self._partial_words(words[Phase.OUTPUT], self.index, i)
            yield from self._publish(out, partial.words()[: Partial.UNUSED], words[Phase.EPOCH])

    def _partial_words(self, offset: int, sm: int, row: int) -> Words:
        return offset + (sm * self.max_rows + row) * PARTIAL_WORDS + np.arange(Partial.UNUSED)

    def _idle(self, words: list[int]) -> Steps:
        """A step without rows: once all SMs are here, the control SM waits for the host."""
        arrivals = words[Phase.OUTPUT] + np.arange(self.n_sms) * self.max_rows * PARTIAL_WORDS + Partial.UNUSED
        yield from self._publish(arrivals[self.index : self.index + 1], np.zeros(1, np.uint32), words[Phase.EPOCH])
        if not self.is_control:
            return
        yield from self._take(arrivals, words[Phase.EPOCH])
        for _ in range(IDLE_POLLS):
            if self.launch.fault:
                return
            if self.device.host["door"][0] != self.n_fetched:
                break
            yield None
        reason = LeaveReason.IDLE if self.device.host["door"][0] == self.n_fetched else None
        yield from self._answer_door(words, reason)

    def _answer_door(self, words: list[int], reason: LeaveReason | None) -> Steps:
        """Copy the commands up to the door and what they open, then publish how many there are and whether to leave."""
        door = int(self.device.host["door"][0])
        for number in range(self.n_fetched, door):
            place = number % isa.COMMAND_SLOTS
            command = self.device.host["commands"][place * isa.COMMAND_WORDS :][: isa.COMMAND_WORDS].tolist()
            self.exchange.write_plain(self.index, ("command", place))
            self.device.commands[place] = command
            kind, slot = command[Command.KIND], command[Command.SLOT]
            if kind == CommandKind.OPEN and slot < len(self.slots) and self.slots[slot] is None:
                self.exchange.write_plain(self.index, ("request", slot))
                request = self.device.host["requests"][slot * isa.REQUEST_WORDS :][: isa.REQUEST_WORDS]
                self.device.requests[slot] = request.copy()
            yield None
        self.n_fetched = door
        if reason is None and self.n_steps + 1 >= self.launch.max_steps:
            reason = LeaveReason.STEPS
        payload = door & (1 << COUNT_BITS) - 1 | (reason or 0) << COUNT_BITS
        word = np.array([self.program.control_word])
        yield from self._publish(word, np.array([payload], np.uint32), words[Phase.EPOCH])

    def _select(self, words: list[int]) -> Steps:
        """The same on every SM: picks, commands, the next step's rows."""
        if self.rows:
            shape = (range(self.n_sms), range(len(self.rows)))
            read = np.array([[self._partial_words(words[Phase.INPUT], sm, row) for sm in shape[0]] for row in shape[1]])
            found = yield from self._take(read, words[Phase.INPUT_EPOCH])
            partials = np.pad(found, [(0, 0), (0, 0), (0, PARTIAL_WORDS - Partial.UNUSED)])
            for slot in {row.slot for row in self.rows}:
                self.exchange.read_plain(self.index, ("request", slot))  # its draft
            merged = [merge([HeadPartial.of_words(own) for own in of_row]) for of_row in partials]
            self.slots, told = accept(self.slots, self.rows, merged, self.program.sizes)
            yield from self.emit(told)
        control = yield from self._take(np.array([self.program.control_word]), words[Phase.INPUT_EPOCH])
        yield from self._obey(int(control[0]))
        self._compare(self.slots)
        self.n_steps += 1
        self.rows = rows_of_step(self.slots, self.max_rows, self.program.sizes)
        if self.is_control:
            self.device.host["beat"][0] = self.n_steps

    def read_commands(self, control: int) -> list[list[int]]:
        """The commands up to the control word's count, which the control SM has copied; their requests are read too."""
        n = (control - self.n_commands) % (1 << COUNT_BITS)
        places = [(self.n_commands + i) % isa.COMMAND_SLOTS for i in range(n)]
        for place in places:
            self.exchange.read_plain(self.index, ("command", place))
        if not all(place in self.device.commands for place in places):
            raise UninitialisedError(
                f"{self.name}: commands {self.n_commands} to {self.n_commands + n} were not copied"
            )
        commands = [self.device.commands[place] for place in places]
        for command in commands:
            if command[Command.KIND] == CommandKind.OPEN:
                self.exchange.read_plain(self.index, ("request", command[Command.SLOT]))
        self.n_commands += n
        return commands

    def _obey(self, control: int) -> Steps:
        """The commands up to the control word's count, and its reason to leave, if it has one."""
        commands = self.read_commands(control)
        for command in commands:
            if command[Command.KIND] == CommandKind.OPEN:
                by = self.device.cached_by[command[Command.SLOT] : command[Command.SLOT] + 1]
                by[by == self.index] = -1
        self.slots, told, leave = carry_out(self.slots, commands, self.device.requests)
        yield from self.emit(told)
        self.leave = LeaveReason(control >> COUNT_BITS) if control >> COUNT_BITS else leave

    def _compare(self, slots: object) -> None:
        """Raise DivergenceError unless every SM comes to the same end of a step."""
        end = slots, self.n_commands
        if len(self.launch.ends) == self.n_steps:
            self.launch.ends.append(end)
        elif self.launch.ends[self.n_steps] != end:
            raise DivergenceError(f"{self.name}: {end}, another SM {self.launch.ends[self.n_steps]}")

    def emit(self, told: Sequence[Emitted]) -> Steps:
        """The control SM writes records for the host, each in two halves."""
        if not self.is_control:
            return
        for emitted in told:
            place = self.device.n_records % isa.RECORD_SLOTS * isa.RECORD_WORDS
            self.device.n_records += 1
            words = record_words(emitted, step=self.n_steps, sequence=self.device.n_records)
            half = isa.RECORD_WORDS // 2
            self.device.host["records"][place : place + half] = words[:half]
            yield None
            self.device.host["records"][place + half : place + 2 * half] = words[half:]
            yield None


def _order_of_use(n_granules: int, n_slice: int, of_batch: int) -> NDArray[np.int64]:
    """[granules of a group, tiles of a warp's slice] → which of the warp's next tiles it is."""
    granule, tile = np.arange(n_granules)[:, None], np.arange(n_slice)
    batch = granule // of_batch
    n_of_batch = np.minimum(of_batch, n_granules - batch * of_batch)
    return (batch * of_batch * n_slice) + tile * n_of_batch + granule % of_batch
