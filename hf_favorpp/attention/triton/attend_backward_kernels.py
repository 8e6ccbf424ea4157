"""The kernels of the gradients of the second step, each for what one program owns.

Weights are recomputed: p = exp(logit - logsumexp). With delta = grad_out.out the gradient of a logit is
ds = p (grad_out.value - delta). Pointers and conventions are those of ``attend_kernel``; a gradient has the shape of
what it is the gradient of, and float32 where it is summed.
"""

import triton
import triton.language as tl

from hf_favorpp.attention.triton.attend_kernels import (
    SIZES,
    end_keys,
    exact_logits,
    landmarks,
    own_keys,
    single_keys,
)
from hf_favorpp.attention.triton.settings import LOG2E
from hf_favorpp.attention.triton.term_kernels import add_token_term_gradient, token_term
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


@triton.jit
def negated(logsumexp):
    """Return -logsumexp, log2, but -inf for -inf: without any finite logit all weights are 0."""
    return tl.where(logsumexp == float("-inf"), logsumexp, -logsumexp * LOG2E)


@triton.jit
def logit_gradient(logits, do, values, delta, PRECISION: tl.constexpr):
    """Return ds (TOKENS, n): logits (TOKENS, n) less the logsumexp, do (TOKENS, D), values (n, D), delta (TOKENS,)."""
    return tl.exp2(logits) * (dot(do, tl.trans(values), PRECISION) - delta[:, None])


