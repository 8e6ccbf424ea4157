"""How the kernels run: precisions, tiles, warps and stages, from a table and never from a timing."""

import os
from contextvars import ContextVar
from functools import cache

import torch
import triton.language as tl
from torch import Tensor

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in {"1", "true", "on", "y", "yes"}
"""Whether kernels run in Triton's interpreter, on CPU tensors (``TRITON_INTERPRET=1``)."""

INTERPRET = tl.constexpr(INTERPRETED)
"""The same for use inside kernels."""

LOG2E = tl.constexpr(1.4426950408889634)
"""Exponentials are taken to the base 2 inside kernels: 2 ** (LOG2E x) = e ** x."""

LN2 = tl.constexpr(0.6931471805599453)

DEFAULT_PROCESSORS = 132
"""Multiprocessors that work is divided for where no GPU is."""


def input_precision(dtype: torch.dtype) -> str:
    """Say how products of float32 matrices are computed in kernels for tokens of a dtype.

    float32 tokens get three products of TF32 each, which are as good as float32 to about 1e-6. With tokens of half
    precision only the quadratic form |R(t - c)|^2 is a product of float32 matrices: one of TF32, whose 10 bits of
    mantissa are those of float16. The interpreter always computes in float32.

    Args:
        dtype: Of the tokens.

    Returns:
        A value of ``input_precision`` of ``tl.dot``.
    """
    if INTERPRETED:
        return "ieee"
    return "tf32x3" if dtype == torch.float32 else "tf32"


def padded(width: int) -> int:
    """Return the width of a tile for vectors of some width: a power of two that ``tl.dot`` accepts."""
    return max(16, 1 << (width - 1).bit_length())


def alignment(*tensors: Tensor | None) -> int:
    """Return the largest power of two, 16 at most, that divides all strides but the last ones, and so all offsets.

    A kernel that knows it loads 16 bytes at once, also where head_dim is no multiple of 16.
    """
    found = 16
    for tensor in tensors:
        if tensor is not None:
            for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True):
                while size > 1 and stride % found:
                    found //= 2
    return found


def ceil_div(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


@cache
def processors(device: torch.device) -> int:
    """Return the number of multiprocessors of a device; work is divided for as many."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return DEFAULT_PROCESSORS


assumed_capability: ContextVar[int] = ContextVar("assumed_capability", default=9)
"""What is taken for the compute capability where no GPU is."""


def capability(device: torch.device) -> int:
    """Return the major compute capability of a device."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" else assumed_capability.get()


def splits(programs: int, device: torch.device) -> int:
    """Return into how many parts to split work that would give this many programs, so that no processor is idle."""
    return max(1, ceil_div(2 * processors(device), max(1, programs)))


def ranks_of_a_program(ranks: int, programs: int, tokens: int, device: torch.device) -> int:
    """Return how many ranks a program runs over: whole tiles of ``tokens``, at least four of them."""
    return tokens * max(4, ceil_div(ceil_div(ranks, splits(programs, device)), tokens))


def rounded(projection: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a projection as kernels multiply it: contiguous, in the dtype of the tokens, to which it is rounded."""
    return projection.to(dtype).contiguous()


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return the product of matrices in their own dtype, whatever autocast says."""
    with torch.autocast("cuda" if a.is_cuda else "cpu", enabled=False):
        return a @ b


def row_stride(tensor: Tensor) -> int:
    """Return the stride from one sequence to the next, 0 where all sequences share one row."""
    return tensor.stride(0) if tensor.shape[0] > 1 else 0


def unit_stride(tensor: Tensor) -> Tensor:
    """Return the tensor with its last dimension contiguous, itself wherever it can be."""
    return tensor if tensor.stride(-1) == 1 or tensor.shape[-1] == 1 else tensor.contiguous()
