"""Random features of the Gaussian kernel for scikit-learn: for kernel methods beyond attention. Needs scikit-learn."""

import math
import warnings
from contextlib import suppress
from numbers import Real
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from hf_favorpp.errors import ConfigError, InputError
from hf_favorpp.features.estimators import ESTIMATORS, Estimator, draw_omega, fit_estimator
from hf_favorpp.features.variance import log_variance
from hf_favorpp.rules import require_choice, require_int

LARGEST_SEED = 2**31 - 1
POINTS_OF_ERROR = 64
"""Points whose pairs tell, when a map is fitted, how large its error is."""


class GaussianKernelSampler(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Approximate the map of the Gaussian kernel exp(-gamma |x - y|^2) by random features of either paper.

    It stands where ``sklearn.kernel_approximation.RBFSampler`` stands, which is ``"TrigRF"`` with independent
    projections and phases::

        make_pipeline(StandardScaler(), GaussianKernelSampler("GeomRF", gamma=0.02, n_components=512), LinearSVC())

    The kernel does not change when all points are shifted, but every map except ``"TrigRF"`` does: the mean of the
    fitted points is taken off first. The parameters of a method are then those of the papers, of least mean log
    relative variance or its bound for the statistics of the points, which are queries and keys alike. That is the
    objective of attention, which divides by a sum of features. Kernel methods know absolute errors, which are largest
    at the norm of a point itself: there ``"TrigRF"`` is exact, and the others need a small ``gamma``.

    Args:
        method: ``"TrigRF"``, ``"PosRF"``, ``"GERF"``, ``"PoisRF"``, ``"GeomRF"``, ``"OPRF"``, ``"PoisRF+"``,
            ``"GeomRF+"`` or ``"HypRF"``, the papers' names.
        gamma: Of the kernel, > 0; ``"scale"`` is 1 / (n_features variance of X), or 1 where all entries are equal.
        n_components: Monte Carlo samples, M. Each gives a column, or two with ``"TrigRF"``, ``"HypRF"``, and
            ``"GERF"`` where its sign is -1, which the data decide.
        projection: ``"orthogonal"`` blocks, ``"iid"`` rows, ``"antithetic"`` pairs, or ``"hadamard"`` or ``"givens"``
            blocks, whose rows are not quite normal: with few columns of X (3, say) ``"hadamard"`` estimates are off by
            several per cent on average, however many there are. PoisRF and GeomRF draw independent counts whatever
            it is.
        random_state: Of the draw.

    Attributes:
        estimator_: The fitted maps.
        mean_: Mean of the fitted points, (n_features,), float64.
        omega_: Projections or counts, torch.Tensor, (n_components, n_features), float64.
        gamma_: The number that ``gamma`` stands for.
        n_features_in_: Columns of X.

    Source:
        Likhosherstov et al. 2022, arXiv:2205.15317, Sections 3.1 and 3.2; Choromanski et al. 2021, arXiv:2009.14794,
        Lemma 1.
    """

    def __init__(
        self,
        method: str = "TrigRF",
        *,
        gamma: float | Literal["scale"] = 1.0,
        n_components: int = 100,
        projection: str = "orthogonal",
        random_state: int | np.random.RandomState | None = None,
    ) -> None:
        """Keep the parameters as they are; :meth:`fit` checks them.

        Args:
            method: See the class, as for the others.
            gamma: Of the kernel.
            n_components: Monte Carlo samples.
            projection: Of exponential features.
            random_state: Of the draw.
        """
        self.method = method
        self.gamma = gamma
        self.n_components = n_components
        self.projection = projection
        self.random_state = random_state

    def fit(self, X: ArrayLike, y: Any = None) -> Self:
        """Take the statistics of the points, and draw.

        Args:
            X: (n_samples, n_features), finite.
            y: Not used; for pipelines.

        Returns:
            Itself.

        Raises:
            ConfigError: A parameter has a value that it cannot have.
            InputError: gamma times a squared distance is no finite number, or the method has no parameters for points
                so far apart.

        Warns:
            UserWarning: By its variance in closed form the method is worse for these points than an estimate of 0.
        """
        if not isinstance(self.method, str) or self.method not in ESTIMATORS:
            raise ConfigError(f"method must be one of {', '.join(ESTIMATORS)}, got {self.method!r}.")
        require_choice("projection", self.projection)
        components = self.n_components.item() if isinstance(self.n_components, np.integer) else self.n_components
        require_int("n_components", components, minimum=1)
        points: NDArray[Any] = validate_data(self, X, dtype=(np.float64, np.float32))
        self.gamma_ = self._gamma(points)
        self.mean_ = points.mean(0, dtype=np.float64)
        scaled = self._scaled(points)
        estimator = fit_estimator(self.method, scaled, scaled)
        if not estimator.is_symmetric:  # has only been seen where the kernel of any two points is 0
            raise InputError(
                f"{self.method} finds no real A for these points, of a mean gamma |x - mean|^2 of "
                f"{scaled.square().sum(-1).mean().item() / 2:.3g}. Scale them, or choose a smaller gamma or TrigRF."
            )
        seed = int(check_random_state(self.random_state).randint(LARGEST_SEED))
        self.estimator_ = estimator
        self.omega_ = draw_omega(estimator, components, scaled.shape[-1], projection=self.projection, seed=seed)
        self._n_features_out = estimator.columns * components
        self._warn_if_useless(estimator, scaled, components)
        return self

    def transform(self, X: ArrayLike) -> NDArray[Any]:
        """Return features whose inner products estimate the kernel.

        Args:
            X: (n_samples, n_features), finite. ``"PoisRF+"`` and ``"GeomRF+"`` give positive features to points whose
                entries all lie above the least of the fitted data, and unbiased ones of either sign to others.

        Returns:
            (n_samples, n_components) or (n_samples, 2 n_components), float64, or float32 where X is.

        Raises:
            InputError: A feature overflows, or gamma times a squared distance.
        """
        check_is_fitted(self)
        points: NDArray[Any] = validate_data(self, X, dtype=(np.float64, np.float32), reset=False)
        features = self.estimator_.log_features(self._scaled(points), self.omega_).values()
        with np.errstate(over="ignore"):
            result: NDArray[Any] = features.numpy().astype(points.dtype, copy=False)
        if not np.isfinite(result).all():
            raise InputError(
                f"features of {self.method} overflow {points.dtype} for these points. Scale them as those of fit, or "
                f"choose a smaller gamma or TrigRF, whose features are bounded."
            )
        return result

    def _gamma(self, points: NDArray[Any]) -> float:
        """Return gamma as a number."""
        if isinstance(self.gamma, str) and self.gamma == "scale":
            with np.errstate(over="ignore"):
                variance = float(points.var(dtype=np.float64))
            rounding = (8 * float(np.finfo(points.dtype).eps) * float(np.abs(points).max())) ** 2
            gamma = 1 / (points.shape[1] * variance) if variance > rounding else 1.0
            if not 0 < gamma < np.inf:
                raise InputError(
                    f"gamma='scale' is 1 / (n_features variance of X), which must be finite and > 0, got a variance "
                    f"of {variance:.4g}. Scale the points."
                )
            return gamma
        value = math.nan
        if isinstance(self.gamma, Real) and not isinstance(self.gamma, bool):
            with suppress(OverflowError):
                value = float(self.gamma)
        if not 0 < value < math.inf:
            raise ConfigError(f"gamma must be a number > 0 or 'scale', got {self.gamma!r}.")
        return value

    def _scaled(self, points: NDArray[Any]) -> torch.Tensor:
        """Return the points around 0, on the scale on which the kernel is exp(-|x - y|^2 / 2)."""
        centred = points - self.mean_  # float64, as the mean
        scaled: torch.Tensor = torch.from_numpy(centred) * 2**0.5 * self.gamma_**0.5
        if not scaled.square().sum().square().isfinite():
            raise InputError(
                f"gamma |x - y|^2 must be finite, and its square, got gamma = {self.gamma_:.4g} and entries up to "
                f"{np.abs(centred).max():.4g} from the mean. Scale the points (StandardScaler), or choose a smaller "
                f"gamma."
            )
        return scaled

    def _warn_if_useless(self, estimator: Estimator, scaled: torch.Tensor, components: int) -> None:
        """Warn of an error above that of 0, which is at most 1 as the kernel is."""
        some = scaled[:: -(-len(scaled) // POINTS_OF_ERROR)]
        log_kernel = -torch.cdist(some, some).square() / 2
        moments = estimator.log_second_moment(some.unsqueeze(1), some)
        mean = torch.logsumexp(log_variance(moments, log_kernel).flatten(), 0) - 2 * np.log(len(some))
        log10_error = (mean.item() - np.log(components)) / 2 / np.log(10)
        if not log10_error <= 0:  # also nan, of moments that overflow
            warnings.warn(
                f"{self.method} with n_components={components} estimates the kernel of these points, which is at most "
                f"1, with an error of about 10^{log10_error:.1f} (root mean square, by its variance in closed form). "
                f"Choose TrigRF, whose error is below 1, scale the points, or choose a smaller gamma.",
                UserWarning,
                stacklevel=3,
            )

    def __sklearn_tags__(self) -> Any:
        """Tell scikit-learn that float32 stays float32."""
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags
