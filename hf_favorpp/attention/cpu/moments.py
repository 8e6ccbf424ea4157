"""Moments of the tokens of each sequence."""

import torch
from torch import Tensor

from hf_favorpp.attention.cpu.chunks import chunks, scratch, sequences


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
        origin = t[:, :64].to(dtype).mean(1, keepdim=True)  # near the mean: moments about it hardly cancel
        for chunk in chunks(0, length, length, heads * head_dim, 0):
            part = t[:, chunk.begin : chunk.end]
            moved = torch.sub(part, origin, out=scratch("moved", part.shape, dtype))
            mean[n] += moved.sum(1)
            second[n] += moved.mT @ moved if covariance else moved.square_().sum(1)
        mean[n] /= length
        second[n] /= length
        second[n] -= mean[n].unsqueeze(-1) * mean[n].unsqueeze(-2) if covariance else mean[n].square()
        mean[n] += origin.squeeze(1)
    if covariance:
        return mean, second.diagonal(dim1=-2, dim2=-1).clone(), second
    return mean, second, mean.new_empty(0)
