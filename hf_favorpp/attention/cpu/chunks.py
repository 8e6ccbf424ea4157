"""Which tokens are worked on at a time, and where."""

import math
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

CHUNK_LOGITS = 3 * 2**18
"""Logits of all heads in a chunk: 3 MiB of float32, and two or three such matrices at a time."""

MOST_KEPT = 4 * CHUNK_LOGITS
"""Numbers that :class:`Scratch` keeps under one name at most."""

LOG2_E = math.log2(math.e)


class Chunk(NamedTuple):
    """Some consecutive ranks of a sequence, in blocks of equal width, of which the last may be short of tokens.

    Attributes:
        begin: First rank.
        end: Rank after the last.
        blocks: How many blocks.
        width: Ranks of a block.
        where: Which of all blocks of the sequence these are.
    """

    begin: int
    end: int
    blocks: int
    width: int
    where: slice

    def of(self, tokens: Tensor, name: str, dtype: torch.dtype) -> Tensor:
        """Return the tokens of the chunk: themselves, or a copy in scratch memory where they need a change.

        Args:
            tokens: (H, L, D).
            name: Of the memory.
            dtype: To compute in.

        Returns:
            (H, blocks * width, D), zeros where there is no token.
        """
        part = tokens[:, self.begin : self.end]
        size = part.shape[1]
        if part.dtype == dtype and size == self.blocks * self.width and part.stride(-1) == 1:
            return part
        copy = scratch(name, (part.shape[0], self.blocks * self.width, part.shape[2]), dtype)
        copy[:, :size].copy_(part)
        copy[:, size:] = 0
        return copy

    def blockwise(self, tokens: Tensor) -> Tensor:
        """Return tokens of the chunk by block, (H, blocks * width, D) -> (H, blocks, width, D)."""
        return torch.unflatten(tokens, 1, (self.blocks, self.width))

    def put_(self, tokens: Tensor, part: Tensor) -> None:
        """Write what belongs to the chunk, (H, blocks * width, D), into tokens, (H, L, D)."""
        tokens[:, self.begin : self.end] = part[:, : self.end - self.begin]

    def hidden(self, begin: int, end: int) -> Tensor | None:
        """Return which ranks lie outside [begin, end), (blocks * width,) bool; None if none does."""
        after = self.begin + self.blocks * self.width
        if begin <= self.begin and after <= end:
            return None
        ranks = torch.arange(self.begin, after, device="cpu")
        return (ranks < begin) | (ranks >= end)


