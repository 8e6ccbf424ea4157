"""Real features of either sign, as a logarithm and a factor, so that neither overflows."""

from typing import NamedTuple

from torch import Tensor


class LogFeatures(NamedTuple):
    """Features factor * exp(log_magnitude).

    Attributes:
        log_magnitude: Nats, (..., L, F), finite or -inf.
        factor: In [-1, 1], the same shape: 1 for positive features, a sign, or a cosine.
    """

    log_magnitude: Tensor
    factor: Tensor

    def values(self) -> Tensor:
        """Return the features themselves, (..., L, F), which may over- or underflow."""
        return self.factor * self.log_magnitude.exp()
