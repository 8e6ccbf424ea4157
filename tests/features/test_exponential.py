"""Generalised exponential features against Theorems 3.1 and 3.2 of CRT: mean and variance, complex A, either sign."""

import math

import pytest
import torch

from hf_favorpp.errors import ConfigError
from hf_favorpp.features.exponential import ExponentialFeatures, HyperbolicFeatures
from hf_favorpp.features.gerf import oprf_coefficient
from hf_favorpp.features.projection import draw_projections
from hf_favorpp.features.variance import complex_gerf_log_second_moment, gerf_log_second_moment, log_variance

F64 = torch.float64
DRAWS = 400_000


def two_points(head_dim, seed=0):
    """A query and a key of norms 0.7 and 0.5, (1, d) each."""
    points = torch.randn(2, 1, head_dim, generator=torch.Generator().manual_seed(seed), dtype=F64)
    return 0.7 * points[0] / points[0].norm(), 0.5 * points[1] / points[1].norm()


def estimates(estimator, x, y, omega):
    """One estimate of the Gaussian kernel per projection."""
    queries = estimator.log_features(x, omega).values()
    keys = estimator.log_features(y, omega, of_keys=True).values()
    return (queries * keys).reshape(-1, len(omega)).sum(0) * len(omega)


def assert_moments(sample, mean, variance):
    """Both moments within five standard errors, the second estimated from the sample itself."""
    assert abs(sample.mean() - mean) < 5 * (sample.var() / len(sample)).sqrt()
    squares = (sample - mean).square()
    assert abs(squares.mean() - variance) < 5 * (squares.var() / len(sample)).sqrt()


@pytest.mark.parametrize("s", [1, -1])
@pytest.mark.parametrize("A", [0.0, 0.03, -0.1, -0.05 + 0.04j, 0.02 - 0.06j, 0.3j])
@pytest.mark.parametrize("head_dim", [1, 5])
def test_the_real_part_is_unbiased_with_the_variance_of_theorem_3_2(head_dim, A, s):
    x, y = two_points(head_dim)
    omega = torch.randn(DRAWS, head_dim, generator=torch.Generator().manual_seed(1), dtype=F64)
    estimator = ExponentialFeatures(A, s)
    log_kernel = -(x - y).square().sum() / 2
    variance = log_variance(estimator.log_second_moment(x, y).squeeze(), log_kernel).exp()
    assert_moments(estimates(estimator, x, y, omega), log_kernel.exp(), variance)


def test_hyperbolic_features_are_unbiased_with_their_variance():
    x, y = two_points(6)
    omega = torch.randn(DRAWS, 6, generator=torch.Generator().manual_seed(1), dtype=F64)
    estimator, log_kernel = HyperbolicFeatures(), -(x - y).square().sum() / 2
    variance = log_variance(estimator.log_second_moment(x, y).squeeze(), log_kernel).exp()
    assert_moments(estimates(estimator, x, y, omega), log_kernel.exp(), variance)


@pytest.mark.parametrize("head_dim", [1, 64])
def test_the_general_formula_is_the_one_of_positive_features_and_of_trigonometric_ones(head_dim):
    u = torch.tensor([0.0, 0.5, 40.0, 300.0], dtype=F64)
    for A in (0.0, -0.4, 0.1):
        general = complex_gerf_log_second_moment(u, A, 1, head_dim)
        assert torch.allclose(general, gerf_log_second_moment(u, A, head_dim), rtol=1e-12)
    trigonometric = complex_gerf_log_second_moment(u, 0, -1, head_dim)  # E[cos^2 w.(x - y)] = (1 + e^(-2u)) / 2
    assert torch.allclose(trigonometric, u + torch.log1p((-2 * u).exp()) - math.log(2), rtol=1e-12)


def test_nothing_overflows_at_the_sizes_of_attention():
    """At d = 64 and sigma = 1 the second moment of PosRF is e^128, and its square would be infinite in float32."""
    u = torch.tensor([128.0, 2000.0], dtype=F64)
    for A, s in ((0.0, 1), (0.12, 1), (0.1 + 5j, -1), (-3.0, 1)):
        moment = complex_gerf_log_second_moment(u, A, s, 64)
        assert moment.isfinite().all()
        assert (moment >= 0).all()
    x = 3 * torch.randn(4, 64, generator=torch.Generator().manual_seed(0), dtype=F64)
    variance = log_variance(ExponentialFeatures(0.0, 1).log_second_moment(x, x), torch.zeros(4, dtype=F64))
    assert variance.isfinite().all()


