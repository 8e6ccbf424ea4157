"""Orthogonal directions from fast transforms: products of Hadamard matrices and signs, and of Givens rotations.

As factors a block would take O(d log d) steps to multiply a vector by, and O(d) (Hadamard) or O(d log d) (Givens)
numbers to store. Here it is multiplied by the unit vectors and kept dense, because attention multiplies by dense
projections: d^2 numbers to store, and O(d^2 log d) steps to draw, where the QR decomposition behind ``"orthogonal"``
takes O(d^3). How long these take is measured by recipes/projections.py.
"""

import math

import torch
from torch import Tensor

from hf_favorpp.errors import InputError

HADAMARD_FACTORS = 3
"""As in the paper. A row of one factor is +-1/sqrt(n) throughout, which is far from uniform."""
LAYERS_PER_DOUBLING = 6
"""Layers of rotations for every doubling of d. Fourth moments of entries exceed those of uniform directions by a share
of (d - 1) / 3 to begin with, of which a layer leaves 3/4 at most: after all layers 0.2 % at most, for every d."""


def walsh_hadamard(x: Tensor) -> Tensor:
    r"""Multiply by the Walsh-Hadamard matrix, :math:`x H_n`, in n log2(n) additions.

    .. math:: H_1 = (1), \qquad H_{2n} = \begin{pmatrix} H_n & H_n \\ H_n & -H_n \end{pmatrix}

    Args:
        x: (..., n), n a power of two, any number type.

    Returns:
        The products, same shape and dtype, not scaled: :math:`H_n H_n = n I`. Whole numbers stay exact.

    Raises:
        InputError: n is no power of two.
    """
    n = x.shape[-1]
    if n < 1 or n & (n - 1):
        raise InputError(f"the last dimension must be a power of two, got {n}. Pad it with zeros to the next one.")
    half = 1
    while half < n:
        first, second = x.reshape(*x.shape[:-1], n // (2 * half), 2, half).unbind(-2)
        x = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        half *= 2
    return x


def hadamard_directions(shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    r"""Draw orthonormal blocks :math:`\prod_{i=1}^{3} \tfrac{1}{\sqrt n} H_n D_i` with diagonals D of random signs.

    n is d or the next power of two; who needs d columns keeps the first ones, which is to pad inputs with zeros. An
    entry has mean 0 and variance 1/n, entries of a row are uncorrelated, and only as n grows does their distribution
    become that of uniform directions: they are multiples of n^(-3/2), for n = 4 only 0, 1/2 and 1 but for signs.

    Args:
        shape: (H, M, d).
        generator: CPU generator, of which 3n signs a block are taken.

    Returns:
        Rows of norm 1, (H, B, n, n), float64: as many blocks as hold M rows.

    Source:
        Choromanski et al. 2021, arXiv:2009.14794, Appendix B.2 (H-ORF).
    """
    num_heads, num_features, head_dim = shape
    n = 1 << (head_dim - 1).bit_length()
    num_blocks = -(-num_features // n)
    signs = torch.randint(2, (HADAMARD_FACTORS, num_heads, num_blocks, 1, n), generator=generator)
    rows = torch.eye(n, dtype=torch.float64).expand(num_heads, num_blocks, n, n)
    for sign in signs:
        rows = walsh_hadamard(rows) * (2 * sign - 1)
    rows *= n ** (-HADAMARD_FACTORS / 2)
    return rows


def givens_directions(shape: tuple[int, int, int], generator: torch.Generator) -> Tensor:
    """Draw orthonormal blocks that are products of random Givens rotations.

    A layer shuffles the coordinates and turns each of the first d/2 with one of the others, by angles of their own.
    The shuffles are not undone, which makes the coordinates exchangeable: entries have mean 0 and variance 1/d, and
    those of a row are uncorrelated. Where d is odd, the coordinate that is left over gets a random sign, without
    which d = 1 would have one direction only.

    There are ``LAYERS_PER_DOUBLING`` x ceil(log2 d) layers, about 3 d log2 d rotations. d = 2 is uniform.

    Args:
        shape: (H, M, d).
        generator: CPU generator.

    Returns:
        Rows of norm 1, (H, B, d, d), float64: as many blocks as hold M rows.

    Source:
        Choromanski et al. 2021, arXiv:2009.14794, Appendix B.2 (G-ORF).
    """
    num_heads, num_features, head_dim = shape
    blocks, pairs = num_heads * -(-num_features // head_dim), head_dim // 2
    num_layers = max(1, LAYERS_PER_DOUBLING * (head_dim - 1).bit_length())
    lottery = torch.rand((num_layers, blocks, head_dim), generator=generator, dtype=torch.float64)
    first_of_block = head_dim * torch.arange(blocks).unsqueeze(-1)
    orders = (lottery.argsort(dim=-1) + first_of_block).flatten(1)
    angles = 2 * math.pi * torch.rand((num_layers, blocks, pairs, 1), generator=generator, dtype=torch.float64)
    signs = 2.0 * torch.randint(2, (num_layers, blocks, head_dim % 2, 1), generator=generator) - 1
    columns = torch.eye(head_dim, dtype=torch.float64).repeat(blocks, 1, 1)  # rows in memory: they move as a whole
    for order, cos, sin, sign in zip(orders, angles.cos(), angles.sin(), signs, strict=True):
        shuffled = columns.flatten(0, 1)[order].view_as(columns)
        one, other, rest = shuffled[:, :pairs], shuffled[:, pairs : 2 * pairs], shuffled[:, 2 * pairs :]
        columns = torch.cat((cos * one - sin * other, sin * one + cos * other, sign * rest), dim=1)
    return columns.view(num_heads, -1, head_dim, head_dim).mT
