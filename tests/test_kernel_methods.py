"""The scikit-learn transformer: scikit-learn's own checks, the kernel it estimates, and a classifier behind it."""

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.datasets import load_digits, load_iris
from sklearn.kernel_approximation import RBFSampler
from sklearn.linear_model import LogisticRegression
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.model_selection import cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.svm import LinearSVC
from sklearn.utils.estimator_checks import parametrize_with_checks

from hf_favorpp.errors import ConfigError, InputError
from hf_favorpp.features.estimators import ESTIMATORS
from hf_favorpp.features.variance import log_variance
from hf_favorpp.kernel_methods import GaussianKernelSampler


@pytest.mark.filterwarnings("ignore:GeomRF. with n_components:UserWarning")  # of one component
@pytest.mark.filterwarnings("ignore::sklearn.exceptions.SkipTestWarning")
@parametrize_with_checks([GaussianKernelSampler(), GaussianKernelSampler("GeomRF+")])
def test_it_is_a_transformer_of_scikit_learn(estimator, check):
    check(estimator)


@pytest.mark.parametrize("method", ESTIMATORS)
def test_inner_products_estimate_the_kernel(method):
    points = 0.2 * np.random.default_rng(0).normal(size=(12, 5))
    sampler = GaussianKernelSampler(method, gamma=0.8, n_components=20_000, random_state=0).fit(points)
    features = sampler.transform(points)
    assert features.shape == (12, len(sampler.get_feature_names_out()))
    assert np.abs(features @ features.T - rbf_kernel(points, gamma=0.8)).max() < 0.06


def test_scale_is_that_of_a_support_vector_machine():
    points = np.random.default_rng(0).normal(size=(50, 4)) * 3
    assert GaussianKernelSampler(gamma="scale").fit(points).gamma_ == pytest.approx(1 / (4 * points.var()))


def test_the_state_decides_the_draw():
    points = np.random.default_rng(0).normal(size=(5, 3))
    first, again, other = (
        GaussianKernelSampler(random_state=state).fit_transform(points) for state in (1, np.random.RandomState(1), 2)
    )
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


def test_a_linear_classifier_behind_it_separates_what_it_does_not_alone():
    """XOR of two coordinates, which no linear classifier learns."""
    generator = np.random.default_rng(0)
    points = generator.normal(size=(400, 2))
    labels = (points[:, 0] * points[:, 1] > 0).astype(int)
    model = make_pipeline(GaussianKernelSampler("OPRF", gamma=0.5, n_components=200, random_state=0), LinearSVC())
    train, test, of_train, of_test = train_test_split(points, labels, random_state=0)
    assert model.fit(train, of_train).score(test, of_test) > 0.9
    assert LinearSVC().fit(train, of_train).score(test, of_test) < 0.7
    assert clone(model).get_params()["gaussiankernelsampler__method"] == "OPRF"


def test_float32_stays_float32():
    points = load_digits().data[:20].astype(np.float32) / 16
    assert GaussianKernelSampler().fit_transform(points).dtype == np.float32


def test_without_a_method_it_is_no_worse_than_the_sampler_of_scikit_learn():
    points, labels = load_iris(return_X_y=True)
    own, theirs = (
        cross_val_score(make_pipeline(sampler, LogisticRegression(max_iter=5000)), points, labels).mean()
        for sampler in (GaussianKernelSampler(random_state=0), RBFSampler(random_state=0))
    )
    assert own > theirs - 0.02


@pytest.mark.parametrize("method", ESTIMATORS)
def test_points_may_lie_far_from_the_origin(method):
    """The kernel does not know where it is."""
    points = 0.2 * np.random.default_rng(0).normal(size=(12, 5))
    near, far = (
        GaussianKernelSampler(method, gamma=0.8, random_state=0).fit_transform(shifted)
        for shifted in (points, points + 2.0**20)
    )
    np.testing.assert_allclose(far, near, rtol=1e-5, atol=1e-7)


def test_views_backwards_are_taken():
    points = np.random.default_rng(0).normal(size=(7, 3))
    sampler = GaussianKernelSampler(random_state=0).fit(points)
    np.testing.assert_allclose(sampler.transform(points[::-1]), sampler.transform(points)[::-1], rtol=1e-12)


