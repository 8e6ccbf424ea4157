"""Kernels of the gradients of the first step; pointer shapes as for the step itself.

With p_mj = exp(logit_mj - z_m) and delta_m = grad_S_m . S_m - grad_z_m, the gradient of a logit is
p_mj (grad_S_m . v_j - delta_m).
"""

import triton
import triton.language as tl

from hf_favorpp.attention.triton.settings import LOG2E
from hf_favorpp.attention.triton.summarise_kernels import SIZES, load_term
from hf_favorpp.attention.triton.term_kernels import add_token_term_gradient
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


@triton.jit(do_not_specialize=["num_rows"])
def prepare_kernel(
    grad_z,
    grad_S,
    z,
    S,
    amplitude,
    delta,
    direction,
    num_rows,
    VALUE_DIM: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Write what all keys of a block need of grad_z, z (rows,), grad_S, S (rows, D), float32, rows = N H blocks M.

    grad_S = amplitude (rows,) * direction (rows, D), the latter in the dtype of its pointer and at most 1:
    a gradient summed over all queries may be too large for float16. delta (rows,) as above. All are 0 where z is
    -inf. Grid: tiles of rows.
    """
    # One program owns a tile of rows.
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    present = rows < num_rows
    present &= tl.load(z + rows, mask=present, other=0.0) > float("-inf")
    grad = load_tokens(grad_S, rows, VALUE_DIM, present, VALUE_DIM, VALUE_PADDED, 1)
    mean = load_tokens(S, rows, VALUE_DIM, present, VALUE_DIM, VALUE_PADDED, 1)
    largest = tl.max(tl.abs(grad), 1)
    scaled = grad / tl.where(largest > 0.0, largest, 1.0)[:, None]
    store_tokens(direction, rows, VALUE_DIM, rows < num_rows, scaled, VALUE_DIM, VALUE_PADDED, 1)
    tl.store(amplitude + rows, largest, mask=rows < num_rows)
    dz = tl.load(grad_z + rows, mask=present, other=0.0)
    tl.store(delta + rows, tl.sum(grad * mean, 1) - dz, mask=rows < num_rows)


@triton.jit
def load_statistics(z, amplitude, delta, rows, present):
    """Load z, log2, amplitude and delta of features (FEATURES,); z = inf gives absent ones the weight 0."""
    shift = tl.load(z + rows, mask=present, other=float("-inf")) * LOG2E
    shift = tl.where(shift == float("-inf"), float("inf"), shift)
    return shift, tl.load(amplitude + rows, mask=present, other=0.0), tl.load(delta + rows, mask=present, other=0.0)


@triton.jit(
    do_not_specialize=[
        *SIZES,
        "center_stride",
        "gram_stride",
        "linear_stride",
        "grad_key_row_stride",
        "grad_value_row_stride",
        "block",
        "blocks",
    ]
)
def key_gradient_kernel(
    key,
    value,
    projection,
    term,
    order,
    count,
    center,
    gram,
    linear,
    z,
    amplitude,
    delta,
    direction,
    grad_key,
    grad_value,
    scale,
    key_row_stride,
    key_head_stride,
    key_token_stride,
    value_row_stride,
    value_head_stride,
    value_token_stride,
    projection_stride,
    center_stride,
    gram_stride,
    linear_stride,
    grad_key_row_stride,
    grad_value_row_stride,
    group,
    ranks,
    num_features,
    block,
    blocks,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Write the gradients of key and value, (rows, L, H_kv, d) and (rows, L, H_kv, D), contiguous.

    z, amplitude, delta (N, H, blocks, M) and direction (N, H, blocks, M, D) as ``prepare_kernel`` leaves them; center,
    linear (N or 1, H, d) and gram, R^T R (N or 1, H, d, d), float32 or None. Grid: N blocks tiles, H_kv.
    """
    # One program owns a tile of keys of one block, sequence and kv head; it runs over its query heads and features.
    tiles = tl.cdiv(block, TOKENS)
    index = tl.program_id(0) // tiles % blocks
    sequence = tl.program_id(0) // (tiles * blocks)
    kv_head = tl.program_id(1)
    kv_heads = tl.num_programs(1)
    length = length_of(count, sequence, ranks)
    within = tl.program_id(0) % tiles * TOKENS + tl.arange(0, TOKENS)
    rank = index * block + within
    present = (within < block) & (rank < length)
    position = positions_of(rank, order, sequence, ranks, length)
    key = head_of(key, sequence, kv_head, key_row_stride, key_head_stride, ALIGNMENT)
    value = head_of(value, sequence, kv_head, value_row_stride, value_head_stride, ALIGNMENT)
    k = load_tokens(key, position, key_token_stride, present, HEAD_DIM, HEAD_PADDED, ALIGNMENT)
    v = load_tokens(value, position, value_token_stride, present, VALUE_DIM, VALUE_PADDED, ALIGNMENT)
    dk = tl.zeros((TOKENS, HEAD_PADDED), tl.float32)
    dv = tl.zeros((TOKENS, VALUE_PADDED), tl.float32)
    for head in range(kv_head * group, (kv_head + 1) * group):
        P_head = constants_of(projection, sequence, head, projection_stride, num_features * HEAD_DIM)
        row = sequence.to(tl.int64) * kv_heads * group + head
        r = tl.load(term + row * ranks + rank, mask=present, other=float("-inf"))
        row = (row * blocks + index) * num_features
        dr = tl.zeros((TOKENS,), tl.float32)
        for start in range(0, num_features, FEATURES):
            features = start + tl.arange(0, FEATURES)
            shift, largest, d = load_statistics(z, amplitude, delta, row + features, features < num_features)
            P = load_rows(P_head, features, num_features, HEAD_DIM, HEAD_PADDED)
            dS = load_rows(direction + row * VALUE_DIM, features, num_features, VALUE_DIM, VALUE_PADDED)
            p = tl.exp2(dot(k, tl.trans(P), PRECISION) * LOG2E + (r[:, None] - shift[None, :]))
            dv += dot((p * largest[None, :]).to(dS.dtype), dS, PRECISION)
            dlogits = p * (dot(v, tl.trans(dS), PRECISION) * largest[None, :] - d[None, :])
            dr += tl.sum(dlogits, 1)
            dk += dot(dlogits.to(P.dtype), P, PRECISION)
        tl.debug_barrier()  # positions are loaded again, and take no registers all through the loop
        again = positions_of(rank, order, sequence, ranks, length)
        c = constants_of(center, sequence, head, center_stride, HEAD_DIM)
        G = constants_of(gram, sequence, head, gram_stride, HEAD_DIM * HEAD_DIM)
        g = constants_of(linear, sequence, head, linear_stride, HEAD_DIM)
        dk = add_token_term_gradient(
            dk,
            dr,
            key,
            again,
            key_token_stride,
            present,
            c,
            G,
            g,
            scale,
            HEAD_DIM,
            HEAD_PADDED,
            CHUNK,
            PRECISION,
            ALIGNMENT,
        )
    position = positions_of(rank, order, sequence, ranks, length)
    grad_key = head_of(grad_key, sequence, kv_head, grad_key_row_stride, HEAD_DIM, 1)
    grad_value = head_of(grad_value, sequence, kv_head, grad_value_row_stride, VALUE_DIM, 1)
    store_tokens(grad_key, position, kv_heads * HEAD_DIM, present, dk, HEAD_DIM, HEAD_PADDED, 1)
    store_tokens(grad_value, position, kv_heads * VALUE_DIM, present, dv, VALUE_DIM, VALUE_PADDED, 1)


@triton.jit(do_not_specialize=[*SIZES, "piece", "pieces", "blocks", "steps"])
def projection_gradient_kernel(
    key,
    value,
    projection,
    term,
    order,
    count,
    z,
    amplitude,
    delta,
    direction,
    grad_projection,
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
    blocks,
    steps,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    PRECISION: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Write partial gradients of the projection, (N, splits, H, M, d) float32, over ``steps`` pieces each.

    A piece is a block, or a part of the only one. The rest as for ``key_gradient_kernel``. Grid: N splits tiles, H.
    """
    # One program owns a tile of features of one head over some pieces of one sequence, and runs over their keys.
    tiles = tl.cdiv(num_features, FEATURES)
    splits = tl.cdiv(pieces, steps)
    features = tl.program_id(0) % tiles * FEATURES + tl.arange(0, FEATURES)
    present = features < num_features
    split = tl.program_id(0) // tiles % splits
    sequence = tl.program_id(0) // (tiles * splits)
    head = tl.program_id(1)
    heads = tl.num_programs(1)
    key = head_of(key, sequence, head // group, key_row_stride, key_head_stride, ALIGNMENT)
    value = head_of(value, sequence, head // group, value_row_stride, value_head_stride, ALIGNMENT)
    projection = constants_of(projection, sequence, head, projection_stride, num_features * HEAD_DIM)
    row = sequence.to(tl.int64) * heads + head
    term += row * ranks
    length = length_of(count, sequence, ranks)
    P = load_rows(projection, features, num_features, HEAD_DIM, HEAD_PADDED)
    dP = tl.zeros((FEATURES, HEAD_PADDED), tl.float32)
    for index in range(split * steps, tl.minimum((split + 1) * steps, pieces)):
        rows = (row * blocks + tl.minimum(index, blocks - 1)) * num_features + features
        shift, largest, d = load_statistics(z, amplitude, delta, rows, present)
        dS = load_tokens(direction, rows, VALUE_DIM, present, VALUE_DIM, VALUE_PADDED, 1)
        low = index * piece
        high = tl.minimum(low + piece, length)
        for start in range(low, high, TOKENS):
            rank = start + tl.arange(0, TOKENS)
            position = positions_of(rank, order, sequence, ranks, length)
            k = load_tokens(key, position, key_token_stride, rank < high, HEAD_DIM, HEAD_PADDED, ALIGNMENT)
            v = load_tokens(value, position, value_token_stride, rank < high, VALUE_DIM, VALUE_PADDED, ALIGNMENT)
            r = load_term(term, rank, high)
            p = tl.exp2(dot(P, tl.trans(k), PRECISION) * LOG2E + (r[None, :] - shift[:, None]))
            dlogits = p * (dot(dS, tl.trans(v), PRECISION) * largest[:, None] - d[:, None])
            dP += dot(dlogits.to(k.dtype), k, PRECISION)
    rows = ((sequence.to(tl.int64) * splits + split) * heads + head) * num_features + features
    store_tokens(grad_projection, rows, HEAD_DIM, present, dP, HEAD_DIM, HEAD_PADDED, 1)
