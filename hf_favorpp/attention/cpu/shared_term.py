"""The number that all features of a token share."""

from typing import NamedTuple, Self

import torch
from torch import Tensor

from hf_favorpp.attention.cpu.chunks import of, scratch, scratch_like


class SharedTerm(NamedTuple):
    r"""For one sequence, :math:`r(t) = g^\top (t - c) - \tfrac s2 |R (t - c)|^2`.

    Attributes:
        center: c, (H, d), or None.
        root: R, (H, d, d), or None.
        linear: g, (H, d), or None.
        scale: s.
    """

    center: Tensor | None
    root: Tensor | None
    linear: Tensor | None
    scale: float

    @classmethod
    def of_sequence(
        cls, n: int, center: Tensor | None, root: Tensor | None, linear: Tensor | None, scale: float
    ) -> Self:
        """Return that of sequence n, given those of all."""
        center, root, linear = (None if t is None else of(t, n) for t in (center, root, linear))
        return cls(center, root, linear, scale)

    def move(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the two functions below need of tokens (H, L, d): t - c and R (t - c), the same without an R.

        Without an R the square is completed: both are t - c - g / s.
        """
        center = self.center
        if self.root is None and self.linear is not None:
            shift = self.linear / self.scale
            center = shift if center is None else center + shift
        if center is not None:
            out = scratch_like(tokens, "tokens", tokens.dtype)
            tokens = torch.sub(tokens, center.unsqueeze(-2), out=out)
        if self.root is None:
            return tokens, tokens
        return tokens, torch.bmm(tokens, self.root.mT, out=scratch("rooted", tokens.shape, tokens.dtype))

    def value(self, moved: Tensor, rooted: Tensor) -> Tensor:
        """Return r, (H, L)."""
        r: Tensor = torch.linalg.vector_norm(rooted, dim=-1).square_().mul_(-self.scale / 2)
        if self.linear is None:
            return r
        if self.root is None:
            return r.add_(self.linear.square().sum(-1, keepdim=True) / (2 * self.scale))
        return r.add_((moved @ self.linear.unsqueeze(-1)).squeeze(-1))

    def gradient(self, moved: Tensor, rooted: Tensor, grad: Tensor) -> Tensor:
        """Return the gradient of the tokens, (H, L, d), contiguous, given that of r, (H, L)."""
        out, grad = scratch("gradient", moved.shape, moved.dtype), grad.unsqueeze(-1)
        if self.root is None:
            return torch.mul(moved, grad * -self.scale, out=out)
        torch.bmm(rooted, self.root, out=out).mul_(grad * -self.scale)
        return out if self.linear is None else out.addcmul_(self.linear.unsqueeze(-2), grad)
