"""Conversion in place: attach features to the attention layers of a model, and take them away again."""

import functools
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedModel

from hf_favorpp.calibration import calibrate
from hf_favorpp.config import FavorppConfig
from hf_favorpp.errors import ConfigError, ConversionError, InputError, UnsupportedModelError
from hf_favorpp.families import REFUSED, AttentionLayer, attention_layers, supported_model_types
from hf_favorpp.nn import FLOAT_BUFFERS, FavorppFeatures, converted_layers
from hf_favorpp.report import approximation_report

IMPLEMENTATION = "favorpp"
"""Value of ``attn_implementation``."""

KEY_PATTERN = rf"(^|\.)favorpp\.(draw_index|calibration_index|{'|'.join(FLOAT_BUFFERS)})$"
"""What the names of the tensors that a conversion adds to a checkpoint match."""

DEFAULT_ERROR_BUDGET = 0.5
_SUBMODULE = "favorpp"
_KEEP_FLOAT32 = tuple(f"favorpp.{name}" for name in FLOAT_BUFFERS)
_log = logging.getLogger(__name__)
Model = TypeVar("Model", bound=PreTrainedModel)


def convert_to_favorpp(
    model: Model,
    config: FavorppConfig | None = None,
    *,
    calibration_data: Iterable[Mapping[str, Any]] | None = None,
    keep_softmax: str | None = None,
    error_budget: float | None = None,
) -> Model:
    """Replace softmax attention by FAVOR++, in place, keeping every weight.

    Each converted layer gets a small module ``favorpp`` with its projections, and the model's attention
    implementation becomes ``"favorpp"``. Dropout of attention weights has no counterpart where no attention matrix
    exists; as in the published Performer and FAVOR++ code it is not applied in converted layers, and a warning says
    so where the rate is not 0.

    Args:
        model: A model of Transformers, of a supported family, on any device and in any dtype.
        config: Options; None means ``FavorppConfig()``.
        calibration_data: Batches to calibrate on, see :func:`hf_favorpp.calibrate`; a few hundred inputs like those
            of the task, no labels needed. They make ``statistics="calibrated"``.
        keep_softmax: ``"auto"`` leaves those layers softmax whose relative output error on the first batch of
            ``calibration_data`` is larger than ``error_budget``, and a warning names them; None converts them all.
        error_budget: The largest relative error |out - exact| / |exact| of a converted layer, > 0; None means 0.5.

    Returns:
        The same model.

    Raises:
        ConfigError: ``config`` is not a FavorppConfig, ``layers`` names a layer that does not exist or cannot be
            converted, or the other options do not go together.
        ConversionError: The model is converted already, wrapped (DDP, FSDP, PEFT) or compiled, or no layer keeps to
            ``error_budget``.
        InputError: ``calibration_data`` is empty, or gives queries or keys that are not finite.
        UnsupportedModelError: The family is not supported, or no layer can be converted. The message says why.
    """
    config = FavorppConfig() if config is None else config
    if not isinstance(config, FavorppConfig):
        raise ConfigError(f"config must be a FavorppConfig, got {type(config).__name__}.")
    budget = _error_budget(keep_softmax, error_budget, calibration_data)
    require_bare_model(model)
    if converted_layers(model):
        raise ConversionError(
            f"{type(model).__name__} is converted already; call revert_to_softmax(model) first to convert it anew."
        )
    layers = plan_conversion(model, config)
    if any(getattr(layer.module, "config", None) is not model.config for layer in layers):
        raise UnsupportedModelError(
            f"{type(model).__name__} is made of several models, and {layers[0].name} belongs to one that has a "
            f"configuration of its own; convert that one, such as convert_to_favorpp(model.encoder)."
        )
    features = {layer.index: _features(layer, config) for layer in layers}
    for layer in layers:
        features[layer.index].redraw_(0)
    previous, options = model.config._attn_implementation, getattr(model.config, "favorpp", None)
    _attach(layers, features, previous)
    try:
        model.set_attn_implementation(IMPLEMENTATION)
        if model.config._attn_implementation != IMPLEMENTATION:
            raise UnsupportedModelError(
                f"{type(model).__name__} does not let its attention be replaced: {layers[0].name} kept its own "
                f"implementation. Convert the sub-model that owns it instead."
            )
        model.config.favorpp = config.to_dict()
        if calibration_data is not None:
            calibrate(model, calibration_data)
            if budget is not None:
                layers = _keep_within_budget(model, layers, next(iter(calibration_data)), budget)
    except BaseException:
        _detach(model, previous)
        _forget_options(model)
        if options is not None:  # of a converted checkpoint that was loaded as the softmax model
            model.config.favorpp = options
        raise
    tell_what_changed(model, layers)
    return model


