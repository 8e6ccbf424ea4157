"""AdamW's parameter groups: what decays, and how fast each layer learns."""

from __future__ import annotations

from typing import Any

from torch import nn

from hf_favorpp.nn import learnable_parameters
from hf_favorpp.training.depth import parameter_depths


def parameter_groups(
    model: nn.Module,
    learning_rate: float,
    weight_decay: float,
    *,
    feature_learning_rate: float | None = None,
    layer_decay: float | None = None,
    no_decay: tuple[str, ...] = (),
) -> list[dict[str, Any]]:
    """Split the trainable parameters; biases and norms, which have one dimension, and features do not decay.

    Args:
        model: Frozen parameters are left out.
        learning_rate: Of the head, and of everything without ``layer_decay``.
        weight_decay: Of matrices and kernels.
        feature_learning_rate: Of learnable projections, whatever ``layer_decay`` says: they live where queries and
            keys have about unit scale, and take far higher rates than weights. None is that of other parameters.
        layer_decay: Factor between the learning rates of neighbouring layers, in (0, 1]: with L layers the embeddings
            learn with ``layer_decay**(L + 1)``, layer i with ``layer_decay**(L - i)`` and the head with 1 times the
            learning rate. None is one rate for all.
        no_decay: Further parameters that do not decay, by the last part of their names.

    Returns:
        Groups for the optimizer, each with ``lr`` and ``weight_decay``; the first is never empty.

    Source:
        Bao et al. 2021, BEiT, arXiv:2106.08254; He et al. 2021, MAE, arXiv:2111.06377, appendix A.1.
    """
    depths = {} if layer_decay is None else parameter_depths(model)
    top = max(depths.values(), default=0)
    features = learnable_parameters(model)
    groups: dict[tuple[int, bool, bool], dict[str, Any]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            is_feature = id(parameter) in features
            decays = parameter.ndim > 1 and name.rpartition(".")[2] not in no_decay and not is_feature
            depth = depths.get(name, 0)
            rate = learning_rate * (layer_decay or 1.0) ** (top - depth)
            if is_feature and feature_learning_rate is not None:
                rate = feature_learning_rate
            options = {"params": [], "lr": rate, "weight_decay": weight_decay if decays else 0.0}
            groups.setdefault((depth, not decays, is_feature), options)["params"].append(parameter)
    return [groups[key] for key in sorted(groups)]
