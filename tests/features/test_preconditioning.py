"""Statistics over real tokens only, and the invariance of softmax under centring."""

import pytest
import torch

from hf_favorpp.features.preconditioning import Statistics, center, sequence_statistics

F64 = torch.float64


def test_psi_is_the_mean_over_all_real_pairs():
    x, y = torch.randn(2, 3, 5, 4, dtype=F64) + 1, torch.randn(2, 3, 7, 4, dtype=F64) - 2
    query_mask = torch.tensor([[True] * 5, [True, True, False, True, False]])
    key_mask = torch.tensor([[True] * 7, [False, True, True, True, False, False, True]])
    psi = sequence_statistics(x, y, query_mask, key_mask).psi("none")
    centred = sequence_statistics(x, y, query_mask, key_mask).psi("center")
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
    assert not any(moment.requires_grad for moment in sequence_statistics(x, x))


def test_a_sequence_without_real_tokens_gives_zeros():
    x = torch.randn(2, 2, 5, 4)
    mask = torch.tensor([[True] * 5, [False] * 5])
    for moment in sequence_statistics(x, x, mask, mask):
        assert torch.isfinite(moment).all()
        assert (moment[1] == 0).all()


def test_psi_keeps_its_digits_at_a_large_mean():
    """Mean squares minus squared means would lose the spread entirely here in float32."""
    x = torch.randn(1, 1, 100, 8) + 3000
    psi = sequence_statistics(x, x).psi("center")
    assert psi.item() == pytest.approx(2 * (x.double() - x.double().mean(-2)).square().sum(-1).mean().item(), rel=1e-3)


def test_softmax_does_not_change_under_centring():
    x, y = torch.randn(2, 3, 5, 4, dtype=F64) + 1, torch.randn(2, 3, 7, 4, dtype=F64) - 2
    statistics = Statistics(
        torch.randn(2, 3, 4, dtype=F64), torch.randn(2, 3, 4, dtype=F64), torch.ones(2, 3), torch.ones(2, 3)
    )
    plain = torch.softmax(x @ y.mT, dim=-1)
    x, y, log_weight = center(x, y, statistics)
    assert (torch.softmax(x @ y.mT + log_weight.unsqueeze(-2), dim=-1) - plain).abs().max() < 1e-13
