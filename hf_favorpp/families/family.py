"""What is known of a model family: which modules attend, how large they are, and what must stay softmax."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from hf_favorpp.attention.tiles import Grid


def _causal_stays(attention: nn.Module) -> str | None:
    if getattr(attention, "is_causal", False) or getattr(attention, "is_decoder", False):
        return "it belongs to a decoder; only encoder self-attention is converted"
    return None


@dataclass(frozen=True)
class Family:
    """One kind of attention module, shared by one or more model types. Its forward is used as it is.

    Attributes:
        model_types: Values of ``config.model_type``.
        attention_classes: Class names of the modules that call the attention interface.
        geometry: Returns (num_heads, head_dim) of such a module.
        dropout_option: Name of the config option that holds the dropout rate of attention weights.
        stays_softmax: Returns why a module is left on softmax, or None where it can be converted.
        grid: Returns how a number of tokens lies in an image; None for families without images.
    """

    model_types: tuple[str, ...]
    attention_classes: tuple[str, ...]
    geometry: Callable[[nn.Module], tuple[int, int]]
    dropout_option: str
    stays_softmax: Callable[[nn.Module], str | None] = _causal_stays
    grid: Callable[[nn.Module, int], Grid] | None = None


def attribute(path: str) -> Callable[[nn.Module], int]:
    """Return a reader of one integer of a module, such as ``config.num_attention_heads``.

    Args:
        path: Dotted attribute path.

    Returns:
        A function from a module to the integer.
    """

    def read(module: nn.Module) -> int:
        value: object = module
        for name in path.split("."):
            value = getattr(value, name)
        assert isinstance(value, int)
        return value

    return read


def geometry(num_heads: str, head_dim: str) -> Callable[[nn.Module], tuple[int, int]]:
    """Return a reader of (num_heads, head_dim) from two attribute paths.

    Args:
        num_heads: Path of H.
        head_dim: Path of d.

    Returns:
        A function from an attention module to (H, d).
    """
    heads, dim = attribute(num_heads), attribute(head_dim)
    return lambda module: (heads(module), dim(module))
