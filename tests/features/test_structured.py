"""Fast transforms: the Walsh-Hadamard matrix itself, and what its products with signs are."""

import pytest
import torch

from hf_favorpp.errors import InputError
from hf_favorpp.features.structured import hadamard_directions, walsh_hadamard


def sylvester(n):
    """Return H_n by its recursive definition."""
    H = torch.ones(1, 1, dtype=torch.float64)
    while len(H) < n:
        H = torch.cat((torch.cat((H, H), dim=1), torch.cat((H, -H), dim=1)))
    return H


@pytest.mark.parametrize("n", [1, 2, 4, 32, 256])
def test_the_transform_is_the_product_with_the_matrix(n):
    x = torch.randn(3, 2, n, dtype=torch.float64)
    torch.testing.assert_close(walsh_hadamard(x), x @ sylvester(n))
    whole = torch.randint(-9, 9, (2, n))
    assert torch.equal(walsh_hadamard(walsh_hadamard(whole)), n * whole)


@pytest.mark.parametrize("n", [0, 3, 12])
def test_other_sizes_are_refused(n):
    with pytest.raises(InputError, match=f"must be a power of two, got {n}"):
        walsh_hadamard(torch.ones(2, n))


@pytest.mark.parametrize("d", [3, 4])
def test_hadamard_blocks_are_three_factors_of_a_matrix_and_signs(d):
    n = 4
    rows = hadamard_directions((2, 6, d), torch.Generator().manual_seed(0))
    D = 2 * torch.randint(2, (3, 2, 2, 1, n), generator=torch.Generator().manual_seed(0)).double() - 1
    H = sylvester(n) / n**0.5
    factors = [H @ torch.diag_embed(signs.squeeze(-2)) for signs in D]
    torch.testing.assert_close(rows, factors[0] @ factors[1] @ factors[2])
