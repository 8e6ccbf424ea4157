"""Unbiasedness and variance of every positive feature map against the closed forms, and the coefficient of FAVOR++."""

import math

import pytest
import torch

from hf_favorpp.features.baselines import trig_features
from hf_favorpp.features.gerf import oprf_coefficient, quadrature
from hf_favorpp.features.variance import (
    gerf_log_second_moment,
    hyperbolic_log_second_moment,
    relative_variance,
)

F64 = torch.float64
DRAWS = 400_000


def two_points(head_dim, seed=0):
    """One query and one key of norms 0.6 and 0.5, (1, 1, 1, d) each."""
    generator = torch.Generator().manual_seed(seed)
    points = torch.randn(2, 1, 1, 1, head_dim, generator=generator, dtype=F64)
    return 0.6 * points[0] / points[0].norm(), 0.5 * points[1] / points[1].norm()


def iid(num_draws, head_dim, seed=1):
    return torch.randn(num_draws, head_dim, generator=torch.Generator().manual_seed(seed), dtype=F64)


def estimates(x, y, omega, A, kernel="favor++"):
    """One estimate of exp(x.y) / exp(x.y) per node; their mean is what attention uses."""
    A = None if A is None else torch.as_tensor(A, dtype=F64).expand(1, 1, -1)
    nodes, log_weights = quadrature("favor+" if A is None and kernel == "favor++" else kernel, omega, A)
    log_product = (x + y) @ nodes.mT + (log_weights - (x.square().sum() + y.square().sum()) / 2).unsqueeze(-2)
    return (log_product + math.log(nodes.shape[-2]) - (x * y).sum()).exp().flatten()


def assert_moments(sample, mean, variance):
    """Both moments within five standard errors, the second estimated from the sample itself."""
    error = (sample.var() / len(sample)).sqrt()
    assert abs(sample.mean() - mean) < 5 * error
    squares = (sample - mean).square()
    assert abs(squares.mean() - variance) < 5 * (squares.var() / len(sample)).sqrt()


@pytest.mark.parametrize("head_dim", [1, 4, 16])
@pytest.mark.parametrize("A", [None, [-0.02], [-0.1]])
def test_positive_features_are_unbiased_with_the_variance_of_eq_6(head_dim, A):
    x, y = two_points(head_dim)
    sample = estimates(x, y, iid(DRAWS, head_dim), A)
    log_second_moment = gerf_log_second_moment((x + y).square().sum(), A[0] if A else 0.0, head_dim)
    assert_moments(sample, 1.0, relative_variance(log_second_moment).item())


def test_one_coefficient_per_coordinate_is_unbiased_and_its_variance_factorises():
    head_dim = 6
    x, y = two_points(head_dim)
    A = -torch.linspace(0, 0.15, head_dim, dtype=F64)
    sample = estimates(x, y, iid(DRAWS, head_dim), A)
    log_second_moment = gerf_log_second_moment((x + y).square().flatten(), A, 1).sum()
    assert_moments(sample, 1.0, relative_variance(log_second_moment).item())


def test_hyperbolic_features_are_unbiased_with_their_variance():
    x, y = two_points(8)
    sample = estimates(x, y, iid(DRAWS, 8), None, "favor+hyperbolic").reshape(2, DRAWS).mean(0)
    expected = relative_variance(hyperbolic_log_second_moment((x + y).square().sum())).item()
    assert_moments(sample, 1.0, expected)


def test_trigonometric_features_estimate_the_gaussian_kernel():
    x, y = two_points(8)
    omega = iid(DRAWS, 8)
    sample = (trig_features(x, omega) * trig_features(y, omega)).reshape(2, DRAWS).sum(0)
    u = (x - y).square().sum().item()
    assert_moments(sample, math.exp(-u / 2), (1 - math.exp(-u)) ** 2 / 2)


def test_coefficient_of_the_design_example():
    psi = torch.tensor(16.0, dtype=F64)
    A = oprf_coefficient(psi, 64)
    rho = 1 / (1 - 8 * A)
    assert A.item() == pytest.approx(-0.0976, abs=5e-5)
    assert rho.item() == pytest.approx(0.5616, abs=5e-5)


def test_rho_stays_in_its_range_over_all_magnitudes():
    psi = torch.logspace(-12, 12, 97, dtype=F64)
    for head_dim in (1, 8, 64, 256):
        rho = 1 / (1 - 8 * oprf_coefficient(psi, head_dim))
        assert (rho > 0).all()
        assert (rho <= 1).all()
        assert (rho.diff() <= 0).all()


def test_vanishing_psi_gives_favor_plus():
    omega = iid(32, 16)
    A = oprf_coefficient(torch.zeros(1, 1, 1, dtype=F64), 16)
    assert A.item() == 0
    for got, expected in zip(quadrature("favor++", omega, A), quadrature("favor+", omega), strict=True):
        assert torch.equal(got, expected.expand_as(got))
    assert oprf_coefficient(torch.tensor(1e-10, dtype=F64), 16).item() == pytest.approx(0, abs=1e-11)


@pytest.mark.parametrize("psi", [0.3, 4.0, 60.0])
@pytest.mark.parametrize("head_dim", [4, 64])
def test_coefficient_is_the_minimum_of_the_closed_form_variance(psi, head_dim):
    u = torch.tensor(psi, dtype=F64)
    best = oprf_coefficient(u, head_dim)
    at_best = gerf_log_second_moment(u, best, head_dim)
    for A in torch.linspace(-2.0, 0.05, 400, dtype=F64):
        assert at_best <= gerf_log_second_moment(u, A, head_dim) + 1e-12
