"""Kernels of the first step, in which features attend over keys.

Pointer shapes: key (rows, H_kv, L, d) and value (rows, H_kv, L, D), rows = N or 1, any strides but a last one of 1;
projection (N or 1, H, M, d) in the dtype of key, with a stride of 0 for one that all sequences share; term (N, H,
ranks) float32, log2, -inf where a rank is in no block; order (N, ranks) and count (N,), int32 or None.
"""

import triton
import triton.language as tl

from hf_favorpp.attention.triton.settings import LN2, LOG2E
from hf_favorpp.attention.triton.tokens import (
    constants_of,
    dot,
    head_of,
    length_of,
    load_rows,
    load_tokens,
    positions_of,
    store_tokens,
)

SIZES = [
    "key_row_stride",
    "key_head_stride",
    "key_token_stride",
    "value_row_stride",
    "value_head_stride",
    "value_token_stride",
    "projection_stride",
    "group",
    "ranks",
    "num_features",
]
"""Numbers that all kernels over keys take; none of them is worth a compilation of its own."""


@triton.jit
def load_term(term, rank, high):
    """Load r (TOKENS,) by rank, -inf from rank ``high`` on."""
    return tl.load(term + rank, mask=rank < high, other=float("-inf"))


@triton.jit
def store_summary(z, S, rows, present, top, total, mean, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Store rows (FEATURES,) of z, nats, and S from a running softmax: -inf and 0 if it has met no key."""
    empty = top == float("-inf")
    total = tl.where(empty, 1.0, total)
    tl.store(z + rows, tl.where(empty, float("-inf"), (top + tl.log2(total)) * LN2), mask=present)
    store_tokens(S, rows, WIDTH, present, mean / total[:, None], WIDTH, PADDED, 1)


@triton.jit(do_not_specialize=[*SIZES, "piece", "pieces"])
def summarise_kernel(
    key,
    value,
    projection,
    term,
    order,
    count,
    z,
    S,
    key_row_stride,
    key_head_stride,
    key_token_stride,
    value_row_stride,
    value_head_stride,
    value_token_stride,
    projection_stride,
    group,
    ranks,
    num_features,
    piece,
    pieces,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Write z (N, H, pieces, M) and S (N, H, pieces, M, D), float32, of each piece of so many ranks.

    Pieces are blocks, or parts of a single block that ``merge_kernel`` puts together. Grid: N pieces tiles, H.
    """
    # One program owns a tile of features of one head over one piece of one sequence, and runs over its keys.
    tiles = tl.cdiv(num_features, FEATURES)
    features = tl.program_id(0) % tiles * FEATURES + tl.arange(0, FEATURES)
    index = tl.program_id(0) // tiles % pieces
    sequence = tl.program_id(0) // (tiles * pieces)
    head = tl.program_id(1)
    key = head_of(key, sequence, head // group, key_row_stride, key_head_stride, ALIGNMENT)
    value = head_of(value, sequence, head // group, value_row_stride, value_head_stride, ALIGNMENT)
    projection = constants_of(projection, sequence, head, projection_stride, num_features * HEAD_DIM)
    row = sequence.to(tl.int64) * tl.num_programs(1) + head
    term += row * ranks
    length = length_of(count, sequence, ranks)
    low = index * piece
    high = tl.minimum(low + piece, length)
    P = load_rows(projection, features, num_features, HEAD_DIM, HEAD_PADDED)
    top = tl.full((FEATURES,), float("-inf"), tl.float32)
    total = tl.zeros((FEATURES,), tl.float32)
    mean = tl.zeros((FEATURES, VALUE_PADDED), tl.float32)
    for start in range(low, high, TOKENS):
        rank = start + tl.arange(0, TOKENS)
        position = positions_of(rank, order, sequence, ranks, length)
        k = load_tokens(key, position, key_token_stride, rank < high, HEAD_DIM, HEAD_PADDED, ALIGNMENT)
        r = load_term(term, rank, high)
        logits = dot(P, tl.trans(k), PRECISION) * LOG2E + r[None, :]
        new_top = tl.maximum(top, tl.max(logits, 1))
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(logits - shift[:, None])
        decay = tl.exp2(top - shift)
        v = load_tokens(value, position, value_token_stride, rank < high, VALUE_DIM, VALUE_PADDED, ALIGNMENT)
        total = total * decay + tl.sum(p, 1)
        mean = mean * decay[:, None] + dot(p.to(v.dtype), v, PRECISION)
        top = new_top
    rows = (row * pieces + index) * num_features + features
    store_summary(z, S, rows, features < num_features, top, total, mean, VALUE_DIM, VALUE_PADDED)


@triton.jit(do_not_specialize=["num_features", "pieces"])
def merge_kernel(
    z_pieces,
    S_pieces,
    z,
    S,
    num_features,
    pieces,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Merge z_pieces (N H, pieces, M), S_pieces (N H, pieces, M, D) into z (N H, M), S (N H, M, D), all float32.

    Grid: N H tiles.
    """
    # One program owns a tile of features of one head of one sequence, and runs over the pieces in their order.
    tiles = tl.cdiv(num_features, FEATURES)
    features = tl.program_id(0) % tiles * FEATURES + tl.arange(0, FEATURES)
    head = (tl.program_id(0) // tiles).to(tl.int64)
    present = features < num_features
    top = tl.full((FEATURES,), float("-inf"), tl.float32)
    total = tl.zeros((FEATURES,), tl.float32)
    mean = tl.zeros((FEATURES, VALUE_PADDED), tl.float32)
    for index in range(0, pieces):
        rows = (head * pieces + index) * num_features + features
        logit = tl.load(z_pieces + rows, mask=present, other=float("-inf")) * LOG2E
        new_top = tl.maximum(top, logit)
        shift = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp2(logit - shift)
        decay = tl.exp2(top - shift)
        part = load_tokens(S_pieces, rows, VALUE_DIM, present, VALUE_DIM, VALUE_PADDED, 1)
        total = total * decay + weight
        mean = mean * decay[:, None] + part * weight[:, None]
        top = new_top
    store_summary(z, S, head * num_features + features, present, top, total, mean, VALUE_DIM, VALUE_PADDED)
