r"""Changes of variables that leave softmax attention as it is, but not the variance of its estimate.

For any centres and any invertible T,

.. math:: e^{x^\top y} \propto_j e^{c_x^\top (y_j - c_y)}\, e^{x'^\top y_j'},
          \qquad x' = T (x - c_x), \quad y' = T^{-\top} (y - c_y)

``"center"`` takes the means as centres, ``"diagonal"`` and ``"full"`` choose T too, so that both covariances become
the same diagonal matrix. That is the choice of least E|x'|^2 + E|y'|^2.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_favorpp.features.gerf import oprf_coefficient
from hf_favorpp.features.statistics import Statistics

MOST_RIDGE, LEAST_RIDGE, RIDGE_TOKENS = 0.1, 1e-4, 5.0


class Preconditioner(NamedTuple):
    """A change of variables, per sequence and head, or per head (B = 1), and the coefficient that suits it.

    Attributes:
        coefficient: A of the generalised exponential features, (B, H, d), or (B, H, 1) where it is the same for all
            coordinates; None where the kernel has none.
        center_x: (B, H, d), or None for 0, as ``center_y``.
        center_y: (B, H, d).
        transform_x: T, (B, H, d, d), or None for the identity, as ``transform_y``.
        transform_y: The inverse of T, transposed, (B, H, d, d).
    """

    coefficient: Tensor | None = None
    center_x: Tensor | None = None
    center_y: Tensor | None = None
    transform_x: Tensor | None = None
    transform_y: Tensor | None = None

    def shift(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Subtract the centres, and pay the shift of the queries back as a weight per key.

        Args:
            x: Scaled queries, (B, H, Lq, d).
            y: Scaled keys, (B, H, Lk, d).

        Returns:
            x - center_x, y - center_y, and the logarithm of the key weights in nats, (B, H, Lk).
        """
        if self.center_x is None or self.center_y is None:
            return x, y, y.new_zeros(y.shape[:-1])
        y = y - self.center_y.unsqueeze(-2)
        return x - self.center_x.unsqueeze(-2), y, (y @ self.center_x.unsqueeze(-1)).squeeze(-1)

    def transform(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return T x and the inverse transpose of T times y, of shifted queries and keys, (B, H, L, d) both."""
        if self.transform_x is None or self.transform_y is None:
            return x, y
        return x @ self.transform_x.mT, y @ self.transform_y.mT

    def to(self, dtype: torch.dtype) -> "Preconditioner":
        """Return the same in another dtype."""
        return Preconditioner(*(None if field is None else field.to(dtype) for field in self))

    def fold(self, query_nodes: Tensor, key_nodes: Tensor) -> tuple[Tensor, Tensor]:
        """Fold the transforms into projections, so that shifted x and y need not be transformed.

        Args:
            query_nodes: v, (..., H, M, d) or (M, d).
            key_nodes: u, the same shape.

        Returns:
            Projections of the queries and of the keys, (..., H, M, d): v.T, and u times the inverse transpose of T.
        """
        if self.transform_x is None or self.transform_y is None:
            return query_nodes, key_nodes
        return query_nodes @ self.transform_x, key_nodes @ self.transform_y

    def sq_norm_x(self, x: Tensor) -> Tensor:
        """Return |T x|^2 of shifted queries, (B, H, Lq)."""
        return _sq_norm(x, self.transform_x)

    def sq_norm_y(self, y: Tensor) -> Tensor:
        """Return the squared norm of shifted keys after their transform, (B, H, Lk)."""
        return _sq_norm(y, self.transform_y)


def _sq_norm(x: Tensor, transform: Tensor | None) -> Tensor:
    return (x if transform is None else x @ transform.mT).square().sum(-1)


@torch.no_grad()
def precondition(statistics: Statistics, preconditioning: str) -> Preconditioner:
    r"""Choose the change of variables and the coefficient A from moments of x and y.

    With covariances C_x and C_y,

    .. math:: C_x = R R^\top, \quad R^\top C_y R = U \,\mathrm{diag}(l)\, U^\top, \quad
              T = \mathrm{diag}(l)^{1/4}\, U^\top R^{-1}

    makes both of them diag(sqrt(l)), and A is the OPRF choice in each coordinate, with d = 1 and psi = 2 sqrt(l).
    Everything is computed in float64. Covariances of fewer tokens than ``head_dim`` are singular: a ridge, relative
    to the mean variance, keeps T bounded. It is 5 / tokens, at most 0.1 and at least 1e-4; where there is no
    variance at all T is the identity.

    Args:
        statistics: Moments, with covariances for ``"full"``.
        preconditioning: ``"none"``, ``"center"``, ``"diagonal"`` (C_x and C_y are taken as diagonal) or ``"full"``.

    Returns:
        The preconditioner, dtype of the statistics, without gradient.

    Source:
        Likhosherstov et al. 2022, arXiv:2205.15317, Theorem 3.3 for the coefficient. With one per coordinate and a
        matrix T these are dense-exponential features (Likhosherstov et al. 2023, arXiv:2302.00787).
    """
    mean_x, mean_y = statistics.mean_x, statistics.mean_y
    if preconditioning in ("none", "center"):
        centred = preconditioning == "center"
        coefficient = oprf_coefficient(statistics.psi(centred=centred), mean_x.shape[-1]).unsqueeze(-1)
        return Preconditioner(coefficient, mean_x, mean_y) if centred else Preconditioner(coefficient)
    if preconditioning == "diagonal":
        transform_x, transform_y, spectrum = _balance_diagonal(statistics)
    else:
        transform_x, transform_y, spectrum = _balance(statistics)
    coefficient = oprf_coefficient(2 * spectrum, 1)
    dtype = mean_x.dtype
    return Preconditioner(coefficient.to(dtype), mean_x, mean_y, transform_x.to(dtype), transform_y.to(dtype))


def _balance(statistics: Statistics) -> tuple[Tensor, Tensor, Tensor]:
    """Return T, its inverse transpose, and the diagonal that both covariances become."""
    assert statistics.covariance_x is not None
    assert statistics.covariance_y is not None
    R = torch.linalg.cholesky_ex(_regularised(statistics.covariance_x, statistics.num_tokens)).L
    spectrum, U = torch.linalg.eigh(R.mT @ _regularised(statistics.covariance_y, statistics.num_tokens) @ R)
    # an eigenvector has no sign of its own, and devices and libraries choose differently
    U = U * U.gather(-2, U.abs().argmax(-2, keepdim=True)).sign()
    root = spectrum.clamp(min=torch.finfo(spectrum.dtype).tiny).pow(0.25)
    transform_x = root.unsqueeze(-1) * torch.linalg.solve_triangular(R, U.mT, upper=False, left=False)
    return transform_x, (R @ U).mT / root.unsqueeze(-1), root.square()


def _balance_diagonal(statistics: Statistics) -> tuple[Tensor, Tensor, Tensor]:
    variance_x = _with_ridge(statistics.variance_x, statistics.num_tokens)
    variance_y = _with_ridge(statistics.variance_y, statistics.num_tokens)
    scale = (variance_y / variance_x).pow(0.25)
    return torch.diag_embed(scale), torch.diag_embed(1 / scale), (variance_x * variance_y).sqrt()


def _regularised(covariance: Tensor, num_tokens: Tensor) -> Tensor:
    # what overflowed is not to stop the decomposition: it shows as NaN in the output, where a gradient scaler looks
    covariance = covariance.double().nan_to_num(0.0, 0.0, 0.0)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    return covariance + torch.diag_embed(_with_ridge(variance, num_tokens) - variance)


def _with_ridge(variance: Tensor, num_tokens: Tensor) -> Tensor:
    variance = variance.double().nan_to_num(0.0, 0.0, 0.0)
    ridge = (RIDGE_TOKENS / num_tokens.double().clamp(min=1)).clamp(LEAST_RIDGE, MOST_RIDGE).unsqueeze(-1)
    mean = variance.mean(-1, keepdim=True)
    return torch.where(mean > 0, variance + ridge * mean, torch.ones_like(variance))
