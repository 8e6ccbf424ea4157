"""Which families there are, and where their attention modules sit in a model."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from hf_favorpp.families.albert import ALBERT
from hf_favorpp.families.bert import BERT
from hf_favorpp.families.distilbert import DISTILBERT
from hf_favorpp.families.family import Family
from hf_favorpp.families.modernbert import MODERNBERT
from hf_favorpp.families.rotary import EUROBERT, NOMIC_BERT
from hf_favorpp.families.vit import VIT
from hf_favorpp.families.wav2vec2 import WAV2VEC2

FAMILIES: tuple[Family, ...] = (BERT, DISTILBERT, ALBERT, EUROBERT, NOMIC_BERT, MODERNBERT, VIT, WAV2VEC2)
_BY_CLASS = {name: family for family in FAMILIES for name in family.attention_classes}


@dataclass(frozen=True)
class AttentionLayer:
    """One attention module of a model.

    Attributes:
        index: Position among the attention modules of the model, from 0.
        name: Dotted name within the model.
        module: The module.
        family: Its family.
    """

    index: int
    name: str
    module: nn.Module
    family: Family

    def stays_softmax(self) -> str | None:
        """Return why this layer cannot be converted.

        Returns:
            The reason, or None where it can.
        """
        return self.family.stays_softmax(self.module)


def attention_layers(model: nn.Module) -> Iterator[AttentionLayer]:
    """Find the attention modules of known families, a module shared by several layers once.

    Args:
        model: Any module.

    Yields:
        The layers in the order of ``model.named_modules()``.
    """
    found = ((name, module) for name, module in model.named_modules() if type(module).__name__ in _BY_CLASS)
    for index, (name, module) in enumerate(found):
        yield AttentionLayer(index, name, module, _BY_CLASS[type(module).__name__])


def supported_model_types() -> tuple[str, ...]:
    """Return every convertible ``config.model_type``.

    Returns:
        Sorted names.
    """
    return tuple(sorted(model_type for family in FAMILIES for model_type in family.model_types))
