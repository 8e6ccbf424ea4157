"""Images of another size than a Vision Transformer was trained on."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from uptraining import ModelError

POSITIONS = ("position_embeddings", "position_embedding.weight", "position_embedding")


def at_image_size(model: PreTrainedModel, size: int) -> PreTrainedModel:
    """Return the model for square images of ``size`` pixels, its position embeddings interpolated once.

    The interpolation is the model's own (``interpolate_pos_encoding``). It is done here instead of in every forward,
    so that the embeddings are trained at the new size, and the saved model takes such images as it is.

    Args:
        model: A Vision Transformer of Transformers.
        size: Of a side, pixels.

    Returns:
        The model itself, where it is of that size or interpolates in every forward by itself, else a new one.

    Raises:
        ModelError: If the size is not a whole number of patches, or the model cannot be interpolated.
    """
    config = model.config
    own = getattr(config, "image_size", None)
    if own is None or _square(own) == size:
        return model
    patch = _square(getattr(config, "patch_size", 1))
    if patch is not None and size % patch:
        near = [number * patch for number in (size // patch, size // patch + 1) if number]
        raise ModelError(
            f"--image_size must be a multiple of the model's patches of {patch} pixels, got {size}. "
            f"Choose {' or '.join(map(str, near))}."
        )
    name, embeddings = _interpolating(model, size)
    if "interpolate_pos_encoding" not in inspect.signature(model.forward).parameters:
        return model  # DINOv2 interpolates in every forward
    resized_config = copy.deepcopy(config)
    resized_config.image_size = size
    with torch.random.fork_rng(devices=[]):
        resized = type(model)._from_config(resized_config, dtype=model.dtype)
    state, wanted = model.state_dict(), resized.state_dict()
    position = next(f"{name}.{key}" for key in POSITIONS if f"{name}.{key}" in state)
    state[position] = _interpolated(embeddings, state[position], wanted[position], size, patch or 1)
    other = [key for key, tensor in wanted.items() if key not in state or state[key].shape != tensor.shape]
    if other:
        raise ModelError(
            f"--image_size {size} does not fit {type(model).__name__}: the shapes of {other[:3]} depend on the image "
            f"size too. Use its own size, {own}."
        )
    resized.load_state_dict(state)
    return resized


def _square(size: Any) -> int | None:
    """Return the side of a square; None where it is none."""
    if isinstance(size, int):
        return size
    height, width = size
    return height if height == width else None


def _interpolating(model: PreTrainedModel, size: int) -> tuple[str, nn.Module]:
    """Return the embeddings that can interpolate, with their name."""
    for name, module in model.named_modules():
        has_positions = any(getattr(module, key.partition(".")[0], None) is not None for key in POSITIONS)
        if hasattr(module, "interpolate_pos_encoding") and has_positions:
            return name, module
    raise ModelError(
        f"--image_size {size} is not the {model.config.image_size} pixels of {type(model).__name__}, which cannot "
        f"interpolate its position embeddings. Leave out --image_size, or choose a ViT, DeiT or DINOv2."
    )


@torch.no_grad()
def _interpolated(embeddings: Any, old: Tensor, wanted: Tensor, size: int, patch: int) -> Tensor:
    """Let the model interpolate its own position embeddings."""
    rows = old.shape[-2]
    special = rows - int(rows**0.5) ** 2  # class and distillation tokens
    tokens = old.new_zeros(1, (size // patch) ** 2 + special, old.shape[-1])
    result: Tensor = embeddings.interpolate_pos_encoding(tokens, size, size)
    return result.reshape(wanted.shape)
