"""The second step and its gradient: the queries attend over the features, and over single keys beside them."""

from collections.abc import Iterator

import torch
from torch import Tensor

from hf_favorpp.attention.cpu.chunks import LOG2_E, Chunk, chunks, of, product, scratch, sequences
from hf_favorpp.attention.cpu.shared_term import SharedTerm
from hf_favorpp.attention.cpu.single_keys import Seen, SingleKeys
from hf_favorpp.attention.layout import new_tokens

FEW_QUERIES = 64
SUMS = 2.0**-60, 2.0**60
"""Least and most; weights down to 2^-126 are exact in float32, and sums of so many have room above."""


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
        if single is None:
            _attend_to_features(q, P, bias[n, :, 0], S[n, :, 0], o)
            continue
        for chunk in _query_chunks(q, P, single, block):
            seen = single.of(chunk)
            q_ = chunk.of(q, "q", P.dtype)
            r = shared.value(*shared.move(q_))
            weights = _weights(q_, P, bias[n, :, chunk.where], r, seen, scale, chunk)
            of_features, of_block, of_ends = _split(weights, P.shape[1], seen)
            o_ = product(of_features, S[n, :, chunk.where], "tokens")
            o_ += product(of_block, seen.value, "more tokens")
            o_ += product(of_ends.flatten(1, 2), seen.end_value, "more tokens").view(o_.shape)
            chunk.put_(o, o_.flatten(1, 2))
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
    grad_bias, grad_S = torch.zeros_like(bias), torch.zeros_like(S)
    for n, (do, q, *kv), (grad_q, *grad_kv) in sequences(order, count, (grad_out, *tokens), grads):
        P, shared = of(projection, n), SharedTerm.of_sequence(n, center, root, linear, scale)
        single = _single_keys(kv, P, block, (first, last))
        if single is None and bool(torch.isneginf(bias[n].amax())):
            grad_q.zero_()
            continue
        for chunk in _query_chunks(q, P, single, block):
            seen = None if single is None else single.of(chunk)
            q_, do_ = chunk.of(q, "q", P.dtype), chunk.blockwise(chunk.of(do, "do", P.dtype))
            moved = None if seen is None else shared.move(q_)
            r = None if moved is None else shared.value(*moved)
            weights = _weights(q_, P, bias[n, :, chunk.where], r, seen, scale, chunk)
            of_features, of_block, of_ends = _split(weights, P.shape[1], seen)
            grad = _grad_logits(weights, do_, S[n, :, chunk.where], seen)
            to_features, to_block, to_ends = _split(grad, P.shape[1], seen)
            grad_S[n, :, chunk.where] += of_features.mT @ do_
            grad_bias[n, :, chunk.where] += to_features.sum(-2)
            grad_q_ = product(to_features.flatten(1, 2), P, "grad of tokens")
            if need_projection:
                of(grad_projection, n).add_(to_features.flatten(1, 2).mT @ q_)
            if single is not None and seen is not None and moved is not None:
                grad_q_ += shared.gradient(*moved, to_features.sum(-1).flatten(1, 2))
                grad_q_.add_(product(to_block, seen.key, "more tokens").flatten(1, 2), alpha=scale)
                grad_q_.add_(product(to_ends.flatten(1, 2), seen.end_key, "more tokens"), alpha=scale)
                scaled = chunk.blockwise(torch.mul(q_, scale, out=scratch("more tokens", q_.shape, P.dtype)))
                own = product(to_block.mT, scaled, "to own keys"), product(of_block.mT, do_, "to own values")
                ends = (to_ends.flatten(1, 2).mT @ scaled.flatten(1, 2), of_ends.flatten(1, 2).mT @ do_.flatten(1, 2))
                single.add_gradients_(chunk, grad_kv, own, ends)
            chunk.put_(grad_q, grad_q_)
        if single is not None:
            single.put_end_gradients_(grad_kv)
    grad_query, grad_key, grad_value = (*grads, *(projection.new_empty(0) for _ in range(3 - len(grads))))
    return grad_query, grad_key, grad_value, grad_projection, grad_bias, grad_S


