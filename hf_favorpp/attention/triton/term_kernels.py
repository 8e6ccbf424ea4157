"""The term r(t) = g.(t - c) - s/2 |R(t - c)|^2 that all features of a token share, and its gradient.

A head's center and linear (d,) and root (d, d) are pointers to float32 numbers, or None. Tokens are read column chunk
by column chunk: a tile of whole tokens in float32, as an operand of a product, would take all registers.
"""

import triton
import triton.language as tl

from hf_favorpp.attention.triton.settings import LOG2E
from hf_favorpp.attention.triton.tokens import aligned, constants_of, head_of, length_of, load_rows, positions_of


@triton.jit
def load_columns(head, positions, stride, mask, columns, WIDTH: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Load some columns (COLUMNS,) of tokens as a tile (TOKENS, COLUMNS) of float32, 0 where there is nothing."""
    pointers = head + positions[:, None] * aligned(stride, ALIGNMENT) + columns[None, :]
    return tl.load(pointers, mask=mask[:, None] & (columns < WIDTH)[None, :], other=0.0).to(tl.float32)


@triton.jit
def load_centred(head, positions, stride, mask, center, columns, WIDTH: tl.constexpr, ALIGNMENT: tl.constexpr):
    """Load some columns of t - c, (TOKENS, COLUMNS) float32."""
    u = load_columns(head, positions, stride, mask, columns, WIDTH, ALIGNMENT)
    if center is not None:
        u -= tl.load(center + columns, mask=columns < WIDTH, other=0.0)[None, :]
    return u


@triton.jit
def token_term(
    head,
    positions,
    stride,
    mask,
    center,
    root,
    linear,
    scale,
    WIDTH: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Return r(t), (TOKENS,) float32, nats, of tokens by position, some finite number where ``mask`` is False."""
    r = tl.zeros((positions.shape[0],), tl.float32)
    for start in tl.range(0, WIDTH, CHUNK, num_stages=1):
        rows = start + tl.arange(0, CHUNK)
        if root is None or linear is not None:
            u = load_centred(head, positions, stride, mask, center, rows, WIDTH, ALIGNMENT)
            if linear is not None:
                r += tl.sum(u * tl.load(linear + rows, mask=rows < WIDTH, other=0.0)[None, :], 1)
            if root is None:
                r -= 0.5 * scale * tl.sum(u * u, 1)
        if root is not None:
            y = tl.zeros((positions.shape[0], CHUNK), tl.float32)
            for begin in range(0, WIDTH, CHUNK):
                columns = begin + tl.arange(0, CHUNK)
                u = load_centred(head, positions, stride, mask, center, columns, WIDTH, ALIGNMENT)
                there = (columns < WIDTH)[:, None] & (rows < WIDTH)[None, :]
                R = tl.load(root + rows[None, :] * WIDTH + columns[:, None], mask=there, other=0.0)  # transposed
                y += tl.dot(u, R, input_precision=PRECISION)
            r -= 0.5 * scale * tl.sum(y * y, 1)
    return r


@triton.jit
def add_token_term_gradient(
    grad,
    grad_r,
    head,
    positions,
    stride,
    mask,
    center,
    gram,
    linear,
    scale,
    WIDTH: tl.constexpr,
    PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Return ``grad`` (TOKENS, PADDED) plus grad_r (TOKENS,) (g - s R^T R (t - c)); gram: R^T R (d, d) or None."""
    factor = (-scale * grad_r)[:, None]
    if gram is None:
        grad += factor * load_centred(head, positions, stride, mask, center, tl.arange(0, PADDED), WIDTH, ALIGNMENT)
    else:
        for start in tl.range(0, WIDTH, CHUNK, num_stages=1):
            rows = start + tl.arange(0, CHUNK)
            u = load_centred(head, positions, stride, mask, center, rows, WIDTH, ALIGNMENT)
            G = load_rows(gram, rows, WIDTH, WIDTH, PADDED)
            grad += tl.dot(factor * u, G, input_precision=PRECISION)
    if linear is not None:
        columns = tl.arange(0, PADDED)
        grad += grad_r[:, None] * tl.load(linear + columns, mask=columns < WIDTH, other=0.0)[None, :]
    return grad


@triton.jit(
    do_not_specialize=[
        "row_stride",
        "head_stride",
        "token_stride",
        "center_stride",
        "root_stride",
        "linear_stride",
        "group",
        "ranks",
        "first",
        "last",
    ]
)
def term_kernel(
    tokens,
    center,
    root,
    linear,
    order,
    count,
    term,
    scale,
    row_stride,
    head_stride,
    token_stride,
    center_stride,
    root_stride,
    linear_stride,
    group,
    ranks,
    first,
    last,
    WIDTH: tl.constexpr,
    TOKENS: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Write r(t) times log2(e), (N, H, ranks) float32, -inf for the first and last ranks and beyond the last token.

    tokens (rows, H_kv, L, d), any strides but a last one of 1; center, linear (N or 1, H, d), root (N or 1, H, d, d)
    float32 or None; order (N, ranks) and count (N,) int32 or None. Grid: N tiles, H.
    """
    # One program owns a tile of tokens of one sequence and head.
    tiles = tl.cdiv(ranks, TOKENS)
    sequence = tl.program_id(0) // tiles
    head = tl.program_id(1)
    rank = tl.program_id(0) % tiles * TOKENS + tl.arange(0, TOKENS)
    length = length_of(count, sequence, ranks)
    present = (rank >= first) & (rank < length - last)
    position = positions_of(rank, order, sequence, ranks, length)
    tokens = head_of(tokens, sequence, head // group, row_stride, head_stride, ALIGNMENT)
    center = constants_of(center, sequence, head, center_stride, WIDTH)
    root = constants_of(root, sequence, head, root_stride, WIDTH * WIDTH)
    linear = constants_of(linear, sequence, head, linear_stride, WIDTH)
    r = token_term(
        tokens, position, token_stride, present, center, root, linear, scale, WIDTH, CHUNK, PRECISION, ALIGNMENT
    )
    row = (sequence.to(tl.int64) * tl.num_programs(1) + head) * ranks
    tl.store(term + row + rank, tl.where(present, r * LOG2E, float("-inf")), mask=rank < ranks)
