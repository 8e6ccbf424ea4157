"""Embeddings of clipped distances beside features, against one number at a time in float64; and their linear cost."""

import math

import pytest
import torch

from hf_favorpp import favorpp_attention
from hf_favorpp.attention.relative_attention import earlier_blocks, relative_attention
from hf_favorpp.attention.relative_keys import RelativeKeys
from hf_favorpp.errors import ConfigError, InputError

F64 = torch.float64
NAMES = ("log_phi_q", "log_phi_k", "x", "y", "value", "embedding")
MASKS = ("none", "right", "left", "holes", "empty row")


def plain_relative_keys(log_phi_q, log_phi_k, x, y, value, embedding, key_mask, left, window, ends):
    """The logit of each query and each key, one number at a time, and a division."""
    batch, heads, length, _ = x.shape
    right = len(embedding) - 1 - left
    window = min(max(window, left, right, 1), length)
    rows = []
    for b in range(batch):
        real = [j for j in range(length) if key_mask is None or key_mask[b, j]]
        for h in range(heads):
            for i in range(length):
                kernel = []
                for rank, j in enumerate(real if i in real else []):
                    blocks = abs(real.index(i) // window - rank // window)
                    if blocks <= 1 or rank < ends[0] or rank >= len(real) - ends[1]:
                        distance = min(max(j - i, -left), right)
                        kernel.append((x[b, h, i] @ (y[b, h, j] + embedding[distance + left])).exp())
                    else:
                        far = (log_phi_q[b, h, i] + log_phi_k[b, h, j]).exp().sum()
                        kernel.append(far * (x[b, h, i] @ embedding[0 if j < i else -1]).exp())
                weights = torch.stack(kernel) if kernel else None
                empty = weights is None or weights.sum() == 0
                rows.append(0 * value[b, h, i] if empty else weights @ value[b, h, real] / weights.sum())
    return torch.stack(rows).reshape(batch, heads, length, -1)


def inputs(length=23, features=5, head_dim=3, value_dim=4, distances=5, batch=2, heads=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    widths = (features, features, head_dim, head_dim, value_dim)
    tensors = [torch.randn(batch, heads, length, width, generator=generator, dtype=F64) for width in widths]
    return [*tensors, torch.randn(distances, head_dim, generator=generator, dtype=F64)]


def mask_of(kind, batch, length):
    if kind == "none":
        return None
    lengths = torch.tensor([length, length // 2 + 1])[:batch].unsqueeze(-1)
    ranks = torch.arange(length).expand(batch, -1)
    if kind == "left":
        return ranks >= length - lengths
    if kind == "holes":
        return torch.rand(batch, length, generator=torch.Generator().manual_seed(length)) < 0.6
    mask = ranks < lengths
    mask[-1] &= kind != "empty row"
    return mask


def fast(log_phi_q, log_phi_k, x, y, value, embedding, key_mask, left, window, ends):
    of_distances = RelativeKeys(embedding, left).of_distances(x, 1.0, key_mask, window)
    return relative_attention(log_phi_q, log_phi_k, x, y, value, key_mask, of_distances, ends)


def run(attend, tensors, key_mask, *options, names=NAMES):
    """Output at real queries and the gradients of all tensors for a random gradient there."""
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    out = attend(*leaves, key_mask, *options)
    assert torch.isfinite(out).all()
    if key_mask is not None:
        out = out * key_mask[:, None, :, None]
    gradient = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=F64)
    grads = torch.autograd.grad(out, leaves, gradient.to(out.dtype), materialize_grads=True)
    return {"output": out.detach(), **dict(zip(names, grads, strict=True))}


def assert_close(result, expected, tolerance):
    for name, tensor in result.items():
        assert torch.isfinite(tensor).all(), name
        error = (tensor.to(F64) - expected[name]).abs().max() / expected[name].abs().max().clamp(min=0.1)
        assert error <= tolerance, f"{name}: {error:.1e}"


@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(
    ("shape", "left", "window", "ends"),
    [
        ({}, 3, 0, (0, 0)),
        ({}, 0, 0, (0, 0)),  # distances to the right only
        ({}, 4, 5, (1, 1)),
        ({"length": 24, "distances": 3}, 1, 0, (2, 3)),  # 24 blocks
        ({"distances": 1, "features": 1}, 0, 0, (0, 0)),  # one embedding for all: blocks of one token
        ({"length": 6, "distances": 20}, 9, 0, (0, 0)),  # all is near
        ({"length": 1}, 2, 0, (1, 1)),
        ({"length": 9, "distances": 2, "value_dim": 1}, 1, 0, (7, 7)),  # the ends overlap
    ],
)
def test_output_and_gradients_equal_the_plain_form(shape, left, window, ends, kind):
    tensors = inputs(**shape)
    mask = mask_of(kind, *tensors[0].shape[::2])
    expected = run(plain_relative_keys, tensors, mask, left, window, ends)
    assert_close(run(fast, tensors, mask, left, window, ends), expected, 1e-11)
    single = run(fast, [t.float() for t in tensors], mask, left, window, ends)
    assert all(t.dtype == torch.float32 for t in single.values())
    assert_close(single, expected, 3e-5)


def test_earlier_blocks():
    z, S = torch.randn(1, 2, 7, 3, dtype=F64), torch.randn(1, 2, 7, 3, 2, dtype=F64)
    found = earlier_blocks((z, S))
    assert (found[0][:, :, 0] == -math.inf).all()
    assert (found[1][:, :, 0] == 0).all()
    for block in range(1, 7):
        before = z[:, :, :block]
        torch.testing.assert_close(found[0][:, :, block], before.logsumexp(2))
        mean = (before.softmax(2).unsqueeze(-1) * S[:, :, :block]).sum(2)
        torch.testing.assert_close(found[1][:, :, block], mean)


@pytest.mark.parametrize("preconditioning", ["none", "center", "diagonal", "full"])
@pytest.mark.parametrize("window", [0, 9])
def test_the_attention_tends_to_softmax_with_many_features(preconditioning, window):
    generator = torch.Generator().manual_seed(0)
    query, key, value = (0.7 * torch.randn(2, 2, 40, 4, generator=generator, dtype=F64) for _ in range(3))
    relative = RelativeKeys(torch.randn(6, 4, generator=generator, dtype=F64), 3)
    mask = mask_of("right", 2, 40)
    omega = torch.randn(2, 40_000, 4, generator=generator, dtype=F64)
    out = favorpp_attention(
        query,
        key,
        value,
        omega,
        key_mask=mask,
        preconditioning=preconditioning,
        exact_window=window,
        relative_positions=relative,
    )
    logits = query @ key.mT / 2 + relative.logits(query, 0.5, 40)
    exact = logits.masked_fill(~mask[:, None, None], -math.inf).softmax(-1) @ value
    error = (out - exact)[mask[:, None, :, None].expand_as(out)].norm() / exact.norm()
    assert error < 0.02
    without = favorpp_attention(query, key, value, omega, key_mask=mask, preconditioning=preconditioning)
    assert (without - exact).norm() / exact.norm() > 0.1


def test_padding_and_batch_mates_change_nothing():
    query, key, value = (t.float() for t in inputs(length=30, head_dim=4)[2:5])
    query, key, value = (t[..., :3] for t in (query, key, value))
    relative, omega = RelativeKeys(torch.randn(5, 3), 3), torch.randn(2, 8, 3)
    mask = mask_of("right", 2, 30)
    real = int(mask[1].sum())
    options = {"preconditioning": "center", "relative_positions": relative}
    out = favorpp_attention(
        query, key.masked_fill(~mask[:, None, :, None], math.nan), value, omega, key_mask=mask, **options
    )
    alone = favorpp_attention(*(t[1:, :, :real] for t in (query, key, value)), omega, **options)
    torch.testing.assert_close(out[1:, :, :real], alone)


def test_half_precision_and_float64_embedding():
    query, key, value = (t.bfloat16() for t in (torch.randn(1, 2, 20, 4) for _ in range(3)))
    out = favorpp_attention(
        query, key, value, torch.randn(2, 8, 4), relative_positions=RelativeKeys(torch.randn(5, 4, dtype=F64), 2)
    )
    assert out.dtype == torch.bfloat16
    assert torch.isfinite(out).all()


@pytest.mark.parametrize(
    ("error", "rule", "options"),
    [
        (ConfigError, "positive kernel", {"kernel": "trig"}),
        (ConfigError, "positive kernel", {"kernel": "relu"}),
        (InputError, "bidirectional", {"is_causal": True, "kernel": "favor+"}),
        (ConfigError, "takes no relative_positions", {"backend": "cpu"}),
        (InputError, r"embedding \(R, d\)", {"relative_positions": RelativeKeys(torch.zeros(5, 3), 2)}),
        (InputError, "left >= 0", {"relative_positions": RelativeKeys(torch.zeros(5, 4), 5)}),
    ],
)
def test_what_has_no_such_form_is_refused(error, rule, options):
    tensors = [torch.randn(1, 2, 6, 4) for _ in range(3)]
    options = {"relative_positions": RelativeKeys(torch.zeros(5, 4), 2)} | options
    with pytest.raises(error, match=rule):
        favorpp_attention(*tensors, torch.randn(2, 8, 4), **options)
