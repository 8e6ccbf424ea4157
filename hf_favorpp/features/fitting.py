r"""Projections chosen for the data: a quadrature of greatest likelihood among many candidates.

Positive features estimate exp(x.y) by a sum over nodes, :func:`hf_favorpp.features.gerf.quadrature`. Nodes drawn at
random are spread over all directions; the queries and keys of a trained head use few of them. Here M nodes and their
weights are chosen from a larger draw so that the estimated attention is likely under the exact one:

.. math:: \max_b \; \sum_i \sum_j p_{ij} \log \hat p_{ij}(b), \qquad
          \hat p_{ij} = \frac{\hat K_{ij}}{E_i + \sum_{j'} \hat K_{ij'}}, \quad
          \hat K_{ij} = \sum_m e^{b_m} \phi_m(x_i) \phi_m(y_j)

with p the softmax attention and E_i what query i attends to exactly. Jensen's inequality below the first logarithm and
the tangent above the second give the multiplicative update b_m += log(u_m / w_m), which never lowers the objective and
has no step size; u_m and w_m are the attention that passes through node m by the exact and by the estimated weights.

Between the updates half of the nodes are drawn, and again half, until M are left: each with a probability proportional
to the attention u_m that it carries, and a weight divided by that probability. So the sum over nodes keeps its
expectation. Keeping the M heaviest instead cuts off the rare directions: it was a little better at M = 128 on a BERT
with 32 dimensions per head, but at M = 256 on 8 dimensions worse than no choice at all.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hf_favorpp.features.pairs import PairSample

STEPS_BETWEEN, LAST_STEPS = 8, 20


@torch.no_grad()
def fit_quadrature(
    samples: Sequence[PairSample],
    nodes: Tensor,
    log_weights: Tensor,
    num_features: int,
    generator: torch.Generator,
    reduce: Callable[[Tensor], Tensor] = lambda total: total,
) -> tuple[Tensor, Tensor]:
    """Choose M of N candidate nodes, and their weights, by the likelihood of the softmax attention.

    Args:
        samples: Pairs, the same heads in each.
        nodes: Candidates, (H, N, d), N >= M.
        log_weights: Where to start, (H, N), nats.
        num_features: M.
        generator: CPU generator of the choice, in the same state on all processes.
        reduce: Sums a tensor over all processes, each of which has samples of its own.

    Returns:
        The indices of the chosen candidates, (H, M), int64 ascending, and their log-weights, (H, M).
    """
    fits = [
        _fit_head(
            [_HeadSample.of(s, head) for s in samples], nodes[head], log_weights[head], num_features, generator, reduce
        )
        for head in range(nodes.shape[0])
    ]
    chosen, weights = zip(*fits, strict=True)
    return torch.stack(chosen), torch.stack(weights)


class _HeadSample(NamedTuple):
    """One head of a :class:`PairSample`, with the exact attention."""

    x: Tensor
    y: Tensor
    key_weight: Tensor
    probability: Tensor
    log_exact: Tensor
    far: Tensor

    @classmethod
    def of(cls, sample: PairSample, head: int) -> "_HeadSample":
        x, y, key_weight = sample.x[:, head], sample.y[:, head], sample.key_weight[:, head]
        logits = x @ y.mT + key_weight.unsqueeze(-2)
        seen = sample.near | sample.far
        probability = torch.softmax(logits.masked_fill(~seen, torch.finfo(logits.dtype).min), dim=-1)
        probability = probability.masked_fill(~(sample.far & sample.query_mask.unsqueeze(-1)), 0)
        log_exact = torch.logsumexp(logits.masked_fill(~sample.near, float("-inf")), dim=-1, keepdim=True)
        return cls(x, y, key_weight, probability, log_exact, sample.far & sample.query_mask.unsqueeze(-1))


def _fit_head(
    samples: Sequence[_HeadSample],
    nodes: Tensor,
    log_weights: Tensor,
    num_features: int,
    generator: torch.Generator,
    reduce: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    chosen = torch.arange(len(nodes), device=nodes.device)
    while True:
        last = len(chosen) <= num_features
        features = [_features(sample, nodes[chosen]) for sample in samples]
        for _ in range(LAST_STEPS if last else STEPS_BETWEEN):
            exact, estimated = torch.zeros_like(log_weights), torch.zeros_like(log_weights)
            for sample, (a, b) in zip(samples, features, strict=True):
                u, w = _attention_through_nodes(sample, a + log_weights, b)
                exact, estimated = exact + u, estimated + w
            exact, estimated = reduce(torch.stack((exact, estimated)))
            tiny = torch.finfo(exact.dtype).tiny
            log_weights = log_weights + exact.clamp(min=tiny).log() - estimated.clamp(min=tiny).log()
        if last:
            return chosen, log_weights
        kept, probability = draw_proportionally(exact, max(num_features, len(chosen) // 2), generator)
        chosen, log_weights = chosen[kept], (log_weights - probability.log())[kept]


def draw_proportionally(mass: Tensor, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw without replacement, each item with a probability proportional to its mass; where that exceeds 1, surely.

    Systematic sampling in random order: the number drawn is exact, and so is every probability.

    Args:
        mass: (N,), float, >= 0.
        count: How many to draw, 1 <= count <= N.
        generator: CPU generator.

    Returns:
        The indices of the drawn items, (count,), int64 ascending, and the probability of every item, (N,).
    """
    weight = mass.double().cpu().clamp(min=torch.finfo(mass.dtype).tiny)
    sure = torch.zeros_like(weight, dtype=torch.bool)
    while True:
        left = count - int(sure.sum())
        probability = torch.where(sure, 1.0, left * weight / weight.masked_fill(sure, 0).sum().clamp(min=1e-300))
        if not (more := (probability > 1) & ~sure).any():
            break
        sure |= more
    order = torch.randperm(len(weight), generator=generator)
    steps = probability[order].cumsum(0)
    steps[-1] = count  # whatever was rounded
    start = torch.rand((), generator=generator, dtype=torch.float64)
    ticks = torch.floor(steps + start)
    drawn = order[ticks > torch.cat((torch.floor(start).unsqueeze(0), ticks[:-1]))]
    return drawn[:count].sort().values.to(mass.device), probability.to(mass)


