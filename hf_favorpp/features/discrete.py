"""Features that a discrete distribution induces from the Taylor series of exp: Poisson and geometric."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from hf_favorpp.errors import ConfigError, InputError
from hf_favorpp.features.log_features import LogFeatures
from hf_favorpp.features.variance import (
    geometric_log_second_moment,
    poisson_log_second_moment,
    require_rate,
    require_success,
)

Distribution = Literal["poisson", "geometric"]
MOST_COUNTS = 1e12
"""Largest mean of a count that is drawn; float64 holds whole numbers up to 9e15."""
ZERO = -1e30
"""The logarithm of an entry 0: finite, so that 0 times it is 0, and exp of it is 0."""


@dataclass(frozen=True, eq=False)
class DiscreteFeatures:
    r"""The map f with :math:`E[f(x) f(y)] = e^{-|x-y|^2/2}` over counts n_l drawn from a distribution p.

    .. math:: f(x) = e^{-|x|^2/2} \prod_l x_l^{n_l} \, (n_l!)^{-1/2} \, p(n_l)^{-1/2}

    Features are positive where all entries of x are; the kernel does not change when all points are shifted, which
    makes them so (PoisRF+, GeomRF+).

    Attributes:
        distribution: ``"poisson"`` with the rate lambda, or ``"geometric"`` with the success probability p, from 0.
        parameter: lambda > 0, or 0 < p < 1.
        shift: c, (d,), subtracted from every point; None subtracts nothing.

    Source:
        Likhosherstov et al. 2022, arXiv:2205.15317, Section 3.2.
    """

    is_symmetric: ClassVar[bool] = True
    columns: ClassVar[int] = 1

    distribution: Distribution
    parameter: float
    shift: Tensor | None = None

    def __post_init__(self) -> None:
        """Check the parameter.

        Raises:
            ConfigError: It is outside its range, or the distribution is unknown.
        """
        if self.distribution == "poisson":
            require_rate(self.parameter)
        elif self.distribution == "geometric":
            require_success(self.parameter)
        else:
            raise ConfigError(f"distribution must be 'poisson' or 'geometric', got {self.distribution!r}.")

    @property
    def is_positive(self) -> bool:
        """Whether the points are shifted, which makes the features of all those positive that lie above the shift."""
        return self.shift is not None

    def draw(self, num_features: int, head_dim: int, generator: torch.Generator) -> Tensor:
        """Draw the counts.

        Args:
            num_features: M.
            head_dim: d.
            generator: CPU generator.

        Returns:
            n, (M, d), float64, whole numbers from 0.

        Raises:
            ConfigError: The rate is so large that float64 does not hold the counts.
        """
        shape = (num_features, head_dim)
        if self.distribution == "poisson":
            if self.parameter > MOST_COUNTS:
                raise ConfigError(
                    f"counts can be drawn for rates lambda <= {MOST_COUNTS:.0e}, got {self.parameter:.4g}. Scale the "
                    f"points."
                )
            return torch.poisson(torch.full(shape, self.parameter, dtype=torch.float64), generator=generator)
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
        return torch.floor(torch.log1p(-uniform) / math.log1p(-self.parameter))

    def log_features(self, x: Tensor, omega: Tensor, *, of_keys: bool = False) -> LogFeatures:
        """Return the features of points.

        Args:
            x: Points, (..., L, d), float.
            omega: Counts, (M, d), taken in the dtype of ``x``.
            of_keys: Makes no difference.

        Returns:
            Features (..., L, M), whose factor is the sign.

        Raises:
            InputError: A count is negative or no whole number.
        """
        num_features, head_dim = omega.shape
        if ((omega < 0) | (omega != omega.floor())).any():
            raise InputError(
                f"omega must be counts, whole numbers from 0, got entries from {omega.min().item():.4g} to "
                f"{omega.max().item():.4g}. Draw them with DiscreteFeatures.draw or draw_omega."
            )
        omega = omega.to(x)
        if self.shift is not None:
            x = x - self.shift.to(x)
        if self.distribution == "poisson":
            constant = omega.new_full((num_features,), self.parameter * head_dim / 2)
            slope = math.log(self.parameter) / 2
        else:
            constant = -torch.lgamma(omega + 1).sum(-1) / 2 - head_dim / 2 * math.log(self.parameter)
            slope = math.log1p(-self.parameter) / 2
        logs = torch.where(x == 0, ZERO, x.abs().log()) - slope
        magnitude = logs @ omega.mT + constant - x.square().sum(-1, keepdim=True) / 2 - math.log(num_features) / 2
        odd = ((x < 0).to(omega) @ omega.mT).remainder(2)
        return LogFeatures(magnitude, 1 - 2 * odd)

    def positive_log_features(self, x: Tensor, omega: Tensor) -> Tensor:
        """Return the logarithms of features that are all positive.

        Args:
            x: Points, (..., L, d), float, all entries above the shift (above 0 without one).
            omega: Counts, (M, d), taken in the dtype of ``x``.

        Returns:
            Log-features, (..., L, M).

        Raises:
            InputError: An entry is not, or a count is negative or no whole number.

        Source:
            Likhosherstov et al. 2022, arXiv:2205.15317, eqs. 10 and 13, and Section 3.2 for the shift.
        """
        lowest = (x if self.shift is None else x - self.shift.to(x)).min()
        if not lowest > 0:
            raise InputError(
                f"features x^n are positive only where every entry of x (less the shift) is > 0 (CRT, Section 3.2), "
                f"got {lowest.item():.4g}. Shift by less than the least entries, as PoisRF+ and GeomRF+ do."
            )
        return self.log_features(x, omega).log_magnitude

    def log_second_moment(self, x: Tensor, y: Tensor) -> Tensor:
        """Return log E[(f(x) f(y))^2] / K^2 for one draw.

        Args:
            x: Queries, (..., d), float64 recommended.
            y: Keys, broadcastable.

        Returns:
            Nats, (...).
        """
        if self.shift is not None:
            x, y = x - self.shift.to(x), y - self.shift.to(y)
        moment = poisson_log_second_moment if self.distribution == "poisson" else geometric_log_second_moment
        return moment(x * y, self.parameter)


def poisson_rate(second_x: Tensor, second_y: Tensor) -> float:
    r"""Return the lambda of least variance for the averaged statistics.

    .. math:: \lambda = \Bigl(\tfrac1d \sum_l \overline{x_l^2} \; \overline{y_l^2}\Bigr)^{1/2}

    Args:
        second_x: Means of x_l^2 over the queries, (d,).
        second_y: Means of y_l^2 over the keys, (d,).

    Returns:
        lambda > 0.

    Raises:
        InputError: A mean of squares is negative, or the product of two is not finite.

    Source:
        Likhosherstov et al. 2022, arXiv:2205.15317, Theorem 3.4 and eq. 12.
    """
    require_mean_squares(second_x, second_y)
    return max((second_x * second_y).mean().sqrt().item(), torch.finfo(torch.float64).tiny)


def require_mean_squares(second_x: Tensor, second_y: Tensor) -> None:
    """Refuse what are no means of squares, or too large to be multiplied.

    Args:
        second_x: Means of x_l^2 over the queries, (d,).
        second_y: Means of y_l^2 over the keys, (d,).

    Raises:
        InputError: One is negative, or the product of two is not finite.
    """
    if not ((second_x >= 0) & (second_y >= 0) & (second_x * second_y).isfinite()).all():
        raise InputError(
            f"the means of x_l^2 and y_l^2 must be >= 0 with finite products (CRT, eqs. 12 and 14), got up to "
            f"{second_x.max().item():.4g} and {second_y.max().item():.4g}, from {second_x.min().item():.4g} and "
            f"{second_y.min().item():.4g}. Scale the points."
        )


def positive_shift(x: Tensor, y: Tensor, margin: float = 1e-6) -> Tensor:
    """Return the shift after which all entries are positive.

    Args:
        x: Queries, (L, d).
        y: Keys, (N, d).
        margin: How far below the least entry it is, as a share of the coordinate's range.

    Returns:
        c, (d,).
    """
    both = torch.cat((x, y))
    lowest, highest = both.amin(0), both.amax(0)
    spread = highest - lowest
    return lowest - margin * torch.where(spread > 0, spread, 1.0)
