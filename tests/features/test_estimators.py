"""Estimators by their names: the search for complex A against brute force, SMREG, and what is refused."""

import itertools
import math

import pytest
import scipy.special
import torch

from hf_favorpp.errors import ConfigError, InputError
from hf_favorpp.features.estimators import ESTIMATORS, draw_omega, fit_estimator
from hf_favorpp.features.exponential import ExponentialFeatures
from hf_favorpp.features.gerf import oprf_coefficient
from hf_favorpp.features.optimum import gerf_parameters
from hf_favorpp.features.regularised import regularised_log_ratio
from hf_favorpp.features.variance import complex_gerf_log_second_moment

F64 = torch.float64


def objective(A, s, psi_plus, psi_minus, head_dim):
    return complex_gerf_log_second_moment(
        torch.tensor(psi_plus if s == 1 else psi_minus, dtype=F64), A, s, head_dim
    ).item()


@pytest.mark.parametrize(
    ("psi_plus", "psi_minus", "head_dim"),
    [(1.0, 0.1, 2), (0.1, 5.0, 3), (30.0, 2.0, 2), (100.0, 100.0, 1), (3.0, 60.0, 1)],
)
def test_the_search_finds_what_brute_force_finds(psi_plus, psi_minus, head_dim):
    A, s = gerf_parameters(psi_plus, psi_minus, head_dim)
    found = objective(A, s, psi_plus, psi_minus, head_dim)
    scales, shares = torch.linspace(-3, 6, 37).exp().tolist(), torch.linspace(-1.5, 1.5, 13).tolist()
    grid = [complex((1 - scale) / 8, share * scale) for scale, share in itertools.product(scales, shares)]
    best = min(objective(B, t, psi_plus, psi_minus, head_dim) for B in grid for t in (1, -1))
    assert found <= best + 1e-9
    assert found >= best - 0.05 * abs(best) - 5e-3, "the grid is fine enough to come near"


def test_the_search_finds_the_closed_form_where_the_plus_sign_is_best():
    A, s = gerf_parameters(40.0, 50.0, 16)
    assert s == 1
    assert A.imag == 0
    assert A.real == pytest.approx(oprf_coefficient(torch.tensor(40.0, dtype=F64), 16).item(), rel=1e-4)


def test_near_points_are_best_served_by_the_minus_sign():
    A, s = gerf_parameters(30.0, 0.01, 8)
    assert s == -1
    assert objective(A, s, 30.0, 0.01, 8) <= objective(0, -1, 30.0, 0.01, 8)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_approaches_the_kernel(name):
    x, y = 0.3 * torch.randn(2, 10, 4, generator=torch.Generator().manual_seed(0), dtype=F64)
    estimator = fit_estimator(name, x, y)
    omega = draw_omega(estimator, 60_000, 4, projection="iid", seed=2)
    queries, keys = estimator.log_features(x, omega), estimator.log_features(y, omega, of_keys=True)
    assert queries.log_magnitude.shape == (10, 60_000 * estimator.columns)
    assert bool((queries.factor == 1).all()) == estimator.is_positive
    kernel = (-torch.cdist(x, y).square() / 2).exp()
    spread = (2 * kernel.log() + estimator.log_second_moment(x.unsqueeze(1), y.unsqueeze(0))).exp() - kernel.square()
    error = queries.values() @ keys.values().mT - kernel
    assert (error.abs() < 5 * (spread.clamp(min=0) / 60_000).sqrt() + 1e-9).all()


def test_draws_depend_on_the_seed_alone():
    for estimator in (ExponentialFeatures(0.0, 1), fit_estimator("GeomRF", torch.ones(2, 3), torch.ones(2, 3))):
        first = draw_omega(estimator, 5, 3, seed=1)
        torch.rand(3)
        assert torch.equal(first, draw_omega(estimator, 5, 3, seed=1))
        assert not torch.equal(first, draw_omega(estimator, 5, 3, seed=2)) or estimator != ExponentialFeatures(0.0, 1)
        assert first.dtype == F64


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match=r"must be one of TrigRF, .*got 'FavorRF'"):
        fit_estimator("FavorRF", torch.ones(2, 3), torch.ones(2, 3))


@pytest.mark.parametrize(("x", "y"), [((2, 3), (2, 4)), ((3,), (2, 3)), ((0, 3), (2, 3))])
def test_points_of_another_shape_are_refused(x, y):
    with pytest.raises(InputError, match=r"matrices .* of the same width"):
        fit_estimator("PosRF", torch.ones(x), torch.ones(y))


def test_points_that_are_not_finite_are_refused():
    with pytest.raises(InputError, match="must be finite"):
        fit_estimator("OPRF", torch.tensor([[math.nan, 1.0]]), torch.ones(1, 2))


@pytest.mark.parametrize("head_dim", [1, 3, 64])
def test_the_regularised_kernel_is_the_bessel_function(head_dim):
    u = torch.tensor([1e-4, 0.3, 4.0, 60.0], dtype=F64)
    order, argument = head_dim / 2 - 1, (head_dim * u).sqrt().numpy()
    log_bessel = torch.from_numpy(scipy.special.ive(order, argument)).log() + torch.from_numpy(argument)
    expected = math.lgamma(head_dim / 2) - order * torch.from_numpy(argument / 2).log() + log_bessel - u / 2
    finite = expected.isfinite()
    assert finite.sum() >= 3
    assert torch.allclose(regularised_log_ratio(u, head_dim)[finite], expected[finite], atol=1e-9)


def test_the_regularised_kernel_is_below_softmax_and_tends_to_it():
    u = torch.tensor([0.0, 1.0, 9.0], dtype=F64)
    ratios = torch.stack([regularised_log_ratio(u, head_dim) for head_dim in (4, 16, 64, 1024)])
    assert torch.equal(ratios[:, 0], torch.zeros(4, dtype=F64))
    assert (ratios[:, 1:] < 0).all()
    assert (ratios.diff(dim=0)[:, 1:] > 0).all()
    for head_dim, ratio in zip((64, 1024), ratios[2:, 1].exp(), strict=True):
        assert ratio >= 1 - 2 / head_dim ** (1 / 3), "Theorem 1 of the Performer"


def test_projections_on_the_sphere_estimate_the_regularised_kernel():
    head_dim, draws = 5, 300_000
    z = torch.full((head_dim,), 0.8, dtype=F64)
    omega = torch.randn(draws, head_dim, generator=torch.Generator().manual_seed(0), dtype=F64)
    omega = math.sqrt(head_dim) * torch.nn.functional.normalize(omega, dim=-1)
    sample = (omega @ z).exp()
    expected = (regularised_log_ratio(z.square().sum(), head_dim) + z.square().sum() / 2).exp()
    assert abs(sample.mean() - expected) < 5 * (sample.var() / draws).sqrt()
