"""Poisson and geometric features against Theorems 3.4 and 3.5 of CRT: mean, variance, best parameters, shift."""

import math

import pytest
import scipy.special
import torch

from hf_favorpp.errors import ConfigError, InputError
from hf_favorpp.features.discrete import DiscreteFeatures, poisson_rate, positive_shift
from hf_favorpp.features.estimators import PairStatistics, fit_estimator
from hf_favorpp.features.optimum import geometric_success
from hf_favorpp.features.variance import log_bessel_i0, log_variance

F64 = torch.float64
DRAWS = 400_000
MAPS = [DiscreteFeatures("poisson", 0.3), DiscreteFeatures("poisson", 1.1), DiscreteFeatures("geometric", 0.6)]


def points(count, head_dim, seed=0):
    return 0.7 * torch.randn(count, head_dim, generator=torch.Generator().manual_seed(seed), dtype=F64)


def assert_moments(sample, mean, variance):
    """Both moments within five standard errors, the second estimated from the sample itself."""
    assert abs(sample.mean() - mean) < 5 * (sample.var() / len(sample)).sqrt()
    squares = (sample - mean).square()
    assert abs(squares.mean() - variance) < 5 * (squares.var() / len(sample)).sqrt()


@pytest.mark.parametrize("shift", [None, -0.2])
@pytest.mark.parametrize("head_dim", [1, 4])
@pytest.mark.parametrize("features", MAPS, ids=lambda features: f"{features.distribution}-{features.parameter}")
def test_estimates_are_unbiased_with_the_variance_of_the_theorems(features, head_dim, shift):
    if shift is not None:
        features = DiscreteFeatures(
            features.distribution, features.parameter, torch.full((head_dim,), shift, dtype=F64)
        )
    x, y = points(2, head_dim).split(1)
    omega = features.draw(DRAWS, head_dim, torch.Generator().manual_seed(1))
    sample = (features.log_features(x, omega).values() * features.log_features(y, omega).values()).squeeze() * DRAWS
    log_kernel = -(x - y).square().sum() / 2
    variance = log_variance(features.log_second_moment(x, y).squeeze(), log_kernel).exp()
    assert_moments(sample, log_kernel.exp(), variance)


@pytest.mark.parametrize("features", MAPS, ids=lambda features: f"{features.distribution}-{features.parameter}")
def test_features_are_the_plain_formula(features):
    x, omega = points(6, 3), features.draw(50, 3, torch.Generator().manual_seed(0))
    x[0, 1] = 0.0
    factorial = torch.lgamma(omega + 1).exp()
    if features.distribution == "poisson":
        probability = math.exp(-features.parameter) * features.parameter**omega / factorial
    else:
        probability = features.parameter * (1 - features.parameter) ** omega
    terms = x.unsqueeze(1) ** omega / (factorial * probability).sqrt()
    plain = (-x.square().sum(-1, keepdim=True) / 2).exp() * terms.prod(-1) / math.sqrt(50)
    assert torch.allclose(features.log_features(x, omega).values(), plain, rtol=1e-9, atol=1e-300)


def test_counts_have_their_distribution():
    for features, mean, variance in (
        (DiscreteFeatures("poisson", 0.7), 0.7, 0.7),
        (DiscreteFeatures("geometric", 0.4), 0.6 / 0.4, 0.6 / 0.16),
    ):
        counts = features.draw(100_000, 2, torch.Generator().manual_seed(3)).flatten()
        assert counts.min() == 0
        assert torch.equal(counts, counts.round())
        assert_moments(counts, mean, variance)


def log_moment(distribution, parameter, x, y):
    """The averaged objective of eqs. 11 and 13: E over pairs inside, as the papers' eqs. 12 and 14 take it."""
    product = (x.square().mean(0) * y.square().mean(0)).sqrt()
    if distribution == "poisson":
        return parameter * len(product) + product.square().sum().item() / parameter
    argument = 2 * product.numpy() / math.sqrt(1 - parameter)
    bessel = scipy.special.ive(0, argument)
    return (-len(product) * math.log(parameter)) + float((argument + [math.log(value) for value in bessel]).sum())


@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_the_parameters_are_the_best_ones(scale):
    x, y = scale * points(30, 5), scale * points(40, 5, seed=1)
    seconds = x.square().mean(0), y.square().mean(0)
    rate, success = poisson_rate(*seconds), geometric_success(*seconds)
    for factor in (0.97, 1.03):
        assert log_moment("poisson", rate, x, y) < log_moment("poisson", rate * factor, x, y)
        other = 1 / (1 + (1 / success - 1) * factor)
        assert log_moment("geometric", success, x, y) < log_moment("geometric", other, x, y)