def _error_budget(keep_softmax: str | None, error_budget: float | None, data: object) -> float | None:
    """Return the budget, or None where every layer is to be converted."""
    if keep_softmax not in (None, "auto"):
        raise ConfigError(
            f"keep_softmax must be 'auto' or None, got {keep_softmax!r}; FavorppConfig.layers names those to convert."
        )
    if keep_softmax is None:
        if error_budget is not None:
            raise ConfigError(f"error_budget={error_budget!r} needs keep_softmax='auto'.")
        return None
    if data is None:
        raise ConfigError("keep_softmax='auto' needs calibration_data to measure the layers on.")
    if isinstance(data, Iterator):
        raise InputError(
            "keep_softmax='auto' reads calibration_data twice: pass a DataLoader or a list, not an iterator."
        )
    budget = DEFAULT_ERROR_BUDGET if error_budget is None else error_budget
    if isinstance(budget, bool) or not isinstance(budget, int | float) or not budget > 0:
        raise ConfigError(f"error_budget must be a positive number, got {error_budget!r}.")
    return float(budget)


def _keep_within_budget(
    model: PreTrainedModel, layers: list[AttentionLayer], batch: Mapping[str, Any], budget: float
) -> list[AttentionLayer]:
    """Give the layers beyond the budget their softmax back."""
    errors = approximation_report(model, batch).layer_errors
    kept = [layer for layer, error in zip(layers, errors, strict=True) if error <= budget]
    if not kept:
        raise ConversionError(
            f"no layer keeps to error_budget={budget}: the smallest relative output error is {min(errors):.2f}. Allow "
            f"more, or use more features or a larger exact_window."
        )
    for layer, error in zip(layers, errors, strict=True):
        if not error <= budget:  # NaN too
            _log.warning("%s stays softmax: its relative output error is %.2f.", layer.name, error)
            delattr(layer.module, _SUBMODULE)
    if len(kept) < len(layers):
        for features in converted_layers(model):
            features.config = replace(features.config, layers=tuple(layer.index for layer in kept))
        model.config.favorpp = features.config.to_dict()
    return kept


def revert_to_softmax(model: Model) -> Model:
    """Undo :func:`convert_to_favorpp`, in place.

    The state dict and, as long as the weights were not trained, the outputs are bit-identical to those before the
    conversion. A converted checkpoint that was loaded gets the default softmax implementation.

    Args:
        model: A converted model.

    Returns:
        The same model.

    Raises:
        ConversionError: The model is not converted, wrapped or compiled.
    """
    require_bare_model(model)
    features = converted_layers(model)
    if not features:
        raise ConversionError(f"{type(model).__name__} is not converted; there is nothing to revert.")
    _detach(model, features[0].replaced or model.get_correct_attn_implementation(None))
    _forget_options(model)
    return model


