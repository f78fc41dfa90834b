"""Whether a transducer's freshly compiled kernel computes what it should, as ``selftest.py`` for token loops.

A few requests over random frames run once for each cubin and driver, and plain torch says what their tokens should be
worth. Knows fused ops as torch computes them. Does not know how the kernel does.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from .errors import SelfTestError
from .launcher import Launcher
from .mailbox import EmissionRecord
from .ops import FusedJoint, FusedLinear, FusedLstm, FusedRecurrence, Transducer
from .program import Program
from .request import FramePart, TransducerRequest
from .runtime import Runtime
from .selftest import run_all
from .upload import Constants

log = logging.getLogger(__name__)

# Of log-probabilities and of how far behind the best a token or a duration may be. Rows are rounded to bfloat16, which
# moves a logit by hundredths.
TOLERANCE = 0.25
MEAN_TOLERANCE = 0.05
_N_FRAMES = (1, 9, 40)  # of the requests, as many as a slot holds
_SCALES = (1.0, 0.3, 0.1)  # of their frames: where they are small, predictions decide
_SEED = 20_26


def ensure_transducer_right(runtime: Runtime, launcher: Launcher, constants: Constants, *, cache: Path | None) -> None:
    """Test the kernel unless ``cache`` says that this was done. No slot may be open.

    Raises:
        SelfTestError: if a token or a duration is worth something else than torch says.
        FaultError, DriverError: if the kernel does not even come to an end.
    """
    mark = cache / f"{launcher.key}.driver-{launcher.device.driver}.right" if cache else None
    if mark and mark.exists():
        return
    program, buffers = launcher.program, launcher.buffers.transducer
    assert buffers is not None and program.sizes.transducer is not None, "a transducer's launcher"
    frames = buffers.frames
    frames.normal_(generator=torch.Generator(frames.device).manual_seed(_SEED))
    for slot, scale in enumerate(_SCALES[: len(frames)]):
        frames[slot] *= scale
    torch.cuda.synchronize(frames.device)
    lengths = [min(n, frames.shape[1]) for n in _N_FRAMES[: program.sizes.max_slots]]
    records = run_all(
        runtime, [TransducerRequest((FramePart(n, begins=True, seat=seat),)) for seat, n in enumerate(lengths)]
    )
    for slot, n_frames in enumerate(lengths):
        said = [record for record in records if isinstance(record, EmissionRecord) and record.slot == slot]
        compare(program, constants, frames[slot, :n_frames].float(), said)
    log.info("%s: tested on %s, %d requests are right", program.name, launcher.device.name, len(lengths))
    if mark:
        mark.touch()


def compare(
    program: Program,
    constants: Constants,
    frames: Tensor,  # [T, width] float32
    said: Sequence[EmissionRecord],  # what the device wrote
) -> None:
    """Raise SelfTestError unless torch comes by the same frames to nearly the same, fed what the device wrote."""
    transducer, joint = program.sizes.transducer, program.ops[-1]
    assert transducer is not None and isinstance(joint, FusedJoint), "a transducer's program"
    net = TransducerTorch(program, {name: value.to(frames) for name, value in constants.items()})
    predicted = net.step(transducer.blank)
    frame, n_symbols, errors, left = 0, 0, [0.0], list(said)
    while frame < len(frames):
        logits = net.joint(frames[frame], predicted)
        tokens, durations = logits[: joint.n_tokens].log_softmax(dim=0), logits[joint.n_tokens :]
        record = left[0] if left and left[0].frame == frame else None
        token = transducer.blank if record is None else record.token
        ahead = _ahead(transducer, durations, record, left[0].frame - frame if left and record is None else None)
        where = f"{program.name}, frame {frame} of {len(frames)}: {record or 'a blank'}"
        if float(tokens.max() - tokens[token]) > TOLERANCE or float(durations.max() - durations[ahead]) > TOLERANCE:
            best = f"token {int(tokens.argmax())}, duration {int(durations.argmax())}"
            raise SelfTestError(f"{where}, torch finds {best}, by more than {TOLERANCE}")
        n_ahead = transducer.durations[ahead]
        if record is not None:
            errors.append(abs(record.log_probability - float(tokens[token])))
            predicted = net.step(left.pop(0).token)
            n_symbols += 1
        if record is None or n_symbols == transducer.max_symbols:
            n_ahead = max(n_ahead, 1)
        n_symbols = 0 if n_ahead else n_symbols
        frame += n_ahead
    if left or max(errors) > TOLERANCE or sum(errors) / len(errors) > MEAN_TOLERANCE:
        raise SelfTestError(
            f"{program.name}: log-probabilities differ from torch's by up to {max(errors):.3f} and "
            f"{sum(errors) / len(errors):.3f} on average; accepted are {TOLERANCE} and {MEAN_TOLERANCE}; "
            f"{len(left)} tokens are past what torch comes to"
        )


def _ahead(transducer: Transducer, durations: Tensor, record: EmissionRecord | None, to_next: int | None) -> int:
    """Index of the device's duration: a token's is in its record, a blank's ends at the next token or before."""
    if record is not None:
        own = [index for index, frames in enumerate(transducer.durations) if frames == record.duration]
        return max(own, key=lambda index: float(durations[index]))
    near = [i for i, n in enumerate(transducer.durations) if to_next is None or max(n, 1) <= to_next]
    return max(near or range(len(durations)), key=lambda index: float(durations[index]))


class TransducerTorch:
    """One stream through a program's ops, in torch. Weights are rounded to bfloat16 as the device rounds them."""

    def __init__(self, program: Program, constants: Constants) -> None:
        self._ops = program.ops
        self._constants = constants
        width = (program.sizes.n_layers, program.sizes.width)
        like = next(iter(constants.values()))
        self._hidden, self._cell = like.new_zeros(width), like.new_zeros(width)

    def step(self, token: int) -> Tensor:
        """[width] the prediction once ``token`` belongs to the text."""
        recurrent = {op.layer: op.weight for op in self._ops if isinstance(op, FusedRecurrence)}
        values: dict[str, Tensor] = {}
        last = self._hidden[0]
        for op in self._ops:
            match op:
                case FusedLstm():
                    x = values[op.x] if op.x is not None else self._of_token(op, token)
                    gates = x @ self._constants[op.weight_input].T
                    gates = gates + self._weight(recurrent[op.layer]) @ self._hidden[op.layer]
                    for bias in op.biases:
                        gates = gates + self._constants[bias]
                    enter, forget, new, leave = gates.chunk(4)
                    cell = forget.sigmoid() * self._cell[op.layer] + enter.sigmoid() * new.tanh()
                    self._cell[op.layer] = cell
                    self._hidden[op.layer] = values[op.name] = last = leave.sigmoid() * cell.tanh()
                case FusedLinear():
                    assert op.x is not None, "a transducer's linear reads a value"
                    bias_ = None if op.bias is None else self._constants[op.bias]
                    values[op.name] = last = functional.linear(values[op.x], self._weight(op.weight), bias_)
                case _:
                    pass
        return last

    def joint(self, frame: Tensor, predicted: Tensor) -> Tensor:
        """[tokens + durations] logits at a frame [width]."""
        op = self._ops[-1]
        assert isinstance(op, FusedJoint), "a transducer's program"
        return functional.linear((frame + predicted).relu(), self._weight(op.weight), self._constants[op.bias])

    def _of_token(self, op: FusedLstm, token: int) -> Tensor:
        assert op.token_table is not None, "the LSTM behind the lookup has a table"
        return self._constants[op.token_table][token]

    def _weight(self, name: str) -> Tensor:
        return self._constants[name].bfloat16().float()
