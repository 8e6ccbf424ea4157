"""How tokens that an attention returns lie in memory."""

from torch import Tensor


def new_tokens(tokens: Tensor, dim: int | None = None, *, zero: bool = False) -> Tensor:
    """Return a new tensor (N, H, L, D), laid out as (N, L, H, D), which models flatten next.

    Args:
        tokens: (N, H, L, any), for shape, dtype and device.
        dim: D; None means that of ``tokens``.
        zero: Whether it must be 0 where nothing is written.

    Returns:
        The tensor.
    """
    rows, heads, length, own = tokens.shape
    new = tokens.new_zeros if zero else tokens.new_empty
    return new(rows, length, heads, own if dim is None else dim).transpose(1, 2)
