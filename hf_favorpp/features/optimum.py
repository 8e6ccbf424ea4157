"""Parameters of least variance that have no closed form. Needs SciPy."""

import itertools
import math
from collections.abc import Sequence

from torch import Tensor

from hf_favorpp.errors import InputError
from hf_favorpp.features.discrete import require_mean_squares
from hf_favorpp.features.variance import GerfMoments, log_bessel_i0
from hf_favorpp.rules import require_int

GRID = tuple(itertools.product([step / 2 for step in range(-8, 17)], (0.0, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)))
"""Where the search for A looks first: log(1 - 8 Re A) and Im A / (1 - 8 Re A)."""
STARTS = 3
"""Best points of the grid from which it goes on, for each s."""
FARTHEST = 50.0
"""A search goes no farther than that in either."""
GAIN = 1e-9
"""Nats that an imaginary part, or another start, must gain."""
NEARLY = -1 + 1e-15
"""What log1p takes at least."""


def gerf_parameters(psi_plus: float, psi_minus: float, head_dim: int) -> tuple[complex, int]:
    """Return the complex A and the sign s of least variance for the averaged statistics.

    The objective is the relative second moment of Theorem 3.2 at |x + s y|^2 = psi_s, its mean over all pairs, as
    eq. 8 takes it for OPRF. For each s the plane Re(1 - 8A) > 0 is searched on :data:`GRID`, then by Nelder and Mead's
    simplex from its best points, in the coordinates log(1 - 8 Re A) and Im A / (1 - 8 Re A), which have no boundary;
    the objective is even in Im A, so one half is enough. An imaginary part that gains nothing is 0.

    Args:
        psi_plus: Mean of |x_i + y_j|^2, >= 0.
        psi_minus: Mean of |x_i - y_j|^2, >= 0.
        head_dim: d.

    Returns:
        A and s.

    Raises:
        InputError: A mean is negative or not finite.

    Source:
        Likhosherstov et al. 2022, arXiv:2205.15317, Theorem 3.2 and Section 3.1.
    """
    from scipy.optimize import minimize

    for name, psi in (("|x + y|^2", psi_plus), ("|x - y|^2", psi_minus)):
        if not 0 <= psi < math.inf:
            raise InputError(f"the mean of {name} must be finite and >= 0 (CRT, eq. 8), got {psi}.")
    require_int("head_dim", head_dim, minimum=1)

    def coefficient(position: Sequence[float]) -> complex:
        scale = math.exp(position[0])
        return complex((1 - scale) / 8, position[1] * scale)

    best: tuple[float, complex, int] = (math.inf, 0j, 1)
    for s, psi in ((1, psi_plus), (-1, psi_minus)):

        def objective(position: Sequence[float], s: int = s, psi: float = psi) -> float:
            if max(abs(position[0]), abs(position[1])) > FARTHEST:
                return math.inf
            moments = GerfMoments.of(coefficient(position), s, head_dim)
            modulus = moments.modulus + moments.modulus_slope * psi
            square = moments.square + moments.square_slope * psi
            return modulus + math.log1p(max(math.exp(min(square.real - modulus, 0)) * math.cos(square.imag), NEARLY))

        for start in sorted(GRID, key=objective)[:STARTS]:
            found = minimize(objective, start, method="Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-12})
            real = minimize(
                lambda position: objective((position[0], 0.0)),
                found.x[:1],
                method="Nelder-Mead",
                options={"xatol": 1e-9, "fatol": 1e-12},
            )
            position, value = (found.x, found.fun) if found.fun < real.fun - GAIN else ((real.x[0], 0.0), real.fun)
            if value < best[0] - GAIN:
                best = (value, coefficient(position), s)
    return best[1], best[2]


def geometric_success(second_x: Tensor, second_y: Tensor) -> float:
    r"""Return the p of least variance for the averaged statistics.

    .. math::
        \min_p \; -d \log p + \sum_l \log I_0\bigl(2 (1-p)^{-1/2} (\overline{x_l^2} \; \overline{y_l^2})^{1/2}\bigr)

    It is searched by Brent's method in log(p / (1 - p)), over which the objective has one minimum.

    Args:
        second_x: Means of x_l^2 over the queries, (d,), float64.
        second_y: Means of y_l^2 over the keys, (d,), float64.

    Returns:
        p between 0 and 1.

    Raises:
        InputError: A mean of squares is negative, or the product of two is not finite.

    Source:
        Likhosherstov et al. 2022, arXiv:2205.15317, Theorem 3.5 and eq. 14.
    """
    from scipy.optimize import minimize_scalar

    require_mean_squares(second_x, second_y)
    product = (second_x * second_y).sqrt()

    def objective(logit: float) -> float:
        log_p, log_rest = -math.log1p(math.exp(-logit)), -math.log1p(math.exp(logit))
        log_bessel = log_bessel_i0(2 * math.exp(-log_rest / 2) * product)
        return log_bessel.sum().item() - len(product) * log_p

    found = minimize_scalar(objective, bounds=(-30.0, 30.0), method="bounded", options={"xatol": 1e-10})
    return 1 / (1 + math.exp(-found.x))
