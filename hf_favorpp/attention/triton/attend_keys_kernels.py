"""The kernels of the gradients of single keys in the second step: those of the own block, and the ends.

Pointers and conventions are those of ``query_backward_kernel``.
"""

import triton
import triton.language as tl

from hf_favorpp.attention.triton.attend_backward_kernels import negated
from hf_favorpp.attention.triton.attend_kernels import SIZES, end_keys, own_keys, single_keys
from hf_favorpp.attention.triton.settings import LOG2E
from hf_favorpp.attention.triton.tokens import dot, head_of, length_of, load_tokens, positions_of, store_tokens


@triton.jit(do_not_specialize=SIZES)
def single_keys_backward_kernel(
    grad_out,
    query,
    key,
    value,
    order,
    count,
    logsumexp,
    delta,
    grad_key,
    grad_value,
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
    grad_key_row_stride,
    grad_key_head_stride,
    grad_key_token_stride,
    grad_value_row_stride,
    grad_value_head_stride,
    grad_value_token_stride,
    scale,
    ranks,
    group,
    width,
    tiles,
    first,
    last,
    ENDS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Compute what ``width`` queries, those of a block, give to the gradients of the keys and values of that block.

    With ENDS: to those of the ends, as parts that are yet to be summed.

    Pointers: as in ``query_backward_kernel``; grad_key, grad_value (N or 1, heads / group, L, d or D) by strides, or,
    with ENDS, contiguous float32 (N, heads / group, ceil(ranks / width), first + last, d or D).
    """
    # One program owns KEYS keys of one head of keys of a sequence, for ``width`` queries: ``tiles`` programs for them.
    # What it computes for keys that are not there is not used.
    blocks = tl.cdiv(ranks, width)
    tile = tl.program_id(0) % tiles
    block = tl.program_id(0) // tiles % blocks
    sequence = tl.program_id(0) // (tiles * blocks)
    key_head = tl.program_id(1)
    key = head_of(key, sequence, key_head, key_row_stride, key_head_stride, ALIGNMENT)
    value = head_of(value, sequence, key_head, value_row_stride, value_head_stride, ALIGNMENT)

    length = length_of(count, sequence, ranks)
    stop = tl.minimum(block * width + width, length)
    if ENDS:
        keys, there = end_keys(tile * KEYS, first, last, length, KEYS)
    else:
        keys, there = own_keys(block * width + tile * KEYS, stop, first, last, length, KEYS)
    k, v = single_keys(
        key, value, keys, there, order, sequence, ranks, length, key_token_stride, value_token_stride,
        HEAD_DIM, VALUE_DIM, HEAD_PADDED, VALUE_PADDED, ALIGNMENT,
    )  # fmt: skip
    grad_k = tl.zeros((KEYS, HEAD_PADDED), tl.float32)
    grad_v = tl.zeros((KEYS, VALUE_PADDED), tl.float32)
    for member in range(group):
        head = key_head * group + member
        head_index = (sequence.to(tl.int64) * tl.num_programs(1) * group + head) * ranks
        q_head = head_of(query, sequence, head, query_row_stride, query_head_stride, ALIGNMENT)
        do_head = head_of(grad_out, sequence, head, grad_out_row_stride, grad_out_head_stride, ALIGNMENT)
        for low in range(block * width, stop, TOKENS):
            rank = low + tl.arange(0, TOKENS)
            present = rank < stop
            position = positions_of(rank, order, sequence, ranks, length)
            q = load_tokens(q_head, position, query_token_stride, present, HEAD_DIM, HEAD_PADDED, ALIGNMENT)
            do = load_tokens(do_head, position, grad_out_token_stride, present, VALUE_DIM, VALUE_PADDED, ALIGNMENT)
            delta_q = tl.load(delta + head_index + rank, mask=present, other=0.0)
            lse = tl.load(logsumexp + head_index + rank, mask=present, other=float("-inf"))
            p = tl.exp2(dot(k, tl.trans(q), PRECISION) * (scale * LOG2E) + negated(lse)[None, :])
            grad_v += dot(p.to(do.dtype), do, PRECISION)
            ds = p * (dot(v, tl.trans(do), PRECISION) - delta_q[None, :])
            grad_k += dot(ds.to(q.dtype), q, PRECISION)
    grad_k *= scale
    if ENDS:
        ends = tile * KEYS + tl.arange(0, KEYS)
        part = (sequence.to(tl.int64) * tl.num_programs(1) + key_head) * blocks + block
        rows = part * (first + last) + ends
        present = ends < first + last
        store_tokens(grad_key, rows, HEAD_DIM, present, grad_k, HEAD_DIM, HEAD_PADDED, 1)
        store_tokens(grad_value, rows, VALUE_DIM, present, grad_v, VALUE_DIM, VALUE_PADDED, 1)
    else:
        position = positions_of(keys, order, sequence, ranks, length)
        grad_key = head_of(grad_key, sequence, key_head, grad_key_row_stride, grad_key_head_stride, ALIGNMENT)
        grad_value = head_of(grad_value, sequence, key_head, grad_value_row_stride, grad_value_head_stride, ALIGNMENT)
        store_tokens(grad_key, position, grad_key_token_stride, there, grad_k, HEAD_DIM, HEAD_PADDED, ALIGNMENT)
        store_tokens(grad_value, position, grad_value_token_stride, there, grad_v, VALUE_DIM, VALUE_PADDED, ALIGNMENT)


@triton.jit(do_not_specialize=SIZES)
def ends_kernel(
    part_key,
    part_value,
    order,
    count,
    grad_key,
    grad_value,
    grad_key_row_stride,
    grad_key_head_stride,
    grad_key_token_stride,
    grad_value_row_stride,
    grad_value_head_stride,
    grad_value_token_stride,
    ranks,
    parts,
    first,
    last,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    KEYS: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    VALUE_PADDED: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    """Sum the parts of the gradients of the ends, in their order, and store them where the ends are.

    Pointers: part_key, part_value contiguous float32 (N, key_heads, parts, first + last, d or D); grad_key, grad_value
    (N or 1, key_heads, L, d or D) by strides.
    """
    # One program owns KEYS ends of one head of keys of a sequence.
    tiles = tl.cdiv(first + last, KEYS)
    start = tl.program_id(0) % tiles * KEYS
    sequence = tl.program_id(0) // tiles
    head = tl.program_id(1)
    grad_key = head_of(grad_key, sequence, head, grad_key_row_stride, grad_key_head_stride, ALIGNMENT)
    grad_value = head_of(grad_value, sequence, head, grad_value_row_stride, grad_value_head_stride, ALIGNMENT)

    length = length_of(count, sequence, ranks)
    keys, there = end_keys(start, first, last, length, KEYS)
    position = positions_of(keys, order, sequence, ranks, length)
    grad_k = tl.zeros((KEYS, HEAD_PADDED), tl.float32)
    grad_v = tl.zeros((KEYS, VALUE_PADDED), tl.float32)
    for part in range(parts):
        index = (sequence.to(tl.int64) * tl.num_programs(1) + head) * parts + part
        rows = index * (first + last) + start + tl.arange(0, KEYS)
        grad_k += load_tokens(part_key, rows, HEAD_DIM, there, HEAD_DIM, HEAD_PADDED, 1)
        grad_v += load_tokens(part_value, rows, VALUE_DIM, there, VALUE_DIM, VALUE_PADDED, 1)
    store_tokens(grad_key, position, grad_key_token_stride, there, grad_k, HEAD_DIM, HEAD_PADDED, ALIGNMENT)
    store_tokens(grad_value, position, grad_value_token_stride, there, grad_v, VALUE_DIM, VALUE_PADDED, ALIGNMENT)
