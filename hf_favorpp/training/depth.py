"""Where in a model a parameter lies: embeddings at the bottom, layer by layer, the head on top."""

from __future__ import annotations

from torch import nn

from hf_favorpp.errors import ConversionError


def encoder_layers(model: nn.Module) -> tuple[str, nn.ModuleList]:
    """Find the stack of layers of a Transformers model.

    Args:
        model: Has ``config.num_hidden_layers``.

    Returns:
        Name and module of the first list of that many layers.

    Raises:
        ConversionError: There is none.
    """
    number = getattr(model.config, "num_hidden_layers", None)
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == number:
            return name, module
    raise ConversionError(
        f"{type(model).__name__} has no list of config.num_hidden_layers = {number} layers, so that nothing can be "
        f"said of the depth of its parameters. Leave out layer-wise learning rates and drop path."
    )


def parameter_depths(model: nn.Module) -> dict[str, int]:
    """Return the depth of every parameter.

    Args:
        model: As for :func:`encoder_layers`.

    Returns:
        By name: 0 for what the model defines before its layers (embeddings), i + 1 for layer i, and one more than
        the last layer for what comes after (last norm, pooler, head).
    """
    prefix, layers = encoder_layers(model)
    depths, seen = {}, False
    for name, _ in model.named_parameters():
        if name.startswith(f"{prefix}."):
            depths[name] = 1 + int(name.removeprefix(f"{prefix}.").partition(".")[0])
            seen = True
        else:
            depths[name] = len(layers) + 1 if seen else 0
    return depths
