"""Positions of Transformer-XL beside features, against one number at a time in float64."""

import math

import pytest
import torch
from test_relative_keys import F64, MASKS, assert_close, mask_of, run

from hf_favorpp import favorpp_attention
from hf_favorpp.attention.relative_attention import relative_attention
from hf_favorpp.attention.relative_positions import FAR, NEAR, TransformerXL
from hf_favorpp.errors import InputError

FREQUENCIES = 3
SCALING = 0.7
NAMES = ("log_phi_q", "log_phi_k", "x", "y", "value", "query", "projection")


def sinusoids(distance):
    """Those of signed distances i - j."""
    angles = distance.unsqueeze(-1).to(F64) * 0.05 * 3.0 ** torch.arange(FREQUENCIES, dtype=F64)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)


def inputs(length, features=5, head_dim=4, value_dim=2, batch=2, heads=2):
    generator = torch.Generator().manual_seed(length)
    widths = (features, features, head_dim, head_dim, value_dim, head_dim)
    tensors = [torch.randn(batch, heads, length, width, generator=generator, dtype=F64) for width in widths]
    return [*tensors, torch.randn(heads * head_dim, 2 * FREQUENCIES, generator=generator, dtype=F64)]


def plain(log_phi_q, log_phi_k, x, y, value, query, projection, key_mask, window):
    """The logit of each query and each key, one query at a time, and a division."""
    batch, heads, length, _ = x.shape
    size = min(window or NEAR, length)
    rows = []
    for b in range(batch):
        real = [j for j in range(length) if key_mask is None or key_mask[b, j]]
        for h in range(heads):
            r = sinusoids(torch.arange(-length, length + 1)).to(x)
            of_distance = SCALING * query[b, h] @ projection.unflatten(0, (heads, -1))[h] @ r.mT
            for i in range(length):
                if i not in real:
                    rows.append(0 * value[b, h, i])
                    continue
                block = (i - real[0]) // size
                near = range(real[0] + (block - 1) * size, real[0] + (block + 2) * size)
                left, right = ([j for j in real if j not in near and (j > i) == after] for after in (False, True))
                span = real[-1] - real[0] + 1
                means = [far_mean(of_distance[i], i, keys, span, size) for keys in (left, right)]
                exact = (y[b, h, real] @ x[b, h, i] + of_distance[i, [length + i - j for j in real]]).exp()
                far = (log_phi_q[b, h, i] + log_phi_k[b, h, real]).exp().sum(-1)
                far = far * torch.stack([means[j > i] for j in real])
                weights = torch.where(torch.tensor([j in near for j in real]), exact, far)
                rows.append(weights @ value[b, h, real] / weights.sum())
    return torch.stack(rows).reshape(batch, heads, length, -1)


