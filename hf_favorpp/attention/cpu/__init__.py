"""The two steps on a CPU: a chunk of tokens at a time, whose logits stay in cache and in the same piece of memory.

Products and softmaxes are those of PyTorch. The plain implementation writes every logit to memory that was just
allocated and reads it again, several times, which costs as much as the arithmetic; so does PyTorch's fused attention,
which multiplies smaller pieces. Half precision is computed in float32, chunk by chunk.
"""

from hf_favorpp.attention.cpu.attend import attend, attend_backward
from hf_favorpp.attention.cpu.moments import moments
from hf_favorpp.attention.cpu.summarise import summarise, summarise_backward

__all__ = ["attend", "attend_backward", "moments", "summarise", "summarise_backward"]
