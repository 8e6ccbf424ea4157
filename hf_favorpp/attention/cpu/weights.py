"""The weights of a softmax over several groups of keys, which stay matrices of their own."""

from collections.abc import Callable
from functools import reduce

import torch
from torch import Tensor

FEW_QUERIES = 64
TOTALS = 2.0**-60, 2.0**60
"""Least and most; weights down to 2^-126 are exact in float32, and sums of so many have room above."""

Logits = Callable[[Tensor | None], list[Tensor]]
"""Computes the logits of a chunk of queries in bits, minus a number for each head, (H, 1, 1, 1): a list of
(H, blocks, width, n), one for each group of keys."""


class Weights:
    """Weights of the queries of a sequence, chunk after chunk.

    A softmax first looks for the largest logit of each query. The largest of the first few queries of a head serves
    all of its queries as long as the sums of their weights stay within ``TOTALS``: nothing that counts is lost then.
    """

    def __init__(self) -> None:
        """Begin a sequence."""
        self.top: Tensor | None = None
        self.one_top = True

    def of(self, logits: Logits) -> tuple[list[Tensor], Tensor]:
        """Return the weights of a chunk of queries.

        Args:
            logits: Computes their logits; may be called twice.

        Returns:
            For each group of keys the weights, in the place of the logits, and the sum over all groups by which they
            are to be divided, (H, blocks, width, 1).
        """
        if self.one_top:
            parts = logits(self.top)
            if self.top is None:
                few = [part.flatten(1, 2)[:, :FEW_QUERIES] for part in parts]
                self.top = _largest(few, (1, 2)).unsqueeze(-1)
                for part in parts:
                    part -= self.top
            total = _exp(parts)
            least, most = total.aminmax()
            self.one_top = TOTALS[0] <= float(least) and float(most) <= TOTALS[1]
        if not self.one_top:
            parts = logits(None)
            top = _largest(parts, (-1,))
            for part in parts:
                part -= top
            total = _exp(parts)
        return parts, total


def gradient_of_logits_(weights: list[Tensor], total: Tensor, grads: list[Tensor]) -> None:
    """Turn what comes back to weights that are divided by their total into what comes back to the logits.

    Args:
        weights: Of each group of keys, as they are before the division.
        total: By which they are divided.
        grads: Gradients of the divided weights over the total, of each group of keys; in their place the result.
    """
    for w, grad in zip(weights, grads, strict=True):
        grad *= w
    mean = reduce(torch.add, (grad.sum(-1, keepdim=True) for grad in grads)) / total
    for w, grad in zip(weights, grads, strict=True):
        grad.addcmul_(w, mean, value=-1)


def _exp(parts: list[Tensor]) -> Tensor:
    return reduce(torch.add, (part.exp2_().sum(-1, keepdim=True) for part in parts))


def _largest(parts: list[Tensor], dim: tuple[int, ...]) -> Tensor:
    return reduce(torch.maximum, (part.amax(dim, keepdim=True) for part in parts if part.shape[-1]))
