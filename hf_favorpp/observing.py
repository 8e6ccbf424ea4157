"""A pass of a model on data: which part of it, by softmax or by features, and who watches the layers."""

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from hf_favorpp.nn import FavorppFeatures, Probe

TOWERS = {"pixel_values": "vision_model", "input_ids": "text_model"}
"""What a model of images and texts, such as CLIP, calls the models that it is made of, by what each of them takes."""


def has_towers(model: nn.Module) -> bool:
    """Return whether a model has a model of images and one of texts side by side, of which each runs alone."""
    return all(hasattr(model, name) for name in TOWERS.values())


def tower_for(model: nn.Module, batch: Mapping[str, Any]) -> nn.Module:
    """Return what of a model a batch is for.

    Args:
        model: Any model.
        batch: Inputs of all of it, or of one of its towers.

    Returns:
        The tower; the model where it has none, or the batch is for both.
    """
    given = [tower for name, tower in TOWERS.items() if name in batch]
    if len(given) == 1 and has_towers(model):
        tower: nn.Module = getattr(model, given[0])
        return tower
    return model


@contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Switch to eval mode without gradients for a while, and give every module its own mode back.

    Args:
        model: Any module.

    Yields:
        Nothing.
    """
    with _in_eval_mode(module for module in model.modules() if module.training), torch.no_grad():
        yield


@contextmanager
def undisturbed(model: nn.Module) -> Generator[None]:
    """Switch off for a while what is random in training or makes rows depend on each other, and keep gradients.

    That is eval mode: no dropout, no masks over time, no block skipped, and the running statistics of batch norms.
    Converted layers keep their mode, in which they watch what ``FavorppConfig.recalibrate`` needs.

    Args:
        model: Any module, converted or not.

    Yields:
        Nothing.
    """
    with _in_eval_mode(
        module for module in model.modules() if module.training and not isinstance(module, FavorppFeatures)
    ):
        yield


@contextmanager
def _in_eval_mode(training: Iterable[nn.Module]) -> Generator[None]:
    training = list(training)
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def observing(layers: list[FavorppFeatures], probes: list[Probe] | None = None, *, exact: bool) -> Generator[None]:
    """Let converted layers attend exactly, or be watched, for a while.

    Args:
        layers: The converted layers.
        probes: One per layer, which sees its calls; None for none.
        exact: Whether the layers attend by softmax meanwhile, as before the conversion.

    Yields:
        Nothing.
    """
    before = [(layer.exact, layer.probe) for layer in layers]
    try:
        for index, layer in enumerate(layers):
            layer.exact, layer.probe = exact, None if probes is None else probes[index]
        yield
    finally:
        for layer, (was_exact, probe) in zip(layers, before, strict=True):
            layer.exact, layer.probe = was_exact, probe
