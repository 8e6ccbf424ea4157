"""The second step and its gradient: the queries attend over the features, and over single keys beside them."""

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from hf_favorpp.attention.cpu.chunks import LOG2_E, Chunk, add_product_, chunks, of, product, scratch, sequences
from hf_favorpp.attention.cpu.shared_term import SharedTerm
from hf_favorpp.attention.cpu.single_keys import Seen, SingleKeys
from hf_favorpp.attention.cpu.weights import Weights, gradient_of_logits_
from hf_favorpp.attention.layout import new_tokens


def attend(
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    projection: Tensor,
    bias: Tensor,
    S: Tensor,
    center: Tensor | None,
    root: Tensor | None,
    linear: Tensor | None,
    scale: float,
    order: Tensor | None,
    count: Tensor | None,
    block: int,
    first: int,
    last: int,
) -> tuple[Tensor, Tensor]:
    """Let each query attend over the features and over single keys beside them; see ``Backend.attend``."""
    out = new_tokens(query, S.shape[-1], zero=order is not None)
    for n, (q, *kv), (o,) in sequences(order, count, _present(query, key, value), (out,)):
        P, shared = of(projection, n), SharedTerm.of_sequence(n, center, root, linear, scale)
        single = _single_keys(kv, P, block, (first, last))
        if single is None and bool(torch.isneginf(bias[n].amax())):
            o.zero_()  # there is no key at all
            continue
        weights, bits = Weights(), bias[n] * LOG2_E
        for chunk in _query_chunks(q, P, single, block):
            seen = None if single is None else single.of(chunk)
            q_ = chunk.of(q, "q", P.dtype)
            r = None if seen is None else shared.value(*shared.move(q_))
            parts, total = weights.of(partial(_logits, q_, P, bits[:, chunk.where], r, seen, scale, chunk))
            o_ = product(parts[0], S[n, :, chunk.where], "tokens")
            if seen is not None:
                add_product_(o_, parts[1], seen.value)
                add_product_(o_.flatten(1, 2), parts[2].flatten(1, 2), seen.end_value)
            real = slice(0, chunk.end - chunk.begin)
            o_, total = o_.flatten(1, 2)[:, real], total.flatten(1, 2)[:, real]
            torch.div(o_, total, out=o[:, chunk.begin : chunk.end])
    return out, projection.new_empty(0)


