"""Means and second moments of tokens on a GPU."""

import torch
from torch import Tensor

from hf_favorpp.attention.triton.launch import launch
from hf_favorpp.attention.triton.moments_kernels import moments_kernel
from hf_favorpp.attention.triton.settings import (
    alignment,
    ceil_div,
    input_precision,
    matmul,
    padded,
    ranks_of_a_program,
    row_stride,
    unit_stride,
)
from hf_favorpp.attention.triton.summarise_tiles import moments_tiles


def moments(
    tokens: Tensor, order: Tensor | None, count: Tensor | None, covariance: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return means and central second moments of each sequence: :meth:`Backend.moments`."""
    tokens = unit_stride(tokens)
    heads, width = tokens.shape[1], tokens.shape[3]
    sequences, ranks = (tokens.shape[0], tokens.shape[2]) if order is None else order.shape
    chunk, rows, num_warps = moments_tiles(width)
    tiles = padded(width) // rows if covariance else 1
    piece = ranks_of_a_program(ranks, sequences * heads * tiles, chunk, tokens.device)
    pieces = max(1, ceil_div(ranks, piece))
    mean = torch.empty((sequences, heads, pieces, width), dtype=torch.float32, device=tokens.device)
    square = torch.empty_like(mean)
    product = mean.new_empty((*mean.shape, width)) if covariance else None
    launch(
        moments_kernel,
        (sequences * pieces * tiles, heads),
        num_warps,
        2,
        tokens=tokens,
        order=order if order is None else order.contiguous(),
        count=count,
        mean=mean,
        square=square,
        product=product,
        row_stride=row_stride(tokens),
        head_stride=tokens.stride(1),
        token_stride=tokens.stride(2),
        ranks=ranks,
        piece=piece,
        pieces=pieces,
        WIDTH=width,
        PADDED=padded(width),
        TOKENS=chunk,
        ROWS=rows,
        PRECISION=input_precision(torch.float32),
        ALIGNMENT=alignment(tokens),
    )
    lengths = torch.full((sequences,), ranks, device=tokens.device) if count is None else count
    return _merge(mean, square, product, lengths, piece)


def _merge(
    mean: Tensor, square: Tensor, product: Tensor | None, lengths: Tensor, piece: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Merge the pieces of each sequence, stable likewise: what lies between their means is added."""
    pieces = mean.shape[2]
    sizes = lengths.unsqueeze(-1) - piece * torch.arange(pieces, device=mean.device)
    weights = (sizes.clamp(0, piece) / lengths.clamp(min=1).unsqueeze(-1)).float()[:, None, :, None]
    total = lengths.clamp(min=1)[:, None, None]
    together = (weights * mean).sum(2)
    apart = mean - together.unsqueeze(2)
    variance = square.sum(2) / total + (weights * apart.square()).sum(2)
    if product is None:
        return together, variance, mean.new_empty(0)
    return together, variance, product.sum(2) / total.unsqueeze(-1) + matmul((weights * apart).mT, apart)
