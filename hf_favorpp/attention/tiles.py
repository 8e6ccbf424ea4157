"""Two-dimensional neighbourhoods: patches in the order of tiles, so that a block of tokens is a tile of the image.

The special tokens are no patches. All patches see them exactly, and they see everything exactly: they are few, so that
this is linear in length too, and what is classified in the end is what the class token sees.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


class Grid(NamedTuple):
    """How the tokens of an image are laid out: special tokens first, then the patches, row by row.

    Attributes:
        prefix: Class, distillation and register tokens.
        rows: Rows of patches.
        columns: Columns of patches.
    """

    prefix: int
    rows: int
    columns: int


def tile_neighbourhood(grid: Grid, tile: tuple[int, int], device: torch.device) -> tuple[Tensor, int, tuple[int, int]]:
    """Return the neighbourhood of a tile in one dimension.

    Args:
        grid: The layout of the tokens.
        tile: Rows and columns of patches in a tile at most.
        device: Of the order.

    Returns:
        The order to bring the tokens into, (L,) int64, the tokens per block, and how many first and last ones of that
        order all others see: the special tokens.
    """
    return tile_order(grid, tile, device), tile_size(grid, tile), (0, grid.prefix)


def tile_order(grid: Grid, tile: tuple[int, int], device: torch.device) -> Tensor:
    """Return the order of tokens in which every run of :func:`tile_size` patches is about one tile of the image.

    Where tiles of that size do not divide the image, as few as can cover it are made about equally large. Where those
    differ by a row or a column a run reaches into the next one: they follow each other like a snake, so that it is a
    neighbour. The special tokens come last, out of the way of the tiles.

    Args:
        grid: The layout of the tokens.
        tile: Rows and columns of patches in a tile.
        device: Of the result.

    Returns:
        A permutation of the tokens, (L,), int64.
    """
    row = torch.arange(grid.rows, device=device).unsqueeze(-1)
    column = torch.arange(grid.columns, device=device)
    down, across = -(-grid.rows // tile[0]), -(-grid.columns // tile[1])
    tile_row, tile_column = row * down // grid.rows, column * across // grid.columns
    snake = torch.where(tile_row % 2 == 0, tile_column, across - 1 - tile_column)
    key = (tile_row * across + snake) * grid.rows * grid.columns + row * grid.columns + column
    patches = grid.prefix + key.flatten().argsort()
    return torch.cat((patches, torch.arange(grid.prefix, device=device)))


def tile_size(grid: Grid, tile: tuple[int, int]) -> int:
    """Return the number of tokens in the largest of the about equal tiles that cover the image.

    Args:
        grid: The layout of the tokens.
        tile: Rows and columns of patches in a tile at most.

    Returns:
        Patches, ``tile[0] * tile[1]`` where the tile divides the image. A single tile holds the special tokens too.
    """
    down, across = -(-grid.rows // tile[0]), -(-grid.columns // tile[1])
    patches = -(-grid.rows // down) * -(-grid.columns // across)
    return patches + grid.prefix if down * across == 1 else patches


def attend_exactly(
    query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None, scaling: float | None = None
) -> Tensor:
    """Attend by softmax, for a few queries: work is their number times the number of keys.

    Args:
        query: (B, H, n, d).
        key: (B, H_kv, L, d), H_kv a divisor of H.
        value: (B, H_kv, L, D).
        key_mask: (B, L), bool, True = real token, or None.
        scaling: Factor of the logits; None means d^-1/2.

    Returns:
        (B, H, n, D); zeros for a sequence without any real key.
    """
    groups = query.shape[1] // key.shape[1]
    key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value)) if groups > 1 else (key, value)
    if key_mask is None:
        return scaled_dot_product_attention(query, key, value, scale=scaling)
    real = key_mask[:, None, None, :]
    value = value.masked_fill(~real.mT, 0)
    nothing = ~real.any(-1, keepdim=True)
    return scaled_dot_product_attention(query, key, value, attn_mask=real | nothing, scale=scaling)
