"""Batches of similar length: every row once, little padding, an order that (seed, epoch) alone decide."""

import random
from itertools import pairwise

from length_grouping import LengthGroupedSampler

LENGTHS = random.Random(1).choices(range(4, 61), k=1001)


def padding(order: list[int], size: int = 8) -> float:
    """Return the share of padding among the positions of all batches."""
    batches = [[LENGTHS[row] for row in order[start : start + size]] for start in range(0, len(order), size)]
    return 1 - sum(LENGTHS) / sum(len(batch) * max(batch) for batch in batches)


def test_every_row_comes_once_and_padding_nearly_goes():
    sampler = LengthGroupedSampler(LENGTHS, batch_size=8, seed=0)
    order = list(sampler)
    assert sorted(order) == list(range(1001))
    assert len(sampler) == 1001
    assert padding(order) < 0.1 < 0.3 < padding(sorted(order))


def test_the_order_is_a_function_of_seed_and_epoch():
    sampler, other = (LengthGroupedSampler(LENGTHS, batch_size=8, seed=seed) for seed in (0, 1))
    first = list(sampler)
    assert first == list(sampler) != list(other)
    sampler.set_epoch(1)
    assert first != list(sampler)
    sampler.set_epoch(0)
    assert first == list(sampler)


def test_long_and_short_batches_are_mixed():
    order = list(LengthGroupedSampler(LENGTHS, batch_size=8, seed=0))
    longest = [max(LENGTHS[row] for row in order[start : start + 8]) for start in range(0, 1000, 8)]
    rises = sum(later > earlier for earlier, later in pairwise(longest))
    assert 0.3 < rises / len(longest) < 0.7
