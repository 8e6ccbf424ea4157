"""The tiles of the kernels of the second step, from a table: results never depend on a timing."""

from typing import NamedTuple

import torch

from hf_favorpp.attention.triton.settings import INTERPRETED, padded


class AttendTiles(NamedTuple):
    """Shape of the work of one program.

    Attributes:
        tokens: Queries in a tile, a power of two, at least 16.
        features: Features in a tile, or single keys, likewise.
        chunk: Rows and columns of the root R that are multiplied at once, likewise.
        num_warps: Warps of a program.
        num_stages: Stages of the software pipeline of loads.
    """

    tokens: int
    features: int
    chunk: int
    num_warps: int
    num_stages: int


_T = AttendTiles
_TILES = {
    # By kernel and whether tokens are of half precision: for vectors of up to 64, up to 128 and up to 256 numbers.
    ("attend", True): (_T(128, 64, 64, 8, 2), _T(128, 32, 32, 8, 2), _T(64, 32, 32, 8, 2)),
    ("attend", False): (_T(32, 32, 32, 8, 2), _T(32, 32, 32, 8, 2), _T(16, 16, 16, 8, 1)),
    ("query_gradient", True): (_T(128, 64, 64, 8, 2), _T(64, 64, 32, 8, 2), _T(32, 32, 32, 8, 1)),
    ("query_gradient", False): (_T(32, 32, 32, 8, 2), _T(16, 32, 32, 8, 1), _T(16, 16, 16, 8, 1)),
    ("landmark_gradient", True): (_T(32, 64, 16, 4, 3), _T(16, 64, 16, 8, 2), _T(32, 16, 16, 8, 2)),
    ("landmark_gradient", False): (_T(32, 16, 16, 4, 1), _T(32, 16, 16, 8, 1), _T(32, 16, 16, 8, 1)),
    ("key_gradient", True): (_T(32, 64, 16, 4, 3), _T(32, 64, 16, 8, 2), _T(32, 32, 16, 8, 1)),
    ("key_gradient", False): (_T(32, 32, 16, 8, 2), _T(16, 16, 16, 8, 1), _T(16, 16, 16, 8, 1)),
}
"""Chosen so that nothing spills with vectors of 64 numbers in half precision on sm_80 and sm_90, and 40 bytes at most
elsewhere, but for float32 vectors of more than 128 numbers (recipes/results/kernels)."""


def attend_tiles(kernel: str, dtype: torch.dtype, width: int, block: int) -> AttendTiles:
    """Choose the tiles of a kernel.

    Args:
        kernel: ``"attend"``, ``"query_gradient"``, ``"landmark_gradient"`` or ``"key_gradient"``, of which the last
            has keys in the place of features.
        dtype: Of the tokens.
        width: The greater one of d and D.
        block: Ranks per block, 0 for a single block.

    Returns:
        Tiles of queries and keys that reach no further than a block.
    """
    if INTERPRETED:
        return AttendTiles(16, 16, 16, 4, 1)  # the smallest, so that small tests run through several
    half = dtype != torch.float32
    tiles = _TILES[kernel, half][0 if width <= 64 else 1 if width <= 128 else 2]
    reach = padded(block) if block else tiles.tokens + tiles.features
    tokens, features = min(tiles.tokens, reach), tiles.features
    if kernel == "landmark_gradient":
        return tiles._replace(tokens=tokens)
    if kernel == "key_gradient":
        rows, table_rows, features = min(features, reach), features, min(features, reach)
    else:
        rows, table_rows = tokens, tiles.tokens
        if rows <= 32:  # many small programs, whose features must not take all of the shared memory
            features = min(features, 32)
    # Fewer rows than in the table are work for fewer warps, down to two for 16 rows that are narrow.
    least = min(4, rows // 8 if half and width <= 64 else rows // 4)
    num_warps = min(tiles.num_warps, max(least, tiles.num_warps * rows // table_rows))
    return tiles._replace(tokens=tokens, features=features, num_warps=num_warps)
