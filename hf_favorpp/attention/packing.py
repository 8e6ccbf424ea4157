"""Sequences of different lengths one after another in a single row, without padding."""

import torch
from torch import Tensor


def unpack(x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Split a packed row into padded sequences.

    Args:
        x: (1, H, T, D).
        cu_seqlens: Where each sequence begins, and where the last ends, (N + 1,), int.
        max_seqlen: Length of the result.

    Returns:
        (N, H, max_seqlen, D); what lies beyond a sequence is some token of another.
    """
    index = cu_seqlens[:-1, None] + torch.arange(max_seqlen, device=x.device)
    return x[0][:, index.clamp(max=x.shape[2] - 1)].transpose(0, 1)


def packing_mask(cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    """Return which tokens of unpacked sequences are real, (N, max_seqlen), bool."""
    return torch.arange(max_seqlen, device=cu_seqlens.device) < cu_seqlens.diff().unsqueeze(-1)


def pack(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Join padded sequences, (N, H, max_seqlen, D), in one row, (1, H, T, D)."""
    return x.transpose(1, 2)[packing_mask(cu_seqlens, x.shape[2])].transpose(0, 1).unsqueeze(0)
