"""Generalised exponential random features: FAVOR+ (A = 0) and FAVOR++ (the A of least variance)."""

import math
from typing import NamedTuple

import torch
from torch import Tensor


def oprf_coefficient(psi: Tensor, head_dim: int) -> Tensor:
    r"""Return the A that minimises the variance of positive features.

    .. math:: \rho = \frac{2d}{\sqrt{(2\psi + d)^2 + 8d\psi} + 2\psi + d}, \qquad A = \tfrac18 (1 - 1/\rho)

    This is eq. 7 multiplied by its conjugate: it does not cancel, and A = 0 (FAVOR+) at psi = 0.

    Args:
        psi: Mean of |x_i + y_j|^2 over real pairs, any shape, dimensionless, >= 0.
        head_dim: d.

    Returns:
        A <= 0, same shape and dtype as ``psi``, which is not checked: this is part of every attention, where it is
        a mean of squares.

    Source:
        Likhosherstov et al. 2022, arXiv:2205.15317, Theorem 3.3.
    """
    b = 2 * psi + head_dim
    rho = 2 * head_dim / (torch.sqrt(b * b + 8 * head_dim * psi) + b)
    return (1 - 1 / rho) / 8


def quadrature(kernel: str, omega: Tensor, coefficient: Tensor | None = None) -> tuple[Tensor, Tensor]:
    r"""Return the nodes v and log-weights b with which positive random features estimate exp(x.y).

    .. math:: e^{x^\top y} \approx \sum_m e^{b_m}\, e^{v_m^\top x - |x|^2/2}\, e^{v_m^\top y - |y|^2/2}

    The feature map :math:`\log\phi_m(x) = \sum_c A_c w_{mc}^2 + \sum_c \sqrt{1-4A_c}\, w_{mc} x_c - |x|^2/2 +
    \tfrac14 \sum_c \log(1-4A_c)` splits into :math:`v_m = \sqrt{1-4A}\, w_m` and what does not depend on x, which a
    product phi(x) phi(y) / M holds twice. FAVOR+ is A = 0; its hyperbolic form has the nodes w and -w.

    Args:
        kernel: ``"favor++"``, ``"favor+"`` or ``"favor+hyperbolic"``.
        omega: Projections w with standard normal marginals, (H, M, d) or (M, d), float.
        coefficient: A, (..., H, d), or (..., H, 1) for one that all coordinates share; only ``"favor++"`` uses it.

    Returns:
        Nodes (..., H, M, d) and log-weights (..., H, M) in nats, or 2M of them for ``"favor+hyperbolic"``.

    Source:
        Likhosherstov et al. 2022, arXiv:2205.15317, Theorem 3.1 with s = +1 and real A, one per coordinate;
        Choromanski et al. 2021, arXiv:2009.14794, Lemma 1.
    """
    if kernel == "favor+hyperbolic":
        omega = torch.cat((omega, -omega), dim=-2)
    if kernel != "favor++":
        return omega, omega.new_full(omega.shape[:-1], -math.log(omega.shape[-2]))
    assert coefficient is not None
    A, (num_features, head_dim) = coefficient.unsqueeze(-2), omega.shape[-2:]
    shares = head_dim // A.shape[-1]
    log_constant = torch.log1p(-4 * A).sum(-1) * (shares / 2) - math.log(num_features)
    squares = omega.square()
    sq_norm = A.squeeze(-1) * squares.sum(-1) if shares > 1 else (A * squares).sum(-1)
    return torch.sqrt(1 - 4 * A) * omega, torch.add(log_constant, sq_norm, alpha=2)


class Nodes(NamedTuple):
    r"""Nodes of queries and keys, and their log-weights.

    .. math:: e^{x^\top y} \approx \sum_m e^{b_m}\, e^{v_m^\top x - |x|^2/2}\, e^{u_m^\top y - |y|^2/2}

    Attributes:
        query: v, (..., H, M, d).
        key: u, the same shape; v itself, unless the projections of the keys are others.
        log_weights: b, (..., H, M), nats.
    """

    query: Tensor
    key: Tensor
    log_weights: Tensor


def feature_nodes(
    kernel: str,
    omega: Tensor,
    omega_key: Tensor | None,
    coefficient: Tensor | None,
    log_weights: Tensor | None,
) -> Nodes:
    r"""Return the nodes of projections that were drawn, chosen or learnt.

    What a feature map holds that does not depend on x stands once for the query and once for the key, so that keys
    with projections of their own, :math:`w'`, give :math:`b_m = \sum_c A_c (w_{mc}^2 + w_{mc}'^2) + \dots`

    Args:
        kernel: As for :func:`quadrature`.
        omega: Projections w of the queries, (H, M, d) or (M, d).
        omega_key: Projections w' of the keys, the same shape, or None for w.
        coefficient: A, as for :func:`quadrature`.
        log_weights: Logarithms of further weights of the projections, (H, M) or (M,), nats, or None.

    Returns:
        The nodes, dtype of ``omega``.
    """
    query, bias = quadrature(kernel, omega, coefficient)
    key = query
    if omega_key is not None:
        key, key_bias = quadrature(kernel, omega_key.to(omega.dtype), coefficient)
        bias = (bias + key_bias) / 2
    if log_weights is not None:
        bias = bias + log_weights.to(bias.dtype)
    return Nodes(query, key, bias)
