"""Drop path (stochastic depth) for models that have none of their own."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hf_favorpp.errors import ConfigError, ConversionError
from hf_favorpp.training.depth import encoder_layers

ATTENTION_ENDS = ("o_proj", "out_proj", "attention.output.dense")
MLP_ENDS = ("fc2", "down_proj", "mlp.w3", "output.dense")
"""What the last projection of a residual branch is called in Transformers' encoders."""


def add_drop_path(model: nn.Module, rate: float) -> None:
    """Skip each residual branch of each layer for some of the examples of a training batch, in place.

    Branches that stay are scaled by 1 / (1 - rate), so that the mean is kept. The rate grows linearly with depth from
    0 in the first layer to ``rate`` in the last. Nothing changes in eval mode, and nothing is saved.

    Args:
        model: A Transformers encoder whose layers add an attention and an MLP branch to their input.
        rate: Probability in [0, 1) that a branch of the last layer is skipped.

    Raises:
        ConfigError: If ``rate`` lies outside [0, 1).
        ConversionError: If the branches of a layer cannot be found: with both of them set to 0, a layer must return
            its input.

    Source:
        Huang et al. 2016, Deep Networks with Stochastic Depth, arXiv:1603.09382.
    """
    if not 0 <= rate < 1:
        raise ConfigError(f"the drop path rate must lie in [0, 1), got {rate}.")
    name, layers = encoder_layers(model)
    config: Any = model.config
    ends = [_branch_ends(layer, f"{name}.{index}", config.hidden_size) for index, layer in enumerate(layers)]
    for branches, own_rate in zip(ends, torch.linspace(0, rate, len(layers)).tolist(), strict=True):
        if own_rate > 0:
            for module in branches:
                module.register_forward_hook(partial(_drop, own_rate))


def _drop(rate: float, module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
    """Zero the output for a random part of the examples, (batch, ...)."""
    if not module.training:
        return output
    kept = output.new_empty(output.shape[0], *[1] * (output.ndim - 1)).bernoulli_(1 - rate)
    return output * kept.div_(1 - rate)


def _branch_ends(layer: nn.Module, name: str, hidden_size: int) -> tuple[nn.Module, nn.Module]:
    """Return the last projections of the attention and the MLP branch, after having tried them."""
    found = [
        [module for path, module in layer.named_modules() if f".{path}".endswith(tuple(f".{end}" for end in names))]
        for names in (ATTENTION_ENDS, MLP_ENDS)
    ]
    attention = found[0]
    mlp = [module for module in found[1] if module not in attention]
    if len(attention) != 1 or len(mlp) != 1 or not _are_branches(layer, (attention[0], mlp[0]), hidden_size):
        raise ConversionError(
            f"drop path cannot be added to {name} ({type(layer).__name__}): it must be the sum of its input, an "
            f"attention branch and an MLP branch, whose last projections are called {', '.join(ATTENTION_ENDS)} and "
            f"{', '.join(MLP_ENDS)}. Set the drop path rate to 0."
        )
    return attention[0], mlp[0]


@torch.no_grad()
def _are_branches(layer: nn.Module, ends: tuple[nn.Module, nn.Module], hidden_size: int) -> bool:
    """Return whether the layer is the identity when both branches are 0."""
    parameter = next(layer.parameters())
    x = torch.linspace(-1, 1, 3 * hidden_size, dtype=parameter.dtype, device=parameter.device).view(1, 3, hidden_size)
    training = layer.training
    hooks = [module.register_forward_hook(lambda module, inputs, output: output * 0) for module in ends]
    try:
        output = layer.eval()(x)
    except (TypeError, ValueError, RuntimeError, AttributeError):
        return False
    finally:
        for hook in hooks:
            hook.remove()
        layer.train(training)
    return torch.equal(output[0] if isinstance(output, tuple) else output, x)
