"""What is known of a model family: which modules attend, how large they are, and what must stay softmax."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import nn

from hf_favorpp.attention.tiles import Grid


def causal_stays(attention: nn.Module) -> str | None:
    """Return why a module of a decoder stays softmax.

    Args:
        attention: The attention module.

    Returns:
        The reason, or None for a module of an encoder.
    """
    if getattr(attention, "is_causal", False) or getattr(attention, "is_decoder", False):
        return "it belongs to a decoder; only encoder self-attention is converted"
    return None


def biased_stays(attention: nn.Module) -> str | None:
    """Return why a module stays softmax in a model that does not ask the mask interface of Transformers for its mask.

    Args:
        attention: The attention module, whose class tells the file that its model is in.

    Returns:
        The reason, or None where the installed Transformers asks.
    """
    if not hasattr(sys.modules[type(attention).__module__], "create_bidirectional_mask"):
        return "this version of Transformers hides padding by a bias on all pairs; newer ones by a mask"
    return None


@dataclass(frozen=True)
class Family:
    """One kind of attention module, shared by one or more model types. Its forward is used as it is.

    Attributes:
        model_types: Values of ``config.model_type``.
        attention_classes: Class names of the modules that call the attention interface. Where families share one,
            the model type tells them apart.
        geometry: Returns (num_heads, head_dim) of such a module.
        dropout_option: Name of the config option that holds the dropout rate of attention weights.
        stays_softmax: Returns why a module is left on softmax, or None where it can be converted.
        optional_part: Name of a submodule that is converted only where ``FavorppConfig.layers`` names its layers, such
            as ``decoder``; None for no such part.
        reads_padding: Whether something is read from padded positions, which are then served as queries, through
            features alone.
        grid: Returns how a number of tokens lies in an image, or raises ``InputError``; None for families without
            images.
        prepare: Readies the class of a module for features, given the module and the model that it is in: what has no
            linear form, and Transformers does before it calls the attention interface, is left to them. It is called
            for modules that stay softmax too, and any number of times. ``stays_softmax`` of such a family tells where
            the installed Transformers is too old for it. None where nothing is to be done.
        no_tiles: Returns why a module cannot have exact tiles of (rows, columns), or None where it can; None where
            ``grid`` says it all.
    """

    model_types: tuple[str, ...]
    attention_classes: tuple[str, ...]
    geometry: Callable[[nn.Module], tuple[int, int]]
    dropout_option: str
    stays_softmax: Callable[[nn.Module], str | None] = field(default_factory=lambda: causal_stays)
    optional_part: str | None = None
    reads_padding: bool = False
    grid: Callable[[nn.Module, int], Grid] | None = None
    no_tiles: Callable[[nn.Module, tuple[int, int]], str | None] | None = None
    prepare: Callable[[nn.Module, nn.Module | None], None] | None = None


def attribute(*paths: str) -> Callable[[nn.Module], int]:
    """Return a reader of one integer of a module, such as ``config.num_attention_heads``.

    Args:
        *paths: Dotted attribute paths, of which the first that a module has is read.

    Returns:
        A function from a module to the integer.
    """

    def read(module: nn.Module) -> int:
        for path in paths[:-1]:
            if hasattr(module, path):
                return follow(module, path)
        return follow(module, paths[-1])

    def follow(module: nn.Module, path: str) -> int:
        value: object = module
        for name in path.split("."):
            value = getattr(value, name)
        assert isinstance(value, int)
        return value

    return read


def geometry(num_heads: str, *head_dim: str) -> Callable[[nn.Module], tuple[int, int]]:
    """Return a reader of (num_heads, head_dim) from attribute paths.

    Args:
        num_heads: Path of H.
        *head_dim: Path of d, or several of which a module has one.

    Returns:
        A function from an attention module to (H, d).
    """
    heads, dim = attribute(num_heads), attribute(*head_dim)
    return lambda module: (heads(module), dim(module))
