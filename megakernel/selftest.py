"""Whether freshly compiled machine code computes what it should, before anybody relies on it.

Compilers have broken such kernels silently from one release to the next. So the first time that a cubin is loaded under
a driver, a few requests run on it, and plain torch says what their tokens should be worth; a file beside the cubin
remembers that they were right. Knows fused ops as torch computes them. Does not know how the kernel does.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from .errors import SelfTestError
from .launcher import Launcher
from .mailbox import SlotRecord, TokenRecord
from .ops import FusedAttention, FusedHead, FusedLinear, Norm
from .program import Program
from .request import Request, TransducerRequest
from .runtime import Runtime
from .upload import Constants

log = logging.getLogger(__name__)

# Of log-probabilities, of one and on average. The device rounds every row to bfloat16, which moves the logits of real
# models by hundredths; a wrong weight, position or mask moves most of them by whole units.
TOLERANCE = 0.5
MEAN_TOLERANCE = 0.1
_N_HEAD_TOKENS = (1, 5, 19)  # of the requests: one row, several, more than one step takes
_MAX_TOKENS = 6
_TIMEOUT_S = 5.0
_SEED = 20_26


def ensure_right(
    runtime: Runtime,
    launcher: Launcher,
    constants: Constants,
    bitmaps: NDArray[np.uint32],  # [n_rules, 2, words]
    *,
    cache: Path | None,
) -> None:
    """Test the kernel unless ``cache`` says that this was done. No slot may be open; the cross cache is zeros after it.

    Raises:
        SelfTestError: if a token is worth something else than torch says.
        FaultError, DriverError: if the kernel does not even come to an end.
    """
    mark = cache / f"{launcher.key}.driver-{launcher.device.driver}.right" if cache else None
    if mark and mark.exists():
        return
    cross_cache = launcher.buffers.cross_cache
    generator = torch.Generator(cross_cache.device).manual_seed(_SEED)
    cross_cache.normal_(generator=generator)
    requests = _requests(launcher.program)
    torch.cuda.synchronize(cross_cache.device)
    records = run_all(runtime, requests)
    for slot, request in enumerate(requests):
        tokens = [each for each in records if isinstance(each, TokenRecord) and each.slot == slot]
        cross = cross_cache[slot, :, :, :, : request.n_positions].float()
        compare(launcher.program, constants, bitmaps, request, tokens, cross)
    cross_cache.zero_()
    torch.cuda.synchronize(cross_cache.device)
    log.info("%s: tested on %s, %d requests are right", launcher.program.name, launcher.device.name, len(requests))
    if mark:
        mark.touch()


def _requests(program: Program) -> list[Request]:
    sizes = program.sizes
    rng = np.random.default_rng(_SEED)
    requests = []
    for n_head, n_positions in zip(
        _N_HEAD_TOKENS, (1, sizes.n_cross_positions // 2, sizes.n_cross_positions), strict=True
    ):
        head = rng.integers(0, sizes.end_token, min(n_head, sizes.n_positions - _MAX_TOKENS))
        requests.append(Request(tuple(head.tolist()), _MAX_TOKENS, max(n_positions, 1)))
    return requests[: sizes.max_slots]


def run_all(runtime: Runtime, requests: Sequence[Request | TransducerRequest]) -> list[SlotRecord]:
    """Run each request in the slot of its place. Raises ``SelfTestError`` where nothing comes any more."""
    for slot, request in enumerate(requests):
        runtime.open(slot, request)
    records: list[SlotRecord] = []
    runtime.burst()
    while runtime.n_open:
        came = runtime.wait(_TIMEOUT_S)
        if not came:
            raise SelfTestError(f"no record for {_TIMEOUT_S:.0f} s")
        records += came
    runtime.leave()
    return records


def compare(
    program: Program,
    constants: Constants,
    bitmaps: NDArray[np.uint32],  # [n_rules, 2, words]
    request: Request,  # head only, the best token is taken
    tokens: Sequence[TokenRecord],  # what the device wrote
    cross: Tensor,  # [layer, keys or values, head, position, head size] float32
) -> None:
    """Raise SelfTestError unless each token is nearly the best, and worth what torch says, after those before it."""
    if not tokens:
        raise SelfTestError(f"{program.name}: no token after {len(request.head)}")
    fed = [*request.head, *(each.token for each in tokens[:-1])]
    logits = step_logits(program, constants, torch.tensor(fed, device=cross.device), cross)[len(request.head) - 1 :]
    errors = []
    for row, written in zip(logits, tokens, strict=True):
        is_suppressed = _suppressed(bitmaps[request.rules, int(written.index == 0)], program, row.device)
        expected = row.masked_fill(is_suppressed, -torch.inf).log_softmax(dim=0)
        best, own = float(expected.max()), float(expected[written.token])
        errors.append(abs(written.log_probability - own))
        if not (errors[-1] <= TOLERANCE and best - own <= TOLERANCE):
            raise SelfTestError(
                f"{program.name}: token {written.index} after {len(request.head)} is {written.token} with "
                f"log-probability {written.log_probability:.3f}; by torch it has {own:.3f}, and the best {best:.3f}"
            )
    if (mean := sum(errors) / len(errors)) > MEAN_TOLERANCE:
        raise SelfTestError(
            f"{program.name}: log-probabilities after {len(request.head)} are off by {mean:.3f} on average"
        )


def _suppressed(bitmap: NDArray[np.uint32], program: Program, device: torch.device) -> Tensor:
    """[n_tokens]; a request without markers writes none."""
    bits = np.unpackbits(np.ascontiguousarray(bitmap, "<u4").view(np.uint8), bitorder="little")
    is_suppressed = bits[: program.sizes.n_tokens].astype(bool)
    is_suppressed[program.sizes.mark_begin :] = True
    return torch.from_numpy(is_suppressed).to(device)


# --- fused ops in torch ----------------------------------------------------------------------------------------------


def step_logits(program: Program, constants: Constants, tokens: Tensor, cross: Tensor) -> Tensor:
    """[n_rows, n_tokens] float32 of one slot whose rows are ``tokens`` [n_rows] from position 0 on, nothing rounded.

    ``cross`` [layer, keys or values, head, position, head size] float32 holds the positions that are attended to.
    """
    values: dict[str, Tensor] = {}
    stream = torch.empty(0)
    for op in program.ops:
        match op:
            case FusedLinear():
                if op.embed:
                    table, positions = _of(constants, op.embed.token_table, tokens), constants[op.embed.position_table]
                    stream = table + positions[: len(tokens)].to(table)
                y = _linear(constants, stream if op.x is None else values[op.x], op.weight, op.bias, op.norm)
                y = functional.gelu(y) if op.gelu else y
                if op.residual:
                    stream = stream + y
                values[op.name] = stream if op.residual else y
            case FusedAttention():
                values[op.name] = _attention(op, values[op.x], cross)
            case FusedHead():
                values[op.name] = _linear(constants, values[op.x], op.weight, None, op.norm)
    return values[program.ops[-1].name]


def _of(constants: Constants, name: str, rows: Tensor) -> Tensor:
    table = constants[name]
    return table[rows.to(table.device)].to(rows.device, torch.float32)


def _linear(constants: Constants, x: Tensor, weight: str, bias: str | None, norm: Norm | None) -> Tensor:
    if norm:
        gamma, beta = constants[norm.gamma].to(x), constants[norm.beta].to(x)
        x = functional.layer_norm(x, x.shape[-1:], gamma, beta, norm.epsilon)
    return functional.linear(x, constants[weight].to(x), None if bias is None else constants[bias].to(x))


def _attention(op: FusedAttention, x: Tensor, cross: Tensor) -> Tensor:
    heads = x.view(len(x), -1, op.n_heads, op.width // op.n_heads).permute(1, 2, 0, 3)  # [q (k, v), head, row, D]
    keys, values = cross[op.layer] if op.is_cross else heads[1:]
    mixed = functional.scaled_dot_product_attention(heads[0], keys, values, is_causal=not op.is_cross)
    return mixed.transpose(0, 1).reshape(len(x), op.width)
