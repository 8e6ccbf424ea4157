"""Exact attention to the own block and to the ends of the sequence, features for everything else, in one softmax.

A group of keys enters the softmax of a query as one pair: z, the logsumexp of its logits in nats, and S, its attended
value. Pairs of disjoint groups merge by logsumexp, so nothing is ever subtracted from a sum that contains it.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_favorpp.attention.chained import softmax_and_logsumexp

Summary = tuple[Tensor, Tensor]  # z (...), nats, -inf for no key at all; S (..., D), then 0


def neighbourhood_attention(
    log_phi_q: Tensor,
    log_phi_k: Tensor,
    x: Tensor,
    y: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    window: int,
    ends: tuple[int, int],
) -> Tensor:
    r"""Attend exactly where it matters most and through positive features to everything else.

    Real tokens are counted 0, 1, ... n - 1 along their row: padding, wherever it stands, has no rank and changes no
    result. The query of rank i gives the real key of rank j the logit

    .. math:: x_i \cdot y_j \text{ if } \lfloor i/w \rfloor = \lfloor j/w \rfloor \text{ or } j < e_0
        \text{ or } j \ge n - e_1, \qquad \log \sum_m \phi_m(x_i) \phi_m(y_j) \text{ otherwise,}

    and all of them share one softmax. Work and memory are linear in L: w + e_0 + e_1 + M logits a query, M summaries
    a block.

    Args:
        log_phi_q: (B, H, L, M), nats, with every term of the query (those constant in m do not cancel here).
        log_phi_k: (B, H, L, M), nats, may be -inf; sum_m exp(log_phi_q + log_phi_k) estimates exp(x_i . y_j).
        x: (B, H, L, d), dtype of ``log_phi_q`` like the rest: float32 or float64.
        y: (B, H, L, d).
        value: (B, H, L, D).
        key_mask: (B, L), bool, True = real token, or None. Padding must hold finite numbers.
        window: w >= 0, tokens a block; 0 for no exact neighbourhood.
        ends: How many first and how many last real tokens every query sees exactly, (e_0, e_1), each >= 0.

    Returns:
        (B, H, L, D); zeros where a query meets no key at all, some finite number at padded queries.

    """
    length = x.shape[-2]
    window = min(window, length)
    extra = -length % window if window else 0
    tensors = [log_phi_q, log_phi_k, x, y, value]
    if key_mask is None:
        if extra:
            tensors = [pad(t, (0, 0, 0, extra)) for t in tensors]
        real = torch.full((1, 1), length, device=x.device)
        return _attend_by_rank(tensors, real, window, ends)[:, :, :length]
    order = key_mask.logical_not().byte().argsort(dim=-1, stable=True)
    positions = pad(order, (0, extra))  # what fills the last block is never looked at
    tensors = [take(t, positions) for t in tensors]
    out = _attend_by_rank(tensors, key_mask.sum(-1, keepdim=True), window, ends)
    return take(out, order.argsort(dim=-1))


def _attend_by_rank(tensors: list[Tensor], real: Tensor, window: int, ends: tuple[int, int]) -> Tensor:
    """Do the above where position = rank < ``real`` (B or 1, 1) and the length is a multiple of ``window``."""
    log_phi_q, log_phi_k, x, y, value = tensors
    length = x.shape[-2]
    e0, e1 = (min(e, length) for e in ends)
    ranks = torch.arange(length, device=x.device)
    # The ends are seen exactly by all queries, and so belong to no block.
    hidden = ~((ranks >= e0) & (ranks < real - e1))[:, None, :, None]
    log_phi_k = log_phi_k.masked_fill(hidden, float("-inf"))
    if window == 0:
        z, S = attend(log_phi_k.mT, value)
        found = attend(log_phi_q + z.unsqueeze(-2), S)
    else:
        blocks = (length // window, window)
        q, k, x_, y_, v = (torch.unflatten(t, 2, blocks) for t in (log_phi_q, log_phi_k, x, y, value))
        z, S = other_blocks(attend(k.mT, v))
        near = (x_ @ y_.mT).masked_fill(torch.unflatten(hidden, 2, blocks).mT, float("-inf"))
        z, out = merge(attend(near, v), attend(q + z.unsqueeze(-2), S))
        found = z.flatten(2, 3), out.flatten(2, 3)
    if e0 + e1 > 0:
        positions, absent = end_ranks(ranks, real, e0, e1)
        positions = positions.expand(x.shape[0], -1)
        logits = (x @ take(y, positions).mT).masked_fill(absent[:, None, None], float("-inf"))
        found = merge(attend(logits, take(value, positions)), found)
    return found[1]


def end_ranks(ranks: Tensor, real: Tensor, first: int, last: int) -> tuple[Tensor, Tensor]:
    """Return which tokens are the first and the last real ones.

    Args:
        ranks: 0 ... L - 1, (L,).
        real: How many tokens are real, (B or 1, 1).
        first: How many first ones, at most L.
        last: How many last ones, at most L.

    Returns:
        Their ranks, (B or 1, first + last), int64, and which of them a row of fewer tokens does not have, or has
        among the first already, bool.
    """
    beginning, end = ranks[:first].expand(real.shape[0], -1), real - last + ranks[:last]
    absent = torch.cat((beginning >= real, end < first), dim=-1)
    return torch.cat((beginning, end), dim=-1).clamp(0, ranks.shape[0] - 1), absent


def attend(logits: Tensor, value: Tensor) -> Summary:
    """Summarise a group of keys for each row of logits.

    Args:
        logits: (..., n), nats.
        value: (..., n, D).

    Returns:
        z (...), S (..., D).
    """
    weights, z = softmax_and_logsumexp(logits, dim=-1)
    return z, weights @ value


def merge(a: Summary, b: Summary) -> Summary:
    """Summarise the union of two disjoint groups of keys; either may be empty.

    Args:
        a: z and S, broadcast to those of ``b``.
        b: z and S.

    Returns:
        z and S, shapes of ``b``.
    """
    weights, z = softmax_and_logsumexp(torch.stack((a[0].expand_as(b[0]), b[0])), dim=0)
    # One pass over S where w_a S_a + w_b S_b takes three. Both empty: S_a, which is 0.
    return z, torch.lerp(a[1], b[1], weights[1].unsqueeze(-1))


def other_blocks(own: Summary) -> Summary:
    """Summarise for each block all blocks but itself.

    What is outside a block is its sibling and what is outside the pair of both. That halves the number of blocks, so
    the recursion is as deep as the logarithm of their number and does work linear in it.

    Args:
        own: z (B, H, blocks, M), S (B, H, blocks, M, D).

    Returns:
        The same shapes.
    """
    blocks = own[0].shape[2]
    if blocks == 1:
        return torch.full_like(own[0], float("-inf")), torch.zeros_like(own[1])
    z, S = in_pairs(own)
    outside = other_blocks(merge((z[:, :, :, 0], S[:, :, :, 0]), (z[:, :, :, 1], S[:, :, :, 1])))
    z, S = merge((outside[0].unsqueeze(3), outside[1].unsqueeze(3)), (z.flip(3), S.flip(3)))
    return z.flatten(2, 3)[:, :, :blocks], S.flatten(2, 3)[:, :, :blocks]


def in_pairs(own: Summary) -> Summary:
    """Put neighbouring blocks side by side; an odd last one beside an empty one.

    Args:
        own: z (B, H, blocks, M), S (B, H, blocks, M, D).

    Returns:
        z (B, H, pairs, 2, M), S (B, H, pairs, 2, M, D).
    """
    z, S = own
    if z.shape[2] % 2:
        z, S = pad(z, (0, 0, 0, 1), value=float("-inf")), pad(S, (0, 0, 0, 0, 0, 1))
    return torch.unflatten(z, 2, (-1, 2)), torch.unflatten(S, 2, (-1, 2))


def take(t: Tensor, positions: Tensor) -> Tensor:
    """Pick tokens of each row.

    Args:
        t: (B, H, L, D).
        positions: (B, n), int64.

    Returns:
        (B, H, n, D).
    """
    batch, heads, length, _ = t.shape
    # Whole vectors: several times faster than gather, which copies number by number.
    first = torch.arange(0, batch * heads * length, length, device=t.device).reshape(batch, heads, 1)
    rows = (first + positions.unsqueeze(1)).flatten()
    return t.flatten(0, 2).index_select(0, rows).reshape(batch, heads, positions.shape[1], -1)