def _features(sample: _HeadSample, nodes: Tensor) -> tuple[Tensor, Tensor]:
    """Return the logarithms of phi(x) times what all keys hold of each node, (B, S, N), and the keys' shares of it."""
    log_phi = sample.y @ nodes.mT + (sample.key_weight - sample.y.square().sum(-1) / 2).unsqueeze(-1)
    log_phi = log_phi.masked_fill(~sample.far.any(-2).unsqueeze(-1), torch.finfo(log_phi.dtype).min)
    z = torch.logsumexp(log_phi, dim=-2, keepdim=True)
    log_phi_x = sample.x @ nodes.mT - sample.x.square().sum(-1, keepdim=True) / 2
    return log_phi_x + z, (log_phi - z).exp()


def _attention_through_nodes(sample: _HeadSample, logits: Tensor, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Return how much exact attention to far keys, and how much estimated attention, each node carries, (N,) both."""
    shift = torch.maximum(logits.amax(-1, keepdim=True), sample.log_exact)
    weights = (logits - shift).exp()
    estimate = (weights @ shares.mT).masked_fill(~sample.far, 0)
    total = estimate.sum(-1, keepdim=True) + (sample.log_exact - shift).exp()
    tiny = torch.finfo(total.dtype).tiny
    per_key = torch.cat((sample.probability / estimate.clamp(min=tiny), sample.far / total.clamp(min=tiny)), dim=-2)
    exact, estimated = (per_key @ shares).chunk(2, dim=-2)  # reading the shares takes the time
    return (weights * exact).sum((0, 1)), (weights * estimated).sum((0, 1))
