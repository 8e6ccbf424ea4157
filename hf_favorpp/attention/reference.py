"""The plain implementation, which every faster one is tested against.

All of it stays in log space: two chained softmaxes, no epsilon. See :func:`feature_attention`.
"""

import torch
from torch import Tensor

from hf_favorpp.features.baselines import elu_log_features, hyperbolic_logits, relu_log_features, trig_features
from hf_favorpp.features.gerf import oprf_coefficient, projection_logits
from hf_favorpp.features.preconditioning import Statistics, center, sequence_statistics

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
    weights, z = _softmax_and_logsumexp(log_phi_k, dim=-2)
    S = weights.mT @ value
    weights, _ = _softmax_and_logsumexp(log_phi_q + z.unsqueeze(-2), dim=-1)
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
        _, logits = _softmax_and_logsumexp(q.unsqueeze(-2) + k.unsqueeze(-3), dim=-1)
        future = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
        logits = torch.cat((q + z.unsqueeze(-2), logits.masked_fill(future, float("-inf"))), dim=-1)
        weights, _ = _softmax_and_logsumexp(logits, dim=-1)
        outputs.append(weights @ torch.cat((S, v), dim=-2))
        weights, z = _softmax_and_logsumexp(torch.cat((z.unsqueeze(-2), k), dim=-2), dim=-2)
        S = weights[..., 0, :].unsqueeze(-1) * S + weights[..., 1:, :].mT @ v
    return torch.cat(outputs, dim=-2)


def _softmax_and_logsumexp(logits: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """Return softmax and logsumexp; a slice of only -inf gives weights 0 and -inf, with finite gradients."""
    shift = logits.detach().amax(dim, keepdim=True)
    shift = shift.masked_fill(shift == float("-inf"), 0)
    weights = (logits - shift).exp()
    total = weights.sum(dim, keepdim=True)
    empty = total == 0
    total = total.masked_fill(empty, 1)
    logsumexp = (shift + total.log()).masked_fill(empty, float("-inf"))
    return weights / total, logsumexp.squeeze(dim)


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    omega: Tensor,
    *,
    scaling: float,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    kernel: str,
    preconditioning: str,
    statistics: Statistics | None,
    is_causal: bool,
) -> Tensor:
    """Compute :func:`hf_favorpp.favorpp_attention` on validated arguments, in at least float32.

    Args:
        query: (B, H, Lq, d).
        key: (B, H_kv, Lk, d), H_kv a divisor of H.
        value: (B, H_kv, Lk, D).
        omega: (H, M, d) or (M, d).
        scaling: Factor of the logits.
        key_mask: (B, Lk), bool, True = real, or None.
        query_mask: (B, Lq), bool, True = real, or None.
        kernel: Feature map.
        preconditioning: Change of variables before the features.
        statistics: Calibrated statistics, or None for those of each sequence.
        is_causal: Whether a query sees only keys at its own and earlier positions.

    Returns:
        (B, H, Lq, D), dtype of ``query``.
    """
    dtype = query.dtype
    compute = torch.promote_types(dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        query, key, value, omega = (t.to(compute) for t in (query, key, value, omega))
        if query_mask is not None:
            query = _zero_padding(query, query_mask)
        if key_mask is not None:
            key, value = _zero_padding(key, key_mask), _zero_padding(value, key_mask)
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        if kernel in ("relu", "elu"):
            log_phi_q, log_phi_k = _baseline_log_features(query, key, omega, kernel)
        else:
            x, y, key_bias, A = _precondition(
                query, key, scaling, key_mask, query_mask, kernel, preconditioning, statistics
            )
            if kernel == "trig":
                return _trig_attention(x, y, value, omega, key_bias, key_mask).to(dtype)
            if kernel == "favor+hyperbolic":
                log_phi_q, log_phi_k = hyperbolic_logits(x, omega), hyperbolic_logits(y, omega)
            else:
                log_phi_q, log_phi_k = projection_logits(x, omega, A), projection_logits(y, omega, A)
            log_phi_k = log_phi_k + (key_bias - y.square().sum(-1) / 2).unsqueeze(-1)
        if key_mask is not None:
            log_phi_k = log_phi_k.masked_fill(~key_mask[:, None, :, None], float("-inf"))
        attend = causal_feature_attention if is_causal else feature_attention
        return attend(log_phi_q, log_phi_k, value).to(dtype)


def _zero_padding(x: Tensor, mask: Tensor) -> Tensor:
    """Replace padded positions, whatever they hold, NaN included."""
    return x.masked_fill(~mask[:, None, :, None], 0)


def _baseline_log_features(query: Tensor, key: Tensor, omega: Tensor, kernel: str) -> tuple[Tensor, Tensor]:
    if kernel == "elu":
        return elu_log_features(query), elu_log_features(key)
    return relu_log_features(query, omega), relu_log_features(key, omega)


def _precondition(
    query: Tensor,
    key: Tensor,
    scaling: float,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    kernel: str,
    preconditioning: str,
    statistics: Statistics | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return preconditioned x and y, the log-weight of each key (B, H, Lk), and A (B, H) or None for A = 0."""
    x, y = query * scaling**0.5, key * scaling**0.5
    if statistics is None and (kernel == "favor++" or preconditioning != "none"):
        statistics = sequence_statistics(x, y, query_mask, key_mask)
    A = None
    if kernel == "favor++":
        assert statistics is not None
        A = oprf_coefficient(statistics.psi(preconditioning).to(x.dtype), x.shape[-1])
    if preconditioning == "none":
        return x, y, y.new_zeros(y.shape[:-1]), A
    assert statistics is not None
    return *center(x, y, statistics), A


def _trig_attention(
    x: Tensor, y: Tensor, value: Tensor, omega: Tensor, key_bias: Tensor, key_mask: Tensor | None
) -> Tensor:
    """Attend through features of either sign: there is no log space, and the denominator may come near 0 or below."""
    log_weight = key_bias + y.square().sum(-1) / 2
    if key_mask is not None:
        log_weight = log_weight.masked_fill(~key_mask[:, None], float("-inf"))
    weight, _ = _softmax_and_logsumexp(log_weight, dim=-1)
    phi_q, phi_k = trig_features(x, omega), trig_features(y, omega) * weight.unsqueeze(-1)
    denominator = phi_q @ phi_k.sum(-2).unsqueeze(-1)
    nothing = denominator == 0
    return (phi_q @ (phi_k.mT @ value)).masked_fill(nothing, 0) / denominator.masked_fill(nothing, 1)
