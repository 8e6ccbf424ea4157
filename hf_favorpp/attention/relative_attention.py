"""Attention with logits that depend on the distance: exact where it is short, features beyond, in one softmax.

A query gives every key to its far left the same extra logit, and every key to its far right another: there the
summaries of the features serve as they are, and the query pays the difference on top. Nearer keys are few.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from hf_favorpp.attention.neighbourhood import Summary, attend, end_ranks, in_pairs, merge, take


class DistanceLogits(NamedTuple):
    """What each query adds to the logits of keys by their distance.

    Attributes:
        table: (B, H, L, R), nats, at the distances j - i = -left ... R - 1 - left from the query at i to the key at j;
            the first and the last serve all keys beyond too.
        left: >= 0.
        window: >= 1, tokens a block; what a query adds is exact for keys in its block and the two beside it.
    """

    table: Tensor
    left: int
    window: int


def relative_attention(
    log_phi_q: Tensor,
    log_phi_k: Tensor,
    x: Tensor,
    y: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    of_distances: DistanceLogits,
    ends: tuple[int, int],
) -> Tensor:
    r"""Attend exactly to the blocks around a query, and through features to what is left and right of them.

    Real tokens are counted 0, 1, ... n - 1 along their row and cut into blocks of w. With b the logits of distances,
    the query of rank i gives the real key of rank j the logit

    .. math:: x_i \cdot y_j + b_{i,j-i} \text{ if } |\lfloor i/w \rfloor - \lfloor j/w \rfloor| \le 1
        \text{ or } j < e_0 \text{ or } j \ge n - e_1, \qquad
        \log \sum_m \phi_m(x_i) \phi_m(y_j) + b_{i,\pm\infty} \text{ otherwise,}

    where distances are those of the positions. All of them share one softmax. Work and memory are linear in L:
    3 w + e_0 + e_1 + 2 M logits a query.

    Args:
        log_phi_q: (B, H, L, M), nats, with every term of the query.
        log_phi_k: (B, H, L, M), nats, may be -inf; sum_m exp(log_phi_q + log_phi_k) estimates exp(x_i . y_j).
        x: (B, H, L, d), dtype of ``log_phi_q`` like the rest: float32 or float64.
        y: (B, H, L, d).
        value: (B, H, L, D).
        key_mask: (B, L), bool, True = real token, or None. Padding must hold finite numbers.
        of_distances: Logits of distances.
        ends: How many first and how many last real tokens every query sees exactly, (e_0, e_1), each >= 0.

    Returns:
        (B, H, L, D); zeros where a query meets no key at all, some finite number at padded queries.
    """
    length = x.shape[-2]
    table, left, window = of_distances
    window = min(window, length)
    extra = -length % window
    tensors = [log_phi_q, log_phi_k, x, y, value, table]
    if key_mask is None:
        positions = torch.arange(length + extra, device=x.device).unsqueeze(0)
        tensors = [pad(t, (0, 0, 0, extra)) for t in tensors]
        real = torch.full((1, 1), length, device=x.device)
        return _attend_by_rank(tensors, positions, real, left, window, ends)[:, :, :length]
    order = key_mask.logical_not().byte().argsort(dim=-1, stable=True)
    positions = pad(order, (0, extra))  # what fills the last block is never looked at
    tensors = [take(t, positions) for t in tensors]
    real = key_mask.sum(-1, keepdim=True)
    out = _attend_by_rank(tensors, positions, real, left, window, ends)
    return take(out, order.argsort(dim=-1))


def _attend_by_rank(
    tensors: list[Tensor],
    positions: Tensor,
    real: Tensor,
    reach: int,
    window: int,
    ends: tuple[int, int],
) -> Tensor:
    """Do the above where the tokens stand by rank < ``real`` (B or 1, 1), and their number is a multiple of window."""
    log_phi_q, log_phi_k, x, y, value, of_distance = tensors
    length = x.shape[-2]
    e0, e1 = (min(e, length) for e in ends)
    ranks = torch.arange(length, device=x.device)
    # The ends are seen exactly by all queries, and so belong to no block.
    hidden = ~((ranks >= e0) & (ranks < real - e1))[:, None, :, None]
    log_phi_k = log_phi_k.masked_fill(hidden, float("-inf"))
    blocks = (length // window, window)
    q, k, x_, y_, v, rel = (torch.unflatten(t, 2, blocks) for t in (log_phi_q, log_phi_k, x, y, value, of_distance))
    own = attend(k.mT, v)
    left, right = _skip_one(earlier_blocks(own)), _flip(_skip_one(earlier_blocks(_flip(own))))
    near_positions = _with_neighbours(torch.unflatten(positions, 1, blocks)[:, None, :, :, None], 0).mT
    near = x_ @ _with_neighbours(y_, 0).mT
    near = near + of_pairs(rel, torch.unflatten(positions, 1, blocks)[:, None], near_positions[..., 0, :], reach)
    near = near.masked_fill(_with_neighbours(torch.unflatten(hidden, 2, blocks), True).mT, float("-inf"))
    far = [
        attend(q + z.unsqueeze(-2) + of_side, S) for (z, S), of_side in ((left, rel[..., :1]), (right, rel[..., -1:]))
    ]
    z, out = merge(attend(near, _with_neighbours(v, 0)), merge(*far))
    found = z.flatten(2, 3), out.flatten(2, 3)
    if e0 + e1 > 0:
        ranks_of_ends, absent = end_ranks(ranks, real, e0, e1)
        seen = positions.expand(real.shape[0], -1).gather(1, ranks_of_ends)
        ranks_of_ends = ranks_of_ends.expand(x.shape[0], -1)
        logits_of_ends = x @ take(y, ranks_of_ends).mT
        logits_of_ends = logits_of_ends + of_pairs(of_distance, positions[:, None], seen[:, None], reach)
        logits_of_ends = logits_of_ends.masked_fill(absent[:, None, None], float("-inf"))
        found = merge(attend(logits_of_ends, take(value, ranks_of_ends)), found)
    return found[1]


def earlier_blocks(own: Summary) -> Summary:
    """Summarise for each block all blocks before it.

    What is before a block is what is before its pair, and for the second of a pair the first too. That halves the
    number of blocks, so the recursion is as deep as the logarithm of their number and does work linear in it.

    Args:
        own: z (B, H, blocks, M), S (B, H, blocks, M, D).

    Returns:
        The same shapes; of the first block -inf and 0.
    """
    blocks = own[0].shape[2]
    if blocks == 1:
        return torch.full_like(own[0], float("-inf")), torch.zeros_like(own[1])
    z, S = in_pairs(own)
    firsts = z[:, :, :, 0], S[:, :, :, 0]
    before_firsts = earlier_blocks(merge(firsts, (z[:, :, :, 1], S[:, :, :, 1])))
    before_seconds = merge(before_firsts, firsts)
    z, S = (torch.stack(pair, dim=3).flatten(2, 3) for pair in zip(before_firsts, before_seconds, strict=True))
    return z[:, :, :blocks], S[:, :, :blocks]


def _skip_one(before: Summary) -> Summary:
    """Turn what is before each block into what is before its predecessor."""
    z, S = before
    return pad(z[:, :, :-1], (0, 0, 1, 0), value=float("-inf")), pad(S[:, :, :-1], (0, 0, 0, 0, 1, 0))


def _flip(summary: Summary) -> Summary:
    return summary[0].flip(2), summary[1].flip(2)


def _with_neighbours(t: Tensor, beyond: float) -> Tensor:
    """Put the blocks before and after each block beside it: (B, H, blocks, w, D) -> (B, H, blocks, 3 w, D)."""
    before = pad(t[:, :, :-1], (0, 0, 0, 0, 1, 0), value=beyond)
    after = pad(t[:, :, 1:], (0, 0, 0, 0, 0, 1), value=beyond)
    return torch.cat((before, t, after), dim=-2)


def of_pairs(table: Tensor, queries: Tensor, keys: Tensor, left: int) -> Tensor:
    """Pick the logits of distances for pairs of positions.

    Args:
        table: As :class:`DistanceLogits` has it, (..., n, R).
        queries: Their positions, (..., n).
        keys: Theirs, (..., m).
        left: As :class:`DistanceLogits` has it.

    Returns:
        (..., n, m).
    """
    index = (keys.unsqueeze(-2) - queries.unsqueeze(-1) + left).clamp(0, table.shape[-1] - 1)
    return table.gather(-1, index.expand(*table.shape[:-1], -1))
