"""The two steps of feature attention as Triton kernels: the functions of :class:`Backend`, for GPUs."""

from hf_favorpp.attention.triton.attend import attend, attend_backward
from hf_favorpp.attention.triton.moments import moments
from hf_favorpp.attention.triton.summarise import summarise, summarise_backward

__all__ = ["attend", "attend_backward", "moments", "summarise", "summarise_backward"]
