"""Generalised exponential features of the Gaussian kernel, with complex A: TrigRF, PosRF, OPRF, GERF."""

import cmath
import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from hf_favorpp.errors import ConfigError
from hf_favorpp.features.log_features import LogFeatures
from hf_favorpp.features.variance import complex_gerf_log_second_moment, hyperbolic_log_second_moment


@dataclass(frozen=True)
class ExponentialFeatures:
    r"""The maps f1 and f2 with :math:`E[f_1(x) f_2(y)] = e^{-|x-y|^2/2}` over projections w ~ N(0, I_d).

    .. math::
        f_1(x) = D e^{A|w|^2 + B w^\top x + C|x|^2}, \quad f_2(y) = D e^{A|w|^2 + s B w^\top y + C|y|^2}, \\
        B = \sqrt{s (1-4A)}, \quad C = -(s+1)/2, \quad D = (1-4A)^{d/4}

    A = 0 is TrigRF with s = -1 and PosRF with s = 1; a real A <= 0 with s = 1 is OPRF at the A of least variance.

    Attributes:
        A: Complex, with Re(1 - 4A) > 0; the variance is finite where Re(1 - 8A) > 0.
        s: 1 or -1.

    Source:
        Likhosherstov et al. 2022, arXiv:2205.15317, Theorem 3.1.
    """

    A: complex
    s: int

    def __post_init__(self) -> None:
        """Check the conditions of the theorem.

        Raises:
            ConfigError: Re(1 - 4A) <= 0, A is not finite, or s is neither 1 nor -1.
        """
        if not (cmath.isfinite(self.A) and 1 - 4 * complex(self.A).real > 0):
            raise ConfigError(
                f"the features are unbiased only where Re(1 - 4A) > 0 (CRT, Theorem 3.1), got A = {self.A}. "
                f"Choose a finite A with Re(A) < 1/4, or with Re(A) < 1/8 for a finite variance."
            )
        if self.s not in (1, -1):
            raise ConfigError(f"s must be 1 or -1 (CRT, Theorem 3.1), got {self.s}.")

    @property
    def is_positive(self) -> bool:
        """Whether all features are positive."""
        return self.s == 1 and self.is_symmetric

    @property
    def is_symmetric(self) -> bool:
        """Whether f1 and f2 give the same real features, as kernel methods need that know one map."""
        return complex(self.A).imag == 0

    @property
    def columns(self) -> int:
        """Real features per projection: 1, or 2 for a real and an imaginary part."""
        return 1 if self.is_positive else 2

    def log_features(self, x: Tensor, omega: Tensor, *, of_keys: bool = False) -> LogFeatures:
        """Return the features of queries or of keys, whose products average to Re f1(x) f2(y).

        Args:
            x: Points, (..., L, d), float.
            omega: Projections, (M, d), taken in the dtype of ``x``.
            of_keys: Whether they are those of f2.

        Returns:
            Features (..., L, columns M), the real parts first.
        """
        A, s, (num_features, head_dim), omega = complex(self.A), self.s, omega.shape, omega.to(x)
        B = cmath.sqrt(s * (1 - 4 * A)) * (s if of_keys else 1)
        log_constant = head_dim / 4 * cmath.log(1 - 4 * A)
        projected, sq_norm = x @ omega.mT, omega.square().sum(-1)
        magnitude = A.real * sq_norm + B.real * projected - (s + 1) / 2 * x.square().sum(-1, keepdim=True)
        magnitude = magnitude + (log_constant.real - math.log(num_features) / 2)
        if self.is_positive:
            return LogFeatures(magnitude, torch.ones_like(magnitude))
        phase = A.imag * sq_norm + B.imag * projected + log_constant.imag
        imaginary = -phase.sin() if of_keys else phase.sin()
        return LogFeatures(torch.cat((magnitude, magnitude), -1), torch.cat((phase.cos(), imaginary), -1))

    def log_second_moment(self, x: Tensor, y: Tensor) -> Tensor:
        """Return log E[(Re f1 f2)^2] / K^2 for one projection.

        Args:
            x: Queries, (..., d), float64 recommended.
            y: Keys, broadcastable.

        Returns:
            Nats, (...).

        Raises:
            ConfigError: The variance is infinite.
        """
        return complex_gerf_log_second_moment((x + self.s * y).square().sum(-1), self.A, self.s, x.shape[-1])


@dataclass(frozen=True)
class HyperbolicFeatures:
    r"""The positive features :math:`e^{\pm w^\top x - |x|^2}`, two per projection.

    Source:
        Choromanski et al. 2021, arXiv:2009.14794, Lemma 1.
    """

    is_positive: ClassVar[bool] = True
    is_symmetric: ClassVar[bool] = True
    columns: ClassVar[int] = 2

    def log_features(self, x: Tensor, omega: Tensor, *, of_keys: bool = False) -> LogFeatures:
        """Return the features; see :meth:`ExponentialFeatures.log_features`.

        Args:
            x: Points, (..., L, d), float.
            omega: Projections, (M, d), taken in the dtype of ``x``.
            of_keys: Makes no difference.

        Returns:
            Features (..., L, 2M).
        """
        projected = x @ torch.cat((omega, -omega)).to(x).mT
        magnitude = projected - x.square().sum(-1, keepdim=True) - math.log(2 * len(omega)) / 2
        return LogFeatures(magnitude, torch.ones_like(magnitude))

    def log_second_moment(self, x: Tensor, y: Tensor) -> Tensor:
        """Return log E[est^2] / K^2 for one projection.

        Args:
            x: Queries, (..., d), float64 recommended.
            y: Keys, broadcastable.

        Returns:
            Nats, (...).
        """
        return hyperbolic_log_second_moment((x + y).square().sum(-1))
