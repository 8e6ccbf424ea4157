"""The summary of all keys of a sequence, which grows chunk by chunk."""

from collections.abc import Callable

import torch
from torch import Tensor

from hf_favorpp.attention.cpu.chunks import LOG2_E, add_product_

FEW_KEYS = 64
MOST_WEIGHT = 2.0**32
"""Of the keys of a chunk; the sums leave it much room in float32."""


class RunningSummary:
    """Weights 2^(logit - top), their sum and their products with the values, for each feature.

    The top need not be the largest logit, it only keeps the sums from overflow and underflow. That of the first few
    keys serves nearly always: a weight is then at least 1, and what is lost beside it is below rounding. Where a
    chunk has weights beyond ``MOST_WEIGHT``, the top moves up and what was summed before shrinks.
    """

    def __init__(self, S: Tensor, kv_heads: int) -> None:
        """Begin with no key.

        Args:
            S: Memory for the result, (H, 1, M, D), contiguous.
            kv_heads: H_kv. The features of all heads of a group are features of one.
        """
        self.S = S.view(kv_heads, 1, -1, S.shape[-1])
        self.top: Tensor | None = None
        self.total = S.new_zeros(kv_heads, 1, 1, self.S.shape[2])

    def add_(self, logits: Callable[[Tensor | None], Tensor], values: Tensor) -> None:
        """Add the keys of a chunk.

        Args:
            logits: Computes their logits in bits, (H_kv, 1, tokens, features of a group), minus a number for each
                feature, (H_kv, 1, 1, features of a group), or None for 0; anew whenever it is called.
            values: (H_kv, 1, tokens, D).
        """
        weights, begins = logits(self.top), self.top is None
        if self.top is None:
            # from -inf there is no way up; from there all is
            self.top = weights[:, :, :FEW_KEYS].amax(2, keepdim=True).clamp_(min=torch.finfo(weights.dtype).min / 4)
            weights -= self.top
        total = weights.exp2_().sum(2, keepdim=True)
        if bool(total.amax() > MOST_WEIGHT):
            weights = logits(None)
            top = torch.maximum(self.top, weights.amax(2, keepdim=True))
            shrink = torch.exp2(self.top - top)
            self.total *= shrink
            if not begins:
                self.S *= shrink.mT
            self.top = top
            total = weights.sub_(top).exp2_().sum(2, keepdim=True)
        self.total += total
        add_product_(self.S, weights.mT, values, beta=0 if begins else 1)

    def finish_(self, z: Tensor) -> None:
        """Divide by the sum, and write its logarithm.

        Args:
            z: Where to, (H, 1, M), nats.
        """
        if self.top is None:
            return
        torch.add(self.top, self.total.log2(), out=z.view(self.total.shape)).div_(LOG2_E)
        self.S.div_(self.total.clamp_(min=torch.finfo(self.S.dtype).tiny).mT)
