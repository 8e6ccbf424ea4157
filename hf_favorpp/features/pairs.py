"""Sampled queries with all keys that they attend to: what is learnt of attention weights is learnt of these."""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_favorpp.features.gerf import Nodes
from hf_favorpp.features.preconditioning import Preconditioner

LEAST_QUERIES, MOST_QUERIES, TOKENS_PER_QUERY = 8, 64, 8
"""One query in eight of a sequence is sampled, but at least 8 and at most 64."""


class PairSample(NamedTuple):
    """Queries of some sequences with the keys that they attend to, after preconditioning.

    Attributes:
        x: Queries x', (B, H, S, d).
        y: Keys y', (B, H, L, d).
        key_weight: Logarithm of the weight of each key that the preconditioning asks for, nats, (B, H, L).
        query_mask: True at real queries, (B, S), bool.
        far: True where query and key meet through features: both real, and not in one exact neighbourhood;
            (B, S, L), bool.
        near: True where they meet exactly, (B, S, L), bool.
    """

    x: Tensor
    y: Tensor
    key_weight: Tensor
    query_mask: Tensor
    far: Tensor
    near: Tensor


def real_tokens_first(x: Tensor, y: Tensor, mask: Tensor, longest: int) -> tuple[Tensor, Tensor, Tensor]:
    """Order the tokens of each sequence by rank, and cut the sequences.

    Args:
        x: (B, H, L, d).
        y: (B, H, L, d).
        mask: True = real token, (B, L), bool.
        longest: Tokens of a sequence to keep at most.

    Returns:
        x and y, (B, H, L', d), and the mask, (B, L'), L' <= longest.
    """
    first = mask.logical_not().byte().argsort(dim=-1, stable=True)[:, :longest]
    mask = mask.gather(1, first)
    mask = mask[:, : max(1, int(mask.sum(1).max()))]
    index = first[:, None, : mask.shape[1], None].expand(-1, x.shape[1], -1, x.shape[3])
    return x.gather(2, index), y.gather(2, index), mask


def sample_pairs(
    x: Tensor,
    y: Tensor,
    mask: Tensor,
    change: Preconditioner,
    window: int,
    ends: tuple[int, int],
    generator: torch.Generator,
) -> PairSample:
    """Draw queries from each sequence, and say which keys each of them meets through features.

    Args:
        x: Scaled queries, (B, H, L, d), real tokens first.
        y: Scaled keys, (B, H, L, d).
        mask: True = real token, (B, L), bool.
        change: The change of variables.
        window: Tokens per block that attend to each other exactly, 0 for none.
        ends: How many first and last real tokens every query sees exactly.
        generator: CPU generator of the draw.

    Returns:
        The pairs.
    """
    x, y, key_weight = change.shift(x, y)
    x, y = change.transform(x, y)
    length = mask.shape[1]
    lottery = torch.rand(mask.shape, generator=generator).to(mask.device).masked_fill(~mask, -1)
    count = min(max(LEAST_QUERIES, min(length // TOKENS_PER_QUERY, MOST_QUERIES)), length)
    drawn = lottery.topk(count, dim=1).indices
    x = x.gather(2, drawn[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))
    rank, real_tokens = torch.arange(length, device=mask.device), mask.sum(1, keepdim=True)
    near = ((rank < ends[0]) | (rank >= real_tokens - ends[1])).unsqueeze(1)
    if window:
        near = near | (drawn.unsqueeze(-1) // window == rank // window)
    query_mask = mask.gather(1, drawn)
    real = query_mask.unsqueeze(-1) & mask.unsqueeze(1)
    return PairSample(x, y, key_weight, query_mask, far=real & ~near, near=real & near)


def divergence(sample: PairSample, nodes: Nodes) -> Tensor:
    r"""Return how far the estimated attention of the sampled queries is from softmax.

    .. math:: \sum_j p_{ij} \log \frac{p_{ij}}{\hat p_{ij}}, \qquad
              \hat p_{ij} = \frac{\hat K_{ij}}{\sum_{j'} \hat K_{ij'}}

    with :math:`\hat K_{ij}` exact for near keys and the sum over nodes for far ones: the cross-entropy of the weights
    less what no estimate can change. It is 0 where both are equal.

    Args:
        sample: The pairs; memory is that of its (B, S, L) per head.
        nodes: Of the features, (H, M, d) or (1, H, M, d).

    Returns:
        The mean over heads and real queries, nats, a scalar with gradient to the nodes.
    """
    x, y, seen = sample.x, sample.y, (sample.near | sample.far).unsqueeze(1)
    lowest = torch.finfo(x.dtype).min
    logits = x @ y.mT + sample.key_weight.unsqueeze(-2)
    log_p = torch.log_softmax(logits.masked_fill(~seen, lowest), dim=-1)
    log_phi_q = x @ nodes.query.mT + nodes.log_weights.unsqueeze(-2) - x.square().sum(-1, keepdim=True) / 2
    log_phi_k = y @ nodes.key.mT + (sample.key_weight - y.square().sum(-1) / 2).unsqueeze(-1)
    real_key = seen.any(-2).unsqueeze(-1)  # (B, 1, L, 1)
    log_phi_k = log_phi_k.masked_fill(~real_key, lowest)
    z = torch.logsumexp(log_phi_k, dim=-2, keepdim=True)
    log_phi_q = log_phi_q + z
    shift = log_phi_q.detach().amax(-1, keepdim=True)
    estimate = (log_phi_q - shift).exp() @ (log_phi_k - z).exp().mT
    estimate = estimate.clamp(min=torch.finfo(x.dtype).tiny).log() + shift
    estimate = torch.where(sample.near.unsqueeze(1), logits, estimate)
    log_estimate = torch.log_softmax(estimate.masked_fill(~seen, lowest), dim=-1)
    terms = (log_p.exp() * (log_p - log_estimate)).masked_fill(~seen, 0).sum(-1)
    real = sample.query_mask.unsqueeze(1)
    return terms.masked_fill(~real, 0).sum() / (real.sum() * x.shape[1]).clamp(min=1)