def prepare_for_loading(model: PreTrainedModel) -> None:
    """Attach features without drawing them to a model under construction, for its checkpoint to fill.

    Args:
        model: A model whose config asks for ``attn_implementation="favorpp"``. Its ``config.favorpp`` holds the
            options; without it the defaults apply.

    Raises:
        ConfigError: ``config.favorpp`` is not valid.
        UnsupportedModelError: The family is not supported, or no layer can be converted.
    """
    if not converted_layers(model):
        options = getattr(model.config, "favorpp", None)
        config = FavorppConfig() if options is None else FavorppConfig.from_dict(options)
        if not list(attention_layers(model)) and model.config.model_type in supported_model_types():
            return  # a part of a model, such as its head, that has no attention of its own
        layers = plan_conversion(model, config)
        _attach(layers, {layer.index: _features(layer, config) for layer in layers}, replaced=None)
        model.config.favorpp = config.to_dict()
        if options is None:
            tell_what_changed(model, layers)
    _add_key(model, "_keys_to_ignore_on_load_missing", KEY_PATTERN)
    dtype_plan: Any = getattr(model, "dtype_plan", None)
    for name in _KEEP_FLOAT32:
        _add_key(model, "_keep_in_fp32_modules_strict", name)
        if dtype_plan is not None:  # Transformers before 5.4 makes it from the class, before this line is reached
            dtype_plan[name] = torch.float32


def ignore_features(model: PreTrainedModel) -> None:
    """Let a converted checkpoint be loaded as the softmax model, without a report of unexpected tensors.

    Args:
        model: A model under construction whose config holds ``favorpp`` but asks for another implementation.
    """
    parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    if not any(KEY_PATTERN in (part._keys_to_ignore_on_load_unexpected or ()) for part in parts):
        _log.warning(
            "%s was converted to FAVOR++, but attn_implementation is %r: it attends by softmax. Load it with "
            "attn_implementation=%r otherwise.",
            type(model).__name__,
            model.config._attn_implementation,
            IMPLEMENTATION,
        )
    _add_key(model, "_keys_to_ignore_on_load_unexpected", KEY_PATTERN)


def plan_conversion(model: PreTrainedModel, config: FavorppConfig) -> list[AttentionLayer]:
    """Choose the layers to convert, without changing anything.

    Args:
        model: The model.
        config: Options, of which ``layers`` matters here.

    Returns:
        The layers, at least one.

    Raises:
        ConfigError: ``config.layers`` names a layer that does not exist or cannot be converted.
        UnsupportedModelError: There is no layer that could be converted.
    """
    candidates = list(attention_layers(model))
    if not candidates:
        raise UnsupportedModelError(_why_unsupported(model))
    reasons = {layer.index: reason for layer in candidates if (reason := layer.stays_softmax())}
    if config.layers is None:
        layers = [layer for layer in candidates if layer.index not in reasons]
        if not layers:
            raise UnsupportedModelError(
                f"no layer of {type(model).__name__} can be converted: {candidates[0].name} stays softmax because "
                f"{reasons[0]}."
            )
        return layers
    for index in config.layers:
        if index >= len(candidates):
            raise ConfigError(
                f"layers names layer {index}, but {type(model).__name__} has {len(candidates)} attention layers "
                f"(0 to {len(candidates) - 1}). A module that several layers share counts once."
            )
        if index in reasons:
            raise ConfigError(f"layers names layer {index}, which cannot be converted: {reasons[index]}.")
    return [candidates[index] for index in config.layers]


def require_bare_model(model: object) -> None:
    """Refuse whatever is not a plain model of Transformers.

    Args:
        model: What the user passed.

    Raises:
        ConversionError: The model is wrapped, compiled, or not a PreTrainedModel.
    """
    name = type(model).__name__
    if hasattr(model, "_orig_mod") or getattr(model, "_compiled_call_impl", None) is not None:
        raise ConversionError(f"{name} is compiled; convert or revert the model first, then call torch.compile.")
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel) or "FullyShardedDataParallel" in name:
        raise ConversionError(f"{name} wraps the model; convert or revert model.module before wrapping it.")
    if not isinstance(model, PreTrainedModel):
        remedy = (
            "convert its base model before get_peft_model"
            if hasattr(model, "get_base_model")
            else ("pass the model that from_pretrained returned")
        )
        raise ConversionError(f"the model must be a transformers.PreTrainedModel, got {name}; {remedy}.")


