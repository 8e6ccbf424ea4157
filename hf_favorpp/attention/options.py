"""What an attention computes, whichever implementation does."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from hf_favorpp.attention.relative_positions import RelativePositions
from hf_favorpp.features.preconditioning import Preconditioner, precondition
from hf_favorpp.features.statistics import Statistics


class Options(NamedTuple):
    """Validated options of :func:`hf_favorpp.favorpp_attention`.

    Attributes:
        scaling: Factor of the logits.
        kernel: Feature map.
        preconditioning: Change of variables before the features.
        statistics: Calibrated moments or the preconditioner made of them; None for those of each sequence.
        log_weights: Logarithms of the weights of the projections, (H, M) or (M,), or None for equal ones.
        exact_window: Tokens per exactly attended block, 0 for none.
        exact_ends: How many first and last real tokens every query sees exactly.
        relative_positions: What is added to the logits by distance, or None.
        omega_key: Projections of the keys where they are not those of the queries, (H, M, d) or (M, d), or None.
    """

    scaling: float
    kernel: str
    preconditioning: str
    statistics: Statistics | Preconditioner | None
    log_weights: Tensor | None
    exact_window: int
    exact_ends: tuple[int, int]
    relative_positions: RelativePositions | None = None
    omega_key: Tensor | None = None

    def preconditioner(self, of_sequences: Callable[[bool], Statistics]) -> Preconditioner:
        """Return the given preconditioner, or make it of the given moments or of those of each sequence.

        Args:
            of_sequences: Computes the moments of each sequence; told whether covariances are wanted.

        Returns:
            The change of variables, of N or 1 sequences.
        """
        if isinstance(self.statistics, Preconditioner):
            return self.statistics
        statistics = self.statistics
        if statistics is None:
            if self.kernel != "favor++" and self.preconditioning == "none":
                return Preconditioner()
            statistics = of_sequences(self.preconditioning == "full")
        return precondition(statistics, self.preconditioning)
