"""Projections: reproducible from (seed, layer, draw), orthogonal within blocks, standard normal in every row."""

import hashlib

import pytest
import torch

from hf_favorpp.errors import ConfigError
from hf_favorpp.features.gerf import quadrature
from hf_favorpp.features.projection import draw_projections
from hf_favorpp.rules import NORMS, PROJECTIONS


@pytest.mark.parametrize("projection", PROJECTIONS)
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


def as_released(shape, projection, key):
    """Return what versions up to 0.5 drew: checkpoints and seeds from then must stay what they were."""
    generator = torch.Generator().manual_seed(
        int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big", signed=True)
    )
    if projection == "iid":
        return torch.randn(shape, generator=generator, dtype=torch.float64).float()
    heads, rows, d = shape
    drawn = -(-rows // 2) if projection == "antithetic" else rows
    square = (heads, -(-drawn // d), d, d)
    q, r = torch.linalg.qr(torch.randn(square, generator=generator, dtype=torch.float64))
    directions = (q * r.diagonal(dim1=-2, dim2=-1).sign().unsqueeze(-2)).mT
    norms = torch.randn(square, generator=generator, dtype=torch.float64).norm(dim=-1, keepdim=True)
    omega = (norms * directions).flatten(1, 2)[:, :drawn].float()
    return torch.cat((omega, -omega), dim=1)[:, :rows] if projection == "antithetic" else omega


@pytest.mark.parametrize("shape", [(2, 7, 3), (3, 40, 16), (1, 5, 8)])
@pytest.mark.parametrize("projection", ["orthogonal", "antithetic", "iid"])
def test_draws_are_to_the_bit_those_of_earlier_versions(projection, shape):
    omega = draw_projections(*shape, projection=projection, seed=5, layer=2, draw_index=1)
    assert torch.equal(omega, as_released(shape, projection, "5/2/1"))


@pytest.mark.parametrize(
    ("projection", "first", "last"),
    [
        ("orthogonal", [0.19675178, -1.3956594, -1.3215984], [0.60078063, -0.62854695, 1.3273218]),
        ("antithetic", [0.19849162, -1.4080013, -1.3332851], [-0.24200338, -0.36680747, -0.88077199]),
        ("iid", [0.21459520, -0.22403824, 0.18296580], [-0.63421136, -0.53343719, -0.63551470]),
    ],
)
def test_draws_have_the_values_of_earlier_versions(projection, first, last):
    omega = draw_projections(2, 7, 3, projection=projection, seed=5, layer=2, draw_index=1)
    torch.testing.assert_close(omega[0, 0], torch.tensor(first), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(omega[1, -1], torch.tensor(last), rtol=1e-6, atol=1e-6)


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


@pytest.mark.parametrize(
    ("projection", "num_features", "head_dim"),
    [
        *(("orthogonal", *sizes) for sizes in [(16, 16), (40, 16), (3, 16), (1, 1), (7, 1), (128, 72)]),
        *(("hadamard", *sizes) for sizes in [(16, 16), (40, 16), (3, 16), (1, 1), (7, 1), (5, 2), (64, 64)]),
        *(("givens", *sizes) for sizes in [(16, 16), (40, 16), (3, 16), (1, 1), (7, 1), (5, 2), (20, 7), (128, 72)]),
    ],
)
@pytest.mark.parametrize("norms", NORMS)
def test_rows_are_orthogonal_within_blocks(projection, num_features, head_dim, norms):
    omega = draw_projections(2, num_features, head_dim, projection=projection, norms=norms).double()
    assert omega.shape == (2, num_features, head_dim)
    assert omega.dtype == torch.float64
    for start in range(0, num_features, head_dim):
        block = torch.nn.functional.normalize(omega[:, start : start + head_dim], dim=-1)
        gram = block @ block.mT
        assert (gram - torch.eye(gram.shape[-1], dtype=torch.float64)).abs().max() < 1e-5


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_rows_have_the_moments_of_standard_normal_ones(projection):
    draws = torch.cat([draw_projections(64, 64, 8, projection=projection, draw_index=i) for i in range(8)]).double()
    rows = draws.flatten(0, 1)
    count = len(rows)
    assert rows.mean(0).abs().max() < 5 / count**0.5
    covariance = rows.mT @ rows / count
    assert (covariance - torch.eye(8, dtype=torch.float64)).abs().max() < 5 * (2 / count) ** 0.5
    squared_norms = rows.square().sum(-1)
    assert squared_norms.mean().item() == pytest.approx(8, abs=5 * (16 / count) ** 0.5)
    assert squared_norms.var().item() == pytest.approx(16, rel=0.1), "norms must be chi(d), not constant"


@pytest.mark.parametrize("head_dim", [1, 3, 4, 6, 11])
@pytest.mark.parametrize("projection", ["hadamard", "givens"])
def test_structured_rows_have_identity_covariance_at_any_size(projection, head_dim):
    """Where d is no power of two, a Hadamard block is wider, and what the cut leaves has squared norm d on average."""
    rows = draw_projections(2000, head_dim + 2, head_dim, projection=projection).double().flatten(0, 1)
    count = len(rows)
    products = rows.unsqueeze(-1) * rows.unsqueeze(-2)
    off = (products.mean(0) - torch.eye(head_dim)).abs() / (products.std(0) / count**0.5)
    assert off.max() < 5
    assert (rows.mean(0).abs() / (rows.std(0) / count**0.5)).max() < 5


@pytest.mark.parametrize("head_dim", [3, 4, 7, 16])
def test_givens_directions_are_close_to_uniform(head_dim):
    """Fourth moments of one entry, of two of a row and of two of a column, against those of Haar's measure."""
    d = head_dim
    squares = draw_projections(3000, d, d, projection="givens", norms="sqrt_d").double().square() / d
    uniform, beside = 3 / (d * (d + 2)), 1 / (d * (d + 2))
    apart = (d + 1) / ((d - 1) * d * (d + 2))  # neither row nor column in common
    other_column, other_row = squares.roll(1, dims=2), squares.roll(1, dims=1)
    for product, expected in [
        (squares.square(), uniform),
        (squares * other_column, beside),
        (squares * other_row, beside),
        (squares * other_row.roll(1, dims=2), apart),
    ]:
        of_heads = product.mean((1, 2))
        error = (of_heads.std() / len(of_heads) ** 0.5).item()
        assert of_heads.mean().item() == pytest.approx(expected, abs=4 * error + 0.003 * expected)


@pytest.mark.parametrize(("num_features", "head_dim"), [(16, 16), (9, 3), (33, 5), (4, 1)])
@pytest.mark.parametrize("projection", PROJECTIONS)
def test_rows_can_have_norm_sqrt_d(projection, num_features, head_dim):
    """At d = 3 the cut of a Hadamard block leaves nothing of some rows; they must not become nan."""
    omega = draw_projections(200, num_features, head_dim, projection=projection, norms="sqrt_d")
    assert omega.shape == (200, num_features, head_dim)
    assert omega.dtype == torch.float32
    torch.testing.assert_close(omega.norm(dim=-1), torch.full((200, num_features), head_dim**0.5))
    rows = omega.flatten(0, 1)
    assert rows.mean(0).abs().max() < 5 * 2**0.5 / len(rows) ** 0.5  # antithetic or not, d directions at least


@pytest.mark.parametrize("projection", ["orthogonal", "hadamard", "givens"])
def test_norms_change_lengths_alone(projection):
    rows = [draw_projections(2, 24, 8, projection=projection, norms=norms) for norms in NORMS]
    torch.testing.assert_close(*(torch.nn.functional.normalize(each, dim=-1) for each in rows))


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
    with pytest.raises(ConfigError, match="'orthogonal', 'antithetic', 'iid', 'hadamard', 'givens', got 'gaussian'"):
        draw_projections(1, 4, 4, projection="gaussian")


def test_unknown_norms_are_refused():
    with pytest.raises(ConfigError, match="norms must be one of 'chi', 'sqrt_d', got 'one'"):
        draw_projections(1, 4, 4, norms="one")