def attend_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor | None,
    value: Tensor | None,
    projection: Tensor,
    bias: Tensor,
    S: Tensor,
    center: Tensor | None,
    root: Tensor | None,
    linear: Tensor | None,
    scale: float,
    order: Tensor | None,
    count: Tensor | None,
    block: int,
    first: int,
    last: int,
    out: Tensor,
    logsumexp: Tensor,
    need_projection: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value, projection, bias and S; see ``Backend.attend_backward``."""
    del out, logsumexp  # the weights are computed anew
    tokens = _present(query, key, value)
    # Without blocks only the ends among the keys are written. The key may be the same tensor as the query.
    zero = (order is not None, *(order is not None or block == 0 for _ in tokens[1:]))
    grads = tuple(new_tokens(t, zero=zero_) for t, zero_ in zip(tokens, zero, strict=True))
    grad_projection = torch.zeros_like(projection) if need_projection else projection.new_empty(0)
    # With blocks every one is written once.
    start = torch.zeros_like if block == 0 or order is not None else torch.empty_like
    grad_bias, grad_S = start(bias), start(S)
    for n, (do, q, *kv), (grad_q, *grad_kv) in sequences(order, count, (grad_out, *tokens), grads):
        P, shared = of(projection, n), SharedTerm.of_sequence(n, center, root, linear, scale)
        single = _single_keys(kv, P, block, (first, last))
        if single is None and bool(torch.isneginf(bias[n].amax())):
            grad_q.zero_()
            continue
        weights, bits = Weights(), bias[n] * LOG2_E
        for chunk in _query_chunks(q, P, single, block):
            seen = None if single is None else single.of(chunk)
            q_, do_ = chunk.of(q, "q", P.dtype), chunk.blockwise(chunk.of(do, "do", P.dtype))
            moved = None if seen is None else shared.move(q_)
            r = None if moved is None else shared.value(*moved)
            parts, total = weights.of(partial(_logits, q_, P, bits[:, chunk.where], r, seen, scale, chunk))
            do_ = torch.div(do_, total, out=scratch("scaled grad", do_.shape, P.dtype))
            to_parts = [product(do_, S[n, :, chunk.where].mT, "grad")]
            if seen is not None:
                of_ends = product(do_.flatten(1, 2), seen.end_value.mT, "grad of ends")
                to_parts += [product(do_, seen.value.mT, "grad of block"), chunk.blockwise(of_ends)]
            gradient_of_logits_(parts, total, to_parts)
            if block:
                grad_S[n, :, chunk.where] = product(parts[0].mT, do_, "to S")
                grad_bias[n, :, chunk.where] = to_parts[0].sum(-2)
            else:
                add_product_(grad_S[n], parts[0].mT, do_)
                grad_bias[n] += to_parts[0].sum(-2)
            to_features = to_parts[0].flatten(1, 2)
            grad_q_ = product(to_features, P, "grad of tokens")
            if need_projection:
                add_product_(of(grad_projection, n), to_features.mT, q_)
            if single is not None and seen is not None and moved is not None:
                grad_q_ += shared.gradient(*moved, to_features.sum(-1))
                to_block, to_ends = to_parts[1], to_parts[2].flatten(1, 2)
                add_product_(chunk.blockwise(grad_q_), to_block, seen.key, alpha=scale)
                add_product_(grad_q_, to_ends, seen.end_key, alpha=scale)
                scaled = torch.mul(q_, scale, out=scratch("scaled", q_.shape, P.dtype))
                own = (
                    product(to_block.mT, chunk.blockwise(scaled), "to own keys"),
                    product(parts[1].mT, do_, "to own values"),
                )
                ends = (
                    product(to_ends.mT, scaled, "to end keys"),
                    product(parts[2].flatten(1, 2).mT, do_.flatten(1, 2), "to end values"),
                )
                single.add_gradients_(chunk, grad_kv, own, ends)
            chunk.put_(grad_q, grad_q_)
        if single is not None:
            single.put_end_gradients_(grad_kv)
    grad_query, grad_key, grad_value = (*grads, *(projection.new_empty(0) for _ in range(3 - len(grads))))
    return grad_query, grad_key, grad_value, grad_projection, grad_bias, grad_S


def _logits(
    q: Tensor,
    P: Tensor,
    bits: Tensor,
    r: Tensor | None,
    seen: Seen | None,
    scale: float,
    chunk: Chunk,
    top: Tensor | None,
) -> list[Tensor]:
    """Return the logits of a chunk of queries in bits, minus ``top``: of the features, of the own block, of the ends.

    Args:
        q: (H, blocks * width, d).
        P: (H, M, d).
        bits: Bias, (H, blocks, M), in bits.
        r: (H, blocks * width), nats, or None where only features are seen.
        seen: Single keys, or None.
        scale: s.
        chunk: Whose queries they are.
        top: (H, 1, 1, 1), bits, or None.

    Returns:
        (H, blocks, width, M), and with single keys (H, blocks, width, width) and (H, blocks, width, E).
    """
    logits = scratch("logits", (q.shape[0], chunk.blocks, chunk.width, P.shape[1]), P.dtype)
    bits = bits.unsqueeze(-2) if top is None else bits.unsqueeze(-2) - top
    if r is None:
        logits.copy_(bits)
    else:
        torch.add(bits, chunk.blockwise(r.unsqueeze(-1)), alpha=LOG2_E, out=logits)
    add_product_(logits.flatten(1, 2), q, P.mT, alpha=LOG2_E)
    if seen is None:
        return [logits]
    of_block = product(chunk.blockwise(q), seen.key.mT, "of block", scale * LOG2_E)
    of_ends = chunk.blockwise(product(q, seen.end_key.mT, "of ends", scale * LOG2_E))
    if top is not None:
        of_block -= top
        of_ends -= top
    if seen.hidden is not None:
        of_block.masked_fill_(seen.hidden, float("-inf"))
    return [logits, of_block, of_ends]


def _query_chunks(q: Tensor, P: Tensor, single: SingleKeys | None, block: int) -> Iterator[Chunk]:
    heads, num_features, _ = P.shape
    logits = num_features if single is None else num_features + single.number
    return chunks(0, q.shape[1], q.shape[1], heads * logits, block)


def _single_keys(kv: list[Tensor], P: Tensor, block: int, ends: tuple[int, int]) -> SingleKeys | None:
    return SingleKeys(kv[0], kv[1], P.shape[0], block, ends, P.dtype) if kv else None


def _present(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(t for t in tensors if t is not None)
