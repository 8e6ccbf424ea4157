"""Random-feature attention: tensors in, tensors out, linear in length."""

from hf_favorpp.attention.backends import choose_backend, observed_backends
from hf_favorpp.attention.dispatch import favorpp_attention

__all__ = ["choose_backend", "favorpp_attention", "observed_backends"]
