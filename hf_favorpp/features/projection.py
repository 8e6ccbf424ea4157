"""Random projections: independent, antithetic or orthogonal within blocks; with chi(d) norms, or all of sqrt(d)."""

import hashlib
import math
from collections.abc import Callable

import torch
from torch import Tensor

from hf_favorpp.features.structured import givens_directions, hadamard_directions
from hf_favorpp.rules import require_choice


def draw_projections(
    num_heads: int,
    num_features: int,
    head_dim: int,
    *,
    projection: str = "orthogonal",
    norms: str = "chi",
    seed: int = 0,
    layer: int = 0,
    draw_index: int = 0,
) -> Tensor:
    """Draw the projections of one layer from (seed, layer, draw_index) alone.

    A CPU generator of its own is used: the result is the same on every rank and after a resume, and the global
    random state is neither read nor changed.

    The rows of ``"orthogonal"`` and ``"givens"`` are orthogonal within blocks of d, those of ``"hadamard"`` where d is
    a power of two: else blocks of the next one, n, are cut to d columns, and their rows are orthogonal only about. To
    draw, a block takes O(d^3), O(d^2 log d) and O(n^2 log n) steps. All are dense rows, and attention costs the same.

    With ``norms="chi"`` rows of ``"iid"``, ``"orthogonal"`` and ``"antithetic"`` are N(0, I_d), and estimators are
    unbiased. A row of ``"hadamard"`` or ``"givens"`` has mean 0 and covariance I_d, but is normal only as d grows, and
    estimators have a bias that vanishes with d; the fourth moments of ``"givens"`` are within 0.2 % of normal ones.
    With ``norms="sqrt_d"`` every row has norm sqrt(d), and softmax is estimated with a bias that vanishes with d too.

    Args:
        num_heads: H.
        num_features: M.
        head_dim: d.
        projection: ``"orthogonal"``, ``"antithetic"``, ``"iid"``, ``"hadamard"`` or ``"givens"``.
        norms: ``"chi"``, independent and those of normal vectors, or ``"sqrt_d"``.
        seed: The configuration's seed.
        layer: Index of the attention layer.
        draw_index: How many redraws came before.

    Returns:
        omega, (H, M, d), float32 on the CPU, drawn in float64.

    Raises:
        ConfigError: ``projection`` or ``norms`` is unknown.

    Source:
        Choromanski et al. 2021, arXiv:2009.14794, Appendix B.2 (R-ORF, H-ORF, G-ORF) and, for norms of sqrt(d), its
        regularised softmax kernel SMREG.
    """
    require_choice("projection", projection)
    require_choice("norms", norms)
    key = hashlib.sha256(f"{seed}/{layer}/{draw_index}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "big", signed=True))
    shape = (num_heads, num_features, head_dim)
    if projection == "iid":
        rows = torch.randn(shape, generator=generator, dtype=torch.float64)
        return (rows if norms == "chi" else _of_equal_norm(rows, generator)).float()
    if projection == "antithetic":
        half = _blocks(haar_directions, (num_heads, -(-num_features // 2), head_dim), norms, generator).float()
        return torch.cat((half, -half), dim=1)[:, :num_features]
    return _blocks(_DIRECTIONS[projection], shape, norms, generator).float()


def haar_directions(shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    """Draw orthonormal blocks that are uniform among all (Haar).

    The sign of R's diagonal is fixed, without which QR does not give the uniform distribution.

    Args:
        shape: (H, M, d).
        generator: CPU generator.

    Returns:
        Rows of norm 1, (H, B, d, d), float64: as many blocks as hold M rows.

    Source:
        Choromanski et al. 2021, arXiv:2009.14794, Section 2.4 and Appendix B.2 (R-ORF).
    """
    num_heads, num_features, head_dim = shape
    square = (num_heads, -(-num_features // head_dim), head_dim, head_dim)
    q, r = torch.linalg.qr(torch.randn(square, generator=generator, dtype=torch.float64))
    directions: Tensor = (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).mT
    return directions


_Directions = Callable[[tuple[int, int, int], torch.Generator], Tensor]
_DIRECTIONS: dict[str, _Directions] = {
    "orthogonal": haar_directions,
    "hadamard": hadamard_directions,
    "givens": givens_directions,
}


def _blocks(draw: _Directions, shape: tuple[int, int, int], norms: str, generator: torch.Generator) -> Tensor:
    """Draw rows, (H, M, d) float64, block by block; the last block of a head is cut where M ends within it."""
    _, num_features, head_dim = shape
    directions = draw(shape, generator)  # may be wider than d, and get norms of their width: after the cut E ww^T = I
    if norms == "chi":
        lengths = torch.randn(directions.shape, generator=generator, dtype=torch.float64).norm(dim=-1, keepdim=True)
        rows: Tensor = (lengths * directions)[..., :head_dim]
        return rows.flatten(1, 2)[:, :num_features]
    return _of_equal_norm(directions[..., :head_dim].flatten(1, 2)[:, :num_features], generator)


def _of_equal_norm(rows: Tensor, generator: torch.Generator) -> Tensor:
    """Give each of the rows (H, M, d) the norm sqrt(d), and one of which a cut left nothing a random direction."""
    lengths = rows.norm(dim=-1, keepdim=True)
    if (empty := lengths == 0).any():
        spare = torch.randn(rows.shape, generator=generator, dtype=torch.float64)
        rows = torch.where(empty, spare, rows)
        lengths = rows.norm(dim=-1, keepdim=True)
    equal: Tensor = math.sqrt(rows.shape[-1]) * rows / lengths
    return equal
