"""Which implementation computes the attention, decided in this one place.

===============  ========================================  ==================================================
backend          runs                                      needs
===============  ========================================  ==================================================
``"cpu"``        chunks of tokens that stay in cache       a CPU
``"triton"``     fused kernels                             a CUDA device of compute capability 8.0 or more, Triton,
                                                           float16, bfloat16 or float32, head_dim <= 256,
                                                           num_features <= 512
``"reference"``  everything, step by step in PyTorch,      nothing
                 with (L x M) tensors
===============  ========================================  ==================================================

The first two compute attention that is not causal, with a positive kernel that estimates softmax (``"favor++"``,
``"favor+"``, ``"favor+hyperbolic"``), without a gradient through ``statistics``; they can be differentiated backward,
once. With ``exact_window`` they keep a summary of each block, head_dim / window times (L x M) numbers.

``"auto"`` takes the one for the device where it can, and the reference otherwise; on a CPU also where rows are so
short that to go through them one by one costs more than it saves: below 2^17 logits (heads x queries x features) a
sequence, which are 86 tokens with 12 heads and 128 features.
"""

import importlib.util
import os
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor
from torch._C import _are_functorch_transforms_active
from torch.autograd import forward_ad

from hf_favorpp.errors import ConfigError
from hf_favorpp.features.preconditioning import Preconditioner
from hf_favorpp.features.statistics import Statistics
from hf_favorpp.rules import POSITIVE_KERNELS

MOST_HEAD_DIM, MOST_FEATURES = 256, 512
LEAST_LOGITS = 2**17

_observers: list[list[str]] = []


def choose_backend(
    backend: str,
    query: Tensor,
    value: Tensor,
    num_features: int,
    *,
    kernel: str,
    is_causal: bool,
    statistics: Statistics | Preconditioner | None,
    relative: bool = False,
    sequences: int | None = None,
) -> str:
    """Return which implementation computes the attention of some tensors.

    Args:
        backend: ``"auto"``, or the one that is wanted.
        query: (B, H, Lq, d).
        value: (B, H_kv, Lk, D).
        num_features: M of omega.
        kernel: Feature map.
        is_causal: Whether a query sees only keys at its own and earlier positions.
        statistics: What is given to the attention.
        relative: Whether there are relative positions.
        sequences: How many; None means one a row.

    Returns:
        ``"cpu"``, ``"triton"`` or ``"reference"``.

    Raises:
        ConfigError: The one that is wanted cannot compute this.
    """
    if backend == "reference":
        return backend
    wanted = ("triton" if query.is_cuda else "cpu") if backend == "auto" else backend
    features = 2 * num_features if kernel == "favor+hyperbolic" else num_features
    obstacle = _obstacle_of_form(kernel, is_causal, statistics, relative)
    if obstacle is None:
        obstacle = _obstacle_of_cpu(query) if wanted == "cpu" else _obstacle_of_triton(query, value, features)
    if backend == "auto":
        short = wanted == "cpu" and _is_short(query, features, sequences)
        return "reference" if obstacle is not None or short else wanted
    if obstacle is None:
        return wanted
    raise ConfigError(f"backend={backend!r} {obstacle}. Use backend='auto', which then takes another one.")


@contextmanager
def observed_backends() -> Generator[list[str]]:
    """Note which implementation each attention runs on.

    Yields:
        The names, one for each call so far; calls inside a compiled graph are noted while it is traced.
    """
    names: list[str] = []
    _observers.append(names)
    try:
        yield names
    finally:
        _observers[:] = [other for other in _observers if other is not names]


def note(backend: str) -> None:
    """Tell those who observe that an attention runs on a backend."""
    for names in _observers:
        names.append(backend)


def _obstacle_of_form(
    kernel: str, is_causal: bool, statistics: Statistics | Preconditioner | None, relative: bool
) -> str | None:
    if kernel not in POSITIVE_KERNELS:
        return f"needs one of the kernels {', '.join(POSITIVE_KERNELS)}, got {kernel!r}"
    if is_causal:
        return "has no causal form, got is_causal=True"
    if relative:
        return "takes no relative_positions"
    if statistics is not None and any(t is not None and t.requires_grad for t in statistics):
        return "gives no gradient to statistics, got some that require one"
    if not torch.compiler.is_compiling() and (forward_ad._current_level >= 0 or _are_functorch_transforms_active()):
        return "can be differentiated backward only, and not by torch.func"
    return None


def _is_short(query: Tensor, num_features: int, sequences: int | None) -> bool:
    if getattr(torch.compiler, "is_exporting", torch.compiler.is_compiling)():
        return False  # the length may be any
    logits = query.shape[0] * query.shape[1] * query.shape[2] * num_features
    return logits < LEAST_LOGITS * (sequences or query.shape[0])


def _obstacle_of_cpu(query: Tensor) -> str | None:
    return None if query.device.type == "cpu" else f"needs tensors on a CPU, got some on {query.device}"


def _obstacle_of_triton(query: Tensor, value: Tensor, num_features: int) -> str | None:
    if not _has_triton():
        return "needs Triton, which is not installed (pip install 'hf-favorpp[triton]')"
    if query.device.type != "cuda" and not _interprets():
        return f"needs a CUDA device, or TRITON_INTERPRET=1 for tests, got tensors on {query.device}"
    if query.is_cuda and _compute_capability(query.device.index or 0) < (8, 0):
        return f"needs compute capability 8.0 or more, {query.device} has less"
    if query.dtype == torch.float64:
        return "computes in float32 and takes no float64"
    if max(query.shape[-1], value.shape[-1]) > MOST_HEAD_DIM:
        return f"takes head_dim up to {MOST_HEAD_DIM}, got {max(query.shape[-1], value.shape[-1])}"
    if num_features > MOST_FEATURES:
        return f"takes up to {MOST_FEATURES} features, got {num_features}"
    return None


@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def _interprets() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _compute_capability(device: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)
