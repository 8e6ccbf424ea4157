"""Conversion in place: attach features to the attention layers of a model, and take them away again."""

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch import nn
from transformers import PreTrainedModel

from hf_favorpp.calibration import calibrate
from hf_favorpp.config import FavorppConfig
from hf_favorpp.errors import ConfigError, ConversionError, InputError, UnsupportedModelError
from hf_favorpp.families import AttentionLayer, attention_layers
from hf_favorpp.families.plan import Part, build_features, configurations, parts_left_out, parts_of, plan_conversion
from hf_favorpp.nn import FLOAT_TENSORS, FavorppFeatures, converted_layers
from hf_favorpp.report import approximation_report
from hf_favorpp.rules import WITHOUT_PROJECTIONS

IMPLEMENTATION = "favorpp"
"""Value of ``attn_implementation``."""

KEY_PATTERN = rf"(^|\.)favorpp\.(draw_index|calibration_index|{'|'.join(FLOAT_TENSORS)})$"
"""What the names of the tensors that a conversion adds to a checkpoint match."""

KEEP_FLOAT32 = tuple(f"favorpp.{name}" for name in FLOAT_TENSORS)
"""What the names of tensors that stay float32 end in."""

DEFAULT_ERROR_BUDGET = 0.5
_SUBMODULE = "favorpp"
_log = logging.getLogger(__name__)
Model = TypeVar("Model", bound=nn.Module)


def convert_to_favorpp(
    model: Model,
    config: FavorppConfig | None = None,
    *,
    calibration_data: Iterable[Mapping[str, Any]] | None = None,
    keep_softmax: str | None = None,
    error_budget: float | None = None,
) -> Model:
    """Replace softmax attention by FAVOR++, in place, keeping every weight.

    Each converted layer gets a small module ``favorpp`` with its projections, and the attention implementation of its
    configuration becomes ``"favorpp"``. Dropout of attention weights has no counterpart where no attention matrix
    exists; as in the published Performer and FAVOR++ code it is not applied in converted layers, and a warning says
    so where the rate is not 0.

    A model made of several, such as CLIP of an image and a text model, is converted part by part: those that can be,
    and a warning names the others with the reason. ``convert_to_favorpp(model.vision_model)`` converts that part
    alone. Either way each part keeps its options in its own configuration (``model.config.vision_config.favorpp``),
    and the whole is saved, loaded and reverted like any other model; so can be any part. While a softmax checkpoint
    is loaded, ``attn_implementation={"vision_config": "favorpp"}`` names the parts to convert.

    Args:
        model: A model of Transformers, of a supported family, on any device and in any dtype; of a PEFT model, the
            base model is converted.
        config: Options; None means ``FavorppConfig()``. ``layers`` counts all attention layers of ``model``.
        calibration_data: Batches to calibrate on, see :func:`hf_favorpp.calibrate`; a few hundred inputs like those
            of the task, no labels needed. They make ``statistics="calibrated"``. For CLIP and its like images alone,
            or texts alone, will do.
        keep_softmax: ``"auto"`` leaves those layers softmax whose relative output error on the first batch of
            ``calibration_data`` is larger than ``error_budget``, and a warning names them; None converts them all.
        error_budget: The largest relative error |out - exact| / |exact| of a converted layer, > 0; None means 0.5.

    Returns:
        The same model.

    Raises:
        ConfigError: ``config`` is not a FavorppConfig, ``layers`` names a layer that does not exist or cannot be
            converted, a layer cannot have the exact neighbourhood, or the other options do not go together.
        ConversionError: The model is converted already, wrapped (DDP, FSDP) or compiled, or no layer keeps to
            ``error_budget``.
        InputError: ``calibration_data`` is empty, or gives queries or keys that are not finite.
        UnsupportedModelError: The family is not supported, or no layer can be converted. The message says why.
    """
    config = FavorppConfig() if config is None else config
    if not isinstance(config, FavorppConfig):
        raise ConfigError(f"config must be a FavorppConfig, got {type(config).__name__}.")
    budget = _error_budget(keep_softmax, error_budget, calibration_data)
    base = _base_model(model)
    require_bare_model(base)
    if converted_layers(base):
        raise ConversionError(
            f"{type(base).__name__} is converted already; call revert_to_softmax(model) first to convert it anew."
        )
    layers = plan_conversion(base, config)
    parts = parts_of(base, layers)
    _require_interface(base, layers)
    built = [(layer, build_features(layer, part.options(config))) for part in parts for layer in part.layers]
    for layer, features in built:
        features.redraw_(0)
        features.replaced = layer.config._attn_implementation
    before = [_Setting(own) for part in parts for own in part.configs]
    try:
        attach(base, built)
        for part in parts:
            _use_favorpp(part, part.options(config))
        if calibration_data is not None:
            calibrate(base, calibration_data)
            if budget is not None:
                _keep_within_budget(base, parts, before, next(iter(calibration_data)), budget)
    except BaseException:
        for layer, _ in built:
            _detach(layer)
        for setting in before:
            setting.restore()
        raise
    tell_what_changed(base)
    return model


