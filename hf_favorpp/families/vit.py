"""The Vision Transformer and the encoders that kept its attention module: special tokens, then patches row by row."""

import functools
import math
from collections.abc import Sequence
from typing import Any

from hf_favorpp.attention.tiles import Grid
from hf_favorpp.errors import InputError
from hf_favorpp.families.family import Family, geometry


def patch_grid(attention: Any, length: int, class_tokens: int = 1) -> Grid:
    """Return how the tokens of an image lie: as the configuration has it, else in a square.

    Args:
        attention: The attention module, whose ``config`` has ``image_size`` and ``patch_size``, and
            ``num_register_tokens`` where there are any.
        length: Number of tokens, the special ones included.
        class_tokens: Class and distillation tokens.

    Returns:
        The grid.

    Raises:
        InputError: The image is neither of the configured shape nor square.
    """
    prefix = class_tokens + getattr(attention.config, "num_register_tokens", 0)
    patches = length - prefix
    rows, columns = rows_and_columns(attention.config)
    if rows * columns != patches:
        rows = columns = math.isqrt(max(patches, 0))
    if rows * columns != patches:
        raise InputError(
            f"a two-dimensional exact_window needs the configured image shape or a square, got {patches} patches; set "
            f"config.image_size to the (height, width) of the images, or give exact_window a number of tokens."
        )
    return Grid(prefix, rows, columns)


def rows_and_columns(config: Any) -> tuple[int, int]:
    """Return the patches of an image of the configured size.

    Args:
        config: Has ``image_size`` and ``patch_size``, a number or (height, width) each.

    Returns:
        Rows and columns.
    """
    height, width = _pair(config.image_size)
    patch_height, patch_width = _pair(config.patch_size)
    return height // patch_height, width // patch_width


def _pair(size: int | Sequence[int]) -> tuple[int, int]:
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _spectrogram_grid(attention: Any, length: int) -> Grid:
    """Return rows of frequencies and columns of times, after a class and a distillation token; patches may overlap."""
    config = attention.config
    size, _ = _pair(config.patch_size)
    rows = (config.num_mel_bins - size) // config.frequency_stride + 1
    columns = (config.max_length - size) // config.time_stride + 1
    return Grid(2, rows, columns)


def _biased_stays(attention: Any) -> str | None:
    if not hasattr(attention, "q_proj"):
        return "this version of Transformers computes it without its attention interface; newer ones use it"
    for option in ("use_relative_position_bias", "use_shared_relative_position_bias"):
        if getattr(attention.config, option, False):
            return f"{option} adds a bias that depends on query and key to every logit, which has no linear form"
    return None


_GEOMETRY = geometry("config.num_attention_heads", "head_dim", "attention_head_size")

VIT = Family(
    model_types=("vit", "vit_msn", "dinov2", "dinov2_with_registers"),
    attention_classes=(
        *("ViTAttention", "ViTMSNAttention", "Dinov2Attention", "Dinov2WithRegistersAttention"),
        # Transformers 5.0 has it within a module of the name above
        *("ViTSelfAttention", "ViTMSNSelfAttention", "Dinov2SelfAttention", "Dinov2WithRegistersSelfAttention"),
    ),
    geometry=_GEOMETRY,
    dropout_option="attention_probs_dropout_prob",
    grid=patch_grid,
)
DEIT = Family(
    model_types=("deit",),
    attention_classes=("DeiTAttention", "DeiTSelfAttention"),
    geometry=_GEOMETRY,
    dropout_option="attention_probs_dropout_prob",
    grid=functools.partial(patch_grid, class_tokens=2),
)
IJEPA = Family(
    model_types=("ijepa",),
    attention_classes=("IJepaAttention", "IJepaSelfAttention"),
    geometry=_GEOMETRY,
    dropout_option="attention_probs_dropout_prob",
    grid=functools.partial(patch_grid, class_tokens=0),
)
BEIT = Family(
    model_types=("beit",),
    attention_classes=("BeitAttention",),
    geometry=_GEOMETRY,
    dropout_option="attention_probs_dropout_prob",
    stays_softmax=_biased_stays,
    grid=patch_grid,
)
DINOV3 = Family(
    model_types=("dinov3_vit",),
    attention_classes=("DINOv3ViTAttention",),  # turns its queries and keys by their place in the image first
    geometry=geometry("num_heads", "head_dim"),
    dropout_option="attention_dropout",
    grid=patch_grid,
)
AST = Family(
    model_types=("audio-spectrogram-transformer",),
    attention_classes=("ASTAttention", "ASTSelfAttention"),
    geometry=_GEOMETRY,
    dropout_option="attention_probs_dropout_prob",
    grid=_spectrogram_grid,
)
