"""Batches of rows of similar length: on short sentences half of a random batch is padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import Sampler


class LengthGroupedSampler(Sampler[int]):
    """A random order in which neighbours have similar lengths; a function of (seed, epoch) alone.

    The rows are shuffled, cut into pools, sorted by length within a pool and cut into batches, and the batches are
    shuffled: what a batch holds is random, as far as length allows.
    """

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int, batches_per_pool: int = 32) -> None:
        """Take what the order depends on.

        Args:
            lengths: Tokens of each row.
            batch_size: Rows of a batch.
            seed: Of the order.
            batches_per_pool: Batches that are sorted together.
        """
        self.lengths = torch.tensor(lengths)
        self.batch_size, self.seed, self.pool_size = batch_size, seed, batch_size * batches_per_pool
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of an epoch; Accelerate's data loaders call this."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.lengths)

    def __iter__(self) -> Iterator[int]:
        """Yield every row once."""
        generator = torch.Generator().manual_seed((self.seed << 20) + self.epoch)
        order = torch.randperm(len(self), generator=generator)
        pools = [pool[self.lengths[pool].argsort(stable=True)] for pool in order.split(self.pool_size)]
        batches = list(torch.cat(pools).split(self.batch_size))
        short = [batches.pop()] if len(batches[-1]) < self.batch_size else []  # the incomplete batch stays the last
        shuffled = [batches[place] for place in torch.randperm(len(batches), generator=generator).tolist()]
        return iter(torch.cat([*shuffled, *short]).tolist())