def test_variance_is_nothing_where_the_estimate_is_exact():
    assert log_variance(torch.zeros(1, dtype=F64), torch.zeros(1, dtype=F64)) == -torch.inf


def test_only_real_maps_of_the_plus_sign_are_positive_and_only_real_ones_symmetric():
    assert ExponentialFeatures(-0.2, 1).is_positive
    assert not ExponentialFeatures(-0.2, -1).is_positive
    assert ExponentialFeatures(-0.2, -1).is_symmetric
    assert not ExponentialFeatures(0.1j, 1).is_symmetric
    x, omega = two_points(3)[0], torch.randn(7, 3, generator=torch.Generator().manual_seed(0), dtype=F64)
    for s in (1, -1):
        first, second = (ExponentialFeatures(-0.1, s).log_features(x, omega, of_keys=keys) for keys in (False, True))
        assert torch.allclose(first.values(), second.values())


def test_optimal_positive_features_are_bounded_and_plain_ones_are_not():
    """With A < 0 the quadratic term wins far away: the largest feature is at w = -sqrt(1 - 4A) x / (2A)."""
    x = two_points(4)[0]
    psi = torch.tensor(3.0, dtype=F64)
    A = oprf_coefficient(psi, 4).item()
    directions = torch.nn.functional.normalize(
        torch.randn(2000, 4, generator=torch.Generator().manual_seed(0), dtype=F64)
    )
    omega = torch.cat([radius * directions for radius in (1.0, 10.0, 1e3, 1e6)])
    constant = -math.log(len(omega)) / 2
    bound = -(1 - 4 * A) * x.square().sum() / (4 * A) - x.square().sum() + math.log(1 - 4 * A) + constant
    assert ExponentialFeatures(A, 1).log_features(x, omega).log_magnitude.max() <= bound
    at_best = -math.sqrt(1 - 4 * A) / (2 * A) * x
    reached = ExponentialFeatures(A, 1).log_features(x, at_best).log_magnitude.item()
    assert reached == pytest.approx(bound.item() - constant, rel=1e-9)
    assert ExponentialFeatures(0.0, 1).log_features(x, omega).log_magnitude.max() > 1e5


@pytest.mark.parametrize(("head_dim", "draws"), [(4, 40_000), (16, 8_000), (64, 1_500)])
def test_orthogonal_projections_have_less_variance_than_independent_ones(head_dim, draws):
    """Theorem 4.1: for OPRF at every d and M <= d, here M = d, beyond four standard errors of the estimate."""
    x, y = (math.sqrt(2.0) * point / point.norm() for point in two_points(head_dim))
    psi = (x + y).square().sum()
    estimator = ExponentialFeatures(oprf_coefficient(psi, head_dim).item(), 1)
    log_kernel = -(x - y).square().sum() / 2
    iid = log_variance(estimator.log_second_moment(x, y).squeeze(), log_kernel).exp().item() / head_dim
    omega = draw_projections(draws, head_dim, head_dim, projection="orthogonal").double()
    squares = omega.square().sum(-1)
    log_constant = head_dim / 2 * math.log(1 - 4 * estimator.A) - x.square().sum() - y.square().sum()
    exponent = 2 * estimator.A * squares + math.sqrt(1 - 4 * estimator.A) * (omega @ (x + y).squeeze(0)) + log_constant
    means = exponent.exp().mean(-1)
    assert_moments(means, log_kernel.exp(), means.var())
    errors = (means - log_kernel.exp()).square()
    assert errors.mean() + 4 * (errors.var() / draws).sqrt() < iid


@pytest.mark.parametrize("A", [0.25, 0.3 + 1j])
def test_a_coefficient_without_features_is_refused(A):
    with pytest.raises(ConfigError, match=r"Re\(1 - 4A\) > 0 \(CRT, Theorem 3.1\)"):
        ExponentialFeatures(A, 1)


def test_a_coefficient_without_variance_is_refused_when_variance_is_asked_for():
    estimator = ExponentialFeatures(0.2, 1)
    x, y = two_points(3)
    with pytest.raises(ConfigError, match=r"Re\(1 - 8A\) > 0 \(CRT, Theorem 3.2\).*Re\(A\) < 1/8"):
        estimator.log_second_moment(x, y)


def test_an_unknown_sign_is_refused():
    with pytest.raises(ConfigError, match=r"s must be 1 or -1"):
        ExponentialFeatures(0.0, 0)
