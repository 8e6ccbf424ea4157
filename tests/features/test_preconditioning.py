"""Changes of variables: softmax must not notice them, and the variance must fall."""

from itertools import pairwise

import pytest
import torch

from hf_favorpp.features.gerf import quadrature
from hf_favorpp.features.preconditioning import precondition
from hf_favorpp.features.statistics import sequence_statistics

F64 = torch.float64
KINDS = ("none", "center", "diagonal", "full")


def correlated(batch=2, heads=3, length=40, head_dim=6, seed=0):
    """Queries and keys with means, and with covariances that are far from round and not aligned."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=F64)  # ruff: ignore[lambda-assignment]
    mix = draw(2, 1, heads, head_dim, head_dim) * torch.logspace(-1, 0.3, head_dim, dtype=F64)
    return (draw(batch, heads, length, head_dim) @ mix[side] + draw(batch, heads, 1, head_dim) for side in (0, 1))


def transformed(x, y, kind, **masks):
    change = precondition(sequence_statistics(x, y, covariance=True, **masks), kind)
    x, y, key_weight = change.shift(x, y)
    if change.transform_x is not None:
        x, y = x @ change.transform_x.mT, y @ change.transform_y.mT
    return x, y, key_weight, change


@pytest.mark.parametrize("length", [1, 2, 5, 40, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_softmax_does_not_change(kind, length):
    x, y = correlated(length=length)
    x_, y_, key_weight, _ = transformed(x, y, kind)
    changed = torch.softmax(x_ @ y_.mT + key_weight.unsqueeze(-2), dim=-1)
    assert (changed - torch.softmax(x @ y.mT, dim=-1)).abs().max() < 1e-12


def test_full_makes_both_covariances_the_same_diagonal_matrix():
    x, y, _, change = transformed(*correlated(length=100_000, batch=1), "full")
    moments = sequence_statistics(x, y, covariance=True)
    diagonal = torch.diag_embed(moments.variance_x)
    scale = moments.variance_x.amax()
    assert (moments.covariance_x - diagonal).abs().max() < 1e-3 * scale  # the ridge is 1e-4 of the mean variance
    assert (moments.covariance_y - diagonal).abs().max() < 1e-3 * scale
    assert (change.coefficient < 0).all()


def test_diagonal_balances_the_variances():
    x, y, _, change = transformed(*correlated(length=100_000, batch=1), "diagonal")
    moments = sequence_statistics(x, y)
    assert torch.allclose(moments.variance_x, moments.variance_y, rtol=0.02)
    assert torch.allclose(change.transform_x @ change.transform_y, torch.eye(6, dtype=F64).expand(1, 3, 6, 6))


def test_each_preconditioning_leaves_less_to_estimate_than_the_one_before():
    """psi, in which the variance is exponential, falls from one to the next."""
    x, y = correlated(length=500)
    psi = []
    for kind in KINDS:
        x_, y_, _, _ = transformed(x, y, kind)
        psi.append(sequence_statistics(x_, y_).psi(centred=False).mean().item())
    assert all(later < 0.97 * earlier for earlier, later in pairwise(psi))


@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_fewer_tokens_than_coordinates_stay_bounded(kind):
    for length in (1, 2, 3):
        x, y = correlated(length=length)
        x_, y_, _, change = transformed(x, y, kind)
        assert all(torch.isfinite(t).all() for t in (x_, y_, *change))
        products = change.transform_x @ change.transform_y.mT
        assert torch.allclose(products, torch.eye(6, dtype=F64).expand_as(products), atol=1e-9)
        assert torch.linalg.cond(change.transform_x).max() < 1e3


@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_without_any_variance_the_transform_is_the_identity(kind):
    x = torch.ones(1, 2, 5, 4, dtype=F64)
    change = precondition(sequence_statistics(x, x, covariance=True), kind)
    identity = torch.eye(4, dtype=F64).expand(1, 2, 4, 4)
    assert torch.allclose(change.transform_x.abs(), identity, atol=1e-12)
    assert torch.isfinite(change.coefficient).all()


@pytest.mark.parametrize("kind", ["diagonal", "full"])
def test_an_overflow_shows_as_nan_instead_of_stopping_the_run(kind):
    x, y = correlated()
    x[0, 0, 0] = torch.inf
    change = precondition(sequence_statistics(x, y, covariance=True), kind)
    assert torch.isfinite(change.transform_x).all()
    assert not torch.isfinite(change.center_x[0, 0]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_transforms_fold_into_the_projections(kind):
    x, y = correlated()
    x_, y_, _, change = transformed(x, y, kind)
    nodes, _ = quadrature("favor++", torch.randn(3, 7, 6, dtype=F64), change.coefficient)
    query_projection, key_projection = change.fold(nodes, nodes)
    x, y, _ = change.shift(x, y)
    assert torch.allclose(x @ query_projection.mT, x_ @ nodes.mT, atol=1e-9)
    assert torch.allclose(y @ key_projection.mT, y_ @ nodes.mT, atol=1e-9)
    assert torch.allclose(change.sq_norm_x(x), x_.square().sum(-1), atol=1e-9)
    assert torch.allclose(change.sq_norm_y(y), y_.square().sum(-1), atol=1e-9)


def test_float32_statistics_are_decomposed_in_float64():
    """Condition numbers of 1e5 in either covariance: in float32 the transform would miss its inverse by far."""
    x, y = correlated(length=2000)
    x, y = (t * torch.logspace(0, 2.5, 6, dtype=F64) for t in (x, y))
    exact = precondition(sequence_statistics(x, y, covariance=True), "full")
    rounded = precondition(sequence_statistics(x.float(), y.float(), covariance=True), "full")
    assert rounded.transform_x.dtype == torch.float32
    x_ = (x - exact.center_x.unsqueeze(-2)) @ rounded.transform_x.double().mT
    y_ = (y - exact.center_y.unsqueeze(-2)) @ rounded.transform_y.double().mT
    plain = (x - exact.center_x.unsqueeze(-2)) @ (y - exact.center_y.unsqueeze(-2)).mT
    assert (x_ @ y_.mT - plain).norm() < 1e-6 * plain.norm()


@pytest.mark.parametrize("kind", KINDS)
def test_the_coefficient_is_the_best_one_for_what_the_change_leaves(kind):
    """CRT Theorem 3.3 from psi of the changed queries and keys: in each coordinate by itself, or all together."""
    x, y, _, change = transformed(*correlated(length=20_000, batch=1), kind)
    moments = sequence_statistics(x, y)
    psi, d = moments.psi(centred=False).unsqueeze(-1), 6
    if kind in ("diagonal", "full"):
        psi, d = moments.variance_x + moments.variance_y, 1
    rho = 2 * d / ((2 * psi + d).square().add(8 * d * psi).sqrt() + 2 * psi + d)
    assert torch.allclose(change.coefficient, (1 - 1 / rho) / 8, rtol=3e-2, atol=5e-2)  # one has the ridge
