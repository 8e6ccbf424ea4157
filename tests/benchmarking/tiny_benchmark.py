"""Tiny contestants for benchmark.py: seconds, not minutes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hf_favorpp.benchmarking.lineup import Shape
from hf_favorpp.benchmarking.models import MODELS

CPU = torch.device("cpu")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
_CONFORMER = {
    **SIZES,
    "feature_projection_input_dim": 12,
    "conv_depthwise_kernel_size": 5,
    "left_max_position_embeddings": 4,
    "right_max_position_embeddings": 2,
    "initializer_range": 0.1,
}
TINY_OPTIONS = {
    "bert": {**SIZES, "vocab_size": 50, "initializer_range": 0.2},
    **{name: {**SIZES, "patch_size": 8, "initializer_range": 0.2} for name in ("vit", "vit-small")},
    "wav2vec2": {
        **SIZES,
        "conv_dim": (16, 16),
        "conv_kernel": (10, 3),
        "conv_stride": (5, 2),
        "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 8,
        "num_conv_pos_embedding_groups": 4,
        "initializer_range": 0.2,
    },
    **{f"conformer-{positions}": _CONFORMER for positions in ("rotary", "relative", "relative-key")},
}


def tiny_kind(name: str):
    """Return a model kind whose model is tiny; everything else is as it is."""
    kind = MODELS[name]
    return dataclasses.replace(kind, options={**kind.options, **TINY_OPTIONS[name]})


def make_models_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the program build tiny models."""
    for name in TINY_OPTIONS:
        monkeypatch.setitem(MODELS, name, tiny_kind(name))


def tiny_shape(
    dtype: torch.dtype = torch.float32, batch_size: int = 2, num_heads: int = 3, head_dim: int = 16
) -> Shape:
    """Return the shape of tiny inputs on the CPU."""
    return Shape(batch_size, num_heads, head_dim, dtype, CPU)
