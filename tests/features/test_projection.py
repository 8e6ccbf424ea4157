"""Projections: reproducible from (seed, layer, draw), orthogonal within blocks, standard normal in every row."""

import pytest
import torch

from hf_favorpp.errors import ConfigError
from hf_favorpp.features.gerf import quadrature
from hf_favorpp.features.projection import draw_projections


@pytest.mark.parametrize("projection", ["orthogonal", "antithetic", "iid"])
def test_a_draw_depends_on_its_key_alone_and_leaves_the_global_state(projection):
    torch.manual_seed(0)
    state = torch.get_rng_state()
    first = draw_projections(2, 20, 8, projection=projection, seed=3, layer=1, draw_index=4)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(5)
    assert torch.equal(first, draw_projections(2, 20, 8, projection=projection, seed=3, layer=1, draw_index=4))
    for key in ({"seed": 4}, {"layer": 2}, {"draw_index": 5}):
        other = draw_projections(2, 20, 8, projection=projection, **{"seed": 3, "layer": 1, "draw_index": 4, **key})
        assert not torch.equal(first, other)
    assert not torch.equal(first[0], first[1]), "heads must have projections of their own"


def test_a_draw_renews_norms_as_well_as_directions():
    norms = [draw_projections(1, 64, 16, draw_index=index).norm(dim=-1) for index in (0, 1)]
    assert (norms[0] - norms[1]).abs().min() > 0


@pytest.mark.parametrize("num_features", [10, 11, 1])
def test_antithetic_rows_come_with_their_negatives(num_features):
    omega = draw_projections(2, num_features, 4, projection="antithetic")
    half = -(-num_features // 2)
    assert omega.shape == (2, num_features, 4)
    assert torch.equal(omega[:, half:], -omega[:, : num_features - half])
    assert torch.equal(omega[:, :half], draw_projections(2, half, 4))


@pytest.mark.parametrize(("num_features", "head_dim"), [(16, 16), (40, 16), (3, 16), (1, 1), (7, 1), (128, 72)])
def test_rows_are_orthogonal_within_blocks(num_features, head_dim):
    omega = draw_projections(2, num_features, head_dim).double()
    assert omega.shape == (2, num_features, head_dim)
    assert omega.dtype == torch.float64
    for start in range(0, num_features, head_dim):
        block = torch.nn.functional.normalize(omega[:, start : start + head_dim], dim=-1)
        gram = block @ block.mT
        assert (gram - torch.eye(gram.shape[-1], dtype=torch.float64)).abs().max() < 1e-5


@pytest.mark.parametrize("projection", ["orthogonal", "antithetic", "iid"])
def test_rows_are_standard_normal(projection):
    draws = torch.cat([draw_projections(64, 64, 8, projection=projection, draw_index=i) for i in range(8)]).double()
    rows = draws.flatten(0, 1)
    count = len(rows)
    assert rows.mean(0).abs().max() < 5 / count**0.5
    covariance = rows.mT @ rows / count
    assert (covariance - torch.eye(8, dtype=torch.float64)).abs().max() < 5 * (2 / count) ** 0.5
    squared_norms = rows.square().sum(-1)
    assert squared_norms.mean().item() == pytest.approx(8, abs=5 * (16 / count) ** 0.5)
    assert squared_norms.var().item() == pytest.approx(16, rel=0.1), "norms must be chi(d), not constant"


def test_first_rows_point_everywhere():
    """Without the sign of R's diagonal, QR's first direction has a preferred half-space."""
    first = torch.cat([draw_projections(500, 4, 4, draw_index=i)[:, 0] for i in range(4)])
    assert first.mean(0).abs().max() < 5 * first.std() / len(first) ** 0.5


def test_orthogonal_projections_have_less_variance_than_independent_ones():
    """CRT Theorem 4.1, measured at M = d for FAVOR++ features."""
    head_dim, heads = 16, 4000
    x, y = 0.4 * torch.nn.functional.normalize(torch.randn(2, 1, 1, 1, head_dim, dtype=torch.float64), dim=-1) * 2
    A = torch.full((1, 1), -0.02, dtype=torch.float64)
    variance = {}
    for projection in ("orthogonal", "iid"):
        omega = draw_projections(heads, head_dim, head_dim, projection=projection).double()
        nodes, log_weights = quadrature("favor++", omega, A)
        log_product = (x + y) @ nodes.mT + log_weights.unsqueeze(-2)
        variance[projection] = log_product.exp().sum(-1).var()
    assert variance["orthogonal"] < 0.95 * variance["iid"]


def test_unknown_projection_is_refused():
    with pytest.raises(ConfigError, match="'orthogonal', 'antithetic' or 'iid', got 'gaussian'"):
        draw_projections(1, 4, 4, projection="gaussian")
