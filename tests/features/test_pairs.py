"""Sampled queries: which keys they meet, and how far estimated attention weights are from softmax."""

import pytest
import torch

from hf_favorpp.features.gerf import Nodes, feature_nodes
from hf_favorpp.features.pairs import divergence, real_tokens_first, sample_pairs
from hf_favorpp.features.preconditioning import Preconditioner, precondition
from hf_favorpp.features.statistics import sequence_statistics

F64 = torch.float64
BATCH, HEADS, LENGTH, DIM, FEATURES = 3, 2, 21, 5, 7
LENGTHS = torch.tensor([21, 13, 2])
MASK = torch.arange(LENGTH) < LENGTHS.unsqueeze(1)


def tokens(seed):
    return torch.randn(BATCH, HEADS, LENGTH, DIM, generator=torch.Generator().manual_seed(seed), dtype=F64)


def drawn(window=0, ends=(0, 0), change=None):
    generator = torch.Generator().manual_seed(5)
    return sample_pairs(tokens(0), tokens(1), MASK, change or Preconditioner(), window, ends, generator)


def nodes():
    generator = torch.Generator().manual_seed(2)
    shape = (HEADS, FEATURES, DIM)
    query, key = (torch.randn(shape, generator=generator, dtype=F64).requires_grad_() for _ in range(2))
    weights = torch.randn(shape[:2], generator=generator, dtype=F64).requires_grad_()
    return Nodes(query, key, weights)


def plain_divergence(sample, nodes):
    """One query at a time, with probabilities as they are defined."""
    terms = []
    for b, h, s in torch.cartesian_prod(*map(torch.arange, sample.x.shape[:3])).tolist():
        if not sample.query_mask[b, s]:
            continue
        exact, estimate = [], []
        for j in range(LENGTH):
            x, y, weight = sample.x[b, h, s], sample.y[b, h, j], sample.key_weight[b, h, j].exp()
            if not sample.near[b, s, j] and not sample.far[b, s, j]:
                continue
            exact.append(weight * (x @ y).exp())
            phi_x = (nodes.query[h] @ x - x @ x / 2).exp()
            phi_y = (nodes.key[h] @ y - y @ y / 2).exp()
            through = weight * (nodes.log_weights[h].exp() * phi_x * phi_y).sum()
            estimate.append(exact[-1] if sample.near[b, s, j] else through)
        p, q = (torch.stack(t) / torch.stack(t).sum() for t in (exact, estimate))
        terms.append((p * (p / q).log()).sum())
    return torch.stack(terms).mean()


@pytest.mark.parametrize(("window", "ends"), [(0, (0, 0)), (8, (0, 0)), (0, (2, 1)), (4, (1, 1)), (64, (0, 0))])
@pytest.mark.parametrize("preconditioning", ["none", "full"])
def test_divergence_and_its_gradients_equal_the_plain_form(preconditioning, window, ends):
    statistics = sequence_statistics(tokens(0), tokens(1), MASK, MASK, covariance=True)
    sample = drawn(window, ends, precondition(statistics, preconditioning))
    of, expected = nodes(), nodes()
    found, plain = divergence(sample, of), plain_divergence(sample, expected)
    torch.testing.assert_close(found, plain, rtol=1e-10, atol=1e-12)
    if window < LENGTH:
        found.backward()
        plain.backward()
        for name in Nodes._fields:
            torch.testing.assert_close(getattr(of, name).grad, getattr(expected, name).grad, rtol=1e-8, atol=1e-10)
    else:
        assert found == 0


def test_it_is_zero_where_the_estimate_is_exact_and_finite_where_it_is_hopeless():
    sample = drawn()
    with torch.no_grad():
        far = Nodes(*(t * 100 for t in nodes()))
    for dtype in (torch.float32, F64):
        narrow = sample._replace(**{name: getattr(sample, name).to(dtype) for name in ("x", "y", "key_weight")})
        assert torch.isfinite(divergence(narrow, Nodes(*(t.to(dtype) for t in far))))
    one = sample._replace(x=torch.zeros_like(sample.x), key_weight=torch.zeros_like(sample.key_weight))
    node = torch.zeros(HEADS, 1, DIM, dtype=F64)
    flat = one._replace(y=torch.nn.functional.normalize(one.y, dim=-1))  # keys of one norm: uniform both ways
    assert divergence(flat, Nodes(node, node, node[..., 0])).abs() < 1e-12


def test_queries_are_real_and_each_meets_every_real_key_once():
    for window, ends in ((0, (0, 0)), (8, (1, 1))):
        sample = drawn(window, ends)
        real = sample.query_mask.unsqueeze(-1) & MASK.unsqueeze(1)
        assert torch.equal(sample.near | sample.far, real)
        assert not (sample.near & sample.far).any()
        assert sample.query_mask.sum(1).tolist() == [8, 8, 2]  # as many as there are, 8 at most of short ones
    assert sample.near[0].sum(-1).min() == 6  # the last block, of 5, and the first token
    assert drawn().near.sum() == 0


def test_real_tokens_come_first_and_long_sequences_are_cut():
    holes = torch.rand(BATCH, LENGTH, generator=torch.Generator().manual_seed(3)) < 0.5
    x, y, mask = real_tokens_first(tokens(0), tokens(1), holes, 6)
    assert mask.shape == (BATCH, min(6, int(holes.sum(1).max())))
    for row in range(BATCH):
        count = min(6, int(holes[row].sum()))
        assert mask[row].tolist() == [rank < count for rank in range(mask.shape[1])]
        assert torch.equal(x[row, :, :count], tokens(0)[row][:, holes[row]][:, :count])
        assert torch.equal(y[row, :, :count], tokens(1)[row][:, holes[row]][:, :count])


def test_keys_with_nodes_of_their_own_share_what_does_not_depend_on_tokens():
    omega, omega_key = (tokens(seed)[0, :, :FEATURES] for seed in (3, 4))
    coefficient = torch.full((HEADS, DIM), -0.1, dtype=F64)
    both = feature_nodes("favor++", omega, omega_key, coefficient, None)
    squares = (-0.1 * (omega.square() + omega_key.square())).sum(-1)
    constant = DIM * torch.log1p(torch.tensor(0.4, dtype=F64)) / 2 - torch.tensor(FEATURES, dtype=F64).log()
    torch.testing.assert_close(both.log_weights, squares + constant)
    torch.testing.assert_close(both.key, 1.4**0.5 * omega_key)