def chunks(begin: int, end: int, length: int, logits_per_token: int, block: int) -> Iterator[Chunk]:
    """Cut the ranks [begin, end) of a sequence into chunks.

    Args:
        begin: First rank that is wanted; with blocks a chunk may hold earlier ones.
        end: Rank after the last that is wanted.
        length: Ranks of the sequence.
        logits_per_token: Of all heads.
        block: Ranks per block, 0 for one block in all; then a chunk is a part of it.

    Yields:
        The chunks, in order.
    """
    tokens = max(64, CHUNK_LOGITS // logits_per_token // 64 * 64)
    if block == 0:
        for start in range(begin, end, tokens):
            stop = min(start + tokens, end)
            yield Chunk(start, stop, 1, stop - start, slice(0, 1))
    elif begin < end:
        width = min(block, length)
        blocks = max(1, tokens // width)
        for index in range(begin // block, -(-end // block), blocks):
            start, stop = index * block, min((index + blocks) * block, length)
            count = -(-(stop - start) // width)
            yield Chunk(start, stop, count, width, slice(index, index + count))


def sequences(
    order: Tensor | None, count: Tensor | None, read: tuple[Tensor, ...], write: tuple[Tensor, ...] = ()
) -> Iterator[tuple[int, list[Tensor], list[Tensor]]]:
    """Go through the sequences, each as tokens by rank.

    Args:
        order: Positions by rank, (N, L), ascending, or None; see :mod:`hf_favorpp.attention.operators`.
        count: Tokens of each sequence, (N,), or None.
        read: Tensors (N or 1, H, L, D).
        write: Tensors of the same shapes, 0, into which the tokens are written.

    Yields:
        Index of the sequence, and its part of each tensor, (H, ranks, D): where possible a view.
    """
    if order is None or count is None:
        for n in range(read[0].shape[0]):
            yield n, [t[n] for t in read], [t[n] for t in write]
        return
    for n, length in enumerate(count.tolist()):
        if length == 0:
            continue
        positions = order[n, :length].long()
        start, stop = int(positions[0]), int(positions[-1]) + 1
        rows_read, rows_write = ([of(t, n) for t in tensors] for tensors in (read, write))
        if stop - start == length:
            yield n, [t[:, start:stop] for t in rows_read], [t[:, start:stop] for t in rows_write]
        else:
            parts = [t.new_zeros(t.shape[0], length, t.shape[2]) for t in rows_write]
            yield n, [t.index_select(1, positions) for t in rows_read], parts
            for t, part in zip(rows_write, parts, strict=True):
                t.index_copy_(1, positions, part)


def of(t: Tensor, n: int) -> Tensor:
    """Return what belongs to sequence n, of a tensor with one entry for each or one for all."""
    return t[n if t.shape[0] > 1 else 0]


class Scratch(threading.local):
    """Memory for what a chunk needs, of each thread, kept for the next chunk and for the next call.

    To get fresh memory from the system for every chunk costs more than to fill it. What is kept are a few matrices of
    ``CHUNK_LOGITS`` numbers, or somewhat larger ones; ``MOST_KEPT`` bounds them.
    """

    def __init__(self) -> None:
        """Begin with nothing, in every thread."""
        self.pieces: dict[tuple[str, torch.dtype], Tensor] = {}

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return memory of a name, with any content.

        Args:
            name: The same name gets the same memory.
            shape: Of the tensor.
            dtype: Of the tensor.

        Returns:
            A contiguous tensor.
        """
        size = math.prod(shape)
        if size > MOST_KEPT:
            return torch.empty(shape, dtype=dtype, device="cpu")
        piece = self.pieces.get((name, dtype))
        if piece is None or piece.numel() < size:
            with torch.inference_mode(False):  # or it could not be written to outside of inference mode ever after
                piece = self.pieces[name, dtype] = torch.empty(size, dtype=dtype, device="cpu")
        return piece[:size].view(shape)


scratch = Scratch()


def scratch_like(tokens: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    """Return memory for tokens, (H, L, D), in the order that they have: to go through both is then to read on.

    Args:
        tokens: (H, L, D), heads or tokens outermost in memory.
        name: Of the memory.
        dtype: Of the result.

    Returns:
        (H, L, D), any content.
    """
    heads, length, dim = tokens.shape
    if tokens.stride(0) < tokens.stride(1):
        return scratch(name, (length, heads, dim), dtype).transpose(0, 1)
    return scratch(name, (heads, length, dim), dtype)


def inner(a: Tensor, b: Tensor) -> Tensor:
    """Return the sum of a * b over the last dimension, without a tensor of their size.

    Args:
        a: (N, H, blocks, M, D).
        b: The same shape.

    Returns:
        (N, H, blocks, M).
    """
    out = a.new_empty(a.shape[:-1])
    rows, heads, blocks, num_features, dim = a.shape
    step = max(1, CHUNK_LOGITS // (heads * num_features * dim))
    for n in range(rows):
        for begin in range(0, blocks, step):
            part = (n, slice(None), slice(begin, begin + step))
            products = scratch("products", a[part].shape, a.dtype)
            torch.sum(torch.mul(a[part], b[part], out=products), -1, out=out[part])
    return out


def add_product_(out: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """Make ``out`` beta * out + alpha * a @ b, at no more cost than the product.

    Args:
        out: (..., n, m), contiguous: elsewhere the products of a batch are computed one by one.
        a: (..., n, k), the same leading dimensions.
        b: (..., k, m), the same leading dimensions.
        beta: 0 for an ``out`` with any content.
        alpha: Of the product.

    Returns:
        ``out``.
    """
    out.view(math.prod(out.shape[:-2]), *out.shape[-2:]).baddbmm_(
        a.flatten(0, -3), b.flatten(0, -3), beta=beta, alpha=alpha
    )
    return out


def product(a: Tensor, b: Tensor, name: str, alpha: float = 1) -> Tensor:
    """Return alpha * a @ b in scratch memory; ``torch.matmul`` would take fresh memory, whatever its ``out``.

    Args:
        a: (..., n, k).
        b: (..., k, m), the same leading dimensions.
        name: Of the memory.
        alpha: Of the product.

    Returns:
        (..., n, m).
    """
    return add_product_(scratch(name, (*a.shape[:-1], b.shape[-1]), a.dtype), a, b, beta=0, alpha=alpha)
