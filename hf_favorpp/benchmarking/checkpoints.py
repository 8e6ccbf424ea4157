"""A model of the shape of a checkpoint, to be timed with random weights: its own are not needed."""

from __future__ import annotations

from typing import Any

from transformers import CONFIG_MAPPING, MODEL_MAPPING, PreTrainedConfig

from hf_favorpp.benchmarking.models import ModelKind, random_images, random_token_ids
from hf_favorpp.errors import UnsupportedModelError

SPECIAL_PATCHES = {"vit": 1, "vit_msn": 1, "dinov2": 1, "dinov2_with_registers": 1, "deit": 2, "ijepa": 0}
"""Class and distillation tokens, by model type; registers come on top."""
MARGIN = 4
"""Positions that are no tokens, such as those of RoBERTa up to its padding."""
_NOT_OPTIONS = (
    "favorpp",
    "attn_implementation",
    "architectures",
    "dtype",
    "auto_map",
    "model_type",
    "transformers_version",
)


def kind_of_checkpoint(config: PreTrainedConfig, name: str) -> ModelKind:
    """Return what builds models like a checkpoint, at any length or image size, without dropout.

    Args:
        config: Of the checkpoint, converted or not.
        name: As it is shown.

    Returns:
        The kind.

    Raises:
        UnsupportedModelError: The model takes neither texts nor images of one size.
    """
    options = {key: value for key, value in config.to_dict().items() if key not in _NOT_OPTIONS}
    options |= {key: 0.0 for key, value in options.items() if "drop" in key and isinstance(value, float)}
    if config.model_type in SPECIAL_PATCHES:
        special = SPECIAL_PATCHES[config.model_type] + getattr(config, "num_register_tokens", 0)
        return ModelKind(
            name,
            config.model_type,
            lambda config, size: (size // config.patch_size) ** 2 + special,
            random_images,
            options,
            lambda size: {"image_size": size},
            images=True,
        )
    if config.model_type in CONFIG_MAPPING and _takes_texts(config):
        positions = options.pop("max_position_embeddings", None)
        return ModelKind(
            name,
            config.model_type,
            lambda config, size: size,
            random_token_ids,
            options,
            lambda size: {} if positions is None else {"max_position_embeddings": max(positions, size + MARGIN)},
        )
    raise UnsupportedModelError(
        f"a {config.model_type} model cannot be timed: only encoders of texts, and of images ("
        f"{', '.join(SPECIAL_PATCHES)}), are built at a given length. Time attention alone instead."
    )


def _takes_texts(config: Any) -> bool:
    model: Any = MODEL_MAPPING.get(type(config), None)
    model = model[0] if isinstance(model, list | tuple) else model
    return model is not None and model.main_input_name == "input_ids" and not hasattr(config, "vision_config")
