"""The kernel of means and central second moments, stable however far from 0 the tokens are."""

import triton
import triton.language as tl

from hf_favorpp.attention.triton.term_kernels import load_columns
from hf_favorpp.attention.triton.tokens import head_of, length_of, positions_of


@triton.jit
def centred_chunk(t, mask, size, mean):
    """Return the chunk (TOKENS, COLUMNS) less its own mean, 0 where masked, and that mean less the one before it."""
    own = tl.sum(t, 0) / size
    return tl.where(mask[:, None], t - own[None, :], 0.0), own - mean


@triton.jit(do_not_specialize=["row_stride", "head_stride", "token_stride", "ranks", "piece", "pieces"])
def moments_kernel(
    tokens,
    order,
    count,
    mean,
    square,
    product,
    row_stride,
    head_stride,
    token_stride,
    ranks,
    piece,
    pieces,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Write means and sums of squares and of products of what is left, of each piece of so many ranks.

    tokens (rows, H, L, d), any strides but a last one of 1; order (N, ranks) and count (N,) int32, or None; float32:
    mean and square (N, H, pieces, d), product (N, H, pieces, d, d) or None. Grid: N pieces tiles, H.
    """
    # One program owns a piece of one sequence and head, and ROWS rows of its products. It runs over the tokens chunk
    # by chunk and merges each chunk by the formula of Chan, Golub & LeVeque 1979.
    tiles: tl.constexpr = PADDED // ROWS if product is not None else 1
    tile = tl.program_id(0) % tiles
    index = tl.program_id(0) // tiles % pieces
    sequence = tl.program_id(0) // (tiles * pieces)
    head = tl.program_id(1)
    tokens = head_of(tokens, sequence, head, row_stride, head_stride, ALIGNMENT)
    columns = tl.arange(0, PADDED)
    rows = tile * ROWS + tl.arange(0, ROWS)
    length = length_of(count, sequence, ranks)
    low = index * piece
    high = tl.minimum(low + piece, length)
    m = tl.zeros((PADDED,), tl.float32)
    squares = tl.zeros((PADDED,), tl.float32)
    m_rows = tl.zeros((ROWS,), tl.float32)
    products = tl.zeros((ROWS, PADDED), tl.float32)
    for start in range(low, high, TOKENS):
        rank = start + tl.arange(0, TOKENS)
        position = positions_of(rank, order, sequence, ranks, length)
        size = tl.minimum(high - start, TOKENS).to(tl.float32)
        share = size / (start - low + size)
        between = (start - low) * share
        t = load_columns(tokens, position, token_stride, rank < high, columns, WIDTH, ALIGNMENT)
        u, step = centred_chunk(t, rank < high, size, m)
        m += share * step
        squares += tl.sum(u * u, 0) + between * step * step
        if product is not None:
            t = load_columns(tokens, position, token_stride, rank < high, rows, WIDTH, ALIGNMENT)
            u_rows, step_rows = centred_chunk(t, rank < high, size, m_rows)
            m_rows += share * step_rows
            products += tl.dot(tl.trans(u_rows), u, input_precision=PRECISION)
            products += (between * step_rows)[:, None] * step[None, :]

    row = ((sequence.to(tl.int64) * tl.num_programs(1) + head) * pieces + index) * WIDTH
    first = columns < tl.where(tile == 0, WIDTH, 0)  # the others have the same numbers
    tl.store(mean + row + columns, m, mask=first)
    tl.store(square + row + columns, squares, mask=first)
    if product is not None:
        pointers = product + row * WIDTH + rows[:, None] * WIDTH + columns[None, :]
        tl.store(pointers, products, mask=(rows < WIDTH)[:, None] & (columns < WIDTH)[None, :])
