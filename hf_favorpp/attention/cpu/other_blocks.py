"""The summary of all other blocks, for each block: of those before it and of those after it.

Block after block goes into a running mean that stays in cache, so that every summary is read twice and written once.
"""

import torch
from torch import Tensor

from hf_favorpp.attention.cpu.chunks import inner


def other_blocks(z: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """Summarise for each block all blocks but itself; see :mod:`hf_favorpp.attention.other_blocks`."""
    z_others, S_others = torch.empty_like(z), torch.empty_like(S)
    for n in range(z.shape[0]):
        z_others[n] = _means_of_others(z[n], S[n], S_others[n])
    return z_others, S_others


def other_blocks_backward(
    grad_z: Tensor, grad_S: Tensor, z: Tensor, S: Tensor, z_others: Tensor, S_others: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of z and S; see :mod:`hf_favorpp.attention.other_blocks`."""
    empty = z_others == float("-inf")
    if bool(empty.any()):
        grad_z, grad_S = grad_z.masked_fill(empty, 0), grad_S.masked_fill(empty.unsqueeze(-1), 0)
    log_weights = (-z_others).masked_fill_(empty, float("-inf"))
    direct = (grad_z - inner(grad_S, S_others)).unsqueeze(-1)
    to_z, to_S = torch.empty_like(direct), torch.empty_like(S)
    for n in range(z.shape[0]):
        factor = (z[n] + _means_of_others(log_weights[n], grad_S[n], to_S[n])).exp_().unsqueeze(-1)
        _means_of_others(log_weights[n], direct[n], to_z[n])
        to_S[n] *= factor
        to_z[n] *= factor
    return inner(to_S, S) + to_z.squeeze(-1), to_S


def _means_of_others(log_weights: Tensor, columns: Tensor, means: Tensor) -> Tensor:
    """Return for each block the logsumexp of the weights of all others, and write the mean of their columns.

    Args:
        log_weights: Of one sequence, (H, blocks, M), nats, may be -inf.
        columns: (H, blocks, M, D), finite.
        means: Where to write the mean by these weights, (H, blocks, M, D); 0 where the others weigh nothing.

    Returns:
        (H, blocks, M), nats; -inf where the others weigh nothing.
    """
    blocks = range(log_weights.shape[1])
    before = _logsumexp_before(log_weights)
    after = _logsumexp_before(log_weights.flip(1)).flip(1)
    total = torch.logaddexp(before, after)
    # what a block weighs in the mean that it joins, from either side, and what those after it weigh in the result
    weights = (_ratio(log_weights, torch.logaddexp(log_weights, t)) for t in (before, after))
    forth, back, of_after = (t.unsqueeze(-1) for t in (*weights, _ratio(after, total)))
    mean = torch.zeros_like(columns[:, 0])
    for b in blocks:
        means[:, b] = mean
        mean.lerp_(columns[:, b], forth[:, b])
    mean.zero_()
    for b in reversed(blocks):
        means[:, b].lerp_(mean, of_after[:, b])
        mean.lerp_(columns[:, b], back[:, b])
    return total


def _logsumexp_before(z: Tensor) -> Tensor:
    """Return for each block the logsumexp of those before it, (H, blocks, M)."""
    before = torch.full_like(z, float("-inf"))
    for b in range(1, z.shape[1]):
        before[:, b] = torch.logaddexp(before[:, b - 1], z[:, b - 1])
    return before


def _ratio(part: Tensor, whole: Tensor) -> Tensor:
    """Return exp(part - whole), 0 for a part of nothing."""
    return (part - whole).exp_().masked_fill_(part == float("-inf"), 0)
