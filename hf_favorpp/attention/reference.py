"""The plain implementation, which every faster one is tested against."""

import torch
from torch import Tensor

from hf_favorpp.attention.chained import causal_feature_attention, feature_attention, softmax_and_logsumexp
from hf_favorpp.attention.neighbourhood import neighbourhood_attention
from hf_favorpp.attention.options import Options
from hf_favorpp.attention.relative_attention import DistanceLogits, relative_attention
from hf_favorpp.features.baselines import elu_log_features, relu_log_features, trig_features
from hf_favorpp.features.gerf import feature_nodes
from hf_favorpp.features.preconditioning import Preconditioner
from hf_favorpp.features.statistics import sequence_statistics


def reference_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    omega: Tensor,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    options: Options,
    *,
    is_causal: bool,
) -> Tensor:
    """Compute :func:`hf_favorpp.favorpp_attention` on validated arguments, in at least float32.

    Args:
        query: (B, H, Lq, d).
        key: (B, H_kv, Lk, d), H_kv a divisor of H.
        value: (B, H_kv, Lk, D).
        omega: (H, M, d) or (M, d).
        key_mask: (B, Lk), bool, True = real, or None.
        query_mask: (B, Lq), bool, True = real, or None.
        options: Of the attention.
        is_causal: Whether a query sees only keys at its own and earlier positions.

    Returns:
        (B, H, Lq, D), dtype of ``query``.
    """
    scaling, kernel, _, _, log_weights, exact_window, exact_ends, positions, omega_key = options
    beside = bool(exact_window or any(exact_ends) or positions is not None)
    dtype = query.dtype
    compute = torch.promote_types(dtype, torch.float32)
    with torch.autocast(query.device.type, enabled=False):
        query, key, value, omega = (t.to(compute) for t in (query, key, value, omega))
        if query_mask is not None:
            query = _zero_padding(query, query_mask)
            positions = None if positions is None else positions.without_padding(query_mask)
        if key_mask is not None:
            key, value = _zero_padding(key, key_mask), _zero_padding(value, key_mask)
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        if kernel == "uniform":
            zero_q, zero_k = query[..., :1] * 0, key[..., :1] * 0  # a gradient of zero, not none
            return _attend(zero_q, zero_k, value, key_mask, is_causal).to(dtype)
        if kernel in ("relu", "elu"):
            log_phi_q, log_phi_k = _baseline_log_features(query, key, omega, kernel)
            return _attend(log_phi_q, log_phi_k, value, key_mask, is_causal).to(dtype)
        of_distances = None if positions is None else positions.of_distances(query, scaling, key_mask, exact_window)
        x, y = query * scaling**0.5, key * scaling**0.5
        if kernel == "none":
            no_feature = torch.full_like(x[..., :1], float("-inf"))
            return _attend_beside(no_feature, no_feature, x, y, value, key_mask, options, of_distances).to(dtype)
        change = options.preconditioner(
            lambda covariance: sequence_statistics(x, y, query_mask, key_mask, covariance=covariance)
        ).to(compute)
        centred_x, y, key_weight = change.shift(x, y)
        if kernel == "trig":
            projections = change.fold(omega, omega)
            return _trig_attention(centred_x, y, value, projections, key_weight, change, key_mask).to(dtype)
        nodes = feature_nodes(kernel, omega, omega_key, change.coefficient, log_weights)
        query_projection, key_projection = change.fold(nodes.query, nodes.key)
        log_phi_q = centred_x @ query_projection.mT + nodes.log_weights.unsqueeze(-2)
        log_phi_k = y @ key_projection.mT + (key_weight - change.sq_norm_y(y) / 2).unsqueeze(-1)
        if beside:
            log_phi_q = log_phi_q - change.sq_norm_x(centred_x).unsqueeze(-1) / 2
            return _attend_beside(log_phi_q, log_phi_k, x, y, value, key_mask, options, of_distances).to(dtype)
        return _attend(log_phi_q, log_phi_k, value, key_mask, is_causal).to(dtype)


def _attend(log_phi_q: Tensor, log_phi_k: Tensor, value: Tensor, key_mask: Tensor | None, is_causal: bool) -> Tensor:
    if key_mask is not None:
        log_phi_k = log_phi_k.masked_fill(~key_mask[:, None, :, None], float("-inf"))
    attend = causal_feature_attention if is_causal else feature_attention
    return attend(log_phi_q, log_phi_k, value)


def _attend_beside(
    log_phi_q: Tensor,
    log_phi_k: Tensor,
    x: Tensor,
    y: Tensor,
    value: Tensor,
    key_mask: Tensor | None,
    options: Options,
    of_distances: DistanceLogits | None,
) -> Tensor:
    """Attend through features beside what is exact."""
    tensors = (log_phi_q, log_phi_k, x, y, value, key_mask)
    if of_distances is None:
        return neighbourhood_attention(*tensors, options.exact_window, options.exact_ends)
    return relative_attention(*tensors, of_distances, options.exact_ends)


def _zero_padding(x: Tensor, mask: Tensor) -> Tensor:
    """Replace padded positions, whatever they hold, NaN included."""
    return x.masked_fill(~mask[:, None, :, None], 0)


def _baseline_log_features(query: Tensor, key: Tensor, omega: Tensor, kernel: str) -> tuple[Tensor, Tensor]:
    if kernel == "elu":
        return elu_log_features(query), elu_log_features(key)
    return relu_log_features(query, omega), relu_log_features(key, omega)


def _trig_attention(
    x: Tensor,
    y: Tensor,
    value: Tensor,
    projections: tuple[Tensor, Tensor],
    key_weight: Tensor,
    change: Preconditioner,
    key_mask: Tensor | None,
) -> Tensor:
    """Attend through features of either sign: there is no log space, and the denominator may come near 0 or below."""
    log_weight = key_weight + change.sq_norm_y(y) / 2
    if key_mask is not None:
        log_weight = log_weight.masked_fill(~key_mask[:, None], float("-inf"))
    weight, _ = softmax_and_logsumexp(log_weight, dim=-1)
    phi_q, phi_k = trig_features(x, projections[0]), trig_features(y, projections[1]) * weight.unsqueeze(-1)
    denominator = phi_q @ phi_k.sum(-2).unsqueeze(-1)
    nothing = denominator == 0
    return (phi_q @ (phi_k.mT @ value)).masked_fill(nothing, 0) / denominator.masked_fill(nothing, 1)
