"""Generalised exponential random features: FAVOR+ (A = 0) and FAVOR++ (the A of least variance)."""

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
        A <= 0, same shape and dtype as ``psi``.

    Source:
        Likhosherstov et al. 2022, arXiv:2205.15317, Theorem 3.3.
    """
    b = 2 * psi + head_dim
    rho = 2 * head_dim / (torch.sqrt(b * b + 8 * head_dim * psi) + b)
    return (1 - 1 / rho) / 8


def projection_logits(x: Tensor, omega: Tensor, coefficient: Tensor | None = None) -> Tensor:
    r"""Return the part of log phi that depends on the projection: :math:`A |w_m|^2 + \sqrt{1 - 4A}\, w_m^\top x`.

    The rest of log phi is constant in m. It cancels on the query side of attention and is a bias per key on the
    other.

    Args:
        x: Scaled queries or keys, (B, H, L, d), float.
        omega: Projections, (H, M, d) or (M, d), same dtype.
        coefficient: A, (B, H), same dtype; None is A = 0, FAVOR+.

    Returns:
        Logits in nats, (B, H, L, M).

    Source:
        Likhosherstov et al. 2022, arXiv:2205.15317, Theorem 3.1 with s = +1 and real A.
    """
    projected = x @ omega.mT
    if coefficient is None:
        return projected
    A = coefficient[..., None, None]
    return A * omega.square().sum(-1).unsqueeze(-2) + torch.sqrt(1 - 4 * A) * projected


def gerf_log_features(x: Tensor, omega: Tensor, coefficient: Tensor | None = None) -> Tensor:
    r"""Return log phi in full, so that the mean over w of phi(x) phi(y) is exp(x.y).

    .. math:: \log\phi_m(x) = A |w_m|^2 + \sqrt{1-4A}\, w_m^\top x - |x|^2/2 + \tfrac d4 \log(1-4A)

    Args:
        x: Scaled queries or keys, (B, H, L, d), float.
        omega: Projections with standard normal marginals, (H, M, d) or (M, d), same dtype.
        coefficient: A, (B, H), same dtype; None is A = 0, FAVOR+.

    Returns:
        Log-features in nats, (B, H, L, M).

    Source:
        Likhosherstov et al. 2022, arXiv:2205.15317, Theorem 3.1 with s = +1 and real A.
    """
    log_phi = projection_logits(x, omega, coefficient) - x.square().sum(-1, keepdim=True) / 2
    if coefficient is None:
        return log_phi
    return log_phi + x.shape[-1] / 4 * torch.log1p(-4 * coefficient)[..., None, None]
