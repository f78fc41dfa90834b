"""Sizes, requests and rules small enough to check by hand."""

from dataclasses import replace

import numpy as np

from megakernel.graph import Sizes
from megakernel.request import Request

# One layer of two heads; more than one block of positions in both kinds of attention.
ONE_LAYER = Sizes(
    width=128,
    head_size=64,
    n_layers=1,
    n_positions=80,
    n_cross_positions=300,
    n_tokens=100,
    end_token=79,
    mark_begin=80,
)

# For picking tokens: text 0..29, the end 30, markers 31..44.
FEW_TOKENS = Sizes(
    width=64,
    head_size=64,
    n_layers=1,
    n_positions=60,
    n_cross_positions=10,
    n_tokens=45,
    end_token=30,
    mark_begin=31,
    max_slots=4,
)
PLAIN = Request(head=(1, 2), max_tokens=12, n_positions=10)
MARKED = replace(PLAIN, markers=True, max_first_mark=5)
BITMAPS = np.zeros((1, 2, 2), np.uint32)
BITMAPS[0, :, 0] = 0b1000  # token 3 anywhere
BITMAPS[0, 1, 0] |= 1 << 30 | 1 << 7  # first neither the end nor token 7
