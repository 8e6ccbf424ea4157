"""Closed forms for the variance of the estimators, in log space."""

import math

import torch
from torch import Tensor


def gerf_log_second_moment(sum_sq_norm: Tensor, coefficient: Tensor | float, head_dim: int) -> Tensor:
    r"""Return log E[(phi(x) phi(y))^2] / K(x, y)^2 with K = exp(x.y), for one projection w ~ N(0, I).

    With u = |x + y|^2 the Gaussian integral of exp(4A|w|^2 + 2 sqrt(1-4A) w.(x+y)) gives

    .. math:: d \log(1-4A) - \tfrac d2 \log(1-8A) + \Bigl(\tfrac{2(1-4A)}{1-8A} - 1\Bigr) u

    which at A = 0 is u, the Performer's Lemma 2.

    Args:
        sum_sq_norm: |x + y|^2, any shape, float64 recommended.
        coefficient: A < 1/8, broadcastable against ``sum_sq_norm``.
        head_dim: d.

    Returns:
        The logarithm of the relative second moment, in nats. It is 0 for an estimator without error.

    Source:
        Likhosherstov et al. 2022, arXiv:2205.15317, Theorem 3.2 and eq. 6.
    """
    A = torch.as_tensor(coefficient, dtype=sum_sq_norm.dtype, device=sum_sq_norm.device)
    constant = head_dim * torch.log1p(-4 * A) - head_dim / 2 * torch.log1p(-8 * A)
    return constant + sum_sq_norm / (1 - 8 * A)


def hyperbolic_log_second_moment(sum_sq_norm: Tensor) -> Tensor:
    r"""Return log E[est^2] / K^2 for one projection of hyperbolic FAVOR+, features exp(w.x) and exp(-w.x).

    The estimate is :math:`e^{-(|x|^2+|y|^2)/2} \cosh(w^\top (x+y))`, and cosh^2 t = (1 + cosh 2t) / 2.

    Args:
        sum_sq_norm: |x + y|^2, any shape.

    Returns:
        The logarithm of the relative second moment, in nats.

    Source:
        Choromanski et al. 2021, arXiv:2009.14794, Lemma 2.
    """
    return torch.logaddexp(-sum_sq_norm, sum_sq_norm) - math.log(2.0)


def relative_variance(log_second_moment: Tensor) -> Tensor:
    """Return Var[est] / K^2 for one projection; an average of M independent ones has 1/M of it.

    Args:
        log_second_moment: What the functions above return, in nats.

    Returns:
        The relative variance, dimensionless, same shape.
    """
    return torch.expm1(log_second_moment)
