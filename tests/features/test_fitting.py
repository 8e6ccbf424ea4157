"""Projections chosen for the data: the objective never falls, the choice is fair, and rank sums are all it shares."""

import pytest
import torch

from hf_favorpp.features.fitting import LAST_STEPS, draw_proportionally, fit_quadrature
from hf_favorpp.features.gerf import quadrature
from hf_favorpp.features.pairs import PairSample

F64 = torch.float64
HEADS, DIM = 2, 5


def sample(batch=3, queries=6, keys=9, window=0, seed=0, dtype=F64):
    """Clustered queries and keys, the last sequence shorter than the others."""
    generator = torch.Generator().manual_seed(seed)
    centres = 1.5 * torch.randn(HEADS, 2, DIM, generator=torch.Generator().manual_seed(99), dtype=F64)
    pick = torch.randint(0, 2, (batch, keys), generator=generator)
    y = centres[:, pick].transpose(0, 1) + 0.4 * torch.randn(batch, HEADS, keys, DIM, generator=generator, dtype=F64)
    x = y[:, :, :queries].flip(-1) + 0.4 * torch.randn(batch, HEADS, queries, DIM, generator=generator, dtype=F64)
    key_weight = 0.3 * torch.randn(batch, HEADS, keys, generator=generator, dtype=F64)
    length = torch.tensor([keys] * (batch - 1) + [4])
    key_mask = torch.arange(keys) < length.unsqueeze(1)
    query_mask = key_mask[:, :queries]
    real = query_mask.unsqueeze(2) & key_mask.unsqueeze(1)
    near = torch.zeros_like(real)
    if window:
        near = real & (torch.arange(queries).unsqueeze(1) // window == torch.arange(keys) // window)
    return PairSample(x.to(dtype), y.to(dtype), key_weight.to(dtype), query_mask, real & ~near, near)


def candidates(count, dtype=F64):
    omega = torch.randn(HEADS, count, DIM, generator=torch.Generator().manual_seed(5), dtype=F64)
    nodes, log_weights = quadrature("favor++", omega, torch.full((HEADS, 1), -0.05, dtype=F64))
    return nodes.to(dtype), log_weights.to(dtype)


def log_likelihood(samples, nodes, log_weights):
    """The objective in its plainest form, per head: one query and one key at a time."""
    total = torch.zeros(HEADS, dtype=F64)
    for s in samples:
        for b, i in s.query_mask.nonzero().tolist():
            for h in range(HEADS):
                x, keys = s.x[b, h, i], [j for j in range(s.y.shape[2]) if (s.far | s.near)[b, i, j]]
                exact = torch.stack([x @ s.y[b, h, j] + s.key_weight[b, h, j] for j in keys])
                estimate = torch.stack([
                    logit
                    if s.near[b, i, j]
                    else torch.logsumexp(
                        log_weights[h]
                        + nodes[h] @ (x + s.y[b, h, j])
                        - (x.square().sum() + s.y[b, h, j].square().sum()) / 2
                        + s.key_weight[b, h, j],
                        0,
                    )
                    for j, logit in zip(keys, exact, strict=True)
                ])
                total[h] += torch.softmax(exact, 0) @ torch.log_softmax(estimate, 0)
    return total


def fit(samples, nodes, log_weights, count, **options):
    return fit_quadrature(samples, nodes, log_weights, count, torch.Generator().manual_seed(0), **options)


@pytest.mark.parametrize("window", [0, 3])
def test_every_update_raises_the_likelihood(window, monkeypatch):
    samples, (nodes, log_weights) = [sample(window=window), sample(batch=2, seed=1, window=window)], candidates(12)
    before = log_likelihood(samples, nodes, log_weights)
    for steps in range(1, 6):
        monkeypatch.setattr("hf_favorpp.features.fitting.LAST_STEPS", steps)
        chosen, weights = fit(samples, nodes, log_weights, 12)
        assert torch.equal(chosen, torch.arange(12).expand(HEADS, 12))
        after = log_likelihood(samples, nodes, weights)
        assert (after > before).all()
        before = after


@pytest.mark.parametrize("window", [0, 3])
def test_a_choice_explains_other_data_of_the_kind_better_than_as_many_random_nodes(window):
    samples = [sample(batch=8, seed=seed, window=window) for seed in range(4)]
    others = [sample(seed=50, window=window)]
    nodes, log_weights = candidates(64)
    chosen, weights = fit(samples, nodes, log_weights, 8)
    picked = nodes.gather(1, chosen.unsqueeze(-1).expand(-1, -1, DIM))
    random = log_likelihood(others, nodes[:, :8], log_weights[:, :8])
    assert (log_likelihood(others, picked, weights) > random).all()


def test_padding_is_never_read():
    full, (nodes, log_weights) = sample(), candidates(16)
    garbage = full._replace(
        y=full.y.masked_fill(~(full.far.any(1)[:, None, :, None]), 7.0),
        x=full.x.masked_fill(~full.query_mask[:, None, :, None], -9.0),
    )
    for got, expected in zip(fit([garbage], nodes, log_weights, 4), fit([full], nodes, log_weights, 4), strict=True):
        assert torch.allclose(got.to(F64), expected.to(F64), atol=1e-9)


def test_two_processes_with_half_of_the_data_agree_with_one():
    halves, (nodes, log_weights) = [sample(seed=0), sample(seed=1)], candidates(16)
    together = fit(halves, nodes, log_weights, 4)
    shared = []
    fit([halves[1]], nodes, log_weights, 16, reduce=lambda total: shared.append(total.clone()) or total)
    assert len(shared) == HEADS * LAST_STEPS
    assert shared[0].shape == (2, 16)
    apart = fit([halves[0], halves[1]], nodes, log_weights, 4, reduce=lambda total: total + 0)
    assert torch.equal(apart[0], together[0])


def test_float32_makes_the_same_choice():
    nodes, log_weights = candidates(16)
    expected = fit([sample()], nodes, log_weights, 4)
    chosen, weights = fit([sample(dtype=torch.float32)], nodes.float(), log_weights.float(), 4)
    assert torch.equal(chosen, expected[0])
    assert torch.allclose(weights.to(F64), expected[1], atol=1e-3)


def test_items_are_drawn_with_their_probabilities():
    mass = torch.tensor([5.0, 1.0, 1.0, 0.5, 0.1, 0.0, 2.0, 3.0])
    generator, counts, draws = torch.Generator().manual_seed(0), torch.zeros(8), 4000
    for _ in range(draws):
        drawn, probability = draw_proportionally(mass, 4, generator)
        assert len(set(drawn.tolist())) == 4
        counts[drawn] += 1
    assert probability.sum().item() == pytest.approx(4, rel=1e-5)
    assert probability[0] == probability[7] == 1
    assert torch.allclose(probability[1:4] / probability[6], mass[1:4] / mass[6])
    assert (counts / draws - probability).abs().max() < 5 * 0.5 / draws**0.5


@pytest.mark.parametrize(
    ("mass", "count"), [([0.0] * 6, 3), ([1.0, 0.0, 0.0, 0.0], 3), ([2.0], 1), ([1e-30, 1e30], 2)]
)
def test_drawing_is_exact_in_number_for_any_masses(mass, count):
    drawn, probability = draw_proportionally(torch.tensor(mass), count, torch.Generator().manual_seed(1))
    assert len(drawn) == count
    assert ((probability > 0) & (probability <= 1)).all()


def test_halving_keeps_every_weight_in_expectation(monkeypatch):
    monkeypatch.setattr("hf_favorpp.features.fitting.STEPS_BETWEEN", 1)
    samples, (nodes, log_weights) = [sample()], candidates(8)
    monkeypatch.setattr("hf_favorpp.features.fitting.LAST_STEPS", 1)
    _, updated = fit(samples, nodes, log_weights, 8)
    monkeypatch.setattr("hf_favorpp.features.fitting.LAST_STEPS", 0)
    total, squares, draws = torch.zeros(HEADS, 8, dtype=F64), torch.zeros(HEADS, 8, dtype=F64), 400
    times = torch.zeros(HEADS, 8)
    for seed in range(draws):
        generator = torch.Generator().manual_seed(seed)
        chosen, weights = fit_quadrature(samples, nodes, log_weights, 4, generator)
        drawn = torch.zeros(HEADS, 8, dtype=F64).scatter(1, chosen, weights.exp())
        times += drawn > 0
        total, squares = total + drawn / draws, squares + drawn.square() / draws
    error = (squares - total.square()).clamp(min=0).sqrt() / draws**0.5
    often = times >= 30  # of the others too few were drawn to tell
    assert ((total - updated.exp()).abs() <= 5 * error + 1e-9)[often].all()
    assert (often & (times < draws)).sum() >= 4
