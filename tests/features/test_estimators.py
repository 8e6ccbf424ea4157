"""Estimators by their names: the search for complex A against brute force, SMREG, and what is refused."""

import itertools
import math

import pytest
import scipy.special
import torch

from hf_favorpp.errors import ConfigError, InputError
from hf_favorpp.features.discrete import DiscreteFeatures, poisson_rate
from hf_favorpp.features.estimators import ESTIMATORS, draw_omega, fit_estimator
from hf_favorpp.features.exponential import ExponentialFeatures, HyperbolicFeatures
from hf_favorpp.features.gerf import oprf_coefficient
from hf_favorpp.features.optimum import geometric_success, gerf_parameters
from hf_favorpp.features.regularised import regularised_log_ratio
from hf_favorpp.features.variance import (
    complex_gerf_log_second_moment,
    geometric_log_second_moment,
    gerf_log_second_moment,
    poisson_log_second_moment,
)

F64 = torch.float64
ONES = torch.ones(2, 3, dtype=F64)
POINTS = 0.3 * torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=F64)


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


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: poisson_log_second_moment(ONES, 0.0), ConfigError, "rate lambda > 0"),
        (lambda: poisson_log_second_moment(ONES, math.nan), ConfigError, "rate lambda > 0"),
        (lambda: DiscreteFeatures("poisson", "a"), ConfigError, "rate lambda > 0 .*, got 'a'"),
        (lambda: DiscreteFeatures("poisson", True), ConfigError, "rate lambda > 0 .*, got True"),
        (lambda: geometric_log_second_moment(ONES, 1.0), ConfigError, "0 < p < 1"),
        (lambda: geometric_log_second_moment(ONES, -0.5), ConfigError, "0 < p < 1"),
        (lambda: gerf_log_second_moment(ONES, 0.125, 3), ConfigError, "A < 1/8"),
        (lambda: gerf_log_second_moment(ONES, 1j, 3), ConfigError, "A must be real"),
        (lambda: complex_gerf_log_second_moment(ONES, 0, 3, 3), ConfigError, "s must be 1 or -1 .*, got 3"),
        (lambda: complex_gerf_log_second_moment(ONES, -math.inf, 1, 3), ConfigError, "finite A"),
        (lambda: ExponentialFeatures(-math.inf, 1), ConfigError, "finite A"),
        (lambda: gerf_parameters(math.nan, 1.0, 3), InputError, r"mean of \|x \+ y\|\^2 must be finite"),
        (lambda: gerf_parameters(1.0, -1.0, 3), InputError, r"mean of \|x - y\|\^2 must be finite"),
        (lambda: geometric_success(-ONES, ONES), InputError, r"means of x_l\^2"),
        (lambda: poisson_rate(ONES * 1e200, ONES * 1e200), InputError, r"means of x_l\^2"),
        (lambda: DiscreteFeatures("poisson", 1e13).draw(2, 3, torch.Generator()), ConfigError, "rates lambda <= 1e"),
        (lambda: regularised_log_ratio(-ONES, 3), InputError, r"\|x \+ y\|\^2 must be finite and >= 0"),
        (lambda: regularised_log_ratio(ONES, 0), ConfigError, "head_dim must be an integer >= 1, got 0"),
        (lambda: fit_estimator(["GERF"], POINTS, POINTS), ConfigError, "the estimator must be one of"),
        (lambda: fit_estimator("GERF", POINTS.numpy(), POINTS), InputError, "a float dtype, got ndarray"),
        (lambda: fit_estimator("GERF", POINTS.long(), POINTS), InputError, "a float dtype, got torch.int64"),
        (lambda: fit_estimator("GERF", POINTS * 1e160, POINTS), InputError, "finite norms"),
        (lambda: draw_omega(DiscreteFeatures("poisson", 1.0), 0, 3), ConfigError, "num_features .* >= 1, got 0"),
        (lambda: draw_omega(HyperbolicFeatures(), 2.5, 3), ConfigError, "num_features .* got 2.5"),
        (lambda: draw_omega(HyperbolicFeatures(), 2, 0), ConfigError, "head_dim .* got 0"),
        (lambda: draw_omega(HyperbolicFeatures(), 2, 3, seed="a"), ConfigError, "seed .* got 'a'"),
        (lambda: draw_omega(DiscreteFeatures("poisson", 1.0), 2, 3, projection="x"), ConfigError, "projection must"),
        (lambda: DiscreteFeatures("poisson", 1.0).log_features(POINTS, -ONES), InputError, "whole numbers from 0"),
        (lambda: DiscreteFeatures("poisson", 1.0).log_features(POINTS, ONES / 2), InputError, "whole numbers from 0"),
    ],
)
def test_conditions_of_the_theorems_are_checked(call, error, message):
    with pytest.raises(error, match=message):
        call()


@pytest.mark.parametrize("name", ESTIMATORS)
def test_projections_are_taken_in_the_dtype_of_the_points(name):
    x = 0.3 * torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=F64)
    estimator = fit_estimator(name, x, x)
    omega = draw_omega(estimator, 6, 4)
    features = estimator.log_features(x.float(), omega).values()
    assert features.dtype == torch.float32
    torch.testing.assert_close(features.double(), estimator.log_features(x, omega).values(), rtol=1e-4, atol=1e-5)