@triton.jit(do_not_specialize=SIZES)
def query_backward_kernel(
    grad_out,
    query,
    key,
    value,
    projection,
    bias,
    S,
    center,
    root,
    gram,
    linear,
    order,
    count,
    out,
    logsumexp,
    grad_query,
    delta,
    shift,
    grad_out_row_stride,
    grad_out_head_stride,
    grad_out_token_stride,
    query_row_stride,
    query_head_stride,
    query_token_stride,
    key_row_stride,
    key_head_stride,
    key_token_stride,
    value_row_stride,
    value_head_stride,
    value_token_stride,
    out_row_stride,
    out_head_stride,
    out_token_stride,
    grad_query_row_stride,
    grad_query_head_stride,
    grad_query_token_stride,
    projection_stride,
    center_stride,
    root_stride,
    gram_stride,
    linear_stride,
    scale,
    ranks,
    num_features,
    group,
    width,
    landmark_blocks,
    tiles,
    first,
    last,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    OWN_BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    KEYS: tl.constexpr,
    END_KEYS: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    CHUNK: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the gradient of query and, for the other kernels, delta and shift = r(q) - logsumexp, log2.

    Pointers: as in ``attend_kernel``; delta, shift (N, heads, ranks), float32; gram, R^T R, like root.
    """
    # One program owns TOKENS queries of one block, in a head of a sequence: ``tiles`` programs a block.
    blocks = tl.cdiv(ranks, width)
    block = tl.program_id(0) // tiles % blocks
    sequence = tl.program_id(0) // (tiles * blocks)
    head = tl.program_id(1)
    head_index = sequence.to(tl.int64) * tl.num_programs(1) + head
    grad_out = head_of(grad_out, sequence, head, grad_out_row_stride, grad_out_head_stride, ALIGNMENT)
    query = head_of(query, sequence, head, query_row_stride, query_head_stride, ALIGNMENT)
    out = head_of(out, sequence, head, out_row_stride, out_head_stride, ALIGNMENT)
    grad_query = head_of(grad_query, sequence, head, grad_query_row_stride, grad_query_head_stride, ALIGNMENT)
    projection = constants_of(projection, sequence, head, projection_stride, num_features * HEAD_DIM)
    center = constants_of(center, sequence, head, center_stride, HEAD_DIM)
    root = constants_of(root, sequence, head, root_stride, HEAD_DIM * HEAD_DIM)
    gram = constants_of(gram, sequence, head, gram_stride, HEAD_DIM * HEAD_DIM)
    linear = constants_of(linear, sequence, head, linear_stride, HEAD_DIM)

    length = length_of(count, sequence, ranks)
    stop = tl.minimum(block * width + width, length)
    start = block * width + tl.program_id(0) % tiles * TOKENS
    if start >= stop:
        return
    rank = start + tl.arange(0, TOKENS)
    present = rank < stop
    position = positions_of(rank, order, sequence, ranks, length)
    q = load_tokens(query, position, query_token_stride, present, HEAD_DIM, HEAD_PADDED, ALIGNMENT)
    do = load_tokens(grad_out, position, grad_out_token_stride, present, VALUE_DIM, VALUE_PADDED, ALIGNMENT)
    o = load_tokens(out, position, out_token_stride, present, VALUE_DIM, VALUE_PADDED, ALIGNMENT)
    delta_q = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    minus_lse = negated(tl.load(logsumexp + head_index * ranks + rank, mask=present, other=float("-inf")))
    shift_q = minus_lse
    if key is not None:
        shift_q += LOG2E * token_term(
            query, position, query_token_stride, present, center, root, linear, scale,
            HEAD_DIM, CHUNK, PRECISION, ALIGNMENT,
        )  # fmt: skip
    tl.store(delta + head_index * ranks + rank, delta_q, mask=present)
    tl.store(shift + head_index * ranks + rank, shift_q, mask=present)

    grad_q = tl.zeros((TOKENS, HEAD_PADDED), tl.float32)
    grad_r = tl.zeros((TOKENS,), tl.float32)
    landmark_block = head_index * landmark_blocks + block % landmark_blocks
    for low in range(0, num_features, FEATURES):
        features = low + tl.arange(0, FEATURES)
        P = load_rows(projection, features, num_features, HEAD_DIM, HEAD_PADDED)
        b, values = landmarks(bias, S, landmark_block, features, num_features, P.dtype, VALUE_DIM, VALUE_PADDED)
        logits = dot(q, tl.trans(P), PRECISION) * LOG2E + b[None, :] + shift_q[:, None]
        ds = logit_gradient(logits, do, values, delta_q, PRECISION)
        grad_q += dot(ds.to(P.dtype), P, PRECISION)
        if key is not None:
            grad_r += tl.sum(ds, 1)

    if key is not None:
        key = head_of(key, sequence, head // group, key_row_stride, key_head_stride, ALIGNMENT)
        value = head_of(value, sequence, head // group, value_row_stride, value_head_stride, ALIGNMENT)
        if OWN_BLOCK:
            for low in range(block * width, stop, KEYS):
                keys, there = own_keys(low, stop, first, last, length, KEYS)
                k, v = single_keys(
                    key, value, keys, there, order, sequence, ranks, length, key_token_stride, value_token_stride,
                    HEAD_DIM, VALUE_DIM, HEAD_PADDED, VALUE_PADDED, ALIGNMENT,
                )  # fmt: skip
                logits = exact_logits(q, k, there, scale, PRECISION) + minus_lse[:, None]
                ds = logit_gradient(logits, do, v, delta_q, PRECISION) * scale
                grad_q += dot(ds.to(k.dtype), k, PRECISION)
        for low in range(0, first + last, END_KEYS):
            keys, there = end_keys(low, first, last, length, END_KEYS)
            k, v = single_keys(
                key, value, keys, there, order, sequence, ranks, length, key_token_stride, value_token_stride,
                HEAD_DIM, VALUE_DIM, HEAD_PADDED, VALUE_PADDED, ALIGNMENT,
            )  # fmt: skip
            logits = exact_logits(q, k, there, scale, PRECISION) + minus_lse[:, None]
            ds = logit_gradient(logits, do, v, delta_q, PRECISION) * scale
            grad_q += dot(ds.to(k.dtype), k, PRECISION)
        grad_q = add_token_term_gradient(
            grad_q, grad_r, query, position, query_token_stride, present, center, gram, linear, scale,
            HEAD_DIM, HEAD_PADDED, CHUNK, PRECISION, ALIGNMENT,
        )  # fmt: skip
    store_tokens(grad_query, position, grad_query_token_stride, present, grad_q, HEAD_DIM, HEAD_PADDED, ALIGNMENT)


@triton.jit(do_not_specialize=SIZES)
def landmarks_backward_kernel(
    grad_out,
    query,
    projection,
    bias,
    S,
    order,
    count,
    delta,
    shift,
    grad_projection,
    grad_bias,
    grad_S,
    grad_out_row_stride,
    grad_out_head_stride,
    grad_out_token_stride,
    query_row_stride,
    query_head_stride,
    query_token_stride,
    projection_stride,
    ranks,
    num_features,
    width,
    landmark_blocks,
    run,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute the gradients of bias, S and projection, the last in parts that are yet to be summed, or not at all.

    Pointers: as in ``query_backward_kernel``; float32 grad_bias (N, heads, ceil(ranks / width), M), grad_S (..., D),
    each of ``width`` queries: a block of them, or, where all share one, a part of them; grad_projection
    (N, heads, ceil(ceil(ranks / width) / run), M, d) or None.
    """
    # One program owns FEATURES features of a head of a sequence, for ``run`` times ``width`` queries.
    feature_tiles = tl.cdiv(num_features, FEATURES)
    blocks = tl.cdiv(ranks, width)
    runs = tl.cdiv(blocks, run)
    features = tl.program_id(0) % feature_tiles * FEATURES + tl.arange(0, FEATURES)
    index = tl.program_id(0) // feature_tiles % runs
    sequence = tl.program_id(0) // (feature_tiles * runs)
    head = tl.program_id(1)
    head_index = sequence.to(tl.int64) * tl.num_programs(1) + head
    grad_out = head_of(grad_out, sequence, head, grad_out_row_stride, grad_out_head_stride, ALIGNMENT)
    query = head_of(query, sequence, head, query_row_stride, query_head_stride, ALIGNMENT)
    projection = constants_of(projection, sequence, head, projection_stride, num_features * HEAD_DIM)

    length = length_of(count, sequence, ranks)
    grad_P = tl.zeros((FEATURES, HEAD_PADDED), tl.float32)
    for block in range(index * run, tl.minimum(index * run + run, blocks)):
        landmark_block = head_index * landmark_blocks + block % landmark_blocks
        P = load_rows(projection, features, num_features, HEAD_DIM, HEAD_PADDED)
        b, values = landmarks(bias, S, landmark_block, features, num_features, P.dtype, VALUE_DIM, VALUE_PADDED)
        grad_b = tl.zeros((FEATURES,), tl.float32)
        grad_values = tl.zeros((FEATURES, VALUE_PADDED), tl.float32)
        stop = tl.minimum(block * width + width, length)
        for low in range(block * width, stop, TOKENS):
            rank = low + tl.arange(0, TOKENS)
            present = rank < stop
            position = positions_of(rank, order, sequence, ranks, length)
            q = load_tokens(query, position, query_token_stride, present, HEAD_DIM, HEAD_PADDED, ALIGNMENT)
            do = load_tokens(grad_out, position, grad_out_token_stride, present, VALUE_DIM, VALUE_PADDED, ALIGNMENT)
            delta_q = tl.load(delta + head_index * ranks + rank, mask=present, other=0.0)
            shift_q = tl.load(shift + head_index * ranks + rank, mask=present, other=float("-inf"))
            p = tl.exp2(dot(P, tl.trans(q), PRECISION) * LOG2E + b[:, None] + shift_q[None, :])
            grad_values += dot(p.to(do.dtype), do, PRECISION)
            ds = p * (dot(values, tl.trans(do), PRECISION) - delta_q[None, :])
            grad_b += tl.sum(ds, 1)
            if grad_projection is not None:
                grad_P += dot(ds.to(q.dtype), q, PRECISION)
        rows = (head_index * blocks + block) * num_features + features
        tl.store(grad_bias + rows, grad_b, mask=features < num_features)
        store_tokens(grad_S, rows, VALUE_DIM, features < num_features, grad_values, VALUE_DIM, VALUE_PADDED, 1)
    if grad_projection is not None:
        rows = (head_index * runs + index) * num_features + features
        store_tokens(grad_projection, rows, HEAD_DIM, features < num_features, grad_P, HEAD_DIM, HEAD_PADDED, 1)
