"""Random-feature attention: tensors in, tensors out, linear in length."""

from hf_favorpp.attention.dispatch import favorpp_attention

__all__ = ["favorpp_attention"]
