"""SpeechT5, whose attention knows neither the interface of Transformers nor a configuration: both are given to it.

Where the configuration says ``eager``, as it does before a conversion, everything here leaves to Transformers.
"""

import copy
import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hf_favorpp.attention.relative_keys import RelativeKeys
from hf_favorpp.families.family import Family, biased_stays, causal_stays, geometry
from hf_favorpp.families.relative import attention_function, wrap

Original = Callable[..., Any]


def _embeddings(original: Original, positions: Any, hidden_states: Tensor) -> Tensor | RelativeKeys:
    """Return the embeddings of distances themselves, not those of all pairs, (L, L, d).

    Row r of the table is of the distance max_length - r from query to key.
    """
    if getattr(positions, "config", None) is None or positions.config._attn_implementation == "eager":
        pairs: Tensor = original(positions, hidden_states)
        return pairs
    rows = torch.arange(2 * positions.max_length - 1, -1, -1, device=hidden_states.device)
    return RelativeKeys(positions.pe_k(rows), positions.max_length - 1)


def _forward(original: Original, attention: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
    """Attend as ``SpeechT5Attention``, by the attention interface where the embeddings came as they are."""
    positions = kwargs.get("position_bias")
    if not isinstance(positions, RelativeKeys):
        result: tuple[Tensor, Tensor | None] = original(attention, *args, **kwargs)
        return result
    return _encode(attention, positions, *args, **kwargs)


def _encode(
    attention: Any, positions: RelativeKeys, hidden_states: Tensor, attention_mask: Tensor | None = None, **_: Any
) -> tuple[Tensor, None]:
    query, key, value = (
        torch.unflatten(linear(hidden_states), -1, (attention.num_heads, attention.head_dim)).transpose(1, 2)
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    bias: RelativeKeys | Tensor = positions
    if attention.config._attn_implementation != "favorpp":
        bias = positions.logits(query, attention.scaling, key.shape[-2])
    out, _weights = attention_function(attention)(
        attention,
        query,
        key,
        value,
        attention_mask,
        dropout=attention.dropout if attention.training else 0.0,
        scaling=attention.scaling,
        position_bias=bias,
        is_causal=False,
    )
    return attention.out_proj(out.flatten(2)), None


def _mask_of_the_decoder(original: Original, config: Any, **kwargs: Any) -> Tensor | None:
    """Make the mask that is added to logits: the decoder goes by itself."""
    if config._attn_implementation != "eager":
        config = copy.copy(config)
        config._attn_implementation = {"": "eager"}
    mask: Tensor | None = original(config=config, **kwargs)
    return mask


def _mask(
    original: Original, config: Any, encoder_hidden_states: Tensor | None = None, **kwargs: Any
) -> Tensor | None:
    """Make the mask of the encoder as its configuration says, and that of cross-attention for the decoder."""
    if encoder_hidden_states is not None:
        return _mask_of_the_decoder(original, config, encoder_hidden_states=encoder_hidden_states, **kwargs)
    mask: Tensor | None = original(config=config, **kwargs)
    return mask


def _serve(attention: nn.Module, owner: nn.Module | None) -> None:
    modeling = sys.modules[type(attention).__module__]
    positions = vars(modeling)["SpeechT5RelativePositionalEncoding"]
    wrap(modeling, "create_causal_mask", _mask_of_the_decoder)
    wrap(modeling, "create_bidirectional_mask", _mask)
    wrap(positions, "forward", _embeddings)
    wrap(type(attention), "forward", _forward)
    if owner is not None:
        for module in owner.modules():
            if isinstance(module, (positions, type(attention))):
                module.config = owner.config


def _stays_softmax(attention: nn.Module) -> str | None:
    if reason := causal_stays(attention) or biased_stays(attention):
        return reason
    sdpa = vars(sys.modules["transformers.integrations.sdpa_attention"])["sdpa_attention_forward"]
    if "position_bias" not in inspect.signature(sdpa).parameters:  # before Transformers 5.15
        return "this version of Transformers has no attention function that takes a bias of positions; newer ones have"
    return None


SPEECHT5 = Family(
    model_types=("speecht5",),
    attention_classes=("SpeechT5Attention",),
    geometry=geometry("num_heads", "head_dim"),
    dropout_option="attention_dropout",
    stays_softmax=_stays_softmax,
    prepare=_serve,
)
