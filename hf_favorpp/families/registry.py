"""Which families there are, and where their attention modules sit in a model."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from hf_favorpp.families.albert import ALBERT
from hf_favorpp.families.bert import BERT
from hf_favorpp.families.clip import CLIP, CLIP_TEXT, SIGLIP, SIGLIP2, SIGLIP_TEXT
from hf_favorpp.families.distilbert import DISTILBERT
from hf_favorpp.families.family import Family, causal_stays
from hf_favorpp.families.masked import VIDEOMAE, VIT_MAE
from hf_favorpp.families.modernbert import MODERNBERT
from hf_favorpp.families.relative import CONFORMER, PARAKEET, SEAMLESS, SEAMLESS_V2, WAV2VEC2_BERT
from hf_favorpp.families.rotary import EUROBERT, NOMIC_BERT
from hf_favorpp.families.speech import LASR, MOONSHINE, WAV2VEC2, WHISPER
from hf_favorpp.families.speecht5 import SPEECHT5
from hf_favorpp.families.vit import AST, BEIT, DEIT, DINOV3, IJEPA, VIT
from hf_favorpp.nn import FavorppFeatures

FAMILIES: tuple[Family, ...] = (
    *(BERT, DISTILBERT, ALBERT, EUROBERT, NOMIC_BERT, MODERNBERT),
    *(VIT, DEIT, IJEPA, BEIT, DINOV3, VIT_MAE, VIDEOMAE, AST),
    *(CLIP, SIGLIP, SIGLIP2, SIGLIP_TEXT),
    *(WAV2VEC2, WHISPER, MOONSHINE, LASR),
    *(CONFORMER, WAV2VEC2_BERT, SEAMLESS, SEAMLESS_V2, PARAKEET, SPEECHT5),
)
_ALWAYS_SOFTMAX = (CLIP_TEXT,)
"""Parts of models whose other parts can be converted: known, so that their layers are counted and the reason told."""
_CROSS_ATTENTION = "encoder_attn"
"""Name by which decoders of Transformers have it where its class is that of their self-attention."""


@dataclass(frozen=True)
class AttentionLayer:
    """One attention module of a model.

    Attributes:
        index: Position among the attention modules of the model, from 0.
        name: Dotted name within the model.
        module: The module.
        family: Its family.
        owner: The module around it that has a configuration, the innermost; None for a module alone.
    """

    index: int
    name: str
    module: nn.Module
    family: Family
    owner: nn.Module | None = None

    def stays_softmax(self) -> str | None:
        """Return why this layer cannot be converted.

        Returns:
            The reason, or None where it can.
        """
        if self._crosses:
            return "it is cross-attention; only encoder self-attention is converted"
        return self.family.stays_softmax(self.module)

    def prepare(self) -> None:
        """Ready the class of the module, as its family has it, to attend by the function that its model is set to."""
        if self.family.prepare is not None:
            self.family.prepare(self.module, self.owner)

    def left_out(self) -> str | None:
        """Return why this layer stays softmax where ``FavorppConfig.layers`` does not name it.

        Returns:
            The reason, or None where it is converted.
        """
        if self.optional:
            return f"it is in the {self.family.optional_part}, converted only where FavorppConfig(layers=...) names it"
        return self.stays_softmax()

    @property
    def config(self) -> Any:
        """The configuration of Transformers that the module reads, or else the innermost model that it is in."""
        return getattr(self.module, "config", getattr(self.owner, "config", None))

    @property
    def features(self) -> FavorppFeatures | None:
        """What a conversion attached; None where the layer attends by softmax."""
        features = getattr(self.module, "favorpp", None)
        return features if isinstance(features, FavorppFeatures) else None

    @property
    def decodes(self) -> bool:
        """Whether it is in a decoder, be it cross-attention."""
        return self._crosses or causal_stays(self.module) is not None

    @property
    def optional(self) -> bool:
        """Whether it is in a part of the model that need not be converted."""
        return self.family.optional_part in self.name.split(".")

    @property
    def _crosses(self) -> bool:
        return self.name.rpartition(".")[2] == _CROSS_ATTENTION


def attention_layers(model: nn.Module) -> Iterator[AttentionLayer]:
    """Find the attention modules of known families, a module shared by several layers once.

    Args:
        model: Any module.

    Yields:
        The layers in the order of ``model.named_modules()``.
    """
    index = 0
    owners: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        family = _family_of(module)
        if family is not None and not any(_family_of(part) for part in module.modules() if part is not module):
            yield AttentionLayer(index, name, module, family, _owner(name, owners))
            index += 1
        elif hasattr(module, "config"):
            owners[name] = module


def _owner(name: str, owners: dict[str, nn.Module]) -> nn.Module | None:
    while name and name not in owners:
        name = name.rpartition(".")[0]
    return owners.get(name)


def supported_model_types() -> tuple[str, ...]:
    """Return every convertible ``config.model_type``.

    Returns:
        Sorted names.
    """
    return tuple(sorted(model_type for family in FAMILIES for model_type in family.model_types))


def _family_of(module: nn.Module) -> Family | None:
    families = _BY_CLASS.get(type(module).__name__, ())
    if len(families) > 1:
        model_type = getattr(getattr(module, "config", None), "model_type", None)
        families = tuple(family for family in families if model_type in family.model_types)
    return families[0] if families else None


def _by_class() -> dict[str, tuple[Family, ...]]:
    known: dict[str, tuple[Family, ...]] = {}
    for family in (*FAMILIES, *_ALWAYS_SOFTMAX):
        for name in family.attention_classes:
            known[name] = (*known.get(name, ()), family)
    return known


_BY_CLASS = _by_class()
