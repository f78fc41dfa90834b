"""Runs a transducer's packed program on the CPU, word by word as ``kernel/transducer.cu`` does.

The interpreter's SMs with other bodies: LSTM, RECUR, LINEAR, JOINT and TRANSDUCE, whose tape lies at fixed places since
a step may leave the predictor out. Equals ``evaluate_transducer`` bit for bit, whatever the interleaving.
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from . import isa, numbers
from .errors import BadWordError, OutOfBoundsError
from .exchange import Wait, Words
from .fuse import fold_constants, fold_table
from .interpreter import COUNT_BITS, IDLE_POLLS, DeviceMemory, Floats, Interpreter, Launch, Sm, Steps
from .isa import (
    BEST_WORDS,
    GATES,
    GRANULE_ROWS,
    GRANULE_UNITS,
    TILE_K,
    Command,
    CommandKind,
    Flag,
    LeaveReason,
    Op,
    Phase,
)
from .memory import N_PARITIES
from .ops import FusedLstm, Sizes
from .pack import pack_aux, pack_tape
from .program import Program
from .schedule import granules_of_group
from .select import Emitted
from .transduce import (
    Best,
    Feed,
    FramePick,
    Slot,
    Slots,
    Told,
    accept,
    carry_out,
    log_sum_exp,
    rows_of_step,
)

PREDICTOR_OPS = (Op.LSTM, Op.RECUR, Op.LINEAR)


@dataclass(frozen=True, slots=True, eq=False)
class TransducerDevice:
    """What lies in device memory beside tape and auxiliary floats. The kernel writes ``state_out``."""

    memory: DeviceMemory  # tape and aux; the rest is empty
    table: Floats  # [n_tokens, units, GATES]
    frames: NDArray[np.uint16]  # [seat, n_frames, width] bits of bfloat16
    state_in: Floats  # [seat, layer, 2, units] outputs, cells
    state_out: Floats  # the same


def transducer_device(program: Program, constants: Mapping[str, Floats]) -> TransducerDevice:
    """Constants packed for ``program``, and memory that nobody has written: no numbers."""
    first, sizes = program.ops[0], program.sizes
    assert isinstance(first, FusedLstm) and sizes.transducer is not None, "a transducer's program"
    folded = fold_constants(program.ops, constants)
    no_bits, nothing = np.zeros(0, np.uint16), np.zeros(0, np.float32)
    memory = DeviceMemory(
        tape=pack_tape(program, folded),
        aux=pack_aux(program, folded),
        token_table=no_bits,
        position_table=nothing,
        bitmaps=np.zeros(0, np.uint32),
        self_cache=no_bits,
        cross_cache=no_bits,
        scores=nothing,
    )
    state = (sizes.transducer.n_seats, sizes.n_layers, 2, sizes.width)
    frames = (sizes.transducer.n_seats, sizes.transducer.n_frames, sizes.width)
    return TransducerDevice(
        memory=memory,
        table=fold_table(first, constants),
        frames=np.full(frames, 0x7FC0, np.uint16),
        state_in=np.full(state, np.nan, np.float32),
        state_out=np.full(state, np.nan, np.float32),
    )


class TransducerInterpreter(Interpreter):
    """A device with a transducer's program."""

    def __init__(self, program: Program, device: TransducerDevice, mailbox: NDArray[np.uint8]) -> None:
        self.own = device
        self.frame_slots: Slots = (None,) * program.sizes.max_slots
        super().__init__(program, device.memory, mailbox)

    def clear(self, *, state: bool = True) -> None:
        """See ``Interpreter``."""
        super().clear(state=state)
        if state:
            self.frame_slots = (None,) * self.program.sizes.max_slots

    def verify_words(self, program: Program) -> None:
        """See ``Interpreter``."""
        ops = [int(op) for op in program.phases[:, Phase.OP]]
        if ops[-2:] != [Op.JOINT, Op.TRANSDUCE] or not set(ops[:-2]) <= set(PREDICTOR_OPS) or ops[0] != Op.LSTM:
            raise BadWordError(f"{program.name}: a step begins with LSTM and ends with JOINT and TRANSDUCE, not {ops}")
        for index, words in enumerate(program.phases[:-1]):
            k, n, k_warps = (int(words[word]) for word in (Phase.K, Phase.N, Phase.K_WARPS))
            is_table = words[Phase.OP] == Op.LSTM and words[Phase.FLAGS] == Flag.EMBED
            is_cut = k_warps in (1, 2, 4, 8) and k % (TILE_K * k_warps) == 0 and (k > 0 or is_table)
            if not is_cut or not 0 < n < 1 << 20 or k >= 1 << 16 or words[Phase.LAYER] >= program.sizes.n_layers:
                raise BadWordError(f"{program.name}, phase {index}: no body takes {words.tolist()}")

    def new_sm(self, launch: Launch, index: int) -> Sm:
        """See ``Interpreter``."""
        return _TransducerSm(launch, index, self)

    def keep(self, control: Sm) -> None:
        """See ``Interpreter``."""
        assert isinstance(control, _TransducerSm), "this interpreter's own"
        self.frame_slots = control.frame_slots


