"""Moments of queries and keys over real tokens."""

from typing import NamedTuple, Self

import torch
from torch import Tensor


class Statistics(NamedTuple):
    """Moments of scaled queries x and keys y, per sequence and head, or per head (B = 1).

    Attributes:
        mean_x: (B, H, d).
        mean_y: (B, H, d).
        variance_x: Per coordinate, (B, H, d).
        variance_y: Per coordinate, (B, H, d).
        num_tokens: Real tokens behind the moments, the fewer of queries and keys, (B, 1); few need a larger ridge.
        covariance_x: (B, H, d, d), or None where only ``preconditioning="full"`` would use it.
        covariance_y: As ``covariance_x``.
    """

    mean_x: Tensor
    mean_y: Tensor
    variance_x: Tensor
    variance_y: Tensor
    num_tokens: Tensor
    covariance_x: Tensor | None = None
    covariance_y: Tensor | None = None

    def psi(self, *, centred: bool) -> Tensor:
        """Return the mean of |x_i + y_j|^2 over all real pairs.

        Args:
            centred: Whether x and y are taken from their means.

        Returns:
            psi, (B, H), >= 0.

        Source:
            Likhosherstov et al. 2022, arXiv:2205.15317, eq. 8, in centred moments, which do not cancel.
        """
        psi = (self.variance_x + self.variance_y).sum(-1)
        return psi if centred else psi + (self.mean_x + self.mean_y).square().sum(-1)


@torch.no_grad()
def sequence_statistics(
    x: Tensor,
    y: Tensor,
    query_mask: Tensor | None = None,
    key_mask: Tensor | None = None,
    *,
    covariance: bool = False,
) -> Statistics:
    """Return the moments of each sequence over its real tokens, without gradient.

    Args:
        x: Scaled queries, (B, H, Lq, d), float; masked positions must be finite.
        y: Scaled keys, (B, H, Lk, d), same dtype; masked positions must be finite.
        query_mask: True at real queries, (B, Lq), bool; None means all.
        key_mask: True at real keys, (B, Lk), bool; None means all.
        covariance: Whether the covariances are wanted too.

    Returns:
        The statistics; those of a sequence without real tokens are 0.
    """
    mean_x, variance_x, covariance_x, count_x = _moments(x, query_mask, covariance)
    mean_y, variance_y, covariance_y, count_y = _moments(y, key_mask, covariance)
    count = torch.minimum(count_x, count_y)
    return Statistics(mean_x, mean_y, variance_x, variance_y, count, covariance_x, covariance_y)


def _moments(x: Tensor, mask: Tensor | None, covariance: bool) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    if mask is None:
        count = x.new_full((x.shape[0], 1), x.shape[-2])
        mean = x.mean(-2)
        deviation = x - mean.unsqueeze(-2)
    else:
        weight = mask.to(x.dtype)[:, None, :, None]
        count = weight.sum((-2, -1))
        mean = (x * weight).sum(-2) / count.clamp(min=1).unsqueeze(-1)
        deviation = (x - mean.unsqueeze(-2)) * weight
    divisor = count.clamp(min=1).unsqueeze(-1)
    variance = deviation.square().sum(-2) / divisor
    return mean, variance, deviation.mT @ deviation / divisor.unsqueeze(-1) if covariance else None, count


def scaled(query: Tensor, key: Tensor, scaling: float | None) -> tuple[Tensor, Tensor]:
    """Return x = sqrt(scaling) q and y = sqrt(scaling) k, float32, without gradient, grouped keys repeated.

    Args:
        query: (B, H, L, d).
        key: (B, H_kv, L, d).
        scaling: Factor of the logits; None means d^-1/2.

    Returns:
        Two tensors (B, H, L, d).
    """
    root = (query.shape[-1] ** -0.5 if scaling is None else scaling) ** 0.5
    x, y = query.detach().float() * root, key.detach().float() * root
    return x, y.repeat_interleave(query.shape[1] // key.shape[1], dim=1)


class RunningMoments:
    """Moments per head over the real tokens of many batches, accumulated in float64.

    Attributes:
        totals: Number of queries, their sum and the sum of their outer products, then the same of the keys: one
            vector per head, (H, 2 (1 + d + d^2)), float64. Totals of several processes add up.
    """

    def __init__(self, num_heads: int, head_dim: int, device: torch.device | None = None) -> None:
        """Begin with nothing.

        Args:
            num_heads: H.
            head_dim: d.
            device: Of the totals.
        """
        self.head_dim = head_dim
        shape = (num_heads, 2 * (1 + head_dim + head_dim**2))
        self.totals = torch.zeros(shape, dtype=torch.float64, device=device)

    @classmethod
    def of(cls, totals: Tensor, head_dim: int) -> Self:
        """Return moments with given totals.

        Args:
            totals: (H, 2 (1 + d + d^2)).
            head_dim: d.

        Returns:
            The moments, which hold ``totals`` itself.
        """
        moments = cls(0, head_dim)
        moments.totals = totals
        return moments

    def watch(self, query: Tensor, key: Tensor, mask: Tensor | None, scaling: float | None) -> None:
        """Add a batch as an attention layer sees it.

        Args:
            query: (B, H, L, d).
            key: (B, H_kv, L, d).
            mask: True at real tokens, (B, L), bool; None means all.
            scaling: Factor of the logits; None means d^-1/2.
        """
        self.update(*scaled(query, key, scaling), mask)

    @torch.no_grad()
    def update(self, x: Tensor, y: Tensor, mask: Tensor | None = None) -> None:
        """Add a batch.

        Args:
            x: Scaled queries, (B, H, L, d), float; padded positions may hold anything.
            y: Scaled keys, as ``x``.
            mask: True at real tokens, (B, L), bool; None means all.
        """
        totals = torch.cat([_raw_moments(tokens, mask) for tokens in (x, y)], dim=-1)
        self.totals += totals.to(self.totals.device)

    def statistics(self) -> Statistics:
        """Return what was accumulated, (1, H, ...), float64, covariances included; 0 where there was no token."""
        totals = self.totals.unsqueeze(0)
        (count_x, mean_x, covariance_x), (count_y, mean_y, covariance_y) = (
            _central(half, self.head_dim) for half in totals.chunk(2, dim=-1)
        )
        return Statistics(
            mean_x,
            mean_y,
            covariance_x.diagonal(dim1=-2, dim2=-1),
            covariance_y.diagonal(dim1=-2, dim2=-1),
            torch.minimum(count_x, count_y).amin(1),
            covariance_x,
            covariance_y,
        )


def _raw_moments(x: Tensor, mask: Tensor | None) -> Tensor:
    """Return count, sum and sum of outer products of the real tokens of each head, (H, 1 + d + d^2), float64."""
    x = x.transpose(0, 1)
    tokens = (x.flatten(1, 2) if mask is None else x[:, mask]).double()
    count = tokens.new_full((tokens.shape[0], 1), tokens.shape[1])
    return torch.cat((count, tokens.sum(1), (tokens.mT @ tokens).flatten(1)), dim=-1)


def _central(raw: Tensor, head_dim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return count, mean and covariance of raw moments."""
    count, total, square = torch.split(raw, [1, head_dim, head_dim**2], dim=-1)
    divisor = count.clamp(min=1)
    mean = total / divisor
    second = (square / divisor).reshape(*mean.shape, head_dim)
    return count, mean, second - mean.unsqueeze(-1) * mean.unsqueeze(-2)
