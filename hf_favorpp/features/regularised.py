"""The regularised softmax kernel SMREG, which positive features estimate whose projections have the norm sqrt(d)."""

import math

import torch
from torch import Tensor

from hf_favorpp.errors import InputError
from hf_favorpp.rules import require_int

MORE_TERMS = 100
"""Beyond the largest term, which is the one of half the argument of the Bessel function."""


def regularised_log_ratio(sum_sq_norm: Tensor, head_dim: int) -> Tensor:
    r"""Return log SMREG(x, y) / SM(x, y).

    With w uniform on the sphere of radius sqrt(d), and u = |x + y|^2,

    .. math::
        \frac{\mathrm{SMREG}}{\mathrm{SM}} = e^{-u/2} E[e^{w^\top (x + y)}]
        = e^{-u/2} \sum_k \frac{\Gamma(d/2)}{\Gamma(d/2 + k) \, k!} \Bigl(\frac{d u}{4}\Bigr)^k

    It is 1 at u = 0 and falls from there: the regularised kernel is bounded by the other, and tends to it with d.

    Args:
        sum_sq_norm: |x + y|^2, any shape, float64 recommended.
        head_dim: d.

    Returns:
        Nats, same shape, <= 0. Its features are those of FAVOR+ with projections of ``norms="sqrt_d"``.

    Raises:
        InputError: |x + y|^2 is negative or not finite.
        ConfigError: d is not an integer from 1.

    Source:
        Choromanski et al. 2021, arXiv:2009.14794, Section 3 and Theorem 1; the series is that of the modified Bessel
        function of order d/2 - 1.
    """
    require_int("head_dim", head_dim, minimum=1)
    if not ((sum_sq_norm >= 0) & sum_sq_norm.isfinite()).all():
        raise InputError(
            f"|x + y|^2 must be finite and >= 0, got values from {sum_sq_norm.min().item():.4g} to "
            f"{sum_sq_norm.max().item():.4g}."
        )
    argument = (head_dim * sum_sq_norm).sqrt()
    terms = math.ceil(argument.max().item() / 2) + MORE_TERMS if argument.numel() else 1
    k = torch.arange(terms, dtype=sum_sq_norm.dtype, device=sum_sq_norm.device)
    constants = math.lgamma(head_dim / 2) - torch.lgamma(head_dim / 2 + k) - torch.lgamma(k + 1)
    powers = torch.where(k == 0, 0.0, k * (head_dim * sum_sq_norm / 4).log().unsqueeze(-1))
    return torch.logsumexp(constants + powers, -1) - sum_sq_norm / 2
