"""What kernels do with tiles of tokens: find, load and store them."""

import triton
import triton.language as tl

from hf_favorpp.attention.triton.settings import INTERPRET


@triton.jit
def dot(a, b, PRECISION: tl.constexpr):
    """Return the product of two tiles, with float32 accumulation; ``acc += ...`` adds to it in place."""
    if INTERPRET:  # numpy has no bfloat16: the interpreter's product of two such tiles is wrong
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
def length_of(count, sequence, ranks):
    """Return how many tokens a sequence has: of count (N,) int32, or, where count is None, all ``ranks``."""
    if count is None:
        return ranks
    else:
        return tl.load(count + sequence)


@triton.jit
def positions_of(ranks, order, sequence, max_ranks, length):
    """Return the positions, int64, of tokens by rank: order (N, max_ranks) int32, or None for position = rank.

    Ranks beyond the sequence's length give some position of which the caller masks the load.
    """
    if order is None:
        return ranks.to(tl.int64)
    else:
        pointers = order + sequence.to(tl.int64) * max_ranks + ranks
        return tl.load(pointers, mask=ranks < length, other=0).to(tl.int64)


@triton.jit
def aligned(stride, unit):
    """Return a multiple of a unit so that the compiler sees that it is one: ``tl.multiple_of`` forgets parameters."""
    return stride // unit * unit


@triton.jit
def head_of(tokens, sequence, head, row_stride, head_stride, ALIGNMENT: tl.constexpr):
    """Return the pointer to position 0 of a head in the row of a sequence: (rows, heads, L, width), any strides."""
    row = sequence.to(tl.int64) * aligned(row_stride, ALIGNMENT)
    return tokens + row + head.to(tl.int64) * aligned(head_stride, ALIGNMENT)


@triton.jit
def load_tokens(head, positions, stride, mask, WIDTH: tl.constexpr, PADDED: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Load a tile (TOKENS, PADDED) of vectors of WIDTH numbers, 0 where ``mask`` (TOKENS,) is False."""
    columns = tl.arange(0, PADDED)[None, :]
    pointers = head + positions[:, None] * aligned(stride, ALIGNMENT) + columns
    if WIDTH == PADDED:
        return tl.load(pointers, mask=mask[:, None], other=0.0)
    else:
        return tl.load(pointers, mask=mask[:, None] & (columns < WIDTH), other=0.0)


@triton.jit
def store_tokens(
    head, positions, stride, mask, tile, WIDTH: tl.constexpr, PADDED: tl.constexpr, ALIGNMENT: tl.constexpr
):
    """Store a tile (TOKENS, PADDED) in the dtype of the pointer, where ``mask`` (TOKENS,) is True."""
    columns = tl.arange(0, PADDED)[None, :]
    pointers = head + positions[:, None] * aligned(stride, ALIGNMENT) + columns
    tl.store(pointers, tile.to(head.dtype.element_ty), mask=mask[:, None] & (columns < WIDTH))


@triton.jit
def constants_of(numbers, sequence, head, stride, size):
    """Return the pointer to the numbers of a head, (N or 1, H, size) contiguous, and None for None."""
    if numbers is None:
        return  # Triton 3.2 cannot return None, but nothing
    else:
        return numbers + sequence.to(tl.int64) * aligned(stride, size) + head * size


@triton.jit
def load_rows(matrix, rows, num_rows, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Load a tile (ROWS, PADDED) of a contiguous (num_rows, WIDTH) matrix by indices of rows, 0 beyond it."""
    columns = tl.arange(0, PADDED)[None, :]
    mask = (rows < num_rows)[:, None] & (columns < WIDTH)
    return tl.load(matrix + rows[:, None] * WIDTH + columns, mask=mask, other=0.0)