def _base_model(model: Any) -> Any:
    """Return the model of Transformers within a PEFT model; any other as it is."""
    has_adapters = isinstance(getattr(model, "peft_config", None), dict)
    return model.get_base_model() if has_adapters and hasattr(model, "get_base_model") else model


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
    model: PreTrainedModel, parts: list[Part], before: list["_Setting"], batch: Mapping[str, Any], budget: float
) -> None:
    """Give the layers beyond the budget their softmax back."""
    report = approximation_report(model, batch)
    errors = {heads[0].name: error for heads, error in zip(report.layers, report.layer_errors, strict=True)}
    if all(not error <= budget for error in errors.values()):  # NaN too
        raise ConversionError(
            f"no layer keeps to error_budget={budget}: the smallest relative output error is "
            f"{min(errors.values()):.2f}. Allow more, or use more features or a larger exact_window."
        )
    for layer in attention_layers(model):
        error = errors.get(layer.name, 0.0)
        if not error <= budget:
            _log.warning("%s stays softmax: its relative output error is %.2f.", layer.name, error)
            _detach(layer)
    for part in parts:
        kept = {layer.index: layer.features for layer in part.layers if layer.features}
        if not kept:
            for setting in before:
                if any(setting.config is own for own in part.configs):
                    setting.restore()
        elif len(kept) < len(part.layers):
            calibrated = next(iter(kept.values())).config.to_dict()
            options = FavorppConfig.from_dict({**calibrated, "layers": list(kept)})
            for features in kept.values():
                features.config = options
            _use_favorpp(part, options)


def revert_to_softmax(model: Model) -> Model:
    """Undo :func:`convert_to_favorpp`, in place, in all parts of a model or in the one that is passed.

    The state dict and, as long as the weights were not trained, the outputs are bit-identical to those before the
    conversion. A converted checkpoint that was loaded gets the default softmax implementation.

    Args:
        model: A converted model, or a PEFT model of one.

    Returns:
        The same model.

    Raises:
        ConversionError: The model is not converted, wrapped or compiled.
    """
    base = _base_model(model)
    require_bare_model(base)
    if not converted_layers(base):
        raise ConversionError(f"{type(base).__name__} is not converted; there is nothing to revert.")
    layers = list(attention_layers(base))
    default = base.get_correct_attn_implementation(None)
    implementations = {
        id(config): features.replaced or default
        for part in parts_of(base, [layer for layer in layers if layer.features])
        for config in part.configs
        if (features := part.layers[0].features)
    }
    for layer in layers:
        _detach(layer)
    configs = [*(config for _, config in configurations(base.config)), *(layer.config for layer in layers)]
    for config in configs:
        if id(config) in implementations or config._attn_implementation == IMPLEMENTATION:
            config._attn_implementation = {"": implementations.get(id(config), default)}
        for option in ("favorpp", "attn_implementation"):
            if hasattr(config, option):
                delattr(config, option)
    for submodel in (module for module in base.modules() if isinstance(module, PreTrainedModel)):
        _remove_key(submodel, "_keys_to_ignore_on_load_missing", KEY_PATTERN)
        for name in KEEP_FLOAT32:
            _remove_key(submodel, "_keep_in_fp32_modules_strict", name)
    return model


def converted_parts(model: PreTrainedModel) -> list[Part]:
    """Return the parts of a model that attend through features now.

    Args:
        model: Any model.

    Returns:
        The parts with their converted layers; none of a model that was set to another implementation.

    Raises:
        UnsupportedModelError: A converted layer has a configuration that is not in that of the model.
    """
    layers = [
        layer
        for layer in attention_layers(model)
        if layer.features and layer.config._attn_implementation == IMPLEMENTATION
    ]
    return parts_of(model, layers)


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


