"""How ``attn_implementation="favorpp"`` sits in Transformers: an attention function, a mask function, and hooks."""

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
import transformers
from packaging import version
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask
from transformers.modelcard import TrainingSummary
from transformers.trainer_callback import CallbackHandler

from hf_favorpp import pretrained
from hf_favorpp.attention.packing import pack, packing_mask, unpack
from hf_favorpp.attention.relative_positions import RelativePositions
from hf_favorpp.convert import IMPLEMENTATION
from hf_favorpp.errors import ConversionError, InputError, UnsupportedModelError
from hf_favorpp.nn import AttentionCall


def register() -> None:
    """Make ``attn_implementation="favorpp"`` known to Transformers. Calling it twice changes nothing."""
    if IMPLEMENTATION in AttentionInterface._global_mapping:
        return
    AttentionInterface.register(IMPLEMENTATION, attention_forward)
    AttentionMaskInterface.register(IMPLEMENTATION, padding_mask)
    _wrap("post_init", pretrained.post_init)
    _wrap("_initialize_weights", pretrained.initialize_weights)
    if hasattr(PreTrainedModel, "_adjust_missing_and_unexpected_keys"):  # a better message, not worth a dependency
        _wrap("_adjust_missing_and_unexpected_keys", pretrained.refuse_mismatched_keys)
    _wrap("save_pretrained", pretrained.save_pretrained)
    _wrap("_upload_modified_files", pretrained.upload_modified_files)
    _wrap("on_push_begin", pretrained.on_push_begin, CallbackHandler)
    _wrap("__init__", _wrap_trainer, CallbackHandler)
    _wrap_training_summary()
    if version.parse(transformers.__version__) < version.parse("5.4"):
        _wrap_config_from_dict()


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as the attention interface of Transformers asks; a layer without features uses SDPA.

    Args:
        module: The attention module; its submodule ``favorpp`` holds the features.
        query: (B, H, Lq, d).
        key: (B, H_kv, Lk, d).
        value: (B, H_kv, Lk, d).
        attention_mask: (B, 1, 1, Lk) bool from :func:`padding_mask`, (B, Lk) bool, a 4-D mask for layers that stay
            softmax, or None.
        dropout: Rate for layers that stay softmax; not defined for features, see ``convert_to_favorpp``.
        scaling: Factor of the logits; None means d^-1/2.
        **kwargs: ``cu_seq_lens_q`` (and ``max_length_q``) describe packed sequences in a batch of one.

    Returns:
        (B, Lq, H, d) and None in place of attention weights, which are never formed.

    Raises:
        ConversionError: The model was never converted.
        InputError: The mask depends on the query in a layer that was converted, or ``cu_seq_lens_q`` does not fit.
    """
    features = getattr(module, "favorpp", None)
    cu_seqlens, max_seqlen = kwargs.pop("cu_seq_lens_q", None), kwargs.get("max_length_q")
    positions: RelativePositions | None = None
    if isinstance(kwargs.get("position_bias"), RelativePositions):
        positions = kwargs.pop("position_bias")
    if features is None:
        _require_conversion(module)
    else:
        _refuse_logit_terms(module, kwargs)
        # under autocast, rotary embeddings leave queries and keys in float32 beside values in bfloat16
        query, key = query.to(value.dtype), key.to(value.dtype)
        if not features.exact and features.probe is None:
            mask = None if cu_seqlens is not None else _key_mask(attention_mask)
            out: Tensor = features(query, key, value, mask, scaling, positions, cu_seqlens, max_seqlen)
            return out.transpose(1, 2), None
    if cu_seqlens is not None:
        max_seqlen = int(cu_seqlens.diff().max()) if max_seqlen is None else max_seqlen
        query, key, value = (unpack(t, cu_seqlens, max_seqlen) for t in (query, key, value))
        attention_mask = packing_mask(cu_seqlens, max_seqlen)
    seen = (query, key, value, None if features is None else _key_mask(attention_mask), scaling, positions)
    if features is None or features.exact:
        if attention_mask is not None and attention_mask.ndim == 2:
            attention_mask = _softmax_mask(attention_mask, kwargs.get("sliding_window"))
        if positions is not None:
            scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
            kwargs["position_bias"] = positions.logits(query, scaling, key.shape[-2])
        out, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    else:
        out = features(*seen).transpose(1, 2)
    if features is not None and features.probe is not None:
        features.probe(AttentionCall(*seen, out.transpose(1, 2)))
    if cu_seqlens is not None:
        out = pack(out.transpose(1, 2), cu_seqlens).transpose(1, 2)
    return out, None


def padding_mask(
    *,
    mask_function: Callable[..., Any] = bidirectional_mask_function,
    attention_mask: Tensor | None = None,
    kv_length: int,
    kv_offset: int = 0,
    **kwargs: Any,
) -> Tensor | None:
    """Return the mask of real keys, (B, 1, 1, Lk) bool, so that no L x L mask is ever built.

    Masks with a pattern of their own (causal, sliding windows) are built as for SDPA: they belong to layers that
    stay softmax.

    Args:
        mask_function: The pattern.
        attention_mask: (B, L) bool, True = real, or None.
        kv_length: Lk.
        kv_offset: First key position.
        **kwargs: Passed on to ``sdpa_mask``.

    Returns:
        (B, 1, 1, Lk) bool, which other modules of a model can read like the (B, 1, L, L) of SDPA; a 4-D bool mask
        for other patterns; or None where all keys are real.

    Raises:
        InputError: ``attention_mask`` is not 2-D.
    """
    if attention_mask is not None and attention_mask.ndim != 2:
        raise InputError(
            f"attention_mask must be (batch, length), got {tuple(attention_mask.shape)}: a mask that depends on "
            f"query and key has no linear form. Use attn_implementation='sdpa' for it."
        )
    if mask_function is bidirectional_mask_function:
        if attention_mask is None:
            return None
        return attention_mask[:, None, None, kv_offset : kv_offset + kv_length].bool()
    mask: Tensor | None = sdpa_mask(
        mask_function=mask_function,
        attention_mask=attention_mask,
        kv_length=kv_length,
        kv_offset=kv_offset,
        **kwargs,
    )
    return mask


def _softmax_mask(key_mask: Tensor, window: int | None) -> Tensor:
    """Return what SDPA needs for a mask of real keys, with the window of a local layer, which counts one side."""
    mask = key_mask[:, None, None, :]
    if window is None:
        return mask
    position = torch.arange(key_mask.shape[-1], device=key_mask.device)
    return mask & ((position[:, None] - position).abs() < window)


def _require_conversion(module: nn.Module) -> None:
    if getattr(getattr(module, "config", None), "favorpp", None) is None:
        raise ConversionError(
            f"attn_implementation={IMPLEMENTATION!r} was set, but {type(module).__name__} has no features: the model "
            f"was never converted. Call convert_to_favorpp(model), which sets it, or set 'sdpa' again."
        )


def _key_mask(attention_mask: Tensor | None) -> Tensor | None:
    if attention_mask is None or attention_mask.ndim == 2:
        return attention_mask
    if attention_mask.dtype == torch.bool and attention_mask.ndim == 4 and attention_mask.shape[1:3] == (1, 1):
        return attention_mask[:, 0, 0]
    raise InputError(
        f"a converted layer takes a padding mask, (batch, length), or bool (batch, 1, 1, length); got "
        f"{attention_mask.dtype} {tuple(attention_mask.shape)}. A bias or mask that depends on query and key has no "
        f"linear form: use attn_implementation='sdpa' for it, or leave it softmax with FavorppConfig(layers=...)."
    )


def _refuse_logit_terms(module: nn.Module, kwargs: dict[str, Any]) -> None:
    for name in ("position_bias", "softcap", "sliding_window"):
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(
                f"{type(module).__name__} asks for {name}, which changes every logit and has no linear form. "
                f"Leave the layer softmax with FavorppConfig(layers=...)."
            )
    if kwargs.get("is_causal"):
        raise UnsupportedModelError(f"{type(module).__name__} asks for causal attention; encoders are converted only.")


def _wrap(name: str, hook: Callable[..., Any], owner: type = PreTrainedModel) -> None:
    original = getattr(owner, name)

    @functools.wraps(original)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        return hook(functools.partial(original, self), self, *args, **kwargs)

    setattr(owner, name, wrapped)


def _wrap_trainer(original: Callable[..., Any], handler: CallbackHandler, *args: Any, **kwargs: Any) -> None:
    """Keep learnt features from decaying, in the class that makes this handler: only then is it known to be loaded."""
    original(*args, **kwargs)
    trainer = sys.modules.get("transformers.trainer")
    method = None if trainer is None else trainer.Trainer.get_decay_parameter_names
    if trainer is not None and not hasattr(method, "__wrapped__"):
        _wrap("get_decay_parameter_names", pretrained.decay_parameter_names, trainer.Trainer)


def _wrap_training_summary() -> None:
    original: Any = TrainingSummary.__dict__["from_trainer"].__func__

    @classmethod  # type: ignore[misc]
    def from_trainer(cls: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
        return pretrained.training_summary(functools.partial(original, cls), trainer, *args, **kwargs)

    TrainingSummary.from_trainer = from_trainer  # type: ignore[method-assign, assignment]


def _wrap_config_from_dict() -> None:
    original: Any = PreTrainedConfig.__dict__["from_dict"].__func__

    @classmethod  # type: ignore[misc]
    def from_dict(cls: Any, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        return pretrained.config_from_dict(functools.partial(original, cls), config_dict, **kwargs)

    PreTrainedConfig.from_dict = from_dict  # type: ignore[method-assign, assignment]
