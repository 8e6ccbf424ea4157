"""The first step and its gradient: the features attend over the keys."""

from functools import partial

import torch
from torch import Tensor

from hf_favorpp.attention.cpu.chunks import LOG2_E, Chunk, add_product_, chunks, inner, of, product, scratch, sequences
from hf_favorpp.attention.cpu.running_summary import RunningSummary
from hf_favorpp.attention.cpu.shared_term import SharedTerm
from hf_favorpp.attention.layout import new_tokens


def summarise(
    key: Tensor,
    value: Tensor,
    projection: Tensor,
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
    """Let the features attend over the keys of each block; see ``Backend.summarise``."""
    heads, num_features = projection.shape[1:3]
    rows, ranks = (key.shape[0], key.shape[2]) if order is None else order.shape
    blocks = -(-ranks // block) if block else 1
    z = projection.new_full((rows, heads, blocks, num_features), float("-inf"))
    new = projection.new_zeros if order is not None or first + last > 0 else projection.new_empty
    S = new((rows, heads, blocks, num_features, value.shape[-1]))
    tiny = torch.finfo(projection.dtype).tiny
    for n, (k, v), _ in sequences(order, count, (key, value)):
        P, shared = of(projection, n), SharedTerm.of_sequence(n, center, root, linear, scale)
        length = k.shape[1]
        summary = None if block else RunningSummary(S[n], k.shape[0])
        for chunk in chunks(first, length - last, length, heads * num_features, block):
            k_, v_ = chunk.of(k, "k", P.dtype), chunk.of(v, "v", P.dtype)
            hidden = chunk.hidden(first, length - last)
            r = shared.value(*shared.move(_repeat(k_, heads)))
            if summary is not None:
                summary.add_(partial(_logits, k_, P, r, chunk, hidden), chunk.blockwise(v_))
                continue
            logits = _logits(k_, P, r, chunk, hidden, None)
            top = logits.amax(-2, keepdim=True)
            top.masked_fill_(top == float("-inf"), 0)
            weights = logits.sub_(top).exp2_()
            total = weights.sum(-2).unsqueeze(-1)
            z[n, :, chunk.where] = _by_head((top.mT + total.log2()).div_(LOG2_E), heads).squeeze(-1)
            S_ = product(weights.mT, chunk.blockwise(v_), "of blocks").div_(total.clamp_(min=tiny))
            S[n, :, chunk.where] = _by_head(S_, heads)
        if summary is not None:
            summary.finish_(z[n])
    return z, S


def summarise_backward(
    grad_z: Tensor,
    grad_S: Tensor,
    key: Tensor,
    value: Tensor,
    projection: Tensor,
    center: Tensor | None,
    root: Tensor | None,
    linear: Tensor | None,
    scale: float,
    order: Tensor | None,
    count: Tensor | None,
    block: int,
    first: int,
    last: int,
    z: Tensor,
    S: Tensor,
    need_projection: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of key, value and projection; see ``Backend.summarise_backward``."""
    (heads, num_features, head_dim), kv_heads = projection.shape[1:], key.shape[1]
    zero = order is not None or first + last > 0
    grad_key, grad_value = (new_tokens(t, zero=zero) for t in (key, value))
    grad_projection = torch.zeros_like(projection) if need_projection else projection.new_empty(0)
    empty = z == float("-inf")
    if bool(empty.any()):
        grad_z, grad_S = grad_z.masked_fill(empty, 0), grad_S.masked_fill(empty.unsqueeze(-1), 0)
    delta = inner(grad_S, S) - grad_z
    z_bits = z.masked_fill(empty, float("inf")) * LOG2_E
    for n, (k, v), (grad_k, grad_v) in sequences(order, count, (key, value), (grad_key, grad_value)):
        P, shared = of(projection, n), SharedTerm.of_sequence(n, center, root, linear, scale)
        length = k.shape[1]
        for chunk in chunks(first, length - last, length, heads * num_features, block):
            k_, v_ = chunk.of(k, "k", P.dtype), chunk.of(v, "v", P.dtype)
            hidden = chunk.hidden(first, length - last)
            z_, delta_ = (_by_kv_head(t[n, :, chunk.where].unsqueeze(-1), kv_heads).mT for t in (z_bits, delta))
            grad_S_ = _by_kv_head(grad_S[n, :, chunk.where], kv_heads)
            moved = shared.move(_repeat(k_, heads))
            weights = _logits(k_, P, shared.value(*moved), chunk, hidden, z_).exp2_()
            chunk.put_(grad_v, product(weights, grad_S_, "more tokens").flatten(1, 2))
            grad = scratch("grad", weights.shape, P.dtype).copy_(-delta_)
            grad = add_product_(grad, chunk.blockwise(v_), grad_S_.mT).mul_(weights).flatten(1, 2)
            grad_r = torch.unflatten(grad, -1, (-1, num_features)).sum(-1).mT.flatten(0, 1)
            grad_k_ = torch.unflatten(shared.gradient(*moved, grad_r), 0, (kv_heads, -1))
            grad_k_ = grad_k_.squeeze(1) if heads == kv_heads else grad_k_.sum(1)
            chunk.put_(grad_k, grad_k_.baddbmm_(grad, P.reshape(kv_heads, -1, head_dim)))
            if need_projection:
                of(grad_projection, n).add_((grad.mT @ k_).reshape(P.shape))
    return grad_key, grad_value, grad_projection


def _logits(k: Tensor, P: Tensor, r: Tensor, chunk: Chunk, hidden: Tensor | None, top: Tensor | None) -> Tensor:
    """Return the log-features of the keys of a chunk in bits, minus ``top``.

    In bits, because exp2 takes a third of the time of exp. To a group of heads that share their keys, the features of
    all of them are just more features.

    Args:
        k: (H_kv, blocks * width, d).
        P: (H, M, d).
        r: The shared term, (H, blocks * width), nats.
        chunk: Whose keys they are.
        hidden: Which of them are no real keys, (blocks * width,) bool, or None.
        top: (H_kv, blocks, 1, features of a group), bits, or None for 0.

    Returns:
        (H_kv, blocks, width, features of a group).
    """
    _, num_features, head_dim = P.shape
    kv_heads, length, _ = k.shape
    projection = P.reshape(kv_heads, -1, head_dim)
    logits = scratch("logits", (kv_heads, length, projection.shape[1]), P.dtype)
    r = r * LOG2_E
    if hidden is not None:
        r.masked_fill_(hidden, float("-inf"))
    by_block, r = chunk.blockwise(logits), chunk.blockwise(torch.unflatten(r, 0, (kv_heads, -1)).mT).unsqueeze(-1)
    by_head = torch.unflatten(by_block, -1, (-1, num_features))
    if top is None:
        by_head.copy_(r)
    else:
        torch.sub(r, torch.unflatten(top, -1, (-1, num_features)), out=by_head)
    add_product_(logits, k, projection.mT, alpha=LOG2_E)
    return by_block


def _repeat(t: Tensor, heads: int) -> Tensor:
    """Repeat keys (H_kv, ...) for all heads, (H, ...)."""
    return t if t.shape[0] == heads else t.repeat_interleave(heads // t.shape[0], dim=0)


def _by_head(t: Tensor, heads: int) -> Tensor:
    """Bring (H_kv, blocks, features of a group, D) into the order (H, blocks, M, D)."""
    return torch.unflatten(t, 2, (heads // t.shape[0], -1)).transpose(1, 2).flatten(0, 1)


def _by_kv_head(t: Tensor, kv_heads: int) -> Tensor:
    """Bring (H, blocks, M, D) into the order (H_kv, blocks, features of a group, D)."""
    return torch.unflatten(t, 0, (kv_heads, -1)).transpose(1, 2).flatten(2, 3)