def tell_what_changed(model: PreTrainedModel, layers: list[AttentionLayer]) -> None:
    """Log what stays softmax and what is no longer applied.

    Args:
        model: The converted model.
        layers: Its converted layers.
    """
    converted = {layer.index for layer in layers}
    for layer in attention_layers(model):
        if layer.index not in converted and (reason := layer.stays_softmax()):
            _log.info("%s stays softmax: %s.", layer.name, reason)
    total = sum(1 for _ in attention_layers(model))
    if len(layers) < total:
        _log.warning("converted %d of %d attention layers; the others stay softmax.", len(layers), total)
    option = layers[0].family.dropout_option
    rate = getattr(layers[0].module.config, option, 0.0)
    if rate:
        _log.warning(
            "%s=%s is not applied in converted layers: random-feature attention has no attention matrix to drop "
            "entries from, and the published methods train without it.",
            option,
            rate,
        )
    if converted_layers(model)[0].config.kernel == "elu":
        _log.warning("kernel='elu' has head_dim features by definition: num_features does not apply.")


def _why_unsupported(model: PreTrainedModel) -> str:
    model_type = getattr(model.config, "model_type", "")
    supported = ", ".join(supported_model_types())
    if model_type in REFUSED:
        return f"{model_type} cannot be converted: {REFUSED[model_type]}. Convertible model types: {supported}."
    return (
        f"{type(model).__name__} (model_type {model_type!r}) is not supported, so no layer was converted. "
        f"Convertible model types: {supported}."
    )


def _features(layer: AttentionLayer, config: FavorppConfig) -> FavorppFeatures:
    num_heads, head_dim = layer.family.geometry(layer.module)
    device = next(layer.module.parameters()).device
    with torch.device(device):
        features = FavorppFeatures(config, layer.index, num_heads, head_dim)
    if isinstance(config.exact_window, tuple):
        if layer.family.grid is None:
            raise ConfigError(
                f"exact_window={config.exact_window} is a tile of patches, but {layer.name} has no image grid. Give a "
                f"number of tokens."
            )
        features.grid = functools.partial(layer.family.grid, layer.module)
    return features


def _attach(layers: list[AttentionLayer], features: dict[int, FavorppFeatures], replaced: str | None) -> None:
    for layer in layers:
        module = features[layer.index]
        module.replaced = replaced
        module.train(layer.module.training)
        layer.module.add_module(_SUBMODULE, module)


def _detach(model: PreTrainedModel, implementation: Any) -> None:
    for module in list(model.modules()):
        if isinstance(getattr(module, _SUBMODULE, None), FavorppFeatures):
            delattr(module, _SUBMODULE)
    model.set_attn_implementation(implementation)
    for submodel in (module for module in model.modules() if isinstance(module, PreTrainedModel)):
        _remove_key(submodel, "_keys_to_ignore_on_load_missing", KEY_PATTERN)
        for name in _KEEP_FLOAT32:
            _remove_key(submodel, "_keep_in_fp32_modules_strict", name)


def _forget_options(model: PreTrainedModel) -> None:
    for option in ("favorpp", "attn_implementation"):
        if hasattr(model.config, option):
            delattr(model.config, option)


def _add_key(model: PreTrainedModel, name: str, key: str) -> None:
    """Add to one of the sets (before Transformers 5.4: lists) that rule how a checkpoint is loaded."""
    keys = getattr(model, name) or []
    setattr(model, name, type(keys)([*keys, key]))


def _remove_key(model: PreTrainedModel, name: str, key: str) -> None:
    keys = getattr(model, name)
    if keys and key in keys:
        setattr(model, name, type(keys)(known for known in keys if known != key))
