"""Masked autoencoders: an encoder of the patches that are left, and a decoder for pre-training that stays exact."""

from typing import Any

from hf_favorpp.attention.tiles import Grid
from hf_favorpp.errors import InputError
from hf_favorpp.families.family import Family, geometry
from hf_favorpp.families.vit import rows_and_columns


def _shuffled(attention: Any, tile: tuple[int, int]) -> str:
    return "masking puts the patches into a random order, with mask_ratio=0 too"


def _video_grid(attention: Any, length: int) -> Grid:
    """Return the slices of a video one below the other: a tile of rows that divide those of a slice stays in it."""
    config = attention.config
    rows, columns = rows_and_columns(config)
    slices = config.num_frames // config.tubelet_size
    if slices * rows * columns != length:
        raise InputError(
            f"a tile of patches needs all {slices} x {rows} x {columns} patches of a video, got {length}: "
            f"those that a mask leaves have no grid. Give exact_window a number of tokens."
        )
    return Grid(0, slices * rows, columns)


def _no_video_tiles(attention: Any, tile: tuple[int, int]) -> str | None:
    rows, columns = rows_and_columns(attention.config)
    if rows % tile[0]:
        return (
            f"tiles lie within one slice of a video, so their rows must divide its {rows}; exact_window="
            f"{rows * columns} is a whole slice"
        )
    return None


VIT_MAE = Family(
    model_types=("vit_mae",),
    attention_classes=("ViTMAEAttention", "ViTMAESelfAttention"),
    geometry=geometry("config.num_attention_heads", "head_dim", "attention_head_size"),
    dropout_option="attention_probs_dropout_prob",
    optional_part="decoder",
    no_tiles=_shuffled,
)
VIDEOMAE = Family(
    model_types=("videomae",),
    attention_classes=("VideoMAESelfAttention",),
    geometry=geometry("config.num_attention_heads", "attention_head_size"),
    dropout_option="attention_probs_dropout_prob",
    optional_part="decoder",
    grid=_video_grid,
    no_tiles=_no_video_tiles,
)
