"""Embeddings of clipped distances, which are added to the keys."""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from hf_favorpp.attention.relative_attention import DistanceLogits, of_pairs
from hf_favorpp.errors import InputError


class RelativeKeys(NamedTuple):
    """Embeddings of the distance from a query to a key, which are added to the key.

    The query at position i gives the key at position j the logit
    ``scaling * query_i . (key_j + embedding[clip(j - i, -left, right) + left])``.

    Attributes:
        embedding: (R, d), of the distances -left ... right in this order; R - 1 >= left.
        left: The largest distance to a key before the query that has an embedding of its own, >= 0; keys further
            away share it, as those after the query do beyond ``right``.

    Source:
        Shaw et al. 2018, arXiv:1803.02155, eq. 4, for keys only.
    """

    embedding: Tensor
    left: int

    @property
    def right(self) -> int:
        """The largest distance to a key after the query that has an embedding of its own."""
        return self.embedding.shape[0] - 1 - self.left

    def logits(self, query: Tensor, scaling: float, num_keys: int, first: int = 0) -> Tensor:
        """Return what is added to the logits of some queries, for whoever attends exactly.

        Args:
            query: (B, H, n, d), at the positions first ... first + n - 1.
            scaling: Factor of the logits.
            num_keys: L.
            first: Position of the first query.

        Returns:
            (B, H, n, L).
        """
        queries = torch.arange(first, first + query.shape[-2], device=query.device)
        keys = torch.arange(num_keys, device=query.device)
        return of_pairs(self._of_distances(query, scaling), queries, keys, self.left)

    def of_distances(self, query: Tensor, scaling: float, key_mask: Tensor | None, window: int) -> DistanceLogits:
        """Return what is added to the logits by distance, exactly.

        Args:
            query: (B, H, L, d).
            scaling: Factor of the logits.
            key_mask: Not looked at.
            window: >= 0, tokens a block at least.

        Returns:
            The logits, and blocks as long as the embeddings reach at least.
        """
        return DistanceLogits(self._of_distances(query, scaling), self.left, max(window, self.left, self.right, 1))

    def require_fit(self, query: Tensor) -> None:
        """Refuse embeddings that do not fit the queries.

        Args:
            query: (B, H, L, d).

        Raises:
            InputError: They have another dimension, or ``left`` is not among them.
        """
        rows, width = (*self.embedding.shape, 0)[:2]
        if self.embedding.ndim != 2 or width != query.shape[-1] or not 0 <= self.left < rows:
            raise InputError(
                f"RelativeKeys must have an embedding (R, d) with d = {query.shape[-1]} and R > left >= 0, got "
                f"{tuple(self.embedding.shape)} and left={self.left}."
            )

    def without_padding(self, query_mask: Tensor) -> Self:
        """Return the same: embeddings know nothing of padded queries."""
        return self

    def _of_distances(self, query: Tensor, scaling: float) -> Tensor:
        return query @ (self.embedding.to(query.dtype) * scaling).mT
