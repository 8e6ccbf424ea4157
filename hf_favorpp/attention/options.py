"""What an attention computes, whichever implementation does."""

from typing import NamedTuple

from torch import Tensor

from hf_favorpp.features.preconditioning import Preconditioner
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
    """

    scaling: float
    kernel: str
    preconditioning: str
    statistics: Statistics | Preconditioner | None
    log_weights: Tensor | None
    exact_window: int
    exact_ends: tuple[int, int]
