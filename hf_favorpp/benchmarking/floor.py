"""The least time that linear attention can take on a GPU: what its memory and its matrix units allow."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_favorpp.benchmarking.timing import Contestant, Step, time_calls

COPIED_BYTES, MATRIX_SIZE, TRIALS, CALLS = 2**30, 8192, 5, 10


@dataclass(frozen=True)
class Machine:
    """What a device was measured to do.

    Attributes:
        bytes_per_second: Of a copy, read and written bytes together.
        flops_per_second: Of a matrix product, a multiplication and an addition counted as two.
    """

    bytes_per_second: float
    flops_per_second: float


def attention_bytes(batch_size: int, num_heads: int, length: int, head_dim: int, itemsize: int) -> int:
    """Return the traffic of a forward that reads q, k, v and writes the output once: 4 d numbers a token and head."""
    return 4 * head_dim * batch_size * num_heads * length * itemsize


def attention_flops(
    batch_size: int, num_heads: int, length: int, head_dim: int, num_features: int, exact_keys: int = 0
) -> int:
    """Return the operations of the matrix products of a forward.

    A token and head have four products with a d x M matrix: the projections of query and key, key features times
    values, and query features times that sum; 2 M d operations each, a multiplication and an addition counted as two.
    Every key that is attended to exactly has 4 d: its logit and its value.

    Args:
        batch_size: B.
        num_heads: H.
        length: L.
        head_dim: d.
        num_features: M.
        exact_keys: Keys that a query attends to exactly, ``exact_window`` and ``exact_ends`` together.

    Returns:
        Floating-point operations. Exponentials, sums and statistics are not counted.
    """
    return (8 * num_features + 4 * exact_keys) * head_dim * batch_size * num_heads * length


def floor_ms(machine: Machine, traffic: int, flops: int) -> float:
    """Return the larger of the times that the traffic and the operations take at the least, in ms."""
    return 1e3 * max(traffic / machine.bytes_per_second, flops / machine.flops_per_second)


def measure_machine(
    device: torch.device, dtype: torch.dtype, copied_bytes: int = COPIED_BYTES, size: int = MATRIX_SIZE
) -> Machine:
    """Measure the bandwidth of a copy and the rate of a matrix product.

    Args:
        device: What is measured.
        dtype: Of the matrices; float32 means TF32, which only a GPU has.
        copied_bytes: Size of the tensor that is copied.
        size: Rows and columns of the matrices.

    Returns:
        The best of a few trials.
    """
    source = torch.zeros(copied_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * copied_bytes / _best_seconds(lambda: target.copy_(source), device)
    A, B = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = torch.empty_like(A)
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        rate = 2 * size**3 / _best_seconds(lambda: torch.mm(A, B, out=product), device)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
    return Machine(bandwidth, rate)


def floor_keys(machine: Machine | None, query: Tensor, num_features: int, exact_keys: int) -> dict[str, Any]:
    """Return what a row says of the floor: ``floor_forward_ms``, or None where no machine was measured."""
    if machine is None:
        return {"floor_forward_ms": None}
    batch_size, num_heads, length, head_dim = query.shape
    traffic = attention_bytes(batch_size, num_heads, length, head_dim, query.element_size())
    flops = attention_flops(batch_size, num_heads, length, head_dim, num_features, exact_keys)
    return {"floor_forward_ms": floor_ms(machine, traffic, flops)}


def _best_seconds(step: Step, device: torch.device) -> float:
    contestant = Contestant("machine", {"forward": step})
    return min(time_calls(contestant, "forward", device, CALLS) for _ in range(TRIALS + 1))  # the first one is warm-up