def _attend_to_features(q: Tensor, P: Tensor, bias: Tensor, S: Tensor, out: Tensor) -> None:
    """Attend to features alone.

    A softmax would first look for the largest logit of each query. That of the first few queries of the head serves
    them all as long as the sums of their weights stay within ``SUMS``: nothing that counts is lost then.

    Args:
        q: (H, L, d).
        P: (H, M, d).
        bias: (H, M), nats.
        S: (H, M, D).
        out: Where to, (H, L, D).
    """
    bits = (bias * LOG2_E).unsqueeze(1)
    least, most = SUMS
    top: Tensor | None = None
    one_top = True
    for chunk in _query_chunks(q, P, None, 0):
        q_ = chunk.of(q, "q", P.dtype)
        logits = scratch("logits", (*q_.shape[:2], P.shape[1]), P.dtype)
        if one_top:
            logits.copy_(bits).baddbmm_(q_, P.mT, alpha=LOG2_E)
            if top is None:
                top = logits[:, :FEW_QUERIES].amax((1, 2), keepdim=True)
                logits -= top
                bits -= top
            total = logits.exp2_().sum(-1, keepdim=True)
            smallest, largest = total.aminmax()
            one_top = least <= float(smallest) and float(largest) <= most
        if not one_top:
            logits.copy_(bits).baddbmm_(q_, P.mT, alpha=LOG2_E)
            logits -= logits.amax(-1, keepdim=True)
            total = logits.exp2_().sum(-1, keepdim=True)
        torch.div(product(logits, S, "tokens"), total, out=out[:, chunk.begin : chunk.end])


def _weights(
    q: Tensor, P: Tensor, bias: Tensor, r: Tensor | None, seen: Seen | None, scale: float, chunk: Chunk
) -> Tensor:
    """Return the softmax of the logits of a chunk of queries, (H, blocks, width, M + single keys)."""
    logits = scratch("logits", (*q.shape[:2], P.shape[1]), P.dtype)
    by_block, each = chunk.blockwise(logits), bias.unsqueeze(-2)
    if r is None:
        by_block.copy_(each)
    else:
        torch.add(each, chunk.blockwise(r.unsqueeze(-1)), out=by_block)
    logits.baddbmm_(q, P.mT)
    logits = by_block
    if seen is not None:
        q = torch.mul(q, scale, out=scratch("more tokens", q.shape, P.dtype))
        of_ends = chunk.blockwise(product(q, seen.end_key.mT, "of ends"))
        of_block = product(chunk.blockwise(q), seen.key.mT, "of block")
        if seen.hidden is not None:
            of_block.masked_fill_(seen.hidden, float("-inf"))
        parts = (logits, of_block, of_ends)
        shape = (*logits.shape[:3], sum(part.shape[-1] for part in parts))
        logits = torch.cat(parts, -1, out=scratch("all logits", shape, P.dtype))
    return torch.softmax(logits, -1, out=logits)


def _grad_logits(weights: Tensor, do: Tensor, S: Tensor, seen: Seen | None) -> Tensor:
    """Return the gradient of the logits, shape of ``weights``, given that of the outputs."""
    grad = product(do, S.mT, "grad")
    if seen is not None:
        of_ends = product(do.flatten(1, 2), seen.end_value.mT, "of ends").view(*do.shape[:3], -1)
        parts = (grad, product(do, seen.value.mT, "of block"), of_ends)
        grad = torch.cat(parts, -1, out=scratch("all grad", weights.shape, S.dtype))
    in_place: Tensor = torch.ops.aten._softmax_backward_data.out(grad, weights, -1, weights.dtype, grad_input=grad)
    return in_place


def _split(t: Tensor, num_features: int, seen: Seen | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the parts that belong to the features, to the keys of the own block, and to the ends."""
    if seen is None:
        return t, t[..., :0], t[..., :0]
    end_of_block = num_features + seen.key.shape[-2]
    return t[..., :num_features], t[..., num_features:end_of_block], t[..., end_of_block:]


def _query_chunks(q: Tensor, P: Tensor, single: SingleKeys | None, block: int) -> Iterator[Chunk]:
    heads, num_features, _ = P.shape
    logits = num_features if single is None else num_features + single.number
    return chunks(0, q.shape[1], q.shape[1], heads * logits, block)


def _single_keys(kv: list[Tensor], P: Tensor, block: int, ends: tuple[int, int]) -> SingleKeys | None:
    return SingleKeys(kv[0], kv[1], P.shape[0], block, ends, P.dtype) if kv else None


def _present(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(t for t in tensors if t is not None)
