"""Which layers of a model are converted, and where their options belong: decided before anything is changed."""

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hf_favorpp.config import FavorppConfig
from hf_favorpp.errors import ConfigError, UnsupportedModelError
from hf_favorpp.families.refused import REFUSED
from hf_favorpp.families.registry import AttentionLayer, attention_layers, supported_model_types
from hf_favorpp.nn import FavorppFeatures


@dataclass(frozen=True)
class Part:
    """Layers that share a configuration: all those of a model, or of one of the models that it is made of.

    Attributes:
        path: Where the configuration is, such as ``("vision_config",)``; ``()`` is ``model.config`` itself.
        config: The configuration; it holds the options of the conversion.
        layers: The layers, whose ``index`` counts the attention layers under this configuration alone.
    """

    path: tuple[str, ...]
    config: Any
    layers: tuple[AttentionLayer, ...]

    @property
    def configs(self) -> list[Any]:
        """The configuration and the copies of it that some layers read, such as those of a decoder."""
        found = {id(config): config for config in (self.config, *(layer.config for layer in self.layers))}
        return list(found.values())

    def options(self, config: FavorppConfig) -> FavorppConfig:
        """Return the options of this part.

        Args:
            config: Those of the whole model, whose ``layers`` count all attention layers.

        Returns:
            The same with the layers of this part alone; None where they were left open.
        """
        if config.layers is None:
            return config
        return FavorppConfig.from_dict({**config.to_dict(), "layers": [layer.index for layer in self.layers]})


