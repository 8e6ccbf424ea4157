"""The scikit-learn transformer: scikit-learn's own checks, the kernel it estimates, and a classifier behind it."""

import numpy as np
import pytest
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.metrics.pairwise import rbf_kernel
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.svm import LinearSVC
from sklearn.utils.estimator_checks import parametrize_with_checks

from hf_favorpp.errors import ConfigError
from hf_favorpp.features.estimators import ESTIMATORS
from hf_favorpp.kernel_methods import GaussianKernelSampler


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
        ({"gamma": True}, "gamma must be a number > 0 or 'scale', got True"),
        ({"n_components": 2.0}, "n_components must be an integer >= 1, got 2.0"),
        ({"n_components": 0}, "n_components must be an integer >= 1, got 0"),
        ({"projection": "fourier"}, "projection must be one of "),
    ],
)
def test_parameters_without_a_meaning_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        GaussianKernelSampler(**options).fit(np.ones((3, 2)))