class _TransducerSm(Sm):
    """Its own copy of slots and rows; of its units the kept products and the cells, for every slot."""

    def __init__(self, launch: Launch, index: int, device: TransducerInterpreter) -> None:
        super().__init__(launch, index)
        self.own = device.own
        self.frame_slots: Slots = tuple(slot and slot.relaunched() for slot in device.frame_slots)
        self.frame_rows = rows_of_step(self.frame_slots, self.max_rows)
        n_slots, n_layers = self.program.sizes.max_slots, self.program.sizes.n_layers
        n = self.program.kept_granules
        self.kept = np.full((n_layers, n_slots, n * GRANULE_UNITS, GATES), np.nan, np.float32)
        self.cells = np.full((n_layers, n_slots, n * GRANULE_UNITS), np.nan, np.float32)
        self.predicted_tag = [0] * n_slots  # what the words of a slot's last prediction carry
        self.first_tile = _first_tiles(self.program, index)
        self.to_tell: list[Told | Emitted] = []  # of the step before

    # --- steps and phases ---

    def run(self) -> Steps:
        """Step after step until the kernel leaves."""
        while self.leave is None and not self.launch.fault:
            if self._must_stall():
                self.is_stalled = True
                yield None
            for phase, words in enumerate(self.device.words):
                self.phase = phase
                self.used = self.first_tile[phase].copy()
                yield from self._run_phase(words)
        if not self.launch.fault:
            yield from self._tell()

    def _run_phase(self, words: list[int]) -> Steps:
        op = Op(words[Phase.OP])
        _, n, _, _ = self.device.tasks[self.index][self.phase]
        if op in PREDICTOR_OPS and n and self.stepping:
            match op:
                case Op.LSTM:
                    yield from self._lstm(words)
                case Op.RECUR:
                    yield from self._recur(words)
                case _:
                    yield from self._predict(words)
        elif op is Op.JOINT:
            yield from self._joint(words)
        elif op is Op.TRANSDUCE:
            yield from self._transduce(words)
        if self.phase == 0:
            yield from self._tell()

    @property
    def stepping(self) -> list[int]:
        """The slots for which the predictor has something to do."""
        return [index for index, slot in enumerate(self.frame_slots) if slot is not None and slot.has_step]

    @property
    def parity(self) -> int:
        """Which of two buffers this step's results are in."""
        return self.n_steps % N_PARITIES

    def _own_units(self) -> slice:
        first, n, _, _ = self.device.tasks[self.index][self.phase]
        if n > self.program.kept_granules:
            raise OutOfBoundsError(f"{self.name}: {n} granules of a layer of {self.program.kept_granules}")
        return slice(first * GRANULE_UNITS, (first + n) * GRANULE_UNITS)

    # --- predictor ---

    def _sums(self, words: list[int], x: Floats) -> Floats:
        """[rows, 8 x granules]: each warp's slice of K, then the warps in order."""
        weight, k_warps = self._weights(words), words[Phase.K_WARPS]
        slices = x.reshape(len(x), k_warps, -1).swapaxes(0, 1)
        parts = weight.reshape(len(weight), k_warps, -1).swapaxes(0, 1)
        return numbers.add_in_order(numbers.accumulate(slices, parts))

    def _outputs(self, words: list[int]) -> Generator[Wait | None, None, Floats]:
        """[stepping slots, K] of the input, whose row number is the slot."""
        read = self._row_words(words[Phase.INPUT], words[Phase.K], self.stepping, np.arange(words[Phase.K] // 2))
        return numbers.unpack_pairs((yield from self._take(read, words[Phase.INPUT_EPOCH])))

    def _lstm(self, words: list[int]) -> Steps:
        units, layer = self._own_units(), words[Phase.LAYER]
        n_units = units.stop - units.start
        own = slice(0, n_units)
        if words[Phase.FLAGS] & Flag.EMBED:
            tokens = [slot.token for slot in map(self._slot, self.stepping)]
            if max(tokens) >= len(self.own.table) or units.stop > self.own.table.shape[1]:
                raise OutOfBoundsError(f"{self.name}: tokens {tokens}, units to {units.stop} of the table")
            gates = self.own.table[tokens, units] + self._kept(layer, own)
        else:
            sums = self._sums(words, (yield from self._outputs(words))).reshape(-1, n_units, GATES)
            gates = (sums + self._kept(layer, own)) + self._aux()[:, 1].reshape(n_units, GATES)
        before = np.stack([self._before(layer, own, index) for index in self.stepping])
        outputs, cells = numbers.lstm_cells(gates, before)
        for row, index in enumerate(self.stepping):
            slot, seat = self._slot(index), self._slot(index).part.seat
            if slot.resumes or slot.feed is Feed.STATE:
                state = self.own.state_out[slot.state_seat] if slot.resumes else self.own.state_in[seat]
                outputs[row], cells[row] = numbers.round_bf16(state[layer, 0, units]), state[layer, 1, units]
            self.own.state_out[seat, layer, :, units] = np.stack([outputs[row], cells[row]])
            self.cells[layer, index, own] = cells[row]
        pairs = units.start // 2 + np.arange(n_units // 2)
        out = self._all_row_words(words[Phase.OUTPUT], words[Phase.N] // GATES, self.stepping, pairs)
        yield from self._publish(out, numbers.pack_pairs(outputs), words[Phase.EPOCH])

    def _slot(self, index: int) -> Slot:
        slot = self.frame_slots[index]
        assert slot is not None, "an active slot"
        return slot

    def _kept(self, layer: int, own: slice) -> Floats:
        """[stepping slots, units, GATES]"""
        kept = self.kept[layer, self.stepping, own].copy()
        kept[[self._slot(index).is_new for index in self.stepping]] = 0
        return kept

    def _before(self, layer: int, own: slice, index: int) -> Floats:
        """[units] the cells of a slot."""
        cells = self.cells[layer, index, own]
        return np.zeros_like(cells) if self._slot(index).is_new else cells

    def _recur(self, words: list[int]) -> Steps:
        n_units = self._own_units().stop - self._own_units().start
        sums = self._sums(words, (yield from self._outputs(words)))
        self.kept[words[Phase.LAYER], self.stepping, :n_units] = sums.reshape(len(sums), n_units, GATES)

    def _predict(self, words: list[int]) -> Steps:
        first, _, _, _ = self.device.tasks[self.index][self.phase]
        y = self._sums(words, (yield from self._outputs(words))) + self._aux()[:, 1]
        pairs = first * GRANULE_ROWS // 2 + np.arange(y.shape[1] // 2)
        out = self._all_row_words(words[Phase.OUTPUT], words[Phase.N], self.stepping, pairs)
        yield from self._publish(out, numbers.pack_pairs(y), words[Phase.EPOCH])

    # --- joint ---

    def _joint(self, words: list[int]) -> Steps:
        """This SM's tokens at every row, and the durations on the SM that has them."""
        for index in self.stepping:
            self.predicted_tag[index] = self._tag(words[Phase.INPUT_EPOCH])
        if self.is_control and self.is_active:
            yield from self._say(words, None)
        first, n, _, _ = self.device.tasks[self.index][self.phase]
        sizes, first_duration = self.program.sizes, _first_duration(self.program.sizes)
        token = first * GRANULE_ROWS
        n_tokens = max(min(token + n * GRANULE_ROWS, sizes.n_tokens) - token, 0)
        logits = np.zeros((0, 0), np.float32)
        if self.frame_rows:
            logits = self._sums(words, (yield from self._joint_input(words))) + self._aux()[:, 1]
        best = [Best.of(own[:n_tokens], token) for own in logits] or [Best()]
        payload = np.array([(numbers.float_word(one.logit), one.token) for one in best], np.uint32)
        yield from self._publish(self._best_words(words, len(best))[:, self.index], payload, words[Phase.EPOCH])
        if not len(logits):
            if self.is_control and not self.is_active:
                yield from self._idle(words)
            return
        sums = np.array([numbers.float_word(log_sum_exp(own[:n_tokens])) for own in logits], np.uint32)
        yield from self._publish(self._sum_words(words, len(sums))[:, self.index], sums, words[Phase.EPOCH])
        if token <= first_duration < token + n * GRANULE_ROWS:
            durations = logits[:, first_duration - token :][:, : words[Phase.N] - first_duration]
            indices = np.argmax(durations, axis=1).astype(np.uint32)
            yield from self._publish(self._sum_words(words, len(sums))[:, self.n_sms], indices, words[Phase.EPOCH])

    @property
    def is_active(self) -> bool:
        """Whether any slot is open."""
        return any(slot is not None for slot in self.frame_slots)

    def _joint_input(self, words: list[int]) -> Generator[Wait | None, None, Floats]:
        """[rows, K] bfloat16."""
        k, predicted = words[Phase.K], {}
        for index in sorted({row.slot for row in self.frame_rows}):
            read = self._row_words(words[Phase.INPUT], k, [index], np.arange(k // 2)).ravel()
            wait = Wait(read, self.predicted_tag[index], self.name)
            yield wait
            predicted[index] = numbers.unpack_pairs(self.exchange.take(self.index, wait))
        seats = [self._slot(row.slot).part.seat for row in self.frame_rows]
        frames = self.own.frames[seats, [row.frame for row in self.frame_rows]]
        return numbers.joint_rows(numbers.from_bits(frames), np.stack([predicted[row.slot] for row in self.frame_rows]))

    def _best_words(self, words: list[int], n_rows: int, offset: Phase = Phase.OUTPUT) -> Words:
        """[rows, SMs, 2] of this step."""
        begin = words[offset] + self.parity * self.max_rows * self.n_sms * BEST_WORDS
        return begin + np.arange(n_rows * self.n_sms * BEST_WORDS).reshape(n_rows, self.n_sms, BEST_WORDS)

    def _sum_words(self, words: list[int], n_rows: int, parity: int | None = None) -> Words:
        """[rows, SMs + 1]: log-sum-exps, and behind them the row's duration."""
        which = self.parity if parity is None else parity
        begin = words[Phase.PARTIAL] + which * self.max_rows * (self.n_sms + 1)
        return begin + np.arange(n_rows * (self.n_sms + 1)).reshape(n_rows, self.n_sms + 1)

    def _idle(self, words: list[int]) -> Steps:
        """Nothing to do: once all SMs are here, the control SM waits for the host."""
        yield from self._take(self._best_words(words, 1), words[Phase.EPOCH])
        for _ in range(IDLE_POLLS):
            if self.launch.fault:
                return
            if self.device.host["door"][0] != self.n_fetched:
                break
            yield None
        reason = LeaveReason.IDLE if self.device.host["door"][0] == self.n_fetched else None
        yield from self._fetch()
        yield from self._say(words, reason)

    def _fetch(self) -> Steps:
        """Copy the commands up to the door, and what they open, to where every SM can read them."""
        door = int(self.device.host["door"][0])
        for number in range(self.n_fetched, door):
            place = number % isa.COMMAND_SLOTS
            command = self.device.host["commands"][place * isa.COMMAND_WORDS :][: isa.COMMAND_WORDS].tolist()
            self.exchange.write_plain(self.index, ("command", place))
            self.device.commands[place] = command
            kind, slot = command[Command.KIND], command[Command.SLOT]
            if kind == CommandKind.OPEN and slot < len(self.frame_slots) and self.frame_slots[slot] is None:
                self.exchange.write_plain(self.index, ("request", slot))
                request = self.device.host["requests"][slot * isa.REQUEST_WORDS :][: isa.REQUEST_WORDS]
                self.device.requests[slot] = request.copy()
            yield None
        self.n_fetched = door

    def _say(self, words: list[int], reason: LeaveReason | None) -> Steps:
        """The control word: what has been fetched, and whether to leave."""
        if reason is None and self.n_steps + 1 >= self.launch.max_steps:
            reason = LeaveReason.STEPS
        payload = self.n_fetched & (1 << COUNT_BITS) - 1 | (reason or 0) << COUNT_BITS
        word = np.array([self.program.control_word + self.parity])
        yield from self._publish(word, np.array([payload], np.uint32), words[Phase.EPOCH])

    # --- transduce ---

    def _transduce(self, words: list[int]) -> Steps:
        """The same on every SM: picks, commands, the next step's rows."""
        joint = self.device.words[self.phase - 1]
        n_rows, epoch = len(self.frame_rows), words[Phase.INPUT_EPOCH]
        found = yield from self._take(self._best_words(joint, max(n_rows, 1)), epoch)
        picks: list[FramePick] = []
        if n_rows:
            durations = yield from self._take(self._sum_words(joint, n_rows)[:, self.n_sms], epoch)
            logits = np.ascontiguousarray(found[..., 0]).view(np.float32)
            for row, duration in enumerate(durations.tolist()):
                own = [Best(float(logits[row, sm]), int(found[row, sm, 1])) for sm in range(self.n_sms)]
                best = Best.among(own)
                picks.append(FramePick(best.token, best.logit, duration))
        self.frame_slots, told = accept(self.frame_slots, self.frame_rows, picks, self.program.sizes)
        self.to_tell += told
        control = yield from self._take(np.array([self.program.control_word + self.parity]), epoch)
        yield from self._obey_frames(int(control[0]))
        self._compare(self.frame_slots)
        if self.is_control and self.launch.rng.random() < 0.5:  # the kernel looks at the door in some steps only
            yield from self._fetch()
        self.n_steps += 1
        self.frame_rows = rows_of_step(self.frame_slots, self.max_rows)
        if self.is_control:
            self.device.host["beat"][0] = self.n_steps

    def _obey_frames(self, control: int) -> Steps:
        """The commands up to the control word's count, and its reason to leave, if it has one."""
        commands = self.read_commands(control)
        sizes = self.program.sizes
        self.frame_slots, told, leave = carry_out(self.frame_slots, commands, self.device.requests, sizes)
        self.to_tell += told
        self.leave = LeaveReason(control >> COUNT_BITS) if control >> COUNT_BITS else leave
        yield from ()

    def _tell(self) -> Steps:
        """Records of the step before, whose log-sum-exps nobody writes over before the step after this one."""
        told, self.to_tell = self.to_tell, []
        if not self.is_control:
            return
        joint = self.device.words[-2]
        epoch = joint[Phase.EPOCH] - self.program.epochs_per_step  # of the step before
        emitted: list[Emitted] = []
        for one in told:
            if isinstance(one, Told):
                read = self._sum_words(joint, one.row + 1, (self.n_steps - 1) % N_PARITIES)[one.row, : self.n_sms]
                sums = (yield from self._take(read, epoch)).view(np.float32)
                one = one.emitted(log_sum_exp(sums))
            emitted.append(one)
        yield from self.emit(emitted)


def _first_duration(sizes: Sizes) -> int:
    """Row of the joint's padded weight at which the durations begin."""
    return -(-sizes.n_tokens // GRANULE_ROWS) * GRANULE_ROWS


def _first_tiles(program: Program, sm: int) -> list[NDArray[np.int64]]:
    """Of every phase [n_warps]: the tiles of its part of the tape that a warp passes before."""
    n_warps = program.sizes.n_warps
    first, so_far = [], np.zeros(n_warps, np.int64)
    for words, task in zip(program.phases.astype(np.int64), program.tasks[sm].astype(np.int64), strict=True):
        first.append(so_far)
        if words[Phase.K_WARPS]:
            k_warps = int(words[Phase.K_WARPS])
            of_group = granules_of_group(task[isa.Task.N_GRANULES], task[isa.Task.FIRST_GROUP], n_warps // k_warps)
            so_far = so_far + np.repeat(of_group * (int(words[Phase.K]) // TILE_K // k_warps), k_warps)
    return first