def configurations(config: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Find the configurations that a configuration of Transformers is made of.

    Args:
        config: The configuration.
        path: Where it is.

    Yields:
        The path and the configuration, itself first.
    """
    yield path, config
    for name in config.sub_configs:
        part = getattr(config, name, None)
        if hasattr(part, "sub_configs"):
            yield from configurations(part, (*path, name))


def parts_of(model: Any, layers: Sequence[AttentionLayer]) -> list[Part]:
    """Sort layers by the configuration that they belong to.

    Args:
        model: A model of Transformers.
        layers: Some of its ``attention_layers``.

    Returns:
        The parts that have any of the layers.

    Raises:
        UnsupportedModelError: A layer has a configuration that is not in that of the model.
    """
    known = dict(configurations(model.config))
    wanted = {layer.index for layer in layers}
    count: Counter[tuple[str, ...] | None] = Counter()
    parts: dict[tuple[str, ...], list[AttentionLayer]] = {}
    for layer in attention_layers(model):
        path = _path(model, known, layer)
        if layer.index in wanted:
            if path is None:
                raise UnsupportedModelError(
                    f"{type(model).__name__} is made of several models, and {layer.name} belongs to one that has a "
                    f"configuration of its own; convert that one, such as convert_to_favorpp(model.encoder)."
                )
            parts.setdefault(path, []).append(replace(layer, index=count[path]))
        count[path] += 1
    return [Part(path, known[path], tuple(own)) for path, own in parts.items()]


def plan_conversion(
    model: Any, config: FavorppConfig, candidates: Sequence[AttentionLayer] | None = None
) -> list[AttentionLayer]:
    """Choose the layers to convert, without changing anything.

    Args:
        model: The model.
        config: Options, of which ``layers`` matters here.
        candidates: The layers that ``config.layers`` counts; None means all attention layers of the model.

    Returns:
        The layers, at least one.

    Raises:
        ConfigError: ``config.layers`` names a layer that does not exist or cannot be converted.
        UnsupportedModelError: There is no layer that could be converted.
    """
    candidates = list(attention_layers(model)) if candidates is None else candidates
    if not candidates:
        raise UnsupportedModelError(_why_unsupported(model))
    if config.layers is None:
        layers = [layer for layer in candidates if not layer.left_out()]
        if not layers:
            raise UnsupportedModelError(
                f"no layer of {type(model).__name__} can be converted: {candidates[0].name} stays softmax because "
                f"{candidates[0].left_out()}."
            )
        return layers
    for index in config.layers:
        if index >= len(candidates):
            raise ConfigError(
                f"layers names layer {index}, but {type(model).__name__} has {len(candidates)} attention layers "
                f"(0 to {len(candidates) - 1}). A module that several layers share counts once."
            )
        if reason := candidates[index].stays_softmax():
            raise ConfigError(f"layers names layer {index}, which cannot be converted: {reason}.")
    return [candidates[index] for index in config.layers]


def plan_loading(model: Any, config: FavorppConfig) -> list[AttentionLayer]:
    """Choose the layers of a model under construction that its checkpoint brings features for.

    The models that it is made of have configurations of their own and were seen to when they were built.

    Args:
        model: The model.
        config: Its options.

    Returns:
        The layers, with indices among those under ``model.config``; none for a head without attention, or a decoder
        of which the encoder is elsewhere.

    Raises:
        ConfigError: ``config.layers`` names a layer that does not exist or cannot be converted.
        UnsupportedModelError: There is no layer that could be converted.
    """
    found = list(attention_layers(model))
    known = dict(configurations(model.config))
    own = [layer for layer in found if _path(model, known, layer) == ()]
    if not own and (found or model.config.model_type in supported_model_types()):
        return []
    if model.config.is_encoder_decoder and own and all(layer.decodes for layer in own):
        # the encoder shares the configuration
        return []
    own = [replace(layer, index=index) for index, layer in enumerate(own)]
    if config.layers is not None and own and own[0].family.optional_part and not any(layer.optional for layer in own):
        layers = [index for index in config.layers if index < len(own)]  # without those of the part that is not here
        if not layers:
            return []
        config = FavorppConfig.from_dict({**config.to_dict(), "layers": layers})
    return plan_conversion(model, config, own)


def parts_left_out(model: Any) -> Iterator[tuple[str, str]]:
    """Find the models that a model is made of and of which no layer is converted.

    Args:
        model: A converted model.

    Yields:
        The name of the configuration and the reason; none where it was ``FavorppConfig.layers`` that did not name it.
    """
    known = dict(configurations(model.config))
    layers = [(layer, _path(model, known, layer)) for layer in attention_layers(model)]
    used = {id(getattr(module, "config", None)) for module in model.modules()}
    for path, config in known.items():
        own = [layer for layer, where in layers if where == path]
        if not path or id(config) not in used or any(layer.features for layer in own):
            continue
        unknown = f"model type {config.model_type!r} is not supported"
        if reason := own[0].left_out() if own else _why_refused(model, config) or unknown:
            yield ".".join(path), reason


def build_features(layer: AttentionLayer, config: FavorppConfig) -> FavorppFeatures:
    """Allocate the features of a layer, without attaching or drawing them.

    Args:
        layer: The layer.
        config: Options.

    Returns:
        The module, on the device of the layer.

    Raises:
        ConfigError: The layer cannot have the exact neighbourhood, or not without features, that is asked for.
    """
    family = layer.family
    if family.reads_padding and config.kernel == "none":
        raise ConfigError(
            f"kernel='none' serves real tokens only, but the model reads what {layer.name} makes of padding. Choose a "
            f"kernel with features, or convert the other parts of the model alone."
        )
    if isinstance(config.exact_window, tuple) and (reason := _why_no_tiles(layer, config.exact_window)):
        raise ConfigError(
            f"exact_window={config.exact_window} is a tile of patches, but {layer.name} cannot have it: {reason}. "
            f"Give a number of tokens."
        )
    num_heads, head_dim = family.geometry(layer.module)
    with torch.device(next(layer.module.parameters()).device):
        features = FavorppFeatures(config, layer.index, num_heads, head_dim)
    features.reads_padding = family.reads_padding
    if isinstance(config.exact_window, tuple) and family.grid is not None:
        features.grid = functools.partial(family.grid, layer.module)
    return features


def _why_no_tiles(layer: AttentionLayer, tile: tuple[int, int]) -> str | None:
    if layer.optional:
        return "a decoder has no image grid"
    if layer.family.no_tiles is not None:
        return layer.family.no_tiles(layer.module, tile)
    return "it has no image grid" if layer.family.grid is None else None


def _path(model: Any, known: dict[tuple[str, ...], Any], layer: AttentionLayer) -> tuple[str, ...] | None:
    """Return where the configuration of a layer is, or the one that it is a copy of; None where that is not known."""
    names = layer.name.split(".")
    around = (model.get_submodule(".".join(names[:end])) for end in range(len(names), -1, -1))
    path = next(path for module in around for path, part in known.items() if getattr(module, "config", None) is part)
    return path if type(layer.config) is type(known[path]) else None


def _why_refused(model: Any, config: Any) -> str | None:
    """Return why what has a configuration cannot be converted, or None where nothing is known of it."""
    own = [module for module in model.modules() if getattr(module, "config", None) is config]
    causal = [module.is_causal for module in own if hasattr(module, "is_causal")]
    if getattr(config, "is_decoder", False) or (causal and all(causal)):
        return REFUSED.get(config.model_type, "it is a decoder, and only bidirectional encoders are converted")
    return REFUSED.get(config.model_type)


def _why_unsupported(model: Any) -> str:
    model_type = getattr(model.config, "model_type", "")
    supported = ", ".join(supported_model_types())
    if reason := _why_refused(model, model.config):
        return f"{model_type} cannot be converted: {reason}. Convertible model types: {supported}."
    return (
        f"{type(model).__name__} (model_type {model_type!r}) is not supported, so no layer was converted. "
        f"Convertible model types: {supported}."
    )
