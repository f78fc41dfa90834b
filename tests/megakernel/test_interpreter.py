"""Whatever the interleaving, the packed program computes what its graph says, bit for bit."""

import random

import numpy as np
import pytest

from megakernel.numbers import from_bits

SEEDS_A_TEST = 20


def same(found, expected) -> bool:
    return np.array_equal(found, expected, equal_nan=True)


@pytest.mark.parametrize("first_seed", range(0, 200, SEEDS_A_TEST))
def test_interpreted_equals_evaluated_bit_for_bit(make_decoder, first_seed):
    for seed in range(first_seed, first_seed + SEEDS_A_TEST):
        rng = random.Random(seed)
        decoder = make_decoder(rng)
        requests = [decoder.request(rng) for _ in range(rng.choice([1, 1, 1, 1, 2, 2, 3, 3, 4, 8]))]
        expected, memory = decoder.evaluate(requests)
        records, device = decoder.interpret(requests, seed)
        assert records == expected, seed
        assert same(from_bits(device.self_cache), memory.self_cache), seed
        assert same(device.scores, memory.scores), seed