def test_a_map_that_is_worse_than_nothing_warns():
    points = 3 * np.random.default_rng(0).normal(size=(40, 5))
    with pytest.warns(UserWarning, match=r"PosRF with n_components=100 estimates .* error of about 10\^\d+\.\d"):
        GaussianKernelSampler("PosRF").fit(points)
    GaussianKernelSampler("PosRF", gamma=0.01).fit(points)
    GaussianKernelSampler("TrigRF", gamma=100.0).fit(points)


def test_the_error_that_it_warns_of_is_the_one_there_is():
    points = 0.9 * np.random.default_rng(0).normal(size=(60, 2))
    with pytest.warns(UserWarning, match="PosRF") as warned:
        sampler = GaussianKernelSampler("PosRF", n_components=40, projection="iid").fit(points)
    exponent = float(str(warned[0].message).split("10^")[1].split(" ")[0])
    scaled = sampler._scaled(points)
    log_kernel = -torch.cdist(scaled, scaled).square() / 2
    variances = log_variance(sampler.estimator_.log_second_moment(scaled.unsqueeze(1), scaled), log_kernel).exp()
    assert np.log10(np.sqrt(variances.mean().item() / 40)) == pytest.approx(exponent, abs=0.06)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_scale_of_equal_entries_is_1(dtype):
    sampler = GaussianKernelSampler(gamma="scale").fit(np.full((10, 3), 0.1, dtype=dtype))
    assert sampler.gamma_ == pytest.approx(1.0)


@pytest.mark.parametrize("method", ["TrigRF", "GERF", "PoisRF", "GeomRF+"])
@pytest.mark.parametrize("size", [1e160, 1e308])
def test_points_whose_distances_overflow_are_refused(method, size):
    points = np.random.default_rng(0).normal(size=(10, 3)).clip(-1, 1) * size
    with np.errstate(over="ignore"), pytest.raises(InputError, match=r"gamma \|x - y\|\^2 must be finite"):
        GaussianKernelSampler(method).fit(points)


@pytest.mark.parametrize(("method", "message"), [("GERF", "finds no real A"), ("PoisRF", "rates lambda <= 1e")])
def test_points_too_far_apart_for_parameters_are_refused(method, message):
    points = 1e11 * np.random.default_rng(0).normal(size=(10, 3))
    with pytest.raises((InputError, ConfigError), match=message):
        GaussianKernelSampler(method).fit(points)


def test_features_that_overflow_are_refused():
    points = 0.1 * np.random.default_rng(0).normal(size=(30, 3)).astype(np.float32)
    sampler = GaussianKernelSampler("PoisRF", n_components=500, random_state=0).fit(points)
    sampler.omega_ = torch.full_like(sampler.omega_, 60.0)
    with pytest.raises(InputError, match="features of PoisRF overflow float32"):
        sampler.transform(5 * points / np.abs(points).max())


def test_numbers_of_numpy_are_taken_as_a_grid_search_gives_them():
    points = load_digits().data[:20] / 16
    sampler = GaussianKernelSampler(gamma=np.float32(0.5), n_components=np.arange(7, 9)[0], random_state=0)
    plain = GaussianKernelSampler(gamma=0.5, n_components=7, random_state=0)
    np.testing.assert_array_equal(sampler.fit_transform(points), plain.fit_transform(points))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"method": "RBF"}, "method must be one of TrigRF, "),
        ({"gamma": 0.0}, "gamma must be a number > 0 or 'scale', got 0.0"),
        ({"gamma": "auto"}, "gamma must be a number > 0 or 'scale', got 'auto'"),
        ({"gamma": None}, "gamma must be a number > 0 or 'scale', got None"),
        ({"method": ["GERF"]}, r"method must be one of .*, got \['GERF'\]"),
        ({"gamma": 10**400}, "gamma must be a number > 0 or 'scale', got 1000"),
        ({"gamma": True}, "gamma must be a number > 0 or 'scale', got True"),
        ({"n_components": 2.0}, "n_components must be an integer >= 1, got 2.0"),
        ({"n_components": 0}, "n_components must be an integer >= 1, got 0"),
        ({"projection": "fourier"}, "projection must be one of "),
    ],
)
def test_parameters_without_a_meaning_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        GaussianKernelSampler(**options).fit(np.ones((3, 2)))