def tell_what_changed(model: PreTrainedModel) -> None:
    """Log what stays softmax and what is no longer applied.

    Args:
        model: The converted model.
    """
    layers = list(attention_layers(model))
    converted = [layer for layer in layers if layer.features]
    for layer in layers:
        if not layer.features and (reason := layer.left_out()):
            _log.info("%s stays softmax: %s.", layer.name, reason)
    if len(converted) < len(layers):
        _log.warning("converted %d of %d attention layers; the others stay softmax.", len(converted), len(layers))
    for name, reason in parts_left_out(model):
        _log.warning("%s stays softmax: %s.", name, reason)
    rates = {(option := layer.family.dropout_option, getattr(layer.config, option, 0.0)) for layer in converted}
    for option, rate in sorted(rates):
        if rate:
            _log.warning(
                "%s=%s is not applied in converted layers: random-feature attention has no attention matrix to drop "
                "entries from, and the published methods train without it.",
                option,
                rate,
            )
    kernel = converted_layers(model)[0].config.kernel
    if kernel in WITHOUT_PROJECTIONS:
        _log.warning("kernel=%r has %s: num_features does not apply.", kernel, WITHOUT_PROJECTIONS[kernel])


def tell_what_is_ignored(model: PreTrainedModel) -> None:
    """Log that a converted checkpoint is loaded as a softmax model, once for all models that share a configuration.

    Args:
        model: A model under construction whose configuration, or one that it is made of, asks for that.
    """
    within = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
    own = getattr(model.config, "favorpp", None) is not None
    if own and not any(KEY_PATTERN in (part._keys_to_ignore_on_load_unexpected or ()) for part in within):
        _log.warning(
            "%s was converted to FAVOR++, but attn_implementation is %r: it attends by softmax. Load it with "
            "attn_implementation=%r otherwise.",
            type(model).__name__,
            model.config._attn_implementation,
            IMPLEMENTATION,
        )


def attach(model: PreTrainedModel, built: list[tuple[AttentionLayer, FavorppFeatures]]) -> None:
    """Put features into their attention modules, and ready all modules of the model for them.

    Args:
        model: The model.
        built: Some of its layers, each with its features.
    """
    for layer in attention_layers(model):
        layer.prepare()
    for layer, features in built:
        features.train(layer.module.training)
        layer.module.add_module(_SUBMODULE, features)


def _detach(layer: AttentionLayer) -> None:
    if layer.features:
        delattr(layer.module, _SUBMODULE)


class _Setting:
    """What a configuration said before a conversion."""

    def __init__(self, config: Any) -> None:
        self.config, self.implementation = config, config._attn_implementation
        self.options = getattr(config, "favorpp", None)

    def restore(self) -> None:
        self.config._attn_implementation = {"": self.implementation}
        if self.options is not None:  # of a converted checkpoint that was loaded as the softmax model
            self.config.favorpp = self.options
        elif hasattr(self.config, "favorpp"):
            del self.config.favorpp


def _use_favorpp(part: Part, options: FavorppConfig) -> None:
    for config in part.configs:
        config._attn_implementation = {"": IMPLEMENTATION}  # and not those that it is made of
        config.favorpp = options.to_dict()


def _require_interface(model: PreTrainedModel, layers: list[AttentionLayer]) -> None:
    """Refuse a model whose class does not look up its attention by name, and whose family does not see to that."""
    models = {f"{name}." if name else "": m for name, m in model.named_modules() if isinstance(m, PreTrainedModel)}
    for layer in (layer for layer in layers if layer.family.prepare is None):
        owner = models[max((prefix for prefix in models if layer.name.startswith(prefix)), key=len)]
        if not owner._can_set_attn_implementation():
            raise UnsupportedModelError(
                f"{type(owner).__name__} does not let its attention be replaced: {layer.name} does not go through the "
                f"attention interface of Transformers. Convert another part of the model, or update Transformers."
            )


def _remove_key(model: PreTrainedModel, name: str, key: str) -> None:
    keys = getattr(model, name)
    if keys and key in keys:
        setattr(model, name, type(keys)(known for known in keys if known != key))
