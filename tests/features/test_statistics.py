"""Moments over real tokens only."""

import pytest
import torch

from hf_favorpp.features.statistics import sequence_statistics

F64 = torch.float64


def test_psi_is_the_mean_over_all_real_pairs():
    x, y = torch.randn(2, 3, 5, 4, dtype=F64) + 1, torch.randn(2, 3, 7, 4, dtype=F64) - 2
    query_mask = torch.tensor([[True] * 5, [True, True, False, True, False]])
    key_mask = torch.tensor([[True] * 7, [False, True, True, True, False, False, True]])
    psi = sequence_statistics(x, y, query_mask, key_mask).psi(centred=False)
    centred = sequence_statistics(x, y, query_mask, key_mask).psi(centred=True)
    for b in range(2):
        for h in range(3):
            xs, ys = x[b, h, query_mask[b]], y[b, h, key_mask[b]]
            pairs = torch.stack([(xi + yj).square().sum() for xi in xs for yj in ys])
            assert psi[b, h].item() == pytest.approx(pairs.mean().item(), rel=1e-12)
            xs, ys = xs - xs.mean(0), ys - ys.mean(0)
            pairs = torch.stack([(xi + yj).square().sum() for xi in xs for yj in ys])
            assert centred[b, h].item() == pytest.approx(pairs.mean().item(), rel=1e-12)


def test_different_lengths_each_divide_by_their_own_count():
    x, y = torch.randn(1, 1, 3, 4, dtype=F64), torch.randn(1, 1, 300, 4, dtype=F64)
    statistics = sequence_statistics(x, y)
    assert torch.allclose(statistics.mean_x, x.mean(-2))
    assert torch.allclose(statistics.mean_y, y.mean(-2))


def test_statistics_have_no_gradient():
    x = torch.randn(1, 2, 5, 4, requires_grad=True)
    assert not any(moment.requires_grad for moment in sequence_statistics(x, x, covariance=True))


def test_a_sequence_without_real_tokens_gives_zeros():
    x = torch.randn(2, 2, 5, 4)
    mask = torch.tensor([[True] * 5, [False] * 5])
    for moment in sequence_statistics(x, x, mask, mask, covariance=True):
        assert torch.isfinite(moment).all()
        assert (moment[1] == 0).all()


def test_psi_keeps_its_digits_at_a_large_mean():
    """Mean squares minus squared means would lose the spread entirely here in float32."""
    x = torch.randn(1, 1, 100, 8) + 3000
    psi = sequence_statistics(x, x).psi(centred=True)
    assert psi.item() == pytest.approx(2 * (x.double() - x.double().mean(-2)).square().sum(-1).mean().item(), rel=1e-3)


def test_covariances_are_those_of_the_real_tokens():
    x, y = torch.randn(2, 3, 9, 4, dtype=F64) + 1, torch.randn(2, 3, 7, 4, dtype=F64)
    key_mask = torch.tensor([[True] * 7, [False, True, True, True, False, False, True]])
    statistics = sequence_statistics(x, y, None, key_mask, covariance=True)
    assert torch.equal(statistics.num_tokens, torch.tensor([[7.0], [4.0]], dtype=F64))
    for h in range(3):
        real = y[1, h, key_mask[1]]
        assert torch.allclose(statistics.covariance_y[1, h], torch.cov(real.T, correction=0), atol=1e-14)
        assert torch.allclose(statistics.covariance_x[0, h], torch.cov(x[0, h].T, correction=0), atol=1e-14)
    diagonal = statistics.covariance_y.diagonal(dim1=-2, dim2=-1)
    assert torch.allclose(diagonal, statistics.variance_y, atol=1e-14)
