"""Towers of images and texts, CLIP and its relatives: one attention module for both, told apart by the model type."""

import functools
from typing import Any

from hf_favorpp.families.family import Family, biased_stays, geometry
from hf_favorpp.families.vit import patch_grid


def _causal_text_stays(attention: Any) -> str:
    return "the text model of CLIP is causal; only its image model can be converted"


def _many_grids(attention: Any, tile: tuple[int, int]) -> str:
    return "every image of a batch has a grid of its own (spatial_shapes), which attention is not told"


CLIP = Family(
    model_types=("clip", "clip_vision_model"),
    attention_classes=("CLIPAttention",),
    geometry=geometry("num_heads", "head_dim"),
    dropout_option="attention_dropout",
    grid=patch_grid,
)
CLIP_TEXT = Family(
    model_types=("clip_text_model",),
    attention_classes=("CLIPAttention",),
    geometry=geometry("num_heads", "head_dim"),
    dropout_option="attention_dropout",
    stays_softmax=_causal_text_stays,
)
SIGLIP = Family(
    model_types=("siglip", "siglip_vision_model"),
    attention_classes=("SiglipAttention",),
    geometry=geometry("num_heads", "head_dim"),
    dropout_option="attention_dropout",
    grid=functools.partial(patch_grid, class_tokens=0),
)
SIGLIP2 = Family(
    model_types=("siglip2", "siglip2_vision_model"),
    attention_classes=("Siglip2Attention",),
    geometry=geometry("num_heads", "head_dim"),
    dropout_option="attention_dropout",
    stays_softmax=biased_stays,
    no_tiles=_many_grids,
)
SIGLIP_TEXT = Family(
    model_types=("siglip_text_model", "siglip2_text_model"),
    attention_classes=("SiglipAttention", "Siglip2Attention"),
    geometry=geometry("num_heads", "head_dim"),
    dropout_option="attention_dropout",
    reads_padding=True,  # a text is summed up at the last position, padded or not
)
