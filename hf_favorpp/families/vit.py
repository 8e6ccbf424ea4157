"""The Vision Transformer: one class token, then patches row by row."""

import math
from collections.abc import Sequence
from typing import Any

from hf_favorpp.attention.tiles import Grid
from hf_favorpp.errors import InputError
from hf_favorpp.families.family import Family, geometry

CLASS_TOKENS = 1


def patch_grid(attention: Any, length: int) -> Grid:
    """Return how the tokens of an image lie: as the configuration has it, else in a square.

    Args:
        attention: The attention module, whose ``config`` has ``image_size`` and ``patch_size``.
        length: Number of tokens, the class token included.

    Returns:
        The grid.

    Raises:
        InputError: The image is neither of the configured shape nor square.
    """
    patches = length - CLASS_TOKENS
    height, width = _pair(attention.config.image_size)
    patch_height, patch_width = _pair(attention.config.patch_size)
    rows, columns = height // patch_height, width // patch_width
    if rows * columns != patches:
        rows = columns = math.isqrt(patches)
    if rows * columns != patches:
        raise InputError(
            f"a two-dimensional exact_window needs the configured image shape or a square, got {patches} patches; set "
            f"config.image_size to the (height, width) of the images, or give exact_window a number of tokens."
        )
    return Grid(CLASS_TOKENS, rows, columns)


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


VIT = Family(
    model_types=("vit",),
    attention_classes=("ViTAttention",),
    geometry=geometry("config.num_attention_heads", "head_dim"),
    dropout_option="attention_probs_dropout_prob",
    grid=patch_grid,
)
