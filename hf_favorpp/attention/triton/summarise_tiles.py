"""How much of its work one program of the first step does at a time, and with how many warps."""

from typing import NamedTuple

import torch
from torch import Tensor

from hf_favorpp.attention.triton.settings import INTERPRETED, capability, padded


class SummariseTiles(NamedTuple):
    """Shape of the work of one program over keys.

    Attributes:
        tokens: Keys in a tile, a power of two, at least 16.
        features: Features in a tile, likewise.
        chunk: Columns of keys and rows of R^T R that are multiplied at once, likewise.
        num_warps: Warps of a program.
        num_stages: Stages of the software pipeline of loads.
    """

    tokens: int
    features: int
    chunk: int
    num_warps: int
    num_stages: int


_T = SummariseTiles
_TILES = {
    ("summarise", "half", 64): _T(64, 128, 64, 8, 3),
    ("summarise", "half", 128): _T(64, 128, 64, 8, 2),
    ("summarise", "half", 256): _T(64, 32, 64, 4, 2),
    ("summarise", "float32", 64): _T(32, 32, 64, 4, 2),
    ("summarise", "float32", 128): _T(32, 32, 64, 8, 2),
    ("summarise", "float32", 256): _T(16, 16, 64, 8, 1),
    ("key_gradient", "half", 64): _T(64, 32, 32, 4, 3),
    ("key_gradient", "half", 128): _T(64, 32, 32, 8, 2),
    ("key_gradient", "half", 256): _T(32, 32, 32, 8, 2),
    ("key_gradient", "float32", 64): _T(32, 16, 16, 4, 2),
    ("key_gradient", "float32", 128): _T(16, 32, 16, 8, 2),
    ("key_gradient", "float32", 256): _T(16, 16, 16, 8, 1),
    ("projection_gradient", "half", 64): _T(64, 64, 64, 4, 3),
    ("projection_gradient", "half", 128): _T(64, 64, 64, 8, 2),
    ("projection_gradient", "half", 256): _T(32, 32, 64, 4, 2),
    ("projection_gradient", "float32", 64): _T(32, 32, 64, 8, 2),
    ("projection_gradient", "float32", 128): _T(16, 16, 64, 4, 2),
    ("projection_gradient", "float32", 256): _T(16, 16, 64, 8, 1),
}
"""By kernel, dtype and the widest head, up to 64, 128 and 256. ``recipes/kernel_report.py`` shows what they take: no
registers spill but with float32 and heads beyond 128, and the shared memory of sm_86 and sm_89, 99 KiB, suffices."""

_KEY_GRADIENT_TILES = {
    ("mma", 64): _T(64, 16, 32, 4, 3),
    ("mma", 128): _T(64, 32, 16, 8, 2),
    ("tcgen05", 128): _T(64, 32, 16, 8, 1),
}
"""Exceptions, in half precision: operands of ``mma`` take the registers that ``wgmma`` of Hopper leaves free."""


def summarise_tiles(kernel: str, key: Tensor, value: Tensor, num_features: int, block: int) -> SummariseTiles:
    """Choose the tiles of a kernel.

    Args:
        kernel: ``"summarise"``, ``"key_gradient"`` or ``"projection_gradient"``.
        key: (..., d).
        value: (..., D).
        num_features: M.
        block: Ranks per block, 0 for a single block.

    Returns:
        Tiles that reach no further than a block.
    """
    if INTERPRETED:
        return _T(16, 16, 16, 4, 1)  # the smallest, so that small tests run through several
    dtype = "float32" if key.dtype == torch.float32 else "half"
    widest = max(64, padded(key.shape[-1]), padded(value.shape[-1]))
    tiles = _TILES[kernel, dtype, widest]
    if kernel == "key_gradient" and dtype == "half":
        instruction = {9: "wgmma", 10: "tcgen05"}.get(capability(key.device), "mma")
        tiles = _KEY_GRADIENT_TILES.get((instruction, widest), tiles)
    if tiles.features == 128 and num_features <= 64:
        tiles = tiles._replace(features=64, num_warps=tiles.num_warps // 2)
    return tiles._replace(tokens=min(tiles.tokens, padded(block))) if block else tiles


def term_tiles(tokens: Tensor) -> tuple[int, int, int]:
    """Return tokens in a tile, columns of tokens and rows of R that are multiplied at once, and warps."""
    if INTERPRETED:
        return 16, 16, 4
    return 32 if tokens.dtype == torch.float32 else 64, min(64, padded(tokens.shape[-1])), 4


def moments_tiles(width: int) -> tuple[int, int, int]:
    """Return tokens in a chunk, rows of a covariance that a program owns, and its warps."""
    if INTERPRETED:
        return 16, 16, 4
    return (32, min(64, padded(width)), 4 if width <= 64 else 8) if width <= 128 else (16, 32, 8)
