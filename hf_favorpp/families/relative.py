"""Speech encoders with relative positions, which a converted layer takes as they are, not as a bias of all pairs.

Transformers computes that bias in a function of its own, or in the middle of a forward. Where the module is converted,
what is here does so in its place; any other module goes on as before.
"""

import functools
import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from hf_favorpp.attention.relative_keys import RelativeKeys
from hf_favorpp.attention.relative_positions import TransformerXL
from hf_favorpp.families.family import Family, geometry

Replacement = Callable[..., Any]


def _converted(attention: Any, *args: Any, **kwargs: Any) -> bool:
    """Return whether a module attends through features now."""
    return getattr(attention, "favorpp", None) is not None and attention.config._attn_implementation == "favorpp"


def wrap(owner: Any, name: str, hook: Callable[..., Any]) -> None:
    """Put a hook before a function of Transformers, once, where the installed version has it.

    Args:
        owner: The module or class that holds the function.
        name: Its name there.
        hook: Called in its place, with the original before the arguments.
    """
    original = getattr(owner, name, None)
    if original is None or getattr(original, "serves_favorpp", False):
        return

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    wrapped.serves_favorpp = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def _replace(owner: Any, name: str, replacement: Replacement, applies: Callable[..., bool] = _converted) -> None:
    """Let a function of Transformers do other things for the modules, its first argument, that this applies to."""

    def choose(original: Replacement, module: Any, *args: Any, **kwargs: Any) -> Any:
        return (replacement if applies(module, *args, **kwargs) else original)(module, *args, **kwargs)

    wrap(owner, name, choose)


def _weight(linear: Any, like: Tensor) -> Tensor:
    """Return the matrix of a linear layer, (outputs, inputs), with the adapters around it."""
    if type(linear) is nn.Linear:
        return linear.weight
    matrix: Tensor = linear(torch.eye(linear.in_features, dtype=like.dtype, device=like.device))
    return matrix.mT


def attention_function(attention: Any) -> Callable[..., Any]:
    """Look up the function that a module attends by, as Transformers does.

    Args:
        attention: The module, whose configuration names the function; ``eager`` is none.

    Returns:
        The function.
    """
    functions = vars(sys.modules["transformers.modeling_utils"])["ALL_ATTENTION_FUNCTIONS"]
    function: Callable[..., Any] = functions[attention.config._attn_implementation]
    return function


def _modeling(attention: nn.Module) -> ModuleType:
    return sys.modules[type(attention).__module__]


def _transformer_xl(attention: Any, query: Tensor, key: Tensor, positions: Tensor) -> tuple[Tensor, TransformerXL]:
    sinusoids = positions[0, : query.shape[-2]].flip(0)  # of distances L - 1 ... 0
    relative = TransformerXL(
        query + attention.pos_bias_v.unsqueeze(-2), _weight(attention.linear_pos, query), sinusoids
    )
    return query + attention.pos_bias_u.unsqueeze(-2), relative


def _relative_key(attention: Any, query: Tensor, key: Tensor) -> tuple[Tensor, RelativeKeys]:
    return query, RelativeKeys(attention.distance_embedding.weight, attention.left_max_position_embeddings)


def _serve_functions(attention: nn.Module, owner: nn.Module | None) -> None:
    _replace(_modeling(attention), "_apply_relative_position_encoding", _transformer_xl)
    _replace(_modeling(attention), "_apply_relative_key_position_encoding", _relative_key)


