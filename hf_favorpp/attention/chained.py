"""Two chained softmaxes: attention through positive features that never leaves log space, and needs no epsilon."""

import torch
from torch import Tensor

CAUSAL_CHUNK = 16


def feature_attention(log_phi_q: Tensor, log_phi_k: Tensor, value: Tensor) -> Tensor:
    """Attend through positive features given by their logarithms.

    The features first attend over the keys (S, z), then the queries over the features. This equals
    phi(Q) (phi(K)^T V) / phi(Q) phi(K)^T 1 exactly, cannot overflow, and each output is a convex combination of
    values. Terms of ``log_phi_q`` that are constant in m may be left out.

    Args:
        log_phi_q: (B, H, Lq, M), nats.
        log_phi_k: (B, H, Lk, M), nats; -inf at padded keys.
        value: (B, H, Lk, D).

    Returns:
        (B, H, Lq, D); zeros where a query meets no key at all.
    """
    weights, z = softmax_and_logsumexp(log_phi_k, dim=-2)
    S = weights.mT @ value
    weights, _ = softmax_and_logsumexp(log_phi_q + z.unsqueeze(-2), dim=-1)
    return weights @ S


def causal_feature_attention(log_phi_q: Tensor, log_phi_k: Tensor, value: Tensor) -> Tensor:
    """Attend through positive features to the present and earlier keys only.

    A running (z, S) summarises all earlier chunks; within a chunk the sum over features is explicit. Both stand side
    by side in one softmax. Linear in length.

    Args:
        log_phi_q: (B, H, L, M), nats.
        log_phi_k: (B, H, L, M), nats; -inf at padded keys.
        value: (B, H, L, D).

    Returns:
        (B, H, L, D); zeros where a query meets no key at all.

    Source:
        Choromanski et al. 2021, arXiv:2009.14794, eq. 11.
    """
    batch, heads, _, num_features = log_phi_k.shape
    z = log_phi_k.new_full((batch, heads, num_features), float("-inf"))
    S = value.new_zeros(batch, heads, num_features, value.shape[-1])
    outputs = []
    chunks = (torch.split(t, CAUSAL_CHUNK, dim=-2) for t in (log_phi_q, log_phi_k, value))
    for q, k, v in zip(*chunks, strict=True):
        size = q.shape[-2]
        _, logits = softmax_and_logsumexp(q.unsqueeze(-2) + k.unsqueeze(-3), dim=-1)
        future = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
        logits = torch.cat((q + z.unsqueeze(-2), logits.masked_fill(future, float("-inf"))), dim=-1)
        weights, _ = softmax_and_logsumexp(logits, dim=-1)
        outputs.append(weights @ torch.cat((S, v), dim=-2))
        weights, z = softmax_and_logsumexp(torch.cat((z.unsqueeze(-2), k), dim=-2), dim=-2)
        S = weights[..., 0, :].unsqueeze(-1) * S + weights[..., 1:, :].mT @ v
    return torch.cat(outputs, dim=-2)


def softmax_and_logsumexp(logits: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return softmax and logsumexp; a slice of only -inf gives weights 0 and -inf, with finite gradients.

    Args:
        logits: Any shape, nats.
        dim: The dimension that both run over.

    Returns:
        The weights, shape of ``logits``, and the logsumexp in nats, without ``dim``.
    """
    shift = logits.detach().amax(dim, keepdim=True)
    shift = shift.masked_fill(shift == float("-inf"), 0)
    weights = (logits - shift).exp()
    total = weights.sum(dim, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    logsumexp = (shift + total.log()).masked_fill(empty, float("-inf"))
    return weights / total, logsumexp.squeeze(dim)
