"""Keys that queries attend to one by one: those of their own block, and the ends of the sequence."""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_favorpp.attention.cpu.chunks import Chunk


class Seen(NamedTuple):
    """The single keys of the blocks of a chunk, keys of a group repeated for its heads.

    Attributes:
        key: Of the own block, (H, blocks, width, d); width 0 where there are no blocks.
        value: (H, blocks, width, D).
        hidden: Which of them are no real keys, or ends, (blocks, 1, width) bool, or None.
        end_key: (H, E, d).
        end_value: (H, E, D).
    """

    key: Tensor
    value: Tensor
    hidden: Tensor | None
    end_key: Tensor
    end_value: Tensor


class SingleKeys:
    """Those of one sequence."""

    def __init__(self, key: Tensor, value: Tensor, heads: int, block: int, ends: tuple[int, int], dtype: torch.dtype):
        """Take them from keys by rank.

        Args:
            key: (H_kv, L, d).
            value: (H_kv, L, D).
            heads: H.
            block: Ranks per block, 0 for none.
            ends: How many first and last ranks all queries see.
            dtype: To compute in.
        """
        self.key, self.value, self.heads, self.block, self.dtype = key, value, heads, block, dtype
        length = key.shape[1]
        self.begin, self.end = min(ends[0], length), max(length - ends[1], 0)
        self.ends = torch.cat((
            torch.arange(self.begin, device="cpu"),
            torch.arange(max(self.begin, self.end), length, device="cpu"),
        ))
        ends_ = [t[:, self.ends].to(dtype) for t in (key, value)]
        self.end_key, self.end_value = (self._repeat(t) for t in ends_)
        self.end_gradients = [torch.zeros_like(t) for t in ends_]

    @property
    def number(self) -> int:
        """How many keys a query sees at most."""
        return min(self.block, self.key.shape[1]) + len(self.ends)

    def of(self, chunk: Chunk) -> Seen:
        """Return those that the queries of a chunk see."""
        if self.block == 0:
            none = (self.end_key[:, None, :0], self.end_value[:, None, :0], None)
            return Seen(*none, self.end_key, self.end_value)
        key, value = (
            self._repeat(chunk.blockwise(chunk.of(t, name, self.dtype)))
            for name, t in (("single key", self.key), ("single value", self.value))
        )
        hidden = chunk.hidden(self.begin, self.end)
        return Seen(
            key,
            value,
            None if hidden is None else hidden.view(chunk.blocks, 1, chunk.width),
            self.end_key,
            self.end_value,
        )

    def add_gradients_(
        self, chunk: Chunk, total: list[Tensor], own: tuple[Tensor, Tensor], ends: tuple[Tensor, Tensor]
    ) -> None:
        """Write what came back to the keys and values of the own block, and keep what came back to the ends.

        Args:
            chunk: The chunk of queries that it came from.
            total: Gradients of keys and values, (H_kv, L, d) and (H_kv, L, D).
            own: Those of the own block, (H, blocks, width, d) and (H, blocks, width, D).
            ends: Those of the ends, (H, E, d) and (H, E, D).
        """
        if self.block:
            for t, part in zip(total, own, strict=True):
                chunk.put_(t, self._sum(part.flatten(1, 2)))
        for t, part in zip(self.end_gradients, ends, strict=True):
            t += self._sum(part)

    def put_end_gradients_(self, total: list[Tensor]) -> None:
        """Write what came back to the ends from the queries of all chunks, which nothing else came back to."""
        for t, part in zip(total, self.end_gradients, strict=True):
            t[:, self.ends] = part.to(t.dtype)

    def _repeat(self, t: Tensor) -> Tensor:
        return t if t.shape[0] == self.heads else t.repeat_interleave(self.heads // t.shape[0], dim=0)

    def _sum(self, t: Tensor) -> Tensor:
        kv_heads = self.key.shape[0]
        return t if kv_heads == self.heads else torch.unflatten(t, 0, (kv_heads, -1)).sum(1)
