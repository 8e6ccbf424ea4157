"""Relative positions of Transformer-XL, which never become a matrix of all pairs."""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from hf_favorpp.attention.relative_attention import DistanceLogits, of_pairs
from hf_favorpp.attention.relative_keys import RelativeKeys
from hf_favorpp.errors import InputError

NEAR = 32
"""Tokens a block where ``exact_window`` is 0."""
FAR = 32
"""How many far distances to each side speak for all of them."""


class TransformerXL(NamedTuple):
    r"""What Transformer-XL adds to the logits, kept apart.

    The query at position i gives the key at position j the logit
    :math:`s (q_i + u)^\top k_j + s (q_i + v)^\top W r_{i-j}` with sinusoids
    :math:`r_\delta = (\sin \omega_f \delta, \cos \omega_f \delta)_f`.

    Attributes:
        query: q + v, (B, H, L, d).
        projection: W of all heads, (H d, 2 F); columns of sine and cosine alternate.
        sinusoids: r of 0 ... L - 1, (L, 2 F), sine and cosine alternating.

    Source:
        Dai et al. 2019, arXiv:1901.02860, Section 3.3 and Appendix B.
    """

    query: Tensor
    projection: Tensor
    sinusoids: Tensor

    def logits(self, query: Tensor, scaling: float, num_keys: int, first: int = 0) -> Tensor:
        """Return what is added to the logits of some queries, for whoever attends exactly.

        Args:
            query: q + u, (B, H, n, d), at the positions first ... first + n - 1; tells n, device and dtype.
            scaling: Factor of the logits.
            num_keys: L.
            first: Position of the first query.

        Returns:
            (B, H, n, L).
        """
        end = first + query.shape[-2]
        distances = torch.arange(1 - end, num_keys - first, device=query.device)  # j - i
        table = self.query[..., first:end, :].to(query.dtype) @ self._vectors(distances, query.dtype).mT * scaling
        queries = torch.arange(first, end, device=query.device)
        return of_pairs(table, queries, torch.arange(num_keys, device=query.device), end - 1)

    def of_distances(self, query: Tensor, scaling: float, key_mask: Tensor | None, window: int) -> DistanceLogits:
        r"""Return what is added to the logits by distance: exactly nearby, and beyond by a mean to each side.

        Every key to the far left of a query gets :math:`\log \frac{1}{n} \sum_\delta n_\delta e^{b_\delta}`, where
        :math:`b_\delta` is the logit of a distance that stands for :math:`n_\delta` of the n keys there, and so do
        those to the far right. That is exact where content and distance are independent of each other.

        Args:
            query: q + u, (B, H, L, d), gives the dtype.
            scaling: Factor of the logits.
            key_mask: (B, L), bool, True = real token, or None. Where real tokens lie apart, those between count too.
            window: >= 0, tokens a block; 0 is :data:`NEAR`.

        Returns:
            The logits.
        """
        length = query.shape[-2]
        window = min(window or NEAR, length)
        reach = min(2 * window - 1, length - 1)
        own = self.query.to(query.dtype) * scaling
        near = torch.arange(-reach, reach + 1, device=query.device)
        table = own @ self._vectors(near, query.dtype).mT
        if length <= 2 * window:
            return DistanceLogits(table, reach, window)
        first, last = _span(key_mask, length, query.device)
        edges = _cells(first, last, window)
        middle = ((edges[:, :-1] + edges[:, 1:] - 1) // 2).clamp(0, length - 1)
        far = [
            _log_mean_exp(own @ self._vectors(sign * middle, query.dtype).mT, count)
            for sign, count in zip((-1, 1), _counts(first, last, edges, window, length), strict=True)
        ]
        return DistanceLogits(torch.cat((far[0], table, far[1]), dim=-1), reach + 1, window)

    def require_fit(self, query: Tensor) -> None:
        """Refuse positions that do not fit the queries.

        Args:
            query: q + u, (B, H, L, d).

        Raises:
            InputError: The shapes of what is here are others.
        """
        batch, heads, length, head_dim = query.shape
        shapes = tuple(tuple(t.shape) for t in self)
        width = shapes[2][-1]
        if shapes != ((batch, heads, length, head_dim), (heads * head_dim, width), (length, width)) or width % 2:
            raise InputError(
                f"TransformerXL must have query (B, H, L, d) = {tuple(query.shape)}, projection (H d, 2 F) and "
                f"sinusoids (L, 2 F), got {', '.join(map(str, shapes))}."
            )

    def without_padding(self, query_mask: Tensor) -> Self:
        """Return the same with zeros at padded queries, whatever they hold; ``query_mask``: (B, L), bool."""
        return self._replace(query=self.query.masked_fill(~query_mask[:, None, :, None], 0))

    def _vectors(self, distances: Tensor, dtype: torch.dtype) -> Tensor:
        """Return W r of distances j - i, (n,) or (B, n), as (H, n, d) or (B, H, n, d)."""
        r = torch.unflatten(self.sinusoids[distances.abs()].to(dtype), -1, (-1, 2))
        sign = torch.stack((-distances.sign(), torch.ones_like(distances)), dim=-1)  # r is of i - j, and sine is odd
        r = (r * sign.unsqueeze(-2)).flatten(-2)
        return r.unsqueeze(-3) @ torch.unflatten(self.projection.to(dtype), 0, self.query.shape[1::2]).mT


RelativePositions = RelativeKeys | TransformerXL
"""What is added to the logits by distance."""


def _span(key_mask: Tensor | None, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the positions of the first and of the last real token of each row, (B or 1, 1)."""
    positions = torch.arange(length, device=device).unsqueeze(0)
    if key_mask is None:
        return positions[:, :1], positions[:, -1:]
    first = positions.masked_fill(~key_mask, length).amin(-1, keepdim=True)
    last = positions.masked_fill(~key_mask, -1).amax(-1, keepdim=True)
    return first, last


def _cells(first: Tensor, last: Tensor, window: int) -> Tensor:
    """Cut the distances beyond ``window`` of each row into equal cells: their edges, (B or 1, FAR + 1)."""
    numbers = torch.arange(FAR + 1, device=first.device)
    return window + 1 + (last - first - window).clamp(min=0) * numbers // FAR


def _counts(first: Tensor, last: Tensor, edges: Tensor, window: int, length: int) -> tuple[Tensor, Tensor]:
    """Return how many far keys of each query lie in each cell, to its left and to its right, (B or 1, 1, L, FAR)."""
    position = torch.arange(length, device=first.device)
    block = (position - first) // window
    nearest = (position - first - (block - 1) * window + 1, first + (block + 2) * window - position)
    farthest = (position - first, last - position)
    begin, end = edges[:, None, :-1], edges[:, None, 1:]
    left, right = (
        torch.minimum(high.unsqueeze(-1) + 1, end) - torch.maximum(low.unsqueeze(-1), begin)
        for low, high in zip(nearest, farthest, strict=True)
    )
    return left.clamp(min=0).unsqueeze(1), right.clamp(min=0).unsqueeze(1)


def _log_mean_exp(logits: Tensor, counts: Tensor) -> Tensor:
    """Return the logarithm of the mean of exp(logits), (..., n), counted so often: (..., 1)."""
    counts = counts.to(logits.dtype)
    total = counts.sum(-1, keepdim=True)
    weight = torch.where(total > 0, counts / total.clamp(min=1), 1 / logits.shape[-1])
    return (logits + weight.log()).logsumexp(-1, keepdim=True)