def test_one_pair_has_the_rate_of_theorem_3_4():
    x, y = points(2, 5).split(1)
    expected = 5**-0.5 * (x.square() * y.square()).sum().sqrt()
    assert poisson_rate(x.square().mean(0), y.square().mean(0)) == pytest.approx(expected.item(), rel=1e-12)


def test_points_at_the_origin_are_served():
    zeros = torch.zeros(3, 4, dtype=F64)
    for name in ("PoisRF", "GeomRF", "PoisRF+", "GeomRF+"):
        estimator = fit_estimator(name, zeros, zeros)
        omega = estimator.draw(20, 4, torch.Generator().manual_seed(0))
        features = estimator.log_features(zeros, omega).values()
        assert torch.allclose(features @ features.mT, torch.ones(3, 3, dtype=F64), atol=1e-2)


def test_the_shift_makes_features_positive_and_keeps_the_kernel():
    x, y = points(20, 3), points(25, 3, seed=1)
    for name in ("PoisRF+", "GeomRF+"):
        estimator = fit_estimator(name, x, y)
        assert estimator.is_positive
        omega = estimator.draw(300, 3, torch.Generator().manual_seed(0))
        for of in (x, y):
            assert (estimator.log_features(of, omega).factor == 1).all()
            assert torch.equal(
                estimator.positive_log_features(of, omega), estimator.log_features(of, omega).log_magnitude
            )
    shift = positive_shift(x, y)
    rate = poisson_rate((x - shift).square().mean(0), (y - shift).square().mean(0))
    assert fit_estimator("PoisRF+", x, y).parameter == pytest.approx(rate, rel=1e-12)
    least = torch.cat((x, y)).amin(0)
    assert (shift < least).all()
    assert torch.allclose(shift, least, atol=1e-4)


def test_points_below_the_shift_are_refused_where_positive_features_are_asked_for():
    x, y = points(20, 3), points(25, 3, seed=1)
    estimator = fit_estimator("PoisRF+", x, y)
    omega = estimator.draw(10, 3, torch.Generator().manual_seed(0))
    with pytest.raises(InputError, match=r"every entry of x \(less the shift\) is > 0 \(CRT, Section 3.2\), got -"):
        estimator.positive_log_features(x - 10, omega)
    with pytest.raises(InputError, match="got 0"):
        DiscreteFeatures("poisson", 1.0).positive_log_features(torch.zeros(1, 3, dtype=F64), omega)


@pytest.mark.parametrize("rate", [0.0, -1.0, math.inf, math.nan])
def test_a_rate_that_is_not_positive_is_refused(rate):
    with pytest.raises(ConfigError, match=r"lambda > 0 \(CRT"):
        DiscreteFeatures("poisson", rate)


@pytest.mark.parametrize("success", [0.0, 1.0, -0.1, 1.5, math.nan])
def test_a_probability_outside_its_range_is_refused(success):
    with pytest.raises(ConfigError, match=r"0 < p < 1 \(CRT"):
        DiscreteFeatures("geometric", success)


def test_an_unknown_distribution_is_refused():
    with pytest.raises(ConfigError, match="'poisson' or 'geometric'"):
        DiscreteFeatures("binomial", 0.5)


def test_the_bessel_function_stays_in_log_space():
    x = torch.tensor([0.0, 1e-3, 1.0, 30.0, 5000.0], dtype=F64)
    expected = torch.from_numpy(scipy.special.ive(0, x.numpy())).log() + x
    assert torch.allclose(log_bessel_i0(x), expected, rtol=1e-12, atol=1e-15)


def test_statistics_are_means_over_all_pairs():
    x, y = points(7, 3), points(9, 3, seed=1) + 1
    statistics = PairStatistics.of(x, y)
    pairs = x.unsqueeze(1), y.unsqueeze(0)
    assert statistics.psi_plus == pytest.approx((pairs[0] + pairs[1]).square().sum(-1).mean().item(), rel=1e-12)
    assert statistics.psi_minus == pytest.approx((pairs[0] - pairs[1]).square().sum(-1).mean().item(), rel=1e-12)
    products = (pairs[0] * pairs[1]).square().mean((0, 1))
    assert torch.allclose(statistics.second_x * statistics.second_y, products, rtol=1e-12)