def _seamless_v2_forward(
    attention: Any, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Attend as ``SeamlessM4Tv2ConformerSelfAttention``, with the embeddings of distances left to the features."""
    query, key, value = (
        torch.unflatten(linear(hidden_states), -1, (attention.num_heads, attention.head_size)).transpose(1, 2)
        for linear in (attention.linear_q, attention.linear_k, attention.linear_v)
    )
    bias = None
    if attention.position_embeddings_type == "relative_key":
        _, bias = _relative_key(attention, query, key)
    attend = attention_function(attention)
    out, _ = attend(
        attention, query, key, value, attention_mask, scaling=attention.scaling, position_bias=bias, **kwargs
    )
    return attention.linear_out(out.flatten(2)), None


def _parakeet_forward(
    attention: Any,
    hidden_states: Tensor,
    position_embeddings: Tensor,
    attention_mask: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as ``ParakeetEncoderAttention`` does, with the positions left to the features."""
    query, key, value = (
        torch.unflatten(linear(hidden_states), -1, (-1, attention.head_dim)).transpose(1, 2)
        for linear in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    sinusoids = position_embeddings[0, : query.shape[-2]].flip(0)  # of distances L - 1 ... 0
    relative = TransformerXL(
        query + attention.bias_v.unsqueeze(-2), _weight(attention.relative_k_proj, query), sinusoids
    )
    if attention_mask is not None and attention_mask.shape[-2] != 1:  # real queries by real keys
        attention_mask = attention_mask.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
    attend = attention_function(attention)
    out, _ = attend(
        attention,
        query + attention.bias_u.unsqueeze(-2),
        key,
        value,
        attention_mask,
        scaling=attention.scaling,
        position_bias=relative,
        **kwargs,
    )
    return attention.o_proj(out.flatten(2)), None


def _serve_parakeet(attention: nn.Module, owner: nn.Module | None) -> None:
    _replace(type(attention), "forward", _parakeet_forward)


def _serve_seamless_v2(attention: nn.Module, owner: nn.Module | None) -> None:
    _replace(type(attention), "forward", _seamless_v2_forward)
    encoder = vars(_modeling(attention))["SeamlessM4Tv2ConformerEncoder"]
    _replace(encoder, "_apply_chunk_attention", lambda encoder, mask, hidden_states: mask, applies=_is_one_chunk)


def _is_one_chunk(encoder: Any, attention_mask: Tensor | None, hidden_states: Tensor) -> bool:
    """Return whether converted layers see a single chunk: nothing is kept apart then by a matrix of all pairs."""
    one = hidden_states.shape[1] <= encoder.config.speech_encoder_chunk_size
    return one and any(_converted(layer.self_attn) for layer in encoder.layers)


def _stays_softmax(attention: Any) -> str | None:
    """Return why a module stays softmax: before Transformers 5.16 these did not call its attention interface."""
    if "ALL_ATTENTION_FUNCTIONS" not in vars(_modeling(attention)) or not hasattr(attention, "config"):
        return "this version of Transformers computes it without its attention interface; newer ones use it"
    return None


CONFORMER = Family(
    model_types=("wav2vec2-conformer",),
    attention_classes=("Wav2Vec2ConformerSelfAttention",),
    geometry=geometry("num_heads", "head_size"),
    dropout_option="attention_dropout",
    stays_softmax=_stays_softmax,
    reads_padding=True,  # its convolutions mix padded frames into real ones
    prepare=_serve_functions,
)
WAV2VEC2_BERT = replace(
    CONFORMER, model_types=("wav2vec2-bert",), attention_classes=("Wav2Vec2BertSelfAttention",), reads_padding=False
)
SEAMLESS = replace(  # here it is the adapter behind the encoder that reads padding
    CONFORMER,
    model_types=("seamless_m4t",),
    attention_classes=("SeamlessM4TConformerSelfAttention",),
    dropout_option="speech_encoder_dropout",
)
SEAMLESS_V2 = replace(
    SEAMLESS,
    model_types=("seamless_m4t_v2",),
    attention_classes=("SeamlessM4Tv2ConformerSelfAttention",),
    prepare=_serve_seamless_v2,
)
PARAKEET = replace(
    WAV2VEC2_BERT,
    model_types=("parakeet_encoder", "parakeet_ctc"),
    attention_classes=("ParakeetEncoderAttention",),
    geometry=geometry("config.num_attention_heads", "head_dim"),
    prepare=_serve_parakeet,
)
