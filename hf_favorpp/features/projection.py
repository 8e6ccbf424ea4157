"""Random projections: independent, block-orthogonal or antithetic rows with standard normal marginals."""

import hashlib

import torch
from torch import Tensor

from hf_favorpp.errors import ConfigError


def draw_projections(
    num_heads: int,
    num_features: int,
    head_dim: int,
    *,
    projection: str = "orthogonal",
    seed: int = 0,
    layer: int = 0,
    draw_index: int = 0,
) -> Tensor:
    """Draw the projections of one layer from (seed, layer, draw_index) alone.

    A CPU generator of its own is used: the result is the same on every rank and after a resume, and the global
    random state is neither read nor changed.

    Args:
        num_heads: H.
        num_features: M.
        head_dim: d.
        projection: ``"orthogonal"``, ``"antithetic"`` or ``"iid"``.
        seed: The configuration's seed.
        layer: Index of the attention layer.
        draw_index: How many redraws came before.

    Returns:
        omega, (H, M, d), float32 on the CPU. Each row is N(0, I_d).

    Raises:
        ConfigError: ``projection`` is unknown.
    """
    key = hashlib.sha256(f"{seed}/{layer}/{draw_index}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "big", signed=True))
    shape = (num_heads, num_features, head_dim)
    if projection == "iid":
        return torch.randn(shape, generator=generator, dtype=torch.float64).float()
    if projection == "orthogonal":
        return block_orthogonal(shape, generator).float()
    if projection == "antithetic":
        half = block_orthogonal((num_heads, -(-num_features // 2), head_dim), generator).float()
        return torch.cat((half, -half), dim=1)[:, :num_features]
    raise ConfigError(f"projection must be 'orthogonal', 'antithetic' or 'iid', got {projection!r}.")


def block_orthogonal(shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    """Draw rows that are orthogonal within blocks of d, with independent chi(d) norms.

    The sign of R's diagonal is fixed, without which QR does not give the uniform (Haar) distribution. The norms are
    those of independent normal vectors, so that every row is N(0, I_d) and estimators stay unbiased.

    Args:
        shape: (H, M, d). The last block of a head is cut where d does not divide M.
        generator: CPU generator.

    Returns:
        Projections, (H, M, d), float64.

    Source:
        Choromanski et al. 2021, arXiv:2009.14794, Section 2.4 and Appendix B.2 (R-ORF).
    """
    num_heads, num_features, head_dim = shape
    num_blocks = -(-num_features // head_dim)
    square = (num_heads, num_blocks, head_dim, head_dim)
    q, r = torch.linalg.qr(torch.randn(square, generator=generator, dtype=torch.float64))
    directions: Tensor = (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).mT
    norms: Tensor = torch.randn(square, generator=generator, dtype=torch.float64).norm(dim=-1, keepdim=True)
    return (norms * directions).flatten(1, 2)[:, :num_features]
