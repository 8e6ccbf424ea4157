"""The summary of all other blocks as an operator, for those that trace: its steps depend on the number of blocks.

A GPU merges blocks by pairs, in few steps; a CPU goes through them one by one, in cache.
"""

from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from hf_favorpp.attention.cpu import other_blocks as on_cpu
from hf_favorpp.attention.neighbourhood import other_blocks


def by_pairs(z: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    """Summarise for each block all blocks but itself; see :func:`hf_favorpp.attention.neighbourhood.other_blocks`.

    Args:
        z: (N, H, blocks, M), nats, -inf for a block without a key.
        S: (N, H, blocks, M, D).

    Returns:
        The same shapes.
    """
    z, S = other_blocks((z, S))
    return z.contiguous(), S.contiguous()


def by_pairs_backward(
    grad_z: Tensor, grad_S: Tensor, z: Tensor, S: Tensor, z_others: Tensor, S_others: Tensor
) -> tuple[Tensor, Tensor]:
    r"""Return the gradients of z and S.

    With :math:`p_{ij} = e^{z_j - z'_i}`, the weight of block j among the others of block i, they are

    .. math:: \bar S_j = \sum_{i \ne j} p_{ij} \bar S'_i, \qquad
              \bar z_j = \sum_{i \ne j} p_{ij} (\bar z'_i + \bar S'_i \cdot (S_j - S'_i)),

    sums over other blocks again, in which block i has the weight :math:`e^{-z'_i}`.

    Args:
        grad_z: Gradient of z', (N, H, blocks, M).
        grad_S: Gradient of S', (N, H, blocks, M, D).
        z: (N, H, blocks, M).
        S: (N, H, blocks, M, D).
        z_others: z', (N, H, blocks, M).
        S_others: S', (N, H, blocks, M, D).

    Returns:
        The shapes of z and S.
    """
    empty = z_others == float("-inf")
    grad_z, grad_S = grad_z.masked_fill(empty, 0), grad_S.masked_fill(empty.unsqueeze(-1), 0)
    columns = torch.cat((grad_S, (grad_z - (grad_S * S_others).sum(-1)).unsqueeze(-1)), dim=-1)
    log_total, mean = other_blocks((-z_others.masked_fill(empty, float("inf")), columns))
    back = mean * (z + log_total).exp().unsqueeze(-1)
    to_S = back[..., :-1].contiguous()
    return (to_S * S).sum(-1) + back[..., -1], to_S


other_blocks_operator = custom_op("hf_favorpp::other_blocks", by_pairs, mutates_args=())
other_blocks_backward = custom_op("hf_favorpp::other_blocks_backward", by_pairs_backward, mutates_args=())
other_blocks_operator.register_kernel("cpu", on_cpu.other_blocks)
other_blocks_backward.register_kernel("cpu", on_cpu.other_blocks_backward)


@other_blocks_operator.register_fake
def _(z: Tensor, S: Tensor) -> tuple[Tensor, Tensor]:
    return z.new_empty(z.shape), S.new_empty(S.shape)


@other_blocks_backward.register_fake
def _(grad_z: Tensor, grad_S: Tensor, z: Tensor, S: Tensor, *rest: Tensor) -> tuple[Tensor, Tensor]:
    return z.new_empty(z.shape), S.new_empty(S.shape)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output)


def _backward(ctx: Any, grad_z: Tensor, grad_S: Tensor) -> tuple[Tensor, Tensor]:
    grads: tuple[Tensor, Tensor] = other_blocks_backward(grad_z, grad_S, *ctx.saved_tensors)
    return grads


other_blocks_operator.register_autograd(_backward, setup_context=_save)
