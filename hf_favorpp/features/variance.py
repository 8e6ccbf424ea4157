"""Closed forms for the variance of the estimators, in log space.

Every second moment here is relative to the squared kernel, and is then the same for exp(x.y) and for the Gaussian
kernel exp(-|x - y|^2 / 2): the two differ by factors of x and of y alone, which an estimator has too.
"""

import cmath
import math
from numbers import Real
from typing import NamedTuple, Self

import torch
from torch import Tensor

from hf_favorpp.errors import ConfigError


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

    Raises:
        ConfigError: A is complex, or not below 1/8, where the variance is infinite.

    Source:
        Likhosherstov et al. 2022, arXiv:2205.15317, Theorem 3.2 and eq. 6.
    """
    if isinstance(coefficient, complex):
        raise ConfigError(
            f"A must be real here (CRT, eq. 6), got {coefficient}. complex_gerf_log_second_moment takes a complex one."
        )
    A = torch.as_tensor(coefficient, dtype=sum_sq_norm.dtype, device=sum_sq_norm.device)
    if (A >= 1 / 8).any():  # NaN stays NaN
        raise ConfigError(
            f"the variance is finite only where A < 1/8 (CRT, Theorem 3.2), got A = {A.max().item():.6g}. Choose less."
        )
    constant = head_dim * torch.log1p(-4 * A) - head_dim / 2 * torch.log1p(-8 * A)
    return constant + sum_sq_norm / (1 - 8 * A)


class GerfMoments(NamedTuple):
    r"""The two parts of the relative second moment of Re f1 f2 as lines in u = |x + s y|^2, in nats.

    .. math::
        \log E[Z^2] / K^2 &= d \log(1-4A) - \tfrac d2 \log(1-8A) + \frac{s u}{1-8A} \
        \log E|Z|^2 / K^2 &= d \log|1-4A| - \tfrac d2 \log(1-8\,\mathrm{Re} A)
            + \Bigl(\frac{s (1 - 4\,\mathrm{Re} A) + |1-4A|}{1-8\,\mathrm{Re} A} - s\Bigr) u

    Attributes:
        square: Value of the first at u = 0.
        square_slope: Its slope.
        modulus: Value of the second at u = 0.
        modulus_slope: Its slope.

    Source:
        Likhosherstov et al. 2022, arXiv:2205.15317, Theorem 3.2 with Z = f1 f2.
    """

    square: complex
    square_slope: complex
    modulus: float
    modulus_slope: float

    @classmethod
    def of(cls, coefficient: complex, sign: int, head_dim: int) -> Self:
        """Compute them.

        Args:
            coefficient: A.
            sign: s, 1 or -1.
            head_dim: d.

        Returns:
            Both lines.

        Raises:
            ConfigError: Re(1 - 8A) <= 0, where the variance is infinite, A is not finite, or s is neither 1 nor -1.
        """
        A = complex(coefficient)
        if sign not in (1, -1):
            raise ConfigError(f"s must be 1 or -1 (CRT, Theorem 3.1), got {sign}.")
        if not (cmath.isfinite(A) and 1 - 8 * A.real > 0):
            raise ConfigError(
                f"the variance is finite only where Re(1 - 8A) > 0 (CRT, Theorem 3.2), got A = {A}. "
                f"Choose a finite A with Re(A) < 1/8."
            )
        real = 1 - 8 * A.real
        return cls(
            square=head_dim * cmath.log(1 - 4 * A) - head_dim / 2 * cmath.log(1 - 8 * A),
            square_slope=sign / (1 - 8 * A),
            modulus=head_dim * math.log(abs(1 - 4 * A)) - head_dim / 2 * math.log(real),
            modulus_slope=(sign * (1 - 4 * A.real) + abs(1 - 4 * A)) / real - sign,
        )


def complex_gerf_log_second_moment(sq_norm: Tensor, coefficient: complex, sign: int, head_dim: int) -> Tensor:
    """Return log E[(Re f1(x) f2(y))^2] / K(x, y)^2 for one projection, with complex A and either sign s.

    The real part of Z has the second moment (Re E[Z^2] + E|Z|^2) / 2. Nothing is exponentiated that could overflow:
    E[Z^2] is at most E|Z|^2 in absolute value.

    Args:
        sq_norm: |x + s y|^2, any shape, float64 recommended.
        coefficient: A, with Re(1 - 8A) > 0, as :class:`GerfMoments` demands.
        sign: s, 1 or -1.
        head_dim: d.

    Returns:
        The logarithm of the relative second moment, in nats, same shape. With real A and s = 1 it is
        :func:`gerf_log_second_moment`.

    Source:
        Likhosherstov et al. 2022, arXiv:2205.15317, Theorem 3.2.
    """
    moments = GerfMoments.of(coefficient, sign, head_dim)
    modulus = moments.modulus + moments.modulus_slope * sq_norm
    square = moments.square.real + moments.square_slope.real * sq_norm
    phase = moments.square.imag + moments.square_slope.imag * sq_norm
    return modulus - math.log(2.0) + torch.log1p((square - modulus).clamp(max=0).exp() * phase.cos())


def poisson_log_second_moment(product: Tensor, rate: float) -> Tensor:
    r"""Return log E[(f(x) f(y))^2] / K(x, y)^2 of Poisson features for one draw.

    .. math:: \lambda d + \lambda^{-1} \sum_l x_l^2 y_l^2 - 2 x^\top y = \sum_l (x_l y_l - \lambda)^2 / \lambda

    Args:
        product: x_l y_l, (..., d), float64 recommended.
        rate: lambda > 0.

    Returns:
        The logarithm of the relative second moment, in nats, (...). It is never negative.

    Raises:
        ConfigError: lambda is not above 0, or not finite.

    Source:
        Likhosherstov et al. 2022, arXiv:2205.15317, Theorem 3.4.
    """
    require_rate(rate)
    return (product - rate).square().sum(-1) / rate


def geometric_log_second_moment(product: Tensor, success: float) -> Tensor:
    r"""Return log E[(f(x) f(y))^2] / K(x, y)^2 of geometric features for one draw.

    .. math:: -d \log p + \sum_l \log I_0\bigl(2 (1-p)^{-1/2} |x_l y_l|\bigr) - 2 x^\top y

    Args:
        product: x_l y_l, (..., d), float64 recommended.
        success: p, between 0 and 1.

    Returns:
        The logarithm of the relative second moment, in nats, (...).

    Raises:
        ConfigError: p is not between 0 and 1.

    Source:
        Likhosherstov et al. 2022, arXiv:2205.15317, Theorem 3.5.
    """
    require_success(success)
    log_bessel = log_bessel_i0(2 / math.sqrt(1 - success) * product.abs())
    return (log_bessel - 2 * product).sum(-1) - product.shape[-1] * math.log(success)


def require_rate(rate: float) -> None:
    """Refuse what is no rate of a Poisson distribution.

    Args:
        rate: lambda.

    Raises:
        ConfigError: It is not above 0, not finite, or no number.
    """
    if isinstance(rate, bool) or not isinstance(rate, Real) or not 0 < rate < math.inf:
        raise ConfigError(f"Poisson features need a rate lambda > 0 (CRT, eq. 10), got {rate!r}.")


def require_success(success: float) -> None:
    """Refuse what is no probability of success of a geometric distribution.

    Args:
        success: p.

    Raises:
        ConfigError: It is not between 0 and 1, or no number.
    """
    if isinstance(success, bool) or not isinstance(success, Real) or not 0 < success < 1:
        raise ConfigError(f"geometric features need 0 < p < 1 (CRT, eq. 13), got {success!r}.")


def log_bessel_i0(x: Tensor) -> Tensor:
    """Return log I_0(x), which does not overflow.

    Args:
        x: Any shape, float, >= 0.

    Returns:
        The logarithm of the modified Bessel function of the first kind and order 0, same shape.
    """
    scaled: Tensor = torch.special.i0e(x)
    return scaled.log() + x


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


def log_variance(log_second_moment: Tensor, log_kernel: Tensor) -> Tensor:
    """Return log Var[est] for one projection; an average of M independent ones has log M less.

    Args:
        log_second_moment: What the functions above return, in nats, >= 0.
        log_kernel: log K(x, y), nats, same shape: x.y, or -|x - y|^2 / 2.

    Returns:
        The logarithm of the variance in nats, same shape; -inf where there is none.
    """
    m = log_second_moment.clamp(min=0)  # rounding may leave it a little below
    return 2 * log_kernel + m + torch.log(-torch.expm1(-m))


def relative_variance(log_second_moment: Tensor) -> Tensor:
    """Return Var[est] / K^2 for one projection; an average of M independent ones has 1/M of it.

    Args:
        log_second_moment: What the functions above return, in nats.

    Returns:
        The relative variance, dimensionless, same shape.
    """
    return torch.expm1(log_second_moment)
