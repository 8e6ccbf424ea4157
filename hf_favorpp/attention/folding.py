"""Positive features of raw queries and keys: a projection each, and a number per token that its features share."""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_favorpp.features.gerf import Nodes
from hf_favorpp.features.preconditioning import Preconditioner


class SharedTerm(NamedTuple):
    r"""The part of the log-features of a token t that does not depend on the feature.

    .. math:: r(t) = g^\top (t - c) - \tfrac s2 \, |R (t - c)|^2

    Attributes:
        center: c, (N or 1, H, d), or None for 0.
        root: R, (N or 1, H, d, d), or None for the identity.
        linear: g, (N or 1, H, d), or None for 0.
    """

    center: Tensor | None = None
    root: Tensor | None = None
    linear: Tensor | None = None


class FoldedFeatures(NamedTuple):
    r"""Log-features as functions of queries and keys as they come, neither scaled nor shifted nor transformed.

    .. math:: \log\phi_m(q) = P_m^\top q + b_m + r_q(q), \qquad \log\phi_m(k) = P_m'^\top k + r_k(k)

    The logits of exact attention that they estimate are :math:`s\, q^\top k`, up to what all keys share.

    Attributes:
        query_projection: P, (N or 1, H, M, d), rounded to the dtype that a kernel multiplies it in.
        key_projection: P', the same shape.
        bias: b, (N or 1, H, M), of the rounded projections: their rounding then acts on centred tokens only.
        query_term: r_q; it matters only where exact logits stand beside those of features.
        key_term: r_k.
    """

    query_projection: Tensor
    key_projection: Tensor
    bias: Tensor
    query_term: SharedTerm
    key_term: SharedTerm


def fold(nodes: Nodes, change: Preconditioner, scaling: float, dtype: torch.dtype) -> FoldedFeatures:
    """Fold scaling, centres, transforms and coefficients into projections of raw queries and keys.

    Args:
        nodes: Of H heads, (H, M, d) or (N or 1, H, M, d), float32 or float64: the dtype of everything returned.
        change: The change of variables, of scaled queries and keys, N or 1 sequences, in that dtype.
        scaling: s.
        dtype: What the projections are rounded to.

    Returns:
        The features; the same as :func:`hf_favorpp.attention.reference.reference_attention` computes step by step.
    """
    root = scaling**0.5
    query, key, bias = nodes
    if query.ndim == 3:
        query, key, bias = query.unsqueeze(0), key.unsqueeze(0), bias.unsqueeze(0)
    query_projection, key_projection = (
        projection.to(dtype).to(bias.dtype) for projection in change.fold(query * root, key * root)
    )
    if change.center_x is None or change.center_y is None:
        terms = SharedTerm(root=change.transform_x), SharedTerm(root=change.transform_y)
        return FoldedFeatures(query_projection, key_projection, bias, *terms)
    query_center, key_center = change.center_x / root, change.center_y / root
    at_query_center = query_projection * query_center.unsqueeze(-2)
    at_centers = torch.addcmul(at_query_center, key_projection, key_center.unsqueeze(-2)).sum(-1)
    # With x.(y - c_y) for the logit that is estimated, x.c_y has to be paid back to compare it with x.y.
    bias = bias - at_centers + (change.center_x * change.center_y).sum(-1, keepdim=True)
    return FoldedFeatures(
        query_projection,
        key_projection,
        bias,
        SharedTerm(query_center, change.transform_x, root * change.center_y),
        SharedTerm(key_center, change.transform_y, root * change.center_x),
    )
