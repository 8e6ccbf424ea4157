"""Means and second moments against the plainest float64."""

import pytest
import torch
from comparison import compare, order_and_count, to

from hf_favorpp.attention.triton import moments

TOLERANCE = 2e-5
CASES = {
    "odd sizes": {"length": 70, "width": 5},
    "several tiles": {"rows": 1, "heads": 1, "length": 150, "width": 40},
    "one token": {"length": 1, "width": 1},
    "mask": {"mask": "padding", "length": 40},
    "row without tokens": {"mask": "empty row"},
    "packed": {"rows": 1, "mask": "packed", "length": 41},
    "float16": {"dtype": torch.float16, "length": 40},
    "bfloat16": {"dtype": torch.bfloat16, "length": 40},
    "wide": {"rows": 1, "heads": 1, "width": 72, "length": 20},
}


def plain_moments(tokens, order, count):
    """Do one sequence and head after the other."""
    means, covariances = [], []
    for n in range(tokens.shape[0] if order is None else order.shape[0]):
        positions = torch.arange(tokens.shape[2]) if order is None else order[n, : count[n]]
        for t in tokens[min(n, tokens.shape[0] - 1), :, positions]:
            size = max(1, t.shape[0])
            mean = t.sum(0) / size
            means.append(mean)
            covariances.append((t - mean).mT @ (t - mean) / size)
    shape = (-1, tokens.shape[1])
    return torch.stack(means).unflatten(0, shape), torch.stack(covariances).unflatten(0, shape)


@pytest.mark.parametrize("case", CASES)
def test_moments(case, device):
    check(device, **CASES[case])


def check(device, rows=2, heads=2, length=17, width=16, mask=None, dtype=torch.float32, offset=1.0):
    tokens = (torch.randn(rows, length, heads, width) + offset).transpose(1, 2).to(dtype)
    order, count = order_and_count(mask, rows, length)
    mean, covariance = plain_moments(tokens.double(), order, count)
    variance = covariance.diagonal(dim1=-2, dim2=-1)
    for wanted in (False, True):
        found = moments(*(to(t, device) for t in (tokens, order, count)), covariance=wanted)
        compare("mean", found[0], mean, TOLERANCE)
        compare("variance", found[1], variance, TOLERANCE)
        if wanted:
            compare("covariance", found[2], covariance, TOLERANCE)
        else:
            assert found[2].shape == (0,)
        assert {t.dtype for t in found} == {torch.float32}


def test_a_mean_far_from_zero_takes_no_precision_from_the_variance(device):
    check(device, length=200, width=3, rows=1, offset=1000.0)


def test_autocast_changes_nothing(device):
    tokens = torch.randn(1, 1, 150, 8).to(device)
    expected = moments(tokens, None, None, covariance=True)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        found = moments(tokens, None, None, covariance=True)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
