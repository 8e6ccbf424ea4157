"""Statistics of queries and keys, and the changes of variables that leave softmax as it is but not its variance."""

from typing import NamedTuple

import torch
from torch import Tensor


class Statistics(NamedTuple):
    """First and second moments of scaled queries x and keys y, per sequence and head, or per head (B = 1).

    Attributes:
        mean_x: (B, H, d).
        mean_y: (B, H, d).
        spread_x: Mean of |x - mean_x|^2, (B, H).
        spread_y: Mean of |y - mean_y|^2, (B, H).
    """

    mean_x: Tensor
    mean_y: Tensor
    spread_x: Tensor
    spread_y: Tensor

    def psi(self, preconditioning: str) -> Tensor:
        """Return the mean of |x_i + y_j|^2 over all real pairs, after preconditioning.

        Args:
            preconditioning: ``"none"`` or ``"center"``, which removes the means.

        Returns:
            psi, (B, H), >= 0.

        Source:
            Likhosherstov et al. 2022, arXiv:2205.15317, eq. 8, in centred moments, which do not cancel.
        """
        psi = self.spread_x + self.spread_y
        return psi if preconditioning == "center" else psi + (self.mean_x + self.mean_y).square().sum(-1)


@torch.no_grad()
def sequence_statistics(
    x: Tensor, y: Tensor, query_mask: Tensor | None = None, key_mask: Tensor | None = None
) -> Statistics:
    """Return the moments of each sequence over its real tokens, without gradient.

    Args:
        x: Scaled queries, (B, H, Lq, d), float; masked positions must be finite.
        y: Scaled keys, (B, H, Lk, d), same dtype; masked positions must be finite.
        query_mask: True at real queries, (B, Lq), bool; None means all.
        key_mask: True at real keys, (B, Lk), bool; None means all.

    Returns:
        The statistics; those of a sequence without real tokens are 0.
    """
    mean_x, spread_x = _moments(x, query_mask)
    mean_y, spread_y = _moments(y, key_mask)
    return Statistics(mean_x, mean_y, spread_x, spread_y)


def _moments(x: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    if mask is None:
        mean = x.mean(-2)
        return mean, (x - mean.unsqueeze(-2)).square().sum(-1).mean(-1)
    weight = mask.to(x.dtype)[:, None, :, None]
    count = weight.sum(-2).clamp(min=1)
    mean = (x * weight).sum(-2) / count
    return mean, ((x - mean.unsqueeze(-2)).square() * weight).sum((-2, -1)) / count.squeeze(-1)


def center(x: Tensor, y: Tensor, statistics: Statistics) -> tuple[Tensor, Tensor, Tensor]:
    r"""Shift queries and keys by their means and pay the shift back as a weight per key.

    .. math:: e^{x^\top y} \propto_j e^{\mu_x^\top (y_j - \mu_y)}\, e^{(x - \mu_x)^\top (y_j - \mu_y)}

    so softmax attention is unchanged for any centres, while |x + y|^2, and with it the variance, shrinks.

    Args:
        x: Scaled queries, (B, H, Lq, d).
        y: Scaled keys, (B, H, Lk, d).
        statistics: The centres.

    Returns:
        x - mean_x, y - mean_y, and the logarithm of the key weights in nats, (B, H, Lk).
    """
    x = x - statistics.mean_x.unsqueeze(-2)
    y = y - statistics.mean_y.unsqueeze(-2)
    return x, y, (y @ statistics.mean_x.unsqueeze(-1)).squeeze(-1)
