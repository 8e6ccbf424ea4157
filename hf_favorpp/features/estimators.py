"""The estimators of the Gaussian kernel of both papers by their names, fitted to data. Some need SciPy."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from hf_favorpp.errors import ConfigError, InputError
from hf_favorpp.features.discrete import DiscreteFeatures, Distribution, poisson_rate, positive_shift
from hf_favorpp.features.exponential import ExponentialFeatures, HyperbolicFeatures
from hf_favorpp.features.gerf import oprf_coefficient
from hf_favorpp.features.log_features import LogFeatures
from hf_favorpp.features.optimum import geometric_success, gerf_parameters
from hf_favorpp.features.projection import draw_projections
from hf_favorpp.rules import require_choice, require_int


class Estimator(Protocol):
    """A pair of feature maps whose products average to exp(-|x - y|^2 / 2)."""

    @property
    def is_positive(self) -> bool:
        """Whether all features are positive; of PoisRF+ and GeomRF+ for points above the least fitted."""

    @property
    def is_symmetric(self) -> bool:
        """Whether queries and keys have the same features."""

    @property
    def columns(self) -> int:
        """Real features per projection."""

    def log_features(self, x: Tensor, omega: Tensor, *, of_keys: bool = False) -> LogFeatures:
        """Return the features of queries or keys (..., L, d) for the projections or counts (M, d)."""

    def log_second_moment(self, x: Tensor, y: Tensor) -> Tensor:
        """Return log E[est^2] / K^2 in nats for one projection, (...), of points (..., d)."""


class PairStatistics(NamedTuple):
    """What the estimators take from data, averaged over all pairs in O(L d).

    Attributes:
        psi_plus: Mean of |x_i + y_j|^2 (CRT, eq. 8).
        psi_minus: Mean of |x_i - y_j|^2, likewise.
        second_x: Means of x_l^2 over the queries, (d,); with those of the keys their products are the means of
            x_il^2 y_jl^2 over the pairs (CRT, eqs. 12 and 14).
        second_y: Means of y_l^2 over the keys, (d,).
    """

    psi_plus: float
    psi_minus: float
    second_x: Tensor
    second_y: Tensor

    @classmethod
    def of(cls, x: Tensor, y: Tensor) -> "PairStatistics":
        """Compute them.

        Args:
            x: Queries, (L, d).
            y: Keys, (N, d).

        Returns:
            The statistics, in float64.
        """
        x, y = x.double(), y.double()
        mean_x, mean_y = x.mean(0), y.mean(0)
        spread = (x - mean_x).square().sum(-1).mean() + (y - mean_y).square().sum(-1).mean()
        psi_plus, psi_minus = (spread + (mean_x + s * mean_y).square().sum() for s in (1, -1))
        return cls(psi_plus.item(), psi_minus.item(), x.square().mean(0), y.square().mean(0))


def _gerf(x: Tensor, y: Tensor) -> ExponentialFeatures:
    statistics = PairStatistics.of(x, y)
    return ExponentialFeatures(*gerf_parameters(statistics.psi_plus, statistics.psi_minus, x.shape[-1]))


def _oprf(x: Tensor, y: Tensor) -> ExponentialFeatures:
    psi = torch.tensor(PairStatistics.of(x, y).psi_plus, dtype=torch.float64)
    return ExponentialFeatures(oprf_coefficient(psi, x.shape[-1]).item(), 1)


def _discrete(distribution: Distribution, *, shifted: bool) -> Callable[[Tensor, Tensor], DiscreteFeatures]:
    def fit(x: Tensor, y: Tensor) -> DiscreteFeatures:
        shift = positive_shift(x, y) if shifted else None
        if shift is not None:
            x, y = x - shift, y - shift
        _, _, second_x, second_y = PairStatistics.of(x, y)
        optimum = poisson_rate if distribution == "poisson" else geometric_success
        return DiscreteFeatures(distribution, optimum(second_x, second_y), shift)

    return fit


_FITS: dict[str, Callable[[Tensor, Tensor], Estimator]] = {
    "TrigRF": lambda x, y: ExponentialFeatures(0.0, -1),
    "PosRF": lambda x, y: ExponentialFeatures(0.0, 1),
    "GERF": _gerf,
    "PoisRF": _discrete("poisson", shifted=False),
    "GeomRF": _discrete("geometric", shifted=False),
    "OPRF": _oprf,
    "PoisRF+": _discrete("poisson", shifted=True),
    "GeomRF+": _discrete("geometric", shifted=True),
    "HypRF": lambda x, y: HyperbolicFeatures(),
}
ESTIMATORS = tuple(_FITS)
"""The papers' names: those of CRT's Table 1 in its order, and the Performer's hyperbolic features."""


def fit_estimator(name: str, x: Tensor, y: Tensor) -> Estimator:
    """Return an estimator whose parameters have the least variance for the averaged statistics of the data.

    Args:
        name: One of :data:`ESTIMATORS`.
        x: Queries, (L, d), float.
        y: Keys, (N, d), float.

    Returns:
        The estimator.

    Raises:
        ConfigError: The name is unknown.
        InputError: The points are not two finite matrices of the same width with at least one row each, or so large
            that their statistics overflow.
    """
    if not isinstance(name, str) or name not in _FITS:
        raise ConfigError(f"the estimator must be one of {', '.join(ESTIMATORS)}, got {name!r}.")
    for points in (x, y):
        if not isinstance(points, Tensor) or not points.is_floating_point():
            kind = points.dtype if isinstance(points, Tensor) else type(points).__name__
            raise InputError(f"x and y must be tensors of a float dtype, got {kind}: torch.as_tensor makes them.")
        if points.ndim != 2 or 0 in points.shape or points.shape[-1] != x.shape[-1]:
            raise InputError(
                f"x and y must be matrices (points, coordinates) of the same width with at least one row, got "
                f"{tuple(x.shape)} and {tuple(y.shape)}."
            )
        if not points.isfinite().all():
            raise InputError("x and y must be finite, got infinities or NaN. Remove or replace those entries.")
        if not points.double().square().sum().square().isfinite():
            raise InputError(
                f"x and y must have finite norms of which squares are finite too, got entries of absolute value "
                f"{points.abs().max().item():.4g}. Scale the points."
            )
    return _FITS[name](x, y)


def draw_omega(
    estimator: Estimator, num_features: int, head_dim: int, *, projection: str = "orthogonal", seed: int = 0
) -> Tensor:
    """Draw what an estimator averages over: projections, or counts.

    Args:
        estimator: Whichever.
        num_features: M.
        head_dim: d.
        projection: As for :func:`~hf_favorpp.features.projection.draw_projections`; counts are always independent.
        seed: Of the draw.

    Returns:
        omega, (M, d), float64.

    Raises:
        ConfigError: A number is not an integer from 1 (the seed: from 0), or ``projection`` is unknown.
    """
    require_int("num_features", num_features, minimum=1)
    require_int("head_dim", head_dim, minimum=1)
    require_int("seed", seed, minimum=0)
    require_choice("projection", projection)
    if isinstance(estimator, DiscreteFeatures):
        return estimator.draw(num_features, head_dim, torch.Generator().manual_seed(seed))
    return draw_projections(1, num_features, head_dim, projection=projection, seed=seed)[0].double()
