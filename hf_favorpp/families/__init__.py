"""The model families that can be converted, one small file of data and checks for each kind of attention module."""

from hf_favorpp.families.family import Family
from hf_favorpp.families.refused import REFUSED
from hf_favorpp.families.registry import FAMILIES, AttentionLayer, attention_layers, supported_model_types

__all__ = ["FAMILIES", "REFUSED", "AttentionLayer", "Family", "attention_layers", "supported_model_types"]
