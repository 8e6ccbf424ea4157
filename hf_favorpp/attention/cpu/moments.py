"""Moments of the tokens of each sequence."""

from functools import reduce

import torch
from torch import Tensor

from hf_favorpp.attention.cpu.chunks import chunks, scratch_like, sequences

NEAR_THE_MEAN = 64
"""Tokens whose mean is taken for a number near the mean of all."""


def moments(
    tokens: Tensor, order: Tensor | None, count: Tensor | None, covariance: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return means and central second moments of each sequence; see ``Backend.moments``."""
    dtype = torch.promote_types(tokens.dtype, torch.float32)
    rows, (heads, head_dim) = (tokens.shape[0] if order is None else order.shape[0]), tokens.shape[1::2]
    mean = tokens.new_zeros((rows, heads, head_dim), dtype=dtype)
    second = tokens.new_zeros((rows, heads, *[head_dim] * (1 + covariance)), dtype=dtype)
    for n, (t,), _ in sequences(order, count, (tokens,)):
        length = t.shape[1]
        # Moments about what is near the mean do not cancel, however far from 0 that is.
        origin = t[:, :NEAR_THE_MEAN].mean(1, keepdim=True, dtype=dtype)
        first_moments, second_moments = [], []
        for chunk in chunks(0, length, length, 2 * heads * head_dim, 0):
            part = t[:, chunk.begin : chunk.end]
            moved = torch.sub(part, origin, out=scratch_like(part, "tokens", dtype))
            first_moments.append(moved.sum(1))
            second_moments.append(moved.mT @ moved if covariance else moved.square_().sum(1))
        mean_, second_ = (reduce(torch.add, sums) / length for sums in (first_moments, second_moments))
        square = mean_.unsqueeze(-1) * mean_.unsqueeze(-2) if covariance else mean_.square()
        torch.sub(second_, square, out=second[n])
        torch.add(mean_, origin.squeeze(1), out=mean[n])
    if covariance:
        return mean, second.diagonal(dim1=-2, dim2=-1).clone(), second
    return mean, second, mean.new_empty(0)
