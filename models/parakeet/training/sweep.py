"""The loss's two sweeps over anti-diagonals as GPU kernels: one launch each, where torch takes thousands.

Knows the layouts of `loss.py`, whose torch version says what is computed; one program sweeps one row of the batch, and
what a diagonal wrote is read by the next behind a barrier. Needs Triton, which torch brings for CUDA.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LEAST_BLOCK = 256  # states; more is compiled anew


@triton.jit(do_not_specialize=["n_diagonals", "n_rows", "n_states"])  # one compilation for all shapes
def _to_end_kernel(
    skewed,  # [n_diagonals, n_arcs, n_rows, n_states]
    to_end,  # [n_diagonals + ..., n_rows, n_states + 1], impossible but for each row's end
    end_diagonals,  # [n_rows]
    n_diagonals,
    n_rows,
    n_states,
    n_arcs: tl.constexpr,
    n_blanks: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0)
    u = tl.arange(0, block)
    inside = u < n_states
    end = tl.load(end_diagonals + row)
    for step in range(n_diagonals):
        diagonal = n_diagonals - 1 - step
        largest = tl.full((block,), -3e38, tl.float32)
        total = tl.zeros((block,), tl.float32)
        for arc in tl.static_range(n_arcs):
            ahead = arc + 1 if arc < n_blanks else arc - n_blanks + 1  # diagonals: a label also goes up by one
            up = 0 if arc < n_blanks else 1
            weight = tl.load(
                skewed + ((diagonal * n_arcs + arc) * n_rows + row) * n_states + u, mask=inside, other=-1e30
            )
            target = ((diagonal + ahead) * n_rows + row) * (n_states + 1) + u + up
            path = weight + tl.load(to_end + target, mask=inside, other=-1e30)
            grown = tl.maximum(largest, path)
            total = total * tl.exp(largest - grown) + tl.exp(path - grown)
            largest = grown
        own = to_end + (diagonal * n_rows + row) * (n_states + 1) + u
        value = largest + tl.log(total)
        if diagonal == end:
            value = tl.maximum(value, tl.load(own, mask=inside, other=-1e30))
        tl.store(own, value, mask=inside)
        tl.debug_barrier()


@triton.jit(do_not_specialize=["n_diagonals", "n_rows", "n_states"])  # one compilation for all shapes
def _posterior_kernel(
    skewed,  # [n_diagonals, n_arcs, n_rows, n_states]
    to_end,  # [n_diagonals + ..., n_rows, n_states + 1]
    flow,  # like skewed: what is written
    n_diagonals,
    n_rows,
    n_states,
    n_arcs: tl.constexpr,
    n_blanks: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0)
    u = tl.arange(0, block)
    inside = u < n_states
    for diagonal in range(n_diagonals):
        visits = tl.where((u == 0) & (diagonal == 0), 1.0, 0.0)
        for arc in tl.static_range(n_arcs):
            back = arc + 1 if arc < n_blanks else arc - n_blanks + 1
            up = 0 if arc < n_blanks else 1
            source = ((diagonal - back) * n_arcs + arc) * n_rows + row
            there = inside & (u >= up) & (diagonal >= back)
            visits += tl.load(flow + source * n_states + u - up, mask=there, other=0.0)
        own = tl.load(to_end + (diagonal * n_rows + row) * (n_states + 1) + u, mask=inside, other=0.0)
        for arc in tl.static_range(n_arcs):
            ahead = arc + 1 if arc < n_blanks else arc - n_blanks + 1
            up = 0 if arc < n_blanks else 1
            place = ((diagonal * n_arcs + arc) * n_rows + row) * n_states + u
            target = ((diagonal + ahead) * n_rows + row) * (n_states + 1) + u + up
            weight = tl.load(skewed + place, mask=inside, other=-1e30)
            path = weight + tl.load(to_end + target, mask=inside, other=-1e30)
            tl.store(flow + place, visits * tl.exp(path - own), mask=inside)
        tl.debug_barrier()


def to_end_on_device(skewed: Tensor, to_end: Tensor, end_diagonals: Tensor) -> None:
    """Fills ``to_end``, which holds the rows' ends already; float32."""
    n_diagonals, n_arcs, n_rows, n_states = skewed.shape
    sizes = {"n_arcs": n_arcs, "n_blanks": n_arcs // 2, "block": max(LEAST_BLOCK, triton.next_power_of_2(n_states))}
    _to_end_kernel[(n_rows,)](skewed, to_end, end_diagonals, n_diagonals, n_rows, n_states, **sizes)


def posterior_on_device(skewed: Tensor, to_end: Tensor) -> Tensor:
    """Probability of each arc, like ``skewed``; float32."""
    n_diagonals, n_arcs, n_rows, n_states = skewed.shape
    flow = torch.empty_like(skewed)
    sizes = {"n_arcs": n_arcs, "n_blanks": n_arcs // 2, "block": max(LEAST_BLOCK, triton.next_power_of_2(n_states))}
    _posterior_kernel[(n_rows,)](skewed, to_end, flow, n_diagonals, n_rows, n_states, **sizes)
    return flow
