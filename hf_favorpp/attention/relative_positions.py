"""Relative positions of Transformer-XL as a plain dot product, so that they never become a matrix of all pairs."""

from typing import NamedTuple

import torch
from torch import Tensor


class RelativePositions(NamedTuple):
    r"""What Transformer-XL adds to the logits, kept apart.

    The query at position i gives the key at position j the logit
    :math:`s (q_i + u)^\top k_j + s (q_i + v)^\top W r_{i-j}` with sinusoids
    :math:`r_\delta = (\sin \omega_f \delta, \cos \omega_f \delta)_f`. By the addition theorems the second term is a
    dot product of a vector of the query, turned by its position, with :math:`(\cos \omega_f j, \sin \omega_f j)_f`.

    Attributes:
        query: q + v, (B, H, L, d).
        projection: W of each head, (H, d, 2 F); columns of sine and cosine alternate.
        sinusoids: r of 0 ... L - 1, (L, 2 F), sine and cosine alternating.

    Source:
        Dai et al. 2019, arXiv:1901.02860, Section 3.3 and Appendix B.
    """

    query: Tensor
    projection: Tensor
    sinusoids: Tensor

    def extend(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """Append the positions to queries and keys.

        Args:
            query: q + u, (B, H, L, d).
            key: (B, H_kv, L, d).

        Returns:
            (B, H, L, d + 2 F) and (B, H_kv, L, d + 2 F): their dot products are the logits over the scaling.
        """
        sine, cosine = self.sinusoids[:, 0::2], self.sinusoids[:, 1::2]
        of_query = torch.unflatten(self.query @ self.projection, -1, (-1, 2))
        a, b = of_query.unbind(-1)  # a sin(w (i - j)) + b cos(w (i - j))
        turned = (query, a * sine + b * cosine, b * sine - a * cosine)
        positions = torch.cat((cosine, sine), dim=-1).to(key.dtype)
        return torch.cat(turned, dim=-1), torch.cat((key, positions.expand(*key.shape[:3], -1)), dim=-1)
