"""The kernel of the second step: queries attend over features, and over single keys beside them, in one softmax.

Also here: what its gradients compute in the same way. Inside kernels logits and their logsumexp are kept times
log2(e), for exponentials to the base 2. A pointer to what is not there is None.
"""

import triton
import triton.language as tl

from hf_favorpp.attention.triton.settings import LN2, LOG2E
from hf_favorpp.attention.triton.term_kernels import token_term
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
    *(f"{t}_{s}_stride" for t in ("query", "key", "value", "out", "grad_out") for s in ("row", "head", "token")),
    *(f"grad_{t}_{s}_stride" for t in ("query", "key", "value") for s in ("row", "head", "token")),
    *("projection_stride", "center_stride", "root_stride", "gram_stride", "linear_stride"),
    *("ranks", "num_features", "group", "width", "landmark_blocks", "run", "tiles", "parts", "first", "last"),
]
"""Strides and numbers that kernels take; none of them is worth a compilation of its own."""


@triton.jit
def landmarks(bias, S, block, features, num_features, dtype, VALUE_DIM: tl.constexpr, VALUE_PADDED: tl.constexpr):
    """Load b (FEATURES,), log2, -inf beyond the last feature, and S (FEATURES, VALUE_PADDED), cast, of a block."""
    rows = block * num_features
    b = tl.load(bias + rows + features, mask=features < num_features, other=float("-inf")) * LOG2E
    values = load_rows(S + rows * VALUE_DIM, features, num_features, VALUE_DIM, VALUE_PADDED)
    return b, values.to(dtype)


@triton.jit
def own_keys(low, stop, first, last, length, KEYS: tl.constexpr):
    """Return ranks from ``low`` on, and which are keys of a block that ends at ``stop``: those that are no ends."""
    ranks = low + tl.arange(0, KEYS)
    return ranks, (ranks < stop) & (ranks >= first) & (ranks < length - last)


@triton.jit
def end_keys(low, first, last, length, END_KEYS: tl.constexpr):
    """Return the ranks of ends of number ``low`` and on, and which of them are there: each key once."""
    ends = low + tl.arange(0, END_KEYS)
    ranks = tl.where(ends < first, ends, length - last + ends - first)
    there = (ends < first + last) & (ranks < length) & ((ends < first) | (ranks >= first))
    return tl.where(there, ranks, 0), there


@triton.jit
def single_keys(
    key,
    value,
    keys,
    there,
    order,
    sequence,
    ranks,
    length,
    key_token_stride,
    value_token_stride,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Load keys (n, HEAD_PADDED) and values (n, VALUE_PADDED) by their ranks (n,), 0 where a key is not there."""
    positions = positions_of(keys, order, sequence, ranks, length)
    k = load_tokens(key, positions, key_token_stride, there, HEAD_DIM, HEAD_PADDED, ALIGNMENT)
    v = load_tokens(value, positions, value_token_stride, there, VALUE_DIM, VALUE_PADDED, ALIGNMENT)
    return k, v


@triton.jit
def exact_logits(q, k, there, scale, PRECISION: tl.constexpr):
    """Return s q.k, log2, (TOKENS, n), -inf where a key is not there."""
    return tl.where(there[None, :], dot(q, tl.trans(k), PRECISION) * (scale * LOG2E), float("-inf"))


@triton.jit
def absorb(logits, values, top, total, mean, PRECISION: tl.constexpr):
    """Return the greatest logit, log2, and sums of weights and values after n more logits (TOKENS, n) than before."""
    # Weights are relative to the greatest logit; before the first that is finite it is -inf and the sums are 0.
    new_top = tl.maximum(top, tl.max(logits, 1))
    shift = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(logits - shift[:, None])
    decay = tl.exp2(top - shift)
    total = total * decay + tl.sum(weights, 1)
    mean = mean * decay[:, None] + dot(weights.to(values.dtype), values, PRECISION)
    return new_top, total, mean


@triton.jit(do_not_specialize=SIZES)
def attend_kernel(
    query,
    key,
    value,
    projection,
    bias,
    S,
    center,
    root,
    linear,
    order,
    count,
    out,
    logsumexp,
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
    projection_stride,
    center_stride,
    root_stride,
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
    """Compute ``out`` and ``logsumexp``, nats, of :meth:`Backend.attend`.

    Pointers: query, out (N or 1, heads, L, d or D) and key, value (N or 1, heads / group, L, d or D) or None, by
    strides; projection (N or 1, heads, M, d) in the dtype of query; bias (N, heads, landmark_blocks, M), S (..., D),
    logsumexp (N, heads, ranks), center, root, linear, float32; order (N, ranks), count (N,), int32, or None.
    """
    # One program owns TOKENS queries of one block, in a head of a sequence: ``tiles`` programs a block.
    blocks = tl.cdiv(ranks, width)
    block = tl.program_id(0) // tiles % blocks
    sequence = tl.program_id(0) // (tiles * blocks)
    head = tl.program_id(1)
    head_index = sequence.to(tl.int64) * tl.num_programs(1) + head
    query = head_of(query, sequence, head, query_row_stride, query_head_stride, ALIGNMENT)
    out = head_of(out, sequence, head, out_row_stride, out_head_stride, ALIGNMENT)
    projection = constants_of(projection, sequence, head, projection_stride, num_features * HEAD_DIM)
    center = constants_of(center, sequence, head, center_stride, HEAD_DIM)
    root = constants_of(root, sequence, head, root_stride, HEAD_DIM * HEAD_DIM)
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
    if key is not None:
        r = LOG2E * token_term(
            query, position, query_token_stride, present, center, root, linear, scale,
            HEAD_DIM, CHUNK, PRECISION, ALIGNMENT,
        )  # fmt: skip
    top = tl.full((TOKENS,), float("-inf"), tl.float32)
    total = tl.zeros((TOKENS,), tl.float32)
    mean = tl.zeros((TOKENS, VALUE_PADDED), tl.float32)
    landmark_block = head_index * landmark_blocks + block % landmark_blocks
    for low in range(0, num_features, FEATURES):
        features = low + tl.arange(0, FEATURES)
        P = load_rows(projection, features, num_features, HEAD_DIM, HEAD_PADDED)
        b, values = landmarks(bias, S, landmark_block, features, num_features, P.dtype, VALUE_DIM, VALUE_PADDED)
        logits = dot(q, tl.trans(P), PRECISION) * LOG2E + b[None, :]
        if key is not None:
            logits += r[:, None]
        top, total, mean = absorb(logits, values, top, total, mean, PRECISION)

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
                logits = exact_logits(q, k, there, scale, PRECISION)
                top, total, mean = absorb(logits, v, top, total, mean, PRECISION)
        for low in range(0, first + last, END_KEYS):
            keys, there = end_keys(low, first, last, length, END_KEYS)
            k, v = single_keys(
                key, value, keys, there, order, sequence, ranks, length, key_token_stride, value_token_stride,
                HEAD_DIM, VALUE_DIM, HEAD_PADDED, VALUE_PADDED, ALIGNMENT,
            )  # fmt: skip
            logits = exact_logits(q, k, there, scale, PRECISION)
            top, total, mean = absorb(logits, v, top, total, mean, PRECISION)

    total = tl.where(top == float("-inf"), 1.0, total)  # no finite logit: 0, and a logsumexp of -inf
    mean = mean / total[:, None]
    store_tokens(out, position, out_token_stride, present, mean, VALUE_DIM, VALUE_PADDED, ALIGNMENT)
    tl.store(logsumexp + head_index * ranks + rank, (top + tl.log2(total)) * LN2, mask=present)