def far_mean(of_distance, i, keys, span, window):
    """The mean of exp(logit) over keys, where the middle of a cell of distances stands for all in it."""
    edges = [window + 1 + (span - 1 - window) * c // FAR for c in range(FAR + 1)]
    length, middles = len(of_distance) // 2, []
    for j in keys:
        (cell,) = (c for c in range(FAR) if edges[c] <= abs(i - j) < edges[c + 1])
        middle = (edges[cell] + edges[cell + 1] - 1) // 2
        middles.append(length + (middle if j < i else -middle))
    return of_distance[middles].exp().sum() / max(1, len(keys))


def fast(log_phi_q, log_phi_k, x, y, value, query, projection, key_mask, window):
    positions = TransformerXL(query, projection, sinusoids(torch.arange(x.shape[2])).to(x))
    of_distances = positions.of_distances(x, SCALING, key_mask, window)
    return relative_attention(log_phi_q, log_phi_k, x, y, value, key_mask, of_distances, (0, 0))


@pytest.mark.parametrize("kind", [mask for mask in MASKS if mask != "holes"])
@pytest.mark.parametrize(
    ("length", "window"), [(23, 3), (24, 4), (40, 1), (9, 4), (10, 5), (23, 23), (23, 99), (1, 2), (70, 33), (70, 0)]
)
def test_output_and_gradients_equal_the_plain_form(length, window, kind):
    tensors = inputs(length)
    mask = mask_of(kind, 2, length)
    expected = run(plain, tensors, mask, window, names=NAMES)
    assert_close(run(fast, tensors, mask, window, names=NAMES), expected, 1e-11)
    single = run(fast, [t.float() for t in tensors], mask, window, names=NAMES)
    assert all(t.dtype == torch.float32 for t in single.values())
    assert_close(single, expected, 1e-4)


def test_holes_in_a_mask_leave_all_finite():
    result = run(fast, inputs(40), mask_of("holes", 2, 40), 4, names=NAMES)
    assert all(torch.isfinite(t).all() for t in result.values())


def attended(length, **options):
    """Output of the library, and that of softmax with the logits of all pairs."""
    generator = torch.Generator().manual_seed(0)
    query, key, value, other = (torch.randn(1, 2, length, 8, generator=generator, dtype=F64) for _ in range(4))
    query, key = 0.5 * query, 0.5 * key
    projection = 0.15 * torch.randn(16, 2 * FREQUENCIES, generator=generator, dtype=F64)
    positions = TransformerXL(other, projection, sinusoids(torch.arange(length)))
    omega = torch.randn(2, 4000, 8, generator=generator, dtype=F64)
    options = {"preconditioning": "full", "relative_positions": positions, **options}
    out = favorpp_attention(query, key, value, omega, **options)
    r = sinusoids(torch.arange(length).unsqueeze(1) - torch.arange(length))
    bias = torch.einsum("bhid,hdf,ijf->bhij", other, projection.unflatten(0, (2, 8)), r) * 8**-0.5
    torch.testing.assert_close(positions.logits(query, 8**-0.5, length), bias)
    torch.testing.assert_close(positions.logits(query[:, :, 5:9], 8**-0.5, length, 5), bias[:, :, 5:9])
    return out, (query @ key.mT * 8**-0.5 + bias).softmax(-1) @ value


def test_nearby_it_is_softmax():
    for length, options in ((2 * NEAR, {}), (90, {"exact_window": 45})):
        out, exact = attended(length, **options)
        torch.testing.assert_close(out, exact)


def test_far_away_it_is_close_to_softmax_and_closer_with_a_larger_window():
    found = [attended(200, **options) for options in ({"exact_window": 8}, {"exact_window": 60})]
    errors = [float((out - exact).norm() / exact.norm()) for out, exact in found]
    assert 1e-3 < errors[1] < errors[0] < 0.4


def test_padding_and_what_it_holds_change_nothing():
    generator = torch.Generator().manual_seed(0)
    query, key, value, other = (torch.randn(2, 2, 90, 8, generator=generator) for _ in range(4))
    projection, omega = torch.randn(16, 2 * FREQUENCIES, generator=generator), torch.randn(2, 16, 8)
    mask = mask_of("right", 2, 90)
    real = int(mask[1].sum())
    table = sinusoids(torch.arange(90)).float()
    nowhere = other.masked_fill(~mask[:, None, :, None], math.nan).requires_grad_()
    options = {"preconditioning": "center", "exact_window": 8}
    out = favorpp_attention(
        query,
        key,
        value,
        omega,
        key_mask=mask,
        relative_positions=TransformerXL(nowhere, projection, table),
        **options,
    )
    alone = TransformerXL(other[1:, :, :real], projection, table[:real])
    rows = (t[1:, :, :real] for t in (query, key, value))
    torch.testing.assert_close(
        out[1:, :, :real], favorpp_attention(*rows, omega, relative_positions=alone, **options), rtol=1e-4, atol=1e-5
    )
    out[1:, :, :real].sum().backward()
    assert torch.isfinite(nowhere.grad).all()


def test_shapes_that_do_not_fit_are_refused():
    tensors = [torch.randn(1, 2, 6, 4) for _ in range(3)]
    positions = TransformerXL(tensors[0], torch.randn(8, 6), torch.randn(5, 6))
    with pytest.raises(InputError, match=r"sinusoids \(L, 2 F\), got .*\(5, 6\)"):
        favorpp_attention(*tensors, torch.randn(2, 8, 4), relative_positions=positions)
