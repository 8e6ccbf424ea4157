"""The attention as a function of the Kernel Hub: ``attn_implementation="owner/repo:favorpp"``.

It needs no conversion and no installed package: it gives any model that calls the attention interface of Transformers
the features that ``convert_to_favorpp`` would give it, drawn from ``config.favorpp`` or the default options. Only the
attention, what it stands on, and this file are in such a repository, see
:func:`hf_favorpp.hub.kernel_repository.write_kernel_repository`.
"""

import weakref
from typing import Any

from torch import Tensor, nn

from hf_favorpp.config import FavorppConfig
from hf_favorpp.errors import ConversionError, InputError, UnsupportedModelError
from hf_favorpp.nn import FavorppFeatures

_drawn: weakref.WeakKeyDictionary[nn.Module, FavorppFeatures] = weakref.WeakKeyDictionary()


def favorpp(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend through random features, as the attention interface of Transformers asks.

    Args:
        module: The attention module. Where the installed package converted it, its submodule ``favorpp`` attends.
            Otherwise features are drawn once, from the seed and ``module.layer_idx``, with the options in
            ``module.config.favorpp``.
        query: (B, H, Lq, d).
        key: (B, H_kv, Lk, d).
        value: (B, H_kv, Lk, d).
        attention_mask: (B, Lk), 1 or True = real, or None.
        dropout: Ignored: there is no attention matrix to drop entries from.
        scaling: Factor of the logits; None means d^-1/2.
        **kwargs: ``cu_seq_lens_q`` and ``max_length_q`` describe packed sequences in a batch of one.

    Returns:
        (B, Lq, H, d) and None in place of attention weights, which are never formed.

    Raises:
        ConversionError: The checkpoint carries features that this function does not see.
        InputError: The mask depends on the query.
        UnsupportedModelError: The attention is causal, may be so, or adds to its logits.
    """
    del dropout
    _refuse_what_is_not_linear(module, kwargs)
    if attention_mask is not None and attention_mask.ndim != 2:
        raise InputError(
            f"attention_mask must be (batch, length), got {tuple(attention_mask.shape)}: a mask that depends on query "
            f"and key has no linear form. Use attn_implementation='sdpa' for it."
        )
    cu_seqlens = kwargs.get("cu_seq_lens_q")
    mask = None if attention_mask is None or cu_seqlens is not None else attention_mask.bool()
    features = getattr(module, "favorpp", None)
    if features is None:
        features = _features_of(module, query)
    query, key = query.to(value.dtype), key.to(value.dtype)
    packing = {"cu_seqlens": cu_seqlens, "max_seqlen": kwargs.get("max_length_q")}
    out: Tensor = features(query, key, value, mask, scaling, **packing)
    return out.transpose(1, 2), None


def _features_of(module: nn.Module, query: Tensor) -> FavorppFeatures:
    """Return the features of a module, drawn at its first call."""
    features = _drawn.get(module)
    if features is None or features.omega.device != query.device:
        config = _options_of(module)
        features = FavorppFeatures(config, int(getattr(module, "layer_idx", None) or 0), *query.shape[1::2])
        features.redraw_(0)
        _drawn[module] = features = features.to(query.device)
    return features


def _options_of(module: nn.Module) -> FavorppConfig:
    """Return the options, unless the features that belong to them are elsewhere."""
    options = getattr(getattr(module, "config", None), "favorpp", None)
    config = FavorppConfig() if options is None else FavorppConfig.from_dict(options)
    reasons = {
        "statistics='calibrated'": config.statistics == "calibrated",
        "redraw": config.redraw is not None,
        "learnable='projections'": config.learnable is not None,
        "layers": config.layers is not None,
        "a two-dimensional exact_window": isinstance(config.exact_window, tuple),
    }
    for name, found in reasons.items():
        if found:
            raise ConversionError(
                f"config.favorpp has {name}: its features are part of the converted model, which this kernel does not "
                f"build. Install hf-favorpp, import it, and load with attn_implementation='favorpp'."
            )
    return config


def _refuse_what_is_not_linear(module: nn.Module, kwargs: dict[str, Any]) -> None:
    is_causal = kwargs.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)  # as SDPA in Transformers takes it
    if is_causal:
        raise UnsupportedModelError(
            f"{type(module).__name__} asks for causal attention, or does not say that it is not; only encoders can "
            f"use this kernel. Use attn_implementation='sdpa' for it."
        )
    for name in ("position_bias", "softcap", "sliding_window"):
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} asks for {name}, which changes every logit and has no linear form. Use "
                f"attn_implementation='sdpa' for it."
            )
