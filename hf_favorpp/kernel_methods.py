"""Random features of the Gaussian kernel for scikit-learn: for kernel methods beyond attention. Needs scikit-learn."""

from numbers import Real
from typing import Any, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from sklearn.base import BaseEstimator, ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted, validate_data

from hf_favorpp.errors import ConfigError
from hf_favorpp.features.estimators import ESTIMATORS, draw_omega, fit_estimator
from hf_favorpp.rules import require_choice, require_int

LARGEST_SEED = 2**31 - 1


class GaussianKernelSampler(ClassNamePrefixFeaturesOutMixin, TransformerMixin, BaseEstimator):  # type: ignore[misc]
    """Approximate the map of the Gaussian kernel exp(-gamma |x - y|^2) by random features of either paper.

    It stands where ``sklearn.kernel_approximation.RBFSampler`` stands, which is ``"TrigRF"`` with independent
    projections and phases::

        make_pipeline(StandardScaler(), GaussianKernelSampler("GeomRF", gamma=0.02, n_components=512), LinearSVC())

    The parameters of a method are those of least variance for the statistics of the data that it is fitted to, the
    points being queries and keys alike.

    Args:
        method: ``"TrigRF"``, ``"PosRF"``, ``"GERF"``, ``"PoisRF"``, ``"GeomRF"``, ``"OPRF"``, ``"PoisRF+"``,
            ``"GeomRF+"`` or ``"HypRF"``, the papers' names. ``"GERF"`` has the least variance of those before it.
        gamma: Of the kernel, > 0; ``"scale"`` is 1 / (n_features variance of X).
        n_components: Monte Carlo samples, M. Each gives a column, or two with ``"TrigRF"``, ``"HypRF"``, and
            ``"GERF"`` where its sign is -1, as it is for most data: queries and keys are the same points.
        projection: ``"orthogonal"`` blocks or ``"iid"`` rows, or another of ``FavorppConfig``; PoisRF and GeomRF draw
            independent counts whatever it is.
        random_state: Of the draw.

    Attributes:
        estimator_: The fitted maps.
        omega_: Projections or counts, torch.Tensor, (n_components, n_features), float64.
        gamma_: The number that ``gamma`` stands for.
        n_features_in_: Columns of X.

    Source:
        Likhosherstov et al. 2022, arXiv:2205.15317, Sections 3.1 and 3.2; Choromanski et al. 2021, arXiv:2009.14794,
        Lemma 1.
    """

    def __init__(
        self,
        method: str = "GERF",
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
        """
        if self.method not in ESTIMATORS:
            raise ConfigError(f"method must be one of {', '.join(ESTIMATORS)}, got {self.method!r}.")
        require_choice("projection", self.projection)
        components = self.n_components.item() if isinstance(self.n_components, np.integer) else self.n_components
        require_int("n_components", components, minimum=1)
        points: NDArray[Any] = validate_data(self, X, dtype=(np.float64, np.float32))
        self.gamma_ = self._gamma(points)
        scaled = self._scaled(points)
        estimator = fit_estimator(self.method, scaled, scaled)
        assert estimator.is_symmetric, "the best A for equal queries and keys is real"
        seed = int(check_random_state(self.random_state).randint(LARGEST_SEED))
        self.estimator_ = estimator
        self.omega_ = draw_omega(estimator, components, scaled.shape[-1], projection=self.projection, seed=seed)
        self._n_features_out = estimator.columns * components
        return self

    def transform(self, X: ArrayLike) -> NDArray[Any]:
        """Return features whose inner products estimate the kernel.

        Args:
            X: (n_samples, n_features), finite. ``"PoisRF+"`` and ``"GeomRF+"`` give positive features to points whose
                entries all lie above the least of the fitted data, and unbiased ones of either sign to others.

        Returns:
            (n_samples, n_components) or (n_samples, 2 n_components), float64, or float32 where X is.
        """
        check_is_fitted(self)
        points: NDArray[Any] = validate_data(self, X, dtype=(np.float64, np.float32), reset=False)
        features = self.estimator_.log_features(self._scaled(points), self.omega_).values()
        result: NDArray[Any] = features.numpy().astype(points.dtype, copy=False)
        return result

    def _gamma(self, points: NDArray[Any]) -> float:
        """Return gamma as a number."""
        if isinstance(self.gamma, str) and self.gamma == "scale":
            variance = float(points.var())
            return 1 / (points.shape[1] * variance) if variance > 0 else 1.0
        if isinstance(self.gamma, bool) or not isinstance(self.gamma, Real) or not 0 < self.gamma < np.inf:
            raise ConfigError(f"gamma must be a number > 0 or 'scale', got {self.gamma!r}.")
        return float(self.gamma)

    def _scaled(self, points: NDArray[Any]) -> torch.Tensor:
        """Return the points on the scale on which the kernel is exp(-|x - y|^2 / 2)."""
        scale: float = (2 * self.gamma_) ** 0.5
        return torch.tensor(points, dtype=torch.float64) * scale

    def __sklearn_tags__(self) -> Any:
        """Tell scikit-learn that float32 stays float32."""
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = ["float64", "float32"]
        return tags
